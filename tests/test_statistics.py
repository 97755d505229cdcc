"What a run says about itself adds up: shares of the time, losses, arithmetic."

import pytest
from commands import TINY, log_of, train

from nanovlm_nb.data.dataset import shapes_dataset


@pytest.fixture(scope='module')
def records(tmp_path_factory):
    "A run on two data sets with two ranks, reporting every third update."
    cwd = tmp_path_factory.mktemp('statistics')
    for k, name in enumerate(('first', 'second')):
        (cwd/'data'/name).mkdir(parents=True)
        shapes_dataset(60, 'train', k).remove_columns('source').to_parquet(cwd/'data'/name/'train-00000.parquet')
    train([*TINY, '--run_name', 'r', '--train_dataset_path', 'data', '--train_dataset_name', 'all', '--stats_log_interval', 3, '--max_training_steps', 9, '--gradient_accumulation_steps', 1,
           '--peak_tflops', '0.05', '--dtype', 'float32', '--ask_samples', 0, '--data_cutoff_idx', 80, '--stream_dataset', 'False'], cwd, ranks=2)
    return log_of(cwd/'checkpoints'/'r')


def test_shares_of_the_time_add_up(records):
    reports = [r for r in records if 'time/data' in r]
    assert [r['step'] for r in reports] == [3, 6, 9]
    for r in reports:
        assert sum(v for k, v in r.items() if k.startswith('time/')) == pytest.approx(1)
        assert r['time/forward_backward'] > 0 and r['time/communication'] > 0 and r['time/validation'] >= 0


def test_losses_of_updates_make_the_loss(records):
    targets = {r['step']: r['target_tokens'] for r in records if 'batch_loss' in r}
    losses = {r['step']: r['batch_loss'] for r in records if 'batch_loss' in r}
    for r in (r for r in records if 'time/data' in r):
        steps = range(r['step']-2, r['step']+1)
        mean = sum(losses[s]*targets[s] for s in steps)/sum(targets[s] for s in steps)
        assert r['training/loss'] == pytest.approx(mean, rel=1e-6)


def test_utilisation_and_speed(records):
    for r in (r for r in records if 'time/data' in r):
        assert 0 < r['perf/mfu'] < 1
        samples = sum(o['samples'] for o in records if 'batch_loss' in o and r['step']-2 <= o['step'] <= r['step'])
        assert r['perf/samples_per_second'] == pytest.approx(samples/(3*r['perf/step_time']))
        assert r['perf/gpu_memory_gb'] == 0
