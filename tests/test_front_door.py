"The front door for parts of your own: what editors and type checkers know of it, and a run with many of them that is split otherwise, killed, and resumed."

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jedi
import pytest
from commands import record
from test_own_parts import own_cells

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import io, os, signal, sys

from nanovlm_nb import Hook, train
from nanovlm_nb.data.shapes import shapes_dataset

class Kill(Hook):
    "Ends the process at once, as a power cut does."
    def after_update(self, trainer, figures):
        if trainer.step == 3: os.kill(os.getpid(), signal.SIGKILL)

class Weighed(Cursor):
    "Rows of the database, every third with three times the weight."
    def rows_of(self, *where):
        for at, row in super().rows_of(*where): yield at, row | dict(weight=1. + 2 * (at % 3 == 0))

def table(file, seed):
    if not os.path.exists(file):
        con = sqlite3.connect(file)
        con.execute('create table t (id integer primary key, png blob, question text, answer text)')
        for i, row in enumerate(r for r in shapes_dataset(80, seed=seed) if len(r['images']) == 1):
            png = io.BytesIO()
            row['images'][0].save(png, 'PNG')
            turn = row['texts'][0]
            con.execute('insert into t values (?,?,?,?)', (i, png.getvalue(), turn['user'], turn['assistant']))
        con.commit()
    return Weighed(file)

if __name__ == '__main__':
    name, packs, micro_batches, how, sharding = sys.argv[1:]
    train(
        dict(easy=table('easy.db', 1), hard=table('hard.db', 2)),
        weights=lambda n: (1.01 - min(n / 100, 1), .01 + min(n / 100, 1)),
        val_rows=[row | dict(weight=1.) for row in shapes_dataset(8, 'validation')],
        model=WithNeoX, loss=weighted, keep_columns=['weight'], hooks=[EMA(.9)] + [Kill()] * (how == 'kill'),
        quiet=True, run_name=name, resume=how == 'resume', max_training_steps=6, eval_interval=2,
        save_interval=2, max_keep_ckpts=-1, ask_samples=0, batch_size=int(packs),
        gradient_accumulation_steps=int(micro_batches), dtype='float32', async_save=False,
        sharding=sharding,
        lm_tie_weights=False, vit_hidden_dim=32, vit_n_heads=2, lm_hidden_dim=32, lm_inter_dim=64, lm_n_heads=2,
        lm_n_kv_heads=1, lm_n_blocks=1, lm_max_length=256, max_sample_length=256)
