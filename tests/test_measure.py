"The programs that predict and measure a GPU, rehearsed on a CPU: phases, what is left when one is cut off, rows beside predictions."
import json
import sys
from pathlib import Path

import pytest

from nanovlm_nb.core.config import evolve, preset

GPU = Path(__file__).resolve().parent/'gpu'
sys.path.insert(0, str(GPU))
import measure  # noqa: E402
import predict  # noqa: E402

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def m(): return measure


@pytest.fixture(scope='module')
def rehearsed(m, tmp_path_factory):
    "What the quick phases write down, arms that compile left out."
    out, arms = tmp_path_factory.mktemp('measured')/'m.json', m.ARMS
    m.ARMS = {name: arm for name, arm in arms.items() if not arm[1]}
    try: m.measure(m.Bench(tiny=True), out, [1, 2, 3, 4])
    finally: m.ARMS = arms
    return out


def test_phases_measure_and_are_written_down(rehearsed, m):
    found = json.loads(rehearsed.read_text())
    assert not [(n, p['error'], p['where']) for n, p in found.items() if 'error' in p]
    machine, attention, waits, arms = found.values()
    assert machine['torch'] and machine['date'] and machine['python'] and machine['varlen_attn']
    assert max(attention['error_against_float64'].values()) < .05 and set(attention['gradient_from_other_documents'].values()) == {0.}
    assert waits['waits'] == 0
    assert set(arms['micro_batch']) == {m.LIKE_NANOVLM, 'dense mask', 'varlen'}
    for arm in arms['micro_batch'].values(): assert 0 < arm['lowest'] <= arm['ms'] <= arm['highest'] and arm['n'] == 2


def test_a_failing_phase_is_written_down_and_the_next_begins(m, tmp_path, monkeypatch):
    def phase_1_machine(b): raise RuntimeError('the card has fallen off the bus')
    def phase_3_waits(b): return dict(waits=0)
    monkeypatch.setitem(m.PHASES, 1, phase_1_machine)
    monkeypatch.setitem(m.PHASES, 3, phase_3_waits)
    found = m.measure(m.Bench(tiny=True), tmp_path/'m.json', [1, 3])
    assert 'fallen off the bus' in found['phase_1_machine']['error'] and found['phase_3_waits']['waits'] == 0
    assert 'phase_1_machine failed' in m.result_rows(found, {})


def test_what_was_measured_before_a_cut_is_kept(m, tmp_path, monkeypatch):
    def good(b): return dict(waits=0)
    def cut(b): raise KeyboardInterrupt
    good.__name__, cut.__name__ = 'phase_3_waits', 'phase_5_profile'
    monkeypatch.setitem(m.PHASES, 3, good)
    monkeypatch.setitem(m.PHASES, 5, cut)
    out = tmp_path/'m.json'
    with pytest.raises(KeyboardInterrupt): m.measure(m.Bench(tiny=True), out, [3, 5])
    assert set(json.loads(out.read_text())) == {'phase_3_waits'}
    monkeypatch.setitem(m.PHASES, 5, lambda b: dict(busy=.9))
    m.PHASES[5].__name__ = 'phase_5_profile'
    assert set(m.measure(m.Bench(tiny=True), out, [5])) == {'phase_3_waits', 'phase_5_profile'}, 'a second start adds'


def test_rows_stand_beside_their_predictions(rehearsed, m):
    predicted = m.read_page(GPU/'PREDICTED.md')
    rows = m.result_rows(json.loads(rehearsed.read_text()), predicted)
    assert rows.startswith('Measured 20') and 'on CPU' in rows
    named = m.figures(json.loads(rehearsed.read_text()))
    assert len(named) >= 10 and set(named) <= set(predicted), 'each figure was predicted'
    for name in named: assert f'| {name} | {m.shown(predicted[name])} |' in rows


def test_predictions_are_dated_and_can_be_made_again():
    "The page says what it assumes, and the figures of one arm are those of the script."
    page, (model, run) = (GPU/'PREDICTED.md').read_text(encoding='utf-8'), preset('nanovlm')
    assert predict.PREDICTED_ON in page and 'matmul 0.5' in page
    figures = predict.read_page(GPU/'PREDICTED.md')
    assert all(x >= 0 for x in figures.values())
    ops, useful = predict.our_step(model, run, batch := predict.example_batch(model, 2))
    again = predict.of_arm('varlen', predict.two_clocks(ops)[0], predict.tally(batch)['tokens'], useful) | {'waits inside a micro-batch': sum(o.kind == 'wait' for o in ops)}
    again |= {'peak memory, 1 packs, GiB': predict.peak_memory(model, evolve(run, batch_size=1), predict.example_batch(model)).total()/2**30}
    assert {name: predict.shown(x) for name, x in again.items()} == {name: predict.shown(figures[name]) for name in again}


#: rows of 1,131 tokens and 17 tiles -> milliseconds eager and compiled, of an H200 (aarjunsrinivasan/nanoVLM, eval/benchmark_fwd_bwd.md)
PUBLISHED = {1: (141.4, 78.3), 2: (223.3, 138.6), 4: (294.5, 225.2), 8: (538.1, 410.5)}


@pytest.mark.parametrize('rows', PUBLISHED)
def test_two_clocks_fit_what_was_published(rows):
    model = preset('nanovlm')[0]
    moved = predict.FOREACH_BYTES*sum(p.numel() for p in predict.meta_net(*preset('nanovlm')).parameters())
    ops = predict.nanovlm_step(model, rows, 1131, 17)
    for step, ms in zip((ops, predict.fuse(ops)), PUBLISHED[rows]):
        assert 1e3*predict.two_clocks([*step, predict.Op('pointwise', False, 0, reads={-1: moved})])[0] == pytest.approx(ms, rel=.25)


def test_what_makes_a_step_slow_shows():
    "A dense mask costs a fifth and more; an index by flags is a wait, for the count of its True."
    model, run = predict.change(*preset('nanovlm'), dict(vit_n_blocks=2, lm_n_blocks=2))
    batch = predict.example_batch(model, 2, documents=6, tiles=2)
    sound, masked = (predict.our_step(evolve(model, attn_backend=way), run, batch)[0] for way in ('auto', 'sdpa'))
    assert not any(o.kind in ('wait', 'masked') for o in sound) and predict.two_clocks(masked)[0] > 1.2*predict.two_clocks(sound)[0]
    assert sum(o.kind == 'wait' for o in predict.nanovlm_step(model, 2, 1131, 17)) == 4, 'pictures from unpinned memory, slots by flags, and both of its gradients'


@pytest.mark.slow
def test_all_phases_with_all_arms(m, tmp_path):
    assert m.main(['--tiny', '--out', str(tmp_path/'m.json')]) == 0
    found = json.loads((tmp_path/'m.json').read_text())
    assert len(found) == 9 and not [(n, p['error'], p['where']) for n, p in found.items() if 'error' in p]
    assert not [w for w in found['phase_7_trainer']['workers'].values() if 'error' in w]
    assert found['phase_8_determinism']['equal']
