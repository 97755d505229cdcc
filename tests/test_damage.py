"Whatever happens to the files of a run: it is named, passed over or refused, and a run never trains on something else than it was."

import contextlib
import json
import logging
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import TINY, record

from nanovlm_nb.data.prompts import answer_frame
from nanovlm_nb.training.checkpoint import load_optimizer
from nanovlm_nb.core.run_dir import MANIFEST, run_lock, write_manifest
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.uses.classify import Settings
from nanovlm_nb.core.settings import load_yaml, parse_args
from nanovlm_nb.core.dist import Dist
from nanovlm_nb.training.optim import make_optimizer
from nanovlm_nb.runs.start import start_of
from nanovlm_nb.runs.run import run
from nanovlm_nb.core.tokenizer import get_tokenizer
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.backbones import language_config, vision_config

FLAGS = [
    *TINY,
    '--run_name',
    'r',
    '--save_interval',
    '2',
    '--eval_interval',
    '2',
    '--max_keep_ckpts',
    '-1',
    '--ask_samples',
    '0',
    '--lr_vision_backbone',
    '0',
    '--cache_features',
    'True',
    '--dtype',
    'float32',
    '--max_training_steps',
    '6',
]
FILES = (
    'config.json',
    'model.safetensors',
    'trainer_state.json',
    'rng_0.json',
    'optimizer/rank_0.safetensors',
    'tokenizer.json',
    'tokenizer_config.json',
    'chat_template.jinja',
    MANIFEST,
)


def flip(path):
    "One bit in the middle."
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def garbage(path):
    path.write_bytes(b'\xff\xfe{"step": 4')


def other(path):
    shutil.copy(str(path).replace('step_4', 'step_2'), path)


def one_digit(run_dir):
    "Another number of the same length, valid JSON."
    path = run_dir / 'step_4' / 'trainer_state.json'
    path.write_text(path.read_text().replace('"step": 4', '"step": 3'))


def another_index(run_dir):
    "An index that leads to other weights."
    (run_dir / 'step_4' / 'other.safetensors').write_bytes(
        (run_dir / 'step_2' / 'model.safetensors').read_bytes()
    )
    (run_dir / 'step_4' / 'model.safetensors.index.json').write_text(
        json.dumps(dict(weight_map={'x': 'other.safetensors'}))
    )


def renamed(run_dir):
    "Another checkpoint under this name."
    shutil.rmtree(run_dir / 'step_4')
    shutil.copytree(run_dir / 'step_2', run_dir / 'step_4')


#: a manifest that lists something else makes the files that it lists look wrong
NAMED = {
    f'flip {MANIFEST}': ' is not as it was written',
    f'{MANIFEST} of step_2': 'step_4',
}

# what is done to step_4 -> what the message names; such a checkpoint is passed over, or refused when it is given
IN_CHECKPOINT = {
    f'{f.__name__} {name}': (
        lambda run_dir, f=f, name=name: f(run_dir / 'step_4' / name),
        name,
    )
    for f in (flip, cut, zeros)
    for name in FILES
}
IN_CHECKPOINT |= {
    f'without {name}': (
        lambda run_dir, name=name: (run_dir / 'step_4' / name).unlink(),
        name,
    )
    for name in FILES
}
IN_CHECKPOINT |= {
    f'{name} of step_2': (
        lambda run_dir, name=name: other(run_dir / 'step_4' / name),
        name,
    )
    for name in (
        'model.safetensors',
        'trainer_state.json',
        'optimizer/rank_0.safetensors',
        MANIFEST,
    )
}
IN_CHECKPOINT |= {
    'one digit': (one_digit, 'trainer_state.json'),
    'another index': (another_index, 'model.safetensors.index.json'),
    'renamed': (renamed, 'holds update 2'),
    'empty': (
        lambda run_dir: [
            shutil.rmtree(run_dir / 'step_4'),
            (run_dir / 'step_4').mkdir(),
        ],
        MANIFEST,
    ),
}


def make(path, text=None):
    "A foreign file or directory."
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if text is None else path.write_bytes(text)


