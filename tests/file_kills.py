"""Kill a short run at its n-th file operation, let it go on, and compare with the run that nobody killed.

Run by test_file_kills.py, or by hand: file_kills.py EVERY [FIRST]. One process imports the package, and each run is a fork of it: a kill costs the run and not the imports.
"""
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from commands import TINY

FLAGS = [*TINY, '--run_name', 'r', '--save_interval', '2', '--eval_interval', '2', '--max_keep_ckpts', '2', '--ask_samples', '0', '--dtype', 'float32',
         '--max_training_steps', '4', '--num_of_sequences', '2', '--batch_size', '1', '--data_cutoff_idx', '40', '--val_size', '12', '--async_save', 'False', '--resume', 'True']
WRITES = {'os.rename', 'os.remove', 'os.mkdir', 'os.rmdir', 'os.truncate', 'fsync'}
TIMES = ('time/', 'perf/', 'training_stats/')
KILLED = 137


def counting(stop):
    "Count what this process does to files of the run, and die at the operation with the number `stop`."
    count = [0]

    def look(event, args):
        if event == 'open':
            writes = isinstance(args[1], str) and set(args[1]) & set('wax+') or isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if not writes or 'checkpoints' not in str(args[0]): return
        elif event not in WRITES or event not in ('fsync', 'os.truncate') and 'checkpoints' not in f'{args[0]}{os.getcwd()}': return
        count[0] += 1
        if count[0] == stop: os._exit(KILLED)

    real = os.fsync

    def fsync(fd):
        look('fsync', (fd,))
        real(fd)

    sys.addaudithook(look)
    os.fsync = fsync  # there is no audit event for it
    return count


def start(cwd, stop=0):
    "The run in a process of its own; how it ended, and how many file operations it made."
    (Path(cwd)/'count').unlink(missing_ok=True)
    if (child := os.fork()):
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, int((Path(cwd)/'count').read_text()) if code == 0 else None
    try:
        from nanovlm_nb.core.config import parse_args
        from nanovlm_nb.runs.run import run
        os.chdir(cwd)
        quiet = os.open('output', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for fd in (1, 2): os.dup2(quiet, fd)
        vlm_cfg, train_cfg, *_ = parse_args(FLAGS)
        count = counting(stop)
        run(vlm_cfg, train_cfg)
        Path('count').write_text(str(count[0]))
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)


def figures(record):
    "A line of the log without what depends on the clock."
    return {k: v for k, v in record.items() if not k.startswith(TIMES) and 'per_second' not in k and 'duration' not in k}


def state(cwd):
    "All that a run has come to: log, every file of its directory by name, weights, pointers, drops, status."
    run_dir = Path(cwd)/'checkpoints'/'r'
    read = {name: (run_dir/name).read_text() for name in ('last_checkpoint', 'best_checkpoint', 'drops.json', 'status')}
    weights = {p.parent.name: p.read_bytes() for p in run_dir.glob('step_*/model.safetensors')}
    log = [figures(json.loads(line)) for line in (run_dir/'log.jsonl').read_text().splitlines()]
    return dict(log=log, names=sorted(p.relative_to(run_dir).as_posix() for p in run_dir.rglob('*')), weights=weights, **read)


def differences(one, other):
    "What two states disagree about."
    found = [k for k in one if one[k] != other[k]]
    if 'names' in found: found.append(str(set(one['names']) ^ set(other['names'])))
    if 'log' in found: found.append(str([r for r in one['log'] if r not in other['log']]+[r for r in other['log'] if r not in one['log']])[:600]+f' {len(one["log"])} {len(other["log"])}')
    return found


def all_kills(choose, say=lambda line: None):
    "Kill at the operations that `choose` picks of so many; number of operations -> what was different afterwards."
    import torch

    import nanovlm_nb.runs.run  # noqa: F401, before the forks
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        code, n = start(folder)
        assert code == 0, (Path(folder)/'output').read_text()[-3000:]
        whole, found = state(folder), {}
        for k in choose(n):
            with tempfile.TemporaryDirectory() as cwd:
                killed = start(cwd, k)[0]
                again = start(cwd)[0]
                wrong = [f'ended with {killed} and {again}: '+(Path(cwd)/'output').read_text()[-1500:]] if (killed, again) != (KILLED, 0) else differences(whole, state(cwd))
            found[k] = wrong
            say(f'{k} of {n}: {wrong or "the same"}')
        return n, found


if __name__ == '__main__':
    every = sys.argv[1]
    began = time.process_time()
    pick = (lambda n: [round(n*float(f)) for f in every.split(',')]) if '.' in every else lambda n: range(int((sys.argv[2:] or [every])[0]), n+1, int(every))
    n, found = all_kills(pick, lambda line: print(line, file=sys.stderr, flush=True))
    times = os.times()
    print(json.dumps(dict(operations=n, found=found, cpu=round(times.user+times.system+times.children_user+times.children_system, 1))))
