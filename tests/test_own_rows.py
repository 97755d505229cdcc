"Rows that come from Python: commands find them in the run, a processor of your own is not forgotten, and what is exported is what is in memory."

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from commands import record
from PIL import Image

from nanovlm_nb import Asker, evaluate, export, load, read_log, run, train
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import tiny
from nanovlm_nb.core.settings import load_yaml
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data import kept
from nanovlm_nb.data.images import ImageProcessor, open_image
from nanovlm_nb.data.loader import get_dataloaders
from nanovlm_nb.data.sources import MapSource

pytestmark = pytest.mark.usefixtures('one_thread')
COLOURS = dict(red=(220, 30, 30), green=(30, 160, 60), blue=(40, 60, 220))
SETTINGS = dict(
    quiet=True,
    max_training_steps=6,
    save_interval=2,
    eval_interval=3,
    max_keep_ckpts=-1,
    dtype='float32',
    vit_hidden_dim=32,
    vit_n_heads=2,
    lm_hidden_dim=32,
    lm_inter_dim=64,
    lm_n_heads=2,
    lm_n_kv_heads=1,
    lm_n_blocks=1,
)


def picture(i):
    "A noisy picture of one colour; no two are alike."
    colour = [*COLOURS.values()][i % 3]
    noise = np.random.default_rng(i).normal(0, 20, (40, 40, 3))
    return Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8))


ROWS = [(picture(i), 'Which colour?', [*COLOURS][i % 3]) for i in range(60)]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory with a run of rows in memory, which was moved."
    cwd = tmp_path_factory.mktemp('rows')
    with pytest.MonkeyPatch.context() as m:
        m.chdir(cwd)
        train(ROWS, run_name='r', **SETTINGS)
        (cwd / 'elsewhere').mkdir()
        (cwd / 'checkpoints' / 'r').rename(cwd / 'elsewhere' / 'r')
        ROWS[0][0].save(cwd / 'red.png')
    return cwd


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def refused(words, capsys) -> str:
    "The one line that a command answers with."
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(w) for w in words])
    said = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and 'Traceback' not in ''.join(said)
    return said[-1]


# --- rows stay with their run


def test_every_command_finds_the_rows_of_a_run_that_was_moved(capsys):
    assert main(['eval', 'elsewhere/r', '--json']) in (0, None)
    assert json.loads(capsys.readouterr().out) == json.loads(
        Path('elsewhere/r/answers.json').read_text()
    )
    assert main(['replay', 'elsewhere/r', '4']) in (0, None)
    logged = next(
        r
        for r in read_log('elsewhere/r/log.jsonl')
        if r['step'] == 4 and 'batch_loss' in r
    )
    said = capsys.readouterr().out
    assert (
        'the same samples as in the log' in said
        and f'loss {logged["batch_loss"]:.4f}, gradient norm {logged["grad_norm"]:.4f}'
        in said
    )
    main(['check', 'elsewhere/r'])
    assert 'rows: 54 for training and 6 for validation' in capsys.readouterr().out
    assert main(
        ['ask', 'elsewhere/r', '--image', 'red.png', '--prompt', 'Which colour?']
    ) in (0, None)


