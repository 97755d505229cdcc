"A model as ONNX files: the scores, ids and answers of torch, in ONNX Runtime and, by transformers.js, in Node."
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

onnxruntime = pytest.importorskip('onnxruntime', reason='ONNX Runtime is not there: pip install nanovlm_nb[onnx]')
onnx = pytest.importorskip('onnx', reason='onnx is not there: pip install nanovlm_nb[onnx]')

import torch
from PIL import Image

from commands import run
from small_smolvlm import QUESTIONS, pictures, small_model
from nanovlm_nb.answers.answer import Asker, left_pad
from nanovlm_nb.cli import main
from nanovlm_nb.uses.onnx import OWN_NOTE, export_onnx

pytestmark = pytest.mark.usefixtures('one_thread')
HERE = Path(__file__).parent
FILES = 'vision_encoder', 'embed_tokens', 'decoder_model_merged'
NPM = '@huggingface/transformers@4.3.1'


def own_model(convention, **fields):
    "A small model in one of the two conventions, of one tile and a view at most."
    return small_model(**dict(image_convention=convention, vit_n_blocks=1, max_img_size=64, init_std=.15, resize_to_max_side_len=True) | fields)


@pytest.fixture(scope='module')
def asker():
    "A small model in SmolVLM's convention."
    return Asker.from_model(own_model('smolvlm'))


@pytest.fixture(scope='module')
def exported(asker, tmp_path_factory):
    "It, written by the command, in both sizes."
    place = tmp_path_factory.mktemp('onnx')
    asker.model.save_pretrained(place/'checkpoint')
    main(['export', str(place/'checkpoint'), str(place/'files'), '--format', 'onnx', '--int8'])
    return place/'files'


class Files:
    "The three files in ONNX Runtime."
    def __init__(self, folder, suffix=''):
        how = onnxruntime.SessionOptions()
        how.intra_op_num_threads = 1
        self.see, self.embed, self.read = (onnxruntime.InferenceSession(folder/'onnx'/f'{name}{suffix}.onnx', how, ['CPUExecutionProvider']) for name in FILES)
        self.note = json.loads((folder/OWN_NOTE).read_text())

    def embeddings(self, ids, tiles):
        "Embeddings of a batch; `tiles` are the byte tiles of each row's pictures."
        x = self.embed.run(None, dict(input_ids=ids.numpy()))[0]
        rows, side = [[t for stack in row for t in stack.float()/255] for row in tiles], self.note['picture']['tile']
        most = max(map(len, rows))
        if not most: return x
        pixels, real = np.zeros((len(rows), most, 3, side, side), np.float32), np.zeros((len(rows), most, side, side), bool)
        for i, row in enumerate(rows):
            if row: pixels[i, :len(row)], real[i, :len(row)] = torch.stack(row).numpy(), True
        x[ids.numpy() == self.note['tokens']['image']] = self.see.run(None, dict(pixel_values=pixels, pixel_attention_mask=real))[0].reshape(-1, x.shape[-1])
        return x

    def scores(self, x, mask, past=None, keep=0):
        "Scores of what is read now, and the past of the next call."
        cache = self.note['cache']
        names = [f'past_key_values.{i}.{kind}' for i in range(cache['blocks']) for kind in ('key', 'value')]
        past = past or [np.zeros((len(x), cache['heads'], 0, cache['width']), np.float32)]*len(names)
        at = (mask.cumsum(1) - 1).clip(min=0)[:, -x.shape[1]:]
        out = self.read.run(None, dict(inputs_embeds=x, attention_mask=mask, position_ids=at, num_logits_to_keep=np.array(keep)) | dict(zip(names, past)))
        return out[0], out[1:]

    def generate(self, ids, tiles, mask, new):
        "Greedy ids with the cache, and the scores that chose them."
        scores, past = self.scores(self.embeddings(ids, tiles), mask := mask.numpy(), keep=1)
        said, chosen = [], []
        for _ in range(new):
            said.append(scores[:, -1].argmax(-1))
            chosen.append(scores[:, -1])
            mask = np.concatenate([mask, np.ones_like(mask[:, :1])], 1)
            scores, past = self.scores(self.embed.run(None, dict(input_ids=said[-1][:, None]))[0], mask, past, keep=1)
        return np.stack(said, 1), np.stack(chosen, 1)


