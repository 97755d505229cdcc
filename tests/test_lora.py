"Adapters: a run trains them beside weights that stay, goes on bit for bit, and peft says the same of what is written."

import json
import shutil
from pathlib import Path

import commands
import pytest
import torch
import transformers
from commands import SHORT, record
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.model.flops import all_flops, step_flops
from nanovlm_nb.model.pretrained import is_adapter
from nanovlm_nb.model.vlm import VisionLanguageModel, VLMNet
from nanovlm_nb.tools.plan import checkpoint_bytes, make_plan, memory, sizes
from nanovlm_nb.training.lora import add_adapters, read_adapted, read_peft
from nanovlm_nb.training.optim import adapter_sizes, training_groups

peft = pytest.importorskip(
    'peft', reason='peft is not there: pip install nanovlm_nb[lora]'
)
pytestmark = pytest.mark.usefixtures('one_thread')
EVERYWHERE = ['decoder', 'vision_encoder', 'MP']
GO_ON = [
    '--config',
    'checkpoints/adapters/config.yaml',
    '--run_name',
    'adapters',
    '--resume',
    'True',
]
ADAPTED = [
    '--load_from',
    'checkpoints/base',
    '--lora_rank',
    '4',
    '--lora_targets',
    *EVERYWHERE,
    '--lr_lora',
    '0.01',
]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory with a trained base and a run of adapters beside it."
    cwd = tmp_path_factory.mktemp('lora')
    with pytest.MonkeyPatch.context() as m:
        m.chdir(cwd)
        train('base', '--image_convention', 'smolvlm')
        train('adapters', *ADAPTED)
    return cwd


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def train(name, *more):
    "A run by the command line, in this process; its directory."
    assert main(['train', *SHORT, '--run_name', name, *more]) == 0
    return Path('checkpoints') / name


def refused(words, capsys) -> str:
    "The one line that a command answers with."
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(w) for w in words])
    said = capsys.readouterr().err.strip().splitlines()
    assert (
        end.value.code == 2
        and len([line for line in said if ': error: ' in line]) == 1
        and 'Traceback' not in ''.join(said)
    )
    return said[-1]


def batch_of(cfg, rows=2, T=48):
    "Texts with a picture each, and what follows."
    torch.manual_seed(0)
    ids = torch.randint(0, 400, (rows, T))
    n = cfg.mp_image_token_length
    ids[:, 3 : 3 + n] = cfg.image_token_id
    return ids, torch.rand(rows, 1, 3, *[cfg.vit_img_size] * 2)


def scores(model, ids, pictures):
    with torch.no_grad():
        return model.eval()(ids, [pictures.flatten(0, 1)])[0]


# --- a run


def test_it_goes_on_bit_for_bit(capsys):
    "Back to update 2 and forward again: the same losses and norms, the same adapters; the base is found through the checkpoint."
    before = record('checkpoints/adapters')
    for more, said in (
        ([], 'no update is left: the run ends at 4'),
        (['--max_training_steps', '8'], 'learning rate of the adapters'),
    ):
        main(['check', 'checkpoints/adapters', *more])
        assert said in capsys.readouterr().out
    assert main(['train', *GO_ON, '--load_from', 'checkpoints/adapters/step_2']) == 0
    assert (
        before == record('checkpoints/adapters')
        and len([r for r in before[0] if 'batch_loss' in r]) == 4
    )


def with_other_base(base):
    "Weights that differ in one matrix, under the same name."
    weights = load_file(base / 'model.safetensors')
    save_file(
        {k: w + 1e-3 * (k == 'MP.proj.weight') for k, w in weights.items()},
        base / 'model.safetensors',
        metadata={'decoder.token_embedding.weight': 'decoder.head.weight'},
    )


def test_a_base_that_is_gone_or_another_is_said_in_one_line(capsys):
    "A run keeps its base and may move with it. Nothing is asked of another one, and a run does not go on."
    shutil.copytree('checkpoints', 'moved/checkpoints')
    moved = Path('moved/checkpoints/adapters')
    kept = Path('checkpoints').rename('kept')
    other = 'has other weights than their base had: put that back'
    asked = ['ask', moved / 'step_4', '--prompt', 'what?']
    try:
        shutil.rmtree('moved/checkpoints/base')
        assert main([*map(str, asked)]) in (0, None), (
            'the run that made the base is not needed'
        )
        with_other_base(moved / 'base')
        assert other in refused(asked, capsys)
        shutil.rmtree(moved / 'base')
        assert 'is not there: put it back, or beside them as it was' in refused(
            asked, capsys
        )
        shutil.copytree(kept, 'checkpoints')
        with_other_base(Path('checkpoints/adapters/base'))
        for flags in (
            [*GO_ON, '--load_from', 'None'],
            [
                *SHORT,
                *ADAPTED[2:],
                '--load_from',
                'checkpoints/adapters',
                '--run_name',
                'x',
            ],
        ):
            assert other in refused(['train', *flags], capsys)
    finally:
        shutil.rmtree('checkpoints', ignore_errors=True)
        kept.rename('checkpoints')


