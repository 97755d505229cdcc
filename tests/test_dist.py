"What several ranks do together: real processes, started by torchrun, talking over gloo."
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nnodes=1']
HEAD = '''
import json, os, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from nanovlm_nb.dist import *
out = Path(sys.argv[1])
def report(**facts): (out/f"{os.environ['RANK']}.json").write_text(json.dumps(facts))
'''


def start(tmp_path: Path, root: Path, code: str, ranks: int = 2, timeout: float = 90) -> subprocess.CompletedProcess:
    "Run `code` on each of `ranks` processes; it may call `report(name=value)`."
    script = tmp_path/'job.py'
    script.write_text(HEAD + code)
    env = {**os.environ, 'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1'}
    return subprocess.run([*TORCHRUN, f'--nproc_per_node={ranks}', str(script), str(tmp_path)], env=env, text=True, capture_output=True, timeout=timeout)


def reports(tmp_path: Path) -> list[dict]:
    "What the ranks reported, by rank."
    return [json.loads(p.read_text()) for p in sorted(tmp_path.glob('?.json'))]


@pytest.fixture
def run(tmp_path, root):
    "Run code on ranks that must all end well; gives their reports."
    def _run(code, ranks=2):
        done = start(tmp_path, root, code, ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        return reports(tmp_path)
    return _run


def test_ranks_and_messages(run):
    facts = run('''
dist = init_dist('cpu', 60)
assert is_dist() and (get_rank(), get_world_size()) == (dist.rank, dist.world_size)
report(rank=dist.rank, local=dist.local_rank, master=[dist.is_master, is_master()], timeout=dist.timeout_s,
    gathered=dist.gather({'rank':dist.rank, 'name':'x'*dist.rank}), named=dist_gather({'rank':get_rank()}),
    mean=[dist.mean([1,3,5,7][dist.rank]), dist_mean_scalar([1,3,5,7][dist.rank])], sum=dist.sum(1), any=[dist.any(dist.rank==2), dist.any(False)],
    told=dist.broadcast(f'from {dist.rank}'))
destroy_dist(); destroy_dist()
assert not is_dist() and get_world_size() == 1
''', ranks=4)
    assert [f['rank'] for f in facts] == [f['local'] for f in facts] == [0, 1, 2, 3]
    assert [f['master'] for f in facts] == [[True, True]] + [[False, False]]*3
    for f in facts:
        assert f['gathered'] == [{'rank': r, 'name': 'x'*r} for r in range(4)]
        assert f['named'] == [{'rank': r} for r in range(4)]
        assert f['mean'] == [4.0, 4.0] and f['sum'] == 4 and f['any'] == [True, False]
        assert f['told'] == 'from 0' and f['timeout'] == 60


def test_mean_of_1_and_3_is_2_over_the_cpu_group(run):
    facts = run('''
import torch.distributed as c10d
dist = init_dist('cpu')
used, gather = [], c10d.all_gather_object
def spy(out, obj, group=None): used.append(group); return gather(out, obj, group=group)
c10d.all_gather_object = spy
mean = dist.mean([1,3][dist.rank])
report(mean=mean, cpu_group=[g is dist.cpu_group for g in used], other=dist.cpu_group is not c10d.group.WORLD, kind=c10d.get_backend(dist.cpu_group))
destroy_dist()
''')
    assert facts == [dict(mean=2.0, cpu_group=[True], other=True, kind='gloo')]*2


def test_barrier_waits_for_the_slow_rank(run):
    facts = run('''
dist = init_dist('cpu')
dist.barrier()
if dist.rank == 1: time.sleep(1)
arrived = time.time()
dist.barrier()
report(arrived=arrived, left=time.time())
destroy_dist()
''')
    assert min(f['left'] for f in facts) >= max(f['arrived'] for f in facts)
    assert facts[0]['left'] - facts[0]['arrived'] > .5


def test_uneven_loaders_end_together(run):
    facts = run('''
dist = init_dist('cpu', 30)
loader = [[i] for i in range([5,7][dist.rank])]
if dist.rank == 0: loader.insert(2, None)
report(seen=[b[0] for b in synchronized_dataloader_step(loader, dist)])
dist.barrier()
destroy_dist()
''')
    assert [f['seen'] for f in facts] == [[0, 1, 2, 3, 4]]*2


def test_ddp_averages_gradients_and_unwraps(run):
    facts = run('''
from torch import nn
dist = init_dist('cpu')
set_seed(dist.rank) # unequal on purpose: DDP makes the weights equal
base = nn.Linear(3, 1, bias=False)
model = wrap_model(base, dist)
x = torch.full((1,3), float(1+2*dist.rank)) # gradient 1 on rank 0, 3 on rank 1
model(x).sum().backward()
report(grad=base.weight.grad.tolist(), weight=base.weight.tolist(), inner=unwrap_model(model) is base, keys=list(unwrap_model(model).state_dict()))
destroy_dist()
''')
    assert facts[0] == facts[1]
    assert facts[0]['grad'] == [[2.0, 2.0, 2.0]] and facts[0]['inner'] and facts[0]['keys'] == ['weight']


def test_no_sync_exchanges_once_per_update(run):
    facts = run('''
from torch import nn
import torch.distributed as c10d
dist = init_dist('cpu')
base = nn.Linear(3, 1)
model = wrap_model(base, dist)
n = []
def count(state, bucket):
    n.append(1)
    work = c10d.all_reduce(bucket.buffer()/dist.world_size, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])
model.register_comm_hook(None, count)
updates, accumulation = 3, 4
for u in range(updates):
    model.zero_grad()
    for i in range(accumulation):
        with no_sync(model, active=i < accumulation-1): model(torch.full((1,3), float(dist.rank+i))).sum().backward()
report(exchanges=len(n), grad=base.weight.grad.tolist())
destroy_dist()
''')
    assert [f['exchanges'] for f in facts] == [3, 3]
    assert facts[0]['grad'] == facts[1]['grad'] == [[8.0, 8.0, 8.0]]  # (0+1+2+3 + 1+2+3+4) / 2


def test_all_take_part_and_one_writes(run, tmp_path):
    run('''
dist = init_dist('cpu')
for step in range(3):
    losses = dist.gather(step + dist.rank)
    if dist.is_master:
        with open(out/'log.txt', 'a') as f: f.write(f'{losses}\\n')
dist.barrier()
report()
destroy_dist()
''', ranks=4)
    assert (tmp_path/'log.txt').read_text().splitlines() == [str([s+r for r in range(4)]) for s in range(3)]


@pytest.mark.parametrize('call', ['dist.gather(1)', 'dist.barrier()', 'dist.broadcast(1)'])
def test_a_missing_rank_is_an_error_that_names_the_timeout(tmp_path, root, call):
    "Rank 1 leaves out a call; the others must not wait longer than the timeout."
    begun = time.monotonic()
    done = start(tmp_path, root, f'''
dist = init_dist('cpu', 3)
if dist.rank == {0 if 'broadcast' in call else 1}: time.sleep(8)
else:
    try: {call}
    except RuntimeError as e: report(error=str(e))
''')
    assert time.monotonic() - begun < 60, done.stderr
    (fact,) = reports(tmp_path)
    name = call.split('.')[1].split('(')[0]
    assert f'`{name}` failed, its timeout is 3 s' in fact['error'] and 'of 2' in fact['error']
    if name == 'barrier': assert 'Ranks 1 failed' in fact['error']


def test_a_rank_that_never_starts_is_named_by_init_dist(tmp_path, root):
    code = HEAD + "init_dist('cpu', 2)"
    env = {**os.environ, 'PYTHONPATH': str(root), 'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0'}
    done = subprocess.run([sys.executable, '-c', code, str(tmp_path)], env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert 'rank 0 of 2: `init_dist` failed, its timeout is 2 s' in done.stderr


def test_two_nodes_of_one_process(tmp_path, root):
    "Two torchrun agents meet as if they were two machines."
    import socket
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    script = tmp_path/'job.py'
    script.write_text(HEAD + '''
dist = init_dist('cpu', 60)
report(local=dist.local_rank, world=dist.world_size, ranks=dist.gather(dist.rank))
destroy_dist()
''')
    env = {**os.environ, 'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1'}
    base = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc_per_node=1', '--master_addr=127.0.0.1', f'--master_port={port}']
    jobs = [subprocess.Popen([*base, f'--node_rank={n}', str(script), str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True) for n in range(2)]
    for j in jobs:
        _, err = j.communicate(timeout=90)
        assert j.returncode == 0, err[-3000:]
    assert reports(tmp_path) == [dict(local=0, world=2, ranks=[0, 1])]*2


def test_loader_workers_have_repeatable_streams_of_their_own(tmp_path, root):
    code = '''
import json, random
import numpy, torch
from torch.utils.data import DataLoader, Dataset
from nanovlm_nb.dist import seed_worker, set_seed

class Draws(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return [random.random(), float(numpy.random.rand())]

def epoch():
    set_seed(0)
    return [tuple(x) for b in DataLoader(Draws(), 4, num_workers=2, worker_init_fn=seed_worker, collate_fn=list) for x in b]

if __name__ == '__main__': print(json.dumps([epoch(), epoch()]))
'''
    script = tmp_path/'draws.py'
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], env={**os.environ, 'PYTHONPATH': str(root)}, text=True, capture_output=True, timeout=90)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first == second
    assert len({tuple(x) for x in first}) == 8
