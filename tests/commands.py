"Running the project's commands as a user does: own processes, real torchrun."

import hashlib
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from warm import Warm

from nanovlm_nb.core.config import preset, tiny

VLM, _ = tiny()

#: what makes the model of a preset small
SIZES = {
    name: getattr(VLM, name)
    for name in sorted(
        {
            n
            for n, v in vars(VLM).items()
            if v != getattr(preset('shapes')[0], n)
            and n in preset('shapes')[0].to_dict()
        }
        | {'vit_n_blocks'}
    )
}

#: a model and a run small enough for a test
TINY = [word for name, value in SIZES.items() for word in (f'--{name}', str(value))] + (
    '--data_cutoff_idx 200 --val_size 16 --num_of_sequences 8 --num_workers 0 --val_workers 0 --batch_size 2 --gradient_accumulation_steps 2 '
    '--max_training_steps 6 --eval_interval 3 --max_val_batches 2 --stats_log_interval 2 --progress_bar False'
).split()

#: the same for four updates, each checkpoint kept
SHORT = [
    *TINY,
    *'''--data_cutoff_idx 60 --val_size 8 --num_of_sequences 4 --max_training_steps 4 --eval_interval 4 --save_interval 2
    --max_val_batches 1 --ask_samples 0 --max_keep_ckpts -1 --dtype float32'''.split(),
]

#: figures that no interruption of a run changes: their names, and how their names begin
FIGURES = (
    'step',
    'batch_loss',
    'grad_norm',
    'batch_digest',
    'val_loss',
    'epoch_loss',
    'samples',
    'epoch',
)
FAMILIES = ('lr_', 'eval/', 'best_', 'mine/')

#: the variable that tells workers of xdist where the warm python is
SHARED_WARM = 'NANOVLM_WARM_PYTHON'


def environment(**more):
    "One thread a process; wandb offline, quiet, and not tied to a wandb service of this process."
    return {k: v for k, v in os.environ.items() if not k.startswith('WANDB')} | dict(
        OMP_NUM_THREADS='1',
        WANDB_MODE='offline',
        WANDB_SILENT='true',
        HF_HUB_OFFLINE='1',
        **more,
    )


@cache
def warm():
    "The warm python of these tests, see warm.py; conftest.py closes it. Workers of xdist share the one of the process that has started them."
    shared = os.environ.get(SHARED_WARM)
    return (
        SimpleNamespace(python=shared, close=lambda: None)
        if shared
        else Warm(environment())
    )


def start_of(args, env={}):
    """A command and its environment so that a warm python runs it, and the ranks that torchrun starts: for `subprocess`.

    `kill` and `killpg` reach a command of one process as they would a real one. Ranks are not of torchrun's process group."""
    args = [str(a) for a in args]
    name = Path(args[0])
    if name.parent != Path(sys.executable).parent or set(env) - {'PYTHONPATH', 'PATH'}:
        return args, environment(**env)
    own = (
        [] if name == Path(sys.executable) else [str(name)]
    )  # a script that pip has installed
    return [warm().python, *own, *args[1:]], environment(
        PYTHON_EXEC=warm().python, **env
    )


def run(args, cwd, timeout=240, check=True, fresh=False, **env):
    """Run a command; its output is in the error when it fails.

    A python is taken warm (see warm.py): that saves eight seconds of CPU for each process. `fresh=True` starts it from nothing:
    where memory or imports are looked at, where processes are killed by number, and for one of two runs that must be equal
    (warm ones share the seed of Python's hashes)."""
    args, env = (
        ([str(a) for a in args], environment(**env)) if fresh else start_of(args, env)
    )
    done = subprocess.run(
        args, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )
    if check and done.returncode:
        raise AssertionError(
            f'{args} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}'
        )
    return done


def ranks_of(cwd, rank):
    "Numbers of the processes that are a rank, started warm in a folder."
    found = []
    for p in Path('/proc').glob('[0-9]*'):
        try:
            name, at = (p / 'comm').read_text().strip(), os.readlink(p / 'cwd')
        except OSError:
            continue
        if (name, at) == (f'rank {rank}', str(cwd)):
            found.append(int(p.name))
    return found


def nanovlm(args, cwd, **kw):
    "`nanovlm COMMAND ...`; takes what `run` takes. As a module it needs no script that pip has installed."
    return run([sys.executable, '-m', 'nanovlm_nb.cli', *args], cwd, **kw)


def train(args, cwd, ranks=1, **kw):
    "`nanovlm train`, or the same module under torchrun when there are several ranks; takes what `run` takes."
    launch = (
        ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', ranks]
        if ranks > 1
        else []
    )
    return run([sys.executable, *launch, '-m', 'nanovlm_nb.train', *args], cwd, **kw)


def wait_for(process, reached, timeout=300):
    "Wait until something is so, or the process has ended; True: it is so."
    end = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < end:
        if reached():
            return True
        time.sleep(0.01)
    if process.poll() is None:
        raise TimeoutError('the run hangs')
    return False


def log_of(run):
    "Lines of a run's log; one that is still being written is none."
    log = Path(run) / 'log.jsonl'
    return (
        [
            json.loads(line)
            for line in log.read_text().splitlines()
            if line.endswith('}')
        ]
        if log.is_file()
        else []
    )


def updates(run):
    return [r for r in log_of(run) if 'batch_loss' in r]


def record(run):
    "What no interruption changes: figures of every line, and fingerprints of the last weights."
    figures = [
        {k: v for k, v in r.items() if k in FIGURES or k.startswith(FAMILIES)}
        for r in log_of(run)
    ]
    last = Path(run) / (Path(run) / 'last_checkpoint').read_text().strip()
    return [f for f in figures if f.keys() - {'step', 'epoch'}], {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in last.glob('*.safetensors')
    }
