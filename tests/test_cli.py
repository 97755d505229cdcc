"The command line: flags, presets, YAML files, help."
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pytest
import yaml

from commands import TINY
from nanovlm_nb.config import TrainConfig, VLMConfig, load_yaml, make_parser, parse_args, preset, save_yaml
from nanovlm_nb.train import main

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    "A new Python with the package on its path."
    clean = {k: v for k, v in os.environ.items() if k not in ('TOKENIZERS_PARALLELISM', 'PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF')}
    return subprocess.run([sys.executable, '-c', code, *args], env={**clean, 'PYTHONPATH': str(ROOT), **env}, text=True, capture_output=True, timeout=120)


def parsed(line: str) -> dict:
    "All fields of both configurations after parsing a command line."
    vlm, train, _ = parse_args(line.split())
    return vlm.to_dict() | train.to_dict()


def complaint(line: str, capsys) -> str:
    "What is on stderr after a command line that is refused: one line."
    with pytest.raises(SystemExit) as e: main(line.split())
    assert e.value.code == 2
    said, = capsys.readouterr().err.splitlines()
    return said


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
    ('train_dataset_path', 'HuggingFaceM4/FineVision_concat_shuffled_2', 'data/own', 'data/own'),
    ('relevance_min_rating', 1, '3', 3),
    ('image_correspondence_min_rating', 1, '2', 2),
    ('visual_dependency_min_rating', 1, '0', 0),
    ('formatting_min_rating', 1, '5', 5),
]


@pytest.mark.parametrize('name, default, text, value', FLAGS)
def test_flags_of_nanovlm(name, default, text, value):
    assert parsed('--preset nanovlm')[name] == default
    for line in (f'--{name} {text}', f'--{name}={text}', f'--{name.replace("_", "-")} {text}'):
        found = parsed(f'--preset nanovlm {line}')[name]
        assert found == value and type(found) is type(value)


def test_switches_need_no_value():
    assert parsed('--preset nanovlm --no_log_wandb')['log_wandb'] is False
    assert parsed('--preset nanovlm --no-log-wandb')['log_wandb'] is False
    assert parsed('--compile --resume_from_vlm_checkpoint')['compile'] is True
    assert parsed('--compile False --resume_from_vlm_checkpoint')['compile'] is False


@pytest.fixture(scope='module')
def parser():
    "The generated parser, made once."
    return make_parser()


def sample_of(kind) -> tuple[list[str], object]:
    "Arguments for a field of this type, and the value that they mean."
    if kind is bool: return ['True'], True
    if kind == dict[str, str]: return ['{"a":"<a>"}'], {'a': '<a>'}
    if kind == list[float]: return ['0.5', '1'], [.5, 1.0]
    if kind == list[str]: return ['x', 'y'], ['x', 'y']
    if NoneType in get_args(kind): return ['None'], None
    return ['9'], kind(9)


FIELDS = {name: kind for c in (VLMConfig, TrainConfig) for name, kind in get_type_hints(c).items()}


@pytest.mark.parametrize('name', FIELDS)
def test_every_field_is_a_flag(name, parser):
    "The parser understands each of them; whether the value makes sense is another question."
    texts, value = sample_of(FIELDS[name])
    found = getattr(parser.parse_args([f'--{name}', *texts]), name)
    assert found == value and type(found) is type(value)


def test_lists_and_none():
    found = parsed('--train_dataset_name a b --betas 0.8 0.9 --max_grad_norm None --run_name None --lr_backbones 0.1 --hf_repo_name none')
    assert found['train_dataset_name'] == ['a', 'b'] and found['betas'] == [.8, .9]
    assert found['max_grad_norm'] is found['run_name'] is found['hf_repo_name'] is None and found['lr_backbones'] == .1
    assert parsed('--max_grad_norm 2')['max_grad_norm'] == 2.0


def test_extra_tokens_as_json():
    found = parsed('--vlm_extra_tokens {"image_token":"<i>"}')
    assert found['vlm_extra_tokens'] == {'image_token': '<i>'} and found['extra_token_amount'] == 1


def test_derived_fields_follow_flags():
    found = parsed('--preset nanovlm --vit_hidden_dim 384 --lm_base_vocab_size 1000 --vit_img_size 256')
    assert (found['vit_inter_dim'], found['lm_vocab_size'], found['mp_image_token_length']) == (1536, 1066, 16)
    assert parsed('--preset nanovlm --vit_hidden_dim 384 --vit_inter_dim 1000')['vit_inter_dim'] == 1000


