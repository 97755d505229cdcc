"2,000 damaged pictures and rows go through the data set: each is a sample or is dropped with a reason, and nothing else happens."
import io
import logging
import multiprocessing as mp
import random
import struct
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter

import pytest
import torch
from PIL import Image, ImageDraw

from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.data.dataset import RATINGS, Dropped, VQADataset
from nanovlm_nb.data.images import get_image_processor
from nanovlm_nb.core.tokenizer import train_tokenizer

PICTURES, ROWS, BATCHES, PATIENCE = 1500, 500, 2, 60  # cases of both kinds, processes, seconds for one case
REASONS = {'no_turns', 'bad_row', 'ratings', 'too_many_images', 'unreadable_image', 'too_long'}


def encode(im, fmt='PNG', **kw) -> bytes:
    "A picture as a file."
    b = io.BytesIO()
    im.save(b, fmt, **kw)
    return b.getvalue()


def sources() -> list[tuple[str, bytes]]:
    "Small files of six formats in several modes, some with several frames, EXIF data or text."
    im = Image.new('RGB', (40, 30), 'navy')
    ImageDraw.Draw(im).ellipse((5, 5, 30, 25), fill='gold')
    exif = Image.Exif()
    exif[0x0112], exif[0x010f], exif[0x9003] = 6, 'maker', '2020:01:01 00:00:00'
    frames = dict(save_all=True, append_images=[im.rotate(90), im.rotate(180)])
    made = {'JPEG': [(m, kw) for m in ('RGB', 'L', 'CMYK') for kw in (dict(), dict(exif=exif), dict(progressive=True))],
            'PNG': [(m, kw) for m in ('RGB', 'RGBA', 'P', 'LA', 'L', '1', 'I;16') for kw in (dict(), dict(exif=exif))] + [('RGB', frames)],
            'GIF': [('P', {}), ('L', {}), ('P', frames)], 'WEBP': [('RGB', {}), ('RGBA', dict(lossless=True)), ('RGB', dict(exif=exif)), ('RGB', frames)],
            'TIFF': [('RGB', {}), ('L', {}), ('CMYK', {}), ('1', dict(compression='group4')), ('RGB', dict(compression='tiff_lzw')), ('RGB', dict(exif=exif)), ('F', {})],
            'BMP': [('RGB', {}), ('L', {}), ('P', {}), ('1', {})]}
    return [(fmt, encode(im.convert(mode) if mode != 'I;16' else im.convert('L').convert('I').convert('I;16'), fmt, **kw)) for fmt, many in made.items() for mode, kw in many]


# --- damage to files

def cut(b, rng):
    "Only the first bytes."
    return b[:rng.randrange(len(b))]


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
    "A piece cut out, doubled, or overwritten by another piece."
    i, j = sorted(rng.randrange(len(b)+1) for _ in range(2))
    return rng.choice((b[:i] + b[j:], b[:j] + b[i:], b[:i] + b[i:j][::-1] + b[j:], b + b[i:j]))


def swell(b, rng):
    "A size of 100 megapixels or more where the format keeps it."
    w, h = rng.choice(((10_000, 10_000), (20_000, 20_000), (65_535, 65_535), (1, 100_000_000), (2**31-1, 2**31-1)))
    x = bytearray(b)
    if b[:4] == b'\x89PNG':
        x[16:24] = struct.pack('>II', w, h)
        x[29:33] = struct.pack('>I', zlib.crc32(x[12:29]))
    elif b[:2] == b'\xff\xd8':
        at = max(b.find(b'\xff\xc0'), b.find(b'\xff\xc2'))
        x[at+5:at+9] = struct.pack('>HH', min(h, 65_535), min(w, 65_535))
    elif b[:3] == b'GIF': x[6:10] = struct.pack('<HH', min(w, 65_535), min(h, 65_535))
    elif b[:2] == b'BM': x[18:26] = struct.pack('<ii', w, h)
    elif b[:4] == b'RIFF': x[24:30] = struct.pack('<I', min(w, 2**24)-1)[:3] + struct.pack('<I', min(h, 2**24)-1)[:3]
    else: x = x.replace(struct.pack('<HHIHH', 256, 4, 1, 40, 0), struct.pack('<HHII', 256, 4, 1, w)).replace(struct.pack('<HHIHH', 257, 4, 1, 30, 0), struct.pack('<HHII', 257, 4, 1, h))
    return bytes(x)


