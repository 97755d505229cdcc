"Whole blocks are compiled, in few graphs that serve all batches; a step of full size asks for no value."
import json
import random

import pytest
import torch

from commands import TINY, train
from kills import disturbed, undisturbed
from nanovlm_nb.model.attention import problem_of
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.model.language import KVCache
from nanovlm_nb.training.optim import compile_blocks
from nanovlm_nb.data.packing import balanced_greedy_knapsack, collate_packs, pack
from nanovlm_nb.model.vlm import VisionLanguageModel, VLMNet

SMALL = evolve(preset('shapes')[0], vit_n_blocks=2, lm_n_blocks=2, lm_max_length=256)


def sample(rng, cfg, name, tiles, text, blank=torch.zeros):
    "A picture of some tiles and a text whose last half is learnt."
    ids = torch.tensor([cfg.image_token_id]*tiles*cfg.mp_image_token_length+[rng.randrange(5, cfg.lm_base_vocab_size) for _ in range(text)])
    labels = ids.roll(-1).masked_fill(torch.arange(len(ids)) < len(ids)-text//2, -100)
    labels[-1] = -100
    images = [blank(tiles, 3, cfg.vit_img_size, cfg.vit_img_size, dtype=torch.uint8)] if tiles else []
    return dict(id=name, input_ids=ids, labels=labels, images=images)


def random_batch(rng, cfg, packs=2, **kwargs):
    "Packs with one document to as many as there is room for."
    made = []
    for p in range(packs):
        room, found, most = cfg.lm_max_length, [], rng.randint(1, 12)
        while len(found) < most:
            s = sample(rng, cfg, f'{p}/{len(found)}', rng.choice((0, 0, 1, 2)), rng.randint(2, 20), **kwargs)
            if len(s['input_ids']) > room: break
            found.append(s)
            room -= len(s['input_ids'])
        made.append(pack(found, cfg.lm_max_length, 0, cfg.image_token_id, cfg.mp_image_token_length))
    return collate_packs(made, cfg.image_token_id)


def step(model, batch):
    "Loss and gradients."
    model.zero_grad()
    loss = model(batch['input_ids'], batch['images'], layout=batch['layout'])[1]
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def twins(cfg=SMALL, **kwargs):
    "The same model twice, the second compiled."
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager, compiled = (VisionLanguageModel(cfg, load_backbone=False).train() for _ in range(2))
    compiled.load_state_dict(eager.state_dict())
    compile_blocks(compiled, **kwargs)
    compiled.tile_multiple = 8
    return eager, compiled


def picture(*shape, dtype): return torch.randint(0, 256, shape, dtype=dtype)


def test_two_graphs_serve_all_batches():
    from torch._dynamo.testing import CompileCounter
    rng, counter, seen = random.Random(0), CompileCounter(), []
    eager, compiled = twins(evolve(SMALL, lm_n_blocks=1, vit_n_blocks=1), backend=counter)
    tiles, documents = set(), set()
    for k in range(40):
        batch = random_batch(rng, SMALL, blank=picture)
        tiles.add(sum(len(t) for row in batch['images'] for t in row))
        documents.add(sum(map(len, batch['doc_lens'])))
        found = step(compiled, batch)
        seen.append(counter.frame_count)
        if k % 20 == 0: assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, step(eager, batch), strict=True))
    assert len(tiles) > 10 and len(documents) > 10
    assert seen[-1] == 2 and seen[0] == 2
    with torch.no_grad():  # what is written with a cache is not compiled for
        cache = KVCache(12)
        for n in (5, 1, 1): compiled.decoder(torch.zeros(1, n, dtype=torch.long), cache=cache)
    assert counter.frame_count == 2


@pytest.mark.slow
def test_compiled_equals_eager():
    "With the compiler of real runs."
    rng = random.Random(1)
    eager, compiled = twins()
    for _ in range(3):
        batch = random_batch(rng, SMALL, blank=picture)
        (loss, *grads), (want, *wanted) = step(compiled, batch), step(eager, batch)
        assert abs(loss-want) <= 1e-6*abs(want)
        assert max((a-b).abs().max() for a, b in zip(grads, wanted, strict=True)) <= 1e-5


