"Errors of use: every command answers each with one line that names the value and the remedy, exit code 2, and leaves nothing behind."
import argparse
import ast
import dataclasses
import io
import json
import math
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import datasets
import pytest
from commands import TINY, run

from nanovlm_nb.train import main as train_main
from nanovlm_nb.cli import COMMANDS, EXPORTS, PARSERS, main
from nanovlm_nb.core.config import FIELDS, Text, TrainConfig, VLMConfig, evolve, make_parser, parse_args, preset, rule_of
from nanovlm_nb.core.usage import UsageError

pytestmark = pytest.mark.usefixtures('one_thread')
ROOT = Path(__file__).resolve().parent.parent


#: command, arguments, what the line must say. `RUN` is a run of two updates; files of `given` are in the working directory
MISUSES = [
    # flags that are wrong in themselves
    ('train', '--lr_pm 0.1', 'unknown flag `--lr_pm`: did you mean `--lr_mp`?'),
    ('train', 'stray', '`stray` belongs to no flag: write --FIELD VALUE'),
    ('train', '--batch_size two', 'batch_size is two: give a whole number above 0'),
    # settings that contradict each other
    ('train', '--max_sample_length 100000', 'max_sample_length 100000 > lm_max_length 512: lower it, or raise that'),
    # adapters
    ('train', '--lora_rank 4', 'adapters stand beside the weights of a checkpoint that is trained already; give --load_from CHECKPOINT'),
    ('train', '--lora_rank 4 --load_from RUN --lora_targets k_prog', "lora_targets names 'k_prog', and no linear layer of this model is called so"),
    # files of settings
    ('train', '--config none.yaml', 'none.yaml: No such file or directory, give another path'),
    ('train', '--config typo.yaml', 'unknown key in typo.yaml `train.batchsize`: did you mean `train.batch_size`?'),
    ('train', '--deepspeed_config typo.json', 'zero_optimisation is unknown: did you mean zero_optimization?'),
    # what a run starts from
    ('train', '--resume True', 'resume needs to know which run: give run_name'),
    ('train', '--load_from out/none.pth', 'out/none.pth'),
    ('train', '--resume_from_vlm_checkpoint True --vlm_checkpoint_path nowhere', 'nowhere'),
    ('train', '--lm_tokenizer ./none', './none: No such file or directory, give another path'),
    ('train', '--run_name r', 'of an earlier run, which a new one would be mixed up with: give another run_name, or --resume True'),
    ('train', '--run_name r --resume True --seed 5', 'cannot resume: seed: 0 -> 5'),
    # what it needs besides
    ('train', '--vlm_checkpoint_path picture.png/runs', 'Not a directory, give another path'),
    ('train', '--train_dataset_path ./missing --stream_dataset True', './missing: No such file or directory, give another path'),
    ('train', '--lr_schedule math:csc', "module 'math' has no function 'csc'"),
    ('train', '--load_from RUN/step_2/model.safetensors', 'model.safetensors is a file: give the directory of a checkpoint'),
    ('train', '--load_from empty', 'empty holds no checkpoint: give one, or a run that has one'),
    ('train', '--resume True --load_from RUN/step_9 --run_name r ', 'correct the path, or give run_name alone'),
    ('train', '--resume True --load_from RUN/step_2 --run_name r --batch_size 3', 'cannot resume: packs per update: 4 -> '),
    ('train', '--train_dataset_path bad.jsonl', 'no line of bad.jsonl can be used'),
    ('train', '--train_dataset_path picture.png', "Check train_dataset_path=picture.png and train_dataset_name=['default']: default: picture.png is no data set: give a file that ends in .parquet"),
    ('train', '--train_dataset_path shapes --train_dataset_name cocoqa', "train_dataset_name ['cocoqa']: shapes has no configurations, leave it out"),
    ('train', '--train_dataset_path shapes --images_path pictures', 'images_path pictures is for JSON lines'),
    ('train', '--hf_repo_name a/b/c/d', "hf_repo_name 'a/b/c/d' is not a name on the hub: give owner/name"),
    ('train', '--load_from lost/step_2', 'step_2 has no model.safetensors'),
    ('train', '--lr_mp 0 --lr_vision_backbone 0 --lr_language_backbone 0', 'nothing would train'),
    # commands that foretell a run
    ('plan', '--like empty', 'empty/log.jsonl: No such file'),
    ('plan', 'RUN', '`checkpoints/r` belongs to no flag: give --config checkpoints/r/config.yaml'),
    ('check', 'nowhere', '`nowhere` belongs to no flag'),
    ('check', 'empty', 'empty holds no config.yaml: give the directory of a run'),
    ('replay', 'RUN/step_2 1', 'checkpoints/r/step_2 is a checkpoint: give its run, '),
    ('replay', 'RUN', 'has skipped no update: say which one you mean'),
    ('replay', 'RUN 99', 'update 99 was never made'),
    # commands that use a model
    ('ask', 'nowhere --prompt x', 'nowhere cannot be used as a checkpoint'),
    ('ask', 'RUN --prompt -', 'no question on the standard input: write one a line'),
    ('ask', 'RUN', 'give --prompt QUESTION, or --page'),
    ('ask', 'RUN --prompt x --image words.png', "cannot identify image file 'words.png'"),
    ('ask', 'RUN --prompt x --image empty --image /dev/null', 'empty: this is a directory; /dev/null: this is no regular file: give picture files'),
    ('ask', 'RUN --prompt x --repetition_penalty 0', 'repetition_penalty is 0.0'),
    ('eval', 'RUN --tasks missing.parquet', '--tasks: there is no file missing.parquet: correct the path'),
    ('eval', 'RUN --tasks shapes --include_path nowhere', '--include_path: there is no directory nowhere'),
    ('eval', '--write_tasks picture.png', 'picture.png: File exists'),
    ('eval', 'RUN --tasks shapes --device tpuu', "--device is 'tpuu', which cannot be used here"),
    ('eval', 'RUN --tasks shapes --limit 2 --out result.json', '--out result.json holds the result of another evaluation (limit 60 instead of 2.0): give another --out'),
    ('eval', 'RUN --tasks words.parquet', '--tasks: words.parquet is no parquet file: give one with the columns images and texts'),
    ('eval', 'RUN --tasks bare.parquet', '--tasks: bare.parquet has no column images, it has texts: give a question file'),
    ('eval', 'RUN --tasks shapes --out torn.jsonl', '--out torn.jsonl is there, and is no result'),
    *([] if find_spec('lmms_eval') else [
        ('eval', 'RUN --tasks shape', '--tasks: there is no task shape: did you mean shapes?'),
        ('eval', 'RUN --tasks shapes --include_path empty', 'shapes needs its questions: nanovlm eval --write_tasks DIR'),
        ('eval', 'RUN --tasks mmstar', 'mmstar cannot be evaluated here. pip install')]),
    ('export', 'RUN RUN', 'is not empty: give a new directory'),
    ('export', 'bare out', 'bare has no tokenizer.json, and that of its training is not here ('),
    ('export', 'RUN out --int8', '--int8 with format smolvlm: it is for --format onnx'),
    ('export', 'nowhere out --format onnx', 'nowhere' if find_spec('onnxruntime') else 'pip install nanovlm_nb[onnx]'),
    ('export', 'RUN out --format gguf', 'image_convention is nanovlm, but llama.cpp' if find_spec('gguf') else 'pip install nanovlm_nb[gguf]'),
    ('export', 'RUN out --format peft', 'it holds no adapters: format peft is for a run with lora_rank'),
    ('export', 'adapters out', 'adapters has use_dora True, which is not read here: merge it with peft'),
    ('eval', './RUN/step_9', 'checkpoints/r/step_9: No such file or directory'),
    ('ask', 'nowhere --page', 'nowhere' if find_spec('gradio') else 'pip install nanovlm_nb[demo]'),
    ('classify', '--predict RUN', 'to sort pictures, give --predict CHECKPOINT and one or more files'),
    ('classify', '--config class.yaml', 'unknown key in class.yaml `model.nmae`: did you mean `model.name`?'),
    ('classify', '--datasets nowhere', 'data set nowhere cannot be read'),
    ('classify', '--predict RUN picture.png', 'checkpoints/r cannot sort pictures'),
    ('classify', '--lr 3', 'unknown flag `--lr`'),
    ('classify', '--model nowhere/x', "model.name is 'nowhere/x', neither a preset nor a checkpoint"),
    # commands that look at runs
    ('runs', 'nowhere', 'nowhere is no run: give its directory, or log.jsonl in it'),
    ('runs', 'empty --pth out --pth_names own', 'empty holds no checkpoint'),
    ('runs', 'picture.png', 'picture.png is no run: give its directory, or log.jsonl in it'),
    ('runs', 'RUN --curves x.docx', 'x.docx is no name of a picture: let it end in one of png'),
    ('runs', 'RUN --curves x.png --smooth 2', 'smooth is 2'),
]
#: flags of torchrun, srun, deepspeed, lmms-eval and exec_nb, and two that are named as what does not exist
OF_OTHERS = set('--logdir --mmproj --nproc_per_node --project --standalone --nnodes --nodes --num_gpus --model_args --dest --exc_stop --num_epochs --learning_rate --timeout --no_'.split())
#: parameters of functions, a key of DeepSpeed, a kind of fault
NO_SETTINGS = {'max_length', 'max_new_tokens', 'offload_param', 'corrupt_picture'}
# `nanovlm train` gets these where the model does not matter: nothing else is looked for
SMALL = ['--data_cutoff_idx', '20', '--val_size', '4', '--progress_bar', 'False']


