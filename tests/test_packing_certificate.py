"A sample in a pack has the scores and gradients that it has alone, and its neighbours cannot touch it."

import random
from itertools import islice

import pytest
import torch

from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.data.samples import VQADataset, to_row
from nanovlm_nb.data.shapes import shapes_dataset, shapes_tokenizer
from nanovlm_nb.data.images import image_processor_of
from nanovlm_nb.data.lanes import PackRules
from nanovlm_nb.data.loader import PackLoader
from nanovlm_nb.data.packing import collate_packs, pack
from nanovlm_nb.data.sources import MapSource
from nanovlm_nb.model.vlm import VLMNet

pytestmark = pytest.mark.usefixtures('one_thread')


def as_batch(samples, length=None):
    "One pack as keyword arguments of the network."
    batch = collate_packs(
        [pack(samples, length or sum(len(s['input_ids']) for s in samples), pad_id=0)]
    )
    return dict(
        input_ids=batch['input_ids'], images=batch['images'], doc_lens=batch['doc_lens']
    ), batch['labels']


# What a loader makes of rows, some of which turn out to be damaged when they are decoded


@pytest.fixture(scope='module')
def small_net():
    "Two blocks of a language model and one of a vision tower, in float32."
    torch.manual_seed(1)
    return VLMNet(
        evolve(
            preset('shapes')[0],
            vit_hidden_dim=64,
            vit_n_blocks=1,
            lm_hidden_dim=64,
            lm_inter_dim=128,
            lm_n_blocks=2,
        )
    ).train()


@pytest.fixture(scope='module')
def piped(small_net):
    "500 packs, four to a batch, and the samples in them; every seventh picture is cut off behind its header."
    cfg = small_net.cfg
    rows = shapes_dataset(240).with_format('arrow')
    rows = [
        row | dict(images=[b['bytes'] for b in row['images']])
        for row in (to_row(rows[i], i) for i in range(len(rows)))
    ]
    for row in rows[::7]:
        row['images'] = [b[: len(b) // 2] for b in row['images']]
    tokenizer = shapes_tokenizer(cfg.vlm_extra_tokens, cfg.lm_chat_template)
    data = VQADataset(
        rows,
        tokenizer,
        image_processor_of(cfg),
        cfg.mp_image_token_length,
        max_sample_length=160,
    )
    loader = PackLoader(
        data,
        MapSource(rows),
        PackRules(384, tokenizer.pad_token_id, max_images=4, window=8),
        4,
    )
    batches = []
    for epoch in range(20):
        loader.set_epoch(epoch)
        batches += islice(loader, 125 - len(batches))
    alone = {s['id']: s for s in (data[i] for i in range(len(rows))) if s}
    gaps = [
        ids
        for batch in batches
        for ids, drops in zip(batch['ids'], batch['drops'])
        if any(reason == 'unreadable_image' for _, reason, _ in drops)
    ]
    assert (
        len(batches) == 125
        and sum(len(ids) > 1 for ids in gaps) > 100
        and len(alone) > 180
    )
    return batches, alone


def in_documents(values, batch):
    "Cut what a batch gave into documents: (sample id, its values)."
    for row, ids, lens in zip(values, batch['ids'], batch['doc_lens']):
        yield from zip(ids, row[: sum(lens)].split(lens))


def inputs(batch):
    return dict(
        input_ids=batch['input_ids'], images=batch['images'], doc_lens=batch['doc_lens']
    )


@pytest.fixture(params=['auto', 'sdpa'])
def either_net(small_net, request):
    "The same network with every backend that a CPU has."
    blocks = [b.attn for b in small_net.decoder.blocks]
    for attn in blocks:
        attn.backend = request.param
    yield small_net
    for attn in blocks:
        attn.backend = 'auto'


@torch.no_grad()
def test_500_packs_of_the_loader(either_net, piped):
    "Ids, labels, pictures and scores of every document are those of its sample alone, drops within the pack or not."
    batches, alone = piped
    scores = {i: either_net(**as_batch([s])[0])[0][0] for i, s in alone.items()}
    worst = 0.0
    documents = 0
    for batch in batches:
        for (i, ids), (_, labels), (_, got) in zip(
            *(
                in_documents(v, batch)
                for v in (
                    batch['input_ids'],
                    batch['labels'],
                    either_net(**inputs(batch))[0],
                )
            )
        ):
            assert torch.equal(ids, alone[i]['input_ids']) and torch.equal(
                labels, alone[i]['labels']
            )
            worst = max(worst, (got - scores[i]).abs().max().item())
            documents = documents + 1
        for ids, images in zip(batch['ids'], batch['images']):
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    images, (t for i in ids for t in alone[i]['images']), strict=True
                )
            )
    assert documents > 1500 and worst <= 1e-5
    assert (
        either_net(**inputs(batch) | dict(doc_lens=None))[0]
        - either_net(**inputs(batch))[0]
    ).abs().max() > 1e-2  # read as one document they do mix


