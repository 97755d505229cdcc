"The reference's tiny checkpoint gives the reference's numbers: features, hidden states, logits, loss, gradients, answers."

import json

import pytest
import torch
from safetensors.torch import load_file

from nanovlm_nb.model.vlm import VisionLanguageModel

END_NEVER = ()
pytestmark = pytest.mark.usefixtures('one_thread')


of_module = pytest.fixture(scope='module')
#: the reference's files; four samples that it collated, left-padded, with what it computed; scalars of these; tiles of each row, floats in 0-1
gold = of_module(lambda golden: golden / 'nanovlm')
batch = of_module(lambda gold: load_file(gold / 'batch.safetensors'))
record = of_module(lambda gold: json.loads((gold / 'batch.json').read_text()))
images = of_module(
    lambda gold, record: [
        [load_file(gold / 'samples.safetensors')[name] for name in row]
        for row in record['images_order']
    ]
)


@pytest.fixture
def model(gold):
    "The checkpoint, loaded afresh."
    return VisionLanguageModel.from_pretrained(gold / 'checkpoint').train()


def far(got, want):
    "Largest absolute difference."
    return (got - want).abs().max().item()


def inputs(batch, images):
    "What the reference passed to its model."
    return dict(
        input_ids=batch['input_ids'],
        images=images,
        attention_mask=batch['attention_mask'],
        targets=batch['labels'],
    )


@torch.no_grad()
def test_features_and_hidden(model, batch, images):
    "Vision, image tokens, merged embeddings and hidden states within 1e-5."
    stack = torch.cat([t for row in images for t in row])
    patches = model.vision_encoder(stack)
    assert far(patches, batch['vit_out']) <= 1e-5
    assert far(model.MP(patches), batch['image_embd']) <= 1e-5
    assert far(model.embed(batch['input_ids'], images), batch['merged_embd']) <= 1e-5
    real = batch['attention_mask'].bool()
    hidden = model.hidden(batch['input_ids'], images, batch['attention_mask'])
    assert far(hidden[real], batch['hidden'][real]) <= 1e-5


@torch.no_grad()
def test_logits_and_loss(model, batch, images, record):
    "Scores at the labelled positions within 1e-4, the loss within 1e-6; both with and without `return_logits`."
    logits, loss = model(**inputs(batch, images), return_logits=True)
    labelled = batch['labels'] != -100
    assert labelled.sum() == record['n_labels']
    assert far(logits[labelled], batch['logits_labelled']) <= 1e-4
    real = batch['attention_mask'][0].bool()
    assert far(logits[0][real], batch['logits_row0'][real]) <= 1e-4
    none, alone = model(**inputs(batch, images))
    assert none is None
    for value in (loss, alone):
        assert abs(value.item() - record['loss']) <= 1e-6
    total = model(**inputs(batch, images), reduction='sum')[1]
    assert abs(total.item() / record['n_labels'] - record['loss']) <= 1e-6


def test_gradients(model, batch, images, record, gold):
    "Every parameter's gradient within 1e-4 of its largest entry, and the norm of all."
    model(**inputs(batch, images))[1].backward()
    want = load_file(gold / 'batch_grads.safetensors')
    got = {n: p.grad for n, p in model.named_parameters()}
    if 'decoder.head.weight' in got:
        got['decoder.token_embedding.weight'] = got.pop('decoder.head.weight')
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert far(got[name], grad) <= 1e-4 * grad.abs().max().item(), name
    norm = torch.stack([g.norm() for g in got.values()]).norm().item()
    assert abs(norm / record['grad_norm'] - 1) <= 1e-5


@torch.no_grad()
def test_bf16_loss(model, batch, images, record):
    "Under bf16 autocast the loss is near the reference's and near float32's."
    with torch.autocast('cpu', torch.bfloat16):
        loss = model(**inputs(batch, images))[1].item()
    assert abs(loss - record['loss_bf16_autocast']) <= 5e-3
    assert abs(loss - record['loss']) <= 1e-2


def test_greedy_ids(model, gold, images):
    "Each prompt alone: the recorded ids."
    for a in json.loads((gold / 'generate.json').read_text())['single']:
        ids = model.generate(
            torch.tensor([a['prompt_ids']]),
            images[a['sample']],
            max_new_tokens=len(a['greedy_ids']),
            greedy=True,
            eos_token_id=END_NEVER,
        )
        assert ids[0].tolist() == a['greedy_ids']


def test_saved_again(model, gold, batch, images, record, tmp_path):
    "Written and read back: the reference's keys, shapes and values, its config fields, and a working tokenizer."
    model.save_pretrained(tmp_path / 'again')
    want, got = (
        load_file(d / 'model.safetensors')
        for d in (gold / 'checkpoint', tmp_path / 'again')
    )
    assert {k: (v.shape, v.dtype) for k, v in got.items()} == {
        k: (v.shape, v.dtype) for k, v in want.items()
    }
    assert all(torch.equal(got[k], v) for k, v in want.items())
    old, new = (
        json.loads((d / 'config.json').read_text())
        for d in (gold / 'checkpoint', tmp_path / 'again')
    )
    assert list(new) == list(old)
    assert {k for k in old if old[k] != new[k]} <= {'lm_tokenizer'}
    again = VisionLanguageModel.from_pretrained(tmp_path / 'again')
    with torch.no_grad():
        assert again(**inputs(batch, images))[1].item() == pytest.approx(
            record['loss'], abs=1e-6
        )
    assert (
        again.tokenizer.image_token_id
        == model.tokenizer.image_token_id
        == again.cfg.image_token_id
        == 1000
    )