def test_a_held_out_file_is_counted_whole(capsys, tmp_path):
    "As many questions as the file has, by question, the same from Python; a row that cannot be read is named."
    lines = []
    for i in range(8):
        picture(i).save(tmp_path / f'{i}.png')
        turn = dict(question='Which colour?', answer=[*COLOURS][i % 3])
        if i > 5:
            turn = dict(question='Is it red?', answer='no')
        lines.append(json.dumps(dict(image=f'{i}.png', **turn)))
    file = tmp_path / 'held_out.jsonl'
    file.write_text('\n'.join(lines))
    assert main(['eval', 'elsewhere/r', '--data', str(file), '--json']) in (0, None)
    scores = json.loads(capsys.readouterr().out)
    asked = {kind: count for kind, (_, count) in scores['answers'].items()}
    assert asked == {'Which colour?': 6, 'Is it red?': 2, 'all': 8}
    assert json.loads(json.dumps(evaluate('elsewhere/r', file))) == scores
    export('elsewhere/r', tmp_path / 'exported', 'nanovlm')  # which is of no run
    capsys.readouterr()
    main(['eval', str(tmp_path / 'exported'), '--data', str(file), '--json'])
    assert json.loads(capsys.readouterr().out) == scores
    (tmp_path / '3.png').unlink()
    main(['eval', 'elsewhere/r', '--data', str(file)])
    said = capsys.readouterr().out
    assert re.search(r'^all +7 ', said, re.MULTILINE) and '3.png' in said, said
    with pytest.raises(UsageError, match=r'3\.png'):
        evaluate('elsewhere/r', file)
    assert 'are for an evaluation without --tasks' in refused(
        ['eval', 'elsewhere/r', '--tasks', 'digits', '--data', file], capsys
    )


def test_the_command_goes_on_as_python_would(capsys):
    "Back to update 2 and forward again: the same figures and weights, with the random parts of pictures that it had."
    shutil.copytree('elsewhere/r', 'runs/r')
    before = record('runs/r')
    assert (
        main(
            [
                'train',
                '--run_name',
                'r',
                '--vlm_checkpoint_path',
                'runs',
                '--resume',
                'True',
                '--load_from',
                str(Path('runs/r/step_2').resolve()),
            ]
        )
        == 0
    )
    assert (
        record('runs/r') == before
        and load_yaml('runs/r/config.yaml', given=None)[1].random_crop == 0.7
    )


@pytest.mark.parametrize('form', ['data frame', 'files', 'loaders'])
def test_rows_of_any_form_are_kept(form, tmp_path):
    rows = ROWS[:20]
    if form == 'files':
        for i, (im, *_) in enumerate(rows):
            im.save(tmp_path / f'{i}.png')
        rows = [(str(tmp_path / f'{i}.png'), q, a) for i, (_, q, a) in enumerate(rows)]
    table = pd.DataFrame(rows, columns=['image', 'question', 'answer'])
    if form == 'loaders':
        run_dir = run(
            *tiny(
                run_name='l',
                vlm_checkpoint_path=str(tmp_path),
                max_training_steps=1,
                val_size=4,
                data_cutoff_idx=None,
                ask_samples=4,
            ),
            loaders=partial(
                get_dataloaders,
                rows=[
                    dict(row_id=i, images=[im], texts=[dict(user=q, assistant=a)])
                    for i, (im, q, a) in enumerate(rows)
                ],
            ),
        )
    else:
        run_dir = train(
            table if form == 'data frame' else rows,
            run_name='l',
            vlm_checkpoint_path=str(tmp_path),
            **SETTINGS | dict(max_training_steps=1),
        ).run_dir
    for file in tmp_path.glob('*.png'):
        file.unlink()
    assert (
        load_yaml(run_dir / 'config.yaml', given=None)[1].train_dataset_path == 'rows'
    )
    assert main(['eval', str(run_dir), '--json']) in (0, None)


def test_more_than_a_run_keeps_is_said_in_a_sentence(monkeypatch, capsys, tmp_path):
    "Held-out rows alone, then none: each command works, or says in one line what it lacks."

    def limited(most, name):
        monkeypatch.setattr(kept, 'KEEP_BYTES', most)
        return train(
            ROWS,
            run_name=name,
            vlm_checkpoint_path=str(tmp_path),
            **SETTINGS | dict(max_training_steps=2),
        ).run_dir

    some = limited(60_000, 'some')
    none = limited(1000, 'none')
    assert {p.name for p in some.glob('*.parquet')} == {'held_out.parquet'} and not [
        *none.glob('*.parquet')
    ]
    assert main(['eval', str(some), '--json']) in (0, None)
    for run_dir, commands in (
        (some, ['replay', 'check']),
        (none, ['replay', 'check', 'eval']),
    ):
        assert 'not all rows are kept' in (run_dir / 'train.log').read_text()
        for command in commands:
            assert 'its rows were given in Python and are not kept there' in refused(
                [command, run_dir, *['2'] * (command == 'replay')], capsys
            )


