"Runs that are killed, signalled and started again by torchrun; what the job files start."

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml
from cluster import free_ports
from commands import (
    TINY,
    environment,
    ranks_of,
    record,
    start_of,
    train,
    updates,
    wait_for,
)

from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.runs.ending import INTERRUPTED

SMALL = [
    *TINY,
    '--ask_samples',
    '0',
    '--dtype',
    'float32',
    '--save_interval',
    '2',
    '--eval_interval',
    '8',
    '--max_training_steps',
    '16',
    '--batch_size',
    '1',
]
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run']
SIGNALS = ['--signals-to-handle', 'SIGTERM,SIGINT,SIGUSR1']


def start(cwd, *command, fresh=False):
    "Start a command in a session of its own."
    args, env = (
        ([str(c) for c in command], environment()) if fresh else start_of(command)
    )
    return subprocess.Popen(
        args,
        cwd=cwd,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=open(cwd / 'stderr', 'ab'),
        start_new_session=True,
    )


def ended(process, cwd, code=0):
    "Wait for the end of a process."
    assert process.wait(timeout=300) == code, (cwd / 'stderr').read_text()[-4000:]


def the_run(cwd):
    "The only run directory, or one that is not there."
    return next((cwd / 'checkpoints').glob('*'), cwd / 'none')


def kill_rank(process, cwd, rank, after):
    "SIGKILL a rank after some updates."
    assert wait_for(process, lambda: len(updates(the_run(cwd))) >= after), (
        cwd / 'stderr'
    ).read_text()[-4000:]
    for pid in ranks_of(cwd, rank):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "The same run on two ranks, undisturbed."
    cwd = tmp_path_factory.mktemp('whole')
    train([*SMALL, '--run_name', 'whole'], cwd, ranks=2)
    return record(cwd / 'checkpoints' / 'whole')


@pytest.mark.slow
def test_a_killed_rank_comes_back(whole, tmp_path):
    "Two kills: torchrun starts the ranks again, and they go on in the directory of the name."
    process = start(
        tmp_path,
        *TORCHRUN,
        '--standalone',
        '--nproc-per-node',
        2,
        '--max-restarts',
        2,
        '-m',
        'nanovlm_nb.train',
        *SMALL,
        '--run_name',
        'back',
        '--resume',
        'True',
    )
    for rank, after in ((1, 5), (0, 9)):
        kill_rank(process, tmp_path, rank, after)
    ended(process, tmp_path)
    run = the_run(tmp_path)
    assert (run / 'train.log').read_text().count('Auto resumed from') == 2
    assert record(run) == whole


def test_two_nodes_and_a_killed_rank(whole, tmp_path, monkeypatch):
    "Two agents as if on two machines, with the switch of the job files: only one counts the restart, the ranks meet again all the same and find their run."
    monkeypatch.setenv('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', '1')
    agent = [
        *TORCHRUN,
        '--nnodes',
        2,
        '--nproc-per-node',
        1,
        '--rdzv-backend',
        'c10d',
        '--rdzv-endpoint',
        f'127.0.0.1:{free_ports(1)[0]}',
        '--rdzv-id',
        'job',
        '--max-restarts',
        2,
        '-m',
        'nanovlm_nb.train',
        *SMALL,
        '--run_name',
        'back',
        '--resume',
        'True',
    ]
    agents = [start(tmp_path, *agent) for _ in range(2)]
    kill_rank(agents[0], tmp_path, 1, 5)
    for a in agents:
        ended(a, tmp_path)
    run = the_run(tmp_path)
    assert 'Auto resumed from' in (run / 'train.log').read_text()
    assert record(run) == whole