@pytest.mark.parametrize(
    'flags, said',
    [
        (
            ['--lora_rank', '2'],
            'lora_rank: 4 -> 2 (refused: the adapters would have other shapes)',
        ),
        (
            ['--lora_rank', '2', '--force_resume', 'True'],
            'the weights are of another model: ',
        ),
        (['--lora_rank', '0'], 'lora_rank: 4 -> 0 (refused'),
        (
            ['--lora_targets', 'decoder'],
            "lora_targets: ['decoder', 'vision_encoder', 'MP'] -> ['decoder'] (refused",
        ),
    ],
)
def test_other_adapters_are_refused_on_resume(flags, said, capsys):
    assert said in refused(['train', *GO_ON, '--load_from', 'None', *flags], capsys)


def test_a_run_begins_with_the_sum_of_base_and_adapters():
    "A checkpoint of adapters is a base like any other, of plain weights or of further adapters."
    second = train(
        'second',
        '--load_from',
        'checkpoints/adapters/step_4',
        '--lora_rank',
        '2',
        '--max_training_steps',
        '2',
        '--lora_targets',
        'q_proj',
    )
    kept = read_adapted(second / 'step_0').state_dict()
    total = VisionLanguageModel.from_pretrained(
        'checkpoints/adapters/step_4'
    ).state_dict()
    assert all(
        w.equal(total[k.replace('base_layer.', '')])
        for k, w in kept.items()
        if not is_adapter(k)
    )
    assert {k for k in kept if is_adapter(k)} == {
        f'decoder.blocks.0.attn.q_proj.lora_{x}.default.weight' for x in 'AB'
    }
    assert (
        json.loads((second / 'step_2' / 'lora.json').read_text())['base']['beside']
        == '../base'
    )


# --- whoever opens one


def test_merged_is_unmerged_and_every_command_opens_it(capsys):
    step = Path('checkpoints/adapters/step_4')
    unmerged = read_adapted(step)
    merged = Asker.from_checkpoint(step).model
    ids, pictures = batch_of(merged.cfg)
    a = scores(unmerged, ids, pictures)
    b = scores(merged, ids, pictures)
    assert 0 < (a - b).abs().max() < 1e-6 * a.abs().max().clamp(min=1)
    assert (
        scores(
            VisionLanguageModel.from_pretrained('checkpoints/base/step_4'),
            ids,
            pictures,
        )
        - b
    ).abs().max() > 1e-2, 'the adapters say something'
    assert main(['ask', str(step), '--prompt', 'what?']) in (0, None)
    assert main(['export', 'checkpoints/adapters', 'plain', '--format', 'nanovlm']) in (
        0,
        None,
    )
    assert scores(VisionLanguageModel.from_pretrained('plain'), ids, pictures).equal(b)


def given(ids, pictures):
    return dict(
        input_ids=ids, pixel_values=pictures, attention_mask=torch.ones_like(ids)
    )


