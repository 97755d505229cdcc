"Models go to transformers and come back: the same logits, ids, tiles and answers, whoever wrote the directory."
import json
import random
import sys

import numpy as np
import pytest
import torch
from commands import TINY
from PIL import Image
from safetensors.torch import load_file, save_file
from small_smolvlm import QUESTIONS, pictures, small_model
from their_smolvlm import make_smolvlm
from transformers import (AutoModelForImageTextToText, AutoProcessor, Idefics3Config, Idefics3ForConditionalGeneration, SmolVLMConfig,
                          SmolVLMForConditionalGeneration)

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.data.prompts import encode_chat
from nanovlm_nb.cli import main
from nanovlm_nb.uses.export import export_smolvlm
from nanovlm_nb.data.images import get_image_processor
from nanovlm_nb.core.run_dir import read_log
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.weights import OWN_CONFIG

pytestmark = pytest.mark.usefixtures('one_thread')

def far(a, b):
    "Largest absolute difference."
    return (a - b).abs().max().item()


@pytest.fixture(scope='module')
def model():
    "A small model in SmolVLM's convention."
    return small_model(vit_patch_size=4, vit_img_size=16, max_img_size=48)


@pytest.fixture(scope='module')
def exported(model, tmp_path_factory):
    "It, written for transformers."
    export_smolvlm(model, folder := tmp_path_factory.mktemp('export')/'smol')
    return folder


def opened(folder):
    "The model as transformers opens it, with nothing missing and nothing left over."
    theirs, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return theirs.eval()


# the golden checkpoint

@pytest.mark.skipif(sys.version_info < (3, 11), reason="its transformers, 5.20, needs a multiple of the patch size as image tokens; this checkpoint has 52 of them")
@pytest.mark.parametrize('kind', ['smolvlm', 'idefics3'])
def test_golden_logits(golden, tmp_path, kind, capsys):
    "nanoVLM's golden batch through transformers: logits within 1e-5 of ours, and of the reference."
    gold = golden/'nanovlm'
    main(['export', str(gold/'checkpoint'), str(tmp_path/'out'), '--format', kind])
    assert 'without a processor' in capsys.readouterr().out  # it speaks nanoVLM's convention
    theirs, ours = opened(tmp_path/'out'), VisionLanguageModel.from_pretrained(gold/'checkpoint')
    assert theirs.config.model_type == kind
    batch, tiles = load_file(gold/'batch.safetensors'), load_file(gold/'samples.safetensors')
    order = json.loads((gold/'batch.json').read_text())['images_order']
    rows = [[tiles[n] for n in row] for row in order]
    stacks = [torch.cat(row) if row else torch.zeros(0, 3, 64, 64) for row in rows]
    pixels = torch.stack([torch.cat([s, s.new_zeros(max(map(len, stacks)) - len(s), 3, 64, 64)]) for s in stacks])
    real = batch['attention_mask'].bool()
    with torch.no_grad():
        got = theirs(input_ids=batch['input_ids'], attention_mask=batch['attention_mask'], pixel_values=pixels,
                     position_ids=(batch['attention_mask'].cumsum(1) - 1).clamp(min=0)).logits
        want = ours(batch['input_ids'], rows, batch['attention_mask'])[0]
    assert far(got[real], want[real]) <= 1e-5
    assert far(got[batch['labels'] != -100], batch['logits_labelled']) <= 1e-5


def test_golden_there_and_back(golden, tmp_path):
    "nanoVLM to SmolVLM to nanoVLM: the same bits, the same configuration, the same tokenizer."
    first = golden/'nanovlm'/'checkpoint'
    main(['export', str(first), str(tmp_path/'smol')])
    main(['export', str(tmp_path/'smol'), str(tmp_path/'back'), '--format', 'nanovlm'])
    a, b = (load_file(d/'model.safetensors') for d in (first, tmp_path/'back'))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    old, new = (json.loads((d/'config.json').read_text()) for d in (first, tmp_path/'back'))
    assert {k for k in old.keys() | new.keys() if old.get(k) != new.get(k)} <= {'lm_tokenizer'}
    assert VisionLanguageModel.from_pretrained(tmp_path/'back').tokenizer.image_token_id == 1000


# models that transformers made