@pytest.mark.parametrize('line, message', [
    ('--lr_pm 0.1', 'unknown flag `--lr_pm`: did you mean `--lr_mp`?'),
    ('--lr 0.1', 'here it is --lr_mp for the projector'),
    ('--batchsize=4', 'unknown flag `--batchsize`: did you mean `--batch_size`?'),
    ('--no_log_wandbb', 'did you mean `--no_log_wandb`?'),
    ('--learning-rate-mp 1', 'unknown flag `--learning_rate_mp`'),
    ('--wait_for 3', 'unknown flag `--wait_for`: --help shows those that exist'),
    ('stray', '`stray` belongs to no flag'),
    ('--batch_size two', "argument --batch_size: invalid int value: 'two'"),
    ('--compile perhaps', 'perhaps'),
    ('--lr_mp', 'argument --lr_mp: expected one argument'),
    ('--lr_mp=-1', 'lr_mp is -1.0: give 0 or more'),
    ('--vit_n_heads 7', 'vit_hidden_dim 128 is no multiple of vit_n_heads 7'),
    ('--max_sample_length 100000', 'max_sample_length 100000 > lm_max_length'),
    ('--preset nano', 'nanovlm'),
    ('--config none.yaml', 'none.yaml'),
])
def test_what_is_wrong_is_said_in_one_line(line, message, capsys):
    said = complaint(line, capsys)
    assert said.startswith('nanovlm_train: error: ') and message in said


def test_preset_then_file_then_flags(tmp_path):
    file = tmp_path/'run.yaml'
    file.write_text('train:\n  lr_mp: 5e-4\n  batch_size: 3\nvlm:\n  lm_n_blocks: 2\n')
    base = parsed('')
    found = parsed(f'--config {file} --batch_size 5')
    assert (found['lr_mp'], found['batch_size'], found['lm_n_blocks'], found['seed']) == (5e-4, 5, 2, base['seed'])
    assert {k for k in base if base[k] != found[k]} == {'lr_mp', 'batch_size', 'lm_n_blocks'}
    assert parsed(f'--preset nanovlm --config {file}')['lm_hidden_dim'] == 960
    file.write_text('preset: nanovlm\n')
    assert parsed(f'--config {file}') == parsed('--preset nanovlm')
    assert parsed(f'--preset shapes --config {file}') == base


@pytest.mark.parametrize('text, message', [
    ('train: {batchsize: 4}', 'did you mean `train.batch_size`?'),
    ('train: {vit_n_heads: 4}', 'did you mean `vlm.vit_n_heads`?'),
    ('trian: {}', 'did you mean `train`?'),
    ('colour: {}', 'give one of preset, vlm, train'),
    ('train: {compile: "False"}', "compile is 'False': give bool"),
    ('train: {batch_size: 2.5}', 'batch_size is 2.5: give a whole number'),
    ('train: {seed: null}', 'seed is None: give int'),
    ('preset: nano', 'unknown preset `nano`'),
    ('train: [', 'run.yaml'),
])
def test_what_is_wrong_in_a_file_is_said_in_one_line(text, message, tmp_path, capsys):
    file = tmp_path/'run.yaml'
    file.write_text(text)
    assert message in complaint(f'--config {file}', capsys)


@pytest.mark.parametrize('line', ['', '--preset nanovlm', '--lr_mp 1e-7 --max_grad_norm None --run_name é:#1 --betas 0 0.5 --compile --train_dataset_name x'])
def test_yaml_round_trip_keeps_every_byte(line, tmp_path):
    first, second = tmp_path/'a.yaml', tmp_path/'b.yaml'
    vlm, train, _ = parse_args(line.split())
    save_yaml(first, vlm, train)
    again_vlm, again_train, _ = parse_args(['--config', str(first)])
    assert (again_vlm, again_train) == (vlm, train)
    save_yaml(second, again_vlm, again_train)
    assert first.read_bytes() == second.read_bytes()
    assert load_yaml(first, 'nanovlm') == load_yaml(first, 'shapes') == (vlm, train)
    assert list(yaml.safe_load(first.read_text())) == ['vlm', 'train']


def test_checkpoint_config_of_nanovlm(golden, tmp_path):
    "nanoVLM's config.json loads, and is written again with the same fields, values and order."
    file = golden/'nanovlm'/'checkpoint'/'config.json'
    cfg = VLMConfig.load(file.parent)
    assert (cfg.image_token_id, cfg.lm_vocab_size, cfg.mp_image_token_length) == (1000, 1066, 4)
    cfg.save(tmp_path)
    old, new = json.loads(file.read_text()), json.loads((tmp_path/'config.json').read_text())
    assert old == new and list(old) == list(new)


