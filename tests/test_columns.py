"Data sets as people publish them, and files as programs write them: no picture, option, caption or turn is left aside in silence."

import base64
import csv
import io
import json
import logging
import os
import subprocess
import sys
import tarfile

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from nanovlm_nb.core.config import tiny
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data.drops import Dropped, Drops
from nanovlm_nb.data.rows import UnusedColumn, columns_of, unread_of
from nanovlm_nb.data.samples import to_row
from nanovlm_nb.data.images import UnreadableImage, image_size, open_image
from nanovlm_nb.data.files import load_configs, rename, text_rows, unread_columns
from nanovlm_nb.data.loader import load_sources

N = 4
SIDE = 16


def lines_of(path, columns=()):
    "The usable rows of files of lines, and what is left out."
    drops = Drops()
    kept = []
    for i, row in enumerate(text_rows(path, columns=columns)):
        checked = to_row(row, i, marks=True)
        drops.add(checked) if isinstance(checked, Dropped) else kept.append(row)
    return kept, drops


def picture(i: int = 0) -> Image.Image:
    return Image.new('RGB', (SIDE, SIDE), (37 * i, 91 * i % 256, 90))


def encoded(i: int = 0, kind: str = 'PNG') -> bytes:
    picture(i).save(file := io.BytesIO(), kind)
    return file.getvalue()


def save(folder, *names: str) -> None:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(folder / name)


