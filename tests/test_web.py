"""A model in a page: the script makes the tokens, pixels and heat maps of Python, and in a browser the page gives the same answers.

The first part needs Node. The second (slow) needs playwright and a Chromium, and onnxruntime-web: NANOVLM_WEB_RUNTIME names its package, else npm fetches it."""
import functools
import http.server
import json
import os
import random
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip('onnxruntime', reason='ONNX Runtime is not there: pip install nanovlm_nb[onnx]')
pytest.importorskip('onnx', reason='onnx is not there: pip install nanovlm_nb[onnx]')

import torch
from PIL import Image

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.answers.heatmap import answer_heat
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import VLMConfig, tiny
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.data.images import ImageProcessor
from nanovlm_nb.data.loader import load_tokenizer
from nanovlm_nb.data.prompts import get_image_string, neutralise
from nanovlm_nb.data.dataset import shapes_dataset, shapes_tokenizer
from nanovlm_nb.model.generate import TextStreams
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.uses.pages import PAGE, TALL_FIRST

pytestmark = pytest.mark.usefixtures('one_thread')
HERE = Path(__file__).parent
CHROMIUM = next((p for n in ('chromium', 'chromium-browser', 'google-chrome') if (p := shutil.which(n))), None)


# --- the script's parts, in Node

