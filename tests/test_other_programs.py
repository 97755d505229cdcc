"""Files of ours in the programs of others: nanoVLM's own code, and other versions of transformers, each in an environment of its own.

NANOVLM_OTHERS=/path/to/python:/another/python NANOVLM_PATH=/a/checkout/of/nanoVLM pytest --slow -s tests/test_other_programs.py"""
import json
import os
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from commands import nanovlm, train
from PIL import ExifTags, Image
from their_smolvlm import make_smolvlm

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.data.dataset import SORTS, draw_scene, make_scene
from nanovlm_nb.data.images import open_image
from nanovlm_nb.model.vlm import VisionLanguageModel

HERE, OTHERS = Path(__file__).parent, [p for p in os.environ.get('NANOVLM_OTHERS', '').split(os.pathsep) if p]


# a hub of our own

@pytest.fixture
def hub(tmp_path, monkeypatch):
    "A server that gives the files of a directory as the hub gives those of `some/smolvlm`."
    folder = tmp_path/'served'

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): pass

        def do_GET(self):
            path, files = self.path.split('?')[0], sorted(folder.iterdir())
            if '/tree/' in path: data = json.dumps([dict(type='file', path=p.name, size=p.stat().st_size, oid='1'*40) for p in files]).encode()
            elif path.startswith('/api/'): data = json.dumps(dict(id='some/smolvlm', sha='0'*40, siblings=[dict(rfilename=p.name) for p in files])).encode()
            else: data = (folder/path.split('/')[-1]).read_bytes()
            self.send_response(200)
            for name, value in {'Content-Length': len(data), 'ETag': f'"{path}"', 'X-Repo-Commit': '0'*40}.items(): self.send_header(name, str(value))
            self.end_headers()
            if self.command != 'HEAD': self.wfile.write(data)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, args=(.02,), daemon=True).start()
    yield folder, dict(HF_ENDPOINT=f'http://127.0.0.1:{server.server_port}', HF_HUB_CACHE=str(tmp_path/'cache'), HF_HUB_DISABLE_XET='1', HF_HUB_OFFLINE='0', NO_PROXY='127.0.0.1')
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_comes_with_its_chat_template(hub):
    "From the hub as from a directory: the template is a file of its own."
    folder, where = hub
    make_smolvlm(folder)
    code = "from nanovlm_nb.model.weights import smolvlm_config; print(smolvlm_config('some/smolvlm').lm_chat_template)"
    there = subprocess.run([sys.executable, '-c', code], env=os.environ | where, capture_output=True, text=True)
    assert there.stdout.strip() == VisionLanguageModel.from_pretrained(folder).cfg.lm_chat_template.strip(), there.stderr[-1000:]


# twenty questions about drawn pictures of all sorts of files, and how far two programs are apart on them

KINDS = 'rgb', 'grey', 'palette', 'palette with transparency', 'transparent', 'turned', '16 bits'


def draw(path, kind, rng):
    "A scene on a ground of any proportions, as a file of this kind."
    im = draw_scene(make_scene(rng.choice([s for s in SORTS if s != 'text']), rng), rng, rng.choice((40, 64, 100)))
    ground = Image.new('RGB', (im.width + rng.randint(0, 80), im.height + rng.randint(0, 80)), im.getpixel((0, 0)))
    ground.paste(im, (rng.randint(0, ground.width - im.width), rng.randint(0, ground.height - im.height)))
    seen = ground.convert('L').point(lambda v: 255*(v > 60))  # where something is drawn
    if kind == 'grey': ground.convert('L').save(path := path.with_suffix('.png'))
    elif kind == 'palette': ground.quantize(32).save(path := path.with_suffix('.png'))
    elif kind == 'palette with transparency': ground.quantize(32).save(path := path.with_suffix('.png'), transparency=0)
    elif kind == 'transparent':
        ground.putalpha(seen)
        ground.save(path := path.with_suffix('.png'))
    elif kind == 'turned':
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        ground.save(path := path.with_suffix('.jpg'), exif=exif, quality=95)
    elif kind == '16 bits': Image.frombytes('I;16', ground.size, b''.join((v*257).to_bytes(2, 'little') for v in ground.convert('L').tobytes())).save(path := path.with_suffix('.png'))
    else: ground.save(path := path.with_suffix('.png'))
    return str(path)


def make_samples(place, plain=False, n=20):
    "Questions, each with its pictures and what was said before; `plain`: the pictures as this library opens them, RGB and upright."
    rng, out = random.Random(5), []
    place.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        kind = KINDS[i % len(KINDS)]
        pictures = [draw(place/f'{i}_{j}', kind, rng) for j in range(1 + i % 3)]
        if plain:
            for p in pictures: open_image(p).save(p := Path(p).with_suffix('.png'))
            pictures = [str(Path(p).with_suffix('.png')) for p in pictures]
        asked = rng.sample(['How many squares are there?', 'What colour is it?', 'What is this?', 'Is it red?', 'Where is the circle?'], 2)
        turns = [dict(user=asked[0], assistant='one'), dict(user=asked[1])] if i % 4 == 3 else [dict(user=asked[0])]
        out.append(dict(kind=kind, pictures=pictures, turns=turns))
    (place/'samples.json').write_text(json.dumps(out))
    return out