def write_lines(file, rows: list[dict]) -> None:
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def write_tar(file, members: list[tuple[str, bytes]], mode: str = 'w') -> None:
    with tarfile.open(file, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def rows_of(folder, stream: bool, **changes) -> list:
    "What a run would read: (number of pictures that can be opened, turns), or what is said of a row that is left out."
    _, cfg = tiny(
        train_dataset_path=str(folder),
        train_dataset_name=['default'],
        stream_dataset=stream,
        data_cutoff_idx=None,
        val_size=0,
        num_workers=0,
        **changes,
    )
    found = []
    for _, row in load_sources(cfg)[0].rows_of(0, 1, 0):
        if isinstance(row, Dropped):
            found.append(row.detail)
        else:
            found.append(
                (
                    sum(image_size(p) == (SIDE, SIDE) for p in row['images']),
                    [(t['user'], t['assistant']) for t in row['texts']],
                )
            )
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    "No name may be found from the working directory."
    (tmp_path / 'cwd').mkdir()
    monkeypatch.chdir(tmp_path / 'cwd')


ASKED = dict(question='What?', answer='a card')
PLAIN = [('What?', 'a card')]
CAPTIONED = [
    ('Describe the picture.', caption) for caption in ('one card', 'a card', 'the card')
]
CHOSEN = [('What?\nA. a dog\nB. a card', 'B. a card')]
CAPTIONS = ['one card', 'a card', 'the card']
HUB = dict(  # as on the hub: what a row has beside its picture; its turns
    vqav2=(
        lambda im: dict(
            image=im,
            question='What?',
            multiple_choice_answer='a card',
            answers=[dict(answer='a card', answer_confidence='yes', answer_id=1)] * 3,
            image_id=7,
        ),
        PLAIN,
    ),
    okvqa=(
        lambda im: dict(
            image=im, question='What?', answers=['a card', 'a cat', 'a card']
        ),
        PLAIN,
    ),
    textvqa=(
        lambda im: dict(
            image=im,
            question='What?',
            answers=['a card'] * 3,
            flickr_original_url='https://x.org/1_o.jpg',
            ocr_tokens=['a.png', 'b'],
            image_id='ab',
        ),
        PLAIN,
    ),
    chartqa=(
        lambda im: dict(image=im, query='What?', label=['a card'], human_or_machine=0),
        PLAIN,
    ),
    photo=(lambda im: dict(photo=im, id='1.jpg', weight=0.5, **ASKED), PLAIN),
    flickr30k=(
        lambda im: dict(
            image=im, caption=CAPTIONS, sentids=['1', '2', '3'], filename='1.jpg'
        ),
        CAPTIONED,
    ),
    nocaps=(
        lambda im: dict(
            image=im,
            image_coco_url='https://x.org/1.jpg',
            image_file_name='1.jpg',
            annotations_captions=CAPTIONS,
        ),
        CAPTIONED,
    ),
    flickr8k=(
        lambda im: dict(
            image=im, caption_0='one card', caption_1='a card', caption_2='the card'
        ),
        CAPTIONED,
    ),
    scienceqa=(
        lambda im: dict(
            image=im,
            question='What?',
            choices=['a dog', 'a card'],
            answer=1,
            hint='',
            lecture='Cards ...',
            solution='It is.',
        ),
        CHOSEN,
    ),
    aokvqa=(
        lambda im: dict(
            image=im,
            question='What?',
            choices=['a dog', 'a card'],
            correct_choice_idx=1,
            direct_answers="['card', 'card']",
        ),
        CHOSEN,
    ),
    mmmu=(
        lambda im: dict(
            image_1=im,
            image_2=None,
            question='What?',
            options="['a dog', 'a card']",
            answer='B',
            img_type="['Photo']",
        ),
        CHOSEN,
    ),
    ai2d=(
        lambda im: dict(
            image=im, question='What?', options=['a dog', 'a card'], answer='1'
        ),
        CHOSEN,
    ),
    seed=(
        lambda im: dict(
            image=[im],
            question='What?',
            choice_a='a dog',
            choice_b='a card',
            choice_c=None,
            answer='B',
        ),
        CHOSEN,
    ),
    hint=(
        lambda im: dict(image=im, hint='Look.', **ASKED),
        [('Look.\n\nWhat?', 'a card')],
    ),
    pairs=(
        lambda im: dict(
            image=im,
            qa_pairs=[dict(question='q', answer='a'), dict(question='r', answer='b')],
        ),
        [('q', 'a'), ('r', 'b')],
    ),
    lists=(
        lambda im: dict(image=im, questions=['q', 'r'], answers=['a', 'b']),
        [('q', 'a'), ('r', 'b')],
    ),
)


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('name', HUB)
def test_a_table_as_on_the_hub(tmp_path, name, stream):
    row, turns = HUB[name]
    datasets.Dataset.from_list([row(picture(i)) for i in range(N)]).to_parquet(
        tmp_path / 'd' / 'train-00000.parquet'
    )
    assert rows_of(tmp_path / 'd', stream) == [(1, turns)] * N


def mmbench(folder):
    with open(folder / 'dev.tsv', 'w', newline='') as f:
        table = csv.writer(f, delimiter='\t')
        table.writerow(
            'index image question hint A B C D answer category source'.split()
        )
        for i in range(N):
            table.writerow(
                [
                    i,
                    base64.b64encode(encoded(i)).decode(),
                    'What?',
                    '',
                    'a dog',
                    'a card',
                    '',
                    '',
                    'B',
                    'x',
                    'y',
                ]
            )


def two_columns(folder):
    save(folder, *[f'Images/{i}.jpg' for i in range(N)])
    pandas.DataFrame(
        [
            dict(Image=f'Images/{i}.jpg', Question='What?', Answer='a card')
            for i in range(N)
        ]
    ).to_csv(folder / 'data.csv', index=False)


def lists_in_a_table(folder):
    save(folder, '0.jpg', '1.jpg')
    said = [
        {'from': 'human', 'value': '<image>\n<image>\nWhat?'},
        {'from': 'gpt', 'value': 'a card'},
    ]
    pandas.DataFrame([dict(images=['0.jpg', '1.jpg'], conversations=said)] * N).to_csv(
        folder / 'data.csv', index=False
    )


def other_separators(ending, mark):
    def make(folder):
        save(folder, *[f'{i}.png' for i in range(N)])
        (folder / f't{ending}').write_text(
            '\n'.join(
                mark.join(row)
                for row in [
                    ('image', 'question', 'answer'),
                    *[(f'{i}.png', 'What?', 'a card') for i in range(N)],
                ]
            )
        )

    return make


def names_in_parquet(folder):
    save(folder, *[f'images/val2014/{i}.png' for i in range(N)])
    datasets.Dataset.from_list(
        [
            dict(filepath='val2014', filename=f'val2014/{i}.png', **ASKED)
            for i in range(N)
        ]
    ).to_parquet(folder / 'x.parquet')


def structs_in_parquet(folder):
    save(folder, *[f'pictures/{i}.png' for i in range(N)])
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(
            [
                dict(image=dict(bytes=None, path=f'pictures/{i}.png'), **ASKED)
                for i in range(N)
            ]
        ),
        folder / 'x.parquet',
    )


