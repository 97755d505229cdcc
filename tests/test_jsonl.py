"JSON lines with real pictures: rows for the packed trainer, items of fixed length, workers, ranks, and a model that trains on them."

import json
import logging
import multiprocessing
import os
import random
import re
import time

import datasets
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import nanovlm_nb.data.files as load
from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data.drops import Dropped, Drops
from nanovlm_nb.data.samples import VQADataset, to_row
from nanovlm_nb.data.prompts import MARK, number_marks, place_pictures
from nanovlm_nb.data.images import get_image_processor
from nanovlm_nb.compat.padded import VLMDataset, collate_items, jsonl_loader
from nanovlm_nb.data.files import text_rows
from nanovlm_nb.data.sources import MapSource, Parts, StreamSource
from nanovlm_nb.data.packing import pack
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.model.vlm import VisionLanguageModel

pytestmark = pytest.mark.usefixtures('one_thread')
SIDE = 32
FEATURES = 4  # pixels of a tile, image tokens of one
RUN = '<|global_image|>' + '<|image|>' * FEATURES


def said(*turns):
    "Messages of the user and the assistant by turns."
    return [
        dict(role=r, content=c)
        for r, c in zip(('user', 'assistant') * len(turns), turns)
    ]


def write(path, lines):
    "A file of lines: objects, or text as it is."
    path.write_text(
        '\n'.join(x if isinstance(x, str) else json.dumps(x) for x in lines) + '\n',
        encoding='utf-8',
    )
    return path


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "scikit-image's pictures, cropped, in several formats, and nine lines about them."
    data = pytest.importorskip('skimage').data
    folder = tmp_path_factory.mktemp('jsonl')
    (folder / 'images' / 'deep').mkdir(parents=True)
    for name, make in (
        ('cat.jpg', data.chelsea),
        ('coffee.png', data.coffee),
        ('grey.png', data.camera),
        ('deep/astronaut.webp', data.astronaut),
    ):
        Image.fromarray(make()).crop((100, 50, 180, 110)).save(folder / 'images' / name)
    lines = [
        dict(image='cat.jpg', conversations=said('Describe it.\n<image>', 'A cat.')),
        dict(
            image='coffee.png',
            conversations=said(
                '<image>\nWhat is it?', 'Coffee.', 'Hot?', 'I cannot tell.'
            ),
        ),
        dict(
            image='cat.jpg, grey.png',
            conversations=said('Is <image> darker than <image>?', 'No.'),
        ),
        dict(
            image=['deep/astronaut.webp'],
            conversations=said('Who is it?', 'An astronaut, smiling at the camera.'),
        ),
        dict(conversations=said('Say yes.', 'Yes.')),
        dict(image='', conversations=said('Say no.', 'No.')),
        dict(image=None, conversations=said('', '')),
        dict(
            image='grey.png',
            conversations=[
                dict(role='system', content='Be brief.'),
                *said('What is it?', 'A man.'),
            ],
        ),
        dict(
            image='cat.jpg,grey.png',
            conversations=said(
                'Source: <image> Target: <image> What changed?<image>', 'All.'
            ),
        ),
    ]
    write(folder / 'train.jsonl', lines)
    return folder


@pytest.fixture(scope='module')
def cfg():
    "A model as small as it can be, with one tile a picture."
    return VLMConfig(
        vit_hidden_dim=16,
        vit_inter_dim=32,
        vit_patch_size=8,
        vit_img_size=SIDE,
        vit_n_heads=2,
        vit_n_blocks=1,
        mp_pixel_shuffle_factor=2,
        max_img_size=SIDE,
        lm_hidden_dim=32,
        lm_inter_dim=32,
        lm_n_heads=2,
        lm_n_kv_heads=1,
        lm_n_blocks=2,
        lm_base_vocab_size=300,
        vlm_load_backbone_weights=False,
    )