@torch.inference_mode()
def ours(asker, samples):
    "What this library makes of them, as `their_programs.py` tells it of another."
    out = []
    for s in samples:
        ids, tiles = asker.prompt(s['pictures'], s['turns'])
        row = torch.tensor([ids])
        pixels = asker.model.cfg.pixel_mean, asker.model.cfg.pixel_std
        assert pixels == ([0.], [1.])
        said = asker.model.generate(row, tiles, max_new_tokens=8, greedy=True)[0]
        out.append(dict(ids=row[0], pixels=torch.cat(tiles).float()/255, logits=asker.model(row, tiles)[0][0], said=asker.tokenizer.decode(said, skip_special_tokens=True).strip()))
    return out


def apart(samples, theirs, mine):
    """How many ids and answers are equal, how far pixels are apart (in levels of 255), also by the kind of file, and scores: of all, and of those
    samples whose pixels are the same."""
    pairs = [(s, a, b) for s, a, b in zip(samples, theirs, mine, strict=True) if a and torch.equal(a['ids'], b['ids'])]
    far = lambda name, pairs: max([(a[name]-b[name]).abs().max().item() for _, a, b in pairs], default=float('nan'))
    alike = [p for p in pairs if far('pixels', [p]) < 1e-6]
    return dict(refused=theirs.count(None), ids=len(pairs), pixels=255*far('pixels', pairs), logits=far('logits', pairs), answers=sum(bool(a) and a['said'] == b['said'] for a, b in zip(theirs, mine)),
                same_pixels=len(alike), logits_there=far('logits', alike), answers_there=sum(a['said'] == b['said'] for _, a, b in alike),
                by_kind={k: round(255*far('pixels', [p for p in pairs if p[0]['kind'] == k]), 1) for k in KINDS})


# programs

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "Two trained checkpoints, one in each convention, the second exported; twenty questions about files of all kinds, and with plain pictures."
    place = tmp_path_factory.mktemp('others')
    flags = ['--preset', 'shapes', '--max_training_steps', '300', '--eval_interval', '300', '--ask_samples', '0', '--log_wandb', 'False', '--vlm_checkpoint_path', 'runs']
    train([*flags, '--run_name', 'nanovlm'], place)
    train([*flags, '--run_name', 'smolvlm', '--image_convention', 'smolvlm', '--max_img_size', '128'], place)
    nanovlm(['export', 'runs/smolvlm/step_300', 'smol'], place)
    for kind in ('files', 'plain'): make_samples(place/kind, kind == 'plain')
    return place


def compare(python, program, folder, checkpoint, place, kind, cwd='/'):
    "Another program's table, run from elsewhere."
    samples = json.loads((place/kind/'samples.json').read_text())
    done = subprocess.run([python, HERE/'their_programs.py', program, folder, place/kind/'samples.json', place/'out.pt'], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    table = apart(samples, torch.load(place/'out.pt'), ours(Asker.from_checkpoint(checkpoint), samples))
    print(f'{python} {program} {kind}: {done.stdout.strip().splitlines()[0]}\n  {table}')
    return table


@pytest.mark.slow
@pytest.mark.parametrize('python', OTHERS or [pytest.param('', marks=pytest.mark.skip(reason='NANOVLM_OTHERS names no Python of another environment'))])
def test_transformers_answers_as_we_do(place, python):
    """The same ids in every version, the same pixels without torchvision and nearly so with it. Scores too, but not in 4.55 to 4.57, whose tower
    places patches one row too high and one column too far left (transformers issue 41190, mended in 5)."""
    asked = [subprocess.run([python, '-c', f'import {name} as m; print(m.__version__)'], capture_output=True, text=True).stdout.strip() for name in ('transformers', 'torchvision')]
    for program in ('transformers', 'transformers_by_path'):
        compare(python, program, place/'smol', place/'runs/smolvlm/step_300', place, 'files')
        table = compare(python, program, place/'smol', place/'runs/smolvlm/step_300', place, 'plain')
        assert (table['refused'], table['ids']) == (0, 20) and table['pixels'] < (3 if asked[1] else 1e-3)
        if not asked[0].startswith(('4.55', '4.56', '4.57')): assert table['answers'] == 20 and table['logits'] < (.05 if asked[1] else 1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not (OTHERS and os.environ.get('NANOVLM_PATH')), reason='NANOVLM_PATH names no checkout of nanoVLM, or NANOVLM_OTHERS no Python with torchvision')
def test_nanovlm_answers_as_we_do(place):
    "What training writes, as it lies there, and after a move and an export."
    (place/'runs/nanovlm').rename(place/'moved')
    nanovlm(['export', 'moved/step_300', 'again', '--format', 'nanovlm'], place)
    (place/'moved').rename(place/'runs/nanovlm')
    for folder in ('runs/nanovlm/step_300', 'again'):
        compare(OTHERS[0], 'nanovlm', place/folder, place/folder, place, 'files')
        table = compare(OTHERS[0], 'nanovlm', place/folder, place/folder, place, 'plain')
        assert (table['refused'], table['ids'], table['answers']) == (0, 20, 20) and table['pixels'] < 1e-3 and table['logits'] < 1e-4