def pairs(folder):
    save(folder, *[f'{i}.png' for i in range(N)])
    for i in range(N):
        (folder / f'{i}.txt').write_text('a card')


def pairs_of_img2dataset(folder):
    save(folder / '00000', *[f'{i:09}.jpg' for i in range(N)])
    for i in range(N):
        (folder / '00000' / f'{i:09}.txt').write_text('a card')
        (folder / '00000' / f'{i:09}.json').write_text(
            json.dumps(dict(url='http://x.org', width=SIDE))
        )


def packed_lines(ending):
    def make(folder):
        save(folder, *[f'images/{i}.png' for i in range(N)])
        with pyarrow.output_stream(
            str(folder / f't.jsonl{ending}'), compression='detect'
        ) as f:
            f.write(
                b''.join(
                    json.dumps(dict(image=f'{i}.png', **ASKED)).encode() + b'\n'
                    for i in range(N)
                )
            )

    return make


def three_splits(folder):
    save(folder, *[f'{i}.png' for i in range(N)])
    for split in ('train', 'test', 'val'):
        write_lines(
            folder / f'my_{split}.jsonl',
            [
                dict(
                    image=f'{i}.png',
                    question='What?',
                    answer='a card' if split == 'train' else split,
                )
                for i in range(N)
            ],
        )


def texts_as_editors_write_them(folder):
    pairs(folder)
    for i in range(N):
        (folder / f'{i}.txt').write_bytes(b'\xef\xbb\xbfa card\r\n')


def one_list_in_an_object(folder):
    save(folder, *[f'{i}.png' for i in range(N)])
    (folder / 'train.json').write_text(
        json.dumps(
            dict(
                dataset_name='x', data=[dict(img=f'{i}.png', **ASKED) for i in range(N)]
            ),
            indent=1,
        )
    )


DESCRIBED = [('Describe the picture.', 'a card')]
WRITTEN = dict(
    mmbench=(mmbench, 1, CHOSEN),
    two_columns=(two_columns, 1, PLAIN),
    lists_in_a_table=(lists_in_a_table, 2, PLAIN),
    names_in_parquet=(names_in_parquet, 1, PLAIN),
    structs_in_parquet=(structs_in_parquet, 1, PLAIN),
    pairs=(pairs, 1, DESCRIBED),
    pairs_of_img2dataset=(pairs_of_img2dataset, 1, DESCRIBED),
    gz=(packed_lines('.gz'), 1, PLAIN),
    zst=(packed_lines('.zst'), 1, PLAIN),
    semicolons=(other_separators('.csv', ';'), 1, PLAIN),
    tabs_in_csv=(other_separators('.csv', '\t'), 1, PLAIN),
    pipes=(other_separators('.csv', '| '), 1, PLAIN),
    three_splits=(three_splits, 1, PLAIN),
    editors=(texts_as_editors_write_them, 1, DESCRIBED),
    one_list_in_an_object=(one_list_in_an_object, 1, PLAIN),
)


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('name', WRITTEN)
def test_files_as_programs_write_them(tmp_path, name, stream):
    make, pictures, turns = WRITTEN[name]
    (tmp_path / 'd').mkdir()
    make(tmp_path / 'd')
    assert rows_of(tmp_path / 'd', stream) == [(pictures, turns)] * N