def picture(path: Path) -> None:
    "A file that is no text."
    from PIL import Image
    Image.new('RGB', (8, 8), 'red').save(path)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory with a run of two updates and some files."
    home = tmp_path_factory.mktemp('misuse')
    before = Path.cwd()
    os.chdir(home)
    try: assert main(['train', *TINY, '--max_training_steps', '2', '--eval_in_epochs', 'False', '--ask_samples', '0', '--run_name', 'r']) == 0
    finally: os.chdir(before)
    (home/'typo.yaml').write_text('train: {batchsize: 4}')
    (home/'typo.json').write_text('{"zero_optimisation": {"stage": 2}}')
    (home/'class.yaml').write_text('model: {nmae: x}\n')
    (home/'bad.jsonl').write_text('{"a": 1}\n')
    (home/'torn.jsonl').write_text('{"conversations": [\n')
    (home/'words.png').write_text('no picture')
    (home/'result.json').write_text(json.dumps(dict(global_step=2, checkpoint='checkpoints/r/step_2', limit=60, tasks=['shapes'], results={'shapes_exact_match': .5}, samples={'shapes': 60}, prompts={'shapes': 'plain'})))
    (home/'words.parquet').write_text('no parquet')
    datasets.Dataset.from_dict(dict(texts=[[dict(user='a', assistant='b')]])).to_parquet(home/'bare.parquet')
    (home/'empty').mkdir()
    shutil.copytree(home/'checkpoints'/'r'/'step_2', home/'lost'/'step_2')
    (home/'lost'/'step_2'/'model.safetensors').unlink()
    (home/'bare').mkdir()
    (home/'bare'/'config.json').write_text((home/'lost'/'step_2'/'config.json').read_text().replace('checkpoints/r/', 'checkpoints/gone/'))
    shutil.copy(home/'checkpoints'/'r'/'step_2'/'model.safetensors', home/'bare')
    (home/'adapters').mkdir()
    (home/'adapters'/'adapter_config.json').write_text('{"peft_type": "LORA", "use_dora": true, "base_model_name_or_path": "checkpoints/r/step_2"}')
    picture(home/'picture.png')
    return home


