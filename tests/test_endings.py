"How a run ends: Ctrl-C, a full disk, memory that runs out, a second run in its directory; what is left, and the command that goes on."

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from commands import SHORT, TINY, environment, record, train, updates, wait_for

from nanovlm_nb import train as train_rows
from nanovlm_nb.core.run_dir import checkpoints, missing_pieces, read_pointer
from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.core.dist import Dist
from nanovlm_nb.data.shapes import shapes_dataset
from nanovlm_nb.runs.ending import INTERRUPTED, RunFailed
from nanovlm_nb.runs.run import run as train_here
from nanovlm_nb.training.trainer import Hook

SMALL = [
    *TINY,
    '--ask_samples',
    '0',
    '--dtype',
    'float32',
    '--save_interval',
    '2',
    '--eval_interval',
    '3',
    '--max_training_steps',
    '6',
    '--run_name',
    'run',
]


def in_process(folder, *more, hooks=()):
    "A small run in this process; its directory."
    vlm_cfg, train_cfg, _ = parse_args(
        [*SMALL, '--vlm_checkpoint_path', str(folder), *more]
    )
    return train_here(vlm_cfg, train_cfg, hooks=hooks, dist=Dist())


@pytest.fixture(scope='module')
def quiet_run(tmp_path_factory):
    "The small run, undisturbed."
    return record(in_process(tmp_path_factory.mktemp('quiet')))


# Ctrl-C

TOLD = [
    sys.executable,
    '-m',
    'nanovlm_nb.train',
    *SMALL,
    '--run_name',
    'told',
    '--resume',
    'True',
    '--max_training_steps',
    '400',
]


def test_ctrl_c_leaves_a_checkpoint_and_the_command_that_goes_on(tmp_path, monkeypatch):
    "The signal goes to the loader workers too; another run is kept out as long as this one lives, and the printed command ends it."
    cmd = [*TOLD, '--num_workers', '2']
    run = tmp_path / 'checkpoints' / 'told'
    errors = tmp_path / 'stderr'
    process = subprocess.Popen(
        cmd,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=errors.open('wb'),
        start_new_session=True,
    )  # as a terminal does
    assert wait_for(process, lambda: len(updates(run)) >= 3), errors.read_text()[-3000:]
    vlm_cfg, train_cfg, _ = parse_args(cmd[cmd.index('nanovlm_nb.train') + 1 :])
    vlm_cfg.vlm_checkpoint_path = str(tmp_path / 'checkpoints')
    with pytest.raises(
        ValueError, match=f'told is in use by process {process.pid} on '
    ):
        train_here(vlm_cfg, train_cfg, dist=Dist())
    before = errors.stat().st_size
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=180) == INTERRUPTED
    said = [
        line
        for line in errors.read_text()[before:].splitlines()
        if line.strip() and not line.startswith('update ')
    ]
    last = read_pointer(run)
    assert not missing_pieces(last) and last.name == f'step_{len(updates(run))}'
    assert (
        len(said) == 3
        and said[0].startswith('Ctrl-C')
        and said[1].startswith('stopped by a signal')
    ), said
    again = re.fullmatch(
        f'the last complete checkpoint is {last.name}, to go on: (.*)', said[2]
    )
    monkeypatch.chdir(tmp_path)
    vlm_cfg, train_cfg, _ = parse_args(
        [
            *shlex.split(again[1])[2:],
            '--max_training_steps',
            str(int(last.name[5:]) + 1),
            '--num_workers',
            '0',
        ]
    )
    train_here(vlm_cfg, train_cfg, dist=Dist())
    assert (run / 'status').read_text() == 'done\n' and not (run / 'lock').exists()


