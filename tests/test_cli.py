"The command line: flags, presets, YAML files, help."

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from commands import TINY
from nanovlm_nb.api import _settings
from nanovlm_nb.cli import COMMANDS
from nanovlm_nb.core.config import (
    FIELDS,
    OWN_FIELDS,
    PRESETS,
    TrainConfig,
    VLMConfig,
    change,
    described,
    preset,
)
from nanovlm_nb.core.settings import load_yaml, parse_args, save_yaml

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    "A new Python with the package on its path."
    clean = {
        k: v
        for k, v in os.environ.items()
        if k
        not in (
            'TOKENIZERS_PARALLELISM',
            'PYTORCH_CUDA_ALLOC_CONF',
            'PYTORCH_ALLOC_CONF',
        )
    }
    return subprocess.run(
        [sys.executable, '-c', code, *args],
        env={**clean, 'PYTHONPATH': str(ROOT), **env},
        text=True,
        capture_output=True,
        timeout=120,
    )


def parsed(line: str) -> dict:
    "All fields of both configurations after parsing a command line."
    vlm, train, _ = parse_args(line.split())
    return vlm.to_dict() | train.to_dict()


# nanoVLM's flags: name, its default, a value on the command line, what it becomes
FLAGS = [
    ('lr_mp', 0.00512, '0.001', 0.001),
    ('lr_vision_backbone', 5e-5, '0', 0.0),
    ('lr_language_backbone', 5e-5, '1e-4', 1e-4),
    ('vlm_checkpoint_path', 'checkpoints', 'runs/a', 'runs/a'),
    ('compile', None, 'False', False),
    ('compile', None, 'True', True),
    ('log_wandb', True, 'False', False),
    ('log_wandb', True, 'true', True),
    ('resume_from_vlm_checkpoint', False, 'True', True),
    ('resume_from_vlm_checkpoint', False, 'false', False),
    (
        'train_dataset_path',
        'HuggingFaceM4/FineVision_concat_shuffled_2',
        'data/own',
        'data/own',
    ),
    ('relevance_min_rating', 1, '3', 3),
    ('image_correspondence_min_rating', 1, '2', 2),
    ('visual_dependency_min_rating', 1, '0', 0),
    ('formatting_min_rating', 1, '5', 5),
]


@pytest.mark.parametrize('name, default, text, value', FLAGS)
def test_flags_of_nanovlm(name, default, text, value):
    assert parsed('--preset nanovlm')[name] == default
    for line in (
        f'--{name} {text}',
        f'--{name}={text}',
        f'--{name.replace("_", "-")} {text}',
    ):
        found = parsed(f'--preset nanovlm {line}')[name]
        assert found == value and type(found) is type(value)


def words(value) -> list[str]:
    "A value as a shell has it."
    return (
        [json.dumps(value)]
        if isinstance(value, dict)
        else [str(v) for v in (value if isinstance(value, list) else [value])]
    )


@pytest.mark.parametrize('name', PRESETS)
def test_a_preset_written_as_flags_is_the_preset(name):
    "Every field is a flag, and its values survive being text."
    given = {n: v for cfg in preset(name) for n, v in cfg.to_dict().items() if v != []}
    assert given.keys() >= FIELDS.keys() - {
        'train_dataset_weights',
        'custom_transforms',
        'columns',
        'keep_columns',
        'vit_full_blocks',
        'lm_mrope_sections',
    }
    assert parse_args([w for n, v in given.items() for w in (f'--{n}', *words(v))])[
        :2
    ] == preset(name)


@pytest.mark.parametrize(
    'line',
    [
        '',
        '--preset nanovlm',
        '--lr_mp 1e-7 --max_grad_norm None --run_name é:#1 --betas 0 0.5 --compile --train_dataset_name x',
    ],
)
def test_yaml_round_trip_keeps_every_byte(line, tmp_path):
    first = tmp_path / 'a.yaml'
    second = tmp_path / 'b.yaml'
    vlm, train, _ = parse_args(line.split())
    save_yaml(first, vlm, train)
    again_vlm, again_train, _ = parse_args(['--config', str(first)])
    assert (again_vlm, again_train) == (vlm, train)
    save_yaml(second, again_vlm, again_train)
    assert first.read_bytes() == second.read_bytes()
    assert load_yaml(first, 'nanovlm') == load_yaml(first, 'shapes') == (vlm, train)
    assert list(yaml.safe_load(first.read_text())) == ['vlm', 'train']


def test_defaults_are_those_of_nanovlm(golden):
    fields_there = set(
        json.loads((golden / 'nanovlm' / 'checkpoint' / 'config.json').read_text())
    )
    vlm = VLMConfig()
    assert fields_there | OWN_FIELDS == {f.name for f in fields(vlm)}
    assert (
        vlm.max_img_size,
        vlm.resize_to_max_side_len,
        vlm.extra_token_amount,
        vlm.lm_vocab_size,
    ) == (2048, True, 66, 49218)
    usual = dict(
        batch_size=2,
        gradient_accumulation_steps=8,
        max_training_steps=40000,
        val_size=50000,
        max_images_per_example=4,
        max_images_per_knapsack=18,
        max_sample_length=4096,
        max_grad_norm=1.0,
        eval_interval=500,
        stats_log_interval=100,
        stream_dataset=True,
        lmms_eval_batch_size=64,
    )
    assert usual.items() <= (train := TrainConfig()).to_dict().items() and preset(
        'nanovlm'
    ) == (vlm, train)