def files_below(folder: Path) -> dict[str, bytes]:
    "Every file; logs grow and are left out, and a start that is refused may leave an empty directory."
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file() and not p.name.startswith('log.')}


def told(command: str, line: str, capsys) -> str:
    "What a command writes to stderr when it is refused."
    args = [re.sub(r'\bRUN\b', 'checkpoints/r', word) for word in line.split()]
    small = SMALL if command == 'train' and not line.startswith(('--config', 'stray')) else []
    small = [*TINY, '--max_training_steps', '2', *small] if '--run_name r ' in f'{line} ' else small
    capsys.readouterr()
    with pytest.raises(SystemExit) as end: main([command, *small, *args])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize('command, line, said', MISUSES, ids=[f'{c} {line}'[:70] for c, line, _ in MISUSES])
def test_a_misuse_gets_one_line(command, line, said, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr(sys, 'stdin', io.StringIO(''))
    before = files_below(place)
    err = told(command, line, capsys)
    ours = [text for text in err.splitlines() if text.startswith(f'nanovlm {command}: error: ')]
    assert len(ours) == 1 and err.splitlines()[-1] == ours[0] and said in ours[0], err
    assert 'Traceback' not in err and len(err.splitlines()) <= 3, err
    after = files_below(place)
    assert after == before, sorted(after.keys() ^ before.keys()) or [n for n in after if after[n] != before[n]]
    if (table := os.environ.get('MISUSES')):
        with open(table, 'a') as f: f.write(f'| `nanovlm {command} {line[:60]}` | `{ours[0]}` |\n')


def test_every_command_is_misused():
    assert {c for c, _, _ in MISUSES} == set(COMMANDS)


@pytest.mark.parametrize('command', PARSERS)
def test_every_number_of_a_command_has_bounds(command):
    "Not one that is no number, and none that is not finite."
    for action in PARSERS[command]()._actions:
        if action.metavar not in ('INT', 'FLOAT', 'DAYS') or action.dest == 'smooth': continue
        for wrong in ('x', 'nan', 'inf', '-1'):
            with pytest.raises(argparse.ArgumentTypeError, match='will not do: give a'): action.type(wrong)


# --- what is no error of use

def test_a_fault_of_ours_shows_its_traceback(monkeypatch, tmp_path):
    "A ValueError that torch, Python or the middle of an update raises is none of the user's."
    monkeypatch.chdir(tmp_path)
    from nanovlm_nb.runs import run as run_module
    def broken(*_, **__): return int('x')
    monkeypatch.setattr(run_module, 'get_dataloaders', broken)
    with pytest.raises(ValueError, match='invalid literal') as error: main(['train', '--run_name', 'x', *SMALL])
    assert not isinstance(error.value, UsageError)
    assert (tmp_path/'checkpoints'/'x'/'status').read_text() == 'failed\n', 'what is left helps to find it'


def test_debug_shows_the_traceback(monkeypatch):
    with pytest.raises(ValueError, match='batch_size is 0'): main(['train', '--batch_size', '0', '--debug'])
    monkeypatch.setenv('NANOVLM_DEBUG', '1')
    with pytest.raises(ValueError, match='batch_size is 0'): train_main(['--batch_size', '0'])


# --- real processes

def test_two_ranks_say_it(tmp_path):
    "What torchrun says afterwards is its own."
    done = run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '-m', 'nanovlm_nb.train', *TINY,
                '--train_dataset_path', './missing', '--run_name', 'x', '--log_wandb', 'False'], tmp_path, check=False)
    assert done.returncode and 'nanovlm train: error: ' in done.stderr, done.stderr[-3000:]
    assert 'nanovlm_nb/' not in done.stderr and not [p for p in tmp_path.rglob('*') if p.is_file()], 'no traceback of ours, no file'