def compare(asker, files, seeds, batch, new=8):
    "The largest difference of scores to torch without and with the cache; all greedy ids are equal."
    whole, cached = 0., 0.
    for first in range(0, len(seeds), batch):
        samples = [asker.prompt(pictures(s % 4, s), QUESTIONS[s//4 % 4]) for s in seeds[first:first+batch]]
        ids, mask = left_pad([i for i, _ in samples], asker.tokenizer.pad_token_id, asker.device)
        tiles = [t for _, t in samples]
        x, real = files.embeddings(ids, tiles), mask.bool()
        with torch.no_grad(): want = asker.model(ids, tiles, mask)[0]
        whole = max(whole, np.abs(files.scores(x, mask.numpy())[0] - want.numpy())[real.numpy()].max())
        said, chosen = files.generate(ids, tiles, mask, new)
        assert asker.model.generate(ids, tiles, mask, new, greedy=True, eos_token_id=()).tolist() == said.tolist()
        longer = torch.cat([ids, torch.from_numpy(said)], 1)
        with torch.no_grad(): want = asker.model(longer, tiles, torch.cat([mask, torch.ones_like(mask[:, :1]).repeat(1, new)], 1))[0][:, ids.shape[1]-1:-1]
        cached = max(cached, np.abs(chosen - want.numpy()).max())
    return whole, cached


# --- ONNX Runtime

@pytest.mark.parametrize('batch', [1, 2])
def test_scores_and_ids_are_those_of_torch(asker, exported, batch):
    "Up to three pictures of several tiles, and none; a pair is padded on the left and has filling tiles."
    assert max(compare(asker, Files(exported), range(4), batch, new=3)) < 1e-4


def test_one_byte_a_weight_is_a_quarter_and_near(asker, exported):
    whole, small = (sum(p.stat().st_size for p in (exported/'onnx').glob(f'*{end}')) for end in ('[a-z].onnx', '_quantized.onnx'))
    kinds = {n.op_type for n in onnx.load(exported/'onnx'/'decoder_model_merged_quantized.onnx').graph.node}
    assert {'MatMulInteger', 'DynamicQuantizeLinear'} <= kinds
    ids, tiles = asker.prompt(pictures(2, 6), QUESTIONS[2])
    ids = torch.tensor([ids])
    both = Files(exported), Files(exported, '_quantized')
    want, got = (f.scores(f.embeddings(ids, [tiles]), np.ones(ids.shape, np.int64))[0].ravel() for f in both)
    assert small < .8*whole and .98 < np.corrcoef(got, want)[0, 1] < 1 - 1e-9


def test_the_layout_is_that_of_transformers_js(exported):
    "Files, the template among the tokenizer's settings, axes by whose names a client makes an empty past, and no second file of weights."
    there = {str(p.relative_to(exported)) for p in exported.rglob('*') if p.is_file()}
    assert {'config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json', 'preprocessor_config.json', 'processor_config.json', OWN_NOTE} <= there
    assert {f'onnx/{name}{end}.onnx' for name in FILES for end in ('', '_quantized')} == {f for f in there if f.startswith('onnx/')}
    assert not [f for f in there if f.endswith('.safetensors')]
    assert json.loads((exported/'tokenizer_config.json').read_text())['chat_template'] == (exported/'chat_template.jinja').read_text()
    config, graph = json.loads((exported/'config.json').read_text()), onnx.load(exported/'onnx'/'decoder_model_merged.onnx').graph
    axes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.input, *graph.output)}
    text = config['text_config']
    past = ['batch_size', text['num_key_value_heads'], 'past_sequence_length', text['head_dim']]
    assert all(axes[f'past_key_values.{i}.{k}'] == past for i in range(text['num_hidden_layers']) for k in ('key', 'value'))
    assert axes['num_logits_to_keep'] == [] and axes['logits'] == ['batch_size', 'num_logits', text['vocab_size']]


# --- transformers.js

@pytest.fixture(scope='module')
def node(tmp_path_factory):
    "A directory in which Node finds transformers.js; NANOVLM_NODE names one that is there already."
    if not shutil.which('node'): pytest.skip('Node is not there')
    place = Path(os.environ.get('NANOVLM_NODE') or tmp_path_factory.mktemp('node'))
    if not (place/'node_modules'/'@huggingface').is_dir():
        done = subprocess.run(['npm', 'install', '--ignore-scripts', '--no-audit', '--no-fund', NPM], cwd=place, capture_output=True, text=True, timeout=600)
        if done.returncode: pytest.skip(f'npm cannot install {NPM}: {done.stderr[-200:]}')
    shutil.copy(HERE/'ask_in_node.mjs', place)
    return place


def in_node(node, folder, samples, *how):
    "What transformers.js makes of samples."
    (node/'samples.json').write_text(json.dumps(samples))
    done = subprocess.run(['node', 'ask_in_node.mjs', folder, 'samples.json', *how], cwd=node, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_torch(asker, ids, tiles, new):
    "Greedy ids of a prompt, its end among them, and the answer."
    said = asker.model.generate(torch.tensor([ids]), [tiles], max_new_tokens=new, greedy=True)[0].tolist()
    return dict(ids=ids, said=said, answer=asker.tokenizer.decode(said, skip_special_tokens=True))


def shown_in_node(asker, place, side, new=12):
    "Ten samples of up to three pictures of a size, as files, and what torch makes of them."
    samples, want = [], []
    for i in range(10):
        files = [str(place/f'{i}-{j}.png') for j in range(i % 4)]
        for j, file in enumerate(files): Image.fromarray(np.random.default_rng(10*i + j).integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file)
        ids, tiles = asker.prompt([Image.open(f) for f in files], QUESTIONS[i % 4])
        samples.append(dict(pictures=files, question=QUESTIONS[i % 4], most=new))
        if tiles:
            samples[-1]['expected'] = str(place/f'{i}.bin')
            (place/f'{i}.bin').write_bytes((torch.cat(tiles).float()/255).numpy().tobytes())
        want.append(in_torch(asker, ids, tiles, new))
    return samples, want


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['native', 'wasm'])
def test_transformers_js_says_the_same(tmp_path, node, backend):
    "With its own processor: tokens, pixels, ids and answers, where a picture has the size of the tile and nothing is resized."
    asker = Asker.from_model(own_model('smolvlm', max_img_size=32))
    export_onnx(asker.model, tmp_path/'files')
    samples, want = shown_in_node(asker, tmp_path, 32)
    got = in_node(node, tmp_path/'files', samples, backend)
    assert max(d for g in got for d in g.pop('differs', [])) < 1e-6  # the hair of the exporter
    assert got == want and len({w['answer'] for w in want}) > 3


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['native', 'wasm'])
def test_transformers_js_without_a_processor(tmp_path, node, backend):
    "A model of nanoVLM's convention gets ids and pixels that were made as its note says."
    asker, samples, want = Asker.from_model(own_model('nanovlm')), [], []
    export_onnx(asker.model, tmp_path/'files')
    for i in range(10):
        ids, tiles = asker.prompt(pictures(i % 4, i), QUESTIONS[i % 4])
        pixels = torch.cat(tiles).float()/255 if tiles else None
        if tiles: (tmp_path/f'{i}.bin').write_bytes(pixels.numpy().tobytes())
        samples.append(dict(ids=ids, most=12) | (dict(pixels=str(tmp_path/f'{i}.bin'), shape=[*pixels.shape]) if tiles else {}))
        want.append(in_torch(asker, ids, tiles, 12))
    assert in_node(node, tmp_path/'files', samples, backend) == want