def test_peft_says_the_same_of_what_is_written(capsys):
    "On the exported base, with the code of peft and of transformers; and the merged export is that model, too."
    for words in (
        ['checkpoints/base', 'theirs'],
        ['checkpoints/adapters', 'written', '--format', 'peft'],
        ['checkpoints/adapters', 'summed'],
    ):
        main(['export', *words])
    assert 'written: peft\n' in capsys.readouterr().out
    load = transformers.AutoModelForImageTextToText.from_pretrained
    model = peft.PeftModel.from_pretrained(
        load('theirs', dtype=torch.float32), 'written'
    ).eval()
    ours = read_adapted(Path('checkpoints/adapters/step_4'))
    ids, pictures = batch_of(ours.cfg)
    with torch.no_grad():
        found, whole = (
            m(**given(ids, pictures)).logits
            for m in (model, load('summed', dtype=torch.float32).eval())
        )
    torch.testing.assert_close(found, scores(ours, ids, pictures), atol=1e-6, rtol=0)
    torch.testing.assert_close(whole, found, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    'how',
    [
        dict(r=3, lora_alpha=5, target_modules=['q_proj', 'v_proj', 'fc1', 'proj']),
        dict(r=2, lora_alpha=4, target_modules=['down_proj'], use_rslora=True),
        dict(r=4, target_modules=['q_proj', 'lm_head'], init_lora_weights='gaussian'),
    ],
    ids=['layers', 'rank-stabilised', 'head of a tied model'],
)
def test_what_peft_has_trained_is_read(how, capsys):
    if not Path('theirs').is_dir():
        main(['export', 'checkpoints/base', 'theirs'])
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.AutoModelForImageTextToText.from_pretrained(
            'theirs', dtype=torch.float32
        ),
        peft.LoraConfig(**how),
    )
    folder = f'trained_{how["r"]}'
    step = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        0.1 if 'lm_head' in how['target_modules'] else 1.0,
    )
    ids, pictures = batch_of(VisionLanguageModel.from_pretrained('theirs').cfg)
    for _ in range(3):
        step.zero_grad()
        model(**given(ids, pictures), labels=ids).loss.backward()
        step.step()
    model.save_pretrained(folder)
    with torch.no_grad():
        theirs = model.eval()(**given(ids, pictures)).logits
    main(['export', folder, f'{folder}_plain', '--format', 'nanovlm'])
    for ours in (
        read_peft(folder),
        VisionLanguageModel.from_pretrained(f'{folder}_plain'),
    ):
        torch.testing.assert_close(
            scores(ours, ids, pictures), theirs, atol=2e-6, rtol=0
        )


# --- what it costs

SMALL = evolve(preset('shapes')[0], vit_n_blocks=2, lm_n_blocks=6)
LORA = evolve(preset('shapes')[1], lora_rank=8)


@pytest.mark.parametrize(
    'targets, last',
    [
        (['decoder'], None),
        (EVERYWHERE, None),
        (['decoder.blocks.4', 'decoder.blocks.5'], 2),
    ],
)
def test_arithmetic_is_what_torch_counts(targets, last):
    "At most two in a hundred too much: below the first adapter nothing asks for a gradient."
    torch.manual_seed(0)
    net = VLMNet(SMALL)
    add_adapters(net, 8, targets=targets)
    training_groups(net, evolve(LORA, lora_targets=targets))
    lens = [[40, 20], [50]]
    (ids, pictures) = batch_of(SMALL, rows=2, T=64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        net(ids, [pictures[:, 0]], targets=ids, doc_lens=lens)[1].backward()
    ours = all_flops(
        step_flops(
            SMALL,
            2,
            lens,
            128,
            128,
            trains=(),
            last_blocks=last,
            adapters=adapter_sizes(net),
        )
    )
    assert 1 - 0.005 < ours / counted.get_total_flops() < 1.03, (
        ours,
        counted.get_total_flops(),
    )


def test_a_plan_knows_adapters():
    "Memory: no gradients and moments of what stays."
    v, full = preset('nanovlm')
    full = evolve(full, batch_size=1)
    adapted = evolve(full, lora_rank=16)
    whole = memory(v, full)
    narrow = memory(v, adapted)
    trained = sum(s.trained for s in sizes(v, adapted).values())
    assert (narrow.gradients, narrow.optimizer) == (
        4 * trained,
        8 * trained,
    ) and trained < 0.03 * sum(s.total for s in sizes(v, full).values())
    assert (
        narrow.total < 0.6 * whole.total
        and checkpoint_bytes(v, adapted) == 12 * trained < 150e6
    )
    plan = make_plan(v, adapted, devices=('RTX 4090', 'RTX 3060'))
    assert [d['fits'] for d in plan['devices'].values()] == [True, True]


# --- ranks


@pytest.mark.parametrize(
    'sharding', ['zero2', pytest.param('zero3', marks=pytest.mark.slow)]
)
def test_ranks_that_share_adapters_out_train_those_of_one_process(sharding):
    "Losses, but for rounding; nothing of the base is in the checkpoint."
    commands.train(
        [
            *SHORT,
            *ADAPTED,
            '--run_name',
            sharding,
            '--sharding',
            sharding,
            '--batch_size',
            1,
        ],
        Path.cwd(),
        ranks=2,
    )
    (figures, weights), (wanted, same) = (
        record(f'checkpoints/{sharding}'),
        record('checkpoints/adapters'),
    )
    assert [*weights] == [*same] == ['lora.safetensors']
    for a, b in zip(figures, wanted, strict=True):
        assert {k: a[k] for k in ('batch_loss', 'val_loss') if k in a} == pytest.approx(
            {k: b[k] for k in ('batch_loss', 'val_loss') if k in b}, rel=1e-5
        )
