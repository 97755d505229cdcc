"""Files of ours in the programs of others: nanoVLM's own code, and other versions of transformers, each in an environment of its own.

NANOVLM_OTHERS=/path/to/python:/another/python NANOVLM_PATH=/a/checkout/of/nanoVLM pytest --slow -s tests/test_other_programs.py"""
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from commands import nanovlm, train
from their_smolvlm import make_smolvlm
from twenty_pictures import apart, make_samples, ours

from nanovlm_nb.answers.answer import Asker
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
