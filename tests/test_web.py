"""Models in pages: the script of an exported page makes the tokens, pixels and heat maps of Python, and in a browser both pages give its answers.

The first part needs Node. The others (slow) need playwright and a Chromium; the exported page needs onnxruntime-web (NANOVLM_WEB_RUNTIME names
its package, else it is fetched), the chat page gradio."""

import functools
import http.client
import http.server
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip(
    'onnxruntime', reason='ONNX Runtime is not there: pip install nanovlm_nb[onnx]'
)
pytest.importorskip('onnx', reason='onnx is not there: pip install nanovlm_nb[onnx]')

import torch
from commands import environment
from PIL import Image

from nanovlm_nb import Asker, VisionLanguageModel, VLMConfig
from nanovlm_nb.answers.heatmap import answer_heat
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import tiny
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.data.shapes import shapes_tokenizer
from nanovlm_nb.data.images import ImageProcessor
from nanovlm_nb.data.loader import load_tokenizer
from nanovlm_nb.data.prompts import get_image_string, neutralise
from nanovlm_nb.model.generate import TextStreams
from nanovlm_nb.uses.pages import PAGE, TALL_FIRST

pytestmark = pytest.mark.usefixtures('one_thread')
HERE = Path(__file__).parent
CHROMIUM = next(
    (
        p
        for n in ('chromium', 'chromium-browser', 'google-chrome')
        if (p := shutil.which(n))
    ),
    None,
)


# --- the script's parts, in Node


def in_node(place, **cases):
    "What the script makes of cases, see page_in_node.mjs."
    if not shutil.which('node'):
        pytest.skip('Node is not there')
    (place / 'cases.json').write_text(json.dumps(cases))
    done = subprocess.run(
        ['node', HERE / 'page_in_node.mjs', PAGE / 'page.js', place / 'cases.json'],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def some_text(rng):
    "Words, spaces, digits, and any characters there are, some of them spelling special tokens."
    parts = [
        'How many',
        ' squares',
        " we'll",
        '  ',
        '\t \n',
        '12',
        ' ٣٤',
        '½',
        '¡Ωß',
        ' 中文',
        '🙂',
        '\u00a0',
        '\u0085',
        '\ufeff',
        '\u200b',
        '<|im_end|>',
        '<|image|>',
        '<|im_<|im_end|>end|>',
        'é',
        '\u0301',
        ' .,!?',
        'ﬁ',
    ]
    return ''.join(
        rng.choice(parts) if rng.random() < 0.8 else chr(rng.randrange(1, 0xD7FF))
        for _ in range(rng.randint(0, 12))
    )


@pytest.mark.parametrize('digits', [True, False])
def test_the_script_makes_the_same_tokens(tmp_path, digits):
    "And says ids in the same words, piece by piece, also where they are no text at all."
    rng = random.Random(0)
    tok = shapes_tokenizer(VLMConfig().vlm_extra_tokens, VLMConfig().lm_chat_template)
    spec = json.loads(tok.backend_tokenizer.to_str())
    if not digits:
        spec['pre_tokenizer'] = spec['pre_tokenizer']['pretokenizers'][1]
        tok = tok.__class__(
            tokenizer_object=tok.backend_tokenizer.from_str(json.dumps(spec))
        )
    texts = [some_text(rng) for _ in range(400)]
    ids = [
        [rng.randrange(len(tok)) for _ in range(rng.randint(1, 9))] for _ in range(200)
    ]
    got = in_node(tmp_path, tokenizer=spec, texts=texts, ids=ids)
    assert got['ids'] == [tok(t, add_special_tokens=False)['input_ids'] for t in texts]
    assert got['neutral'] == [neutralise(t, tok) for t in texts]
    for row, spoken in zip(ids, got['spoken'], strict=True):
        streams = TextStreams(tok, 1)
        said = ''
        for i in row:
            streams(torch.tensor([i]))
            said += streams.pieces[0]
        assert spoken == said + ''.join(streams.finish())


@pytest.mark.parametrize(
    ('convention', 'longest', 'tile'),
    [
        ('nanovlm', 64, 64),
        ('nanovlm', 256, 32),
        ('nanovlm', 320, 64),
        ('smolvlm', 64, 64),
        ('smolvlm', 128, 64),
    ],
)
def test_the_script_makes_the_same_pixels(tmp_path, convention, longest, tile):
    "To the bit, but for one level in a few values of the view of the whole, which is a mean of floats in nanoVLM's convention."
    rng = random.Random(0)
    noise = np.random.default_rng(0)
    cfg = VLMConfig(image_convention=convention)
    enlarge = convention == 'smolvlm'
    tok = train_tokenizer(['a b'], 260, cfg.vlm_extra_tokens, cfg.lm_chat_template)
    how = dict(
        convention=convention,
        tile=tile,
        longest=longest,
        enlarge=enlarge,
        tall_first=TALL_FIRST,
        tokens_per_tile=2,
        tokens=cfg.vlm_extra_tokens,
    )
    sizes = [
        (1, 1),
        (64, 64),
        (64, 128),
        (150, 3),
        (3, 150),
        (30, 100),
        *((rng.randint(1, 150), rng.randint(1, 150)) for _ in range(6)),
    ]
    pictures = [
        Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8))
        for w, h in sizes
    ]
    cases = [
        dict(width=p.width, height=p.height, data=p.tobytes().hex()) for p in pictures
    ]
    processor = ImageProcessor(longest, tile, enlarge, convention=convention)
    differs = []
    for picture, seen in zip(
        pictures, in_node(tmp_path, how=how, pictures=cases)['shown'], strict=True
    ):
        tiles, grid = processor(picture)
        assert (seen['grid'], seen['text']) == (
            [*grid],
            get_image_string(tok, [grid], 2, convention),
        ), picture.size
        got = (
            torch.tensor([[*bytes.fromhex(t)] for t in seen['tiles']])
            .view(-1, tile, tile, 3)
            .permute(0, 3, 1, 2)
        )
        view = convention == 'nanovlm' and len(got) > 1
        assert torch.equal(got[view:], tiles[view:].long())
        differs.append((got - tiles.long()).abs().flatten())
    differs = torch.cat(differs)
    assert differs.max() <= 1 and (differs > 0).sum() < 2e-5 * len(differs)


