"""Kill a short run at its n-th file operation, let it go on, and compare with the run that nobody killed.

Run by test_file_kills.py, or by hand: file_kills.py EVERY. One process imports the package, and each run is a fork of it: a kill costs the run and not the imports.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from commands import TINY, record

FLAGS = [
    *TINY,
    '--run_name',
    'r',
    '--save_interval',
    '2',
    '--eval_interval',
    '2',
    '--max_keep_ckpts',
    '2',
    '--ask_samples',
    '0',
    '--dtype',
    'float32',
    '--max_training_steps',
    '4',
    '--num_of_sequences',
    '2',
    '--batch_size',
    '1',
    '--data_cutoff_idx',
    '40',
    '--val_size',
    '12',
    '--async_save',
    'False',
    '--resume',
    'True',
]
WRITES = {'os.rename', 'os.remove', 'os.mkdir', 'os.rmdir', 'os.truncate', 'fsync'}
KILLED = 137


def counting(stop):
    "Count what this process does to files of the run, and die at the operation with the number `stop`."
    count = [0]

    def look(event, args):
        if event == 'open':
            writes = (
                isinstance(args[1], str)
                and set(args[1]) & set('wax+')
                or isinstance(args[2], int)
                and args[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if not writes or 'checkpoints' not in str(args[0]):
                return
        elif (
            event not in WRITES
            or event not in ('fsync', 'os.truncate')
            and 'checkpoints' not in f'{args[0]}{os.getcwd()}'
        ):
            return
        count[0] += 1
        if count[0] == stop:
            os._exit(KILLED)

    real = os.fsync

    def fsync(fd):
        look('fsync', (fd,))
        real(fd)

    sys.addaudithook(look)
    os.fsync = fsync  # there is no audit event for it
    return count


def start(cwd, stop=0):
    "The run in a process of its own; how it ended, and how many file operations it made."
    (Path(cwd) / 'count').unlink(missing_ok=True)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, int((Path(cwd) / 'count').read_text()) if code == 0 else None
    try:
        from nanovlm_nb.core.settings import parse_args
        from nanovlm_nb.runs.run import run

        os.chdir(cwd)
        quiet = os.open('output', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for fd in (1, 2):
            os.dup2(quiet, fd)
        vlm_cfg, train_cfg, *_ = parse_args(FLAGS)
        count = counting(stop)
        run(vlm_cfg, train_cfg)
        Path('count').write_text(str(count[0]))
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def state(cwd):
    "All that a run has come to: what is recorded of it, every file of its directory by name, weights, pointers, drops, status."
    run_dir = Path(cwd) / 'checkpoints' / 'r'
    read = {
        name: (run_dir / name).read_text()
        for name in ('last_checkpoint', 'best_checkpoint', 'drops.json', 'status')
    }
    weights = {
        p.parent.name: p.read_bytes() for p in run_dir.glob('step_*/model.safetensors')
    }
    return dict(
        record=record(run_dir),
        weights=weights,
        names={p.relative_to(run_dir).as_posix() for p in run_dir.rglob('*')},
        **read,
    )


def all_kills(every):
    "Kill at the operations named, as parts of all or by the distance of two; how many there are, and number -> what was different afterwards."
    import torch

    import nanovlm_nb.runs.run  # noqa: F401, before the forks

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        code, n = start(folder)
        assert code == 0, (Path(folder) / 'output').read_text()[-3000:]
        whole = state(folder)
        found = {}
        for k in (
            [round(n * float(f)) for f in every.split(',')]
            if '.' in every
            else range(int(every), n + 1, int(every))
        ):
            with tempfile.TemporaryDirectory() as cwd:
                codes = start(cwd, k)[0], start(cwd)[0]
                if codes != (KILLED, 0):
                    found[k] = [
                        f'ended with {codes}: '
                        + (Path(cwd) / 'output').read_text()[-1500:]
                    ]
                else:
                    found[k] = [
                        f'{what}: {was} -> {now}'[:1500]
                        for (what, was), now in zip(whole.items(), state(cwd).values())
                        if now != was
                    ]
            print(f'{k} of {n}: {found[k] or "the same"}', file=sys.stderr, flush=True)
        return dict(operations=n, found=found)


if __name__ == '__main__':
    print(json.dumps(all_kills(sys.argv[1])))