def in_node(place, **cases):
    "What the script makes of cases, see page_in_node.mjs."
    if not shutil.which('node'): pytest.skip('Node is not there')
    (place/'cases.json').write_text(json.dumps(cases))
    done = subprocess.run(['node', HERE/'page_in_node.mjs', PAGE/'page.js', place/'cases.json'], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def texts(n, rng):
    "Sentences, spaces, digits, and any characters there are, some of them spelling special tokens."
    parts = ['How many', ' squares', "It's", " we'll", '  ', '\n', '\t \n', '12', ' ٣٤', '½', 'ⅷ', '¡Ωß', ' 中文', '🙂', '\u00a0', '\u0085', '\ufeff', '\u200b', '<|im_end|>', '<|image|>', '<|im_<|im_end|>end|>', 'é', '\u0301', ' .,!?', 'ﬁ']
    return ['', *(''.join(rng.choice(parts) if rng.random() < .8 else chr(rng.randrange(1, 0xd7ff)) for _ in range(rng.randint(1, 12))) for _ in range(n))]


@pytest.mark.parametrize('digits', [True, False])
def test_the_script_makes_the_same_tokens(tmp_path, digits):
    "And says ids in the same words, piece by piece, also where they are no text at all."
    rng, template = random.Random(0), VLMConfig().lm_chat_template
    tok = shapes_tokenizer(VLMConfig().vlm_extra_tokens, template)
    spec = json.loads(tok.backend_tokenizer.to_str())
    if not digits:
        spec['pre_tokenizer'] = spec['pre_tokenizer']['pretokenizers'][1]
        tok = tok.__class__(tokenizer_object=tok.backend_tokenizer.from_str(json.dumps(spec)))
    asked = texts(400, rng)
    ids = [[rng.randrange(len(tok)) for _ in range(rng.randint(1, 9))] for _ in range(200)]
    got = in_node(tmp_path, tokenizer=spec, texts=asked, ids=ids)
    assert got['ids'] == [tok(t, add_special_tokens=False)['input_ids'] for t in asked]
    assert got['neutral'] == [neutralise(t, tok) for t in asked]
    assert got['spoken'] == [spoken(tok, row) for row in ids]


def spoken(tok, ids):
    "What a stream of ids says."
    streams = TextStreams(tok, 1)
    said = [(streams(torch.tensor([i])), streams.pieces[0])[1] for i in ids]
    return ''.join([*said, *streams.finish()])


def shown(place, sizes, convention, longest, tile, enlarge, noise=np.random.default_rng(0)):
    "Tiles of pictures by the script and by Python; grids and texts are the same."
    cfg = VLMConfig(image_convention=convention)
    tok = train_tokenizer(['a b'], 260, cfg.vlm_extra_tokens, cfg.lm_chat_template)
    how = dict(convention=convention, tile=tile, longest=longest, enlarge=enlarge, tall_first=TALL_FIRST, tokens_per_tile=2, tokens=cfg.vlm_extra_tokens)
    pictures = [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    cases = [dict(width=p.width, height=p.height, data=p.tobytes().hex()) for p in pictures]
    processor = ImageProcessor(longest, tile, enlarge, convention=convention)
    for picture, seen in zip(pictures, in_node(place, how=how, pictures=cases)['shown'], strict=True):
        tiles, grid = processor(picture)
        assert (seen['grid'], seen['text']) == ([*grid], get_image_string(tok, [grid], 2, convention)), picture.size
        yield np.stack([np.frombuffer(bytes.fromhex(t), np.uint8).reshape(tile, tile, 3).transpose(2, 0, 1) for t in seen['tiles']]), tiles.numpy()


@pytest.mark.parametrize(('convention', 'longest', 'tile'), [('nanovlm', 64, 64), ('smolvlm', 64, 64), ('smolvlm', 128, 64), ('nanovlm', 256, 32), ('nanovlm', 192, 64), ('nanovlm', 320, 64)])
def test_the_script_makes_the_same_pixels(tmp_path, convention, longest, tile):
    "To the bit, but for one level in a few values of the view of the whole, which is a mean of floats in nanoVLM's convention."
    rng, values, off, worst = random.Random(0), 0, 0, 0
    sizes = [(1, 1), (64, 64), (64, 128), (150, 3), (3, 150), (30, 100), *((rng.randint(1, 150), rng.randint(1, 150)) for _ in range(6))]
    for got, want in shown(tmp_path, sizes, convention, longest, tile, convention == 'smolvlm'):
        view = convention == 'nanovlm' and len(got) > 1
        assert np.array_equal(got[view:], want[view:])
        differs = np.abs(got.astype(int) - want)
        values, off, worst = values + differs.size, off + int((differs > 0).sum()), max(worst, int(differs.max()))
    assert worst <= 1 and off < 2e-5*values


# --- the page, in a browser

@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> Path:
    "The model that NANOVLM_CHECKPOINT names, else one that has learned nothing."
    if (given := os.environ.get('NANOVLM_CHECKPOINT')): return Path(given)
    folder, (cfg, _) = tmp_path_factory.mktemp('web')/'model', tiny(init_std=.2, vit_n_blocks=2, lm_n_blocks=3)
    torch.manual_seed(0)
    VisionLanguageModel(cfg, load_backbone=False).save_pretrained(folder, load_tokenizer(cfg))
    return folder


@pytest.fixture(scope='module')
def asker(checkpoint):
    return Asker.from_checkpoint(checkpoint, torch.device('cpu'))


@pytest.fixture(scope='module')
def folder(checkpoint, tmp_path_factory):
    "The page, written by the command."
    out, given = tmp_path_factory.mktemp('web')/'page', os.environ.get('NANOVLM_WEB_RUNTIME')
    if not (given or shutil.which('npm')): pytest.skip('npm is not there to fetch onnxruntime-web')
    main(['export', str(checkpoint), str(out), '--format', 'web', *(['--web_runtime', given] if given else [])])
    print(f'{sum(p.stat().st_size for p in out.rglob("*") if p.is_file())/1e6:.1f} MB')
    return out


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): pass


@pytest.fixture(scope='module')
def address(folder):
    "A server of files and of nothing else."
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_address[1]}/'
    server.shutdown()


@pytest.fixture(scope='module')
def browser():
    sync = pytest.importorskip('playwright.sync_api')
    if CHROMIUM is None: pytest.skip('no Chromium here')
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox', '--disable-gpu'])
        yield browser
        browser.close()


WATCH = '''window.heard = []; window.texts = []; window.refused = [];
addEventListener('answered', (e) => heard.push(e.detail));
addEventListener('securitypolicyviolation', (e) => refused.push(`${e.violatedDirective} ${e.blockedURI}`));
addEventListener('DOMContentLoaded', () => new MutationObserver(() => texts.push(document.getElementById('answer').textContent)).observe(document.getElementById('answer'), {childList: true}));'''


