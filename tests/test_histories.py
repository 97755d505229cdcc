"Whoever goes back makes a branch: it ends as a run that branched there undisturbed, and nothing ever leads to what was left."
import signal

import pytest
from histories import go, history, record, stands

from nanovlm_nb.core.run_dir import abandoned, checkpoints


def test_a_run_that_goes_back_twice_and_is_killed_ends_as_one_that_did_not(tmp_path):
    "16 updates, back to 8, killed at 11, resumed, killed at 13, back to 4, SIGTERM at 7, and on with one checkpoint kept."
    run, last = tmp_path/'checkpoints'/'r', lambda: stands(tmp_path/'checkpoints'/'r')
    assert go(tmp_path, 'r') == 0 and last() == 'step_16'
    assert go(tmp_path, 'r', '--resume', 'True', '--load_from', 'checkpoints/r/step_8', at=11) != 0 and last() in ('step_8', 'step_10', 'step_12')
    assert go(tmp_path, 'r', '--resume', 'True', at=13) != 0 and last() in ('step_10', 'step_12', 'step_14')
    assert go(tmp_path, 'r', '--resume', 'True', '--load_from', 'checkpoints/r/step_4', at=7, how=signal.SIGTERM) == 85
    assert last() in ('step_7', 'step_8', 'step_9')
    assert go(tmp_path, 'r', '--resume', 'True', '--max_keep_ckpts', 1) == 0 and last() == 'step_16'
    assert go(tmp_path, 'whole') == 0
    assert record(run) == record(tmp_path/'checkpoints'/'whole')
    best = (run/'best_checkpoint').read_text().strip()
    assert {p.name for p in checkpoints(run)} == {'step_16', best}
    assert [p.name for p in abandoned(run)] == ['abandoned_1', 'abandoned_2'] and checkpoints(abandoned(run)[0])[-1].name == 'step_16'


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(20))
def test_any_history_leaves_a_run_that_stands_where_its_pointer_says(tmp_path, seed):
    history(tmp_path, seed, 6)