def test_rows_of_a_run_from_elsewhere_are_data(capsys, tmp_path):
    shutil.copytree('elsewhere/r', tmp_path / 'r')
    (tmp_path / 'r' / 'rows.parquet').rename(tmp_path / 'secret.parquet')
    (tmp_path / 'r' / 'rows.parquet').symlink_to(tmp_path / 'secret.parquet')
    assert 'is a link' in refused(['eval', tmp_path / 'r'], capsys)
    (tmp_path / 'r' / 'rows.parquet').unlink()
    (tmp_path / 'r' / 'rows.parquet').write_bytes(b'PAR1')
    assert 'is damaged' in refused(['eval', tmp_path / 'r'], capsys)
    assert 'train_dataset_path RUN/rows.parquet' in refused(
        [
            'train',
            '--config',
            'elsewhere/r/config.yaml',
            '--run_name',
            'another',
            '--vlm_checkpoint_path',
            tmp_path,
        ],
        capsys,
    )


# --- what a run says of itself


def test_a_short_run_asks_about_no_more_samples_than_it_has_seen(tmp_path):
    vlm, cfg = tiny(
        run_name='r',
        vlm_checkpoint_path=str(tmp_path),
        max_training_steps=1,
        batch_size=1,
        val_size=60,
        ask_samples=60,
    )
    run_dir = run(vlm, cfg)
    seen = next(r['samples'] for r in read_log(run_dir / 'log.jsonl') if 'samples' in r)
    assert (
        seen < 60
        and f'about {seen} held-out samples' in (run_dir / 'train.log').read_text()
    )


# --- an image processor of your own


class Swapped(ImageProcessor):
    "Red and blue change places."

    def __call__(self, image, rng=None):
        tiles, grid = super().__call__(image, rng)
        return tiles.flip(1), grid


def swapped(cfg, transforms=()):
    return Swapped(
        cfg.max_img_size,
        cfg.vit_img_size,
        cfg.resize_to_max_side_len,
        tuple(transforms),
    )


def wrapped(*args):
    return get_dataloaders(
        *args,
        rows=[
            dict(row_id=i, images=[im], texts=[dict(user=q, assistant=a)])
            for i, (im, q, a) in enumerate(ROWS)
        ],
        processor=swapped,
    )


@pytest.mark.parametrize('how', ['partial', 'function'])
def test_a_processor_of_your_own_is_asked_for_wherever_the_model_is_opened(
    how, capsys, tmp_path
):
    configs = tiny(
        run_name='p',
        vlm_checkpoint_path=str(tmp_path),
        max_training_steps=1,
        val_size=6,
        data_cutoff_idx=None,
        ask_samples=4,
    )
    loaders = (
        wrapped
        if how == 'function'
        else partial(
            get_dataloaders,
            rows=[
                dict(row_id=0, images=[im], texts=[dict(user=q, assistant=a)])
                for im, q, a in ROWS
            ],
            processor=swapped,
        )
    )
    run_dir = run(*configs, loaders=loaders)
    assert 'processor' in (run_dir / 'own_parts').read_text().split()
    for words in (
        ['ask', run_dir, '--image', 'red.png', '--prompt', 'x'],
        ['eval', run_dir],
        ['export', run_dir, tmp_path / 'out', '--format', 'smolvlm'],
    ):
        assert 'was trained with an image processor of its own' in refused(
            words, capsys
        )
    with pytest.raises(UsageError, match='an image processor of its own'):
        load(run_dir)
    asker = load(run_dir, processor=swapped(configs[0]))
    assert asker.tiles(ROWS[0][0])[0][0][0, 2].float().mean() > 180, (
        'red is where blue was'
    )
    with pytest.raises(UsageError, match='an image processor of its own'):
        export(asker, tmp_path / 'out')
    with pytest.raises(UsageError, match='an image processor of its own'):
        load(export(asker, tmp_path / 'weights', 'nanovlm'))
    assert (
        run(
            *tiny(
                run_name='p',
                vlm_checkpoint_path=str(tmp_path),
                max_training_steps=2,
                val_size=6,
                data_cutoff_idx=None,
                ask_samples=4,
                resume=True,
            ),
            loaders=loaders,
        )
        == run_dir
    )


