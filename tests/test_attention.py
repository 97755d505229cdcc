"What attention owes to the rest of the model: the same answers for all layouts, under autocast and under torch.compile."
import random

import pytest
import torch

from nanovlm_nb.model.attention import BACKENDS, Layout, attention, explicit_attention, varlen_attention
from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.model.language import LanguageModel

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
    from torch._dynamo.testing import CompileCounter
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


# --- the operator for packed documents, against the definition in double precision

PADDING = 'none', 'front', 'end', 'both'


def packed_rows(rng, n, padding):
    "`n` documents in three rows, some of which may be empty; every third document has one position."
    lens = [[] for _ in range(3)]
    for k in range(n): lens[rng.choice((0, 2) if n < 5 else (0, 1, 2))].append(1 if k % 3 == 0 else rng.randint(1, 9))
    T = max(1, *map(sum, lens)) + (padding != 'none')*rng.randint(1, 7)
    if padding == 'none': lens = [[*row[:-1], row[-1]+T-sum(row)] if row else row for row in lens]
    free = [T-sum(row) for row in lens]
    starts = [dict(none=0, end=0, front=f, both=rng.randint(0, f))[padding] for f in free]
    return Layout(tuple(map(tuple, lens)), T, tuple(starts))


def leaves(layout, dtype=torch.float64):
    "15 query heads share 5 key heads; the gradient that comes back, last."
    shapes = [(len(layout.doc_lens), h, layout.T, 8) for h in (15, 5, 5, 15)]
    return [torch.randn(s, dtype=dtype) for s in shapes]


def passes(way, tensors, layout, causal):
    "Mixed values, and the gradients of queries, keys and values."
    *qkv, grad = tensors
    qkv = [x.clone().requires_grad_() for x in qkv]
    out = way(*qkv, layout, causal, 0.)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def sweep(counts, per_count):
    "Layouts with these numbers of documents, with every padding, causal or not."
    rng = random.Random(0)
    for n in counts:
        for padding in PADDING:
            for causal in (True, False):
                for _ in range(per_count): yield packed_rows(rng, n, padding), causal


def check_definition(counts, per_count):
    "The largest error of values and gradients, and how many layouts were looked at."
    worst, seen = 0., 0
    for layout, causal in sweep(counts, per_count):
        tensors, at_padding = leaves(layout), layout.document_ids() == 0
        got, want = (passes(way, tensors, layout, causal) for way in (varlen_attention, explicit_attention))
        worst, seen = max(worst, *((g-w).abs().max().item() for g, w in zip(got, want, strict=True))), seen+1
        assert all((x.transpose(1, 2)[at_padding] == 0).all() for x in got)
    assert worst <= 1e-12
    return worst, seen


def check_isolation(counts, per_count):
    "How many documents, or the padding, were replaced: nothing else moves by a single bit, values and gradients alike."
    rng, seen = random.Random(1), 0
    for layout, causal in sweep(counts, per_count):
        tensors, rows = leaves(layout), layout.spans
        places = [(b, s, e) for b, row in enumerate(rows) for s, e in row]
        other = torch.zeros(len(rows), layout.T, dtype=torch.bool)
        if places and rng.random() < .8:
            b, s, e = rng.choice(places)
            other[b, s:e] = True
        else: other = layout.document_ids() == 0
        changed = [torch.where(other[:, None, :, None], 100*torch.randn_like(x), x) for x in tensors]
        before, after = (passes(varlen_attention, x, layout, causal) for x in (tensors, changed))
        for a, z in zip(before, after): assert torch.equal(a.transpose(1, 2)[~other], z.transpose(1, 2)[~other])
        is_padding = bool((layout.document_ids()[other] == 0).all())
        assert is_padding or not torch.equal(before[0], after[0])
        seen += 1
    return seen


def test_packed_documents_as_defined():
    torch.manual_seed(0)
    check_definition((0, 1, 2, 17, 60), 1)


def test_packed_documents_are_isolated():
    torch.manual_seed(0)
    check_isolation((0, 1, 2, 17, 60), 1)


@pytest.mark.slow
def test_packed_documents_with_every_number_of_documents(capsys):
    torch.manual_seed(0)
    worst, seen = check_definition(range(61), 3)
    isolated = check_isolation(range(61), 3)
    with capsys.disabled(): print(f'\n{seen} layouts of 0 to 60 documents: within {worst:.1e} of the definition; {isolated} replacements: everything else exactly the same')


@pytest.mark.slow
def test_packed_documents_in_16_bits():
    "Short documents and long ones take different kernels on a CPU."
    torch.manual_seed(0)
    layout = Layout.from_doc_lens([[300, 1, 40], [257, 80]], 350)
    tensors = leaves(layout, torch.bfloat16)
    got, want = passes(varlen_attention, tensors, layout, True), passes(explicit_attention, [x.double() for x in tensors], layout, True)
    for g, w in zip(got, want): assert (g.double()-w).abs().max() <= .02*w.abs().max()
