"FLOPs counted from the configuration against what torch counts while a step runs."
import subprocess
import sys
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from nanovlm_nb.model.attention import Layout
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.model.flops import (COMPONENTS, GPUS, Flops, all_flops, count_flops, find_gpu, mfu, pairs, peak_flops, step_flops, unit_flops, useful_flops)
from nanovlm_nb.model.vlm import VLMNet

pytestmark = pytest.mark.usefixtures('one_thread')
SMALL = evolve(preset('shapes')[0], vit_n_blocks=2, lm_n_blocks=3, lm_base_vocab_size=200)
LONG, MIXED, SHORT = [[128], [128]], [[100], [40, 30, 20]], [[8]*14, [5, 9, 7, 3]]
ALL, VISION, MP, LM = set(COMPONENTS), {'vision_encoder'}, {'MP'}, {'decoder'}
WIDE = dict(lm_hidden_dim=96, lm_n_heads=6, lm_n_kv_heads=2, lm_inter_dim=256)

# name -> changed fields, tiles, documents, targets, what trains
CASES = dict(
    plain=({}, 3, MIXED, 60, ALL),
    image_heavy=({}, 14, LONG, 12, ALL),
    one_tile=({}, 1, MIXED, 1, ALL),
    text_heavy=({}, 1, LONG, 250, ALL),
    text_only=({}, 0, MIXED, 90, ALL),
    text_only_frozen_vision=({}, 0, MIXED, 90, LM),
    text_only_projector=({}, 0, MIXED, 90, MP | LM),
    full_rows=({}, 4, LONG, 128, ALL),
    short_documents=({}, 2, SHORT, 40, ALL),
    mostly_padding=({}, 1, [[20], [4]], 10, ALL),
    projector_only=({}, 3, MIXED, 60, MP),
    vision_only=({}, 3, MIXED, 60, VISION),
    language_only=({}, 3, MIXED, 60, LM),
    projector_and_language=({}, 3, MIXED, 60, MP | LM),
    vision_and_language=({}, 3, MIXED, 60, VISION | LM),
    vision_and_projector=({}, 3, MIXED, 60, VISION | MP),
    image_heavy_projector=({}, 14, LONG, 12, MP),
    grouped_heads=(WIDE, 3, MIXED, 60, ALL),
    no_grouping=(dict(lm_n_kv_heads=4), 3, MIXED, 60, ALL),
    untied_head=(dict(lm_tie_weights=False), 3, MIXED, 60, ALL),
    deep_vision=(dict(vit_n_blocks=5, vit_hidden_dim=64, vit_n_heads=2), 6, MIXED, 60, ALL),
    fine_patches=(dict(vit_patch_size=4, mp_pixel_shuffle_factor=4), 3, MIXED, 60, ALL),
    clip_and_qwen3=(dict(vit_cls_flag=True, vit_keep_patches=True, vit_pre_norm=True, vit_post_norm=False, lm_qk_norm=True, lm_head_dim=48), 3, MIXED, 60, ALL),
    qwen2_projector=(dict(lm_qkv_bias=True, lm_head_dim=24), 3, MIXED, 60, MP),
    large_vocabulary=(dict(lm_base_vocab_size=3000), 3, MIXED, 60, ALL),
    chunked_loss=(dict(loss_chunk_size=16), 3, MIXED, 60, ALL),
    experts=(dict(use_moe=True), 3, MIXED, 60, ALL),
    one_expert_of_eight=(dict(use_moe=True, moe_experts=8, moe_top_k=1, moe_shared_experts=0), 3, MIXED, 60, ALL),
    experts_frozen=(dict(use_moe=True, moe_shared_experts=2), 3, MIXED, 60, MP),
    chunked_loss_frozen=(dict(loss_chunk_size=16), 3, MIXED, 60, MP))


def build(cfg, trains):
    "A model in training mode of which only `trains` learns."
    torch.manual_seed(0)
    net = VLMNet(cfg).train()
    for name, part in net.named_children(): part.requires_grad_(name in trains)
    return net