SAID = json.dumps(ASKED).encode()
ORDERS = dict(
    beside=lambda name, kind: (name, kind),
    pictures_first=lambda name, kind: (kind != 'png', name),
    texts_first=lambda name, kind: (kind == 'png', name),
    backwards=lambda name, kind: (kind, -int(name)),
)


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('mode', ['w', 'w:gz'])
@pytest.mark.parametrize('order', ORDERS)
def test_parts_of_a_sample_need_not_be_neighbours_in_a_tar(
    tmp_path, order, mode, stream
):
    members = sorted(
        ((f'{i:04}', kind) for i in range(8) for kind in ('png', 'json')),
        key=lambda m: ORDERS[order](*m),
    )
    write_tar(
        file := tmp_path / f"a.tar{mode[1:].replace(':', '.')}",
        [
            (f'{name}.{kind}', encoded(int(name)) if kind == 'png' else SAID)
            for name, kind in members
        ],
        mode,
    )
    assert rows_of(file, stream) == [(1, PLAIN)] * 8


def test_a_position_in_such_a_tar_is_exact(tmp_path):
    write_tar(
        file := tmp_path / 'a.tar',
        [
            *((f'{i}.png', encoded(i)) for i in range(40)),
            *((f'{i}.txt', str(i).encode()) for i in reversed(range(40))),
        ],
    )
    _, cfg = tiny(
        train_dataset_path=str(file),
        stream_dataset=True,
        data_cutoff_idx=None,
        val_size=5,
        num_workers=0,
    )
    train, val = load_sources(cfg)

    def said(source, *args):
        return [(at, row['texts'][0]['assistant']) for at, row in source.rows_of(*args)]

    assert sorted(
        int(text) for source in (train, val) for _, text in said(source, 0, 1, 0)
    ) == [*range(40)]
    for lane in range(3):
        whole = said(train, lane, 3, 0)
        for k in range(len(whole)):
            assert said(train, lane, 3, 0, whole[k][0]) == whole[k + 1 :]


@pytest.mark.parametrize('stream', [False, True])
def test_names_with_dots_and_second_pictures_in_a_tar(tmp_path, stream):
    write_tar(
        dots := tmp_path / 'dots.tar',
        [
            (f'1.2.840.{i}.{kind}', data)
            for i in range(N)
            for kind, data in (('png', encoded(i)), ('txt', b'a card'))
        ],
    )
    assert rows_of(dots, stream) == [(1, DESCRIBED)] * N
    write_tar(
        numbered := tmp_path / 'numbered.tar',
        [
            (f'{i}.{kind}', data)
            for i in range(N)
            for kind, data in (
                ('1.jpg', encoded(1, 'JPEG')),
                ('0.jpg', encoded(0, 'JPEG')),
                ('txt', b'a card'),
            )
        ],
    )
    assert rows_of(numbered, stream) == [(2, DESCRIBED)] * N
    write_tar(
        mask := tmp_path / 'mask.tar',
        [
            (f'{i}.{kind}', data)
            for i in range(N)
            for kind, data in (
                ('jpg', encoded(i, 'JPEG')),
                ('mask.png', encoded(9)),
                ('txt', b'a card'),
            )
        ],
    )
    with pytest.raises(UnusedColumn, match='`mask.png` may hold pictures beside `jpg`'):
        rows_of(mask, stream)
    assert rows_of(mask, stream, columns=['image=jpg']) == [(1, DESCRIBED)] * N


@pytest.mark.parametrize('stream', [False, True])
def test_a_cut_tar_makes_no_text_of_what_lost_its_picture(tmp_path, stream):
    write_tar(
        file := tmp_path / 'a.tar',
        [
            *((f'{i}.txt', b'a card') for i in range(8)),
            *((f'{i}.png', encoded(i)) for i in range(8)),
        ],
    )
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.find(b'5.png') + 520])
    if stream:
        assert (
            rows_of(file, True)[:-1] == [(1, DESCRIBED)] * 5
            and 'unexpected end of data' in rows_of(file, True)[-1]
        )
    else:
        with pytest.raises(UsageError, match='unexpected end of data'):
            rows_of(file, False)