# --- in a browser


@pytest.fixture(scope='module')
def asker(tmp_path_factory):
    "A checkpoint that has learned nothing."
    folder = tmp_path_factory.mktemp('web') / 'model'
    (cfg, _) = tiny(init_std=0.2, vit_n_blocks=2, lm_n_blocks=3)
    torch.manual_seed(0)
    VisionLanguageModel(cfg, load_backbone=False).save_pretrained(
        folder, load_tokenizer(cfg)
    )
    return Asker.from_checkpoint(folder, torch.device('cpu'))


@pytest.fixture(scope='module')
def browser():
    sync = pytest.importorskip('playwright.sync_api')
    if CHROMIUM is None:
        pytest.skip('no Chromium here')
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path=CHROMIUM, args=['--no-sandbox', '--disable-gpu']
        )
        yield browser
        browser.close()


@pytest.fixture(scope='module')
def site(asker, tmp_path_factory):
    "The page, written by the command, and the address of a server of files and of nothing else."
    out = tmp_path_factory.mktemp('web') / 'page'
    given = os.environ.get('NANOVLM_WEB_RUNTIME')
    main(
        [
            'export',
            str(asker.model.folder),
            str(out),
            '--format',
            'web',
            *(['--web_runtime', given] if given else []),
        ]
    )
    with http.server.ThreadingHTTPServer(
        ('127.0.0.1', 0),
        functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(out)),
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield out, f'http://127.0.0.1:{server.server_port}/'
        server.shutdown()


WATCH = '''window.heard = []; window.texts = []; window.refused = [];
addEventListener('answered', (e) => heard.push(e.detail));
const decode = createImageBitmap.bind(window); window.createImageBitmap = (...args) => new Promise((done) => setTimeout(done, 300)).then(() => decode(...args));
addEventListener('securitypolicyviolation', (e) => refused.push(`${e.violatedDirective} ${e.blockedURI}`));
addEventListener('DOMContentLoaded', () => new MutationObserver(() => texts.push(document.getElementById('answer').textContent)).observe(document.getElementById('answer'), {childList: true}));'''


def until(page, holds):
    "Wait for something to hold. The page lets nothing be made of strings, and that is how playwright's own waiting works."
    for _ in range(600):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(200)
    raise AssertionError(
        f'{holds} does not come true; the page says {page.inner_text("#status")!r}'
    )