def batch(cfg, tiles, docs, targets, T=128):
    "Ids, tiles and labels with these counts."
    ids, labels = torch.full((len(docs), T), 5), torch.full((len(docs), T), -100)
    ids.view(-1)[:tiles*cfg.mp_image_token_length] = cfg.image_token_id
    labels.view(-1)[:targets] = 7
    return ids, torch.rand(tiles, 3, *[cfg.vit_img_size]*2), labels


def measured(net, ids, images, labels, docs, kernel=SDPBackend.MATH, **counter):
    "FLOPs of forward and of backward, as torch counts them."
    with sdpa_kernel(kernel):
        with FlopCounterMode(display=False, **counter) as forward: loss = net(ids, images, targets=labels, doc_lens=docs)[1]
        with FlopCounterMode(display=False, **counter) as backward: loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize('name', CASES)
def test_a_step_agrees_with_torch(name):
    changes, tiles, docs, targets, trains = CASES[name]
    cfg = evolve(SMALL, **changes)
    forward, backward = measured(build(cfg, trains), *batch(cfg, tiles, docs, targets), docs)
    parts = step_flops(cfg, tiles, docs, targets, 256, trains)
    assert all_flops(parts) == pytest.approx(forward+backward, rel=.01)
    if 'chunked' not in name:  # chunks compute the gradients of the head on the way forward
        assert sum(p.forward for p in parts.values()) == pytest.approx(forward, rel=.01)
        assert sum(p.backward for p in parts.values()) == pytest.approx(backward, rel=.01)


def test_only_the_last_blocks_learn():
    net = build(SMALL, set())
    for p in net.decoder.blocks[-1:].parameters(): p.requires_grad_(True)
    total = sum(measured(net, *batch(SMALL, 3, MIXED, 60), MIXED))
    assert all_flops(step_flops(SMALL, 3, MIXED, 60, 256, LM, last_blocks=1)) == pytest.approx(total, rel=.01)
    net.MP.requires_grad_(True)
    total = sum(measured(net, *batch(SMALL, 3, MIXED, 60), MIXED))
    assert all_flops(step_flops(SMALL, 3, MIXED, 60, 256, LM | MP, last_blocks=1)) == pytest.approx(total, rel=.01)


@pytest.mark.parametrize('moe', [False, True])
@pytest.mark.parametrize('vision,language', [(True, False), (False, True), (True, True)])
def test_checkpointing_is_recomputation(vision, language, moe):
    cfg = evolve(SMALL, use_moe=moe, lm_inter_dim=256)
    net = build(cfg, ALL)
    net.vision_encoder.recompute, net.decoder.recompute = vision, language
    total = sum(measured(net, *batch(cfg, 3, MIXED, 60), MIXED))
    parts = step_flops(cfg, 3, MIXED, 60, 256, vision_checkpointing=vision, language_checkpointing=language)
    assert all_flops(parts) == pytest.approx(total, rel=.01)
    assert bool(parts['vision'].recompute) == vision and bool(parts['blocks'].recompute) == language
    assert useful_flops(parts) == useful_flops(step_flops(cfg, 3, MIXED, 60, 256)), 'recomputation is not useful'


def test_the_fused_kernel_computes_scores_again():
    "Torch's formulas for fused attention count 5 products backward where the definition has 4; otherwise they agree with ours."
    ops = torch.ops.aten
    shapes = {ops._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *a, out_shape=None, **kw: sdpa_flop_count(q, k, v),
              ops._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *a, out_shape=None, **kw: sdpa_backward_flop_count(g, q, k, v)}
    cfg = evolve(SMALL, lm_n_kv_heads=4)
    forward, backward = measured(build(cfg, ALL), *batch(cfg, 3, MIXED, 60), MIXED, SDPBackend.FLASH_ATTENTION, custom_mapping=shapes)
    parts = step_flops(cfg, 3, MIXED, 60, 256)
    P, D = cfg.n_patches, cfg.vit_hidden_dim
    scores = (parts['attention'].forward + 3*cfg.vit_n_blocks*4*P*P*D)/2
    assert sum(p.forward for p in parts.values()) == pytest.approx(forward, rel=.001)
    assert sum(p.backward for p in parts.values())+scores == pytest.approx(backward, rel=.001)