# --- in memory


def test_what_is_in_memory_is_exported(tmp_path):
    "Weights that have changed since they were read, and a model that was never saved."
    asker = load('elsewhere/r')
    with torch.no_grad():
        asker.model.MP.proj.weight.mul_(-1)
    assert load(
        export(asker, tmp_path / 'changed', 'nanovlm')
    ).model.MP.proj.weight.equal(asker.model.MP.proj.weight)
    asker.model.folder = None
    assert load(export(asker, tmp_path / 'new', 'nanovlm')).model.MP.proj.weight.equal(
        asker.model.MP.proj.weight
    )


def losses(folder, **parts):
    vlm, cfg = tiny(
        lm_dropout=0.2,
        max_training_steps=6,
        eval_interval=2,
        run_name='r',
        vlm_checkpoint_path=str(folder),
    )
    return [
        r['batch_loss']
        for r in read_log(run(vlm, cfg, **parts) / 'log.jsonl')
        if 'batch_loss' in r
    ]


def ask(trainer):
    "A judge that asks the model, which is in eval mode then."
    Asker.from_model(trainer.base).ask(ROWS[0][0], 'Which colour?', max_new_tokens=2)
    return 0.0


def test_a_judge_that_asks_the_model_leaves_its_dropout(tmp_path):
    assert losses(tmp_path / 'alone') == losses(tmp_path / 'judged', judge=ask)


def test_the_position_in_kept_rows_is_the_position_in_memory(tmp_path):
    rows = [
        dict(row_id=i, images=[im], texts=[dict(user=q, assistant=a)])
        for i, (im, q, a) in enumerate(ROWS)
    ]
    source = MapSource(rows, seed=3, val_size=7)
    kept.keep_rows(tmp_path, source, source.held_out())
    again = MapSource(kept._read_kept(kept.kept_rows(tmp_path)), seed=3, val_size=7)
    order = lambda s: [
        row['id'] for part in (s, s.held_out()) for _, row in part.rows_of(1, 2, 5)
    ]
    assert order(source) == order(again) and source.describe() == again.describe()


def test_what_a_run_keeps_of_pictures_of_16_bits_is_what_its_model_saw(tmp_path):
    "And what nothing reads in its rows is named once."
    rows = [
        dict(
            image=Image.fromarray(np.asarray(im.convert('L')).astype(np.uint16) * 16),
            question=question,
            answers=[answer, f'a {answer}'],
            explanation='light',
        )
        for im, question, answer in ROWS[:20]
    ]
    run_dir = train(
        rows,
        run_name='deep',
        vlm_checkpoint_path=str(tmp_path),
        pixel_max=4095.0,
        **SETTINGS | dict(max_training_steps=1),
    ).run_dir
    again = kept._read_kept(kept.kept_rows(run_dir))
    for row, same in zip(rows, again, strict=True):
        pixels = np.asarray(open_image(row['image'], 4095.0))
        assert pixels.mean() > 50
        assert (np.asarray(open_image(same['images'][0], 4095.0)) == pixels).all()
    unread = 'the rows: not read: all but the commonest of `answers`, explanation\n'
    assert (run_dir / 'train.log').read_text().count(unread) == 1
