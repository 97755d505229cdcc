"Errors of use: every command answers each with one line that names the value and the remedy, exit code 2, and leaves nothing behind."

import io
import json
import math
import re
import sys
from inspect import signature
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
from PIL import Image
from commands import TINY, run

from nanovlm_nb.train import main as train_main
from nanovlm_nb.cli import COMMANDS, main
from nanovlm_nb.core.fields import Text, rule_of
from nanovlm_nb.core.config import FIELDS, TrainConfig, VLMConfig, evolve, preset
from nanovlm_nb.core.usage import UsageError

pytestmark = pytest.mark.usefixtures('one_thread')


#: command, arguments, what the line must say. `RUN` is a run of two updates; files of `given` are in the working directory
MISUSES = [
    # flags that are wrong in themselves
    ('train', '--lr_pm 0.1', 'unknown flag `--lr_pm`: did you mean `--lr_mp`?'),
    ('train', 'stray', '`stray` belongs to no flag: write --FLAG VALUE'),
    ('train', '--batch_size two', 'batch_size is two: give a whole number above 0'),
    (
        'train',
        '--batch_size 1000000000000',
        'batch_size is 1000000000000: give a whole number above 0, 4294967295 at most',
    ),
    (
        'train',
        '--batch_size 100000 --gradient_accumulation_steps 8',
        '800000 packs of a rank in an update, give 16384 at most',
    ),
    ('train', '--betas 0.9', 'betas is [0.9]: give two shares'),
    ('train', '--betas .9 .99 .999', 'betas is [0.9, 0.99, 0.999]: give two shares'),
    (
        'train',
        '--timeout_s 1e300',
        'timeout_s is 1e300: give seconds, above 0 and at most a million',
    ),
    ('train', 'deep.yaml', 'deep.yaml is no YAML: it is nested too deeply'),
    (
        'train',
        '--lora_rank 4 --load_from RUN --lora_targets k_prog',
        "lora_targets names 'k_prog', and no linear layer of this model is called so",
    ),
    # what a run starts from
    ('train', '--load_from out/none.pth', 'out/none.pth'),
    ('train', '--train_dataset_path bad.jsonl', 'no line of bad.jsonl can be used'),
    (
        'train',
        '--train_dataset_path bda.jsonl',
        'bda.jsonl: No such file or directory, did you mean bad.jsonl?',
    ),
    (
        'train',
        '--train_dataset_path checkpionts',
        'train_dataset_path checkpionts: there is no such file or folder here, did you mean checkpoints?; the hub did not give it',
    ),
    (
        'train',
        '--train_dataset_path picture.png',
        "Check train_dataset_path=picture.png and train_dataset_name=['default']: default: picture.png is no data set: give a file that ends in .parquet",
    ),
    # commands that foretell a run
    ('replay', 'RUN', 'has skipped no update: say which one you mean'),
    ('replay', 'RUN 99', 'update 99 was never made'),
    # commands that use a model
    ('ask', 'nowhere --prompt x', 'nowhere'),
    (
        'eval',
        'RUN --tasks missing.parquet',
        '--tasks: there is no file missing.parquet: correct the path',
    ),
    (
        'eval',
        'RUN --tasks shapes --limit 2 --out result.json',
        '--out result.json holds the result of another evaluation: give another --out',
    ),
    (
        'eval',
        'RUN --tasks shapes --limit 2 --out bad.jsonl',
        '--out bad.jsonl is not the result of an evaluation: give another --out',
    ),
    (
        'eval',
        'RUN --tasks shapes --limit 2 --out list.json',
        '--out list.json is not the result of an evaluation: give another --out',
    ),
    (
        'eval',
        'RUN --tasks shapes --limit 2 --device tpu',
        "device is 'tpu': give cpu, mps, cuda or cuda:N",
    ),
    (
        'eval',
        'RUN --tasks shapes --limit 2 --device cuda:99',
        "device is 'cuda:99', this machine has ",
    ),
    (
        'export',
        'RUN out --format peft',
        'it holds no adapters: format peft is for a run with lora_rank',
    ),
    (
        'ask',
        'nowhere --page',
        'nowhere' if find_spec('gradio') else 'pip install nanovlm_nb[demo]',
    ),
    (
        'classify',
        '--predict RUN',
        'to sort pictures, give --predict CHECKPOINT and one or more files',
    ),
    ('classify', '--predict RUN picture.png', 'checkpoints/r cannot sort pictures'),
    (
        'classify',
        '--model nowhere/x',
        'nowhere/x is no directory, and the hub did not give it',
    ),
    # commands that look at runs
    (
        'runs',
        'nowhere',
        "runs is 'nowhere': give the directory of a run, or log.jsonl in it",
    ),
]
# `nanovlm train` gets these where the model does not matter: nothing else is looked for
SMALL = ['--data_cutoff_idx', '20', '--val_size', '4', '--progress_bar', 'False']


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory with a run of two updates and some files."
    home = tmp_path_factory.mktemp('misuse')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert (
            main(
                [
                    'train',
                    *TINY,
                    '--max_training_steps',
                    '2',
                    '--eval_in_epochs',
                    'False',
                    '--ask_samples',
                    '0',
                    '--run_name',
                    'r',
                ]
            )
            == 0
        )
    (home / 'bad.jsonl').write_text('{"a": 1}\n')
    (home / 'list.json').write_text('[1]')
    (home / 'deep.yaml').write_text(f"train: {{notes: {'[' * 3000}1{']' * 3000}}}")
    (home / 'result.json').write_text(
        json.dumps(
            dict(
                global_step=2,
                checkpoint='checkpoints/r/step_2',
                limit=60,
                tasks=['shapes'],
                results={'shapes_exact_match': 0.5},
                samples={'shapes': 60},
                prompts={'shapes': 'plain'},
            )
        )
    )
    Image.new('RGB', (8, 8), 'red').save(home / 'picture.png')
    return home


