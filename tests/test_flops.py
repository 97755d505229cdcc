"FLOPs counted from the configuration against what torch counts while a step runs."

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.model.flops import COMPONENTS, all_flops, step_flops, useful_flops
from nanovlm_nb.model.vlm import VLMNet

pytestmark = pytest.mark.usefixtures('one_thread')
SMALL = evolve(
    preset('shapes')[0], vit_n_blocks=2, lm_n_blocks=3, lm_base_vocab_size=200
)
LONG = [[128], [128]]
MIXED = [[100], [40, 30, 20]]
ALL = set(COMPONENTS)
VISION = {'vision_encoder'}
MP = {'MP'}
LM = {'decoder'}

# name -> changed fields, tiles, documents, targets, what trains
CASES = dict(
    image_heavy=({}, 14, LONG, 12, ALL),
    text_heavy_one_tile=(dict(lm_n_kv_heads=4), 1, LONG, 250, ALL),
    text_only=({}, 0, MIXED, 90, ALL),
    text_only_frozen_vision=({}, 0, MIXED, 90, LM),
    mostly_padding=(dict(lm_tie_weights=False), 1, [[20], [4]], 10, ALL),
    projector_only=({}, 14, LONG, 12, MP),
    language_only=({}, 3, MIXED, 60, LM),
    vision_and_language=(dict(lm_base_vocab_size=3000), 3, MIXED, 60, VISION | LM),
    vision_and_projector=(
        dict(vit_patch_size=4, mp_pixel_shuffle_factor=4),
        3,
        MIXED,
        60,
        VISION | MP,
    ),
    grouped_heads=(
        dict(lm_hidden_dim=96, lm_n_heads=6, lm_n_kv_heads=2, lm_inter_dim=256),
        3,
        MIXED,
        60,
        ALL,
    ),
    clip_and_qwen3=(
        dict(
            vit_cls_flag=True,
            vit_keep_patches=True,
            vit_pre_norm=True,
            vit_post_norm=False,
            lm_qk_norm=True,
            lm_head_dim=48,
        ),
        3,
        MIXED,
        60,
        ALL,
    ),
    conv_stem=(dict(vit_conv_stem=True), 3, MIXED, 60, ALL),
    conv_stem_frozen=(dict(vit_conv_stem=True), 3, MIXED, 60, LM),
    qwen2_projector=(dict(lm_qkv_bias=True, lm_head_dim=24), 3, MIXED, 60, MP),
    chunked_loss=(dict(loss_chunk_size=16), 3, MIXED, 60, ALL),
    experts=(dict(use_moe=True), 3, MIXED, 60, ALL),
    experts_frozen=(dict(use_moe=True, moe_shared_experts=2), 3, MIXED, 60, MP),
)


def measured(
    cfg,
    tiles,
    docs,
    targets,
    trains,
    last_blocks=None,
    recompute=(False, False),
    kernel=SDPBackend.MATH,
    **counter,
):
    "FLOPs of forward and of backward, as torch counts them."
    torch.manual_seed(0)
    net = VLMNet(cfg).train()
    for name, part in net.named_children():
        part.requires_grad_(name in trains)
    if last_blocks:
        net.decoder.requires_grad_(False).blocks[-last_blocks:].requires_grad_(True)
    net.vision_encoder.recompute, net.decoder.recompute = recompute
    ids = torch.full((len(docs), 128), 5)
    labels = torch.full((len(docs), 128), -100)
    ids.view(-1)[: tiles * cfg.mp_image_token_length] = cfg.image_token_id
    labels.view(-1)[:targets] = 7
    with sdpa_kernel(kernel):
        with FlopCounterMode(display=False, **counter) as forward:
            loss = net(
                ids,
                torch.rand(tiles, 3, *[cfg.vit_img_size] * 2),
                targets=labels,
                doc_lens=docs,
            )[1]
        with FlopCounterMode(display=False, **counter) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize('name', CASES)
def test_a_step_agrees_with_torch(name):
    changes, tiles, docs, targets, trains = CASES[name]
    cfg = evolve(SMALL, **changes)
    forward, backward = measured(cfg, tiles, docs, targets, trains)
    parts = step_flops(cfg, tiles, docs, targets, 256, trains)
    assert all_flops(parts) == pytest.approx(forward + backward, rel=0.01)
    assert sum(p.forward for p in parts.values()) + parts[
        'head'
    ].backward == pytest.approx(forward, rel=0.01)  # the loss has its gradients at once


@pytest.mark.parametrize('trains', [LM, LM | MP])
def test_only_the_last_blocks_learn(trains):
    total = sum(measured(SMALL, 3, MIXED, 60, trains, last_blocks=1))
    assert all_flops(
        step_flops(SMALL, 3, MIXED, 60, 256, trains, last_blocks=1)
    ) == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize('moe', [False, True])
@pytest.mark.parametrize('recompute', [(True, False), (False, True), (True, True)])
def test_checkpointing_is_recomputation(recompute, moe):
    cfg = evolve(SMALL, use_moe=moe, lm_inter_dim=256)
    total = sum(measured(cfg, 3, MIXED, 60, ALL, recompute=recompute))
    parts = step_flops(
        cfg,
        3,
        MIXED,
        60,
        256,
        vision_checkpointing=recompute[0],
        language_checkpointing=recompute[1],
    )
    assert all_flops(parts) == pytest.approx(total, rel=0.01)
    assert (
        bool(parts['vision'].recompute),
        bool(parts['blocks'].recompute),
    ) == recompute
    assert useful_flops(parts) == useful_flops(step_flops(cfg, 3, MIXED, 60, 256)), (
        'recomputation is not useful'
    )
