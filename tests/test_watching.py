"Whoever watches a run sees what it does: what it says at its start, its lines, its figures and checkpoints as they come, its end."

import contextlib
import io
import re
import subprocess
import sys
import time

import pytest
import torch
from commands import TINY, start_of

from nanovlm_nb.core.run_dir import LOCK
from nanovlm_nb.cli import main
from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.core.dist import Dist
from nanovlm_nb.training.precision import amp_dtype
from nanovlm_nb.runs.run import run as train_here

FLAGS = [
    *TINY,
    '--run_name',
    'r',
    '--save_interval',
    '2',
    '--eval_interval',
    '4',
    '--ask_samples',
    '0',
    '--max_training_steps',
    '8',
    '--console_line',
    'minimind',
]


@pytest.fixture(scope='module')
def watched(tmp_path_factory):
    "A run that was followed from another process, and what was said there."
    cwd = tmp_path_factory.mktemp('watched')
    run = cwd / 'checkpoints' / 'r'
    args, env = start_of([sys.executable, '-m', 'nanovlm_nb.train', *FLAGS])
    with open(cwd / 'stderr', 'wb') as errors:
        process = subprocess.Popen(
            args, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=errors
        )
    deadline = time.monotonic() + 180
    while not (run / LOCK).exists():
        assert process.poll() is None and time.monotonic() < deadline, (
            cwd / 'stderr'
        ).read_text()
        time.sleep(0.01)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(['runs', str(run), '--follow'])
    assert process.wait(60) == 0 and code == 0
    return run, out.getvalue().splitlines()


def test_each_checkpoint_and_figure_is_a_line_and_so_is_the_end(watched):
    "What is said is the text log from some line on."
    run, said = watched
    assert (
        f'no checkpoint in {run}' in said[:3] and said[-1] == 'the run has ended: done'
    )
    told = said[said.index(f'no checkpoint in {run}') + 1 : -1]
    whole = (run / 'train.log').read_text().splitlines()
    assert told == whole[-len(told) :]
    assert re.findall(r'checkpoint (step_\d+)$', '\n'.join(said), re.M) == [
        'step_0',
        'step_2',
        'step_4',
        'step_6',
        'step_8',
    ]
    assert re.findall(r'update (\d+): validation loss', '\n'.join(said)) == [
        '0',
        '4',
        '8',
    ]


def test_updates_are_shown_as_minimind_does(watched):
    found = re.findall(
        r'Epoch:\[(\d+)/(\d+)\]\((\d+)/(\d+)\) loss:(\d+\.\d{3}) lr:(0\.\d{12}) epoch_Time:(\d+)min:',
        (watched[0] / 'train.log').read_text(),
    )
    assert [f[:4] for f in found] == [('1', '1', n, '8') for n in '2468']


def test_a_run_says_where_it_is_what_it_trains_and_what_there_is_at_its_end(watched):
    text = re.sub(
        r'^\S+ \S+ INFO ', '', (watched[0] / 'train.log').read_text(), flags=re.M
    )
    first = text.partition('update 0: ')[0].splitlines()
    last = text.splitlines()[-3:]
    assert first[:2] == [
        'reading shapes',
        f'checkpoints/r: {re.search("[0-9.]+ M", text)[0]} parameters, 1 x cpu, {amp_dtype(torch.device("cpu"))}',
    ]
    assert (
        'figures: checkpoints/r/log.jsonl, nothing is sent' in first
        and 'rows: 200 for training and 16 for validation; 8 updates' in first
    )
    assert not any('max_keep_ckpts' in line for line in first), (
        'no advice about the disk for a model of a megabyte'
    )
    assert last[0].startswith('best checkpoint: checkpoints/r/step_') and last[
        2
    ].startswith('ask it: nanovlm ask checkpoints/r --image PICTURE --prompt ')


def test_a_resumed_start_says_where_from_what_changed_and_how_the_learning_rate_goes_on(
    watched, monkeypatch
):
    run, _ = watched
    before = len((run / 'train.log').read_text())
    monkeypatch.chdir(run.parent.parent)
    vlm_cfg, train_cfg, _ = parse_args(
        [
            *FLAGS,
            '--resume',
            'True',
            '--max_training_steps',
            '10',
            '--weight_decay',
            '.5',
        ]
    )
    train_here(vlm_cfg, train_cfg, dist=Dist())
    text = (run / 'train.log').read_text()[before:]
    assert re.search(r'Auto resumed from the latest checkpoint \S*step_8\.', text)
    assert (
        'max_training_steps: 8 -> 10 (careful' in text
        and 'weight_decay: 0.01 -> 0.5 (careful' in text
    )
    assert re.search(
        r'learning rate of the projector: \S+ in the last update, \S+ in the next', text
    )