@pytest.mark.parametrize('command, module', [*COMMANDS.items(), ('ask', 'uses.pages'), ('eval', 'answers.look'), *(('export', module) for module in EXPORTS.values())])
def test_every_command_has_a_module_that_takes_its_values(command, module):
    module, _, function = module.partition(':')
    text = (ROOT/'nanovlm_nb'/f"{module.replace('.', '/')}.py").read_text()
    assert re.search(rf"(?m)^def {function or 'main'}\((?:\n    )?values:Namespace,?(?:\)->(?:int|None):)? # from `(?:cli\.)?{command}_parser`", text)


def test_the_command_runs_as_a_module(tmp_path):
    done = run([sys.executable, '-m', 'nanovlm_nb.cli', 'runs', 'nowhere'], tmp_path, check=False)
    assert (done.returncode, done.stderr) == (2, 'nanovlm runs: error: argument RUN: nowhere is no run: give its directory, or log.jsonl in it\n')


# --- every field, systematically

KINDS = {n: k for c in (VLMConfig, TrainConfig) for n, k in get_type_hints(c, include_extras=True).items() if n in FIELDS}
NO_VALUE = {int: (-2, 1.5, math.inf, '1.5', True), float: (math.inf, -math.inf, math.nan, 'x', False), bool: ('False', 1, 0), str: (3, '\udcff')}


