"slurm/train.slurm on a real Slurm: a job that is killed or preempted, waits in the queue and goes on as if nothing had happened."

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import PATH, Slurm, missing
from commands import TINY, environment, record, train, updates

FLAGS = [
    *TINY,
    '--max_training_steps',
    '40',
    '--save_interval',
    '10',
    '--eval_interval',
    '20',
    '--batch_size',
    '1',
    '--ask_samples',
    '0',
    '--dtype',
    'float32',
]


@pytest.fixture(scope='module')
def slurm():
    if why := missing():
        pytest.skip(why)
    with Slurm() as s:
        yield s


def submit(slurm, root, cwd, *flags, options=('--cpus-per-task', 2), **env):
    "Hand in the project's job script; the environment is a small one, with this interpreter as `python`."
    path = f'{sys.exec_prefix}/bin:{PATH}'
    return slurm.submit(
        root / 'slurm' / 'train.slurm',
        *FLAGS,
        *flags,
        cwd=cwd,
        options=options,
        **(environment(PATH=path, RANKS='2') | env),
    )


def until(slurm, job, state, seconds, folder):
    "Wait for a state of the job."
    try:
        slurm.wait(
            lambda: slurm.job(job)['JobState'] == state,
            seconds,
            f'job {job} is {state}',
        )
    except TimeoutError as e:
        raise AssertionError(f'{slurm.job(job)}\n{said(folder)}') from e


def said(folder):
    "The job's output."
    return ''.join(p.read_text() for p in folder.glob('*.out'))


@pytest.mark.slow
def test_preempted_requeued_identical(slurm, root, tmp_path):
    "Signal, checkpoint, requeue, resume: losses, samples and weights of an undisturbed run, bit for bit."
    run = tmp_path / 'checkpoints' / 'cut'
    job = submit(slurm, root, tmp_path, RUN_NAME='cut')
    slurm.wait(
        lambda: len(updates(run)) >= 4, 120, f'the run makes updates\n{said(tmp_path)}'
    )
    slurm('scancel', '--signal=USR1', '--batch', job)
    until(slurm, job, 'PENDING', 120, tmp_path)
    assert (run / 'status').read_text() == 'interrupted\n'
    made = len(updates(run))
    assert 4 <= made < 40
    until(slurm, job, 'COMPLETED', 300, tmp_path)
    assert (
        slurm.job(job)['Restarts'] == '1' and (run / 'status').read_text() == 'done\n'
    )
    log = (run / 'train.log').read_text()
    assert (
        f'stopped by a signal after update {made}' in log and 'Auto resumed from' in log
    )
    assert (
        f'Auto resumed from the latest checkpoint checkpoints/cut/step_{made}.' in log
    )
    train([*FLAGS, '--run_name', 'whole'], tmp_path, ranks=2)
    assert record(run) == record(tmp_path / 'checkpoints' / 'whole')


@pytest.mark.slow
def test_failed_is_not_queued_again(slurm, root, tmp_path):
    "An error needs a person. What is wrong with the settings is found before there is a run: it leaves an empty directory."
    job = submit(
        slurm, root, tmp_path, '--train_dataset_path', '/nowhere', RUN_NAME='bad'
    )
    until(slurm, job, 'FAILED', 120, tmp_path)
    assert slurm.job(job)['Restarts'] == '0' and not [
        *(tmp_path / 'checkpoints').glob('bad/*')
    ]
    assert '/nowhere' in said(tmp_path) and 'the run is without a status' in said(
        tmp_path
    )


@pytest.mark.slow
def test_cancelled_keeps_its_checkpoint(slurm, root, tmp_path):
    "scancel: ranks save, nothing is queued again."
    run = tmp_path / 'checkpoints' / 'stopped'
    job = submit(
        slurm, root, tmp_path, '--max_training_steps', '2000', RUN_NAME='stopped'
    )
    slurm.wait(
        lambda: len(updates(run)) >= 4, 120, f'the run makes updates\n{said(tmp_path)}'
    )
    slurm('scancel', job)
    until(slurm, job, 'CANCELLED', 60, tmp_path)
    slurm.wait(
        lambda: (run / 'status').read_text() == 'interrupted\n',
        60,
        f'the run is interrupted\n{said(tmp_path)}',
    )
    assert f'step_{len(updates(run))}' == (run / 'last_checkpoint').read_text().strip()