@pytest.mark.parametrize(
    'number, error', [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_a_loop_over_trainings_in_python(
    tmp_path, monkeypatch, number, error
):
    "The run at hand ends in good order, and half a model is not taken for a whole; the same call goes on."

    class Told(Hook):
        def after_update(self, trainer, figures):
            if trainer.step == 2:
                os.kill(os.getpid(), number)

    monkeypatch.chdir(tmp_path)
    rows = [row for row in shapes_dataset(20) if len(row['images']) == 1]
    how = dict(preset='tiny', quiet=True, max_training_steps=4, ask_samples=0)
    with pytest.raises(error) as stopped:
        for name in ('first', 'second'):
            train_rows(rows, run_name=name, hooks=[Told()], **how)
    if error is SystemExit:
        assert stopped.value.code == INTERRUPTED
    else:
        assert "is step_2, to go on: train(rows, run_name='first'" in str(stopped.value)
    assert os.listdir('checkpoints') == ['first']
    run = Path('checkpoints/first')
    assert (run / 'status').read_text() == 'interrupted\n'
    assert read_pointer(run).name == 'step_2' and not (run / 'lock').exists()
    train_rows(rows, run_name='first', resume=True, **how)
    assert (run / 'status').read_text() == 'done\n'


def test_a_closed_terminal_leaves_a_checkpoint(tmp_path):
    "The system sends SIGHUP and takes the terminal away: what the run still says finds nobody, and that is no error."
    import pty

    cmd = [*TOLD, '--progress_bar', 'True']
    run = tmp_path / 'checkpoints' / 'told'
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(
            signal.SIGHUP, signal.SIG_DFL
        )  # whatever nohup has told these tests
        os.chdir(tmp_path)
        os.execvpe(cmd[0], cmd, environment())
    deadline = time.monotonic() + 180
    os.set_blocking(terminal, False)
    while len(updates(run)) < 3 and time.monotonic() < deadline:
        try:
            os.read(terminal, 65536)
        except BlockingIOError:
            time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == INTERRUPTED
    assert (
        (run / 'status').read_text() == 'interrupted\n'
        and read_pointer(run).name == f'step_{len(updates(run))}'
        and not (run / 'lock').exists()
    )
    assert 'stopped by a signal' in (run / 'train.log').read_text()


def test_what_finds_no_reader_leaves_the_exit_code():
    "Without the flush Python tries again at its end, and exits with 120."
    code = (
        'import sys; from nanovlm_nb.core.usage import flush_output; '
        'print("told to nobody"); {}sys.exit(85)'
    )
    found = []
    for flush in ('', 'flush_output(); '):
        with open('/dev/full', 'w') as nowhere:
            done = subprocess.run(
                [sys.executable, '-c', code.format(flush)],
                stdout=nowhere,
                env=environment() | dict(PYTHONUNBUFFERED=''),
                stderr=subprocess.DEVNULL,
            )
        found.append(done.returncode)
    assert found == [120, 85]


# A full disk


@pytest.fixture
def small_disk(tmp_path):
    "A disk of 8 MB, where one may be made."
    disk = tmp_path / 'disk'
    disk.mkdir()
    if subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', 'size=8m', 'tmpfs', disk], capture_output=True
    ).returncode:
        pytest.skip('no disk may be mounted here')
    yield disk
    subprocess.run(['umount', '-l', disk], check=True)


def fill(disk, room=0):
    "Leave so many bytes."
    free = shutil.disk_usage(disk).free
    (disk / 'ballast').write_bytes(b'0' * max(free - room, 0))


class Before(Hook):
    "Does something before an update, or before the third checkpoint is saved; nothing is being written in the background then."

    def __init__(self, do, update=None):
        self.do, self.update, self.saves = do, update, 0

    def begin(self, trainer):
        if self.update:
            return
        save = trainer.saver.save

        def counted(*args):
            self.saves += 1
            if self.saves == 3:
                self.act(trainer)
            save(*args)

        trainer.saver.save = counted

    def before_step(self, trainer, figures):
        if self.update == trainer.step + 1:
            self.act(trainer)

    def act(self, trainer):
        trainer.saver.wait()
        self.do()


def test_a_disk_that_is_full_before_the_start(small_disk, quiet_run):
    "Nothing that was left keeps the next start out."
    fill(small_disk)
    with pytest.raises(OSError, match='No space left on device'):
        in_process(small_disk)
    (small_disk / 'ballast').unlink()
    assert record(in_process(small_disk)) == quiet_run


@pytest.mark.parametrize(
    'update, room',
    [
        (None, 4096),
        *(
            pytest.param(*p, marks=pytest.mark.slow)
            for p in ((None, 0), (None, 300_000), (None, 700_000), (3, 0), (3, 4096))
        ),
    ],
)
def test_a_full_disk_leaves_the_last_checkpoint(small_disk, quiet_run, update, room):
    "Making the directory, the optimizer, the weights; the log of an update; the save after it. With room again, the run goes on as if nothing had been."
    keep = ['--max_keep_ckpts', '2']
    run = small_disk / 'run'
    with pytest.raises(Exception, match='No space left on device|os error 28'):
        in_process(
            small_disk, *keep, hooks=[Before(lambda: fill(small_disk, room), update)]
        )
    last = read_pointer(run)
    assert not missing_pieces(last) and (
        (update, room) != (None, 4096) or last.name == 'step_2'
    )
    assert (run / 'status').read_text() == 'failed\n' and not list(run.glob('*.tmp'))
    (small_disk / 'ballast').unlink()
    assert record(in_process(small_disk, *keep, '--resume', 'True')) == quiet_run


@pytest.fixture(scope='module')
def all_kept(tmp_path_factory):
    "A run that saves after each update and keeps it all, undisturbed."
    folder = tmp_path_factory.mktemp('all_kept')
    train([*EACH, '--vlm_checkpoint_path', folder], folder)
    return record(folder / 'run')


EACH = [*SHORT, '--save_interval', '1', '--run_name', 'run']


@pytest.mark.slow
@pytest.mark.parametrize('kilobytes', range(150, 3550, 170))
def test_a_disk_that_fills_up_at_any_point_ends_in_a_sentence(
    tmp_path, all_kept, kilobytes
):
    "Whichever library has met it, in whichever file; with more room the run goes on as if nothing had been."
    disk = tmp_path / 'disk'
    disk.mkdir()
    size = f'size={kilobytes}k'
    if subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', size, 'tmpfs', disk], capture_output=True
    ).returncode:
        pytest.skip('no disk may be mounted here')
    try:
        ended = train([*EACH, '--vlm_checkpoint_path', disk], tmp_path, check=False)
        said = ended.stderr.splitlines()
        assert (
            ended.returncode == 2
            and 'No space left on device' in said[-1]
            and said[-1].endswith('free some')
            and 'Traceback' not in ended.stderr
        ), ended.stderr[-3000:]
        subprocess.run(['mount', '-o', 'remount,size=64m', disk], check=True)
        train([*EACH, '--vlm_checkpoint_path', disk, '--resume', 'True'], tmp_path)
        assert record(disk / 'run') == all_kept
        assert not list((disk / 'run').rglob('*.tmp'))
    finally:
        subprocess.run(['umount', '-l', disk], check=True)