def test_the_tower_sees_few_shapes_in_an_epoch():
    rng = random.Random(2)
    tiles = [rng.choice((1, 1, 5, 9, 13, 17)) for _ in range(4000)]
    lengths = [64*n+rng.randint(20, 400) for n in tiles]
    packs = balanced_greedy_knapsack(lengths, [1]*len(tiles), 4096, 8)
    rng.shuffle(packs)
    seen = {sum(tiles[i] for g in pair for i in g) for pair in zip(packs[::2], packs[1::2])}
    assert len(seen) > 16 >= len({-(-n//8) for n in seen})


def test_a_step_of_full_size_asks_for_no_value():
    cfg, rng = preset('nanovlm')[0], random.Random(3)
    with torch.device('meta'): net = VLMNet(cfg).bfloat16()
    net.tile_multiple = 8
    assert problem_of('varlen', 'meta', torch.bfloat16) is None, 'the path of a GPU'
    samples = [sample(rng, cfg, f's{k}', 13, 181, torch.empty) for k in range(8)]
    packs = [pack(samples[k:k+4], 4096, 0, cfg.image_token_id, cfg.mp_image_token_length) for k in (0, 4)]
    batch = collate_packs(packs, cfg.image_token_id)
    images = [[t.to('meta') for t in row] for row in batch['images']]
    loss = net(batch['input_ids'].to('meta'), images, layout=batch['layout'].to('meta'), reduction='sum')[1]
    loss.backward()
    assert sum(p.grad.numel() for p in net.parameters()) > 4.5e8
    with pytest.raises(RuntimeError, match='meta'): net(batch['input_ids'].to('meta'), images, doc_lens=batch['doc_lens'])


@pytest.mark.slow
def test_a_second_start_finds_what_the_first_has_compiled(tmp_path, monkeypatch):
    "Two ranks compile at the same time into one directory, the user's; then the same run goes on."
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path/'mine'))
    flags = [*TINY, '--ask_samples', 0, '--max_val_batches', 1, '--eval_in_epochs', False, '--compile', True]
    start = lambda name, updates, *more: train([*flags, '--run_name', name, '--max_training_steps', updates, *more], tmp_path, ranks=2, timeout=1800, fresh=True)
    run = tmp_path/'checkpoints'/'run'
    start('run', 2)
    assert (tmp_path/'mine'/'fxgraph').is_dir() and not (run/'compiled').exists(), 'a run holds no code'
    kept = {*(tmp_path/'mine'/'fxgraph').rglob('*')}
    start('run', 3, '--resume', True)
    assert kept and {*(tmp_path/'mine'/'fxgraph').rglob('*')} == kept, 'nothing is compiled for a second time'
    assert len(losses(run)) == 3


def losses(run):
    "Loss of each update of a run."
    records = [json.loads(line) for line in (run/'log.jsonl').read_text().splitlines()]
    return [r['batch_loss'] for r in records if 'batch_loss' in r]


@pytest.mark.slow
@pytest.mark.parametrize('sharding', ['ddp', 'zero3'])
def test_compiled_ranks_equal_eager_ones(tmp_path, sharding):
    flags = [*TINY, '--max_training_steps', 2, '--ask_samples', 0, '--dtype', 'float32', '--batch_size', 1, '--max_val_batches', 1, '--sharding', sharding]
    for name in ('True', 'False'): train([*flags, '--run_name', name, '--compile', name], tmp_path, ranks=2)
    compiled, eager = (losses(tmp_path/'checkpoints'/name) for name in ('True', 'False'))
    assert len(eager) == 2 and compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, 2])
def test_a_compiled_deterministic_run_repeats_itself_to_the_bit(tmp_path, ranks, monkeypatch):
    "Twice from nothing, each with code of its own; and killed twice, with what is compiled found on disk."
    for name in 'ab': (tmp_path/name).mkdir()
    more = ['--compile', True, '--deterministic', True]
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path/'first'))
    whole = undisturbed(tmp_path/'a', ranks, 1, 10, *more)
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path/'second'))
    assert undisturbed(tmp_path/'b', ranks, 1, 10, *more) == whole
    killed, when = disturbed(tmp_path/'b', 2, ranks, 1, 10, *more)
    assert when[0] != 'it had ended' and killed == whole