def test_a_sparse_member_and_pipes_cost_themselves(tmp_path):
    (tmp_path / 's').mkdir()
    os.truncate(os.open(tmp_path / 's' / '1.png', os.O_CREAT | os.O_RDWR), 6 * 2**30)
    save(tmp_path / 's', '2.png')
    for name in ('1.txt', '2.txt'):
        (tmp_path / 's' / name).write_text('a card')
    subprocess.run(
        [
            'tar',
            '--sparse',
            '-cf',
            tmp_path / 's.tar',
            '1.png',
            '1.txt',
            '2.png',
            '2.txt',
        ],
        cwd=tmp_path / 's',
        check=True,
    )
    assert (tmp_path / 's.tar').stat().st_size < 30_000
    for stream in (False, True):
        sparse, plain = rows_of(tmp_path / 's.tar', stream)
        assert 'is sparse' in sparse and plain == (1, DESCRIBED)
    (tmp_path / 'd').mkdir()
    for name in ('p.png', 'x.jsonl', 'y.tar'):
        os.mkfifo(tmp_path / 'd' / name)
    with pytest.raises(UnreadableImage, match='is a pipe or a device'):
        open_image(tmp_path / 'd' / 'p.png')
    write_lines(
        tmp_path / 'd' / 't.jsonl',
        [dict(image=None, **ASKED), dict(image='p.png', **ASKED)],
    )
    rows, drops = lines_of(tmp_path / 'd')
    assert len(rows) == 1 and drops.reasons == {'t/2': 'missing_image'}


PNG = b'\x89PNG'
SPOKEN = [{'from': 'human', 'value': 'q'}, {'from': 'gpt', 'value': 'a'}]


@pytest.mark.parametrize(
    'name, value',
    [
        ('imgs', ['a.png']),
        ('img', 'a.png'),
        ('url', 'http://x.org/a.png?w=5'),
        ('pic', dict(bytes=PNG, path=None)),
        ('film', [np.zeros((2, 2, 3))]),
        ('media', picture()),
        ('data', base64.b64encode(encoded()).decode()),
        ('left_1', PNG),
        ('file', dict(bytes=None, path='a.png')),
    ],
)
def test_a_picture_column_of_any_name(name, value):
    assert columns_of({name: value, 'id': '1.png', **ASKED})['images'] == (name,)
    for other in (dict(images=[]), dict(image=PNG), dict(pixels=PNG)):
        if name not in (
            'imgs',
            'img',
            'url',
            'file',
        ):  # those name pictures that may not be there
            with pytest.raises(UnusedColumn, match='may hold pictures beside'):
                columns_of({name: value, **other, **ASKED})
    assert columns_of({name: value, 'image': 'a.png', **ASKED}, chosen=True)[
        'images'
    ] == ('image',)


def test_what_is_no_second_picture(tmp_path):
    save(tmp_path, 'b.jpg')
    for row in (
        dict(image=dict(bytes=PNG, path='a.png'), file_name='a.png'),
        dict(image='x/a.png', path='a.png', url='http://x.org/a.png'),
        dict(image=PNG, filename='b.jpg'),
        dict(image='a.png', id='b.jpg'),
        dict(image='a.png', source='b.jpg'),
        dict(image=PNG, sound=b'RIFF1234WAVE', boxes=[[0, 1]], words=['b.jpg', 'or']),
    ):
        assert columns_of(row | ASKED, [str(tmp_path)])['images'] == ('image',)
    with pytest.raises(UnusedColumn, match='`mask` may hold pictures beside `image`'):
        columns_of(dict(image='a.png', mask='b.jpg'), [str(tmp_path)])
    with pytest.raises(UnusedColumn, match='`image_id` may hold pictures'):
        columns_of(dict(image_id=7, **ASKED))
    for row in (
        dict(chosen=SPOKEN, rejected=SPOKEN),
        dict(texts=SPOKEN, dialogue=SPOKEN),
        dict(dialogue=json.dumps(SPOKEN), **ASKED),
    ):
        with pytest.raises(UnusedColumn, match='may hold a conversation'):
            columns_of(row)
    assert columns_of(dict(dialogue=json.dumps(SPOKEN)))['texts'] == ('dialogue',)
    seen = dict(
        images=[PNG],
        texts=SPOKEN,
        relevance_ratings=[3],
        image_id=7,
        url='a.png',
        boxes=[0.1, 0.2],
        none=[],
    )
    assert unread_of(seen, columns_of(seen)) == ['image_id', 'url', 'boxes']


