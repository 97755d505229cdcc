"What attention owes to the rest of the model: documents are computed as defined and in isolation, under autocast too."

import random

import pytest
import torch

from nanovlm_nb.core.layout import Layout
from nanovlm_nb.model.attention import BACKENDS
from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.model.language import LanguageModel

CFG = VLMConfig(
    lm_hidden_dim=32,
    lm_inter_dim=48,
    lm_n_heads=4,
    lm_n_kv_heads=2,
    lm_n_blocks=2,
    lm_base_vocab_size=50,
    lm_max_length=64,
    vit_img_size=32,
    vit_patch_size=8,
    mp_pixel_shuffle_factor=2,
    max_img_size=64,
)
PADDING = 'none', 'front', 'end', 'both'


def test_autocast():
    torch.manual_seed(0)
    lm = LanguageModel(CFG)
    ids = torch.randint(0, 50, (2, 24))
    layout = Layout.from_doc_lens([[10, 9], [24]], 24)
    with torch.autocast('cpu', torch.bfloat16):
        out = lm(ids, layout)
    out.float().square().mean().backward()
    want = lm(ids, layout)
    assert (out - want).abs().amax(-1)[layout.documents > 0].max() <= 0.1
    assert all(p.grad.isfinite().all() for p in lm.parameters() if p.grad is not None)


def packed_rows(rng, n, padding):
    "`n` documents in three rows, some of which may be empty; every third document has one position."
    lens = [[] for _ in range(3)]
    for k in range(n):
        lens[rng.choice((0, 2) if n < 5 else (0, 1, 2))].append(
            1 if k % 3 == 0 else rng.randint(1, 9)
        )
    T = max(1, *map(sum, lens)) + (padding != 'none') * rng.randint(1, 7)
    if padding == 'none':
        lens = [[*row[:-1], row[-1] + T - sum(row)] if row else row for row in lens]
    free = [T - sum(row) for row in lens]
    starts = [
        dict(none=0, end=0, front=f, both=rng.randint(0, f))[padding] for f in free
    ]
    return Layout(tuple(map(tuple, lens)), T, tuple(starts))


def leaves(layout, dtype=torch.float64):
    "15 query heads share 5 key heads; the gradient that comes back, last."
    return [
        torch.randn(len(layout.doc_lens), h, layout.T, 8, dtype=dtype)
        for h in (15, 5, 5, 15)
    ]


def passes(name, tensors, layout, causal):
    "Mixed values, and the gradients of queries, keys and values."
    *qkv, grad = tensors
    qkv = [x.clone().requires_grad_() for x in qkv]
    out = BACKENDS[name](*qkv, layout, causal, 0.0)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def sweep(counts):
    "Layouts with these numbers of documents, with every padding, causal or not."
    rng = random.Random(0)
    return [
        (packed_rows(rng, n, padding), causal)
        for n in counts
        for padding in PADDING
        for causal in (True, False)
    ]


MANY = [(0, 1, 2, 17, 60), pytest.param(range(61), marks=pytest.mark.slow)]


@pytest.mark.parametrize('counts', MANY, ids=['few', 'all'])
@pytest.mark.parametrize('name', ['docs', 'sdpa'])
def test_packed_documents_as_defined(name, counts):
    "In double precision, values and gradients; 0 at padding."
    torch.manual_seed(0)
    for layout, causal in sweep(counts):
        tensors = leaves(layout)
        at_padding = layout.documents == 0
        got, want = (passes(way, tensors, layout, causal) for way in (name, 'explicit'))
        assert max((g - w).abs().max() for g, w in zip(got, want, strict=True)) <= 1e-12
        assert (got[0].transpose(1, 2)[at_padding] == 0).all()


@pytest.mark.parametrize('counts', MANY, ids=['few', 'all'])
@pytest.mark.parametrize('name', ['docs', 'sdpa'])
def test_packed_documents_are_isolated(name, counts):
    "One document, or the padding, is replaced: nothing else moves by a single bit, values and gradients alike."
    rng = random.Random(1)
    _ = torch.manual_seed(0)
    for layout, causal in sweep(counts):
        tensors = leaves(layout)
        starts = enumerate(zip(layout.doc_lens, layout.starts))
        places = [
            (b, at + sum(lens[:i]), at + sum(lens[: i + 1]))
            for b, (lens, at) in starts
            for i in range(len(lens))
        ]
        other = layout.documents == 0
        if places and rng.random() < 0.8:
            b, s, e = rng.choice(places)
            other = torch.zeros_like(other)
            other[b, s:e] = True
        changed = [
            torch.where(other[:, None, :, None], 100 * torch.randn_like(x), x)
            for x in tensors
        ]
        before, after = (passes(name, x, layout, causal) for x in (tensors, changed))
        for a, z in zip(before, after):
            assert torch.equal(a.transpose(1, 2)[~other], z.transpose(1, 2)[~other])
        assert (layout.documents[other] == 0).all() or not torch.equal(
            before[0], after[0]
        )
