"Whatever happens to a run, it ends as one to which nothing happened: killed, stopped, sent back, pruned, with other ranks and workers, with a second start in its directory."

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from commands import TINY, environment, record, start_of, updates, wait_for

from nanovlm_nb.core.config import evolve
from nanovlm_nb.core.settings import load_yaml
from nanovlm_nb.core.run_dir import checkpoints, last_checkpoint, missing_pieces, prune
from nanovlm_nb.runs import start as runs_start


def starts(run):
    "How often a run has said where it begins."
    log = run / 'train.log'
    return (
        len(re.findall(r'Auto resumed|Resumed from|[Aa] new run', log.read_text()))
        if log.is_file()
        else 0
    )


def go(cwd, name, *flags, last=16, at=None, how=signal.SIGKILL, ranks=1):
    "Start a run; end it with a signal when its log has come to update `at`. Whoever looks meanwhile finds a checkpoint. Returns the exit code."
    run = Path(cwd) / 'checkpoints' / name
    before = starts(run)
    launch = (
        ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(ranks)]
        if ranks > 1
        else []
    )
    command = [
        sys.executable,
        *launch,
        '-m',
        'nanovlm_nb.train',
        *TINY,
        '--run_name',
        name,
        '--save_interval',
        2,
        '--eval_interval',
        4,
        '--ask_samples',
        0,
        '--batch_size',
        2 // ranks,
        '--dtype',
        'float32',
        '--max_training_steps',
        last,
        *flags,
    ]
    args, env = (
        start_of(command)
        if ranks == 1 and how != signal.SIGSTOP
        else ([str(a) for a in command], environment())
    )  # not warm: signals reach all of it
    with open(Path(cwd) / 'stderr', 'ab') as errors:
        process = subprocess.Popen(
            args,
            cwd=cwd,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    begun = had = False
    while process.poll() is None:
        had = had or last_checkpoint(run) is not None
        # one may be replaced while we look: look again
        assert not had or any(last_checkpoint(run) for _ in range(3)), (
            f'{run.name} has no checkpoint: {flags}'
        )
        begun = (
            begun or at is not None and starts(run) > before and len(updates(run)) < at
        )  # the log is cut to where the run goes on
        if at is not None and begun and len(updates(run)) >= at:
            if how == signal.SIGSTOP:
                is_kept_out(process, args, cwd, env, run)
            else:
                os.killpg(process.pid, how)
            at = None
        time.sleep(0.01)
    return process.returncode


def is_kept_out(process, args, cwd, env, run):
    "A second start in the directory of a run that holds still is refused in one line, and changes nothing."
    os.killpg(process.pid, signal.SIGSTOP)
    wait_for(
        process,
        lambda: all(
            'State:\tT' in (task / 'status').read_text()
            for task in Path(f'/proc/{process.pid}/task').iterdir()
        ),
    )  # a thread that writes may take a moment
    try:
        before = (
            files := lambda: {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}
        )()
        second = subprocess.run(args, cwd=cwd, env=env, capture_output=True, text=True)
        assert second.returncode == 2 and re.search(
            r'error: checkpoints/\w+ is in use by process \d+ on ', second.stderr
        ), second.stderr
        assert files() == before
    finally:
        os.killpg(process.pid, signal.SIGCONT)


def stands(run):
    "Where a run stands: its newest checkpoint, as all of them complete, and what `nanovlm check` announces."
    name = last_checkpoint(run).name
    assert all(not missing_pieces(p) for p in checkpoints(run)), (
        'a checkpoint is complete or absent'
    )
    vlm_cfg, train_cfg = load_yaml(run / 'config.yaml', given=None)
    said = runs_start.start_of(run, vlm_cfg, evolve(train_cfg, resume=True)).line
    assert (
        re.search(r'Auto resumed from the latest checkpoint \S*/(step_\d+)\.', said)[1]
        == name
    ), said
    return name


#: what happens to a run -> the signal that ends a start, flags, ranks (torchrun hands SIGTERM on to them)
MOVES = {
    'kill': (signal.SIGKILL, (), 1),
    'signal': (signal.SIGTERM, (), 1),
    'workers': (signal.SIGKILL, ('--num_workers', 2), 1),
    'ranks': (signal.SIGTERM, (), 2),
    'second start': (signal.SIGSTOP, (), 1),
    'back': (None, (), 1),
    'prune': (None, (), 1),
}


def history(cwd, run, seed, last=12, moves=5, begun=()):
    "A run of `last` updates to which things happen; after each of them the newest checkpoint is announced. `begun` are flags of every start. What happened."
    rng = random.Random(seed)
    done = []
    go(cwd, run.name, *begun, last=last, at=rng.randint(3, 6))
    for move in rng.sample([*MOVES], moves):
        how, flags, ranks = MOVES[move]
        here = stands(run)
        at = min(len(updates(run)) + rng.randint(1, 3), last) if how else None
        if move == 'prune':
            prune(run, rng.choice([1, 2]))
        else:
            if move == 'back':
                flags, at, how = (
                    (
                        '--load_from',
                        run / (here := rng.choice([p.name for p in checkpoints(run)])),
                    ),
                    int(here[5:]) + 1,
                    signal.SIGKILL,
                )
            go(
                cwd,
                run.name,
                '--resume',
                'True',
                '--max_keep_ckpts',
                -1,
                *begun,
                *flags,
                last=last,
                at=at,
                how=how,
                ranks=ranks,
            )
        done.append(f'{move} at {here}, then {stands(run)}')
    assert go(cwd, run.name, '--resume', 'True', *begun, last=last) == 0, (
        run.name,
        done,
    )
    return done


def at_work(cwd):
    "Processes in a directory: a killed run must leave none, but its loader workers look only once a second."
    found = []
    for link in Path('/proc').glob('[0-9]*/cwd'):
        with suppress(OSError):
            found += [link.parent.name] * (os.readlink(link) == str(cwd))
    return found


def is_as(run, whole, exact=True):
    "The run ended as one that was never touched; with other ranks sums are rounded in another order."
    (figures, weights), (wanted, same) = record(run), record(whole)
    assert stands(run) == stands(whole)
    if exact:
        return figures == wanted and weights == same
    close = lambda a, b: a == b or isinstance(a, float) and abs(a - b) <= 1e-3 * abs(b)
    return [list(f) for f in figures] == [list(w) for w in wanted] and all(
        close(f[k], w[k]) for f, w in zip(figures, wanted) for k in f
    )


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with a run that was never touched."
    cwd = tmp_path_factory.mktemp('histories')
    assert go(cwd, 'whole', last=12) == 0
    return cwd


def ended(cwd, run, whole, done):
    "Nothing is left at work, and the run is as the one that was never touched; after other ranks the figures to a thousandth."
    end = time.monotonic() + 20
    while at_work(cwd) and time.monotonic() < end:
        time.sleep(0.1)
    assert not at_work(cwd)
    assert is_as(run, whole, not any('ranks' in d for d in done)), done


@pytest.mark.parametrize(
    'seed', [n if n < 2 else pytest.param(n, marks=pytest.mark.slow) for n in range(20)]
)
def test_any_history_ends_as_no_history(place, seed):
    "Figures of every update and weights, bit for bit; after other ranks the same samples, and figures to a thousandth."
    run = place / 'checkpoints' / f'r{seed}'
    ended(place, run, place / 'checkpoints' / 'whole', history(place, run, seed))


@pytest.fixture(
    scope='module',
    params=[(), pytest.param(('--lora_rank', 2), marks=pytest.mark.slow)],
    ids=['weights', 'adapters'],
)
def begun(place, request):
    "Name and flags of a run that began with weights of another, and was never touched."
    name = f'begun{len(request.param)}'
    flags = request.param
    assert (
        go(place, name, *flags, '--load_from', 'checkpoints/whole/step_4', last=12) == 0
    )
    return name, flags


@pytest.mark.parametrize(
    'seed', [n if n < 1 else pytest.param(n, marks=pytest.mark.slow) for n in range(6)]
)
def test_any_history_of_a_run_that_begins_with_weights(place, begun, seed):
    "Killed before its first checkpoint, it begins with the weights again; killed, stopped, sent back or pruned later, it does not need them any more."
    name, flags = begun
    run = place / 'checkpoints' / f'{name}_{seed}'
    lender = place / f'lender{name}_{seed}'
    shutil.copytree(place / 'checkpoints' / 'whole' / 'step_4', lender / 'step_4')
    command = ('--load_from', lender / 'step_4', *flags)
    for _ in range(2):
        go(
            place,
            run.name,
            '--resume',
            'True',
            *command,
            '--eval_in_epochs',
            'False',
            '--save_interval',
            0,
            last=12,
            at=2,
        )
        assert (
            not checkpoints(run)
            and 'a new run begins at update 0 with the weights of'
            in (run / 'train.log').read_text()
        )
    go(place, run.name, '--resume', 'True', *command, last=12, at=3)
    shutil.rmtree(lender)
    log = (run / 'train.log').read_text()
    assert (
        log.count('a new run begins at update 0 with the weights of') == 3
        and 'Auto resumed' not in log
    )
    ended(
        place,
        run,
        place / 'checkpoints' / name,
        history(place, run, seed, begun=('--resume', 'True', *command)),
    )


@pytest.mark.parametrize('ranks', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dropout_goes_on_with_the_same_random_numbers(tmp_path, ranks):
    "What is left out in an update is drawn: a run that was killed draws what the other has drawn, on each rank."
    flags = ('--lm_dropout', 0.1)
    how = signal.SIGKILL if ranks == 1 else signal.SIGTERM
    assert go(tmp_path, 'whole', *flags, last=8, ranks=ranks) == 0
    go(tmp_path, 'killed', *flags, last=8, ranks=ranks, at=5, how=how)
    killed = tmp_path / 'checkpoints' / 'killed'
    assert len(updates(killed)) < 8
    assert go(tmp_path, 'killed', *flags, '--resume', 'True', last=8, ranks=ranks) == 0
    whole = record(tmp_path / 'checkpoints' / 'whole')
    assert record(killed) == whole
    assert (
        go(tmp_path, 'other', *flags, '--seed', 1, last=8, ranks=ranks) == 0
        and record(tmp_path / 'checkpoints' / 'other') != whole
    )
