"What a run costs, and advice: memory against torch's own tracker, remedies, the command."

import sys

import pytest
import torch
from commands import run
from torch.distributed._tools.mem_tracker import MemTracker

from nanovlm_nb.tools import plan as pl
from nanovlm_nb.training.advice import advice, if_it_waits, memory_remedies
from nanovlm_nb.core.config import effective_batch_size, evolve, preset, tiny
from nanovlm_nb.model.vlm import VLMNet
from nanovlm_nb.training.optim import training_groups

pytestmark = pytest.mark.usefixtures('one_thread')
NANO_VLM, NANO = preset('nanovlm')


# --- parameters and memory


@pytest.mark.parametrize(
    'changes',
    [
        dict(lr_vision_backbone=0),
        dict(lr_language_backbone=0),
        dict(language_last_blocks=2),
        dict(lr_backbones=0.0),
        {},
    ],
)
def test_trained_parameters_are_the_optimizers(changes):
    vlm, cfg = preset('shapes')
    cfg = evolve(cfg, **changes)
    groups = training_groups(VLMNet(vlm), cfg)
    assert {n: s.trained for n, s in pl.sizes(vlm, cfg).items() if s.trained} == {
        g['name']: sum(p.numel() for p in g['params']) for g in groups
    }


@pytest.mark.parametrize(
    'changes',
    [
        {},
        dict(language_checkpointing=True, vision_checkpointing=True),
        dict(dtype='bfloat16'),
        dict(attn_backend='sdpa', loss_chunk_size=16),
    ],
    ids=str,
)
def test_the_tracker_agrees_with_torchs_to_the_byte(changes):
    "Torch's private one, which knows no frozen parameters, watches the same step of the same network."
    vlm, cfg = tiny(vit_n_blocks=2, lm_n_blocks=2, **changes)
    ours = pl.peak_memory(vlm, cfg)
    theirs = MemTracker()
    net = pl.like_cuda(
        pl.meta_net(vlm, cfg),
        torch.float32 if cfg.dtype == 'float32' else torch.bfloat16,
    )
    theirs.track_external(net)
    with theirs:
        pl.step(net, pl.fullest_batch(vlm, cfg))
    assert (
        theirs.get_tracker_snapshot('peak')[pl.META]['Total']
        == ours.total() - ours['optimizer']
    )


def test_what_is_frozen_keeps_nothing():
    "A frozen tower passes by, one whose features are kept on disk does not run, adapters have few gradients."
    whole, frozen, cached, adapted = (
        pl.peak_memory(*tiny(vit_n_blocks=4, dtype='bfloat16', **how))
        for how in (
            {},
            dict(lr_vision_backbone=0),
            dict(lr_vision_backbone=0, cache_features=True),
            dict(lora_rank=2, lora_targets=['decoder', 'vision_encoder']),
        )
    )
    assert (
        cached['vision_encoder'] == 0
        and whole['vision_encoder'] > 3 * frozen['vision_encoder']
        and whole.total() > frozen.total() >= cached.total()
    )
    assert (
        adapted['gradients'] < 0.2 * whole['gradients']
        and adapted['vision_encoder'] > frozen['vision_encoder']
    )


def test_experts_cost_what_a_position_visits():
    "As many experts as one likes: each position visits so many, but all weights have 16-bit copies."
    few, many = (
        pl.memory(*tiny(use_moe=True, moe_experts=n, moe_top_k=1, dtype='bfloat16'))
        for n in (2, 8)
    )
    assert (
        few.decoder == many.decoder
        and few.copies < many.copies
        and few.weights < many.weights
    )


def test_blank_tiles_are_charged():
    "On a GPU 17 tiles are 24, and the tower works for all of them."
    vlm, cfg = tiny(vit_n_blocks=2, lm_max_length=512)
    need = [
        pl.peak_memory(vlm, cfg, pl.example_batch(vlm, 1, 1, tiles=n, targets=9))
        for n in (17, 24)
    ]
    bare = pl.peak_memory(
        vlm,
        evolve(cfg, tile_multiple=1),
        pl.example_batch(vlm, 1, 1, tiles=17, targets=9),
    )
    assert (
        need[1]['vision_encoder'] == need[0]['vision_encoder'] > bare['vision_encoder']
    )


# --- advice

BAD = dict(
    data=0.4, forward_backward=0.3, communication=0.2, optimizer=0.05, validation=0.05
)


def test_advice_has_a_line_for_each_fault():
    lines = advice(BAD, NANO, NANO_VLM, oom=True, unstable=True)
    assert [line.split(':')[0].split(' ')[0] for line in lines] == [
        'out',
        'unstable',
        'data',
        'communication',
        'other',
    ]
    assert (
        'batch_size 1, gradient_accumulation_steps 16' in lines[0]
        and 'max_images_per_knapsack 10' in lines[0]
        and 'lm_max_length 2048' in lines[0]
    )
    assert 'language_checkpointing' in lines[0] and 'max_img_size 1024' in lines[0]
    assert (
        'lr_mp 0.00512 -> 0.001' in lines[1]
        and 'warmup_ratio 0.03 -> 0.06' in lines[1]
        and 'max_grad_norm 1.0 -> 0.5' in lines[1]
    )
    assert (
        'num_workers 3 -> 6' in lines[2]
        and 'gradient_accumulation_steps 8 -> 16' in lines[3]
    )
    assert advice(dict(data=0.01, compute=0.95, other=0.04), NANO)[0].startswith(
        'the time is well spent; to go faster: compile True'
    )
    assert next(
        text
        for ok, text in if_it_waits(NANO_VLM, evolve(NANO, num_workers=16))['data']
        if ok
    ).startswith('resize_to_max_side_len')


def test_every_remedy_is_a_valid_configuration():
    for vlm, cfg, gpus in (
        (NANO_VLM, NANO, 8),
        (*preset('shapes'), 1),
        (NANO_VLM, evolve(NANO, batch_size=8, gradient_accumulation_steps=4), 4),
    ):
        packs = effective_batch_size(cfg)
        for remedy in memory_remedies(vlm, cfg, gpus):
            vlm, cfg = pl.change(vlm, cfg, remedy.changes)
            assert effective_batch_size(cfg) == packs, 'no remedy changes the update'
    assert memory_remedies(
        NANO_VLM, evolve(NANO, batch_size=8, gradient_accumulation_steps=4)
    )[0].changes == dict(batch_size=4, gradient_accumulation_steps=8)


# --- the command


def test_no_weights_are_made(tmp_path):
    "The weights alone would take 1.84 GB; to know all models of transformers takes over a second."
    code = """
import sys
from nanovlm_nb.cli import main
main(['plan', '--preset', 'nanovlm', '--gpus', '8', '--gpu', 'H200'])
import nanovlm_nb.runs.run
print('transformers.models' in sys.modules, next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))
"""
    all_models, memory = (
        run([sys.executable, '-c', code], tmp_path, fresh=True)
        .stdout.splitlines()[-1]
        .split()
    )
    assert int(memory) < 1.2e6, 'kB'
    assert all_models == 'False', 'no command starts with them'
