"What only torchrun can show; what ranks do together is shown with forked ranks in the notebook of dist."
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from commands import start_of

HEAD = '''
import json, os, sys
from pathlib import Path
import torch.distributed as c10d
from nanovlm_nb.core.dist import *
def report(**facts): (Path(sys.argv[1])/f"{os.environ['RANK']}.json").write_text(json.dumps(facts))
'''
JOB = HEAD + '''
dist = init_dist('cpu', 60)
assert is_dist() and (get_rank(), get_world_size(), dist.timeout_s) == (dist.rank, dist.world_size, 60)
used, gather = [], c10d.all_gather_object
def spy(result, obj, group=None):
    used.append(group is dist.cpu_group)
    return gather(result, obj, group=group)
c10d.all_gather_object = spy
said = dict(gathered=dist.gather({'rank':dist.rank}), total=dist.sum(2*dist.rank), told=dist.broadcast(f'from {dist.rank}'), any=[dist.any(dist.rank==1), dist.any(False)])
c10d.all_gather_object = gather
assert used == [True]*5 and dist.cpu_group is not c10d.group.WORLD and c10d.get_backend(dist.cpu_group) == 'gloo'
report(rank=dist.rank, local=dist.local_rank, master=[dist.is_master, is_master()], named=[dist_gather(get_rank()), dist_mean_scalar(2*get_rank())], **said)
dist.barrier()
destroy_dist(); destroy_dist()
assert not is_dist() and get_world_size() == 1
'''


def started(tmp_path: Path, root: Path, *launches: list) -> list[dict]:
    "What the ranks of a job report, by rank; the job is started by one torchrun, or by one on each of several machines."
    (tmp_path/'job.py').write_text(JOB)
    jobs = []
    for launch in launches:
        args, env = start_of([sys.executable, '-m', 'torch.distributed.run', *launch, tmp_path/'job.py', tmp_path], dict(PYTHONPATH=str(root)))
        jobs.append(subprocess.Popen(args, env=env, stderr=subprocess.PIPE, text=True))
    for job in jobs:
        _, err = job.communicate(timeout=90)
        assert job.returncode == 0, err[-3000:]
    return [json.loads(p.read_text()) for p in sorted(tmp_path.glob('?.json'))]


def as_ranks(local: list[int]) -> list[dict]:
    "What they should report."
    n = len(local)
    return [dict(rank=r, local=l, master=[r == 0]*2, gathered=[dict(rank=i) for i in range(n)], total=n*(n-1), told='from 0', any=[True, False], named=[[*range(n)], n-1.])
            for r, l in enumerate(local)]


def test_four_ranks_and_their_messages(tmp_path, root):
    assert started(tmp_path, root, ['--standalone', '--nproc_per_node=4']) == as_ranks([0, 1, 2, 3])


def test_two_nodes_of_one_process(tmp_path, root):
    "Two torchrun agents meet as if they were two machines."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    nodes = [['--nnodes=2', '--nproc_per_node=1', '--master_addr=127.0.0.1', f'--master_port={port}', f'--node_rank={n}'] for n in range(2)]
    assert started(tmp_path, root, *nodes) == as_ranks([0, 0])


def test_a_rank_that_never_starts_is_named_by_init_dist(root):
    env = {**os.environ, 'PYTHONPATH': str(root), 'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0'}
    done = subprocess.run([sys.executable, '-c', HEAD+"init_dist('cpu', 2)"], env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1 and 'rank 0 of 2: `init_dist` failed, its timeout is 2 s' in done.stderr
