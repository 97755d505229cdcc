"A model as GGUF files: the tensors and settings of torch, and in llama.cpp its ids, scores and answers."
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip('gguf', reason='gguf is not there: pip install nanovlm_nb[gguf]')

import torch
from PIL import Image

from small_smolvlm import QUESTIONS, small_model
from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.cli import main
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.uses.export import export_gguf

pytestmark = pytest.mark.usefixtures('one_thread')
HERE = Path(__file__).parent


def own_model(**fields):
    "A small model with a token for a blank line, whose rows are whole groups of 32."
    sizes = dict(vit_hidden_dim=64, vit_n_heads=4, vit_inter_dim=128, lm_hidden_dim=64, lm_inter_dim=128, max_img_size=64, init_std=64**-.5)
    return small_model(texts=[q + '\n\n' for q in QUESTIONS], **sizes | fields)


def read(path):
    "Settings and tensors of a file."
    reader = gguf.GGUFReader(path)
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t for t in reader.tensors}


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    "A checkpoint, and what the command made of it."
    place = tmp_path_factory.mktemp('gguf')
    own_model().save_pretrained(place/'checkpoint')
    main(['export', str(place/'checkpoint'), str(place/'f32'), '--format', 'gguf', '--outtype', 'f32'])
    return place


# --- the files