def no_file(b, rng):
    "What is no file at all."
    return rng.choice((b'', None, 0, 3.5, True, 'nowhere.png', '', 'a\0b', [b], [], {}, (), dict(bytes=None, path=None), dict(bytes=b, path='x'), dict(bytes=[1]), dict(path='nowhere.jpg'),
                       bytearray(b), memoryview(b), io.BytesIO(b), io.StringIO('text'), Image.new('RGB', (0, 3)), Image.new('F', (3, 3)), Image.new('LAB', (3, 3)), object(), b'\0'*500, rng.randbytes(300)))


DAMAGE = (cut, flip_bits, edit_header, splice, swell, no_file)
TURNS = [dict(user='What is it?', assistant='A disc.'), dict(user='Sure?', assistant='Yes.')]


def picture_case(files, i) -> tuple[str, dict]:
    "What was done, and a row with one damaged picture, sometimes beside a good one."
    rng = random.Random(f'picture {i}')
    fmt, b = rng.choice(files)
    damage = rng.choice(DAMAGE)
    images = [damage(b, rng)] + [b]*(rng.random() < .2)
    return f'{damage.__name__} {fmt}', dict(images=images, texts=TURNS, source=fmt)


# --- damage to rows

ODD = (None, [], {}, '', 'text', 0, 7, -1.5, True, float('nan'), [None], [[]], ['text'], [1, 2], [{}], {'user': 'q'}, b'bytes', 'a\ud800b', 'x'*5000, ('a', 'b'))


def change(row, rng) -> str:
    "Damage a row in place, and say what was done."
    key = rng.choice(('texts', 'turn', 'turn', 'turns', 'images', 'images', 'rating', 'rating', 'ratings', 'source', 'row_id', 'missing', 'more'))
    odd = rng.choice(ODD)
    texts, images = row['texts'], row['images']
    if key == 'turn': rng.choice(texts)[rng.choice(('user', 'assistant'))] = odd
    elif key == 'turns': row['texts'] = rng.choice(([odd], texts + [odd], tuple(texts), texts*40, [t | dict(more=odd) for t in texts], [dict(user='q')], texts[0]))
    elif key == 'images': row['images'] = rng.choice((odd, [odd], images + [odd], images[0], [images], dict(bytes=images[0]), tuple(images), images*3, []))
    elif key == 'rating': row[f'{rng.choice(RATINGS)}_ratings'] = rng.choice((odd, [odd], [odd]*2, [5, odd], [], [1], [0, 0], [5]*9, (5, 5)))
    elif key == 'ratings': row.update({f'{r}_ratings': rng.choice((None, [], [3], [None, 1], [0, 5])) for r in RATINGS})
    elif key == 'missing': row.pop(gone := rng.choice(list(row))); key = f'no {gone}'
    else: row[key] = odd
    return f'{key}, {odd!r:.30}'


def intact(row) -> bool:
    "Are there turns and pictures left that could be damaged further?"
    texts, images = row.get('texts'), row.get('images')
    return isinstance(texts, list) and texts != [] and all(isinstance(t, dict) for t in texts) and isinstance(images, list) and images != []