def agrees(got, asker, picture, question):
    "The answer of the page is Python's, and so are its tokens and its heat map."
    ids, tiles = asker.prompt([picture], question)
    said = asker.model.generate(
        torch.tensor([ids]),
        [tiles],
        max_new_tokens=32,
        greedy=True,
        eos_token_id=asker.tokenizer.eos_token_id,
    )[0].tolist()
    said = (
        said[: said.index(asker.tokenizer.eos_token_id)]
        if asker.tokenizer.eos_token_id in said
        else said
    )
    assert (got['said'], got['answer']) == (said, asker([([picture], question)], 32)[0])
    text = asker.tokenizer.decode(said)
    if asker.tokenizer(text, add_special_tokens=False)['input_ids'] != said:
        return  # the answer of an untrained model may be no text
    want = answer_heat(asker, [picture], question, text)[0].tiles
    np.testing.assert_allclose(np.array(got['heat']['tiles']), want, atol=1e-4)


@pytest.mark.slow
def test_the_page_answers_as_python_does_without_a_network(
    browser, site, asker, tmp_path
):
    "Every scene that it offers; a photograph that is shrunk, a strip, pictures in grey, of a palette, with holes; a file that is no picture is told."
    (folder, address), noise, requests, faults = site, np.random.default_rng(1), [], []
    page = browser.new_page(viewport=dict(width=1200, height=900))
    page.on('request', lambda r: requests.append(r.url))
    page.on('pageerror', lambda e: faults.append(str(e)))
    page.on(
        'console',
        lambda m: faults.append(m.text) if m.type in ('error', 'warning') else None,
    )
    page.add_init_script(WATCH)
    page.goto(address)
    until(page, "document.getElementById('status').textContent == 'Ready.'")
    page.context.set_offline(True)
    asked_for = len(requests)
    offered = json.loads((folder / 'page.json').read_text())

    def answer(act):
        "What the page answers to what a visitor does."
        n = page.evaluate('heard.length')
        act()
        until(page, f'heard.length > {n}')
        return page.evaluate('heard.at(-1)')

    def ask(question):
        "Ask with the keyboard."
        page.fill('#question', question)
        return answer(lambda: page.press('#question', 'Enter'))

    for n, scene in enumerate(offered['scenes']):
        question = offered['questions'][n % len(offered['questions'])]
        page.evaluate('texts.length = 0')
        page.locator('#scenes button').nth(
            n
        ).click()  # and asked about at once, before it is decoded
        got = answer(
            lambda q=question: page.get_by_role('button', name=q, exact=True).click()
        )
        agrees(got, asker, Image.open(folder / scene['file']), question)
        grown = [t for t in page.evaluate('texts') if t]
        assert (len(set(grown)) > 1 or len(got['said']) < 2) and all(
            b.startswith(a) for a, b in zip(grown, grown[1:-1])
        )
        assert page.text_content('#answer') == got['answer'] and page.is_visible(
            '#heat'
        )
    smooth = Image.fromarray(noise.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(
        (1200, 900)
    )
    strip = Image.fromarray(noise.integers(0, 256, (500, 40, 3), dtype=np.uint8))
    (clear := strip.copy()).putalpha(
        Image.fromarray(255 * noise.integers(0, 2, (500, 40), dtype=np.uint8))
    )
    for i, picture in enumerate(
        (smooth, strip, smooth.convert('L'), smooth.convert('P'), clear)
    ):
        picture.save(tmp_path / f'{i}.png')
        page.set_input_files('#file', str(tmp_path / f'{i}.png'))
        until(
            page,
            f"document.getElementById('picture').width == {picture.width} && document.getElementById('answer').textContent == ''",
        )
        agrees(ask('What colour is shown?'), asker, picture, 'What colour is shown?')
        page.click('#clear')
    with page.expect_event('pageerror'):
        page.set_input_files('#file', __file__)
    assert (
        'is no picture' in page.text_content('#status')
        and faults.pop() == 'This file is no picture that the browser can read.'
    )
    agrees(
        ask('Is it <|im_end|> small?'),
        asker,
        Image.new('RGB', (256, 256), '#101010'),
        'Is it <|im_end|> small?',
    )
    page.evaluate(
        "(a) => new MutationObserver((_, o) => { if (a.textContent) { o.disconnect(); clear.click(); } }).observe(a, {childList: true})",
        page.query_selector('#answer'),
    )
    page.press(
        '#question', 'Enter'
    )  # the picture is cleared once the first words are there: they are about another
    until(
        page,
        "!document.getElementById('ask').disabled && document.getElementById('status').textContent == 'Ready.'",
    )
    assert (page.text_content('#answer'), page.is_visible('#heat')) == ('', False)
    assert (len(requests), faults, page.evaluate('refused')) == (asked_for, [], [])
    assert not [url for url in requests if not url.startswith((address, 'data:'))]


# --- the chat page


@pytest.fixture
def server(asker):
    "`nanovlm ask --page` on a free port; yields that."
    pytest.importorskip('gradio')
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]
    words = [
        sys.executable,
        '-m',
        'nanovlm_nb.cli',
        'ask',
        asker.model.folder,
        '--page',
        '--port',
        str(port),
        '--max_new_tokens',
        '12',
    ]
    process = subprocess.Popen(words, env=environment(GRADIO_ANALYTICS_ENABLED='False'))
    yield port
    process.terminate()
    process.wait(30)


