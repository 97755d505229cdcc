"Stages: runs in which parts are frozen, recomputed, kept, or made of experts; MiniMind-V's first one."

import json
import shutil

import pytest
import torch
from commands import TINY, nanovlm, record, train, updates
from safetensors.torch import load_file
from transformers import SiglipVisionConfig, SiglipVisionModel

from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.model.language import LanguageModel
from nanovlm_nb.training.precision import compile_blocks
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.backbones import their_names
from nanovlm_nb.model.minimind import MINIMIND

SMALL = [*TINY, '--ask_samples', 0, '--dtype', 'float32', '--eval_interval', 3]
DROPOUT = ['--vit_dropout', 0.3, '--lm_dropout', 0.3]


def losses(cwd, name):
    "Loss and norm of each update."
    return [
        (r['batch_loss'], r['grad_norm']) for r in updates(cwd / 'checkpoints' / name)
    ]


def line(cwd, name, word):
    "The last line of a run's log that holds a word."
    return next(
        text
        for text in reversed(
            (cwd / 'checkpoints' / name / 'train.log').read_text().splitlines()
        )
        if word in text
    ).split(' INFO ')[-1]


def changed(cwd, name, last=6):
    "Names of the tensors that training has changed."
    before, after = (
        load_file(cwd / 'checkpoints' / name / f'step_{n}' / 'model.safetensors')
        for n in (0, last)
    )
    assert before.keys() == after.keys()
    return {k for k in before if not torch.equal(before[k], after[k])}


def close(a, b, rel):
    assert [x for u in a for x in u] == pytest.approx(
        [x for u in b for x in u], rel=rel
    )


# --- freezing


def test_projector_alone_on_two_ranks(tmp_path):
    for name, ranks, more in (
        ('dropout', 1, DROPOUT),
        ('alone', 1, []),
        ('shared', 2, ['--batch_size', 1]),
    ):
        train(
            [*SMALL, *more, '--run_name', name, '--lr_backbones', 0],
            tmp_path,
            ranks=ranks,
        )
        assert changed(tmp_path, name) == {'MP.proj.weight'}
        assert (
            line(tmp_path, name, 'trainable')
            == 'trainable: 0.004 M of 0.051 M (MP 0.004)'
        )
    assert losses(tmp_path, 'dropout') == losses(tmp_path, 'alone'), (
        'dropout of frozen towers is off, after validations too'
    )
    close(losses(tmp_path, 'shared'), losses(tmp_path, 'alone'), 1e-5)


def test_last_blocks_alone(tmp_path):
    train(
        [
            *SMALL,
            '--run_name',
            'last',
            '--lm_n_blocks',
            3,
            '--lr_mp',
            0,
            '--lr_vision_backbone',
            0,
            '--language_last_blocks',
            2,
        ],
        tmp_path,
    )
    names = changed(tmp_path, 'last')
    assert {'.'.join(k.split('.')[:3]) for k in names} == {
        'decoder.blocks.1',
        'decoder.blocks.2',
    }
    assert len(names) == 2 * 9, (
        'four matrices of attention, three of the MLP, two norms'
    )


def test_other_parts_are_another_optimizer(tmp_path):
    first = [*SMALL, '--run_name', 'r', '--lr_vision_backbone', 0]
    train([*first, '--max_training_steps', 3], tmp_path)
    train([*first, '--resume', 'True', '--lr_mp', 1e-4], tmp_path)
    assert len(losses(tmp_path, 'r')) == 6, 'another rate is no obstacle'
    thawed = [
        *SMALL,
        '--run_name',
        'r',
        '--resume',
        'True',
        '--lr_vision_backbone',
        1e-4,
        '--max_training_steps',
        8,
    ]
    refused = train(thawed, tmp_path, check=False)
    assert (
        refused.returncode
        and "cannot resume: parts that train: {'MP': 'all', 'decoder': 'all'} ->"
        in refused.stderr
    )
    train([*thawed, '--force_resume', 'True'], tmp_path)
    assert len(losses(tmp_path, 'r')) == 8 and line(tmp_path, 'r', 'begins anew')
    assert any(k.startswith('vision_encoder') for k in changed(tmp_path, 'r', 8))


# --- recomputing


