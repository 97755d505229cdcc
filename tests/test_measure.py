"The programs that predict and measure a GPU, rehearsed on a CPU: phases, and rows beside predictions."

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovlm_nb.core.config import evolve, preset

GPU = Path(__file__).resolve().parent / 'gpu'
sys.path.insert(0, str(GPU))
import measure  # noqa: E402
import predict  # noqa: E402

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def m():
    return measure


@pytest.fixture(scope='module')
def rehearsed(m, tmp_path_factory):
    "What the quick phases write down, arms that compile left out."
    out = tmp_path_factory.mktemp('measured') / 'm.json'
    arms = m.ARMS
    m.ARMS = {name: arm for name, arm in arms.items() if not arm[1]}
    try:
        m.measure(m.Bench(tiny=True), out, [1, 2, 3, 4, 9])
    finally:
        m.ARMS = arms
    return out


def test_phases_measure_and_are_written_down(rehearsed, m):
    found = json.loads(rehearsed.read_text())
    assert not [(n, p['error'], p['where']) for n, p in found.items() if 'error' in p]
    machine, attention, waits, arms, qwen = found.values()
    assert machine['torch'] and machine['date'] and machine['python']
    assert max(attention['error_against_float64'].values()) < 0.05 and set(
        attention['gradient_from_other_documents'].values()
    ) == {0.0}
    assert waits['waits'] == 0
    assert (
        qwen['all']['ms'] > 0
        and qwen['adapters']['planned_gib'] <= qwen['all']['planned_gib']
        and qwen['change_of_other_samples'] == 0
    )
    assert set(arms['micro_batch']) == {
        m.LIKE_NANOVLM,
        'dense mask',
        'varlen',
        'joined products',
        'bfloat16 between blocks',
    }
    for arm in arms['micro_batch'].values():
        assert 0 < arm['lowest'] <= arm['ms'] <= arm['highest'] and arm['n'] == 2


def test_rows_stand_beside_their_predictions(rehearsed, m):
    predicted = m.read_page(GPU / 'PREDICTED.md')
    rows = m.result_rows(json.loads(rehearsed.read_text()), predicted)
    assert rows.startswith('Measured 20') and 'on CPU' in rows
    named = m.figures(json.loads(rehearsed.read_text()))
    assert len(named) >= 10 and set(named) <= set(predicted), (
        'each figure was predicted'
    )
    for name in named:
        assert f'| {name} | {m.shown(predicted[name])} |' in rows


def test_predictions_are_dated_and_can_be_made_again():
    "The page says what it assumes, and the figures of one arm are those of the script."
    page = (GPU / 'PREDICTED.md').read_text(encoding='utf-8')
    (model, run) = preset('nanovlm')
    assert predict.PREDICTED_ON in page and 'matmul 0.5' in page
    figures = predict.read_page(GPU / 'PREDICTED.md')
    assert all(x >= 0 for x in figures.values())
    ops, useful = predict.our_step(model, run, batch := predict.example_batch(model, 2))
    again = predict.of_arm(
        'varlen', predict.two_clocks(ops)[0], predict.tally(batch)['tokens'], useful
    ) | {'waits inside a micro-batch': sum(o.kind == 'wait' for o in ops)}
    again |= {
        'peak memory, 1 packs, GiB': predict.peak_memory(
            model, evolve(run, batch_size=1), predict.example_batch(model)
        ).total()
        / 2**30
    }
    assert {name: predict.shown(x) for name, x in again.items()} == {
        name: predict.shown(figures[name]) for name in again
    }


@pytest.mark.slow
def test_all_phases_with_all_arms(m, tmp_path):
    assert m.main(['--tiny', '--out', str(tmp_path / 'm.json')]) == 0
    found = json.loads((tmp_path / 'm.json').read_text())
    assert len(found) == 8 and not [
        (n, p['error'], p['where']) for n, p in found.items() if 'error' in p
    ]
    assert not [w for w in found['phase_7_trainer']['workers'].values() if 'error' in w]
    assert found['phase_8_determinism']['equal']


@pytest.mark.parametrize('name, most', [('flex', 1e-5), ('joined products', 1e-5)])
def test_a_change_of_the_model_keeps_its_scores(m, name, most):
    "Also where a row holds several documents; gradients too, where a CPU has them."
    b = m.Bench(tiny=True)
    b.run = evolve(b.run, dtype='float32')
    plain = b.trainer({})
    weights = plain.base.state_dict(keep_vars=True)
    changed = b.trainer({}, weights=weights, changes=m.CHANGES[name])
    batch = b.batch(plain)
    assert max(map(len, batch['doc_lens'])) > 1
    with torch.no_grad():
        a, c = (
            t.base(
                batch['input_ids'],
                batch['images'],
                layout=replace(batch['layout']),
                return_logits=True,
            )[0]
            for t in (plain, changed)
        )
    real = batch['layout'].documents > 0
    assert (a - c)[real].abs().max() < most and a[real].std() > 0.01
    if name == 'flex':
        return
    found = []
    for t in (plain, changed):
        plain.optimizer.zero_grad(set_to_none=True)
        m.accumulate(t, m.gather_update([batch], t.dist))
        found.append([p.grad.clone() for p in plain.base.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_vectors_in_bfloat16_change_a_loss_little(m):
    "The loss of a batch, against float32 between the blocks: within the rounding of bfloat16."
    b = m.Bench(tiny=True)
    plain = b.trainer({})
    weights = plain.base.state_dict(keep_vars=True)
    changed = b.trainer(
        {}, weights=weights, changes=m.CHANGES['bfloat16 between blocks']
    )
    seen = []
    for t in (plain, changed):
        t.base.decoder.blocks[0].register_forward_pre_hook(
            lambda block, args: seen.append(args[0].dtype)
        )
        update = m.gather_update([b.batch(t)], t.dist)
        seen.append(float(m.train_step(t, update)['batch_loss']))
    types, losses = seen[::2], seen[1::2]
    assert types == [torch.float32, torch.bfloat16]
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)
