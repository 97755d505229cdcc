"2,000 damaged pictures and rows go through the data set: each is a sample or is dropped with a reason, and nothing else happens."
import io
import logging
import multiprocessing as mp
import random
import struct
import sys
import traceback
import warnings
import zlib
from collections import Counter

import pytest
import torch
from PIL import Image, ImageDraw

from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.data.dataset import RATINGS, Dropped, VQADataset, read_row
from nanovlm_nb.data.images import get_image_processor

PICTURES, ROWS, PATIENCE = 1500, 500, 300  # cases of both kinds, seconds for all
REASONS = {'no_turns', 'bad_row', 'ratings', 'too_many_images', 'unreadable_image', 'too_long'}
TURNS = [dict(user='What is it?', assistant='A disc.'), dict(user='Sure?', assistant='Yes.')]
ODD = (None, [], {}, '', 'text', 0, 7, -1.5, True, float('nan'), [None], [[]], ['text'], [1, 2], [{}], {'user': 'q'}, b'bytes', 'a\ud800b', 'x'*5000, ('a', 'b'))


def sources() -> list[tuple[str, bytes]]:
    "Small files of six formats in several modes, some with several frames, EXIF data or compression."
    im = Image.new('RGB', (40, 30), 'navy')
    ImageDraw.Draw(im).ellipse((5, 5, 30, 25), fill='gold')
    exif = Image.Exif()
    exif[0x0112], exif[0x010f], exif[0x9003] = 6, 'maker', '2020:01:01 00:00:00'
    plain, flagged, frames = {}, dict(exif=exif), dict(save_all=True, append_images=[im.rotate(90), im.rotate(180)])
    kinds = [('JPEG', 'RGB L CMYK', (plain, flagged, dict(progressive=True))), ('PNG', 'RGB RGBA P LA L 1 I;16', (plain, flagged)), ('PNG', 'RGB', (frames,)), ('GIF', 'P L', (plain, frames)),
             ('WEBP', 'RGB RGBA', (plain, flagged, frames)), ('TIFF', 'RGB L CMYK F', (plain,)), ('TIFF', 'RGB', (dict(compression='tiff_lzw'), flagged)), ('TIFF', '1', (dict(compression='group4'),)), ('BMP', 'RGB L P 1', (plain,))]
    made = []
    for fmt, modes, ways in kinds:
        for mode, kw in ((mode, kw) for mode in modes.split() for kw in ways):
            (im.convert('L').convert('I').convert('I;16') if mode == 'I;16' else im.convert(mode)).save(b := io.BytesIO(), fmt, **kw)
            made.append((fmt, b.getvalue()))
    return made


# --- damage to files

def flip_bits(b, rng):
    "Single bits, anywhere."
    x = bytearray(b)
    for _ in range(rng.randint(1, 20)): x[rng.randrange(len(x))] ^= 1 << rng.randrange(8)
    return bytes(x)


def edit_header(b, rng):
    "Bytes near the beginning, which hold sizes, offsets and kinds."
    x = bytearray(b)
    for _ in range(rng.randint(1, 4)): x[rng.randrange(min(len(x), 120))] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
    return bytes(x)


def splice(b, rng):
    "Only the first bytes, or a piece cut out, doubled, or overwritten by another piece."
    i, j = sorted(rng.randrange(len(b)+1) for _ in range(2))
    return rng.choice((b[:j], b[:j], b[:i] + b[j:], b[:j] + b[i:], b[:i] + b[i:j][::-1] + b[j:], b + b[i:j]))


def swell(b, rng):
    "A size of 100 megapixels or more where the format keeps it."
    w, h = rng.choice(((10_000, 10_000), (20_000, 20_000), (65_535, 65_535), (1, 100_000_000), (2**31-1, 2**31-1)))
    x, short = bytearray(b), (min(w, 65_535), min(h, 65_535))
    if b[:4] == b'\x89PNG':
        x[16:24] = struct.pack('>II', w, h)
        x[29:33] = struct.pack('>I', zlib.crc32(x[12:29]))
    elif b[:2] == b'\xff\xd8':
        at = max(b.find(b'\xff\xc0'), b.find(b'\xff\xc2'))
        x[at+5:at+9] = struct.pack('>HH', *short[::-1])
    elif b[:3] == b'GIF': x[6:10] = struct.pack('<HH', *short)
    elif b[:2] == b'BM': x[18:26] = struct.pack('<ii', w, h)
    elif b[:4] == b'RIFF': x[24:30] = struct.pack('<I', min(w, 2**24)-1)[:3] + struct.pack('<I', min(h, 2**24)-1)[:3]
    else: x = x.replace(struct.pack('<HHIHH', 256, 4, 1, 40, 0), struct.pack('<HHII', 256, 4, 1, w)).replace(struct.pack('<HHIHH', 257, 4, 1, 30, 0), struct.pack('<HHII', 257, 4, 1, h))
    return bytes(x)


def no_file(b, rng):
    "What is no file at all."
    return rng.choice((b'', 3.5, 'nowhere.png', 'a\0b', [b], {}, (), dict(bytes=None, path=None), dict(bytes=b, path='x'), dict(bytes=[1]), dict(path='nowhere.jpg'), bytearray(b), memoryview(b), io.BytesIO(b), io.StringIO('text'),
                       Image.new('RGB', (0, 3)), Image.new('F', (3, 3)), Image.new('LAB', (3, 3)), object(), b'\0'*500, rng.randbytes(300), *ODD[:8]))


