"What a guide to checkpoints and resuming promises: a schedule in samples goes on with another batch and other ranks."

import json

import pytest
from commands import TINY, train

from nanovlm_nb.cli import main
from nanovlm_nb.core.run_dir import read_log
from nanovlm_nb.training.schedule import warmup_cosine

LENGTH = TINY.index('--max_training_steps')
FLAGS = [
    *TINY[:LENGTH],
    *TINY[LENGTH + 2 :],
    '--run_name',
    'r',
    '--batch_size',
    1,
    '--save_interval',
    2,
    '--eval_interval',
    100,
    '--max_keep_ckpts',
    -1,
    '--ask_samples',
    0,
    '--dtype',
    'float32',
    '--lr_schedule',
    'cosine',
    '--max_training_samples',
    120,
]


def test_a_schedule_in_samples_goes_on_with_another_batch_and_other_ranks(
    tmp_path, capsys
):
    "One rank, then two with updates of twice the packs: the rate keeps to its curve over the samples, and the run ends when they are seen."
    train(FLAGS, tmp_path)
    run_dir = tmp_path / 'checkpoints' / 'r'
    first = {r['step']: r for r in read_log(run_dir / 'log.jsonl') if 'lr_MP' in r}
    begun = max(
        n
        for n in first
        if n % 2 == 0 and sum(first[s]['samples'] for s in range(1, n + 1)) <= 70
    )
    there = ['--load_from', str(run_dir / f'step_{begun}')]
    assert main(['check', str(run_dir), '--gpus', '2', *there]) == 1
    assert (
        'of 120 samples' in (said := capsys.readouterr().out)
        and 'packs in an update the rest takes about' in said
    )
    train(
        [
            *FLAGS,
            '--resume',
            'True',
            *there,
            '--force_resume',
            'True',
            '--max_keep_ckpts',
            2,
        ],
        tmp_path,
        ranks=2,
    )
    log = [r for r in read_log(run_dir / 'log.jsonl') if 'lr_MP' in r]
    assert [r['lr_MP'] for r in log[:begun]] == [
        first[s]['lr_MP'] for s in range(1, begun + 1)
    ] and begun < len(log) < len(first)
    seen = 0
    for r in log:
        place = seen / r['samples'], 120 / r['samples']
        assert r['lr_MP'] == pytest.approx(
            warmup_cosine(place[0], 6e-4, place[1], 0.03, 0.02), rel=1e-9
        )
        seen += r['samples']
    assert seen - log[-1]['samples'] < 120 <= seen
    last = run_dir / (run_dir / 'last_checkpoint').read_text().strip()
    assert (
        last.name == f'step_{log[-1]["step"]}' and len([*run_dir.glob('step_*')]) <= 3
    ), 'the newest two stay, and the best'
    one, two = (
        json.loads((last / f'rng_{rank}.json').read_text())['torch'] for rank in (0, 1)
    )
    assert one != two, 'with one seed every rank would drop the same units'
