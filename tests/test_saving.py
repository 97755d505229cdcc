"What is loaded is what was saved last; what a configuration says is not read from a file."

import json
from functools import partial
from weakref import WeakSet

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.answers.tasks import task_names
from nanovlm_nb.core.config import evolve, tiny
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data.loader import load_tokenizer
from nanovlm_nb.model.native import build_parts
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.files import EMBED, HEAD, Tensors, read_file, write_tensors
from nanovlm_nb.model.backbones import fill
from nanovlm_nb.model.pretrained import base_digest
from nanovlm_nb.training.lora import add_adapters, merge_adapters
from nanovlm_nb.training.precision import amp_dtype
from nanovlm_nb.training.shard import OffloadedAdamW

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture
def model():
    "A small model with its tokenizer."
    torch.manual_seed(0)
    m = VisionLanguageModel(tiny()[0], load_backbone=False).eval()
    m.tokenizer = load_tokenizer(m.cfg)
    return m


def same(a, b):
    return all(torch.equal(w, b.state_dict()[k]) for k, w in a.state_dict().items())


def test_a_save_replaces_adapters(model, tmp_path):
    pytest.importorskip('peft')
    model.save_pretrained(tmp_path / 'base')
    adapted = VisionLanguageModel.from_pretrained(tmp_path / 'base')
    add_adapters(
        adapted,
        2,
        base=dict(path=str(tmp_path / 'base'), sha256=base_digest(tmp_path / 'base')),
    )
    adapted.save_pretrained(tmp_path / 'there')
    with pytest.raises(UsageError, match='upload merge_adapters'):
        adapted.push_to_hub('me/x', api=object())
    whole = merge_adapters(adapted)
    with torch.no_grad():
        whole.MP.proj.weight.add_(1)
    whole.save_pretrained(tmp_path / 'there')
    (tmp_path / 'there' / 'notes.txt').write_text('mine')
    assert (
        same(whole, VisionLanguageModel.from_pretrained(tmp_path / 'there'))
        and (tmp_path / 'there' / 'notes.txt').is_file()
    )


def test_a_save_replaces_parts_and_their_index(model, tmp_path):
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / 'model.safetensors')
    parts = {
        f'model-0000{i}-of-00002.safetensors': sorted(whole)[i::2] for i in range(2)
    }
    for file, mine in parts.items():
        save_file({n: whole[n] for n in mine}, tmp_path / file)
    (tmp_path / 'model.safetensors').unlink()
    (tmp_path / 'model.safetensors.index.json').write_text(
        json.dumps(dict(weight_map={n: f for f, mine in parts.items() for n in mine}))
    )
    read = VisionLanguageModel.from_pretrained(tmp_path)
    assert same(model, read)
    with torch.no_grad():
        read.MP.proj.weight.add_(1)
    read.save_pretrained(tmp_path)
    assert same(read, VisionLanguageModel.from_pretrained(tmp_path)) and not [
        *tmp_path.glob('model-*')
    ]
    (tmp_path / 'plain').touch()
    assert (
        len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1
    )  # safetensors alone would let nobody else read


def test_the_rotation_is_that_of_the_configuration(model, tmp_path):
    model.save_pretrained(tmp_path)
    file = load_file(tmp_path / 'model.safetensors')
    save_file(
        {k: w.bfloat16() for k, w in file.items()}, tmp_path / 'model.safetensors'
    )
    assert torch.equal(
        VisionLanguageModel.from_pretrained(tmp_path).decoder.rotary_embd.inv_freq,
        model.decoder.rotary_embd.inv_freq,
    )
    other = evolve(model.cfg, lm_re_base=1_000_000)
    assert torch.equal(
        VisionLanguageModel.from_pretrained(
            tmp_path, other
        ).decoder.rotary_embd.inv_freq,
        VisionLanguageModel(other, load_backbone=False).decoder.rotary_embd.inv_freq,
    )


def test_what_a_file_holds_is_not_drawn(model, tmp_path):
    "Weights from the file; the generator stays where it was."
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    assert same(model, VisionLanguageModel.from_pretrained(tmp_path)) and torch.equal(
        torch.get_rng_state(), before
    )


def test_a_projector_between_backbones_is_drawn(model):
    "Tower and language model are left out; their weights follow."
    torch.manual_seed(4)
    projector = build_parts(model.cfg, held=('vision_encoder', 'decoder'))[1]
    torch.manual_seed(4)
    assert same(
        projector,
        VisionLanguageModel(
            model.cfg, load_backbone=False, held=('vision_encoder', 'decoder')
        ).MP,
    )
    assert not same(
        projector, build_parts(model.cfg, held=('vision_encoder', 'decoder'))[1]
    )


