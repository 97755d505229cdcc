"Whole blocks are compiled, in few graphs that serve all batches; a step of full size asks for no value."

import random

import pytest
import torch

from nanovlm_nb.model.attention import problem_of
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.model.language import KVCache
from nanovlm_nb.training.precision import compile_blocks
from nanovlm_nb.tools.plan import example_batch
from nanovlm_nb.model.vlm import VisionLanguageModel, VLMNet

SMALL = evolve(preset('shapes')[0], vit_n_blocks=2, lm_n_blocks=2, lm_max_length=256)


def random_batch(rng, cfg):
    "Two packs of some documents, each with a picture of noise or none."
    batch = example_batch(
        cfg, 2, rng.randint(1, 9), tiles=rng.choice((0, 1)), targets=rng.randint(1, 9)
    )
    for row in batch['images']:
        for tiles in row:
            tiles.random_(0, 256)
    return batch


def step(model, batch):
    "Loss and gradients."
    model.zero_grad()
    loss = model(batch['input_ids'], batch['images'], layout=batch['layout'])[1]
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def difference(found, expected):
    "The largest, as a share of the largest value of all: small gradients are differences of large numbers."
    largest = max(float(b.abs().max()) for b in expected)
    return (
        max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        / largest
    )


def twins(cfg=SMALL, **kwargs):
    "The same model twice, the second compiled."
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager, compiled = (
        VisionLanguageModel(cfg, load_backbone=False).train() for _ in range(2)
    )
    compiled.load_state_dict(eager.state_dict())
    compile_blocks(compiled, **kwargs)
    compiled.tile_multiple = 8
    return eager, compiled


def test_two_graphs_serve_all_batches():
    from torch._dynamo.testing import CompileCounter

    rng = random.Random(0)
    counter = CompileCounter()
    seen = []
    eager, compiled = twins(
        evolve(SMALL, lm_n_blocks=1, vit_n_blocks=1), backend=counter
    )
    tiles = set()
    documents = set()
    for k in range(40):
        batch = random_batch(rng, SMALL)
        tiles.add(sum(len(t) for row in batch['images'] for t in row))
        documents.add(sum(map(len, batch['doc_lens'])))
        found = step(compiled, batch)
        seen.append(counter.frame_count)
        if k % 20 == 0:
            assert difference(found, step(eager, batch)) < 2e-6
    assert len(tiles) > 5 and len(documents) > 5
    assert seen[-1] == 2 and seen[0] == 2
    with torch.no_grad():  # what is written with a cache is not compiled for
        cache = KVCache(12)
        for n in (5, 1, 1):
            compiled.decoder(torch.zeros(1, n, dtype=torch.long), cache=cache)
    assert counter.frame_count == 2


def test_a_step_of_full_size_asks_for_no_value():
    cfg = preset('nanovlm')[0]
    with torch.device('meta'):
        net = VLMNet(cfg).bfloat16()
    net.tile_multiple = 8
    assert problem_of('varlen', 'meta', torch.bfloat16) is None, 'the path of a GPU'
    batch = example_batch(cfg, 2)
    images = [[t.to('meta') for t in row] for row in batch['images']]
    loss = net(
        batch['input_ids'].to('meta'),
        images,
        layout=batch['layout'].to('meta'),
        reduction='sum',
    )[1]
    loss.backward()
    assert sum(p.grad.numel() for p in net.parameters()) > 4.5e8
    with pytest.raises(RuntimeError, match='meta'):
        net(batch['input_ids'].to('meta'), images, doc_lens=batch['doc_lens'])