# --- the tutorial

CLIENT = '''
import json, sys
sys.modules['torch'] = None  # whoever imports it gets an error
cells = json.load(open(sys.argv[1]))['cells']
for c in cells:
    if c['source'] and (c['source'][0].startswith('import json') or c['source'][0].startswith('class Client')): exec(''.join(c['source']))
client = Client(sys.argv[2])
print(json.dumps([client.ask(Image.open(p) if p else None, q, 12) for p, q in json.loads(sys.argv[3])]))
'''


def test_the_client_of_the_tutorial_needs_no_torch(tmp_path):
    "And says what torch says, about a picture of any proportions and about none."
    asker = Asker.from_model(own_model('nanovlm', max_img_size=32))
    export_onnx(asker.model, tmp_path/'files')
    shown = pictures(3, 5)
    for i, im in enumerate(shown): im.save(tmp_path/f'{i}.png')
    samples = [*((str(tmp_path/f'{i}.png'), q) for i, q in enumerate(QUESTIONS[:3])), (None, QUESTIONS[3])]
    asked = [(shown[i:i+1] if p else [], q) for i, (p, q) in enumerate(samples)]
    notebook = HERE.parent/'nbs'/'tutorials'/'onnx.ipynb'
    done = run([sys.executable, '-c', CLIENT, notebook, tmp_path/'files', json.dumps(samples)], tmp_path, fresh=True)
    assert json.loads(done.stdout) == asker(asked, 12)