def their_model(kind, tied):
    "A random SmolVLM or Idefics3 of transformers."
    conf, make = dict(smolvlm=(SmolVLMConfig, SmolVLMForConditionalGeneration), idefics3=(Idefics3Config, Idefics3ForConditionalGeneration))[kind]
    text = dict(model_type='llama', hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=150,
                rope_parameters=dict(rope_theta=7000., rope_type='default'), pad_token_id=2, max_position_embeddings=256, tie_word_embeddings=tied)
    vision = dict(hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=3, image_size=32, patch_size=8)
    torch.manual_seed(1)
    return make(conf(text_config=text, vision_config=vision, scale_factor=2, image_token_id=140, tie_word_embeddings=tied)).eval()


@pytest.mark.parametrize('kind', ['smolvlm', 'idefics3'])
@pytest.mark.parametrize('tied', [True, False])
def test_their_model_here(tmp_path, kind, tied):
    "It gives their logits here, trains 20 updates, goes back, and gives ours there."
    theirs = their_model(kind, tied)
    theirs.save_pretrained(tmp_path/'first')
    ours = VisionLanguageModel.from_pretrained(tmp_path/'first')
    assert (ours.cfg.lm_tie_weights, ours.cfg.lm_vocab_size, ours.cfg.image_token_id, ours.cfg.lm_re_base) == (tied, 150, 140, 7000)
    pixels, ids = torch.rand(1, 2, 3, 32, 32), torch.randint(3, 139, (1, 30))
    ids[0, 3:11] = 140
    with torch.no_grad(): assert far(ours(ids, pixels[0])[0], theirs(input_ids=ids, pixel_values=pixels).logits) <= 1e-5
    targets = torch.where(torch.arange(30)[None] > 15, ids.roll(-1, 1), -100)
    optimizer, losses = torch.optim.AdamW(ours.train().parameters(), lr=1e-2), []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(ours(ids, pixels[0], targets=targets)[1])
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]/4
    ours.eval().tokenizer = train_tokenizer(QUESTIONS, 300)
    export_smolvlm(ours, tmp_path/'second', kind)
    with torch.no_grad(): assert far(ours(ids, pixels[0])[0], opened(tmp_path/'second')(input_ids=ids, pixel_values=pixels).logits) <= 1e-5


def test_shards_and_half_precision(tmp_path):
    "A model in several files and bfloat16, as the hub has them, is read into float32."
    theirs = their_model('smolvlm', True).bfloat16()
    theirs.save_pretrained(tmp_path, max_shard_size='40KB')
    assert not (tmp_path/'model.safetensors').exists()
    ours, ids = VisionLanguageModel.from_pretrained(tmp_path), torch.randint(3, 139, (1, 30))
    assert ours.decoder.norm.weight.dtype == torch.float32
    with torch.no_grad(): assert far(ours(ids)[0], theirs.float()(input_ids=ids).logits) <= 1e-5


@pytest.mark.parametrize('form', [dict(mp_kind='mlp'), dict(mp_kind='linear_bias'), dict(use_moe=True), dict(lm_attn_scaling=2.), dict(vit_post_norm=False)])
@pytest.mark.parametrize('how', ['smolvlm', 'onnx'])
def test_a_network_that_smolvlm_has_not_is_refused(tmp_path, form, how, capsys):
    "In one line, and nothing is written; a projector of two layers used to lose one in silence."
    small_model(**form).save_pretrained(tmp_path/'ours')
    with pytest.raises(SystemExit): main(['export', str(tmp_path/'ours'), str(tmp_path/'out'), '--format', how])
    (name, value), = form.items()
    assert f'{name} is {value}, but SmolVLM has' in (said := capsys.readouterr().err) and said.endswith('but with --format nanovlm\n'), said
    assert not (tmp_path/'out').exists()


@pytest.mark.parametrize('how', ['smolvlm', 'onnx'])
def test_a_language_model_alone_is_refused(tmp_path, how, capsys):
    (tmp_path/'text').mkdir()
    (tmp_path/'text'/'config.json').write_text(json.dumps(dict(model_type='llama', architectures=['LlamaForCausalLM'])))
    with pytest.raises(SystemExit): main(['export', str(tmp_path/'text'), str(tmp_path/'out'), '--format', how])
    assert "text is a model of type 'llama', and of transformers' whole models only smolvlm and idefics3 are read" in capsys.readouterr().err
    assert not (tmp_path/'out').exists()


