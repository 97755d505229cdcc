"The program that measures on a GPU, rehearsed on a CPU: phases, what is left when it is cut off, rows beside predictions."
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def m():
    spec = importlib.util.spec_from_file_location('measure', ROOT/'tests'/'gpu'/'measure.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    predicted = m.read_page(ROOT/'tests'/'gpu'/'PREDICTED.md')
    rows = m.result_rows(json.loads(rehearsed.read_text()), predicted)
    assert rows.startswith('Measured 20') and 'on CPU' in rows
    named = m.figures(json.loads(rehearsed.read_text()))
    assert len(named) >= 10 and set(named) <= set(predicted), 'each figure was predicted'
    for name in named: assert f'| {name} | {m.shown(predicted[name])} |' in rows


def test_predictions_are_dated_and_say_what_they_assume(m):
    page = (ROOT/'tests'/'gpu'/'PREDICTED.md').read_text(encoding='utf-8')
    assert m.PREDICTED_ON in page and 'matmul 0.5' in page
    assert all(x >= 0 for x in m.read_page(ROOT/'tests'/'gpu'/'PREDICTED.md').values())


@pytest.mark.slow
def test_all_phases_with_all_arms(m, tmp_path):
    assert m.main(['--tiny', '--out', str(tmp_path/'m.json')]) == 0
    found = json.loads((tmp_path/'m.json').read_text())
    assert len(found) == 8 and not [(n, p['error'], p['where']) for n, p in found.items() if 'error' in p]
    assert not [w for w in found['phase_7_trainer']['workers'].values() if 'error' in w]
    assert found['phase_8_determinism']['equal']