@pytest.mark.parametrize('stream', [False, True])
def test_two_picture_columns_are_refused_or_named(tmp_path, stream):
    datasets.Dataset.from_list(
        [dict(left=picture(), right=picture(1), **ASKED)] * N
    ).to_parquet(tmp_path / 'd' / 'x.parquet')
    with pytest.raises(
        UnusedColumn,
        match='`right` may hold pictures beside `left`.*in columns, as `image=right`',
    ):
        rows_of(tmp_path / 'd', stream)
    assert rows_of(tmp_path / 'd', stream, columns=['image=left']) == [(1, PLAIN)] * N
    assert (
        rows_of(tmp_path / 'd', stream, columns=['image=right', 'image=left'])
        == [(2, PLAIN)] * N
    )


@pytest.mark.parametrize('stream', [False, True])
def test_a_named_column_takes_the_place_of_its_kind(tmp_path, stream):
    rows = [
        dict(image=picture(), question='short', question_long='What?', answer='a card')
    ] * N
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / 'd' / 'x.parquet')
    assert (
        rows_of(tmp_path / 'd', stream, columns=['question=question_long'])
        == [(1, PLAIN)] * N
    )
    assert rename(
        dict(question='short', question_long='What?'), ['question=question_long']
    ) == dict(question='What?')


def test_options_that_cannot_be_understood_leave_the_row_out(tmp_path):
    answers = ['B', 'c', 2, '1', 'a cow', '(A)', 'B. a card']
    write_lines(
        tmp_path / 't.jsonl',
        [
            dict(question='What?', options=['a dog', 'a card'], answer=answer)
            for answer in answers
        ]
        + [dict(question='What?', options=['2', '1', '0'], answer='1')],
    )
    rows, drops = lines_of(tmp_path / 't.jsonl')
    assert [row['row_id'] for row in rows] == ['1', '4', '6', '7', '8'] and [
        *drops.reasons
    ] == ['t/2', 't/3', 't/5']
    assert [row['texts'][0]['assistant'] for row in rows] == [
        'B. a card',
        'B. a card',
        'A. a dog',
        'B. a card',
        'B. 1',
    ]
    write_lines(
        tmp_path / 'u.jsonl',
        [dict(question='What?', options=['0', '2', '1'], answer='1')],
    )
    with pytest.raises(
        UsageError, match='may be B or C .*write `choice=answer` into columns'
    ):
        text_rows(tmp_path / 'u.jsonl')
    assert (
        text_rows(tmp_path / 'u.jsonl', columns=['choice=answer'])[0]['texts'][0][
            'assistant'
        ]
        == 'B. 2'
    )


def test_a_name_that_is_not_there_is_guessed(tmp_path):
    save(tmp_path, 'images/Cafe\u0301.png', 'images/deep/b.jpg')
    for name, meant in {
        'Caf\u00e9.png': 'Cafe\u0301.png',
        'deep\\b.jpg': 'deep/b.jpg',
        'deep/B.JPG': 'deep/b.jpg',
        'deep/b.png': 'deep/b.jpg',
        'cafe.png': 'Cafe\u0301.png',
    }.items():
        write_lines(tmp_path / 't.jsonl', [dict(image=name, **ASKED)])
        with pytest.raises(UsageError) as e:
            text_rows(tmp_path / 't.jsonl')
        assert f"is {tmp_path / 'images' / meant} meant?" in str(e.value)
    write_lines(tmp_path / 't.jsonl', [dict(url='http://x.org/b.jpg', **ASKED)])
    with pytest.raises(UsageError, match='is an address: download the pictures first'):
        text_rows(tmp_path / 't.jsonl')


