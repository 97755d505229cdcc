"Whatever happens to a run, it ends as one to which nothing happened: killed, stopped, sent back, pruned, with other ranks and workers, with a second start in its directory."
import pytest
from histories import go, history, is_as


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with a run that was never touched."
    cwd = tmp_path_factory.mktemp('histories')
    assert go(cwd, 'whole', last=12) == 0
    return cwd


@pytest.mark.parametrize('seed', [n if n < 2 else pytest.param(n, marks=pytest.mark.slow) for n in range(20)])
def test_any_history_ends_as_no_history(place, seed):
    "Figures of every update and weights, bit for bit; after other ranks the same samples, and figures to a thousandth."
    done = history(place, seed)
    assert is_as(place/'checkpoints'/f'r{seed}', place/'checkpoints'/'whole', not any('ranks' in d for d in done)), done
