"Curves and status of runs that were really made, one of them in two parts."
import json
import math
import os
import sys

import pytest
from commands import TINY, run, train
from PIL import Image

from nanovlm_nb.tools import runs as pt

pytestmark = pytest.mark.usefixtures('one_thread')
SHORT = [*TINY, '--ask_samples', '0', '--val_size', '8']


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "The folder of a run that stopped after 3 updates and went on to 6."
    folder = tmp_path_factory.mktemp('runs')
    train([*SHORT, '--run_name', 'parts', '--max_training_steps', '3'], folder)
    train([*SHORT, '--run_name', 'parts', '--resume', 'True'], folder)
    return folder/'checkpoints'


def command(cwd, *args):
    "`nanovlm runs` in a process of its own."
    done = run([sys.executable, '-m', 'nanovlm_nb.cli', 'runs', *args], cwd)
    assert 'Traceback' not in done.stderr, done.stderr[-3000:]
    return done.stdout


def test_what_is_drawn_is_what_was_written(runs):
    "Every update is on the curve; a dotted line marks the restart."
    one = pt.load_run(runs/'parts')
    assert one.restarts == [3] and pt.load_run(runs/'parts'/'log.jsonl') == one
    assert pt.series(one, 'batch_loss')[0] == list(range(1, 7)) and pt.series(one, 'val_loss')[0] == [0, 3, 6]
    loss, lr, norm, speed = [ax for ax in pt.plot_runs([one]).axes if ax.get_visible()]
    drawn = {line.get_label(): line.get_ydata() for line in loss.lines}
    assert list(drawn['batch_loss']) == [r['batch_loss'] for r in one.records if 'batch_loss' in r]
    assert [line.get_xdata()[0] for ax in (loss, lr, norm, speed) for line in ax.lines if line.get_linestyle() == ':'] == [3]*4
    assert {t.get_text() for t in lr.get_legend().get_texts()} == {'lr_MP', 'lr_decoder', 'lr_vision_encoder'}


def test_a_picture_of_several_runs(runs, tmp_path):
    assert command(runs, 'parts', 'parts', '--curves', tmp_path/'p.png').strip() == str(tmp_path/'p.png')
    with Image.open(tmp_path/'p.png') as im: assert im.width > 800 and len(im.convert('RGB').getcolors(10**6)) > 50
    assert {line.get_color() for line in pt.plot_runs([pt.load_run(runs/'parts')]*2).axes[0].lines} == {'C0', 'C1'}


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path):
    (tmp_path/'log.jsonl').write_text('\n'.join(json.dumps(dict(step=s, batch_loss=None if s == 2 else 1.)) for s in (1, 2, 3))+'\n{"torn')
    values = pt.series(pt.load_run(tmp_path), 'batch_loss')[1]
    assert math.isnan(values[1]) and len(values) == 3
    pt.plot_runs([pt.load_run(tmp_path)])


def test_status(runs, tmp_path):
    lines = command(runs, 'parts').splitlines()
    assert lines[0] == 'parts: done, went on 1 time' and lines[1].startswith('step 6 | ') and 'val_loss' in lines[1] and 'ago' in lines[1]
    assert lines[2].startswith('step_6 ') and 'complete' in lines[2] and 'last' in lines[2]
    (tmp_path/'log.jsonl').write_text('')
    assert pt.status_lines(tmp_path)[1:] == ['no update yet'] and pt.list_checkpoints(tmp_path) == []


def test_gpus_are_asked(tmp_path, monkeypatch):
    "A program of this name answers as nvidia-smi does."
    smi = tmp_path/'nvidia-smi'
    smi.write_text('#!/bin/sh\necho "0, NVIDIA H100 80GB HBM3, 97 %, 60123 MiB, 81559 MiB"\n')
    smi.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    assert pt.gpu_lines() == ['GPU 0, NVIDIA H100 80GB HBM3, 97 %, 60123 MiB, 81559 MiB']
