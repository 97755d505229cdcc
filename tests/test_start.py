"What foretells a run starts from what the run starts from: the same sizes, tokenizer and DeepSpeed file, for each kind of start."

import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from commands import TINY, record, updates
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from nanovlm_nb.tools.check import foreseen
from nanovlm_nb.tools.plan import make_plan
from nanovlm_nb.cli import main as nanovlm
from nanovlm_nb.core.config import VLMConfig, preset
from nanovlm_nb.core.settings import load_yaml, parse_args
from nanovlm_nb.runs.start import resolve_start
from nanovlm_nb.model.vlm import VisionLanguageModel

pytestmark = pytest.mark.usefixtures('one_thread')
RUN = [
    *TINY[16:],
    '--max_training_steps',
    '1',
    '--eval_in_epochs',
    'False',
    '--ask_samples',
    '0',
]  # without sizes of a model
SIZES = TINY[:16]
#: kind of start -> flags; each is given to the run and to what foretells it
STARTS = dict(
    random=SIZES,
    checkpoint=['--load_from', 'checkpoints/first/step_1'],
    pth=[*SIZES, '--load_from', 'out/pretrain_vlm_32.pth'],
    backbones=[
        '--vlm_load_backbone_weights',
        'True',
        '--vit_model_type',
        'vit',
        '--lm_model_type',
        'lm',
    ],
    deepspeed=[*SIZES, '--deepspeed_config', 'ds.json'],
)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory with a run, its `.pth` file, two backbones and a DeepSpeed file."
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home := tmp_path_factory.mktemp('start'))
        assert nanovlm(['train', *RUN, *SIZES, '--run_name', 'first']) == 0
        Path('out').mkdir()
        torch.save(
            VisionLanguageModel.from_pretrained('checkpoints/first').state_dict(),
            'out/pretrain_vlm_32.pth',
        )
        torch.manual_seed(0)
        SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=64,
                patch_size=8,
            )
        ).save_pretrained('vit')
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=48,
                intermediate_size=80,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                vocab_size=448,
            )
        ).save_pretrained('lm')
        Path('ds.json').write_text(
            '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}'
        )
    return home


def trained(kind: str) -> tuple[VisionLanguageModel, tuple]:
    "The model that a run of one update leaves, and the configurations that it used."
    name = 'first' if kind == 'random' else kind
    if name == kind:
        assert nanovlm(['train', *RUN, *STARTS[kind], '--run_name', kind]) == 0
    return VisionLanguageModel.from_pretrained(f'checkpoints/{name}/step_1'), load_yaml(
        f'checkpoints/{name}/config.yaml'
    )


@pytest.mark.parametrize('kind', STARTS)
def test_the_plan_counts_the_parameters_of_the_run(kind, place, monkeypatch):
    monkeypatch.chdir(place)
    model, (vlm, cfg) = trained(kind)
    said = make_plan(*foreseen(*parse_args([*RUN, *STARTS[kind]])[:2]))
    assert {n: p['total'] for n, p in said['parameters'].items()} == {
        n: sum(p.numel() for p in part.parameters())
        for n, part in model.named_children()
    }
    assert (
        said['batch']['batch_size'] == cfg.batch_size
        and said['batch']['accumulation'] == cfg.gradient_accumulation_steps
    )
    v, c, _ = resolve_start(*parse_args([*RUN, *STARTS[kind]])[:2])
    assert (v.lm_tokenizer, c.lr_mp) == (vlm.lm_tokenizer, cfg.lr_mp)


# --- what was given is what runs

#: field -> its section, its value in the file, and as a flag. The first follows a checkpoint unless it is given, the others never do
VALUES = dict(
    lm_dropout=('vlm', 0.1, 0.2),
    lm_max_length=('vlm', 4500, 5000),
    lr_mp=('train', 0.03, 0.04),
)


