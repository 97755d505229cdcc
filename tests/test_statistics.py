"What a run says about itself adds up: shares of the time, losses, arithmetic."

import pytest
from commands import TINY, log_of, train

from nanovlm_nb.data.shapes import shapes_dataset


def test_reports_add_up(tmp_path):
    "Of a run on two data sets with two ranks, reporting every third update."
    for k, name in enumerate(('first', 'second')):
        (tmp_path / 'data' / name).mkdir(parents=True)
        shapes_dataset(60, 'train', k).remove_columns('source').to_parquet(
            tmp_path / 'data' / name / 'train-00000.parquet'
        )
    flags = (
        '--run_name r --train_dataset_path data --train_dataset_name all --stats_log_interval 3 --max_training_steps 9 --peak_tflops 0.05 '
        '--gradient_accumulation_steps 1 --dtype float32 --ask_samples 0 --data_cutoff_idx 80 --stream_dataset False'
    )
    train([*TINY, *flags.split()], tmp_path, ranks=2)
    records = log_of(tmp_path / 'checkpoints' / 'r')
    updates = [r for r in records if 'batch_loss' in r]
    reports = {r['step']: r for r in records if 'time/data' in r}
    assert [*reports] == [3, 6, 9]
    for step, r in reports.items():
        assert sum(v for k, v in r.items() if k.startswith('time/')) == pytest.approx(1)
        assert (
            r['time/forward_backward'] > 0
            and r['time/communication'] > 0
            and r['time/validation'] >= 0
        )
        three = updates[step - 3 : step]
        targets = sum(u['target_tokens'] for u in three)
        assert r['training/loss'] == pytest.approx(
            sum(u['batch_loss'] * u['target_tokens'] for u in three) / targets, rel=1e-6
        )
        assert r['perf/samples_per_second'] == pytest.approx(
            sum(u['samples'] for u in three) / (3 * r['perf/step_time'])
        )
        assert 0 < r['perf/mfu'] < 1 and r['perf/gpu_memory_gb'] == 0
