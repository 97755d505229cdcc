"What attention owes to the rest of the model: the same answers for all layouts, under autocast and under torch.compile."
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from nanovlm_nb.attention import BACKENDS, Layout, attention
from nanovlm_nb.config import VLMConfig
from nanovlm_nb.language import LanguageModel

CFG = VLMConfig(lm_hidden_dim=32, lm_inter_dim=48, lm_n_heads=4, lm_n_kv_heads=2, lm_n_blocks=2, lm_base_vocab_size=50, lm_max_length=64,
                vit_img_size=32, vit_patch_size=8, mp_pixel_shuffle_factor=2, max_img_size=64)


def random_layout(rng, rows, T):
    "Documents from a random start on, some rows full, some empty."
    lens, starts = [], []
    for _ in range(rows):
        start, row = rng.choice([0, 0, rng.randrange(T)]), []
        while start+sum(row) < T and rng.random() < .8:
            row.append(rng.randint(1, T-start-sum(row)))
        lens.append(tuple(row))
        starts.append(start)
    return Layout(tuple(lens), T, tuple(starts))


def run(layout, qkv, causal, backend):
    "Output and the three gradients."
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attention(*leaves, layout, causal, backend)
    if out.requires_grad:
        out.sin().sum().backward()
    return [out.detach()]+[torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('backend', [b for b in BACKENDS if b != 'explicit'])
def test_backends_agree(backend, causal):
    rng, _ = random.Random(1), torch.manual_seed(1)
    for _ in range(40):
        rows, T, kv, group = rng.randint(1, 3), rng.randint(1, 40), rng.randint(1, 3), rng.randint(1, 3)
        layout = random_layout(rng, rows, T)
        qkv = [torch.randn(rows, h, T, 8) for h in (kv*group, kv, kv)]
        got, want = run(layout, qkv, causal, backend), run(layout, qkv, causal, 'explicit')
        assert (got[0]-want[0]).abs().max() <= 1e-6
        assert max((g-w).abs().max() for g, w in zip(got[1:], want[1:])) <= 1e-5


def test_positions_before_heads_in_memory():
    "A model transposes and flattens the output: the loop over documents leaves that free of a copy."
    q = torch.randn(2, 12, 4, 8).transpose(1, 2)
    out = attention(q, q, q, Layout.from_doc_lens([[5, 7], [12]], 12), backend='docs')
    assert out.transpose(1, 2).is_contiguous()


def test_autocast():
    torch.manual_seed(0)
    lm, ids = LanguageModel(CFG), torch.randint(0, 50, (2, 24))
    layout = Layout.from_doc_lens([[10, 9], [24]], 24)
    with torch.autocast('cpu', torch.bfloat16):
        out = lm(ids, layout)
    out.float().square().mean().backward()
    want = lm(ids, layout)
    inside = layout.document_ids() > 0
    assert (out-want).abs().amax(-1)[inside].max() <= .1
    assert all(p.grad.isfinite().all() for p in lm.parameters() if p.grad is not None)


def test_new_layouts_are_not_compiled_anew():
    torch.manual_seed(0)
    torch._dynamo.reset()
    lm, counter = LanguageModel(CFG).eval(), CompileCounter()
    compiled, rng, seen = torch.compile(lm, backend=counter), random.Random(0), []
    ids = torch.randint(0, 50, (2, 24))
    for _ in range(5):
        layout = Layout.from_doc_lens([[rng.randint(1, 8) for _ in range(3)] for _ in range(2)], 24)
        assert (compiled(ids, layout)-lm(ids, layout)).abs().max() <= 1e-6
        seen.append(counter.frame_count)
    assert seen[0] > 0
    assert len(set(seen)) == 1