def test_frozen_components_cost_less():
    total = {name: all_flops(step_flops(SMALL, 6, MIXED, 60, trains=t)) for name, t in dict(all=ALL, no_vision=MP | LM, mp=MP, lm=LM).items()}
    assert total['all'] > total['no_vision'] > total['lm'] > total['mp']
    parts = step_flops(SMALL, 6, MIXED, 60, trains=LM)
    assert parts['vision'].backward == parts['projector'].backward == 0
    cached = step_flops(SMALL, 6, MIXED, 60, trains=MP, cache_features=True)
    assert cached['vision'] == Flops() and all_flops(cached)+parts['vision'].forward == total['mp']


def test_padding_is_waste_and_a_text_costs_no_vision():
    full, loose = step_flops(SMALL, 3, MIXED, 60), step_flops(SMALL, 3, MIXED, 60, 256)
    assert useful_flops(full) == useful_flops(loose) and all_flops(full) < all_flops(loose)
    assert full['padding'] == Flops() and sum(loose['padding']) == (256-190)*sum(unit_flops(SMALL)['blocks'])
    text = step_flops(SMALL, 0, MIXED, 60)
    assert sum(text['vision']) == sum(text['projector']) == 0
    with pytest.raises(ValueError, match='100 positions for documents of 190 tokens'): step_flops(SMALL, 3, MIXED, 60, 100)


def test_counts_add_up():
    "What a trainer exchanges is enough: the sum over micro-batches is the FLOPs of the sum of counts."
    steps = [(3, MIXED, 60), (1, SHORT, 9)]
    counts = [sum(x) for x in zip(*((t, sum(map(sum, d)), pairs(d), n) for t, d, n in steps))]
    assert count_flops(unit_flops(SMALL), *counts) == sum(useful_flops(step_flops(SMALL, t, d, n, 256)) for t, d, n in steps)


def test_counting_is_cheap():
    units = unit_flops(preset('nanovlm')[0])
    start = time.process_time()
    for _ in range(1000): count_flops(units, 16, 4096, 2**21, 800)
    assert time.process_time()-start < 1


def test_peaks():
    assert {n: peak_flops(n)/1e12 for n in ('A100', 'H100', 'H200', 'L40S', 'RTX 4090', 'V100')} == {'A100': 312, 'H100': 989, 'H200': 989, 'L40S': 362, 'RTX 4090': 165, 'V100': 125}
    assert all(find_gpu(name) == gpu for name, gpu in GPUS.items()), 'each name finds its own line'
    assert peak_flops('cpu') is None and peak_flops('NVIDIA GeForce RTX 3090') == 71e12
    assert mfu(312e12*8*.4, 1, 8*312e12) == pytest.approx(.4)


def test_flops_need_no_torch():
    code = 'import nanovlm_nb.model.flops, sys; sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_the_default_model_at_its_full_size():
    "On the meta device nothing is computed, but torch counts all the same."
    cfg = evolve(preset('nanovlm')[0], attn_backend='docs')
    docs, tiles, targets = [[1000, 900, 700, 600, 400, 300]], 16, 800
    with torch.device('meta'):
        net = VLMNet(cfg)
        x, pixels = torch.empty(1, 4096, cfg.lm_hidden_dim, requires_grad=True), torch.empty(tiles, 3, 512, 512)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        h = net.decoder(x, layout=Layout.from_doc_lens(docs, 4096))
        (net.decoder.head(h[0, :targets]).sum()+net.MP(net.vision_encoder(pixels)).sum()).backward()
    parts = step_flops(cfg, tiles, docs, targets, 4096)
    assert all_flops(parts) == pytest.approx(counter.get_total_flops(), rel=.001)
    assert useful_flops(parts) == count_flops(unit_flops(cfg), tiles, sum(docs[0]), pairs(docs), targets)