"""


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    "Starts the script; its directory of the run, and the exit code."
    cwd = tmp_path_factory.mktemp('front')
    (cwd / 'mine.py').write_text('\n\n'.join([*own_cells(), SCRIPT]))

    def begin(name, packs=4, micro_batches=1, how='new', ranks=1, sharding='ddp'):
        several = (
            f'-m torch.distributed.run --standalone --nproc_per_node {ranks}'.split()
        )
        launch = several if ranks > 1 else []
        words = [
            sys.executable,
            *launch,
            'mine.py',
            name,
            packs,
            micro_batches,
            how,
            sharding,
        ]
        done = subprocess.run(
            [*map(str, words)], cwd=cwd, capture_output=True, text=True
        )
        killed = 1 if ranks > 1 else -signal.SIGKILL  # torchrun's own exit code is 1
        assert done.returncode == (killed if how == 'kill' else 0), done.stderr
        return cwd / 'checkpoints' / name

    return begin


@pytest.fixture(scope='module')
def whole(start):
    return record(start('whole'))


def test_killed_and_resumed_it_is_the_same_run(start, whole):
    "Weights of samples, a source, a decoder and a mixture that changes, all of one's own, and an average of the weights: to the last bit."
    start('killed', how='kill')
    assert record(start('killed', how='resume')) == whole
    assert len([r for r in whole[0] if 'batch_loss' in r]) == 6


def test_sharded_it_is_resumed_too(start):
    "Each rank gets its pieces of the weights that train and of their average."
    how = dict(packs=1, micro_batches=2, ranks=2, sharding='zero3')
    whole = record(start('whole_zero3', **how))
    start('killed_zero3', how='kill', **how)
    assert record(start('killed_zero3', how='resume', **how)) == whole


@pytest.mark.parametrize(
    'packs, micro_batches, ranks, sharding',
    [(2, 2, 1, 'ddp'), (1, 2, 2, 'ddp'), (2, 1, 2, 'zero2'), (1, 2, 2, 'zero3')],
)
def test_it_does_not_matter_how_an_update_is_split(
    start, whole, packs, micro_batches, ranks, sharding
):
    "Losses and norms agree to rounding, and the samples are the same."
    name = f'split_{packs}_{micro_batches}_{sharding}'
    split = record(start(name, packs, micro_batches, ranks=ranks, sharding=sharding))
    pairs = [
        (a, b) for a, b in zip(whole[0], split[0], strict=True) if 'batch_loss' in a
    ]
    assert len(pairs) == 6
    for a, b in pairs:
        assert a['batch_digest'] == b['batch_digest']
        assert a['batch_loss'] == pytest.approx(b['batch_loss'], rel=1e-4)
        assert a['grad_norm'] == pytest.approx(b['grad_norm'], rel=1e-3)


# --- what a user's editor and type checker know


def test_a_type_checker_finds_a_wrong_setting(tmp_path):
    "Names and values of settings are checked, and so is what comes back."
    (tmp_path / 'user.py').write_text(
        'from nanovlm_nb import train\n'
        'm = train([], max_trainign_steps=3)\n'
        "m = train([], lr_mp='high')\n"
        "m = train([], dtype='float23')\n"
        "m = train([], betas=[0.9, 0.99], lr_mp=1e-3, run_name='mine', dtype='bfloat16')\n"
        "n: int = m.ask('a.png', 'What?')\n"
    )
    command = [
        sys.executable,
        '-m',
        'mypy',
        '--config-file',
        ROOT / 'tests' / 'mypy.ini',
    ]
    command += ['--cache-dir', tmp_path / 'cache', tmp_path / 'user.py']
    done = subprocess.run(
        [*map(str, command)],
        cwd=tmp_path,
        env=os.environ | dict(MYPYPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    errors = re.findall(r'user.py:(\d): error: (.*)', done.stdout)
    assert [int(line) for line, _ in errors] == [2, 3, 4, 6], done.stdout
    assert 'did you mean "max_training_steps"?' in errors[0][1]


def test_a_type_checker_knows_the_model_of_a_trainer(tmp_path):
    "A hook and a judge with annotations, as the tutorial has them without."
    (tmp_path / 'user.py').write_text(
        'from nanovlm_nb import Hook\n'
        'from nanovlm_nb.training.trainer import Figures, Trainer\n'
        'class Norm(Hook):\n'
        '    def after_update(self, trainer: Trainer, figures: Figures) -> None:\n'
        "        figures['norm'] = float(sum(p.norm() for p in trainer.base.MP.parameters()))\n"
        'def judge(trainer: Trainer) -> float:\n'
        '    blocks = len([*trainer.base.vision_encoder.modules(), *trainer.base.decoder.blocks])\n'
        '    return float(blocks + trainer.base.cfg.lm_hidden_dim)\n'
        'def wrong(trainer: Trainer) -> float:\n'
        '    return float(trainer.base.cfg.lm_hiden_dim)\n'
    )
    command = [sys.executable, '-m', 'mypy', '--config-file']
    command += [ROOT / 'tests' / 'mypy.ini', '--cache-dir', tmp_path / 'cache']
    done = subprocess.run(
        [*map(str, command), 'user.py'],
        cwd=tmp_path,
        env=os.environ | dict(MYPYPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    errors = re.findall(r'user.py:(\d+): error: (.*)', done.stdout)
    assert [int(line) for line, _ in errors] == [10], done.stdout


@pytest.mark.parametrize(
    'typed, found',
    [
        ('train([], max_training_', ['max_training_samples=', 'max_training_steps=']),
        ('train([], vit_mod', ['vit_model_type=']),
        ('train([], val_r', ['val_rows=']),
        ('m = train([])\nm.lo', ['logps']),
    ],
)
def test_an_editor_completes_settings(typed, found):
    "Fields of both configurations, parts, and what the result can do."
    script = jedi.Script(
        f'from nanovlm_nb import train\n{typed}', project=jedi.Project(ROOT)
    )
    assert [c.name for c in script.complete()] == found