def test_one_tensor_is_in_memory_at_a_time(model, tmp_path):
    "A file in two halves of an index is read, and written as one, without a second model in memory."
    model.save_pretrained(tmp_path / 'whole')
    state = read_file(tmp_path / 'whole' / 'model.safetensors')
    alive = WeakSet()
    most = []

    def make(name):
        made = state[name].clone()
        alive.add(made.untyped_storage())
        most.append(len(alive))
        return made

    watched = Tensors(
        {name: partial(make, name) for name in state},
        kinds={name: state[name].to('meta') for name in state},
    )
    write_tensors(tmp_path / 'again', watched, {EMBED: HEAD}, [*state])
    assert (tmp_path / 'again').read_bytes() == (
        tmp_path / 'whole' / 'model.safetensors'
    ).read_bytes()
    fill(model, watched, 'watched')
    assert (
        max(most) == 1 and len(most) == 2 * len(state) - 1
    )  # rotation angles are written, and not read


@pytest.mark.parametrize(
    'dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_files_are_those_of_safetensors(dtype, tmp_path):
    "Byte for byte: order, header, padding; names that are not ASCII, views, tensors of no number and of no dimension."
    torch.manual_seed(0)
    tensors = {
        f'{name}.{i}': torch.randn(*shape).to(dtype)
        for i, name in enumerate('b.weight a.bias ä.norm'.split())
        for shape in [(3, 5), (2,)][: i + 1]
    }
    tensors |= dict(
        none=torch.zeros(0, 4),
        number=torch.tensor(3),
        flags=torch.tensor([True, False]),
        view=torch.randn(6, 4, dtype=torch.float64).T[1:],
    )
    write_tensors(tmp_path / 'ours', tensors, dict(format='pt'), [*tensors])
    save_file(
        {k: w.contiguous() for k, w in tensors.items()},
        tmp_path / 'theirs',
        dict(format='pt'),
    )
    assert (tmp_path / 'ours').read_bytes() == (tmp_path / 'theirs').read_bytes()


def test_a_tensor_of_another_shape_is_named(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r'lm_inter_dim|mlp.*has shape'):
        VisionLanguageModel.from_pretrained(
            tmp_path, evolve(model.cfg, lm_inter_dim=96)
        )


def test_only_the_last_answer_is_rated(model):
    asker = Asker.from_model(model)
    alone = asker.score(
        [],
        [dict(user='what?', assistant='a red circle'), dict(user='and?')],
        ['blue', 'green'],
    )
    other = asker.score(
        [], [dict(user='what?', assistant='a'), dict(user='and?')], ['blue', 'green']
    )
    lengths = len(asker.tokenizer.encode('a red circle')) - len(
        asker.tokenizer.encode('a')
    )
    assert (
        lengths > 1 and max(abs(a - b) for a, b in zip(alone, other)) < 1
    )  # an untrained token costs about 6
    with pytest.raises(UsageError, match='no answer to rate'):
        asker.score([], 'what?', [])


def test_an_answer_is_shortened_where_positions_end(model):
    asker = Asker.from_model(model)
    most = model.cfg.lm_max_position_embeddings
    with pytest.raises(UsageError, match='positions'):
        next(asker.stream([([], 'what?')], most))
    assert next(asker.stream([([], 'what?')], most, shorten=True)) is not None


def test_tasks_of_one_name():
    with pytest.raises(UsageError, match='two tasks are called test'):
        task_names('a/test.parquet, b/test.parquet')
    assert task_names('a/test.parquet,mmmu.test, ') == ['a/test.parquet', 'mmmu.test']


def test_what_a_card_only_emulates_is_not_chosen(monkeypatch):
    monkeypatch.setattr(
        torch.cuda,
        'is_bf16_supported',
        lambda including_emulation=True: including_emulation,
    )
    assert amp_dtype(torch.device('cuda')) == torch.float16


def test_offloaded_weights_are_those_of_the_model():
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [
        OffloadedAdamW(weights[:1], lr=0.1),
        torch.optim.AdamW(weights[1:], lr=0.1),
    ]
    for step in range(3):
        for w, o in zip(weights, optimizers):
            w.grad = torch.full((4,), 1.0 + step)
            o.step()
            w.data.clamp_(max=0.8)
    assert torch.equal(*weights)
