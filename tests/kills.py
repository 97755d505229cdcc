"Kill a run again and again, at random moments and inside saves, and let it go on; run by test_kills.py, or by hand: kills.py KILLS RANKS WORKERS UPDATES [--flag value ...]."
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from commands import TINY, environment, start_of

SCENES = 136  # in four parquet files; the first 16 are for validation
FIGURES = ('step', 'batch_loss', 'grad_norm', 'batch_digest', 'val_loss', 'epoch_loss', 'samples', 'epoch')


def write_data(cwd):
    "The embedded scenes as parquet files, to be streamed."
    from nanovlm_nb.data.dataset import shapes_dataset
    rows, folder = shapes_dataset(SCENES, 'train', 0), Path(cwd)/'data'
    if folder.exists(): return
    folder.mkdir()
    for k in range(4): rows.shard(4, k).to_parquet(folder/f'train-{k:05d}.parquet')


def command(name, ranks, workers, updates, *more):
    "The command line of a small run that saves every second update."
    launch = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', ranks] if ranks > 1 else []
    flags = [*TINY, '--run_name', name, '--max_training_steps', updates, '--save_interval', 2, '--eval_interval', 5, '--num_workers', workers, '--ask_samples', 0,
             '--data_cutoff_idx', 120, '--num_of_sequences', 3, '--max_keep_ckpts', 3, '--batch_size', 2//ranks, '--dtype', 'float32', '--resume', 'True', '--stream_dataset', 'True',
             '--train_dataset_path', 'data', *more]
    return [str(a) for a in (sys.executable, *launch, '-m', 'nanovlm_nb.train', *flags)]


def start(cmd, cwd, fresh=True):
    "A process group of its own, so that all of it can be killed; not fresh it is a warm python, whose loader workers see that it is gone."
    args, env = (cmd, environment()) if fresh else start_of(cmd)
    return subprocess.Popen(args, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=open(Path(cwd)/'stderr', 'ab'), start_new_session=True)


def lines(run):
    "Updates in the log so far."
    log = run/'log.jsonl'
    return sum('batch_loss' in line for line in log.read_text().splitlines()) if log.exists() else 0


def wait_for(process, reached, timeout=300):
    "Wait until something is so, or the process has ended; True: it is so."
    end = time.monotonic()+timeout
    while process.poll() is None and time.monotonic() < end:
        if reached(): return True
        time.sleep(.01)
    if process.poll() is None: raise TimeoutError('the run hangs')
    return False


def stands(run):
    "The update of the last checkpoint; 0 before the first update."
    pointer = run/'last_checkpoint'
    return int(pointer.read_text().strip().removeprefix('step_')) if pointer.exists() else 0


def kill_once(process, run, rng, updates, how):
    "Kill a process group at a random moment after its first checkpoint, so that there is something to go on from; says when."
    before, stood = lines(run), stands(run)
    if rng.random() < .4:
        hit = wait_for(process, lambda: stands(run) > stood and any(run.glob('step_*.tmp')))
        when = 'inside a save'
        time.sleep(rng.random()*.2)
    else:
        target = rng.randint(before+1, max(before+1, min(before+4, updates-1)))
        hit = wait_for(process, lambda: stands(run) > stood and lines(run) >= target)
        when = f'after update {target}'
        time.sleep(rng.random()*.1)
    if hit and process.poll() is None: os.killpg(process.pid, how)
    process.wait(timeout=120)
    return when if hit else 'it had ended'


def record(run):
    "Figures of every line, and a fingerprint of the last weights."
    figures = [{k: r[k] for k in FIGURES if k in r} for r in map(json.loads, (run/'log.jsonl').read_text().splitlines())]
    last = run/(run/'last_checkpoint').read_text().strip()
    return [f for f in figures if len(f) > 2], hashlib.sha256((last/'model.safetensors').read_bytes()).hexdigest()


def undisturbed(cwd, ranks, workers, updates, *more):
    "The same run without kills."
    write_data(cwd)
    subprocess.run(command('whole', ranks, workers, updates, *more), cwd=cwd, env=environment(), check=True, timeout=1800, stdout=subprocess.DEVNULL, stderr=open(Path(cwd)/'stderr', 'ab'))
    return record(Path(cwd)/'checkpoints'/'whole')


def disturbed(cwd, kills, ranks, workers, updates, *more, seed=0, how=signal.SIGKILL, fresh=True):
    "The run with kills; returns its record and when it was killed."
    rng, run, when = random.Random(seed), Path(cwd)/'checkpoints'/'killed', []
    write_data(cwd)
    for _ in range(kills): when.append(kill_once(start(command('killed', ranks, workers, updates, *more), cwd, fresh), run, rng, updates, how))
    ended = start(command('killed', ranks, workers, updates, *more), cwd, fresh).wait(timeout=600)
    assert ended == 0, (Path(cwd)/'stderr').read_text()[-3000:]
    return record(run), when


if __name__ == '__main__':
    (kills, ranks, workers, updates), more = map(int, sys.argv[1:5]), sys.argv[5:]
    with tempfile.TemporaryDirectory() as cwd:
        whole = undisturbed(cwd, ranks, workers, updates, *more)
        for how in (signal.SIGKILL, signal.SIGTERM):
            killed, when = disturbed(cwd, kills, ranks, workers, updates, *more, seed=how, how=how)
            print(how.name, when, 'identical' if killed == whole else 'DIFFERENT')
            import shutil; shutil.rmtree(Path(cwd)/'checkpoints'/'killed')