@pytest.fixture(scope='module')
def tokenizer(cfg):
    "300 tokens learned from text that is like the lines."
    texts = [
        'What is it? A man. A cat. Coffee. I cannot tell. Describe it. An astronaut, smiling at the camera. Source: Target: What changed?'
    ] * 2
    tok = train_tokenizer(texts, 300, cfg.vlm_extra_tokens, cfg.lm_chat_template)
    assert tok.image_token_id == cfg.image_token_id
    return tok


# --- lines and rows
def test_rows_train_as_others_do(folder, tokenizer):
    "Samples, plans and ids of VQADataset; joined with rows that hold bytes. A blank answer is none."
    rows = text_rows(folder)
    v = VQADataset(rows, tokenizer, get_image_processor(2 * SIDE, SIDE), FEATURES)
    for i in (0, 1, 2, 3, 4, 5, 7, 8):
        s = v[i]
        p = v.plan_row(to_row(v.rows[i], i))
        assert (p.tokens, p.images, p.tiles) == (
            len(s['input_ids']),
            len(s['images']),
            sum(map(len, s['images'])),
        )
    assert (v[6], v.drops.reasons, v[8]['id']) == (
        None,
        {'train/7': 'no_turns'},
        'train/9',
    )
    both = Parts(
        [
            rows,
            [
                dict(
                    images=[Image.new('RGB', (9, 9))],
                    texts=[dict(user='q', assistant='a')],
                    source='x',
                )
            ],
        ]
    )
    assert [
        len(
            VQADataset(both, tokenizer, get_image_processor(SIDE, SIDE), FEATURES)[i][
                'images'
            ]
        )
        for i in (8, 9)
    ] == [2, 1]


def test_bad_lines_are_named(tmp_path, caplog):
    "Each with its line and reason, the rest kept; byte order mark, CRLF and blank lines are no faults."
    good = json.dumps(dict(conversations=said('世', '界')), ensure_ascii=False)
    bad = [
        '{',
        '[]',
        '7',
        '{}',
        json.dumps(dict(conversations=said('q'))),
        json.dumps(dict(image='none.jpg', conversations=said('q', 'a'))),
        good.replace('世', '\\ud800'),
    ]
    (tmp_path / 'x.jsonl').write_bytes(
        '\r\n'.join(['\ufeff' + good, '', *bad, good]).encode() + b'\n\xff\n'
    )
    for source in (
        MapSource(text_rows(tmp_path), shuffle=False),
        StreamSource(dict(default=text_rows(tmp_path))),
    ):
        drops = Drops()
        kept = {}
        for _, row in source.rows_of(0, 1, 0):
            if isinstance(row, Dropped):
                drops.add(row)
            else:
                kept[row['row_id']] = row['texts']
        assert kept.keys() == {'1', '10'} and kept['10'] == [
            dict(user='世', assistant='界')
        ]
        (missing,) = drops.ids('missing_image')
        assert (
            missing.endswith('x/8') and 'put it there' in drops.first['missing_image']
        )
        assert sorted(int(id.split('/')[-1]) for id in drops.ids('bad_row')) == [
            3,
            4,
            5,
            6,
            7,
            9,
            11,
        ]


def test_pieces(tmp_path, monkeypatch):
    "A table made of pieces is the table made at once."
    file = write(
        tmp_path / 'x.jsonl',
        [
            *(dict(conversations=said(f'q{i}', str(i))) for i in range(10)),
            ' ',
            '',
            '\t{}',
        ],
    )
    whole = load._line_places(file)
    assert whole['number'].to_pylist() == [*range(1, 11), 13]
    for n in (1, 3, 10, 11, 1000):
        monkeypatch.setattr(load, 'PIECE', n)
        assert load._line_places(file) == whole


