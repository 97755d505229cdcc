"Curves and status of a run that was really made, in two parts."
import json
import math
import os

import pytest
from commands import TINY, nanovlm, train

from nanovlm_nb.tools import runs as pt

SHORT = [*TINY, '--ask_samples', '0', '--val_size', '8', '--run_name', 'parts']


@pytest.mark.usefixtures('one_thread')
def test_what_is_drawn_and_said_is_what_was_written(tmp_path):
    "Every update is on the curve; a dotted line marks the restart. A run stopped after 3 updates and went on to 6."
    for more in (['--max_training_steps', '3'], ['--resume', 'True']): train([*SHORT, *more], tmp_path)
    one = pt.load_run(tmp_path/'checkpoints'/'parts')
    assert one.restarts == [3] and pt.series(one, 'batch_loss')[0] == list(range(1, 7)) and pt.series(one, 'val_loss')[0] == [0, 3, 6]
    axes = [ax for ax in pt.plot_runs([one]).axes if ax.get_visible()]
    drawn = {line.get_label(): line.get_ydata() for line in axes[0].lines}
    assert list(drawn['batch_loss']) == [r['batch_loss'] for r in one.records if 'batch_loss' in r]
    assert [line.get_xdata()[0] for ax in axes for line in ax.lines if line.get_linestyle() == ':'] == [3]*4
    assert {t.get_text() for t in axes[1].get_legend().get_texts()} == {'lr_MP', 'lr_decoder', 'lr_vision_encoder'}
    lines = nanovlm(['runs', 'checkpoints/parts'], tmp_path).stdout.splitlines()
    assert lines[0] == 'parts: done, went on 1 time' and lines[1].startswith('step 6 | ') and 'val_loss' in lines[1]
    assert lines[2].startswith('step_6 ') and 'complete' in lines[2] and 'last' in lines[2]


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path):
    (tmp_path/'log.jsonl').write_text(''.join(json.dumps(dict(step=s, batch_loss=None if s == 2 else 1.))+'\n' for s in (1, 2, 3)))
    assert [math.isnan(v) for v in pt.series(pt.load_run(tmp_path), 'batch_loss')[1]] == [False, True, False]


def test_gpus_are_asked(tmp_path, monkeypatch):
    "A program of this name answers as nvidia-smi does."
    smi = tmp_path/'nvidia-smi'
    smi.write_text('#!/bin/sh\necho "0, NVIDIA H100 80GB HBM3, 97 %, 60123 MiB, 81559 MiB"\n')
    smi.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    assert pt.gpu_lines() == ['GPU 0, NVIDIA H100 80GB HBM3, 97 %, 60123 MiB, 81559 MiB']
