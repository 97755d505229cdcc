"""A model as ONNX files: the answers of torch by the client of the tutorial and, through transformers.js, in Node.

That the graphs have the scores of torch, and what one byte a weight costs, is in 82_uses.onnx and tutorials/onnx."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    'onnxruntime', reason='ONNX Runtime is not there: pip install nanovlm_nb[onnx]'
)
onnx = pytest.importorskip(
    'onnx', reason='onnx is not there: pip install nanovlm_nb[onnx]'
)

import torch
from PIL import ExifTags, Image

from commands import run
from small_smolvlm import QUESTIONS, pictures, small_model
from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.cli import main
from nanovlm_nb.uses.onnx import OWN_NOTE, export_onnx

pytestmark = pytest.mark.usefixtures('one_thread')
HERE = Path(__file__).parent
FILES = 'vision_encoder', 'embed_tokens', 'decoder_model_merged'
NPM = '@huggingface/transformers@4.3.1'


def own_model(convention, longest):
    "A small model in one of the two conventions, for pictures of so many pixels."
    return small_model(
        image_convention=convention,
        max_img_size=longest,
        vit_n_blocks=1,
        init_std=0.15,
        resize_to_max_side_len=True,
    )


def test_the_layout_is_that_of_transformers_js(tmp_path):
    "Files, the template among the tokenizer's settings, axes by whose names a client makes an empty past, and no second file of weights."
    own_model('smolvlm', 64).save_pretrained(tmp_path / 'checkpoint')
    main(
        [
            'export',
            str(tmp_path / 'checkpoint'),
            str(out := tmp_path / 'files'),
            '--format',
            'onnx',
            '--int8',
        ]
    )
    there = {str(p.relative_to(out)) for p in out.rglob('*') if p.is_file()}
    assert {
        'config.json',
        'generation_config.json',
        'tokenizer.json',
        'preprocessor_config.json',
        'processor_config.json',
        OWN_NOTE,
    } <= there
    assert {
        f'onnx/{name}{end}.onnx' for name in FILES for end in ('', '_quantized')
    } == {f for f in there if f.startswith('onnx/')}
    assert not [f for f in there if f.endswith('.safetensors')]
    assert (
        json.loads((out / 'tokenizer_config.json').read_text())['chat_template']
        == (out / 'chat_template.jinja').read_text()
    )
    text = json.loads((out / 'config.json').read_text())['text_config']
    graph = onnx.load(out / 'onnx' / 'decoder_model_merged.onnx').graph
    axes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }
    past = [
        'batch_size',
        text['num_key_value_heads'],
        'past_sequence_length',
        text['head_dim'],
    ]
    assert all(
        axes[f'past_key_values.{i}.{k}'] == past
        for i in range(text['num_hidden_layers'])
        for k in ('key', 'value')
    )
    assert axes['num_logits_to_keep'] == [] and axes['logits'] == [
        'batch_size',
        'num_logits',
        text['vocab_size'],
    ]


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
    "And says what torch says, about a picture of any proportions, as the camera was held and with transparent parts, and about none."
    asker = Asker.from_model(own_model('nanovlm', 32))
    export_onnx(asker.model, tmp_path / 'files')
    files = [tmp_path / f'{i}.png' for i in range(7)]
    exif = Image.Exif()
    for file, picture in zip(files, pictures(7, 5)):
        exif[ExifTags.Base.Orientation] = 6 if file in files[3:5] else 1
        if file in files[4:]:
            picture.putalpha(Image.linear_gradient('L').resize(picture.size))
        picture.save(file, exif=exif)
    samples = [
        *((str(file), QUESTIONS[i % 4]) for i, file in enumerate(files)),
        (None, QUESTIONS[3]),
    ]
    notebook = HERE.parent / 'nbs' / 'tutorials' / 'onnx.ipynb'
    done = run(
        [
            sys.executable,
            '-c',
            CLIENT,
            notebook,
            tmp_path / 'files',
            json.dumps(samples),
        ],
        tmp_path,
        fresh=True,
    )
    assert json.loads(done.stdout) == asker(
        [([Image.open(file)] if file else [], q) for file, q in samples], 12
    )


# --- transformers.js


@pytest.fixture(scope='module')
def node(tmp_path_factory):
    "A directory in which Node finds transformers.js; NANOVLM_NODE names one that is there already."
    if not shutil.which('node'):
        pytest.skip('Node is not there')
    place = Path(os.environ.get('NANOVLM_NODE') or tmp_path_factory.mktemp('node'))
    if not (place / 'node_modules' / '@huggingface').is_dir():
        done = subprocess.run(
            ['npm', 'install', '--ignore-scripts', '--no-audit', '--no-fund', NPM],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            pytest.skip(f'npm cannot install {NPM}: {done.stderr[-200:]}')
    shutil.copy(HERE / 'ask_in_node.mjs', place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['native', 'wasm'])
@pytest.mark.parametrize('convention', ['smolvlm', 'nanovlm'])
def test_transformers_js_says_the_same(tmp_path, node, convention, backend):
    """With its own processor: pixels, ids and answers, where a picture has the size of the tile and nothing is resized.
    A model of nanoVLM's convention gets ids and pixels that were made as its note says."""
    own = convention == 'nanovlm'
    asker = Asker.from_model(own_model(convention, 64 if own else 32))
    samples = []
    want = []
    export_onnx(asker.model, tmp_path / 'files')
    for i in range(10):
        files = [str(tmp_path / f'{i}-{j}.png') for j in range(i % 4)]
        made = str(tmp_path / f'{i}.bin')
        for im, file in zip(pictures(i % 4, i), files):
            (im if own else im.resize((32, 32))).save(file)
        ids, tiles = asker.prompt([Image.open(f) for f in files], QUESTIONS[i % 4])
        samples.append(
            dict(most=12)
            | (
                dict(ids=ids)
                if own
                else dict(pictures=files, question=QUESTIONS[i % 4])
            )
        )
        if tiles:
            pixels = (torch.cat(tiles).float() / 255).numpy()
            Path(made).write_bytes(pixels.tobytes())
            samples[-1] |= (
                dict(pixels=made, shape=pixels.shape) if own else dict(expected=made)
            )
        said = asker.model.generate(
            torch.tensor([ids]), [tiles], max_new_tokens=12, greedy=True
        )[0].tolist()
        want.append(
            dict(
                ids=ids,
                said=said,
                answer=asker.tokenizer.decode(said, skip_special_tokens=True),
            )
        )
    (node / 'samples.json').write_text(json.dumps(samples))
    done = subprocess.run(
        ['node', 'ask_in_node.mjs', tmp_path / 'files', 'samples.json', backend],
        cwd=node,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = [json.loads(line) for line in done.stdout.splitlines()]
    assert (
        max(d for g in got for d in g.pop('differs', [0])) < 1e-6
    )  # the hair of the exporter
    assert got == want and len({w['answer'] for w in want}) > 3