@pytest.mark.parametrize(
    'how', [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_signals_to_torchrun(whole, tmp_path, how):
    "A signal, another while the checkpoint is written: saved, said, and the same command goes on."
    command = [
        *TORCHRUN,
        '--standalone',
        '--nproc-per-node',
        2,
        *SIGNALS,
        '-m',
        'nanovlm_nb.train',
        *SMALL,
        '--run_name',
        'told',
        '--resume',
        'True',
    ]
    process = start(tmp_path, *command)
    run = tmp_path / 'checkpoints' / 'told'
    assert wait_for(process, lambda: len(updates(run)) >= 3)
    pids = ranks_of(tmp_path, 0) + ranks_of(tmp_path, 1)
    os.kill(process.pid, how)
    wait_for(process, lambda: any(run.glob('step_*.tmp')), 5)
    for pid in pids:
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            pass  # it has ended already
    ended(process, tmp_path, 1)
    assert (run / 'status').read_text() == 'interrupted\n' and (
        run / 'last_checkpoint'
    ).read_text() == f'step_{len(updates(run))}\n'
    ended(start(tmp_path, *command), tmp_path)
    assert record(run) == whole


def test_exit_code_of_one_process(tmp_path):
    "Told to stop while training, and before it has begun."
    command = [
        sys.executable,
        '-m',
        'nanovlm_nb.train',
        *SMALL,
        '--run_name',
        'one',
        '--max_training_steps',
        500,
        '--resume',
        'True',
    ]
    run = tmp_path / 'checkpoints' / 'one'
    for reached in (
        lambda: len(updates(run)) >= 3,
        lambda: (
            (run / 'status').exists() and (run / 'status').read_text() == 'running\n'
        ),
    ):
        process = start(tmp_path, *command)
        assert wait_for(process, reached)
        process.send_signal(signal.SIGUSR1)
        ended(process, tmp_path, INTERRUPTED)
        assert (run / 'status').read_text() == 'interrupted\n'
    process = start(tmp_path, *command, fresh=True)
    time.sleep(0.5)  # importing: nothing is there yet that could be saved
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) in (-signal.SIGTERM, INTERRUPTED)


def from_slurm(root):
    "The command of train.slurm, without srun."
    text = (root / 'slurm' / 'train.slurm').read_text().replace('\\\n', ' ')
    return (
        next(line for line in text.splitlines() if line.startswith('srun '))
        .partition('python ')[2]
        .rstrip(' &')
    )


def from_kubernetes(root):
    "The command of the pods."
    replicas = yaml.safe_load((root / 'slurm' / 'kubernetes.yaml').read_text())['spec'][
        'pytorchReplicaSpecs'
    ]
    assert replicas['Master'] == replicas['Worker']
    pod = replicas['Master']['template']['spec']['containers'][0]
    assert pod['command'][0] == 'python'
    return shlex.join(pod['command'][1:] + pod['args'])


def from_skypilot(root):
    "The command of a node."
    run = yaml.safe_load((root / 'slurm' / 'skypilot.yaml').read_text())['run'].replace(
        '\\\n', ' '
    )
    return run.splitlines()[-1].strip().partition('python ')[2]


@pytest.mark.parametrize('command', [from_slurm, from_kubernetes, from_skypilot])
def test_job_files_start_the_same_command(root, command):
    "torchrun and nanovlm train understand it; signals, shutdown, name and resume are the same everywhere."
    from torch.distributed.run import parse_args as torchrun_args

    values = {
        '$SLURM_NNODES': '2',
        '$ranks': '8',
        '$SKYPILOT_NUM_NODES': '2',
        '$SKYPILOT_NUM_GPUS_PER_NODE': '8',
        '$SKYPILOT_NODE_RANK': '1',
        '${MAX_RESTARTS:-0}': '2',
        '${SHUTDOWN_S:-90}': '90',
    }
    words = [values.get(w, w) for w in shlex.split(command(root)) if w != '$@']
    assert words[:2] == ['-m', 'torch.distributed.run']
    args = torchrun_args(words[2:])
    assert (
        args.training_script,
        args.module,
        args.signals_to_handle,
        args.shutdown_timeout,
        args.max_restarts,
    ) == ('nanovlm_nb.train', True, 'SIGTERM,SIGINT,SIGUSR1', 90, 2)
    vlm_cfg, train_cfg, _ = parse_args(args.training_script_args)
    assert (
        vlm_cfg.vlm_checkpoint_path.endswith('checkpoints')
        and train_cfg.run_name
        and train_cfg.resume
    )