def files_below(folder: Path) -> dict[str, bytes]:
    "Every file; logs grow and are left out, and a start that is refused may leave an empty directory."
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob('*'))
        if p.is_file() and not p.name.startswith('log.')
    }


@pytest.mark.parametrize(
    'command, line, said', MISUSES, ids=[f'{c} {line}'[:70] for c, line, _ in MISUSES]
)
def test_a_misuse_gets_one_line(command, line, said, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr(sys, 'stdin', io.StringIO(''))
    before = files_below(place)
    args = [re.sub(r'\bRUN\b', 'checkpoints/r', word) for word in line.split()]
    with pytest.raises(SystemExit) as end:
        main(
            [command, *(SMALL if command == 'train' and line != 'stray' else []), *args]
        )
    assert end.value.code == 2
    err = capsys.readouterr().err
    ours = [
        text
        for text in err.splitlines()
        if text.startswith(f'nanovlm {command}: error: ')
    ]
    assert len(ours) == 1 and err.splitlines()[-1] == ours[0] and said in ours[0], err
    assert 'Traceback' not in err and len(err.splitlines()) <= 3, err
    after = files_below(place)
    assert {
        n for n in after.keys() | before.keys() if after.get(n) != before.get(n)
    } == set()


@pytest.mark.parametrize('command', COMMANDS)
def test_every_number_of_a_command_has_bounds(command):
    "Not one that is no number, and none that is not finite."
    for name in (
        n
        for n, p in signature(COMMANDS[command]).parameters.items()
        if rule_of(p.annotation)[0] in (int, float) and p.default is not p.empty
    ):
        for wrong in ('x', 'nan', 'inf', '-1'):
            places = dict(
                ask=['a/b'], export=['a/b', 'new'], runs=['.'], replay=['.']
            ).get(command, [])
            with pytest.raises(UsageError, match=f'{name} is {wrong}: give '):
                main([command, *places, f'--{name}={wrong}', '--debug'])


# --- what is no error of use


def test_a_fault_of_ours_shows_its_traceback(monkeypatch, tmp_path):
    "A ValueError that torch, Python or the middle of an update raises is none of the user's."
    monkeypatch.chdir(tmp_path)
    from nanovlm_nb.runs import run as run_module

    def broken(*_, **__):
        return int('x')

    monkeypatch.setattr(run_module, 'get_dataloaders', broken)
    with pytest.raises(ValueError, match='invalid literal') as error:
        main(['train', '--run_name', 'x', *SMALL])
    assert not isinstance(error.value, UsageError)
    assert (tmp_path / 'checkpoints' / 'x' / 'status').read_text() == 'failed\n', (
        'what is left helps to find it'
    )


def test_debug_shows_the_traceback(monkeypatch):
    with pytest.raises(ValueError, match='batch_size is 0'):
        main(['train', '--batch_size', '0', '--debug'])
    monkeypatch.setenv('NANOVLM_DEBUG', '1')
    with pytest.raises(ValueError, match='batch_size is 0'):
        train_main(['--batch_size', '0'])


# --- real processes


def test_two_ranks_say_it(tmp_path):
    "What torchrun says afterwards is its own."
    done = run(
        [
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--standalone',
            '--nproc_per_node',
            '2',
            '-m',
            'nanovlm_nb.train',
            *TINY,
            '--train_dataset_path',
            './missing',
            '--run_name',
            'x',
            '--log_wandb',
            'False',
        ],
        tmp_path,
        check=False,
    )
    assert done.returncode and 'nanovlm train: error: ' in done.stderr, done.stderr[
        -3000:
    ]
    assert 'nanovlm_nb/' not in done.stderr and not [
        p for p in tmp_path.rglob('*') if p.is_file()
    ], 'no traceback of ours, no file'


# --- every field, systematically

KINDS = {
    n: k
    for c in (VLMConfig, TrainConfig)
    for n, k in get_type_hints(c, include_extras=True).items()
    if n in FIELDS
}
NO_VALUE = {
    int: (-2, 1.5, math.inf, '1.5', True),
    float: (math.inf, -math.inf, math.nan, 'x', False),
    bool: ('False', 1, 0),
    str: (3, '\udcff'),
}


@pytest.mark.parametrize('name', KINDS)
def test_a_wrong_value_is_refused_with_the_rule_in_words(name):
    "-2 is below all that counts can be; an empty text is a variable that a script forgot to set; only a few texts may be empty."
    many = rule_of(KINDS[name])[0] is list
    whole = (
        KINDS[name]
        if get_origin(KINDS[name]) is list or not many
        else get_args(KINDS[name])[0]
    )
    kind = get_args(whole)[0] if many else whole
    base, words, _ = rule_of(kind)
    empty = ('', ' ') if Text in (kind, *get_args(kind)) or base is not str else ()
    wrong = ('{',) if base is dict else (*NO_VALUE[base], *empty, object())
    cfg = next(c for c in preset('shapes') if hasattr(c, name))
    for value in wrong:
        with pytest.raises(UsageError) as error:
            evolve(cfg, **{name: [value] * 3 if many else value})
        assert str(error.value).startswith(name) and f': give {words}' in str(
            error.value
        ), (value, str(error.value))