def test_defaults_are_those_of_nanovlm(golden):
    fields_there = set(json.loads((golden/'nanovlm'/'checkpoint'/'config.json').read_text()))
    vlm = VLMConfig()
    assert fields_there | set(vlm.own_fields()) == {f.name for f in fields(vlm)}
    assert (vlm.max_img_size, vlm.resize_to_max_side_len, vlm.extra_token_amount, vlm.lm_vocab_size) == (2048, True, 66, 49218)
    train = TrainConfig()
    assert (train.batch_size, train.gradient_accumulation_steps, train.max_training_steps, train.val_size) == (2, 8, 40000, 50000)
    assert (train.max_images_per_example, train.max_images_per_knapsack, train.max_sample_length, train.max_grad_norm) == (4, 18, 4096, 1.0)
    assert (train.eval_interval, train.stats_log_interval, train.stream_dataset, train.lmms_eval_batch_size) == (500, 100, True, 64)
    assert preset('nanovlm') == (vlm, train)


HELP = '''
import sys
calls = 0
def count(frame, event, arg):
    global calls
    calls += event == 'call'
sys.setprofile(count)
from nanovlm_nb.{module} import {name} as main
try: main([{flag!r}])
except SystemExit as e: code = e.code
sys.setprofile(None)
print('loaded:', *[m for m in ('torch', 'datasets', 'wandb', 'matplotlib') if m in sys.modules], file=sys.stderr)
print(calls, len(sys.modules), file=sys.stderr)
sys.exit(code)
'''


@pytest.mark.parametrize('module, name, flag', [('config', 'parse_args', '--help_all'), ('train', 'main', '--help')])
def test_help_is_complete_quick_and_torch_free(module, name, flag):
    if not (ROOT/'nanovlm_nb'/f'{module}.py').exists(): pytest.skip(f'no {module} yet')
    done = run_python(HELP.format(module=module, name=name, flag=flag))
    loaded, figures = done.stderr.splitlines()
    assert (done.returncode, loaded.strip()) == (0, 'loaded:'), done.stderr
    calls, modules = map(int, figures.split())
    assert calls < 450_000 and modules < 700, figures  # what makes it slow, and is the same on a busy machine: 320,000 and 560
    text = done.stdout.split()
    shown = [f.name for c in (VLMConfig, TrainConfig) for f in fields(c) if flag == '--help_all' or f.metadata['common']]
    assert not [n for n in shown if f'--{n}' not in text] and (flag == '--help_all' or 20 < len(shown) <= 60)
    for flag in ('--preset', '--config', '--no_log_wandb'): assert flag in done.stdout


ENVIRONMENT = '''
import os, sys
from importlib.machinery import PathFinder
class Looks:
    "Says what torch and tokenizers find in the environment when the command imports them, and ends it when it has come to both."
    ran = set()
    def find_spec(self, name, path=None, target=None):
        if name not in ('torch', 'tokenizers'): return
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            self.ran.add(name)
            print(name, os.environ.get('TOKENIZERS_PARALLELISM'), os.environ.get('PYTORCH_CUDA_ALLOC_CONF'), flush=True)
            if len(self.ran) == 2: os._exit(0)
            load(module)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Looks())
from nanovlm_nb.train import main
main(sys.argv[1:])
'''


@pytest.mark.parametrize('given, found', [({}, 'false expandable_segments:True'), (dict(TOKENIZERS_PARALLELISM='true', PYTORCH_CUDA_ALLOC_CONF='x'), 'true x')])
def test_a_training_sets_its_environment_before_the_libraries_load(given, found):
    done = run_python(ENVIRONMENT, *TINY, **given)
    assert sorted(done.stdout.splitlines()) == [f'tokenizers {found}', f'torch {found}'], done.stderr


def test_a_run_on_a_cpu_computes_on_all_its_cores(tmp_path):
    "Also with a loader worker; threads that wait sleep, which has to be said before torch is loaded."
    (tmp_path/'rates.py').write_text("import os, torch\ndef ask(step, max_lr, max_steps): raise ValueError(f\"{torch.get_num_threads()} threads, {os.environ.get('OMP_WAIT_POLICY')}\")\n")
    env = {k: v for k, v in os.environ.items() if k not in ('OMP_NUM_THREADS', 'OMP_WAIT_POLICY')} | dict(PYTHONPATH=f'{ROOT}:{tmp_path}', HF_HUB_OFFLINE='1')
    command = [sys.executable, '-m', 'nanovlm_nb.train', *TINY, '--num_workers', '1', '--lr_schedule', 'rates:ask']
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=240)
    assert f'{len(os.sched_getaffinity(0))} threads, PASSIVE' in done.stderr, done.stderr