def listening(port):
    "Wait until somebody answers there."
    end = time.monotonic() + 180
    while socket.socket().connect_ex(('127.0.0.1', port)):
        assert time.monotonic() < end
        time.sleep(0.5)


@pytest.mark.slow
def test_the_chat_page_answers_under_its_own_names_alone(server):
    "A site whose name leads to 127.0.0.1 gets nothing: neither the page nor its functions."
    listening(server)

    def status(method, path, name):
        connection = http.client.HTTPConnection('127.0.0.1', server, timeout=60)
        connection.request(method, path, headers={'Host': name})
        return connection.getresponse().status

    ways = [
        ('GET', '/'),
        ('GET', '/config'),
        ('POST', '/gradio_api/queue/join'),
        ('GET', '/gradio_api/info'),
    ]
    ours = [f'{name}:{server}' for name in ('localhost', '127.0.0.1', '[::1]')]
    assert [
        status('GET', path, name) for name in ours for path in ('/', '/config')
    ] == [200] * 6
    theirs = (f'evil.example:{server}', 'localhost.evil.example', '')
    assert {status(*way, name) for way in ways for name in theirs} == {403}


@pytest.mark.slow
def test_the_chat_page_answers_as_python_does(browser, server, asker, tmp_path):
    "Upload, ask, read the answer, see where it looked; a second question keeps the first, also when it is taken back and asked again. No other machine can do so."
    expect = pytest.importorskip('playwright.sync_api').expect
    picture = Image.effect_noise((60, 40), 90)
    question = 'Which colour do you see?'
    picture.save(tmp_path / 'noise.png')
    page = browser.new_page(viewport=dict(width=1200, height=1100))
    listening(server)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(('127.0.0.2', server), timeout=9)
    page.goto(f'http://127.0.0.1:{server}')
    page.locator('#question input[type=file]').first.set_input_files(
        str(tmp_path / 'noise.png')
    )
    page.locator('#question img').wait_for(timeout=60_000)

    def ask(asked, n):
        page.locator('#question textarea').fill(asked)
        page.locator('#question textarea').press('Enter')
        expect(page.locator('#conversation .bot')).to_have_count(n, timeout=120_000)
        page.wait_for_timeout(1000)  # the heat map of the question before is gone
        page.wait_for_function(
            "document.querySelector('#heat img')?.naturalWidth", timeout=120_000
        )
        page.wait_for_timeout(1000)
        return page.locator('#conversation .bot').last.inner_text()

    ask(question, 1)
    where = ask('Where is it?', 2)
    said = page.locator('#conversation .bot').first.inner_text()
    assert (
        said.split() == asker([([picture], question)], 12)[0].split()
        and question in page.locator('#conversation').inner_text()
    )
    page.get_by_role('button', name='Undo').click()
    expect(page.locator('#conversation .bot')).to_have_count(1, timeout=60_000)
    assert ask('Where is it?', 2) == where
    page.get_by_role('button', name='Clear').click()
    expect(page.locator('#conversation .bot')).to_have_count(0, timeout=60_000)