def test_tensor_without_a_place(tmp_path):
    "A tensor too few or too many is named."
    their_model('smolvlm', True).save_pretrained(tmp_path)
    state = load_file(tmp_path/'model.safetensors')
    save_file(state | dict(stray=torch.ones(1)), tmp_path/'model.safetensors')
    with pytest.raises(ValueError, match='without a place: stray'): VisionLanguageModel.from_pretrained(tmp_path)
    save_file({k: w for k, w in state.items() if 'connector' not in k}, tmp_path/'model.safetensors')
    with pytest.raises(ValueError, match='lacks model.connector.modality_projection.proj.weight'): VisionLanguageModel.from_pretrained(tmp_path)


# pictures, prompts and answers

PAIRS = [(n % 4, i) for i, n in enumerate(range(20))]


def their_prompt(processor, images, question):
    "What `AutoProcessor` makes of pictures and a question, with its own chat template."
    messages = [dict(role='user', content=[dict(type='image')]*len(images) + [dict(type='text', text=question)])]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    return processor(text=text, images=images or None, return_tensors='pt')


def test_the_same_prompts_and_answers(model, exported):
    "20 pairs of 0 to 3 pictures and a question: the same ids, tiles and 32 greedy tokens."
    theirs, processor, asker = opened(exported), AutoProcessor.from_pretrained(exported), Asker.from_model(model)
    kinds = set()
    for n, seed in PAIRS:
        images, question = pictures(n, seed), QUESTIONS[seed % len(QUESTIONS)]
        made, (ids, tiles) = their_prompt(processor, images, question), asker.prompt(images, question)
        assert made['input_ids'][0].tolist() == ids
        if n: assert far(made['pixel_values'][0], torch.cat(tiles).float()/255) <= 1e-6
        said = model.generate(torch.tensor([ids]), tiles, max_new_tokens=32, greedy=True)[0].tolist()
        heard = theirs.generate(**made, max_new_tokens=32, do_sample=False)[0, len(ids):].tolist()
        assert said[:len(heard)] == heard and (len(heard) == 32 or heard[-1] == model.tokenizer.eos_token_id)
        kinds.add((n, len(torch.cat(tiles)) if n else 0))
    assert len(kinds) >= 10  # many numbers of tiles


@pytest.mark.parametrize('mean,std', [(0., 1.), (.5, .5), (.2, .4)])
def test_the_same_pixels(tmp_path, mean, std):
    "The range of pixels travels along."
    model = small_model(pixel_mean=mean, pixel_std=std)
    export_smolvlm(model, tmp_path/'out')
    theirs, processor, asker = opened(tmp_path/'out'), AutoProcessor.from_pretrained(tmp_path/'out'), Asker.from_model(model)
    images = [*pictures(2, 5), Image.new('RGB', (90, 90))]  # an even number of tiles: transformers 5.20 merges eight tokens at a time
    made, (ids, tiles) = their_prompt(processor, images, QUESTIONS[0]), asker.prompt(images, QUESTIONS[0])
    with torch.no_grad(): assert far(theirs(**made).logits[0], model(torch.tensor([ids]), tiles)[0][0]) <= 3e-5