@pytest.mark.parametrize(
    'in_file, flag, checkpoint', list(itertools.product((False, True), repeat=3))
)
@pytest.mark.parametrize('named', [None, 'nanovlm'])
def test_what_was_given_is_what_runs(
    named, in_file, flag, checkpoint, place, tmp_path, monkeypatch
):
    "Flag before file before checkpoint before preset, also where the value given is that of a preset; a size that the weights do not have is refused."
    monkeypatch.chdir(place)
    words = ['--preset', named] if named else []
    if in_file:
        (tmp_path / 'c.yaml').write_text(
            ''.join(
                f'{section}: {{{", ".join(f"{n}: {v[1]}" for n, v in VALUES.items() if v[0] == section)}}}\n'
                for section in ('vlm', 'train')
            )
        )
        words += ['--config', str(tmp_path / 'c.yaml')]
    if flag:
        words += [
            word
            for name, (*_, value) in VALUES.items()
            for word in (f'--{name}', str(value))
        ]
    words += (
        ['--load_from', 'checkpoints/first/step_1']
        if checkpoint
        else ['--vlm_load_backbone_weights', 'False']
    )

    def start(*more):
        return resolve_start(*parse_args([*words, *more])[:2])

    saved = VLMConfig.load('checkpoints/first/step_1')
    presets = vars(preset(named or 'shapes')[0]) | vars(preset(named or 'shapes')[1])
    found_vlm, found_train, _ = start()
    for name, (_, file, value) in VALUES.items():
        base = (
            saved.lm_dropout if checkpoint and name == 'lm_dropout' else presets[name]
        )
        assert getattr(found_train if name == 'lr_mp' else found_vlm, name) == (
            value if flag else file if in_file else base
        ), name
    assert found_vlm.max_img_size == (
        saved.max_img_size if checkpoint else presets['max_img_size']
    )
    assert found_vlm.lm_hidden_dim == (
        saved.lm_hidden_dim if checkpoint else presets['lm_hidden_dim']
    )
    if not checkpoint:
        return
    with pytest.raises(
        ValueError,
        match=f'lm_n_blocks is 32, but .* was trained with {saved.lm_n_blocks}',
    ):
        start('--lm_n_blocks', '32')


# Going on with a name alone


def settings(run):
    return {
        name: value
        for cfg in load_yaml(f'{run}/config.yaml')
        for name, value in cfg.to_dict().items()
    }


MORE = dict(
    yaml=['--config', 'mine.yaml'],
    vlm=[
        '--resume_from_vlm_checkpoint',
        'True',
        '--vlm_checkpoint_path',
        'checkpoints/first/step_1',
        '--lr_mp',
        '0.004',
    ],
)


@pytest.mark.parametrize(
    'kind',
    [
        k
        if k in ('checkpoint', 'backbones')
        else pytest.param(k, marks=pytest.mark.slow)
        for k in [*STARTS, *MORE]
    ],
)
def test_a_name_and_resume_are_enough(kind, place, monkeypatch):
    "Whatever a run began with, and a run that was renamed: what is not given is as it was. What only said where to look is not taken over."
    monkeypatch.chdir(place)
    Path('mine.yaml').write_text(
        'train: {lr_mp: 0.003}\nvlm: {lm_n_blocks: 1, lm_hidden_dim: 32, lm_inter_dim: 64, lm_n_heads: 2, lm_n_kv_heads: 1, vit_hidden_dim: 32, vit_n_heads: 2, vit_n_blocks: 1}\n'
    )
    assert (
        nanovlm(['train', *RUN, *(STARTS | MORE)[kind], '--run_name', f'{kind}-begun'])
        == 0
    )
    run = Path('checkpoints', f'{kind}-renamed')
    Path('checkpoints', f'{kind}-begun').rename(run)
    before = settings(run)
    assert (
        nanovlm(
            [
                'train',
                '--run_name',
                run.name,
                '--resume',
                'True',
                '--max_training_steps',
                '2',
            ]
        )
        == 0
    )
    log = (run / 'train.log').read_text()
    assert (
        (run / 'step_2').is_dir()
        and f'what was not given is as in {run}/config.yaml' in log
        and 'Auto resumed' in log
    )
    assert {n for n, v in settings(run).items() if v != before[n]} <= {
        'max_training_steps',
        'resume',
        'run_name',
        'load_from',
        'vlm_checkpoint_path',
        'resume_from_vlm_checkpoint',
    }


@pytest.mark.slow
def test_weights_of_another_run_and_a_return(place, monkeypatch):
    "With a name, a checkpoint of another run lends its weights: the settings are those that are given. Without one its run goes back, with its own settings. What is given wins."
    monkeypatch.chdir(place)
    assert (
        nanovlm(
            [
                'train',
                *RUN,
                '--resume',
                'True',
                '--load_from',
                'checkpoints/first/step_1',
                '--run_name',
                'lent',
                '--max_training_steps',
                '2',
                '--lr_mp',
                '0.002',
            ]
        )
        == 0
    )
    was = settings('checkpoints/first')
    now = settings('checkpoints/lent')
    assert {n for n, v in now.items() if v != was[n]} == {
        'max_training_steps',
        'resume',
        'run_name',
        'load_from',
        'lr_mp',
    } and now['lr_mp'] == 0.002
    assert [u['step'] for u in updates('checkpoints/lent')] == [1, 2]
    assert (
        nanovlm(['train', '--resume', 'True', '--load_from', 'checkpoints/lent/step_0'])
        == 0
    )
    assert (
        settings('checkpoints/lent') == now
        and (Path('checkpoints') / 'lent' / 'abandoned_1' / 'step_2').is_dir()
    )