def test_published_annotations_come_with_lines_that_make_rows(tmp_path, caplog):
    "The lines of the log are run, and what they write is read."
    save(tmp_path, 'a.png')
    coco = dict(
        images=[dict(id=9, file_name='a.png', coco_url='http://x.org/a.png')],
        annotations=[
            dict(id=i, image_id=9, caption=caption)
            for i, caption in enumerate(CAPTIONS)
        ],
    )
    (tmp_path / 'captions.json').write_text(json.dumps(coco))
    with pytest.raises(UsageError, match='make one of it with the lines above'):
        text_rows(tmp_path / 'captions.json')
    lines = next(
        r.getMessage() for r in caplog.records if 'json.load' in r.getMessage()
    ).partition(':\n')[2]
    subprocess.run([sys.executable, '-c', lines], cwd=tmp_path, check=True)
    os.remove(tmp_path / 'captions.json')
    assert rows_of(tmp_path, False) == [(1, CAPTIONED)]
    (tmp_path / 'q.json').write_text(
        json.dumps(
            dict(
                data_subtype='train2014',
                questions=[dict(image_id=1, question='q', question_id=3)],
            ),
            indent=1,
        )
    )
    with pytest.raises(UsageError, match='make one of it with the lines above'):
        text_rows(tmp_path / 'q.json')


@pytest.mark.parametrize('kind', ['lines', 'table', 'tar'])
def test_columns_that_nothing_reads_are_named_once(tmp_path, kind, caplog):
    (tmp_path / 'd').mkdir()
    row = dict(weight=0.5, box=[1, 2], **ASKED)
    if kind == 'lines':
        write_lines(tmp_path / 'd' / 't.jsonl', [row] * N)
    elif kind == 'table':
        datasets.Dataset.from_list([row] * N).to_parquet(tmp_path / 'd' / 'x.parquet')
    else:
        write_tar(
            tmp_path / 'd' / 'a.tar',
            [(f'{i}.json', json.dumps(row).encode()) for i in range(N)],
        )
    with caplog.at_level(logging.INFO, 'nanovlm_nb'):
        load_configs(tmp_path / 'd', cache_dir=str(tmp_path / 'cache'), streaming=True)
    assert [
        r.getMessage().partition(': not read: ')[2]
        for r in caplog.records
        if 'not read' in r.getMessage()
    ] == ['box, weight']
    assert unread_columns(tmp_path / 'd', 'default') == {
        'box',
        'weight',
    }  # what `nanovlm check` names


def test_what_nothing_reads_of_messages_is_named(tmp_path):
    said = [
        dict(role='user', content='q'),
        dict(role='assistant', content='a', reasoning_content='because', weight=None),
    ]
    write_lines(tmp_path / 't.jsonl', [dict(messages=said)])
    assert unread_columns(tmp_path / 't.jsonl', 'default') == {
        '`reasoning_content` of messages'
    }


def test_a_stream_under_other_names_is_read_as_its_table(tmp_path):
    "Rows that lack a list beside rows that have one, and a picture that cannot be read, which costs itself; positions are exact."
    rows = [
        dict(
            photo=dict(bytes=encoded(i) if i != 40 else b'junk', path=None),
            q=f'{i}',
            choices=['a dog', 'a card'] if i % 3 else None,
            a='a card',
        )
        for i in range(100)
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / 'x.parquet', row_group_size=40
    )
    named = ['image=photo', 'question=q', 'answer=a', 'options=choices']
    _, cfg = tiny(
        train_dataset_path=str(tmp_path / 'x.parquet'),
        stream_dataset=True,
        data_cutoff_idx=None,
        val_size=0,
        num_workers=0,
        columns=named,
    )
    source = load_sources(cfg)[0]
    streamed = [*source.rows_of(0, 1, 0)]
    said = sorted(
        (
            int(row['texts'][0]['user'].split('\n')[0]),
            row['texts'][0]['assistant'],
            row['images'][0]['bytes'],
        )
        for _, row in streamed
    )
    assert said == [
        (i, 'B. a card' if i % 3 else 'a card', row['photo']['bytes'])
        for i, row in enumerate(rows)
    ]
    for k in (0, 31, 63, 98):
        assert [*source.rows_of(0, 1, 0, streamed[k][0])] == streamed[k + 1 :]


