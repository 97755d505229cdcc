"A sample in a pack has the scores and gradients that it has alone, and its neighbours cannot touch it."
import random

import pytest
import torch

from nanovlm_nb.config import preset
from nanovlm_nb.dataset import VQADataset
from nanovlm_nb.images import get_image_processor
from nanovlm_nb.packing import collate_packs, pack
from nanovlm_nb.shapes import shapes_dataset, shapes_tokenizer
from nanovlm_nb.vlm import VLMNet

LENGTH, N_PACKS, MOST_IMAGES = 400, 200, 4
pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def net():
    "The network of the preset `shapes` in float32, with fresh weights."
    torch.manual_seed(0)
    return VLMNet(preset('shapes')[0]).train()


@pytest.fixture(scope='module')
def samples(net):
    "Tokenised samples of the embedded data set, with and without a picture."
    cfg = net.cfg
    tokenizer = shapes_tokenizer(cfg.vlm_extra_tokens, cfg.lm_chat_template)
    processor = get_image_processor(cfg.max_img_size, cfg.vit_img_size, cfg.resize_to_max_side_len)
    data = VQADataset(shapes_dataset(400), tokenizer, processor, cfg.mp_image_token_length)
    return [data[i] for i in range(len(data))]


def draw_group(samples, dice):
    "Random samples until the pack is full, with 0-4 pictures among them."
    group, tokens, left = [], 0, dice.randint(0, MOST_IMAGES)
    while True:
        pictured = left > 0 and dice.random() < .7
        s = dice.choice([s for s in samples if bool(s['images']) == pictured])
        tokens += len(s['input_ids'])
        if tokens > LENGTH: return group
        group.append(s)
        left -= len(s['images'])


@pytest.fixture(scope='module')
def groups(samples):
    "200 groups of samples, one a pack."
    dice = random.Random(0)
    groups = [draw_group(samples, dice) for _ in range(N_PACKS)]
    assert min(map(len, groups)) > 1 and max(map(len, groups)) > 5
    assert {sum(len(s['images']) for s in g) for g in groups} == set(range(MOST_IMAGES + 1))
    return groups


def as_batch(samples, length=None):
    "One pack as keyword arguments of the network."
    batch = collate_packs([pack(samples, length or sum(len(s['input_ids']) for s in samples), pad_id=0)])
    return dict(input_ids=batch['input_ids'], images=batch['images'], doc_lens=batch['doc_lens']), batch['labels']


def documents(values, samples):
    "Cut what a pack gave into its documents."
    return values[0, :sum(len(s['input_ids']) for s in samples)].split([len(s['input_ids']) for s in samples])


@torch.no_grad()
def test_scores_as_alone(net, groups):
    "200 packs: every sample's scores within 1e-5 of those it has alone."
    worst = 0.
    for samples in groups:
        packed = documents(net(**as_batch(samples, LENGTH)[0])[0], samples)
        for sample, got in zip(samples, packed):
            worst = max(worst, (got - net(**as_batch([sample])[0])[0][0]).abs().max().item())
    assert worst <= 1e-5


@torch.no_grad()
def test_without_boundaries_it_leaks(net, groups):
    "The same packs read as one document differ by far more than the tolerance, so the certificate can fail."
    for samples in groups[:20]:
        args, _ = as_batch(samples, LENGTH)
        right, leaky = (documents(net(**a)[0], samples) for a in (args, args | dict(doc_lens=None)))
        assert (right[0] - leaky[0]).abs().max() <= 1e-5
        assert min((a - b).abs().max() for a, b in zip(right[1:], leaky[1:])) > 1e-2


@torch.no_grad()
def test_neighbours_cannot_touch(net, groups):
    "New words and new pixels in one document change every other document's scores by exactly nothing."
    for k, samples in enumerate(groups[:60]):
        before = documents(net(**as_batch(samples, LENGTH)[0])[0], samples)
        i = k % len(samples)
        other = dict(samples[i])
        is_word = other['input_ids'] != net.cfg.image_token_id
        other['input_ids'] = torch.where(is_word, 300 - other['input_ids'].clamp(max=300), other['input_ids'])
        other['images'] = [255 - t for t in other['images']]
        after = documents(net(**as_batch([*samples[:i], other, *samples[i+1:]], LENGTH)[0])[0], samples)
        assert not torch.equal(before[i], after[i])
        assert all(torch.equal(a, b) for j, (a, b) in enumerate(zip(before, after)) if j != i)


def gradients(net, batches):
    "Gradient of the summed losses, one vector for each part of the network."
    net.zero_grad()
    for batch, labels in batches: net(**batch, targets=labels, reduction='sum')[1].backward()
    return {name: torch.cat([p.grad.flatten() for p in part.parameters()]) for name, part in net.named_children()}


def test_gradients_as_alone(net, groups):
    "For 40 packs the gradient of each part is the sum of what its samples give alone."
    with_images = [g for g in groups if any(s['images'] for s in g)][:40]
    for samples in with_images:
        packed = gradients(net, [as_batch(samples, LENGTH)])
        alone = gradients(net, [as_batch([s]) for s in samples])
        for part in ('vision_encoder', 'MP', 'decoder'):
            a, b = packed[part].double(), alone[part].double()
            assert torch.dot(a, b)/(a.norm()*b.norm()) >= 1 - 1e-6, part
            assert (a - b).norm() <= 1e-4*b.norm(), part