#: each command's help in one process, with its calls of Python functions: what makes it slow, and the same on a busy machine
HELP = '''
import io, json, sys
from contextlib import redirect_stdout
from nanovlm_nb.cli import COMMANDS, main
found, calls = {}, 0
def count(frame, event, arg):
    global calls
    calls += event == 'call'
def shown(*argv):
    global calls
    calls, out = 0, io.StringIO()
    sys.setprofile(count)
    try:
        with redirect_stdout(out): code = main([*argv])
    except SystemExit as e: code = e.code
    sys.setprofile(None)
    found[' '.join(argv)] = code, calls, out.getvalue()
for argv in ([], ['--help'], *([name, '--help'] for name in COMMANDS), ['train', '--help_all']): shown(*argv)
print(json.dumps([found, [m for m in sys.modules if m.split('.')[0] in ('torch', 'datasets', 'transformers', 'numpy', 'wandb', 'matplotlib', 'PIL')], len(sys.modules)]))
'''


@pytest.fixture(scope='module')
def helps():
    "Arguments -> exit code, calls, text; which heavy modules were imported; how many modules there are."
    return json.loads(run_python(HELP).stdout)


def test_every_help_is_quick_and_torch_free(helps):
    found, heavy, modules = helps
    assert not heavy and modules < 700
    for line, (code, calls, _) in found.items():
        assert code == 0 and calls < 450_000, (
            line,
            code,
            calls,
        )  # 320,000 for all settings, 0.3 s
    assert len(found) == len(COMMANDS) + 3


@pytest.mark.parametrize('flag', ['--help', '--help_all'])
def test_the_help_of_a_training_is_complete(helps, flag):
    text = helps[0][f'train {flag}'][2]
    shown = [
        n
        for c in (VLMConfig, TrainConfig)
        for n, (*_, common) in described(c).items()
        if flag == '--help_all' or common
    ]
    assert not [n for n in shown if f'--{n}' not in text.split()] and (
        flag == '--help_all' or 20 < len(shown) <= 60
    )
    for flag in ('--preset', '--config', '--no_log_wandb'):
        assert flag in text


@pytest.mark.parametrize(
    'named',
    [
        dict(vit_model_type='a tower'),
        dict(vit_model_type='a tower', lr_vision_backbone=0.0, cache_features=True),
        dict(load_from='a model'),
    ],
)
def test_the_help_says_what_python_chooses_for_rows(named):
    "What is typed as it says is what `train` of so many rows takes."
    text = ' '.join(COMMANDS['train'].__doc__.split())
    flags = re.search(r'For 400 rows .* that is: (.*?)\. With --load_from', text)[1]
    words = flags.split()
    for name, value in named.items():
        words += [f'--{name}', str(value)]
    if 'load_from' in named:
        assert 'set the three learning rates to 0.00005' in text
        words += ['--lr_mp', '5e-5', '--lr_vision_backbone', '5e-5']
        words += ['--lr_language_backbone', '5e-5']
        for left_out, usual in (('--max_epochs', 'None'), ('--eval_interval', '375')):
            words[words.index(left_out) + 1] = usual
    if 'cache_features' in named:
        assert 'with --cache_features leave out --random_crop' in text
        words[words.index('--random_crop') + 1] = 'None'
    of_python = _settings(400, 'shapes', named)
    others = {'num_workers': 0}
    of_command = change(*parse_args(words)[:2], others)
    assert of_python == of_command


ENVIRONMENT = '''
import json, os, sys
class Ends:
    "Ends where torch would be imported, and says what the environment is then."
    def find_spec(self, name, *_):
        if name != 'torch': return
        print(json.dumps([os.environ.get(n) for n in ('TOKENIZERS_PARALLELISM', 'PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF', 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')]), flush=True)
        os._exit(0)
sys.meta_path.insert(0, Ends())
from nanovlm_nb.cli import main
main(sys.argv[1:])
'''


@pytest.mark.parametrize(
    'given, found',
    [
        ({}, ['false', *['expandable_segments:True'] * 2, 'PASSIVE', '10000']),
        (
            dict(
                TOKENIZERS_PARALLELISM='true',
                PYTORCH_CUDA_ALLOC_CONF='x',
                OMP_WAIT_POLICY='ACTIVE',
            ),
            ['true', 'x', None, 'ACTIVE', None],
        ),
    ],
)
def test_the_environment_is_set_before_torch_loads(given, found, monkeypatch):
    "Threads that wait do not spin for long, the allocator grows its segments: torch reads that when it is imported. What the user has set stays."
    monkeypatch.delenv('OMP_WAIT_POLICY', raising=False)
    done = run_python(ENVIRONMENT, 'train', **given)
    assert json.loads(done.stdout) == found, done.stderr


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    'width, threads', [(64, 1), (1536, min(2, CORES)), (2048 * CORES, CORES)]
)
def test_a_run_on_a_cpu_computes_on_all_its_cores(
    width, threads, tmp_path, monkeypatch
):
    "Also with a loader worker, whose threads sleep while they wait (see above); a very narrow model has one thread."
    torch = pytest.importorskip('torch')
    from nanovlm_nb.core.dist import Dist
    from nanovlm_nb.runs.run import plan_run

    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setenv('OMP_WAIT_POLICY', 'PASSIVE')
    before = torch.get_num_threads()
    flags = [
        *TINY,
        '--num_workers',
        '1',
        '--lm_inter_dim',
        str(width),
        '--vlm_checkpoint_path',
        str(tmp_path),
    ]
    plan_run(*parse_args(flags)[:2], Dist())
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == threads