def row_case(files, i) -> tuple[str, dict]:
    "What was done, and a row with good pictures and one to three mistakes."
    rng = random.Random(f'row {i}')
    row = dict(images=[rng.choice(files)[1]], texts=[dict(t) for t in TURNS], source='rows', row_id=i, **{f'{r}_ratings': [5, 1] for r in RATINGS})
    done = []
    for _ in range(rng.randint(1, 3)):
        if intact(row): done.append(change(row, rng))
    return '; '.join(done), row


# --- the run

def samples(files, tokenizer):
    "The cases as a data set, and what was done to each."
    done, rows = zip(*([picture_case(files, i) for i in range(PICTURES)] + [row_case(files, i) for i in range(ROWS)]))
    return done, VQADataset(list(rows), tokenizer, get_image_processor(32, 16), 4, max_sample_length=400, max_images_per_example=2)


def check(sample, data, planned):
    "A sample that was kept is whole: as long as planned, with a placeholder for every part of its tiles."
    tiles = sum(len(t) for t in sample['images'])
    assert planned == (len(sample['input_ids']), len(sample['images']), tiles) and len(sample['labels']) == len(sample['input_ids']) < data.max_sample_length
    assert (sample['input_ids'] == data.tokenizer.image_token_id).sum() == tiles*data.mp_image_token_length
    assert all(t.dtype == torch.uint8 and t.shape[1:] == (3, 16, 16) for t in sample['images'])


def one(data, i) -> str:
    "'kept', or why a case was dropped; planning must not drop what loading keeps."
    planned = data.plan(i)
    try: sample = data.load(i)
    except Dropped as d:
        assert d.reason in REASONS and (d.detail or d.reason == 'no_turns') and (planned is None or d.reason == 'unreadable_image'), d
        return d.reason
    check(sample, data, planned)
    return 'kept'


def work(data, done, first, now, results):
    "Every `BATCHES`-th case, in a process of its own: `now` tells which one runs."
    warnings.simplefilter('ignore', UserWarning)  # PIL tells of damage that it gets over
    logging.disable(logging.ERROR)
    counts, failures = Counter(), []
    for i in range(first, len(data), BATCHES):
        now[:] = i, int(time.monotonic())
        try: counts[one(data, i)] += 1
        except Exception: failures.append(f'case {i}, {done[i]}:\n{traceback.format_exc(limit=-3)}')  # any other is what is looked for
    now[0] = -1
    results.put((counts, failures))


@pytest.fixture(scope='module')
def tokenizer():
    "A small tokenizer with the default extra tokens and template."
    cfg = VLMConfig()
    return train_tokenizer(['What is it? A disc. Sure? Yes.'], 300, cfg.vlm_extra_tokens, cfg.lm_chat_template)


@pytest.mark.skipif(sys.platform == 'win32', reason='needs fork')
def test_nothing_but_drops(tokenizer, one_thread):
    "All cases, in processes that may crash or hang without taking the tests along."
    done, data = samples(sources(), tokenizer)
    fork = mp.get_context('fork')
    results, nows = fork.Queue(), [fork.Array('q', [-1, int(time.monotonic())]) for _ in range(BATCHES)]
    workers = [fork.Process(target=work, args=(data, done, k, now, results), daemon=True) for k, now in enumerate(nows)]
    for w in workers: w.start()
    found = []
    while len(found) < BATCHES:
        try: found.append(results.get(timeout=1))
        except mp.queues.Empty: pass
        for w, (i, since) in zip(workers, nows):
            assert w.exitcode in (None, 0), f'case {i} ended the process with {w.exitcode}: {done[i]}'
            assert i < 0 or time.monotonic() - since < PATIENCE, f'case {i} hangs: {done[i]}'
    counts, failures = sum((c for c, _ in found), Counter()), [f for _, many in found for f in many]
    assert not failures, f'{len(failures)} cases raise something else:\n' + '\n'.join(failures[:20])
    assert sum(counts.values()) == PICTURES + ROWS == 2000
    assert set(counts) == REASONS | {'kept'} and min(counts['kept'], counts['unreadable_image']) > 300, counts