@torch.no_grad()
def test_500_packs_do_not_mix(either_net, piped):
    "In every pack one document gets other words and other pixels: the scores of all others change by exactly nothing."
    dice = random.Random(0)
    for batch in piped[0]:
        changed = dict(
            batch,
            input_ids=batch['input_ids'].clone(),
            images=[list(row) for row in batch['images']],
        )
        hit = set()
        for row, (ids, lens) in enumerate(zip(batch['ids'], batch['doc_lens'])):
            if not ids:
                continue
            k = dice.randrange(len(ids))
            words = changed['input_ids'][row, sum(lens[:k]) : sum(lens[: k + 1])]
            words[:] = torch.where(
                words != either_net.cfg.image_token_id,
                300 - words.clamp(max=300),
                words,
            )
            first = sum(len(piped[1][i]['images']) for i in ids[:k])
            for j in range(first, first + len(piped[1][ids[k]]['images'])):
                changed['images'][row][j] = 255 - changed['images'][row][j]
            hit.add(ids[k])
        before, after = (either_net(**inputs(b))[0] for b in (batch, changed))
        for (i, a), (_, b) in zip(
            in_documents(before, batch), in_documents(after, batch)
        ):
            assert torch.equal(a, b) == (i not in hit)


# Groups of these samples, put together by hand


@pytest.fixture(scope='module')
def groups(piped):
    "2 to 9 samples each, with as many pictures or none."
    dice = random.Random(0)
    samples = list(piped[1].values())
    return [dice.sample(samples, dice.randint(2, 9)) for _ in range(40)]


@torch.no_grad()
def test_pictures_reach_their_own_places(small_net, groups):
    "A sample of several pictures: in the places of each stand the features of that one, in their order, wherever the sample is in its pack."
    seen = lambda tiles: small_net.MP(small_net.see(tiles)).flatten(0, 1)
    for group in [g for g in groups if sum(len(s['images']) for s in g) > 1][:20]:
        album = dict(
            id='album',
            images=[t for s in group for t in s['images']],
            **{k: torch.cat([s[k] for s in group]) for k in ('input_ids', 'labels')},
        )
        batch = as_batch([group[0], album, group[-1]])[0]
        got = small_net.embed(batch['input_ids'], batch['images'])[
            batch['input_ids'] == small_net.cfg.image_token_id
        ]
        own = [seen(t) for s in (group[0], album, group[-1]) for t in s['images']]
        assert (got - torch.cat(own)).abs().max() <= 1e-5


def gradients(net, batches):
    "Gradient of the summed losses, one vector for each part of the network."
    net.zero_grad()
    for batch, labels in batches:
        net(**batch, targets=labels, reduction='sum')[1].backward()
    return {
        name: torch.cat([p.grad.flatten() for p in part.parameters()]).double()
        for name, part in net.named_children()
    }


def test_gradients_as_alone(small_net, groups):
    "For 20 packs the gradient of each part is the sum of what its samples give alone."
    for samples in [g for g in groups if any(s['images'] for s in g)][:20]:
        packed = gradients(small_net, [as_batch(samples, 1500)])
        alone = gradients(small_net, [as_batch([s]) for s in samples])
        for part, b in alone.items():
            a = packed[part]
            assert (
                torch.dot(a, b) / (a.norm() * b.norm()) >= 1 - 1e-6
                and (a - b).norm() <= 1e-4 * b.norm()
            ), part
