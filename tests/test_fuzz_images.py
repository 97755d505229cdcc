"Damaged pictures go through the data set: each is a sample or is dropped with a reason, and nothing else happens."

import io
import random
from collections import Counter

import pytest
import torch
from PIL import Image, ImageDraw

from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.data.drops import Dropped
from nanovlm_nb.data.samples import VQADataset, to_row
from nanovlm_nb.data.images import UnreadableImage, get_image_processor, open_image

KINDS = [
    ('JPEG', 'RGB L CMYK', {}),
    ('JPEG', 'RGB', dict(progressive=True)),
    ('PNG', 'RGB RGBA P LA L 1', {}),
    ('GIF', 'P L', {}),
    ('WEBP', 'RGB RGBA', {}),
    ('TIFF', 'RGB L CMYK F', {}),
    ('TIFF', 'RGB', dict(compression='tiff_lzw')),
    ('BMP', 'RGB L P 1', {}),
]


def damaged(b, rng):
    "A file with single bits flipped, or cut."
    if rng.random() < 0.3:
        return b[: rng.randrange(len(b) + 1)]
    x = bytearray(b)
    for _ in range(rng.randint(1, 4)):
        x[rng.randrange(rng.choice((120, len(x)))) % len(x)] ^= 1 << rng.randrange(
            8
        )  # often in the header
    return bytes(x)


@pytest.mark.filterwarnings(
    'ignore::UserWarning'
)  # PIL tells of damage that it gets over
def test_nothing_but_drops(one_thread):
    "Planning drops nothing that loading keeps, and what is kept is whole."
    cfg = VLMConfig()
    rng = random.Random(0)
    files = []
    counts = Counter()
    ImageDraw.Draw(im := Image.new('RGB', (40, 30), 'navy')).ellipse(
        (5, 5, 30, 25), fill='gold'
    )
    for fmt, modes, how in KINDS:
        for mode in modes.split():
            im.convert(mode).save(b := io.BytesIO(), fmt, **how)
            files.append(b.getvalue())
    rows = [
        dict(
            images=[damaged(rng.choice(files), rng)],
            texts=[dict(user='What is it?', assistant='A disc.')],
            source='damaged',
        )
        for _ in range(1000)
    ]
    data = VQADataset(
        rows,
        train_tokenizer(
            ['What is it? A disc.'], 300, cfg.vlm_extra_tokens, cfg.lm_chat_template
        ),
        get_image_processor(32, 16),
        4,
    )
    for i in range(len(rows)):
        try:
            sample = data.load_row(to_row(data.rows[i], i))
        except Dropped as d:
            assert d.reason == 'unreadable_image' and d.detail
            counts['dropped'] += 1
            continue
        plan = data.plan_row(to_row(data.rows[i], i))
        assert (plan.tokens, plan.tiles) == (
            len(sample['input_ids']),
            sum(map(len, sample['images'])),
        )
        assert all(
            t.dtype == torch.uint8 and t.shape[1:] == (3, 16, 16)
            for t in sample['images']
        )
        counts['kept'] += 1
    assert min(counts.values()) > 150, counts


HUGE = io.BytesIO()
Image.new('1', (20000, 20000)).save(HUGE, 'PNG')


@pytest.mark.parametrize(
    'data, said',
    [
        (HUGE.getvalue(), 'Scale it down'),
        (b'\x89PNG\r\n\x1a\n' + bytes(99), 'a damaged picture: copy it again'),
        (b'\xff\xd8\xff\xe0' + bytes(99), 'a damaged picture: copy it again'),
        (b'RIFF\1\2\3\4WEBP' + bytes(99), 'a damaged picture'),
        (b'RIFF\1\2\3\4AVI ' + bytes(99), 'a video'),
        (b'8BPS' + bytes(200), 'unknown, 38 42 50 53'),
    ],
)
def test_what_cannot_be_read_says_what_to_do(data, said):
    with pytest.raises(UnreadableImage) as refused:
        open_image(data)
    assert said in str(refused.value)