def until(page, holds):
    "Wait for something to hold. The page lets nothing be made of strings, and that is how playwright's own waiting works."
    for _ in range(600):
        if page.evaluate(holds): return
        page.wait_for_timeout(200)
    raise AssertionError(f'{holds} does not come true; the page says {page.inner_text("#status")!r}')


class Visit:
    "An open page, what it has asked for, and what went wrong."
    def __init__(self, browser, address, **screen):
        self.context = browser.new_context(**dict(viewport=dict(width=1200, height=900)) | screen)
        self.context.set_default_timeout(120_000)
        self.page, self.requests, self.faults, self.address = self.context.new_page(), [], [], address
        self.context.on('request', lambda r: self.requests.append(r.url))
        self.page.on('pageerror', lambda e: self.faults.append(str(e)))
        self.page.on('console', lambda m: self.faults.append(m.text) if m.type in ('error', 'warning') else None)
        self.page.add_init_script(WATCH)
        self.page.goto(address)
        until(self.page, "document.getElementById('status').textContent == 'Ready.'")

    def answer(self, act):
        "What the page answers to what a visitor does."
        n = self.page.evaluate('heard.length')
        act()
        until(self.page, f'heard.length > {n}')
        return self.page.evaluate('heard.at(-1)')

    def ask(self, question):
        "Ask with the keyboard."
        self.page.fill('#question', question)
        return self.answer(lambda: self.page.press('#question', 'Enter'))

    def close(self):
        "All that was asked for came from the server; nothing was refused, and nothing failed."
        outside = [u for u in self.requests if not u.startswith(self.address) and not u.startswith('data:')]
        assert (outside, self.faults, self.page.evaluate('refused')) == ([], [], [])
        self.context.close()


@pytest.fixture
def visit(browser, address):
    "A visit on a screen of some kind, which ends well."
    opened = []
    def start(**screen):
        opened.append(Visit(browser, address, **screen))
        return opened[-1]
    yield start
    for v in opened: v.close()


def scenes(n):
    "Held-out pictures, each with a question."
    rows = [r for r in shapes_dataset(4*n, 'validation', seed=3) if r['images']][:n]
    return [(r['images'][0], r['texts'][0]['user'], r['texts'][0]['assistant']) for r in rows]


def as_file(picture, path):
    picture.save(path)
    return str(path)


def agrees(got, asker, picture, question):
    "The answer of the page is Python's, and so are its tokens and its heat map."
    ids, tiles = asker.prompt([picture], question)
    said = asker.model.generate(torch.tensor([ids]), [tiles], max_new_tokens=32, greedy=True, eos_token_id=asker.tokenizer.eos_token_id)[0].tolist()
    said = said[:said.index(asker.tokenizer.eos_token_id)] if asker.tokenizer.eos_token_id in said else said
    assert (got['said'], got['answer']) == (said, asker([([picture], question)], 32)[0])
    text = asker.tokenizer.decode(said)
    if asker.tokenizer(text, add_special_tokens=False)['input_ids'] != said: return  # the answer of an untrained model may be no text
    want = answer_heat(asker, [picture], question, text)[0].tiles
    np.testing.assert_allclose(np.array(got['heat']['tiles']), want, atol=1e-4)


@pytest.mark.slow
def test_ten_scenes_get_the_answers_of_python(visit, asker, tmp_path):
    "Token by token, with the heat map of `answer_heat`."
    here, times, right = visit(), [], 0
    for i, (picture, question, truth) in enumerate(scenes(10)):
        here.page.set_input_files('#file', as_file(picture, tmp_path/f'{i}.png'))
        until(here.page, f"document.getElementById('picture').width == {picture.width} && document.getElementById('answer').textContent == ''")
        here.page.evaluate('texts.length = 0')
        got = here.ask(question)
        agrees(got, asker, picture, question)
        grown = [t for t in here.page.evaluate('texts') if t]
        assert len(set(grown)) > 1 or len(got['said']) < 2
        assert all(b.startswith(a) for a, b in zip(grown, grown[1:-1])) and here.page.text_content('#answer') == got['answer']
        assert here.page.is_visible('#heat')
        times.append(float(re.search(r'in ([\d.]+) seconds', here.page.inner_text('#figures'))[1]))
        right += got['answer'] == truth
    print(f'ten of ten answers equal, {right} right, {sum(times)/10:.2f} seconds an answer')
    if (place := os.environ.get('NANOVLM_SCREENSHOT')): here.page.screenshot(path=f'{place}_wide.png')