LOSES = """
import os, shutil
from pathlib import Path
DISK, done = Path('disk'), []
def rate(step, max_lr, max_steps):
    "A rate that never changes; before update 4 the disk of a rank is filled but for ROOM bytes."
    log = DISK/'run'/'log.jsonl'  # not there yet when rates are looked at beforehand
    if os.environ.get('WHO') == os.environ['RANK'] and step == 3 and not done and log.exists() and log.read_text().count('batch_loss') == 3:
        done.append(step)
        (DISK/'ballast').write_bytes(b'0'*max(shutil.disk_usage(DISK).free-int(os.environ['ROOM']), 0))
    return max_lr
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    'room, who, more',
    [
        (4096, 0, ()),
        (300_000, 0, ('--async_save', 'False')),
        (300_000, 1, ('--sharding', 'zero2')),
        (300_000, 1, ('--sharding', 'zero3')),
    ],
)
def test_a_full_disk_ends_all_ranks(small_disk, tmp_path, room, who, more):
    "Neither waits for the other; when there is room again, the run goes on as if nothing had been."
    (tmp_path / 'loses.py').write_text(LOSES)

    def two_ranks(folder, *flags, **env):
        flags = [
            *SMALL,
            '--batch_size',
            1,
            '--max_keep_ckpts',
            2,
            '--vlm_checkpoint_path',
            folder,
            '--lr_schedule',
            'loses:rate',
            *more,
            *flags,
        ]
        return train(
            flags, tmp_path, ranks=2, check=False, PYTHONPATH=str(tmp_path), **env
        )

    began = time.monotonic()
    run = small_disk / 'run'
    ended = two_ranks('disk', ROOM=str(room), WHO=str(who))
    assert ended.returncode == 1 and time.monotonic() - began < 200, ended.stderr[
        -6000:
    ]  # the ranks would wait for half an hour
    assert not missing_pieces(read_pointer(run))
    assert (run / 'status').read_text() == 'failed\n' and not list(run.glob('*.tmp'))
    (small_disk / 'ballast').unlink()
    for again in (two_ranks('disk', '--resume', 'True'), two_ranks('whole')):
        assert again.returncode == 0, again.stderr[-4000:]
    assert record(run) == record(tmp_path / 'whole' / 'run')


# A place that is lost


def test_a_directory_that_was_moved_away_is_missed_at_the_next_update(
    tmp_path, quiet_run
):
    "An open log would take lines to the end; a checkpoint would be written where nobody looks."
    run = tmp_path / 'run'
    away = tmp_path / 'away'
    with pytest.raises(FileNotFoundError, match=f'No such file or directory: .*{run}'):
        in_process(tmp_path, hooks=[Before(lambda: run.rename(away), 4)])
    assert not run.exists()
    away.rename(run)
    assert record(in_process(tmp_path, '--resume', 'True')) == quiet_run


@pytest.mark.skipif(
    not hasattr(os, 'geteuid') or os.geteuid() != 0,
    reason='only root can give up a right for a while',
)
def test_a_right_that_was_lost_leaves_the_last_checkpoint(quiet_run):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            with pytest.raises(PermissionError, match=f'{name}/run/step_4.nanovlm.tmp'):
                in_process(folder, hooks=[Before(lambda: os.seteuid(65534), 4)])
        finally:
            os.seteuid(0)
        assert (
            record(in_process(folder, '--resume', 'True')) == quiet_run
        )  # the lock that could not be taken away keeps nobody out


# Memory


class Forgetful(Hook):
    "Asks for too much memory in the fourth update; the error is the allocator's own."

    def __init__(self, where):
        self.where = where

    def begin(self, t):
        def fourth(*_):
            if t.step == 3 and t.model.training:
                torch.empty(2**60)

        if self.where == 'forward':
            t.base.MP.register_forward_pre_hook(fourth)
        elif self.where == 'backward':
            t.base.MP.proj.weight.register_hook(fourth)
        else:
            t.optimizer.register_step_pre_hook(fourth)


@pytest.mark.parametrize(
    'where',
    [
        pytest.param('forward', marks=pytest.mark.slow),
        'backward',
        pytest.param('optimizer', marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_names_what_fits_the_run(tmp_path, quiet_run, where):
    "The recipe has only flags that exist and matter here, and the command in it goes on to the same end."
    with pytest.raises(RunFailed) as failed:
        in_process(tmp_path, hooks=[Forgetful(where)])
    run = tmp_path / 'run'
    said = str(failed.value)
    assert (
        run / 'status'
    ).read_text() == 'failed\n' and 'the last complete checkpoint is step_3' in said
    assert (
        'batch_size 1, gradient_accumulation_steps 4 (the update stays the same)'
        in said
        and 'offload_optimizer' not in said
    )
    line = said.partition('For example: ')[2]
    assert line.endswith('--resume True --batch_size 1 --gradient_accumulation_steps 4')
    vlm_cfg, train_cfg, _ = parse_args(shlex.split(line)[2:])
    for again, quiet in zip(
        record(train_here(vlm_cfg, train_cfg, dist=Dist()))[0],
        quiet_run[0],
        strict=True,
    ):
        assert again.keys() == quiet.keys() and again.pop(
            'batch_digest', ''
        ) == quiet.get('batch_digest', '')
        assert again == pytest.approx({k: quiet[k] for k in again}, rel=1e-4)


def test_a_schedule_that_returns_nothing_is_refused_before_the_first_update(
    tmp_path, monkeypatch
):
    (tmp_path / 'rates.py').write_text(
        'def later(step, max_lr, max_steps): return None if step == 5 else max_lr\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError, match='the schedule later returned None for step 5 of 6'
    ):
        in_process(tmp_path, '--lr_schedule', 'rates:later')
    assert not checkpoints(tmp_path / 'run')


def test_too_many_bad_updates_end_with_what_is_left_and_no_traceback(tmp_path):
    "One line for the user: which updates, what helps, which checkpoint, which command."
    with pytest.raises(
        RunFailed,
        match=r'3 updates in a row were skipped, the last is update (\d).*the last complete checkpoint is step_\1, to go on: nanovlm train ',
    ):
        in_process(
            tmp_path,
            '--lr_mp',
            '1e30',
            '--lr_language_backbone',
            '1e30',
            '--max_grad_norm',
            'None',
            '--warmup_ratio',
            '0',
            '--lr_schedule',
            'wsd',
            '--max_bad_updates',
            '3',
            '--eval_in_epochs',
            'False',
            '--save_interval',
            '0',
        )