#: kind of start -> what is gone before its second start
GONE = dict(
    checkpoint='checkpoints/first', pth='out', backbones='lm', vlm='checkpoints/first'
)


@pytest.mark.parametrize(
    'kind',
    [
        k if k in ('checkpoint', 'vlm') else pytest.param(k, marks=pytest.mark.slow)
        for k in GONE
    ],
)
def test_the_same_command_serves_every_start(kind, place, monkeypatch):
    "Weights to begin with, and what only says where they are, are not looked at by the second start: they may be gone. The command is the same, and so are its sizes."
    monkeypatch.chdir(place)
    command = [
        'train',
        *RUN,
        *(STARTS | MORE)[kind],
        '--run_name',
        f'{kind}-job',
        '--resume',
        'True',
        '--max_training_steps',
        '2',
    ]
    assert nanovlm([*command[:-1], '1']) == 0
    before = settings(f'checkpoints/{kind}-job')
    away = Path(GONE[kind]).rename('hidden')
    try:
        assert nanovlm(command) == 0
    finally:
        away.rename(GONE[kind])
    run = Path('checkpoints', f'{kind}-job')
    log = (run / 'train.log').read_text()
    assert (
        log.count('a new run begins at update 0') == 1
        and log.count('Auto resumed') == 1
    )
    assert [u['step'] for u in updates(run)] == [1, 2]
    assert {n for n, v in settings(run).items() if v != before[n]} <= {
        'max_training_steps'
    }


@pytest.mark.parametrize('adapters', [(), ('--lora_rank', '2')])
def test_a_copied_checkpoint_continues_its_run(adapters, place, monkeypatch):
    "`cp -r OTHER/step_N NEW`, and a name is enough: settings, optimizer and data are those of the checkpoint. Its run may be gone. Bit for bit."
    monkeypatch.chdir(place)
    name = f'whole{len(adapters)}'
    assert (
        nanovlm(
            [
                'train',
                *RUN,
                '--load_from',
                'checkpoints/first',
                *adapters,
                '--run_name',
                name,
                '--max_training_steps',
                '4',
                '--save_interval',
                '2',
                '--eval_in_epochs',
                'True',
                '--eval_interval',
                '4',
            ]
        )
        == 0
    )
    whole = Path('checkpoints', name)
    new = Path('checkpoints', f'new{len(adapters)}')
    new.mkdir()
    assert subprocess.run(['cp', '-r', whole / 'step_2', new]).returncode == 0
    if adapters:
        assert subprocess.run(['cp', '-r', whole / 'base', new]).returncode == 0
    away = whole.rename('away')
    try:
        assert nanovlm(['train', '--run_name', new.name, '--resume', 'True']) == 0
    finally:
        away.rename(whole)
    assert (
        f'what was not given is as in {new}/step_2/trainer_state.json'
        in (new / 'train.log').read_text()
    )
    (figures, weights), (wanted, same) = record(new), record(whole)
    assert weights == same and [f for f in figures if 'batch_loss' in f] == [
        f for f in wanted if 'batch_loss' in f and f['step'] > 2
    ]


def test_a_run_outlives_the_run_that_it_began_with(place, monkeypatch):
    "Its own checkpoint has all that it needs, the tokenizer too."
    monkeypatch.chdir(place)
    assert (
        nanovlm(
            ['train', *RUN, '--load_from', 'checkpoints/first', '--run_name', 'heir']
        )
        == 0
    )
    away = Path('checkpoints/first').rename('away')
    try:
        assert (
            nanovlm(
                [
                    'train',
                    '--run_name',
                    'heir',
                    '--resume',
                    'True',
                    '--max_training_steps',
                    '2',
                ]
            )
            == 0
        )
    finally:
        away.rename('checkpoints/first')
    assert [u['step'] for u in updates('checkpoints/heir')] == [1, 2]