def test_the_files_hold_the_checkpoint_bit_for_bit(exported):
    "The number of weights, each matrix with its own numbers, and the same scores from queries and keys in another order."
    model = VisionLanguageModel.from_pretrained(exported/'checkpoint')
    (_, lm), (_, vision) = (read(exported/'f32'/f'{name}-f32.gguf') for name in ('model', 'mmproj'))
    assert sum(t.n_elements for t in (*lm.values(), *vision.values())) == sum(p.numel() for p in model.parameters())
    block, width = model.decoder.blocks[1], model.cfg.head_width
    there = lambda t: torch.from_numpy(np.array(t.data))
    assert torch.equal(there(lm['blk.1.ffn_down.weight']), block.mlp.down_proj.weight)
    assert torch.equal(there(lm['token_embd.weight']), model.decoder.head.weight) and 'output.weight' not in lm
    halves = lambda name: there(lm[name]).view(-1, width//2, 2, 64).transpose(1, 2).reshape(-1, 64)  # llama.cpp turns neighbours
    for i, b in enumerate(model.decoder.blocks):
        for x in 'qk': assert torch.equal(halves(f'blk.{i}.attn_{x}.weight'), b.attn.get_submodule(f'{x}_proj').weight), (i, x)
        assert torch.equal(there(lm[f'blk.{i}.attn_v.weight']), b.attn.v_proj.weight)
    tower = model.vision_encoder
    assert torch.equal(there(vision['v.position_embd.weight']), tower.patch_embedding.position_embedding[0])
    assert torch.equal(torch.cat([there(vision[f'v.blk.0.attn_{x}.bias']) for x in 'qkv']), tower.blocks[0].attn.qkv_proj.bias)
    assert torch.equal(there(vision['v.blk.1.ffn_up.weight']), tower.blocks[1].mlp.fc1.weight)
    assert torch.equal(there(vision['mm.model.fc.weight']), model.MP.proj.weight)


def test_decoders_of_qwen_keep_the_order_of_their_rows_and_a_head_of_its_own(tmp_path):
    "And have biases, or norms of queries and keys."
    for kind, fields in (('qwen2', dict(lm_qkv_bias=True)), ('qwen3', dict(lm_qk_norm=True, lm_tie_weights=False))):
        model = own_model(**fields)
        export_gguf(model, tmp_path/kind, 'f32')
        settings, tensors = read(tmp_path/kind/'model-f32.gguf')
        attn = model.decoder.blocks[0].attn
        assert settings['general.architecture'] == kind and f'{kind}.rope.freq_base' in settings
        assert np.array_equal(tensors['blk.0.attn_k.weight'].data, attn.k_proj.weight.detach())
        assert ('blk.0.attn_q.bias' in tensors, 'blk.0.attn_q_norm.weight' in tensors, 'output.weight' in tensors) == ((True, False, False) if kind == 'qwen2' else (False, True, True))


# --- llama.cpp

#: what llama.cpp takes for the end of an answer, besides the end of a turn
ENDS = '<|im_end|>', '<|endoftext|>', '<end_of_utterance>'


@pytest.fixture(scope='module')
def llama():
    "A Python that has xllamacpp, llama.cpp's server as a library: NANOVLM_LLAMA names one, or it is this one."
    if python := os.environ.get('NANOVLM_LLAMA'): return python
    pytest.importorskip('xllamacpp', reason='llama.cpp is not there: pip install xllamacpp in some environment, and let NANOVLM_LLAMA be its python')
    return sys.executable


def noise(place, name, width, height):
    "A picture without a likeness to any other, as a file."
    seed = sum(name.encode()) + 7*width + height
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(place/f'{name}.png')
    return place/f'{name}.png'


def samples_of(place, n, sizes):
    "Questions of all lengths, each with one picture of each of its sizes: text, digits, lines, other alphabets."
    out = []
    for i in range(n):
        rng = np.random.default_rng(i)
        question = QUESTIONS[i % 4] + ''.join(rng.choice(list('ab  123?\n\té世🙂'), size=i))
        pictures = [str(noise(place, f'{i}-{j}', *size)) for j, size in enumerate(sizes(i))]
        out.append(dict(question=question.strip(), pictures=pictures, most=12))
    return out


def in_torch(asker, sample):
    "Ids of the prompt, of the greedy answer, and logarithms of the first token's probabilities."
    ids, tiles = asker.prompt([Image.open(p) for p in sample['pictures']], sample['question'])
    row = torch.tensor([ids])
    said = asker.model.generate(row, [tiles], max_new_tokens=sample['most'], greedy=True, eos_token_id=())[0].tolist()
    with torch.no_grad(): logs = asker.model(row, [tiles])[0][0, -1].log_softmax(-1)
    ends = asker.tokenizer.convert_tokens_to_ids(list(ENDS))
    stop = next((i for i, t in enumerate(said) if t in ends), len(said))
    return dict(ids=ids, said=said[:stop], logs=logs)


def compare(llama, asker, place, kind, samples, cache='f32'):
    "What llama.cpp and torch make of samples."
    announced = {}
    for s in samples:
        plain = asker.tokenizer.apply_chat_template([dict(role='user', content='<image>'*len(s['pictures']) + s['question'])], tokenize=False, add_generation_prompt=True)
        announced[id(s)] = s | dict(prompt=plain)
    (place/'samples.json').write_text(json.dumps(list(announced.values())))
    done = subprocess.run([llama, HERE/'ask_llama.py', place/kind, kind, place/'samples.json', cache], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    got = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
    return got, [in_torch(asker, s) for s in samples]


def judged(asker, got, want):
    "How many prompts were read, and how many answers given, as in torch; the largest difference of logarithms and how many were compared."
    ends = asker.tokenizer.convert_tokens_to_ids(list(ENDS))
    read = sum(g['read'] == g['chat_read'] == len(w['ids']) and g['ids'] in (None, w['ids']) for g, w in zip(got, want, strict=True))
    said = sum([t for t in g['said'] if t not in ends] == w['said'] for g, w in zip(got, want))
    apart = [max(abs(v - w['logs'][int(k)].item()) for k, v in g['logs'].items()) for g, w in zip(got, want) if g['logs']]
    return read, said, max(apart), len(apart)


@pytest.fixture(scope='module')
def all_kinds(tmp_path_factory):
    "A small model and its files in every kind."
    place, model = tmp_path_factory.mktemp('kinds'), own_model()
    for kind in ('f32', 'f16', 'q8_0'): export_gguf(model, place/kind, kind)
    return place, Asker.from_model(model)


@pytest.mark.slow
@pytest.mark.parametrize('shown, most', [('text', 1e-4), ('pictures', 1e-2), ('any', 5e-2)])
def test_llama_cpp_says_the_same(llama, all_kinds, shown, most):
    """Text alone; one to three pictures of whole tiles, through a GELU that llama.cpp looks up in a table of f16; pictures of any size and
    proportions, which it resizes once where SmolVLM's processor and ours resize twice."""
    place, asker = all_kinds
    sizes = dict(text=lambda i: [], pictures=lambda i: [(64, 64), (64, 32), (32, 64)][:i % 3 + 1], any=lambda i: [(9 + 11*i, 200 - 9*i)])[shown]
    read, said, apart, n = judged(asker, *compare(llama, asker, place, 'f32', samples_of(place, 20, sizes)))
    print(f'{shown}: {read} of 20 prompts and {said} of 20 answers are equal; {n} rows of scores are at most {apart:.1e} apart')
    assert (read, said) == (20, 20) and n > 9 and apart < most


@pytest.mark.slow
@pytest.mark.parametrize('cache, most', [('f32', 1e-2), ('f16', 3e-2)])
def test_half_the_bytes_and_a_quarter(llama, all_kinds, cache, most):
    "With keys and values in f32, and in f16, which is llama.cpp's default."
    place, asker = all_kinds
    samples = samples_of(place, 20, lambda i: [(64, 64)]*(i % 3))
    for kind in ('f32', 'f16', 'q8_0'):
        read, said, apart, n = judged(asker, *compare(llama, asker, place, kind, samples, cache))
        size = sum(p.stat().st_size for p in (place/kind).iterdir())
        print(f'{kind}, cache {cache}: {size/1e3:.0f} kB, {said} of 20 answers are equal, {n} rows of scores at most {apart:.1e} apart')
        assert read == 20 and (kind == 'q8_0' or (said >= 19 and apart < most))


@pytest.mark.slow
@pytest.mark.parametrize('fields', [dict(lm_qkv_bias=True), dict(lm_qk_norm=True, lm_head_dim=32), dict(lm_tie_weights=False, vit_activation='quick_gelu', pixel_mean=.5, pixel_std=.5)],
                         ids=['qwen2', 'qwen3', 'untied, quick_gelu'])
def test_other_networks(llama, tmp_path, fields):
    asker = Asker.from_model(own_model(**fields))
    export_gguf(asker.model, tmp_path/'f32', 'f32')
    read, said, apart, n = judged(asker, *compare(llama, asker, tmp_path, 'f32', samples_of(tmp_path, 6, lambda i: [(64, 64)]*(i % 3))))
    print(f'{fields}: {said} of 6 answers are equal, {n} rows of scores at most {apart:.1e} apart')
    assert (read, said) == (6, 6) and apart < 1e-2
