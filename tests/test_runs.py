"Curves and status of a run that was really made, in two parts."

import math
import os

import pytest
from commands import TINY, nanovlm, train

from nanovlm_nb.core.plots import plot_curves
from nanovlm_nb.core.run_dir import read_log
from nanovlm_nb.tools import runs as pt

SHORT = [*TINY, '--ask_samples', '0', '--val_size', '8', '--run_name', 'parts']


@pytest.mark.usefixtures('one_thread')
def test_what_is_drawn_and_said_is_what_was_written(tmp_path):
    "Every update is on the curve. A run stopped after 3 updates and went on to 6."
    for more in (['--max_training_steps', '3'], ['--resume', 'True']):
        train([*SHORT, *more], tmp_path)
    records = read_log(pt.log_of(tmp_path / 'checkpoints' / 'parts'))
    axes = plot_curves(records).axes
    drawn = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes[0].lines
    }
    assert drawn['batch_loss'] == (
        list(range(1, 7)),
        [r['batch_loss'] for r in records if 'batch_loss' in r],
    ) and drawn['val_loss'][0] == [0, 3, 6]
    assert {t.get_text() for t in axes[1].get_legend().get_texts()} == {
        'lr_MP',
        'lr_decoder',
        'lr_vision_encoder',
    }
    lines = nanovlm(['runs', 'checkpoints/parts'], tmp_path).stdout.splitlines()
    assert (
        lines[0] == 'parts: done'
        and lines[1].startswith('step 6 | ')
        and 'val_loss' in lines[1]
    )
    assert (
        lines[2].startswith('step_6 ') and 'complete' in lines[2] and 'last' in lines[2]
    )


def test_a_loss_that_is_not_finite_is_a_gap():
    line = (
        plot_curves(
            [dict(step=s, batch_loss=None if s == 2 else 1.0) for s in (1, 2, 3)]
        )
        .axes[0]
        .lines[0]
    )
    assert [math.isnan(v) for v in line.get_ydata()] == [False, True, False]


def test_gpus_are_asked(tmp_path, monkeypatch):
    "A program of this name answers as nvidia-smi does."
    smi = tmp_path / 'nvidia-smi'
    smi.write_text(
        '#!/bin/sh\necho "0, NVIDIA H100 80GB HBM3, 97 %, 60123 MiB, 81559 MiB"\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    assert pt.gpu_lines() == [
        'GPU 0, NVIDIA H100 80GB HBM3, 97 %, 60123 MiB, 81559 MiB'
    ]