# what is done beside the checkpoints: the run goes on from step_4 as if nothing had happened
BESIDE = {
    'step_58 with {}': lambda r: make(r / 'step_58' / MANIFEST, b'{}'),
    'step_58 a file': lambda r: make(r / 'step_58', b'x'),
    'step_59 dangling': lambda r: (r / 'step_59').symlink_to('nowhere'),
    'step_60 a loop': lambda r: (r / 'step_60').symlink_to('step_60'),
    'best_checkpoint dangling': lambda r: (r / 'best_checkpoint').write_text(
        'step_77\n'
    ),
    'last_checkpoint binary': lambda r: garbage(r / 'last_checkpoint'),
    'record.md binary': lambda r: garbage(r / 'record.md'),
    'drops.json zeros': lambda r: zeros(r / 'drops.json'),
    'bad_updates.jsonl torn': lambda r: (r / 'bad_updates.jsonl').write_bytes(
        b'[]\n{"update": 3, "rea'
    ),
    'left-overs': lambda r: [
        make(r / 'step_9.nanovlm.tmp'),
        make(r / 'status.nanovlm.tmp', b'x'),
    ],
    'log.jsonl torn at the end': lambda r: (r / 'log.jsonl').write_bytes(
        (r / 'log.jsonl').read_bytes() + b'{"batch_'
    ),
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    "A run of 6 updates, and what it came to."
    cwd = tmp_path_factory.mktemp('trained')
    return cwd, go(cwd)


def go(cwd, *more):
    "Train in this process; the record of the run."
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        return record(Path(cwd) / run(*parse_args([*FLAGS, *more])[:2]))


@pytest.fixture
def stopped(trained, tmp_path):
    "The same run as it was when it stood at update 4."
    run_dir = tmp_path / 'checkpoints' / 'r'
    shutil.copytree(trained[0] / 'checkpoints' / 'r', run_dir)
    shutil.rmtree(run_dir / 'step_6')
    for name in ('last_checkpoint', 'best_checkpoint'):
        (run_dir / name).write_text('step_4\n')
    return run_dir


def planned(run_dir, *flags):
    "The checkpoint that a start would take."
    os.chdir(run_dir.parent.parent)
    return start_of(run_dir, *parse_args([*FLAGS, '--resume', 'True', *flags])[:2]).path


@pytest.mark.parametrize('name', IN_CHECKPOINT)
def test_a_damaged_checkpoint_is_named_passed_over_and_refused(
    stopped, caplog, monkeypatch, name
):
    monkeypatch.chdir(stopped)
    spoil, named = IN_CHECKPOINT[name]
    named = NAMED.get(name, named)
    spoil(stopped)
    with caplog.at_level(logging.WARNING):
        assert planned(stopped) == stopped / 'step_2'
    assert named in caplog.text and 'step_4' in caplog.text
    with pytest.raises((ValueError, FileNotFoundError)) as e:
        planned(stopped, '--load_from', str(stopped / 'step_4'))
    assert named in str(e.value) and len(str(e.value).splitlines()) == 1


def test_weights_of_a_damaged_checkpoint_are_not_loaded(stopped):
    flip(stopped / 'step_4' / 'model.safetensors')
    with pytest.raises(ValueError, match='model.safetensors is not as it was written'):
        VisionLanguageModel.from_pretrained(stopped / 'step_4')
    VisionLanguageModel.from_pretrained(stopped / 'step_2')


def test_the_run_goes_on_from_the_checkpoint_before_and_comes_to_the_same(
    trained, stopped
):
    "Its last checkpoint is damaged, and so is all that lies beside the checkpoints; with --slow one by one."
    flip(stopped / 'step_4' / 'model.safetensors')
    for name in BESIDE.keys() - {'step_58 a file', 'log.jsonl torn at the end'}:
        BESIDE[name](stopped)
    assert go(stopped.parent.parent, '--resume', 'True') == trained[1]
    assert (
        'step_4 is damaged, model.safetensors is not as it was written'
        in (stopped / 'train.log').read_text()
    )
    assert (stopped / 'abandoned_1' / 'step_4').is_dir()


@pytest.mark.slow
@pytest.mark.parametrize('name', [*IN_CHECKPOINT, *BESIDE])
def test_every_damage_leads_to_the_same_run(trained, stopped, name):
    {**{k: f for k, (f, _) in IN_CHECKPOINT.items()}, **BESIDE}[name](stopped)
    assert go(stopped.parent.parent, '--resume', 'True') == trained[1]


# --- no checkpoint is left to go on from


def spoil_all(run_dir):
    "Damage every checkpoint."
    for step in run_dir.glob('step_*'):
        flip(step / 'model.safetensors')


def held(run_dir):
    "Names and bytes of a run's directory."
    return {
        p.relative_to(run_dir): p.read_bytes()
        for p in run_dir.rglob('*')
        if p.is_file()
    }


def unreadable(run_dir, name='optimizer/rank_0.safetensors'):
    "A file that is as its manifest says, and is none of its kind."
    garbage(run_dir / 'step_2' / name)
    write_manifest(run_dir / 'step_2')


BACK = ('--load_from', 'checkpoints/r/step_2', '--resume', 'True')
FORCED = (*BACK, '--force_resume', 'True')
LOCKS: list = []
#: why a start is refused -> what is done before, its flags
REFUSED = {
    'no resume': (None, ()),
    'in use': (lambda r: LOCKS.append(run_lock(r)) or LOCKS[-1].__enter__(), BACK),
    'all damaged': (spoil_all, ('--resume', 'True')),
    'all damaged, and weights named': (
        spoil_all,
        ('--resume', 'True', '--load_from', 'me/model'),
    ),
    'torn config': (lambda r: cut(r / 'config.yaml'), ('--resume', 'True')),
    'length': (None, (*BACK, '--max_training_steps', '1')),
    'adapters': (None, (*FORCED, '--lora_rank', '2', '--cache_features', 'False')),
    'data': (None, (*FORCED, '--train_dataset_path', './nowhere')),
    'schedule': (None, (*FORCED, '--lr_schedule', 'nowhere:rate')),
    'sizes': (None, (*FORCED, '--lm_inter_dim', '96')),
    'own part': (lambda r: (r / 'own_parts').write_text('model\n'), BACK),
    'no random numbers': (
        lambda r: [
            (r / 'step_2' / 'rng_0.json').unlink(),
            write_manifest(r / 'step_2'),
        ],
        BACK,
    ),
    'empty random numbers': (
        lambda r: [
            (r / 'step_2' / 'rng_0.json').write_text('{}\n'),
            write_manifest(r / 'step_2'),
        ],
        BACK,
    ),
    'half random numbers': (
        lambda r: [
            (r / 'step_2' / 'rng_0.json').write_text(
                '{"python": [3, [], null], "numpy": 1, "torch": [300]}'
            ),
            write_manifest(r / 'step_2'),
        ],
        BACK,
    ),
    'optimizer': (unreadable, BACK),
    'weights': (lambda r: unreadable(r, 'model.safetensors'), BACK),
    'tracker': (None, (*BACK, '--tracker', 'trackio')),
}


@pytest.mark.parametrize('why', REFUSED)
def test_a_refused_start_changes_nothing(trained, tmp_path, monkeypatch, why):
    "The run had ended well; a start that would go back to update 2, and is refused at any point, leaves every byte as it was."
    run_dir = tmp_path / 'checkpoints' / 'r'
    (spoil, flags) = REFUSED[why]
    shutil.copytree(trained[0] / 'checkpoints' / 'r', run_dir)
    if spoil:
        spoil(run_dir)
    before = held(run_dir)
    monkeypatch.setitem(sys.modules, 'trackio', None)
    with pytest.raises(UsageError) as error:
        go(tmp_path, *flags)
    if why == 'torn config':
        assert 'r/config.yaml: ' in str(error.value)
    if why.startswith('all damaged'):
        assert re.search(
            'step_4 is damaged, model.safetensors .* step_2 is damaged, .*run_name.*resume False',
            str(error.value),
        ), 'what is wrong, and both ways on'
    if 'random numbers' in why:
        assert 'r/step_2 is damaged, rng_0.json holds no random numbers' in str(
            error.value
        )
    after = held(run_dir)
    assert {
        p for p in after.keys() | before.keys() if after.get(p) != before.get(p)
    } == set()


def test_who_begins_anew_on_purpose_loses_nothing(trained, stopped):
    "`--resume False` sets aside what there is, with its log; the run is the one that it was."
    spoil_all(stopped)
    before = held(stopped)
    assert go(stopped.parent.parent, '--resume', 'False') == trained[1]
    aside = held(stopped / 'abandoned_1')
    assert all(
        aside[p] == raw
        for p, raw in before.items()
        if str(p).startswith('step_') or p.name == 'log.jsonl'
    )
    assert 'set aside in' in (stopped / 'train.log').read_text()


def test_a_checkpoint_that_lacks_a_counter_goes_on(trained, stopped):
    "One of an earlier release: what was not counted then has its default."
    file = stopped / 'step_4' / 'trainer_state.json'
    state = json.loads(file.read_text())
    for name in ('compiled', 'last', 'val_batch', 'bad_in_a_row'):
        del state[name]
    file.write_text(json.dumps(state))
    write_manifest(file.parent)
    assert go(stopped.parent.parent, '--resume', 'True') == trained[1]


# --- somebody else's checkpoint: complete, with a manifest of its own, and made to run code


class Hostile:
    "An object whose pickle makes a directory when it is read."

    def __reduce__(self):
        return os.mkdir, ('touched',)


UNPICKLED = []
sys.addaudithook(
    lambda event, args: UNPICKLED.append(args) if event == 'pickle.find_class' else None
)
#: beside the files of a checkpoint, names that a loader of ours or of others might look for
LURES = (
    'optimizer/.metadata',
    'optimizer/__0_0.distcp',
    'optimizer/rank_1.safetensors',
    'optimizer.pt',
    'pytorch_model.bin',
    'training_args.bin',
    'rng_0.pth',
    'scheduler.pt',
)


@pytest.mark.parametrize('name', [*FILES, *LURES])
def test_no_file_of_a_checkpoint_is_unpickled(stopped, monkeypatch, name):
    "A hostile pickle in the place of each, in a manifest of its own: whoever reads it, no pickle asks for a function."
    monkeypatch.chdir(stopped)
    step = stopped / 'step_4'
    model = VisionLanguageModel.from_pretrained(step)
    optimizer = make_optimizer(model, parse_args(FLAGS)[1])
    (step / name).write_bytes(pickle.dumps(Hostile()))
    if name != MANIFEST:
        write_manifest(step)
    UNPICKLED.clear()
    refused = []
    for read in (
        lambda: load_optimizer(step / 'optimizer', model, optimizer, Dist()),
        lambda: VisionLanguageModel.from_pretrained(step),
        lambda: get_tokenizer(str(step)),
        lambda: planned(stopped),
    ):
        try:
            read()
        except (ValueError, OSError) as e:
            refused.append(str(e))
    assert not UNPICKLED and not list(stopped.rglob('touched'))
    if name.endswith('.safetensors'):
        assert len(refused) == 1


def test_a_hostile_configuration_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (
        '!!python/object/apply:os.mkdir [touched]',
        'train: {notes: !!python/name:os.system ""}',
    ):
        Path('evil.yaml').write_text(text)
        for read in (load_yaml, Settings.load):
            with pytest.raises(ValueError, match='evil.yaml'):
                read('evil.yaml')
    assert not Path('touched').exists()


def test_code_beside_a_tokenizer_or_a_backbone_is_not_run(stopped, monkeypatch):
    monkeypatch.chdir(stopped)
    step = stopped / 'step_4'
    (step / 'evil.py').write_text(
        'import os\nos.mkdir("touched")\nfrom transformers import PreTrainedTokenizerFast as Evil, PretrainedConfig as EvilConfig\n'
    )
    settings = json.loads((step / 'tokenizer_config.json').read_text())
    (step / 'tokenizer_config.json').write_text(
        json.dumps(
            settings
            | dict(
                tokenizer_class='Evil', auto_map={'AutoTokenizer': [None, 'evil.Evil']}
            )
        )
    )
    with contextlib.suppress(ValueError, OSError):
        get_tokenizer(str(step))
    (step / 'config.json').write_text(
        json.dumps(dict(model_type='evil', auto_map={'AutoConfig': 'evil.EvilConfig'}))
    )
    for read in (vision_config, language_config):
        with pytest.raises(ValueError):
            read(step)
    assert not (stopped / 'touched').exists()


def test_a_hostile_template_is_refused(stopped):
    (stopped / 'step_4' / 'chat_template.jinja').write_text(
        "{{ cycler.__init__.__globals__.os.mkdir('touched') }}"
    )
    with pytest.raises(ValueError, match='the chat template fails: SecurityError'):
        answer_frame(get_tokenizer(str(stopped / 'step_4')))