def test_the_index_of_a_file_is_made_once_and_again_when_it_is_needed(
    tmp_path, monkeypatch
):
    "From the cache, which ranks share; anew when the index is damaged, when the file has changed, and when there is no room."
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    scans = []
    scan = load._line_places
    monkeypatch.setattr(
        load, '_line_places', lambda file: scans.append(file) or scan(file)
    )
    file = write(
        tmp_path / 'x.jsonl', [dict(question=f'{i}?', answer='a') for i in range(5)]
    )

    def asked():
        return [row['texts'][0]['user'] for row in text_rows(file)]

    assert asked() == asked() == [f'{i}?' for i in range(5)] and len(scans) == 1
    (index, _) = sorted((tmp_path / 'cache' / 'nanovlm').iterdir())  # and its lock
    whole = index.read_bytes()
    for damaged in (
        b'',
        whole[:-50],
        b'x' * len(whole),
        whole[:300] + bytes([whole[300] ^ 1]) + whole[301:],
    ):
        index.write_bytes(damaged)
        assert asked() == [f'{i}?' for i in range(5)]
    assert len(scans) == 5 and index.read_bytes() == whole
    write(file, [dict(question='new?', answer='a')])
    load._reading.cache_clear()
    assert asked() == ['new?'] and len(scans) == 6
    monkeypatch.setattr(
        datasets.config, 'HF_DATASETS_CACHE', file
    )  # no folder: nothing can be written
    assert asked() == ['new?'] and len(scans) == 7


def make_index(file, cache, scans, barrier):
    "One of several processes that begin at once: the lines of a file, and a mark for each search."
    datasets.config.HF_DATASETS_CACHE = cache
    find = load._line_places

    def slow(file):
        (scans / str(os.getpid())).touch()
        time.sleep(0.5)  # the others arrive meanwhile
        return find(file)

    load._line_places = slow
    barrier.wait()
    rows = text_rows(file)
    assert [row['row_id'] for row in rows] == ['1', '2', '3']


