"Whoever watches a run sees what it does: what it says at its start, its lines, its figures and checkpoints as they come, its end."
import contextlib
import io
import re
import subprocess
import sys
import time

import pytest
from commands import TINY, start_of

from nanovlm_nb.core.run_dir import LOCK
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import parse_args
from nanovlm_nb.core.dist import Dist
from nanovlm_nb.runs.run import run as train_here

FLAGS = [*TINY, '--run_name', 'r', '--save_interval', '2', '--eval_interval', '4', '--ask_samples', '0', '--max_training_steps', '8', '--console_line', 'minimind']


@pytest.fixture(scope='module')
def watched(tmp_path_factory):
    "A run that was followed from another process, and what was said there."
    cwd = tmp_path_factory.mktemp('watched')
    run = cwd/'checkpoints'/'r'
    args, env = start_of([sys.executable, '-m', 'nanovlm_nb.train', *FLAGS])
    with open(cwd/'stderr', 'wb') as errors: process = subprocess.Popen(args, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=errors)
    deadline = time.monotonic()+180
    while not (run/LOCK).exists():
        assert process.poll() is None and time.monotonic() < deadline, (cwd/'stderr').read_text()
        time.sleep(.01)
    with contextlib.redirect_stdout(io.StringIO()) as out: code = main(['runs', str(run), '--follow'])
    assert process.wait(60) == 0 and code == 0
    return run, out.getvalue().splitlines()


def test_each_checkpoint_and_figure_is_a_line_and_so_is_the_end(watched):
    run, said = watched
    assert said[0] == f'no checkpoint in {run}' and said[-1] == 'the run has ended: done'
    assert [line.split()[0] for line in said if line.startswith('step_')] == ['step_0', 'step_2', 'step_4', 'step_6', 'step_8']
    assert [re.match(r'step (\d+) \|', line)[1] for line in said if '| val_loss' in line] == ['0', '4', '8']
    assert sum('training/loss' in line for line in said) == 4 and not any('batch_loss' in line for line in said)


def test_updates_are_shown_as_minimind_does(watched):
    found = re.findall(r'Epoch:\[(\d+)/(\d+)\]\((\d+)/(\d+)\) loss:(\d+\.\d{3}) lr:(0\.\d{12}) epoch_Time:(\d+)min:', (watched[0]/'train.log').read_text())
    assert [f[:4] for f in found] == [('1', '1', n, '8') for n in '2468']


def test_a_start_says_what_is_odd_about_its_checkpoints(watched):
    text = (watched[0]/'train.log').read_text()
    assert 'a checkpoint every 2 updates: 50 to 100 with max_keep_ckpts 3 while you try whether a run works' in text
    assert 'max_keep_ckpts is -1: all 5 checkpoints stay on the disk' in text


def test_a_resumed_start_says_where_from_what_changed_and_how_the_learning_rate_goes_on(watched, monkeypatch):
    run, _ = watched
    before = len((run/'train.log').read_text())
    monkeypatch.chdir(run.parent.parent)
    vlm_cfg, train_cfg, _ = parse_args([*FLAGS, '--resume', 'True', '--max_training_steps', '10', '--weight_decay', '.5'])
    train_here(vlm_cfg, train_cfg, dist=Dist())
    text = (run/'train.log').read_text()[before:]
    assert re.search(r'Auto resumed from the latest checkpoint \S*step_8\.', text)
    assert 'max_training_steps: 8 -> 10 (careful' in text and 'weight_decay: 0.01 -> 0.5 (careful' in text
    assert re.search(r'learning rate of the projector: \S+ in the last update, \S+ in the next', text)