# --- a run that begins with weights


def kill_ranks(name):
    "kill -9 of all ranks of a run."
    for folder in Path('/proc').glob('[0-9]*'):
        with suppress(OSError):
            words = (folder / 'cmdline').read_bytes().split(b'\0')
            if (
                name.encode() in words
                and b'torch.distributed.run' not in words
                and b'nanovlm_nb.train' in words
            ):
                os.kill(int(folder.name), signal.SIGKILL)


def killed(slurm, job, run, folder):
    "Every rank dies at once: the job fails, and an administrator puts it into the queue again."
    kill_ranks(run.name)
    until(slurm, job, 'FAILED', 120, folder)
    slurm('scontrol', 'requeue', job)


def requeued(slurm, job, run, folder):
    "The administrator stops the job, and puts it into the queue again."
    slurm('scontrol', 'requeue', job)


def preempted(slurm, job, run, folder):
    "The job must make way: it saves, and puts itself into the queue again."
    slurm('scancel', '--signal=USR1', '--batch', job)


@pytest.mark.slow
@pytest.mark.parametrize(
    'more, ends',
    [((), (killed, requeued)), (('--lora_rank', '2'), (killed, preempted))],
    ids=['weights', 'adapters'],
)
def test_begun_with_weights_stopped_twice_identical(slurm, root, tmp_path, more, ends):
    "The first start begins with the weights of another run, the next ones go on from the run's own checkpoints, and the other run is gone. Bit for bit as a run that nobody stopped."
    train([*FLAGS, '--run_name', 'base', '--max_training_steps', '6'], tmp_path)
    flags = [*more, '--load_from', 'checkpoints/base', '--save_interval', '2']
    train([*FLAGS, *flags, '--run_name', 'whole'], tmp_path, ranks=2)
    run = tmp_path / 'checkpoints' / 'cut'
    last = 0
    job = submit(slurm, root, tmp_path, *flags, RUN_NAME='cut')
    for start, end in enumerate(ends, 1):
        slurm.wait(
            lambda last=last: (
                len(updates(run)) >= last + 4
                and slurm.job(job)['JobState'] == 'RUNNING'
            ),
            180,
            f'start {start} makes updates\n{said(tmp_path)}',
        )
        end(slurm, job, run, tmp_path)
        slurm.wait(
            lambda: slurm.job(job)['JobState'] == 'PENDING',
            120,
            f'job {job} is in the queue again\n{said(tmp_path)}',
        )
        last = len(updates(run))
        assert 4 <= last < 40
        if start == 1:
            (tmp_path / 'checkpoints' / 'base').rename(tmp_path / 'gone')
        slurm(
            'scontrol', 'update', f'JobId={job}', 'StartTime=now+5'
        )  # of itself it would wait two minutes
    until(slurm, job, 'COMPLETED', 300, tmp_path)
    log = (run / 'train.log').read_text()
    assert (
        slurm.job(job)['Restarts'] == '2'
        and log.count(
            'a new run begins at update 0 with the weights of checkpoints/base/step_'
        )
        == 1
    )
    assert log.count('Auto resumed from the latest checkpoint') == 2
    assert record(run) == record(tmp_path / 'checkpoints' / 'whole')


@pytest.mark.slow
@pytest.mark.parametrize(
    'options, ranks, told',
    [
        (
            (),
            3,
            [
                'TOO FEW CORES: 1 for 3 ranks of a node. Give sbatch --cpus-per-task 24',
                'NO GPU: this job has none, and the cluster has some. Give sbatch --gpus-per-node 8',
            ],
        ),
        (('--gpus-per-node', 1, '--cpus-per-task', 1), 1, []),
    ],
)
def test_the_job_says_what_it_was_not_given(
    slurm, root, tmp_path, options, ranks, told
):
    "Cores and GPUs that nobody asked for."
    job = submit(slurm, root, tmp_path, '--help', options=options, RANKS=str(ranks))
    until(slurm, job, 'COMPLETED', 120, tmp_path)
    assert [line for line in ('TOO FEW CORES', 'NO GPU') if line in said(tmp_path)] == [
        line.partition(':')[0] for line in told
    ]
    assert all(line in said(tmp_path) for line in told)
