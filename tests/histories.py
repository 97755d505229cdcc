"Runs that go on, go back, fork, are killed and pruned, at random; run by test_histories.py, or by hand: histories.py SEED MOVES."
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from commands import TINY, start_of

from nanovlm_nb.core.config import load_yaml
from nanovlm_nb.core.run_dir import checkpoints, last_checkpoint, missing_pieces, prune
from nanovlm_nb.runs.resume import resume_checklist

FIGURES = ('step', 'batch_loss', 'grad_norm', 'batch_digest', 'val_loss', 'samples')


def updates(run):
    "The last update in the log; 0 before the first."
    log = run/'log.jsonl'
    found = [json.loads(line) for line in log.read_text().splitlines() if line.endswith('}')] if log.is_file() else []
    return max((r['step'] for r in found if 'batch_loss' in r), default=0)


def starts(run):
    "How often a run has said where it begins."
    log = run/'train.log'
    return len(re.findall(r'Auto resumed|Resumed from|A new run', log.read_text())) if log.is_file() else 0


def go(cwd, name, *flags, last=16, at=None, how=signal.SIGKILL):
    "Start a run; end it with a signal when its log has come to update `at`. Whoever looks meanwhile finds a checkpoint. Returns the exit code."
    run = Path(cwd)/'checkpoints'/name
    before = starts(run)
    args, env = start_of([sys.executable, '-m', 'nanovlm_nb.train', *TINY, '--run_name', name, '--save_interval', 2, '--eval_interval', 4, '--ask_samples', 0,
                          '--dtype', 'float32', '--max_training_steps', last, *flags])
    with open(Path(cwd)/'stderr', 'ab') as errors:
        process = subprocess.Popen(args, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
    begun = had = False
    while process.poll() is None:
        had = had or last_checkpoint(run) is not None
        # one may be replaced while we look: look again
        assert not had or any(last_checkpoint(run) for _ in range(3)), f'{run.name} has no checkpoint: {flags}'
        begun = begun or at is not None and starts(run) > before and updates(run) < at  # the log is cut to where the run goes on
        if at is not None and begun and updates(run) >= at:
            os.killpg(process.pid, how)
            at = None
        time.sleep(.01)
    return process.returncode


def stands(run):
    "Where a run stands: its newest checkpoint, as all of them complete, and what `nanovlm check` announces."
    name = last_checkpoint(run).name
    assert all(not missing_pieces(p) for p in checkpoints(run)), 'a checkpoint is complete or absent'
    said = ' '.join(line for _, line in resume_checklist(run, *load_yaml(run/'config.yaml', given=None)))
    assert re.search(r'would go on from the latest checkpoint \S*/(step_\d+)\.', said)[1] == name, said
    return name


def record(run):
    "Figures of every line, and the last weights."
    lines = [{k: r[k] for k in FIGURES if k in r} for r in map(json.loads, (run/'log.jsonl').read_text().splitlines())]
    return [r for r in lines if len(r) > 1], (run/stands(run)/'model.safetensors').read_bytes()


def resumed_at(run):
    "The checkpoint that the last start says it goes on from."
    return re.findall(r'(?:Auto resumed|Resumed) from .*(step_\d+)[. ]', (run/'train.log').read_text())[-1]


def history(cwd, seed, moves):
    "Random moves; after each of them all checkpoints are complete, and the newest is announced and taken. Returns what was done."
    rng, name, done = random.Random(seed), 'run0', ['begin']
    go(cwd, name, last=6)
    for n in range(moves):
        run = Path(cwd)/'checkpoints'/name
        here, move, flags = stands(run), rng.choice(['on', 'on', 'back', 'back', 'fork', 'prune']), ['--resume', 'True']
        step = int(here[5:])
        if move == 'prune': prune(run, rng.choice([1, 2]))
        else:
            if move == 'back': here = rng.choice([p.name for p in checkpoints(run)])
            if move != 'on': flags += ['--load_from', run/here]
            if move == 'fork': name = f'run{n+1}'
            run, step = Path(cwd)/'checkpoints'/name, int(here[5:])
            at, how = rng.choice([None, step+1, step+2, step+3]), rng.choice([signal.SIGKILL, signal.SIGTERM])
            go(cwd, name, *flags, '--max_keep_ckpts', rng.choice([-1, 1, 2]), last=step+4, at=at, how=how)
            assert resumed_at(run) == here, (done, move)
        done.append(f'{move} {here}')
        assert int(stands(run)[5:]) >= step or move == 'back', done
    return done


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as cwd: print(history(cwd, int(sys.argv[1]), int(sys.argv[2])))
