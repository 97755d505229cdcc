"A model as GGUF files: transformers reads the tensors of torch, and llama.cpp gives its ids, scores and answers."

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip(
    'gguf', reason='gguf is not there: pip install nanovlm_nb[gguf]'
)

import torch
from PIL import Image
from small_smolvlm import QUESTIONS, small_model
from transformers import AutoModelForCausalLM

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.uses.export import export_gguf

pytestmark = pytest.mark.usefixtures('one_thread')
HERE = Path(__file__).parent


def own_model(**fields):
    "A small model with a token for a blank line, whose rows are whole groups of 32."
    sizes = dict(
        vit_hidden_dim=64,
        vit_n_heads=4,
        vit_inter_dim=128,
        lm_hidden_dim=64,
        lm_inter_dim=128,
        max_img_size=64,
    )
    return small_model(
        texts=[q + '\n\n' for q in QUESTIONS],
        **sizes | dict(init_std=64**-0.5) | fields,
    )


# --- the files


@pytest.mark.parametrize(
    ('kind', 'fields'),
    [
        ('llama', {}),
        ('qwen2', dict(lm_qkv_bias=True)),
        ('qwen3', dict(lm_qk_norm=True, lm_head_dim=128, lm_tie_weights=False)),
    ],
)
def test_the_files_hold_the_model(tmp_path, kind, fields):
    "Transformers reads the first, and undoes llama.cpp's names and the order of its rows: the same scores. The second has the tensors of the tower."
    model = own_model(**fields)
    ids = torch.randint(0, 250, (2, 40))
    export_gguf(model, tmp_path, 'f32')
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file='model-f32.gguf'
    ).eval()
    assert theirs.config.model_type == kind
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids)[0]).abs().max() <= 1e-5
    kept = {
        t.name: torch.from_numpy(np.array(t.data))
        for t in gguf.GGUFReader(tmp_path / 'mmproj-f32.gguf').tensors
    }
    tower = model.vision_encoder
    for name, w in {
        'v.position_embd.weight': tower.patch_embedding.position_embedding[0],
        'v.blk.1.ffn_up.weight': tower.blocks[1].mlp.fc1.weight,
        'mm.model.fc.weight': model.MP.proj.weight,
        **{
            f'v.blk.0.attn_{x}.bias': b
            for x, b in zip('qkv', tower.blocks[0].attn.qkv_proj.bias.chunk(3))
        },
    }.items():
        assert torch.equal(kept[name], w), name


# --- llama.cpp

#: what llama.cpp takes for the end of an answer, besides the end of a turn
ENDS = ['<|im_end|>', '<|endoftext|>', '<end_of_utterance>']


@pytest.fixture(scope='module')
def llama():
    "A Python that has xllamacpp, llama.cpp's server as a library: NANOVLM_LLAMA names one, or it is this one."
    if python := os.environ.get('NANOVLM_LLAMA'):
        return python
    pytest.importorskip(
        'xllamacpp',
        reason='pip install xllamacpp in some environment, and let NANOVLM_LLAMA be its python',
    )
    return sys.executable


def samples_of(place, asker, sizes):
    "20 questions of all lengths: text, digits, lines, other alphabets; each with pictures of its sizes, of noise."
    for i in range(20):
        rng = np.random.default_rng(i)
        question = (
            QUESTIONS[i % 4] + ''.join(rng.choice(list('ab  123?\n\té世🙂'), size=i))
        ).strip()
        pictures = [str(place / f'{i}-{j}.png') for j in range(len(sizes(i)))]
        for j, (file, (width, height)) in enumerate(zip(pictures, sizes(i))):
            rng = np.random.default_rng(sum(f'{i}-{j}'.encode()) + 7 * width + height)
            Image.fromarray(
                rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            ).save(file)
        asked = [dict(role='user', content='<image>' * len(pictures) + question)]
        prompt = asker.tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        yield dict(prompt=prompt, question=question, pictures=pictures, most=12)


def text(i):
    return []


def tiles(i):
    return [(64, 64)] * (
        i % 3
    )  # whole ones, through a GELU that is looked up in a table of f16


def any_size(i):
    return [
        (9 + 11 * i, 200 - 9 * i)
    ]  # resized once, where SmolVLM's processor and ours resize twice


@pytest.mark.slow
@pytest.mark.parametrize(
    ('fields', 'kind', 'cache', 'sizes', 'least', 'most'),
    [
        ({}, 'f32', 'f32', text, 20, 1e-4),
        ({}, 'f32', 'f32', tiles, 20, 1e-2),
        ({}, 'f32', 'f32', any_size, 20, 5e-2),
        ({}, 'f16', 'f16', tiles, 19, 3e-2),
        ({}, 'q8_0', 'f16', tiles, 5, 0.5),
        (dict(lm_qkv_bias=True), 'f32', 'f32', tiles, 20, 1e-2),
        (dict(lm_qk_norm=True, lm_head_dim=32), 'f32', 'f32', tiles, 20, 1e-2),
        (
            dict(
                lm_tie_weights=False,
                vit_activation='quick_gelu',
                pixel_mean=0.5,
                pixel_std=0.5,
            ),
            'f32',
            'f32',
            tiles,
            20,
            1e-2,
        ),
    ],
)
def test_llama_cpp_says_the_same(
    llama, tmp_path, fields, kind, cache, sizes, least, most
):
    "All prompts are read as here, at least so many answers are equal, and the first token's log-probabilities are close."
    asker = Asker.from_model(own_model(**fields))
    export_gguf(asker.model, tmp_path / 'files', kind)
    samples = [*samples_of(tmp_path, asker, sizes)]
    (tmp_path / 'samples.json').write_text(json.dumps(samples))
    words = [
        llama,
        HERE / 'ask_llama.py',
        tmp_path / 'files',
        kind,
        tmp_path / 'samples.json',
        cache,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    got = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')
    ]
    ends = asker.tokenizer.convert_tokens_to_ids(ENDS)
    same = 0
    apart = []
    for g, s in zip(got, samples, strict=True):
        ids, shown = asker.prompt([Image.open(p) for p in s['pictures']], s['question'])
        assert g['read'] == g['chat_read'] == len(ids) and g['ids'] in (None, ids)
        row = torch.tensor([ids])
        said = asker.model.generate(
            row, [shown], max_new_tokens=s['most'], greedy=True, eos_token_id=()
        )[0].tolist()
        stop = next((i for i, t in enumerate(said) if t in ends), len(said))
        same += [t for t in g['said'] if t not in ends] == said[:stop]
        with torch.no_grad():
            logs = asker.model(row, [shown])[0][0, -1].log_softmax(-1)
        if g['logs']:
            apart.append(
                max(abs(v - logs[int(k)].item()) for k, v in g['logs'].items())
            )
    print(
        f'{same} of 20 answers are equal; {len(apart)} rows of scores are at most {max(apart):.1e} apart'
    )
    assert same >= least and len(apart) > 9 and max(apart) < most