def test_grids_of_many_sizes(exported):
    "Tiles and grids equal those of transformers' image processor at 300 sizes, strips and squares among them."
    processor, mine = AutoProcessor.from_pretrained(exported).image_processor, get_image_processor(48, 16, True, convention='smolvlm')
    rng = random.Random(0)
    sizes = [(1, 1), (1, 300), (300, 1), (48, 48), (48, 47), (49, 48), (17, 16), (32, 31)] + [(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(292)]
    for k, size in enumerate(sizes):
        im = Image.fromarray(np.random.default_rng(k).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        made = processor([[im]], return_tensors='pt', return_row_col_info=True)
        tiles, (rows, cols) = mine(im)
        assert (made['rows'][0][0] or 1, made['cols'][0][0] or 1) == (rows, cols), size
        assert far(made['pixel_values'][0], tiles.float()/255) <= 1e-6, size


# what only our own file knows

def test_read_without_our_own_file(model, exported, tmp_path):
    "What transformers saved anew has no configuration of ours: it is found in theirs."
    opened(exported).save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(exported).save_pretrained(tmp_path)
    assert not (tmp_path/OWN_CONFIG).exists()
    again = VisionLanguageModel.from_pretrained(tmp_path)
    for name in ('lm_base_vocab_size', 'lm_vocab_size', 'image_convention', 'max_img_size', 'pixel_mean', 'pixel_std', 'mp_image_token_length', 'vlm_extra_tokens'):
        assert getattr(again.cfg, name) == getattr(model.cfg, name), name
    images = pictures(2, 3)
    assert Asker.from_model(again).prompt(images, 'What?')[0] == Asker.from_model(model).prompt(images, 'What?')[0]
    assert Asker.from_model(again)([(images, 'What?')]) == Asker.from_model(model)([(images, 'What?')])


def test_smolvlm_chat_template(exported, tmp_path):
    "SmolVLM's own chat template, which asks whether a picture comes first, writes the same prompt here and there."
    template = ("<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
                "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
                "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}")
    for f in exported.iterdir():
        if f.name != OWN_CONFIG: (tmp_path/f.name).write_bytes(f.read_bytes())
    (tmp_path/'chat_template.jinja').write_text(template)
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    export_smolvlm(ours, tmp_path/'again')
    for folder in (tmp_path, tmp_path/'again'):
        processor, asker = AutoProcessor.from_pretrained(folder), Asker.from_model(VisionLanguageModel.from_pretrained(folder))
        for n in range(3):
            images = pictures(n, n)
            assert their_prompt(processor, images, 'What is this?')['input_ids'][0].tolist() == asker.prompt(images, 'What is this?')[0]


def test_their_default_template_trains_and_goes_back(tmp_path):
    "SmolVLM's default template asks with `Assistant:` and answers with a space: 20 updates here, then the same prompts, logits and greedy answers there."
    folder, small = make_smolvlm(tmp_path/'smol'), TINY[TINY.index('--data_cutoff_idx'):]
    main([str(a) for a in ('train', '--train_dataset_path', 'shapes', *small, '--max_training_steps', 20, '--eval_interval', 20, '--run_name', 'r', '--load_from', folder,
                                    '--vlm_checkpoint_path', tmp_path, '--lm_max_length', 512, '--ask_samples', 0, '--dtype', 'float32', '--lr_language_backbone', 1e-2,
                                    '--hf_repo_name', 'None')])
    losses = [r['batch_loss'] for r in read_log(tmp_path/'r'/'log.jsonl') if 'batch_loss' in r]
    assert len(losses) == 20 and sum(losses[-4:]) < .8*sum(losses[:4])
    main(['export', str(tmp_path/'r'/'step_20'), str(tmp_path/'out')])
    theirs, processor, mine = opened(tmp_path/'out'), AutoProcessor.from_pretrained(tmp_path/'out'), VisionLanguageModel.from_pretrained(tmp_path/'r'/'step_20').eval()
    first, asker = AutoProcessor.from_pretrained(folder), Asker.from_model(mine)
    for n in range(3):
        images = pictures(n, n)
        made, (ids, tiles) = their_prompt(processor, images, QUESTIONS[0]), asker.prompt(images, QUESTIONS[0])
        assert made['input_ids'][0].tolist() == ids == their_prompt(first, images, QUESTIONS[0])['input_ids'][0].tolist()
        with torch.no_grad(): assert far(theirs(**made).logits[0], mine(torch.tensor([ids]), tiles)[0][0]) <= 1e-5
        heard = theirs.generate(**made, max_new_tokens=12, do_sample=False)[0, len(ids):].tolist()
        assert mine.generate(torch.tensor([ids]), tiles, max_new_tokens=12, greedy=True)[0].tolist()[:len(heard)] == heard
    chat = [dict(role='user', content=[dict(type='text', text='What?')]), dict(role='assistant', content=[dict(type='text', text='Two.')])]
    assert mine.tokenizer.decode(encode_chat(mine.tokenizer, [dict(user='What?', assistant='Two.')])[0]) == first.apply_chat_template(chat)


@pytest.mark.parametrize('fields', [dict(lm_qkv_bias=True), dict(lm_qk_norm=True, lm_head_dim=20), dict(lm_tie_weights=False, vit_activation='quick_gelu')])
def test_other_decoders_inside(tmp_path, fields):
    "A Qwen2 or Qwen3 inside goes out and comes back too."
    model = small_model(**fields)
    for w in model.parameters(): w.data.add_(.02*torch.randn_like(w))
    export_smolvlm(model, tmp_path/'out')
    theirs, ids = opened(tmp_path/'out'), torch.randint(0, 250, (2, 40))
    with torch.no_grad(): assert far(theirs(input_ids=ids).logits, model(ids)[0]) <= 1e-5
    (tmp_path/'out'/OWN_CONFIG).unlink()
    again = VisionLanguageModel.from_pretrained(tmp_path/'out')
    assert all(torch.equal(w, again.state_dict()[k]) for k, w in model.state_dict().items())
