"slurm/train.slurm on a real Slurm: a job that is preempted, waits in the queue and goes on as if nothing had happened."
import sys

import pytest
from cluster import PATH, Slurm, missing
from commands import TINY, environment, record, train, updates

FLAGS = [*TINY, '--max_training_steps', '40', '--save_interval', '10', '--eval_interval', '20', '--batch_size', '1', '--ask_samples', '0', '--dtype', 'float32']


@pytest.fixture(scope='module')
def slurm():
    if why := missing(): pytest.skip(why)
    with Slurm() as s: yield s


def submit(slurm, root, cwd, *flags, **env):
    "Hand in the project's job script; the environment is a small one, with this interpreter as `python`."
    path = f'{sys.exec_prefix}/bin:{PATH}'
    return slurm.submit(root/'slurm'/'train.slurm', *FLAGS, *flags, cwd=cwd, options=('--cpus-per-task', 2), **(environment(PATH=path, RANKS='2') | env))


def until(slurm, job, state, seconds, folder):
    "Wait for a state of the job."
    try: slurm.wait(lambda: slurm.job(job)['JobState'] == state, seconds, f'job {job} is {state}')
    except TimeoutError as e: raise AssertionError(f'{slurm.job(job)}\n{said(folder)}') from e


def said(folder):
    "The job's output."
    return ''.join(p.read_text() for p in folder.glob('*.out'))


@pytest.mark.slow
def test_preempted_requeued_identical(slurm, root, tmp_path):
    "Signal, checkpoint, requeue, resume: losses, samples and weights of an undisturbed run, bit for bit."
    run = tmp_path/'checkpoints'/'cut'
    job = submit(slurm, root, tmp_path, RUN_NAME='cut')
    slurm.wait(lambda: len(updates(run)) >= 4, 120, f'the run makes updates\n{said(tmp_path)}')
    slurm('scancel', '--signal=USR1', '--batch', job)
    until(slurm, job, 'PENDING', 120, tmp_path)
    assert (run/'status').read_text() == 'interrupted\n'
    made = len(updates(run))
    assert 4 <= made < 40
    until(slurm, job, 'COMPLETED', 300, tmp_path)
    assert slurm.job(job)['Restarts'] == '1' and (run/'status').read_text() == 'done\n'
    log = (run/'train.log').read_text()
    assert f'stopped by a signal after update {made}' in log and 'Auto resumed from' in log
    assert f'Auto resumed from the latest checkpoint checkpoints/cut/step_{made}.' in log
    train([*FLAGS, '--run_name', 'whole'], tmp_path, ranks=2)
    assert record(run) == record(tmp_path/'checkpoints'/'whole')


@pytest.mark.slow
def test_failed_is_not_queued_again(slurm, root, tmp_path):
    "An error needs a person. What is wrong with the settings is found before there is a run: it leaves an empty directory."
    job = submit(slurm, root, tmp_path, '--train_dataset_path', '/nowhere', RUN_NAME='bad')
    until(slurm, job, 'FAILED', 120, tmp_path)
    assert slurm.job(job)['Restarts'] == '0' and not [*(tmp_path/'checkpoints').glob('bad/*')]
    assert '/nowhere' in said(tmp_path) and 'the run is without a status' in said(tmp_path)


@pytest.mark.slow
def test_cancelled_keeps_its_checkpoint(slurm, root, tmp_path):
    "scancel: ranks save, nothing is queued again."
    run = tmp_path/'checkpoints'/'stopped'
    job = submit(slurm, root, tmp_path, '--max_training_steps', '2000', RUN_NAME='stopped')
    slurm.wait(lambda: len(updates(run)) >= 4, 120, f'the run makes updates\n{said(tmp_path)}')
    slurm('scancel', job)
    until(slurm, job, 'CANCELLED', 60, tmp_path)
    slurm.wait(lambda: (run/'status').read_text() == 'interrupted\n', 60, f'the run is interrupted\n{said(tmp_path)}')
    assert f'step_{len(updates(run))}' == (run/'last_checkpoint').read_text().strip()