def test_a_text_in_another_encoding_costs_itself(tmp_path):
    (tmp_path / 't.csv').write_bytes(
        'question,answer\nWhat?,a\nWhat?,é\nWhat?,b\n'.encode('latin-1')
    )
    rows, drops = lines_of(tmp_path / 't.csv')
    assert [row['row_id'] for row in rows] == ['1', '3'] and 'no UTF-8' in drops.first[
        'bad_row'
    ]
    for name in ('u.csv', 'u.jsonl'):
        (tmp_path / name).write_bytes('question,answer'.encode('utf-16'))
        with pytest.raises(UsageError, match=f'{name} is UTF-16: save it as UTF-8'):
            text_rows(tmp_path / name)


@pytest.mark.parametrize('stream', [False, True])
def test_captions_of_other_pictures_are_not_mixed(tmp_path, stream):
    datasets.Dataset.from_list(
        [
            dict(
                image_0=picture(),
                image_1=picture(1),
                caption_0='a card',
                caption_1='a dog',
            )
        ]
        * N
    ).to_parquet(tmp_path / 'd' / 'x.parquet')
    assert all(
        'as `image=image_0 answer=caption_0`' in row
        for row in rows_of(tmp_path / 'd', stream)
    )
    assert (
        rows_of(tmp_path / 'd', stream, columns=['image=image_0', 'answer=caption_0'])
        == [(1, [('Describe the picture.', 'a card')])] * N
    )


@pytest.mark.parametrize(
    'row, why',
    [
        (
            dict(
                messages=[
                    dict(
                        role='user',
                        content=[
                            dict(type='image', source=dict(type='base64', data='x')),
                            dict(type='text', text='q'),
                        ],
                    ),
                    dict(role='assistant', content='a'),
                ]
            ),
            'has source: call it image',
        ),
        (
            dict(image=dict(file_name='a.png'), **ASKED),
            "a picture is {'file_name': 'a.png'}",
        ),
        (dict(question='![a card](a.png) What?', answer='a'), 'shows a.png'),
        (dict(question='<img width=5 src="a.png"/> What?', answer='a'), 'shows a.png'),
    ],
)
def test_a_picture_that_is_shown_in_another_way_is_not_lost(tmp_path, row, why):
    save(tmp_path, 'a.png')
    write_lines(tmp_path / 't.jsonl', [row])
    with pytest.raises(UsageError) as refused:
        text_rows(tmp_path / 't.jsonl')
    assert why in str(refused.value)


def test_a_stream_of_many_files_takes_no_descriptor_for_each(tmp_path):
    table = pyarrow.Table.from_pylist([dict(texts=[dict(user='q', assistant='a')])])
    for k in range(3):
        (tmp_path / 'd' / f'c{k}').mkdir(parents=True)
        for i in range(120):
            pyarrow.parquet.write_table(
                table, tmp_path / 'd' / f'c{k}' / f'{i}.parquet'
            )
    code = (
        'import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); from nanovlm_nb.data.files import load_configs; from nanovlm_nb.data.sources import StreamSource;'
        f'source = StreamSource(load_configs({str(tmp_path / "d")!r}, ["all"], streaming=True)); print(len(source.shares), sum(1 for _ in source.rows_of(0, 1, 0)))'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stdout.split() == ['360', '360'], done.stderr
