"What is loaded is what was saved last; what a configuration says is not read from a file."
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.answers.evaluate import task_names
from nanovlm_nb.core.config import evolve, tiny
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data.loader import load_tokenizer
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.weights import base_digest
from nanovlm_nb.training.lora import add_adapters, merge_adapters
from nanovlm_nb.training.optim import amp_dtype
from nanovlm_nb.training.shard import OffloadedAdamW

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture
def model():
    "A small model with its tokenizer."
    torch.manual_seed(0)
    m = VisionLanguageModel(tiny()[0], load_backbone=False).eval()
    m.tokenizer = load_tokenizer(m.cfg)
    return m


def same(a, b): return all(torch.equal(w, b.state_dict()[k]) for k, w in a.state_dict().items())


def test_a_save_replaces_adapters(model, tmp_path):
    pytest.importorskip('peft')
    model.save_pretrained(tmp_path/'base')
    adapted = VisionLanguageModel.from_pretrained(tmp_path/'base')
    add_adapters(adapted, 2, base=dict(path=str(tmp_path/'base'), sha256=base_digest(tmp_path/'base')))
    adapted.save_pretrained(tmp_path/'there')
    with pytest.raises(UsageError, match='upload merge_adapters'): adapted.push_to_hub('me/x', api=object())
    whole = merge_adapters(adapted)
    with torch.no_grad(): whole.MP.proj.weight.add_(1)
    whole.save_pretrained(tmp_path/'there')
    (tmp_path/'there'/'notes.txt').write_text('mine')
    assert same(whole, VisionLanguageModel.from_pretrained(tmp_path/'there')) and (tmp_path/'there'/'notes.txt').is_file()


def test_a_save_replaces_parts_and_their_index(model, tmp_path):
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path/'model.safetensors')
    parts = {f'model-0000{i}-of-00002.safetensors': sorted(whole)[i::2] for i in range(2)}
    for file, mine in parts.items(): save_file({n: whole[n] for n in mine}, tmp_path/file)
    (tmp_path/'model.safetensors').unlink()
    (tmp_path/'model.safetensors.index.json').write_text(json.dumps(dict(weight_map={n: f for f, mine in parts.items() for n in mine})))
    read = VisionLanguageModel.from_pretrained(tmp_path)
    assert same(model, read)
    with torch.no_grad(): read.MP.proj.weight.add_(1)
    read.save_pretrained(tmp_path)
    assert same(read, VisionLanguageModel.from_pretrained(tmp_path)) and not [*tmp_path.glob('model-*')]
    (tmp_path/'plain').touch()
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1  # safetensors alone would let nobody else read


def test_the_rotation_is_that_of_the_configuration(model, tmp_path):
    model.save_pretrained(tmp_path)
    file = load_file(tmp_path/'model.safetensors')
    save_file({k: w.bfloat16() for k, w in file.items()}, tmp_path/'model.safetensors')
    assert torch.equal(VisionLanguageModel.from_pretrained(tmp_path).decoder.rotary_embd.inv_freq, model.decoder.rotary_embd.inv_freq)
    other = evolve(model.cfg, lm_re_base=1_000_000)
    assert torch.equal(VisionLanguageModel.from_pretrained(tmp_path, other).decoder.rotary_embd.inv_freq, VisionLanguageModel(other, load_backbone=False).decoder.rotary_embd.inv_freq)


def test_only_the_last_answer_is_rated(model):
    asker = Asker.from_model(model)
    alone = asker.score([], [dict(user='what?', assistant='a red circle'), dict(user='and?')], ['blue', 'green'])
    other = asker.score([], [dict(user='what?', assistant='a'), dict(user='and?')], ['blue', 'green'])
    lengths = len(asker.tokenizer.encode('a red circle'))-len(asker.tokenizer.encode('a'))
    assert lengths > 1 and max(abs(a-b) for a, b in zip(alone, other)) < 1  # an untrained token costs about 6
    with pytest.raises(UsageError, match='no answer to rate'): asker.score([], 'what?', [])


def test_an_answer_is_shortened_where_positions_end(model):
    asker = Asker.from_model(model)
    most = model.cfg.lm_max_position_embeddings
    with pytest.raises(UsageError, match='positions'): next(asker.stream([([], 'what?')], most))
    assert next(asker.stream([([], 'what?')], most, shorten=True)) is not None


def test_tasks_of_one_name():
    with pytest.raises(UsageError, match='two tasks are called test'): task_names('a/test.parquet, b/test.parquet')
    assert task_names('a/test.parquet,mmmu.test, ') == ['a/test.parquet', 'mmmu.test']


def test_what_a_card_only_emulates_is_not_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: including_emulation)
    assert amp_dtype(torch.device('cuda')) == torch.float16


def test_offloaded_weights_are_those_of_the_model():
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [OffloadedAdamW(weights[:1], lr=.1), torch.optim.AdamW(weights[1:], lr=.1)]
    for step in range(3):
        for w, o in zip(weights, optimizers):
            w.grad = torch.full((4,), 1.+step)
            o.step()
            w.data.clamp_(max=.8)
    assert torch.equal(*weights)