@pytest.fixture
def quick_inductor(monkeypatch, tmp_path):
    "Inductor with plain loops in place of vector instructions: g++ is done with them in a quarter of the time. Nothing is found in, or left to, another run."
    import torch._inductor.config as config

    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path / 'inductor'))
    torch._dynamo.reset()
    with config.patch({'compile_threads': 1, 'cpp.vec_isa_ok': False}):
        yield  # no pool of processes, each of which would import torch


def loss_and_gradients(vlm, recompute, **compiling):
    "Of one step of a compiled model; what that model says, twice, when it is asked."
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, (2, 40), generator=rng)
    ids[:, 3:19] = vlm.image_token_id
    images = [
        [torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8, generator=rng)]
        for _ in range(2)
    ]
    torch.manual_seed(0)
    model = VisionLanguageModel(vlm, load_backbone=False).train()
    compile_blocks(model, **compiling)
    model.vision_encoder.recompute = model.decoder.recompute = recompute
    torch.manual_seed(1)
    loss = model(ids, images, targets=ids.clamp(max=300), doc_lens=[[40], [19, 21]])[1]
    loss.backward()
    with torch.no_grad():
        return [loss.detach(), *(p.grad for p in model.parameters())], [
            model.eval()(ids, images)[0] for _ in range(2)
        ]


@pytest.mark.usefixtures('one_thread', 'quick_inductor')
@pytest.mark.parametrize(
    'use_moe, dropout, backend',
    [
        (True, 0.0, 'aot_eager'),
        pytest.param(False, 0.1, 'inductor', marks=pytest.mark.slow),
    ],
)  # aot_eager fails on dropout in training
def test_recomputed_blocks_of_a_compiled_model(use_moe, dropout, backend):
    "Loss and gradients are those of a model that keeps what it needs; a model that is asked drops nothing."
    vlm = evolve(
        preset('shapes')[0],
        use_moe=use_moe,
        vit_dropout=dropout,
        lm_dropout=dropout,
        vit_n_blocks=2,
        lm_n_blocks=2,
    )
    (once, said), (again, said_again) = (
        loss_and_gradients(vlm, recompute, backend=backend)
        for recompute in (False, True)
    )
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7)
        for a, b in zip(once, again, strict=True)
    )
    assert torch.equal(*said) and torch.equal(*said_again)


# --- experts


def test_experts_on_one_rank_and_two(tmp_path):
    moe = [*SMALL, '--use_moe', 'True', '--moe_experts', 3, '--lm_n_blocks', 2]
    train([*moe, '--run_name', 'one', '--ask_samples', 2], tmp_path)
    train(
        [*moe, '--run_name', 'two', '--gradient_accumulation_steps', 1],
        tmp_path,
        ranks=2,
    )
    train(
        [
            *moe,
            '--run_name',
            'unweighted',
            '--moe_aux_weight',
            0,
            '--max_training_steps',
            1,
        ],
        tmp_path,
    )
    shutil.copytree(
        tmp_path / 'checkpoints' / 'one' / 'step_3',
        tmp_path / 'checkpoints' / 'resumed' / 'step_3',
    )
    train([*moe, '--run_name', 'resumed', '--resume', 'True'], tmp_path)
    close(losses(tmp_path, 'one'), losses(tmp_path, 'two'), 1e-5)
    assert losses(tmp_path, 'one')[0][0] - losses(tmp_path, 'unweighted')[0][
        0
    ] == pytest.approx(0.1 * 2, rel=0.1), 'two blocks, each almost balanced'
    assert {
        k.split('.')[4]
        for k in changed(tmp_path, 'one')
        if k.startswith('decoder') and '.mlp.' in k
    } == {'router', 'experts', 'shared'}
    assert losses(tmp_path, 'resumed') == losses(tmp_path, 'one')[3:]
    assert (
        json.loads((tmp_path / 'checkpoints' / 'one' / 'answers.json').read_text())[
            'answers'
        ]['all'][1]
        > 0
    )


# --- a frozen vision tower