@pytest.mark.parametrize('name', KINDS)
def test_a_wrong_value_is_refused_with_the_rule_in_words(name):
    "-2 is below all that counts can be; an empty text is a variable that a script forgot to set; only a few texts may be empty."
    many = get_origin(KINDS[name]) is list
    kind = get_args(KINDS[name])[0] if many else KINDS[name]
    base, words, _ = rule_of(kind)
    empty = ('', ' ') if Text in (kind, *get_args(kind)) or base is not str else ()
    wrong = ('{',) if base is dict else (*NO_VALUE[base], *empty, object())
    cfg = next(c for c in preset('shapes') if hasattr(c, name))
    for value in wrong:
        with pytest.raises(UsageError) as error: evolve(cfg, **{name: [value]*3 if many else value})
        assert str(error.value).startswith(name) and f': give {words}' in str(error.value), (value, str(error.value))


def test_no_clipping():
    assert parse_args(['--max_grad_norm', '0'])[1].max_grad_norm is None


# --- flags that messages and documents name

def test_every_flag_that_is_named_exists():
    "In messages, advice, help and documents: a flag that nobody understands is a wrong remedy."
    known = {o for o in make_parser()._option_string_actions} | {'--help', '--debug', '--version'}
    sources = {p: p.read_text(encoding='utf-8') for p in (ROOT/'nanovlm_nb').rglob('*.py') if p.name != '_modidx.py'}
    for text in sources.values(): known |= set(re.findall(r"add(?:_argument)?\('(--\w+)'", text)) | set(re.findall(r'var\((--\w+)\)', text))  # also the colours of a page
    assert not {f: p.name for p, text in sources.items() for f in flags_in(text) if f not in known | OF_OTHERS}
    documents = [p for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts] + [ROOT/'README.md', ROOT/'CONTRIBUTING.md']
    prose = {p: p.read_text(encoding='utf-8') if p.suffix == '.md' else '\n'.join(''.join(c['source']) for c in json.loads(p.read_text(encoding='utf-8'))['cells']
             if c['cell_type'] == 'markdown') for p in documents}
    assert not {f: p.name for p, text in prose.items() for f in flags_in(text) if f not in known | OF_OTHERS}


def test_every_setting_that_a_message_asks_for_exists():
    "`raise timeout_s` helps nobody who cannot."
    fields = {f.name for c in (VLMConfig, TrainConfig) for f in dataclasses.fields(c)}
    asked = {}
    for path in set((ROOT/'nanovlm_nb').rglob('*.py'))-{ROOT/'nanovlm_nb'/'_modidx.py'}:  # an index of names, no messages
        strings = ' '.join(n.value for n in ast.walk(ast.parse(path.read_text(encoding='utf-8'))) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        asked |= {name: path.name for name in re.findall(r'\b(?:raise|lower|set|leave out|give) (?:--)?([a-z]+(?:_[a-z]+)+)\b', strings)}
    assert len(asked) > 20 and not {n: p for n, p in asked.items() if n not in fields | NO_SETTINGS}


def flags_in(text: str) -> set[str]:
    "Flags with an underscore or in lower case, as this package's are written."
    return set(re.findall(r'(?<![\w-])--[a-z][a-z_]+\b(?![-\w{*])', text))
