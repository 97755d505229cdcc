"An x-ray of a step names what makes it slow: six faults are planted, each is found with its file and line."
import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanovlm_nb.model import vlm
from nanovlm_nb.model.attention import BACKENDS, sdpa_attention
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.training import trainer as module
from nanovlm_nb.tools.xray import Contents, accounts, example_batch, find_card, meta_trainer, pace, xray, xray_text

HERE = Path(__file__).resolve().parent
PACK = Contents(documents=6, tiles=2)
pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def cfgs():
    "The default model of two blocks, its run."
    model, run = preset('nanovlm')
    return evolve(model, vit_n_blocks=2, lm_n_blocks=2), run


@pytest.fixture(scope='module')
def sound(cfgs):
    "The x-ray of the step as it is."
    return xray(*cfgs, example_batch(cfgs[0], 2, PACK))


def line_of(f, text: str) -> str:
    "`file:line` of a line of a function."
    lines, first = inspect.getsourcelines(f)
    at, = [i for i, line in enumerate(lines) if text in line]
    return f'{Path(inspect.getsourcefile(f)).name}:{first+at}'


def looked(cfgs, plant=lambda trainer: None, **how):
    "The x-ray of a step in which something was planted."
    trainer = meta_trainer(evolve(cfgs[0], **how), cfgs[1])
    plant(trainer)
    return xray(*cfgs, example_batch(cfgs[0], 2, PACK), [HERE], trainer)


def new_waits(x, sound) -> set:
    return {(o.name, o.line) for o in x.waits}-{(o.name, o.line) for o in sound.waits}


def test_the_step_as_it_is_waits_once_in_an_update(sound):
    assert [o.phase for o in sound.waits] == ['update']
    assert not any(o.line == '?' for o in sound.ops)


# --- six faults

def test_an_item_inside_the_step(cfgs, sound, monkeypatch):
    def with_item(trainer, batch, real=module.inputs_of):
        found = real(trainer, batch)
        trainer.seen = found['input_ids'].sum().item()
        return found

    monkeypatch.setattr(module, 'inputs_of', with_item)
    assert new_waits(looked(cfgs), sound) == {('local_scalar_dense', line_of(with_item, '.item()'))}


def test_a_boolean_index(cfgs, sound, monkeypatch):
    def by_flags(hidden, layout, vocab_size):
        flags = hidden.new_zeros(hidden.shape[:2], dtype=torch.bool).flatten().index_fill(0, layout.at, True)
        return hidden.flatten(0, 1)[flags][:len(layout.at)]

    monkeypatch.setattr(vlm, 'rows_with_target', by_flags)
    assert new_waits(looked(cfgs), sound) == {('boolean index', line_of(by_flags, '[flags]'))}


def test_a_float32_leak(cfgs, sound):
    class Leaky(nn.Linear):
        def forward(self, x):
            with torch.autocast('cuda', enabled=False): return F.linear(x.float(), self.weight, self.bias)

    def plant(trainer):
        for block in trainer.base.vision_encoder.blocks: block.mlp.fc1.__class__ = Leaky
    leaks = looked(cfgs, plant).leaks
    assert not sound.leaks
    assert {o.line for o in leaks} == {line_of(Leaky.forward, 'F.linear')}


def test_a_dense_mask_in_place_of_variable_lengths(cfgs, sound):
    x = looked(cfgs, attn_backend='sdpa')
    assert not [o for o in sound.ops if o.kind == 'masked']
    found = {o.line for o in x.ops if o.kind == 'masked'}
    assert found == {line_of(sdpa_attention, 'attn_mask=mask')}
    assert found & set([*accounts(x, find_card('H200'), 'line')][:5]), 'among the dearest'
    assert pace(x, find_card('H200')).micro > 1.2*pace(sound, find_card('H200')).micro


def test_an_unpinned_copy(cfgs, sound, monkeypatch):
    def with_copy(trainer, batch, real=module.inputs_of):
        found = real(trainer, batch)
        trainer.there = torch.tensor(batch['doc_lens']).to(trainer.dist.device, non_blocking=True)
        return found

    monkeypatch.setattr(module, 'inputs_of', with_copy)
    assert new_waits(looked(cfgs), sound) == {('unpinned copy', line_of(with_copy, 'torch.tensor'))}


def test_a_loop_over_documents(cfgs, sound, monkeypatch):
    def one_by_one(q, k, v, layout, causal, dropout_p):
        rows = [[F.scaled_dot_product_attention(*(x[b:b+1, :, s:e].repeat_interleave(q.shape[1]//x.shape[1], 1) for x in (q, k, v)), is_causal=causal)
                 for s, e in spans] for b, spans in enumerate(layout.spans)]
        out = torch.cat([torch.cat(row, 2) for row in rows])
        return F.pad(out, (0, 0, 0, layout.T-out.shape[2]))

    monkeypatch.setitem(BACKENDS, 'varlen', one_by_one)
    x = looked(cfgs)
    assert not sound.loops
    assert x.loops == {line_of(one_by_one, 'is_causal=causal'): 2*PACK.documents}
    assert f'attention {2*PACK.documents} times in a block' in xray_text(x, find_card('H200'))


def test_blank_tiles_are_charged(cfgs, sound):
    "On a GPU 24 tiles are 24 and 26 are 32: the tower works for all of them, and what is useful counts those with a picture."
    def tower(x): return sum(o.flops for o in x.ops if o.part == 'vision tower')
    more = Contents(documents=13, tiles=1)
    padded, bare = (xray(cfgs[0], evolve(cfgs[1], tile_multiple=n), example_batch(cfgs[0], 2, more)) for n in (None, 1))
    assert tower(padded)/tower(bare) == pytest.approx(32/26)
    assert padded.useful == bare.useful and tower(sound)/tower(bare) == pytest.approx(24/26)