def test_features_are_kept(tmp_path):
    frozen = [*SMALL, '--lr_vision_backbone', 0, '--data_cutoff_idx', 40]
    train([*frozen, '--run_name', 'live'], tmp_path)
    cached = [*frozen, '--cache_features', 'True']
    train([*cached, '--run_name', 'kept'], tmp_path)
    train([*cached, '--run_name', 'two', '--batch_size', 1], tmp_path, ranks=2)
    close(losses(tmp_path, 'kept'), losses(tmp_path, 'live'), 1e-5)
    close(losses(tmp_path, 'two'), losses(tmp_path, 'live'), 1e-5)
    files = {
        name: {
            p.name
            for p in (tmp_path / 'checkpoints' / name / 'features').rglob('*')
            if p.is_file()
        }
        for name in ('kept', 'two')
    }
    assert files['kept'] == files['two'], 'two ranks make and find the same'
    words = line(tmp_path, 'kept', 'tiles seen').split()
    assert int(words[1]) == len(files['kept']) and int(words[4]) > int(words[1]), (
        'two epochs and two validations'
    )
    computed = [
        r['computed_features'] for r in updates(tmp_path / 'checkpoints' / 'kept')
    ]
    assert 0 < sum(computed) <= len(files['kept'])
    assert computed[0] and not computed[-1], 'later passes read them'
    train(
        [*cached, '--run_name', 'kept', '--resume', 'True', '--max_training_steps', 8],
        tmp_path,
    )
    assert line(tmp_path, 'kept', 'tiles seen').startswith('features: 0 tiles seen')


def test_features_of_changed_pictures_are_kept(tmp_path):
    "Two ways to see a picture are computed in two passes, and then read, on any number of ranks."
    cached = [
        *SMALL,
        '--lr_vision_backbone',
        0,
        '--data_cutoff_idx',
        40,
        '--val_size',
        2,
    ]
    cached += ['--cache_features', 'True', '--random_crop', '.6', '--cached_views', 2]
    steps = ['--max_training_steps', 14]
    train([*cached, *steps, '--run_name', 'whole'], tmp_path)
    train([*cached, *steps, '--run_name', 'two', '--batch_size', 1], tmp_path, ranks=2)
    log = updates(tmp_path / 'checkpoints' / 'whole')
    epochs = [r['epoch'] for r in log]
    computed = [r['computed_features'] for r in log]
    assert max(epochs) >= 3
    assert all(n for n, epoch in zip(computed, epochs) if epoch < 2)
    assert not any(n for n, epoch in zip(computed, epochs) if epoch > 1), (
        'known by then'
    )
    close(losses(tmp_path, 'two'), losses(tmp_path, 'whole'), 1e-5)


# --- MiniMind-V's commands


def test_minimind_commands_parse():
    for name, batch in (('minimind', 16), ('minimind_ddp', 4)):
        vlm, cfg, _ = parse_args(['--preset', name])
        assert (
            cfg.max_epochs,
            cfg.batch_size,
            cfg.lr_mp,
            cfg.lr_backbone_pair,
            vlm.lm_hidden_dim,
        ) == (4, batch, 4e-4, (0.0, 0.0), 512)