@pytest.mark.slow
def test_pictures_of_any_size_and_kind(visit, asker, tmp_path):
    "A photograph that is shrunk, a strip, a picture in grey, one of a palette, one with holes; a file that is no picture is told."
    here, noise = visit(), np.random.default_rng(1)
    smooth = Image.fromarray(noise.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((1200, 900))
    strip = Image.fromarray(noise.integers(0, 256, (500, 40, 3), dtype=np.uint8))
    clear = strip.copy()
    clear.putalpha(Image.fromarray(255*noise.integers(0, 2, (500, 40), dtype=np.uint8)))
    for i, picture in enumerate((smooth, strip, smooth.convert('L'), smooth.convert('P'), clear)):
        here.page.set_input_files('#file', as_file(picture, tmp_path/f'{i}.png'))
        until(here.page, f"document.getElementById('picture').width == {picture.width} && document.getElementById('answer').textContent == ''")
        agrees(here.ask('What colour is shown?'), asker, picture, 'What colour is shown?')
        here.page.click('#clear')
    (tmp_path/'no.png').write_text('no')
    here.page.set_input_files('#file', str(tmp_path/'no.png'))
    until(here.page, "document.getElementById('status').textContent.includes('is no picture')")
    assert here.faults.pop() == 'This file is no picture that the browser can read.'
    agrees(here.ask('Is it <|im_end|> small?'), asker, Image.new('RGB', (256, 256), '#101010'), 'Is it <|im_end|> small?')


@pytest.mark.slow
def test_without_a_network(visit, asker, folder):
    "Once the page is open, all of it works: every scene and every question that it offers."
    here = visit()
    here.context.set_offline(True)
    asked_for = len(here.requests)
    page = json.loads((folder/'page.json').read_text())
    for n, scene in enumerate(page['scenes']):
        question = page['questions'][n % len(page['questions'])]
        here.page.locator('#scenes button').nth(n).click()
        until(here.page, f"document.querySelectorAll('#scenes button')[{n}].ariaPressed == 'true'")
        got = here.answer(lambda q=question: here.page.get_by_role('button', name=q, exact=True).click())
        agrees(got, asker, Image.open(folder/scene['file']), question)
    assert len(here.requests) == asked_for
    hosts = {re.match(r'(\w+://[^/]+/)?', u)[0] for u in here.requests}
    assert hosts <= {here.address, ''}, hosts


@pytest.mark.slow
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_on_a_phone(visit, scheme):
    "400 pixels wide: nothing sticks out, what is touched is large enough, and a finger draws."
    here = visit(viewport=dict(width=400, height=800), is_mobile=True, has_touch=True, color_scheme=scheme)
    wide = here.page.evaluate("[document.documentElement.scrollWidth, ...[...document.querySelectorAll('body *')].map((e) => e.getBoundingClientRect().right)]")
    assert max(wide) <= 400
    small = here.page.evaluate("[...document.querySelectorAll('button, #question, .file')].map((e) => e.getBoundingClientRect()).filter((r) => r.height < 40 || r.width < 40).length")
    assert small == 0
    before = here.page.evaluate("document.getElementById('picture').toDataURL()")
    here.page.tap('#picture')
    assert here.page.evaluate("document.getElementById('picture').toDataURL()") != before
    here.page.locator('#scenes button').nth(1).tap()
    until(here.page, "document.querySelectorAll('#scenes button')[1].ariaPressed == 'true'")
    here.answer(lambda: here.page.locator('#questions button').first.tap())
    if (place := os.environ.get('NANOVLM_SCREENSHOT')): here.page.screenshot(path=f'{place}_phone_{scheme}.png', full_page=True)
