"What several ranks do together: real processes, started by torchrun, talking over gloo."
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import start_of

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nnodes=1']
HEAD = '''
import json, os, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from nanovlm_nb.core.dist import *
out = Path(sys.argv[1])
def report(**facts): (out/f"{os.environ['RANK']}.json").write_text(json.dumps(facts))
'''


def start(tmp_path: Path, root: Path, code: str, ranks: int = 2, timeout: float = 90) -> subprocess.CompletedProcess:
    "Run `code` on each of `ranks` processes; it may call `report(name=value)`."
    script = tmp_path/'job.py'
    script.write_text(HEAD + code)
    args, env = start_of([*TORCHRUN, f'--nproc_per_node={ranks}', script, tmp_path], dict(PYTHONPATH=str(root)))
    return subprocess.run(args, env=env, text=True, capture_output=True, timeout=timeout)


def reports(tmp_path: Path) -> list[dict]:
    "What the ranks reported, by rank."
    return [json.loads(p.read_text()) for p in sorted(tmp_path.glob('?.json'))]


def run(tmp_path: Path, root: Path, code: str, ranks: int) -> list[dict]:
    "Run code on ranks that must all end well; gives their reports."
    done = start(tmp_path, root, code, ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return reports(tmp_path)


def test_four_ranks_and_their_messages(tmp_path, root):
    facts = run(tmp_path, root, '''
dist = init_dist('cpu', 60)
assert is_dist() and (get_rank(), get_world_size()) == (dist.rank, dist.world_size)
for step in range(3): # all take part, one writes
    losses = dist.gather(step + dist.rank)
    if dist.is_master:
        with open(out/'log.txt', 'a') as f: f.write(f'{losses}\\n')
dist.barrier()
report(rank=dist.rank, local=dist.local_rank, master=[dist.is_master, is_master()], timeout=dist.timeout_s,
    gathered=dist.gather({'rank':dist.rank, 'name':'x'*dist.rank}), named=dist_gather({'rank':get_rank()}),
    mean=[dist.mean([1,3,5,7][dist.rank]), dist_mean_scalar([1,3,5,7][dist.rank])], sum=dist.sum(1), any=[dist.any(dist.rank==2), dist.any(False)],
    told=dist.broadcast(f'from {dist.rank}'))
destroy_dist(); destroy_dist()
assert not is_dist() and get_world_size() == 1
''', 4)
    assert [f['rank'] for f in facts] == [f['local'] for f in facts] == [0, 1, 2, 3]
    assert [f['master'] for f in facts] == [[True, True]] + [[False, False]]*3
    for f in facts:
        assert f['gathered'] == [{'rank': r, 'name': 'x'*r} for r in range(4)]
        assert f['named'] == [{'rank': r} for r in range(4)]
        assert f['mean'] == [4.0, 4.0] and f['sum'] == 4 and f['any'] == [True, False]
        assert f['told'] == 'from 0' and f['timeout'] == 60
    assert (tmp_path/'log.txt').read_text().splitlines() == [str([s+r for r in range(4)]) for s in range(3)]


@pytest.fixture(scope='module')
def pair(tmp_path_factory, root):
    "What two ranks report after doing all that ranks do together: starting processes is slow, so they do it once."
    return run(tmp_path_factory.mktemp('pair'), root, '''
import torch.distributed as c10d
from torch import nn
dist = init_dist('cpu', 30)

# a number over the group for messages
used, gather = [], c10d.all_gather_object
def spy(result, obj, group=None): used.append(group); return gather(result, obj, group=group)
c10d.all_gather_object = spy
mean = dist.mean([1,3][dist.rank])
c10d.all_gather_object = gather
own_group = [[g is dist.cpu_group for g in used], dist.cpu_group is not c10d.group.WORLD, c10d.get_backend(dist.cpu_group)]

# a slow rank
if dist.rank == 1: time.sleep(1)
arrived = time.time()
dist.barrier()
left = time.time()

# loaders of 5 and 7 batches, one of them with a hole
loader = [[i] for i in range([5,7][dist.rank])]
if dist.rank == 0: loader.insert(2, None)
seen = [b[0] for b in synchronized_dataloader_step(loader, dist)]

# gradients: 1 on rank 0, 3 on rank 1; the weights are unequal on purpose, DDP makes them equal
set_seed(dist.rank)
base = nn.Linear(3, 1, bias=False)
model = wrap_model(base, dist)
model(torch.full((1,3), float(1+2*dist.rank))).sum().backward()
ddp = dict(grad=base.weight.grad.tolist(), weight=base.weight.tolist(), inner=unwrap_model(model) is base, keys=list(unwrap_model(model).state_dict()))

# accumulation: how often gradients are exchanged
exchanges = []
def count(state, bucket):
    exchanges.append(1)
    return c10d.all_reduce(bucket.buffer()/dist.world_size, async_op=True).get_future().then(lambda f: f.value()[0])
model.register_comm_hook(None, count)
for update in range(3):
    model.zero_grad()
    for i in range(4):
        with no_sync(model, active=i < 3): model(torch.full((1,3), float(dist.rank+i))).sum().backward()

report(mean=mean, own_group=own_group, arrived=arrived, left=left, seen=seen, ddp=ddp, exchanges=len(exchanges), accumulated=base.weight.grad.tolist())
dist.barrier()
destroy_dist()
''', 2)


def test_mean_of_1_and_3_is_2_over_the_cpu_group(pair):
    assert [f['mean'] for f in pair] == [2.0, 2.0]
    assert [f['own_group'] for f in pair] == [[[True], True, 'gloo']]*2


def test_barrier_waits_for_the_slow_rank(pair):
    assert min(f['left'] for f in pair) >= max(f['arrived'] for f in pair)


def test_uneven_loaders_end_together(pair):
    assert [f['seen'] for f in pair] == [[0, 1, 2, 3, 4]]*2


def test_ddp_averages_gradients_and_unwraps(pair):
    assert pair[0]['ddp'] == pair[1]['ddp']
    assert pair[0]['ddp']['grad'] == [[2.0, 2.0, 2.0]] and pair[0]['ddp']['inner'] and pair[0]['ddp']['keys'] == ['weight']


def test_no_sync_exchanges_once_per_update(pair):
    assert [f['exchanges'] for f in pair] == [3, 3]
    assert [f['accumulated'] for f in pair] == [[[8.0, 8.0, 8.0]]]*2  # (0+1+2+3 + 1+2+3+4) / 2


@pytest.mark.parametrize('call', ['dist.gather(1)', 'dist.barrier()'])
def test_a_missing_rank_is_an_error_that_names_the_timeout(tmp_path, root, call):
    "Rank 1 leaves out a call; the others must not wait longer than the timeout."
    begun = time.monotonic()
    done = start(tmp_path, root, f'''
from dataclasses import replace
from datetime import timedelta
import torch.distributed as c10d
dist = init_dist('cpu', 60) # long, since processes may start slowly; then a group with little patience
dist = replace(dist, cpu_group=c10d.new_group(backend='gloo', timeout=timedelta(seconds=2)), timeout_s=2)
if dist.rank == 1: time.sleep(5)
else:
    try: {call}
    except RuntimeError as e: report(error=str(e))
''')
    assert time.monotonic() - begun < 60, done.stderr
    (fact,) = reports(tmp_path)
    name = call.split('.')[1].split('(')[0]
    assert f'`{name}` failed, its timeout is 2 s' in fact['error'] and 'of 2' in fact['error']
    if name == 'barrier': assert 'Ranks 1 failed' in fact['error']


def test_a_rank_that_never_starts_is_named_by_init_dist(tmp_path, root):
    code = HEAD + "init_dist('cpu', 2)"
    env = {**os.environ, 'PYTHONPATH': str(root), 'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0'}
    done = subprocess.run([sys.executable, '-c', code, str(tmp_path)], env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert 'rank 0 of 2: `init_dist` failed, its timeout is 2 s' in done.stderr


def test_two_nodes_of_one_process(tmp_path, root):
    "Two torchrun agents meet as if they were two machines."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    script = tmp_path/'job.py'
    script.write_text(HEAD + '''
dist = init_dist('cpu', 60)
report(local=dist.local_rank, world=dist.world_size, ranks=dist.gather(dist.rank))
destroy_dist()
''')
    base, env = start_of([sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc_per_node=1', '--master_addr=127.0.0.1', f'--master_port={port}'], dict(PYTHONPATH=str(root)))
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
from nanovlm_nb.core.dist import seed_worker, set_seed

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
