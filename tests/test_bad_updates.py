"Poisoned samples among clean ones: their updates are skipped by all ranks together, and `nanovlm replay` names them."

import random
import sys

import pytest
from commands import TINY, run, train, updates

from nanovlm_nb.training.hooks import read_bad_updates
from nanovlm_nb.data.shapes import shapes_dataset

ROWS = 2000
UPDATES = 300
RATES = [
    f
    for part in ('mp', 'vision_backbone', 'language_backbone')
    for f in (f'--lr_{part}', '3e-3')
]
FLAGS = [
    *TINY,
    *RATES,
    '--train_dataset_path',
    'data',
    '--stream_dataset',
    'False',
    '--data_cutoff_idx',
    ROWS - 16,
    '--batch_size',
    1,
    '--gradient_accumulation_steps',
    1,
    '--max_grad_spike',
    3,
    '--eval_interval',
    80,
    '--ask_samples',
    0,
    '--dtype',
    'float32',
    '--run_name',
    'r',
    '--max_training_steps',
    UPDATES,
]


@pytest.fixture(scope='module')
def poisoned(tmp_path_factory):
    "A run of two ranks on scenes of which five have two hundred meaningless characters for an answer."
    cwd = tmp_path_factory.mktemp('poison')
    rng = random.Random(0)
    bad = sorted(rng.sample(range(500, ROWS), 5))

    def spoil(row, i):
        if i in bad:
            row['texts'] = [
                dict(
                    user=row['texts'][0]['user'],
                    assistant=''.join(
                        rng.choice('zqxjkvwpyg!?#%&') for _ in range(200)
                    ),
                )
            ]
        return row

    (cwd / 'data').mkdir()
    shapes_dataset(ROWS, 'train', 0).map(spoil, with_indices=True).to_parquet(
        cwd / 'data' / 'train-00000.parquet'
    )
    train(FLAGS, cwd, ranks=2, timeout=600)
    return cwd / 'checkpoints' / 'r', {
        f'shapes/train{i}' for i in bad
    }  # by their row_id


def test_their_updates_are_skipped_and_no_others(poisoned):
    run_dir, bad = poisoned
    skipped = read_bad_updates(run_dir)
    assert all(set(r['ids']) & bad for r in skipped), 'a clean update was skipped'
    assert set().union(*(set(r['ids']) & bad for r in skipped)) == bad
    log = updates(run_dir)
    assert [r['step'] for r in log] == list(range(1, UPDATES + 1))
    assert [r['step'] for r in log if 'skipped_updates' in r] == [
        r['update'] for r in skipped
    ]
    assert max(r['grad_norm'] for r in log[100:] if 'skipped_updates' not in r) < min(
        r['grad_norm'] for r in log if 'skipped_updates' in r
    )


def test_replay_names_the_sample(poisoned):
    run_dir, bad = poisoned
    first = read_bad_updates(run_dir)[0]
    said = run(
        [sys.executable, '-m', 'nanovlm_nb.cli', 'replay', run_dir, first['update']],
        run_dir,
        check=False,
    )
    assert said.returncode == 1, said.stderr
    assert (
        said.stdout.splitlines()[-1]
        == f'suspect: {", ".join(i for i in first["ids"] if i in bad)}'
    )
    assert 'the same samples as in the log' in said.stdout
