"What somebody meets first: the name of a run, the list of runs, a question to the newest; and what must not reach a terminal."

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import TINY
from PIL import Image, ImageChops

from nanovlm_nb.cli import main
from nanovlm_nb.core.config import get_run_name
from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.core.run_dir import checkpoints, read_pointer
from nanovlm_nb.data.shapes import shapes_dataset

pytestmark = pytest.mark.usefixtures('one_thread')
ROOT = Path(__file__).resolve().parent.parent
SHORT = [
    *TINY,
    '--max_training_steps',
    '8',
    '--eval_interval',
    '4',
    '--save_interval',
    '1',
    '--ask_samples',
    '4',
]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory in which somebody has trained, and the directory of that run."
    home = tmp_path_factory.mktemp('first')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(['train', *SHORT]) == 0
    (made,) = (home / 'checkpoints').iterdir()
    return home, made


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    "A copy of it, which is current; the run's directory, relative."
    shutil.copytree(place[0] / 'checkpoints', tmp_path / 'checkpoints')
    monkeypatch.chdir(tmp_path)
    return Path('checkpoints') / place[1].name


def said(capsys, *words):
    "What a command writes."
    capsys.readouterr()
    main([*map(str, words)])
    return capsys.readouterr().out


def test_a_run_is_called_after_its_data_and_the_date(place):
    assert re.fullmatch(r'shapes-\d{4}-\d{6}', place[1].name)
    for line, name in (
        ('--long_run_name', r'nanoVLM_shapes-vit_64_.*_1xGPU_.*'),
        ('--preset nanovlm', r'nanoVLM_siglip2-.*_1xGPU_bs16_40000_.*'),
        (
            '--preset nanovlm --long_run_name False',
            r'FineVision_concat_shuffled_2-\d{4}-\d{6}',
        ),
    ):
        vlm_cfg, train_cfg, _ = parse_args(line.split())
        assert re.fullmatch(name, get_run_name(train_cfg, vlm_cfg))


def test_a_run_without_a_preset_keeps_its_newest_checkpoints_and_the_best(place):
    kept = {p.name for p in checkpoints(place[1])}
    assert kept == {f'step_{n}' for n in range(4, 9)} | {
        read_pointer(place[1], 'best_checkpoint').name
    }


def test_runs_are_listed(here, capsys):
    heading, line = said(capsys, 'runs').splitlines()
    assert heading.split() == [
        'run',
        'status',
        'update',
        'loss',
        'best',
        'size',
        'written',
    ]
    log = [json.loads(text) for text in (here / 'log.jsonl').read_text().splitlines()]
    loss = [r['batch_loss'] for r in log if 'batch_loss' in r][-1]
    best = min(r['val_loss'] for r in log if 'val_loss' in r)
    assert line.split()[:5] == [
        here.name,
        'done',
        '8',
        f'{loss:.4g}',
        f'{best:.4g}',
    ] and line.endswith(' ago')
    assert said(capsys, 'runs', 'checkpoints').splitlines()[1][:60] == line[:60]
    assert said(capsys, 'runs', here).splitlines()[0] == f'{here.name}: done', (
        'one run is shown in full'
    )


def test_ask_alone_asks_the_newest_run_about_a_picture_that_it_kept(here, capsys):
    first, *answer, last = said(capsys, 'ask').splitlines()
    kept = json.loads((here / 'example.json').read_text())
    assert (
        first == f'{here}/example.png: {kept["question"]}'
        and last == f'(the right answer: {kept["answer"]})'
        and answer
    )
    rows = [row for row in shapes_dataset(16, 'validation') if len(row['images']) == 1]
    same = [
        row
        for row in rows
        if not ImageChops.difference(
            row['images'][0].convert('RGB'), Image.open(here / 'example.png')
        ).getbbox()
    ]
    assert same and (kept['question'], kept['answer']) in [
        (t['user'], t['assistant']) for t in same[0]['texts']
    ], 'it is a held-out one'
    assert (
        json.loads(said(capsys, 'ask', here, '--json'))['answer'] == '\n'.join(answer)
        and said(capsys, 'ask', '--prompt', 'Which colour?').count('\n') == 1
    )
    (here / 'example.json').unlink()
    with pytest.raises(SystemExit) as end:
        main(['ask'])
    assert (
        end.value.code == 2
        and 'keeps no picture to ask about: give --image PICTURE and --prompt QUESTION'
        in capsys.readouterr().err
    )


