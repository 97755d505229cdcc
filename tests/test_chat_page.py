"The chat page in a real browser. Needs gradio and playwright, and a Chromium that is already there."
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from commands import environment, run
from nanovlm_nb.core.config import preset
from nanovlm_nb.data.loader import load_tokenizer
from nanovlm_nb.data.dataset import shapes_dataset
from nanovlm_nb.model.vlm import VisionLanguageModel

ROOT = Path(__file__).resolve().parent.parent
QUESTION = 'Which colour do you see?'


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> Path:
    "The model that NANOVLM_CHECKPOINT names, else one that has learned nothing."
    if (given := os.environ.get('NANOVLM_CHECKPOINT')): return Path(given)
    folder, (cfg, _) = tmp_path_factory.mktemp('chat')/'model', preset('shapes')
    torch.manual_seed(0)
    VisionLanguageModel(cfg, load_backbone=False).save_pretrained(folder, load_tokenizer(cfg))
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def answers(url: str) -> bool:
    try: return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError: return False


@pytest.fixture(scope='module')
def server(checkpoint, tmp_path_factory):
    "`nanovlm ask --page` on a free port; yields its address."
    pytest.importorskip('gradio')
    port, log = free_port(), tmp_path_factory.mktemp('chat')/'log'
    with log.open('w') as out:
        process = subprocess.Popen([sys.executable, '-m', 'nanovlm_nb.cli', 'ask', str(checkpoint), '--page', '--port', str(port), '--max_new_tokens', '12'], cwd=log.parent,
            stdout=out, stderr=subprocess.STDOUT, env=environment(GRADIO_ANALYTICS_ENABLED='False', PYTHONPATH=str(ROOT)))
    try:
        end = time.monotonic() + 180
        while not answers(url := f'http://127.0.0.1:{port}'):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope='module')
def scene(tmp_path_factory) -> tuple[Path, dict]:
    "A held-out picture of one thing, and its row."
    row = next(r for r in shapes_dataset(60, 'validation', seed=1) if r['images'] and 'large' in r['scene'])
    path = tmp_path_factory.mktemp('chat')/'scene.png'
    row['images'][0].save(path)
    return path, row


@pytest.mark.slow
def test_ask_about_a_picture(server, scene, checkpoint, tmp_path):
    "Upload, ask, read the answer: it is the one that `nanovlm ask` gives. A second question keeps the first."
    sync = pytest.importorskip('playwright.sync_api')
    browser_path = next((p for n in ('chromium', 'chromium-browser', 'google-chrome') if (p := shutil.which(n))), None)
    if browser_path is None: pytest.skip('no Chromium here')
    path, row = scene
    said = run([sys.executable, '-m', 'nanovlm_nb.cli', 'ask', checkpoint, '--image', path, '--prompt', QUESTION, '--max_new_tokens', 12], tmp_path, PYTHONPATH=str(ROOT)).stdout.strip()
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=['--no-sandbox'])
        page = browser.new_page(viewport=dict(width=1200, height=1100))
        page.goto(server)
        page.locator('#question input[type=file]').first.set_input_files(str(path))
        page.locator('#question img').wait_for(timeout=60_000)
        def ask(question, n):
            page.locator('#question textarea').fill(question)
            page.locator('#question textarea').press('Enter')
            sync.expect(page.locator('#conversation .bot')).to_have_count(n, timeout=120_000)
            page.wait_for_timeout(1000)  # the heat map of the question before is gone
            page.wait_for_function("document.querySelector('#heat img')?.naturalWidth == 512", timeout=120_000)
            page.wait_for_timeout(1000)
        for n, question in enumerate((QUESTION, 'Where is it?'), 1): ask(question, n)
        words = [re.sub(r'\s+', ' ', t).strip() for t in page.locator('#conversation .bot').all_inner_texts()]
        if os.environ.get('NANOVLM_SCREENSHOT'): page.screenshot(path=os.environ['NANOVLM_SCREENSHOT'])
        assert words[0] == re.sub(r'\s+', ' ', said)
        assert QUESTION in page.locator('#conversation').inner_text()
        page.get_by_role('button', name='Undo').click()
        sync.expect(page.locator('#conversation .bot')).to_have_count(1, timeout=60_000)
        ask('Where is it?', 2)
        assert re.sub(r'\s+', ' ', page.locator('#conversation .bot').last.inner_text()).strip() == words[1]
        page.get_by_role('button', name='Clear').click()
        sync.expect(page.locator('#conversation .bot')).to_have_count(0, timeout=60_000)
        browser.close()


@pytest.mark.slow
def test_only_this_machine(server):
    "The page listens on 127.0.0.1 and on no other address."
    port = int(server.rsplit(':', 1)[1])
    listening = [line.split() for line in Path('/proc/net/tcp').read_text().splitlines()[1:]]
    hosts = {fields[1].split(':')[0] for fields in listening if fields[3] == '0A' and int(fields[1].split(':')[1], 16) == port}
    assert hosts == {'0100007F'}
    tcp6 = Path('/proc/net/tcp6')
    assert not tcp6.exists() or f':{port:04X} ' not in ''.join(f'{line.split()[1]} ' for line in tcp6.read_text().splitlines()[1:] if line.split()[3] == '0A')