def test_of_four_processes_one_makes_the_index(tmp_path):
    "They begin at once; one searches, the others wait and map its table."
    file = write(
        tmp_path / 'x.jsonl', [dict(question=f'{i}?', answer='a') for i in range(3)]
    )
    scans = tmp_path / 'scans'
    scans.mkdir()
    context = multiprocessing.get_context('fork')
    barrier = context.Barrier(4)
    given = file, tmp_path / 'cache', scans, barrier
    ranks = [context.Process(target=make_index, args=given) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert len([*scans.iterdir()]) == 1


def test_marks_at_random():
    "Any questions and any number of pictures: a number for each mark that has a picture, and no other character is lost or moved."
    rng = random.Random(0)
    for _ in range(500):
        users = [
            ''.join(
                rng.choice([MARK, MARK, 'a', ' ', '\n', '<image', '?'])
                for _ in range(rng.randint(0, 6))
            )
            for _ in range(rng.randint(1, 3))
        ]
        n = rng.randint(0, 4)
        turns = [dict(user=u, assistant='a') for u in users]
        marks = sum(u.count(MARK) for u in users)
        numbered, spare = number_marks(turns, n)
        found = re.findall(r'<image: (\d)>', ''.join(t['user'] for t in numbered))
        assert found == [str(k) for k in range(min(n, marks))] and spare == max(
            marks - n, 0
        )
        assert [re.sub(r'<image: \d>', '', t['user']) for t in numbered] == [
            u.replace(MARK, '') for u in users
        ]
        if not n:
            continue
        placed = place_pictures(turns, n)
        assert (
            not any(MARK in t['user'] for t in placed)
            and place_pictures(placed, n) == placed
        )
        without = [
            ''.join(re.sub(r'<image: \d+>', '', t['user']).split()) for t in placed
        ]
        assert without == [''.join(u.replace(MARK, '').split()) for u in users]


# --- items


def test_picture_that_would_be_cut(tmp_path, folder, tokenizer):
    "An answer remains, but the second picture is cut in two: the item is left out."
    lines = [
        dict(
            image='cat.jpg,grey.png',
            conversations=said('<image>', 'One.', '<image>', 'Two.'),
        )
    ]
    kw = dict(
        images_path=folder / 'images',
        tokenizer=tokenizer,
        preprocess=get_image_processor(SIDE, SIDE),
        image_special_token=RUN,
    )
    ds = VLMDataset(write(tmp_path / 'x.jsonl', lines), max_length=100, **kw)
    second = (
        ds.encode(to_row(ds.rows[0], 0, marks=True))[0]
        .tolist()
        .index(tokenizer.image_token_id, 20)
    )
    cut = VLMDataset(tmp_path / 'x.jsonl', max_length=second + 2, **kw)
    with pytest.raises(UsageError, match='x/1: of '):
        cut[0]


# --- loaders


@pytest.fixture
def items(tmp_path, folder, tokenizer):
    "Nine lines: seven with a picture, an answer that is cut, and a damaged picture."
    (tmp_path / 'images').mkdir()
    whole = (folder / 'images' / 'cat.jpg').read_bytes()
    (tmp_path / 'images' / 'cat.jpg').write_bytes(whole)
    (tmp_path / 'images' / 'half.jpg').write_bytes(whole[: len(whole) // 2])
    lines = [dict(image='cat.jpg', conversations=said('q', str(i))) for i in range(7)]
    lines += [
        dict(conversations=said('q', 'a' * 200)),
        dict(image='half.jpg', conversations=said('q', 'a')),
    ]
    return VLMDataset(
        write(tmp_path / 'x.jsonl', lines),
        None,
        tokenizer,
        get_image_processor(SIDE, SIDE),
        RUN,
        max_length=60,
    )


@pytest.mark.parametrize(
    'start, workers', [('fork', 2), ('spawn', 1)]
)  # a worker that is spawned imports everything anew
def test_workers(items, start, workers):
    "Workers make the items that this process makes, and name a line that cannot be one."
    want = [items[i] for i in range(8)]
    loader = jsonl_loader(items, 4, shuffle=False, num_workers=workers)
    loader.multiprocessing_context = start
    batches = []
    with pytest.raises(UsageError, match='x/9: '):
        batches.extend(loader)
    assert [len(X) for X, *_ in batches] == [4, 4]
    for k in range(3):
        assert torch.equal(
            torch.cat([b[k] for b in batches]), torch.stack([w[k] for w in want])
        )
    for a, b in zip([p for b in batches for p in b[3]], [w[3] for w in want]):
        assert torch.equal(a, b)


# --- a model


def masked_loss(model, X, Y, loss_mask, pixels):
    "MiniMind-V's loss: every position, then the mask."
    logits, _ = model(X, pixels)
    loss = F.cross_entropy(logits.flatten(0, 1), Y.flatten(), reduction='none')
    return (loss * loss_mask.flatten()).sum() / loss_mask.sum()


def test_model_trains_on_either(folder, tokenizer, cfg):
    "A batch of padded items has the loss of the same samples in a pack, and its gradients; items that are left out change nothing."
    torch.manual_seed(0)
    model = VisionLanguageModel(cfg, load_backbone=False)
    cut = get_image_processor(SIDE, SIDE)
    ds = VLMDataset(folder, None, tokenizer, cut, RUN, max_length=160)
    v = VQADataset(text_rows(folder), tokenizer, cut, FEATURES)
    same = [
        3,
        4,
        5,
        7,
    ]  # lines with an answer and without marks: the two agree on their ids
    X, Y, loss_mask, pixels = collate_items([ds[i] for i in same])
    padded = masked_loss(model, X, Y, loss_mask, pixels)
    grads = torch.autograd.grad(padded, list(model.parameters()), allow_unused=True)
    packed = pack([v[i] for i in same], 400, tokenizer.pad_token_id)
    _, loss = model(
        packed['input_ids'][None],
        [packed['images']],
        targets=packed['labels'][None],
        doc_lens=[packed['doc_lens']],
    )
    assert torch.allclose(padded, loss, atol=1e-5)
    for a, b in zip(
        grads, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    ):
        assert (a is None) == (b is None) and (
            a is None or torch.allclose(a, b, atol=1e-5)
        )
    assert torch.allclose(
        padded,
        model(X, pixels, targets=Y.masked_fill(loss_mask == 0, -100))[1],
        atol=1e-5,
    )
    blank = ds.item(*torch.zeros(2, 0, dtype=torch.long), ds.no_pixels)
    assert torch.allclose(
        padded,
        masked_loss(model, *collate_items([*(ds[i] for i in same), blank])),
        atol=1e-5,
    )
