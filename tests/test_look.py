"The panel that asks whether a model looks, in real runs: one process, two ranks, a sharded model."
import json
import sys

import pytest
from commands import TINY, run, train
from nanovlm_nb.core.run_dir import read_log
from nanovlm_nb.answers.look import VIEWS


def panels(folder, name): return [r for r in read_log(folder/'checkpoints'/name/'log.jsonl') if 'look/val_loss' in r]


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp('look')
    train([*TINY, '--run_name', 'r', '--look_interval', 2, '--dtype', 'float32', '--ask_samples', 0], folder)
    return folder


def test_panels_are_logged_when_due(alone):
    found = panels(alone, 'r')
    assert [p['step'] for p in found] == [0, 2, 4, 6]
    for p in found:
        assert {k for k in p if k.startswith('look/')} == {'look/answers'} | {f'look/{what}{v}' for what in ('val_loss', 'accuracy') for v in VIEWS}
        assert all(0 <= p[f'look/accuracy{v}'] <= 1 for v in VIEWS) and p['look/answers'] > 0


def test_the_command_says_what_the_run_said(alone):
    "The last panel again, from the checkpoint."
    last = panels(alone, 'r')[-1]
    said = json.loads(run([sys.executable, '-m', 'nanovlm_nb.cli', 'eval', 'checkpoints/r/step_6', '--json'], alone).stdout)
    assert {k: v for k, v in last.items() if k in said} == pytest.approx(said, rel=1e-4)


def test_a_run_without_panels_makes_the_same_updates(alone):
    train([*TINY, '--run_name', 'without', '--dtype', 'float32', '--ask_samples', 0], alone)
    losses = [[r['batch_loss'] for r in read_log(alone/'checkpoints'/n/'log.jsonl') if 'batch_loss' in r] for n in ('r', 'without')]
    assert losses[0] == losses[1] and not panels(alone, 'without')


@pytest.mark.parametrize('sharding', ['ddp', 'zero3'])
def test_two_ranks(alone, tmp_path, sharding):
    "Each rank scores its own packs, in step with the other; at update 0 only the samples without stranger differ."
    train([*TINY, '--run_name', 'r', '--look_interval', 6, '--dtype', 'float32', '--ask_samples', 0, '--gradient_accumulation_steps', 1, '--sharding', sharding], tmp_path, ranks=2)
    mine, theirs = panels(tmp_path, 'r'), panels(alone, 'r')
    assert [p['step'] for p in mine] == [0, 6]
    assert mine[0]['look/val_loss'] == pytest.approx(theirs[0]['look/val_loss'], abs=.05)


STOPPED = """
import os, signal, sys
from pathlib import Path
from nanovlm_nb.core.config import parse_args
from nanovlm_nb.runs.run import run
from nanovlm_nb.training.trainer import Hook

class Stopped(Hook):
    "A signal arrives after update 3, which is no checkpoint, before the panel."
    def after_update(self, trainer, *_):
        if trainer.step == 3 and not Path('sent').exists():
            Path('sent').touch()
            os.kill(os.getpid(), signal.SIGTERM)

vlm_cfg, train_cfg, asked = parse_args(sys.argv[1:])
run(vlm_cfg, train_cfg, hooks=[Stopped()], asked=asked)
"""


def test_a_stop_loses_no_panel(tmp_path):
    (tmp_path/'mine.py').write_text(STOPPED)
    start = [sys.executable, 'mine.py', *TINY, '--run_name', 'r', '--look_interval', 1, '--eval_interval', 6, '--dtype', 'float32', '--ask_samples', 0]
    run(start, tmp_path, check=False)
    assert panels(tmp_path, 'r')[-1]['step'] < 6
    run([*start, '--resume', True], tmp_path)
    assert [p['step'] for p in panels(tmp_path, 'r')] == [*range(7)]