def picture_case(files, i) -> dict:
    "A row with one damaged picture, sometimes beside a good one."
    rng = random.Random(f'picture {i}')
    fmt, b = rng.choice(files)
    damage = rng.choice((flip_bits, edit_header, splice, splice, swell, no_file))
    return dict(images=[damage(b, rng)] + [b]*(rng.random() < .2), texts=TURNS, source=f'{fmt}, {damage.__name__}')


# --- damage to rows

def row_case(files, i) -> dict:
    "A row with good pictures and one to three mistakes."
    rng = random.Random(f'row {i}')
    texts, images = [dict(t) for t in TURNS], [rng.choice(files)[1]]
    row = dict(images=images, texts=texts, source='rows', row_id=i, **{f'{r}_ratings': [5, 1] for r in RATINGS})
    for _ in range(rng.randint(1, 3)):
        odd, key = rng.choice(ODD), rng.choice(('turn', 'turn', 'texts', 'images', 'images', 'rating', 'rating', 'all ratings', 'missing', 'any', 'any'))
        if key == 'turn': rng.choice(texts)[rng.choice(('user', 'assistant'))] = odd
        if key == 'texts': row['texts'] = rng.choice((odd, [odd], texts + [odd], tuple(texts), texts*40, [t | dict(more=odd) for t in texts], [dict(user='q')], texts[0]))
        if key == 'images': row['images'] = rng.choice((odd, [odd], images + [odd], images[0], [images], dict(bytes=images[0]), tuple(images), images*3, []))
        if key == 'rating': row[f'{rng.choice(RATINGS)}_ratings'] = rng.choice((odd, [odd], [odd]*2, [5, odd], [], [1], [0, 0], [5]*9, (5, 5)))
        if key == 'all ratings': row.update({f'{r}_ratings': rng.choice((None, [], [3], [None, 1], [0, 5])) for r in RATINGS})
        if key == 'missing': row.pop(rng.choice(list(row)))
        if key == 'any': row[rng.choice(('texts', 'texts', 'images', 'source', 'row_id', 'more'))] = odd
    return row


# --- the run

def one(data, i) -> str:
    "'kept', or why a case was dropped; planning drops nothing that loading keeps, and what is kept is whole."
    try: plan = data.plan_row(read_row(data.rows, i))
    except Dropped: plan = None
    try: sample = data.load_row(read_row(data.rows, i))
    except Dropped as d:
        assert d.reason in REASONS and (d.detail or d.reason == 'no_turns') and (plan is None or d.reason == 'unreadable_image'), d
        return d.reason
    assert (plan.tokens, plan.images, plan.tiles) == (len(sample['input_ids']), len(sample['images']), sum(map(len, sample['images']))) and len(sample['labels']) == len(sample['input_ids']) < data.max_sample_length
    assert (sample['input_ids'] == data.tokenizer.image_token_id).sum() == plan.tiles*data.mp_image_token_length
    assert all(t.dtype == torch.uint8 and t.shape[1:] == (3, 16, 16) for t in sample['images'])
    return 'kept'


def work(data, now, results):
    "All cases, in a process of their own: `now` tells which one runs."
    warnings.simplefilter('ignore', UserWarning)  # PIL tells of damage that it gets over
    logging.disable(logging.ERROR)
    counts, failures = Counter(), []
    for i in range(len(data)):
        now.value = i
        try: counts[one(data, i)] += 1
        except Exception: failures.append(f'case {i}, {data.rows[i]!r:.90}:\n{traceback.format_exc(limit=-3)}')  # any other is what is looked for
    results.send((counts, failures))


@pytest.mark.skipif(sys.platform == 'win32', reason='needs fork')
def test_nothing_but_drops(one_thread):
    "A case that crashes or hangs takes only its process along."
    cfg, files, fork = VLMConfig(), sources(), mp.get_context('fork')
    tokenizer = train_tokenizer(['What is it? A disc. Sure? Yes.'], 300, cfg.vlm_extra_tokens, cfg.lm_chat_template)
    rows = [*(picture_case(files, i) for i in range(PICTURES)), *(row_case(files, i) for i in range(ROWS))]
    data = VQADataset(rows, tokenizer, get_image_processor(32, 16), 4, max_sample_length=400, max_images_per_example=2)
    (results, sender), now = fork.Pipe(duplex=False), fork.Value('q', -1)
    worker = fork.Process(target=work, args=(data, now, sender), daemon=True)
    worker.start()
    sender.close()
    assert results.poll(PATIENCE), f'case {now.value} hangs: {rows[now.value]!r:.90}'
    try: counts, failures = results.recv()
    except EOFError: pytest.fail(f'case {now.value} ended the process: {rows[now.value]!r:.90}')
    assert not failures, f'{len(failures)} cases raise something else:\n' + '\n'.join(failures[:20])
    assert sum(counts.values()) == PICTURES + ROWS == 2000
    assert set(counts) == REASONS | {'kept'} and min(counts['kept'], counts['unreadable_image']) > 300, counts