def test_a_config_that_a_tool_has_sorted_is_the_same_run(here, capsys):
    "Keys of YAML have no order. The ids of the added tokens have one, and the run goes on with it."
    config = here / 'config.yaml'
    before = json.loads((here / 'step_8' / 'config.json').read_text())[
        'vlm_extra_tokens'
    ]
    config.write_text(
        yaml.safe_dump(yaml.safe_load(config.read_text()), sort_keys=True)
    )
    assert (
        main(
            [
                'train',
                '--config',
                str(config),
                '--run_name',
                here.name,
                '--resume',
                'True',
                '--max_training_steps',
                '9',
            ]
        )
        == 0
    )
    after = json.loads((here / 'step_9' / 'config.json').read_text())[
        'vlm_extra_tokens'
    ]
    assert [*after.items()] == [*before.items()] and next(iter(after)) == 'image_token'


def test_a_terminal_gets_no_commands_of_others(here, capsys):
    "Names, states and answers in a run from elsewhere; what is said of a path that does not exist."
    odd = here.rename(here.with_name('odd\x1b[2J'))
    (odd / 'status').write_text('done\x1b]0;title\x07\n')
    kept = json.loads((odd / 'example.json').read_text()) | dict(
        answer='red\x1b[31m\u202e'
    )
    (odd / 'example.json').write_text(json.dumps(kept))
    for words in (['runs'], ['runs', odd], ['ask', odd]):
        text = said(capsys, *words)
        assert (
            not re.search('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]', text)
            and r'\x1b' in text
        ), words
    with pytest.raises(SystemExit):
        main(['ask', './no\x1b[2Jwhere', '--prompt', 'x'])
    error = capsys.readouterr().err
    assert '\x1b' not in error and r'no\x1b[2Jwhere' in error
    assert json.loads(said(capsys, 'ask', odd, '--json').splitlines()[-1])[
        'images'
    ] == [f'{odd}/example.png'], 'JSON keeps every character'


def test_a_list_may_be_cut_short(here):
    "As `nanovlm runs | head -1` does: nobody reads the rest, and that is no fault."
    command = f'{sys.executable} -m nanovlm_nb.cli runs {" ".join([str(here)] * 200)} | head -1'
    done = subprocess.run(
        ['bash', '-c', command],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert (done.stdout.count('\n'), done.stderr) == (1, '')


# --- before there is a program


def make(folder: Path, *, uv: bool) -> subprocess.CompletedProcess:
    "`make -n train` on a machine whose only Python is too new; `uv` may be there."
    tools = folder / 'bin'
    tools.mkdir()
    for name in ('sh', 'sed', 'getconf', 'make', 'test', 'echo', 'env'):
        (tools / name).symlink_to(shutil.which(name))
    (tools / 'python3').write_text('#!/bin/sh\nexit 1\n')  # to each question
    (tools / 'python3').chmod(0o755)
    if uv:
        (tools / 'uv').symlink_to(tools / 'python3')
    for name in ('Makefile', 'settings.ini', 'setup.py', 'constraints.txt'):
        shutil.copy(ROOT / name, folder)
    words = ['make', *(['-n'] if uv else []), 'train']
    return subprocess.run(
        words,
        cwd=folder,
        env=dict(PATH=str(tools)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_where_no_python_fits_uv_fetches_one(tmp_path):
    done = make(tmp_path, uv=True)
    assert (
        'test -x .venv/bin/python || uv venv --seed --python 3.13 .venv'
        in done.stdout.splitlines()
    ), done.stderr


def test_where_no_python_fits_and_no_uv_is_there_it_is_said(tmp_path):
    done = make(tmp_path, uv=False)
    assert (
        done.returncode
        and 'missing: Python 3.10 to 3.13. Install one' in done.stdout
        and 'or install uv' in done.stdout
    )
    assert not (tmp_path / '.venv').exists()