@pytest.mark.parametrize('use_moe', [False, True])
def test_minimind_stage(tmp_path, use_moe):
    "From a language model's file, on two ranks, to the file of the stage, and on from there."
    torch.manual_seed(0)
    siglip = tmp_path / 'siglip'
    SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=64,
            patch_size=16,
        )
    ).save_pretrained(siglip)
    flags = [
        *SMALL,
        '--vit_model_type',
        siglip,
        '--vit_img_size',
        64,
        '--vit_patch_size',
        16,
        '--max_img_size',
        64,
        '--lm_base_vocab_size',
        448,
        '--lm_tokenizer',
        'shapes',
        '--train_dataset_path',
        'shapes',
        '--use_moe',
        use_moe,
        '--batch_size',
        4,
        '--gradient_accumulation_steps',
        1,
    ]
    start = ['--preset', 'minimind_ddp', *flags]
    vlm, _, _ = parse_args([str(a) for a in start])
    theirs = {
        k: (w[:448] if k in ('token_embedding.weight', 'head.weight') else w).half()
        for k, w in LanguageModel(vlm).state_dict().items()
        if 'inv_freq' not in k
    }
    (tmp_path / 'out').mkdir()
    file = tmp_path / 'out' / ('lm_32_moe.pth' if use_moe else 'lm_32.pth')
    torch.save({their_names(k, MINIMIND)[0]: w for k, w in theirs.items()}, file)
    train([*start, '--run_name', 'r'], tmp_path, ranks=2)
    run_dir = tmp_path / 'checkpoints' / 'r'
    assert changed(tmp_path, 'r') == {'MP.proj.weight'} and line(
        tmp_path, 'r', 'trainable'
    ).endswith('(MP 0.001)')
    trained = VisionLanguageModel.from_pretrained(
        run_dir / 'step_6'
    ).decoder.state_dict()
    assert all(torch.equal(trained[k][: len(w)], w.float()) for k, w in theirs.items())
    if use_moe:
        return
    train(
        [*start, '--run_name', 'r', '--resume', 'True', '--max_training_steps', 8],
        tmp_path,
        ranks=2,
    )
    assert len(losses(tmp_path, 'r')) == 8, 'the same command goes on'
    exported = nanovlm(['runs', run_dir, '--pth', 'out'], tmp_path).stdout.splitlines()[
        0
    ]
    assert exported == str(file.relative_to(tmp_path)).replace(
        'lm_32', 'pretrain_vlm_32'
    )
    train(
        [
            *start,
            '--run_name',
            'next',
            '--load_from',
            exported,
            '--max_training_steps',
            1,
        ],
        tmp_path,
    )
    best = VisionLanguageModel.from_pretrained(
        run_dir / (run_dir / 'best_checkpoint').read_text().strip()
    ).state_dict()
    begun = VisionLanguageModel.from_pretrained(
        tmp_path / 'checkpoints' / 'next' / 'step_0'
    ).state_dict()
    assert all(torch.equal(best[k][:448], begun[k][:448]) for k in best), (
        'the tower comes from its backbone, rows of image tokens begin anew'
    )


# --- the projector first

PROJECTOR = [
    *SMALL,
    '--projector_steps',
    3,
    '--save_interval',
    1,
    '--max_keep_ckpts',
    -1,
]


def test_the_projector_alone_then_all(tmp_path):
    "Its updates are those of a run with frozen backbones, to the bit; then the others train, on any number of ranks."
    train([*PROJECTOR, '--run_name', 'two'], tmp_path)
    train([*SMALL, '--run_name', 'alone', '--lr_backbones', 0], tmp_path)
    assert (
        changed(tmp_path, 'two', 3) == {'MP.proj.weight'}
        and losses(tmp_path, 'two')[:3] == losses(tmp_path, 'alone')[:3]
    )
    assert {name.split('.')[0] for name in changed(tmp_path, 'two')} == {
        'MP',
        'decoder',
        'vision_encoder',
    }
    assert [u['lr_decoder'] > 0 for u in updates(tmp_path / 'checkpoints' / 'two')] == [
        False
    ] * 3 + [True] * 3
    assert (
        line(tmp_path, 'two', 'projector_steps')
        == 'projector_steps 3: the projector begins alone, the backbones follow'
    )
    train(
        [
            *PROJECTOR[:-6],
            '--projector_steps',
            0.5,
            '--run_name',
            'ranks',
            '--batch_size',
            1,
            '--sharding',
            'zero2',
        ],
        tmp_path,
        ranks=2,
    )
    close(losses(tmp_path, 'ranks'), losses(tmp_path, 'two'), 1e-5)


@pytest.mark.parametrize('step', [2, 3, 4])
def test_a_run_in_two_stages_resumes(tmp_path, step):
    "From a checkpoint in either stage, and from the last of the first, everything is as without a break."
    train([*PROJECTOR, '--run_name', 'r'], tmp_path)
    shutil.copytree(
        tmp_path / 'checkpoints' / 'r' / f'step_{step}',
        tmp_path / 'checkpoints' / 'again' / f'step_{step}',
    )
    train(['--run_name', 'again', '--resume', 'True'], tmp_path)
    assert (
        record(tmp_path / 'checkpoints' / 'again')[1]
        == record(tmp_path / 'checkpoints' / 'r')[1]
    )
    assert losses(tmp_path, 'again') == losses(tmp_path, 'r')[step:]
