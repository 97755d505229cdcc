"The command that asks whether a model looks, on a checkpoint of a real run."
import json
import sys

from commands import TINY, run, train
from nanovlm_nb.answers.look import VIEWS


def test_the_panel_of_a_checkpoint(tmp_path):
    train([*TINY, '--run_name', 'r', '--dtype', 'float32', '--ask_samples', 0], tmp_path)
    panel = json.loads(run([sys.executable, '-m', 'nanovlm_nb.cli', 'eval', 'checkpoints/r/step_6', '--json'], tmp_path).stdout)
    assert {k for k in panel if k.startswith('look/')} == {'look/answers'} | {f'look/{what}{v}' for what in ('val_loss', 'accuracy') for v in VIEWS}
    assert all(0 <= panel[f'look/accuracy{v}'] <= 1 for v in VIEWS) and panel['look/answers'] > 0
