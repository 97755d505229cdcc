"Real pictures through parquet and save_to_disk folders, broken ones skipped, ratings filtered."

import io
import json
import logging
import shutil
from itertools import product
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from nanovlm_nb.core.config import tiny
from nanovlm_nb.core.tokenizer import get_tokenizer
from nanovlm_nb.data.rows import UnusedColumn
from nanovlm_nb.data.samples import to_row
from nanovlm_nb.data.images import image_size, open_image
from nanovlm_nb.data.files import load_configs, local_configs, read_object
from nanovlm_nb.data.loader import load_tokenizer, make_samples
from nanovlm_nb.data.sources import MapSource, is_damage
from nanovlm_nb.uses.classify import load_splits

PHOTOS = (
    'astronaut.png',
    'coffee.png',
    'chelsea.png',
    'camera.png',
    'rocket.jpg',
    'logo.png',
    'horse.png',
)


def load_data(*where, **how):
    "All rows of some configurations, one after the other."
    return datasets.concatenate_datasets(list(load_configs(*where, **how).values()))


@pytest.fixture(scope='module', autouse=True)
def quiet():
    "No progress bars, and no short-cut from earlier runs."
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope='module')
def photos():
    "scikit-image's pictures that come with the package: RGB, grey, RGBA, 1 bit; PNG and JPEG."
    skimage = pytest.importorskip('skimage')
    folder = Path(skimage.__file__).parent / 'data'
    files = [folder / f for f in PHOTOS if (folder / f).exists()]
    assert len(files) >= 4
    return files


@pytest.fixture(scope='module')
def digits():
    "Grey pictures, with labels."
    return [(Image.new('L', (40, 40), y), y) for y in range(40)]


@pytest.fixture(scope='module')
def root(tmp_path_factory, photos, digits):
    "A folder with four configurations: parquet, save_to_disk, a broken parquet, a broken save_to_disk."
    root = tmp_path_factory.mktemp('data')
    rows = [
        dict(
            images=[Image.open(f)],
            texts=[
                dict(user='What is it?', assistant=f.stem),
                dict(user='Sure?', assistant='Yes.'),
            ],
            relevance_ratings=[5, 1],
            image_correspondence_ratings=[5, None],
            visual_dependency_ratings=None,
            formatting_ratings=[4, 4],
            source='photos',
        )
        for f in photos
    ]
    rows.append(rows[0] | dict(images=[Image.open(f) for f in photos[:3]]))
    (root / 'photos').mkdir()
    datasets.Dataset.from_list(rows).to_parquet(
        root / 'photos' / 'train-00000-of-00001.parquet'
    )
    saved = datasets.Dataset.from_list(
        [
            dict(images=[im], texts=[dict(user='Which digit?', assistant=str(y))])
            for im, y in digits
        ]
    )
    saved.save_to_disk(root / 'digits')
    (root / 'broken').mkdir()
    (root / 'broken' / '0.parquet').write_bytes(
        (root / 'photos' / 'train-00000-of-00001.parquet').read_bytes()[:5000]
    )
    shutil.copytree(root / 'digits', root / 'cut')
    arrow = next((root / 'cut').glob('*.arrow'))
    arrow.write_bytes(arrow.read_bytes()[:-400])
    return root


@pytest.fixture
def cache(tmp_path_factory):
    "Where datasets keeps its copy: outside the data."
    return str(tmp_path_factory.mktemp('cache'))


def test_broken_are_named_and_skipped(root, cache, caplog, photos, digits):
    "`all` loads what can be loaded, in order, and warns about the rest by name."
    with caplog.at_level(logging.WARNING, 'nanovlm_nb'):
        data = load_data(root, ['all'], cache_dir=cache)
    assert (
        local_configs(root) == ['broken', 'cut', 'digits', 'photos']
        and len(data) == len(digits) + len(photos) + 1
    )
    assert data['source'][:2] == ['digits', 'digits'] and data['source'][-1] == 'photos'
    skipped = [
        r.getMessage() for r in caplog.records if r.name.startswith('nanovlm_nb')
    ]
    assert ['broken' in skipped[0], 'cut' in skipped[1], len(skipped)] == [
        True,
        True,
        2,
    ]


def test_columns_differ(tmp_path, cache):
    "Raw bytes, text only, and missing ratings go together with pictures."
    import pyarrow as pa
    import pyarrow.parquet as pq

    b = io.BytesIO()
    Image.new('RGB', (9, 9), 'red').save(b, 'PNG')
    texts = [[dict(user='q', assistant='a')]]
    for name, images in (
        ('raw', [[dict(bytes=b.getvalue(), path=None)]]),
        ('none', [[]]),
        ('null', [None]),
    ):
        (tmp_path / name).mkdir()
        pq.write_table(
            pa.table(dict(images=images, texts=texts)), tmp_path / name / '0.parquet'
        )
    (tmp_path / 'text').mkdir()
    pq.write_table(
        pa.table(dict(texts=texts, relevance_ratings=[[3]], more=[1])),
        tmp_path / 'text' / '0.parquet',
    )
    data = load_data(tmp_path, ['all'], cache_dir=cache)
    assert data['source'][:] == ['none', 'null', 'raw', 'text']
    assert data['relevance_ratings'][:] == [None, None, None, [3]]
    assert [len(x or []) for x in data['images']] == [0, 0, 1, 0]


@pytest.mark.parametrize('file', ['{}-00000-of-00001.parquet', '{}/0.parquet'])
def test_splits_stay_apart(tmp_path, digits, cache, file):
    "Files and folders named train and test are splits, not configurations."
    for name, part in (('train', digits[:3]), ('test', digits[3:4])):
        (tmp_path / file.format(name)).parent.mkdir(exist_ok=True)
        datasets.Dataset.from_list(
            [
                dict(images=[im], texts=[dict(user='q', assistant=str(y))])
                for im, y in part
            ]
        ).to_parquet(tmp_path / file.format(name))
    assert [
        len(load_data(tmp_path, split=s, cache_dir=cache)) for s in ('train', 'test')
    ] == [3, 1]


def test_hub_names(monkeypatch, caplog):
    "A hub name goes to load_dataset with each configuration; one of `all` that does not exist is skipped by name, one that was asked for and does not exist, or cannot be reached, is an error."
    calls = []

    def load_dataset(path, name, split, cache_dir):
        calls.append((path, name, split))
        if name == 'gone':
            raise datasets.exceptions.DatasetNotFoundError(
                "Dataset doesn't exist on the Hub"
            )
        if name == 'away':
            raise ConnectionError("Couldn't reach the Hub")
        if name == 'goone':
            raise ValueError("BuilderConfig 'goone' not found.")
        return datasets.Dataset.from_list(
            [dict(images=[], texts=[dict(user='q', assistant=name)], source=name)]
        )

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(
        datasets, 'get_dataset_config_names', lambda path: ['a', 'gone', 'b']
    )
    with caplog.at_level(logging.WARNING, 'nanovlm_nb'):
        data = load_data('someone/FineVision', ['all'])
    assert calls == [('someone/FineVision', n, 'train') for n in ('a', 'gone', 'b')]
    assert data['source'][:] == ['a', 'b']
    assert [
        (
            "skipped data set gone" in r.getMessage(),
            'DatasetNotFoundError' in r.getMessage(),
        )
        for r in caplog.records
    ] == [(True, True)]
    with pytest.raises(ConnectionError, match="Couldn't reach"):
        load_data('someone/FineVision', ['a', 'away'])
    with pytest.raises(FileNotFoundError, match='there are .*, did you mean gone?'):
        load_data('someone/FineVision', ['a', 'goone'])
    load_data('someone/FineVision')
    assert calls[-1] == ('someone/FineVision', 'default', 'train')


@pytest.mark.parametrize('ask', [load_configs, get_tokenizer, load_splits])
def test_a_path_is_never_a_name(ask):
    "`./rows` that is not here must not become `rows` of somebody."
    with pytest.raises(FileNotFoundError, match='./rows: No such file or directory'):
        ask('./rows')


def test_exif_matches_datasets(photos):
    "A rotated picture is what datasets decodes, and its size is known from the header."
    im = Image.open(photos[1]).convert('RGB').resize((60, 40))
    feature = datasets.Image()
    for orientation, fmt in product(range(1, 9), ('JPEG', 'PNG', 'WEBP', 'TIFF')):
        exif = Image.Exif()
        exif[0x0112] = orientation
        b = io.BytesIO()
        im.save(b, fmt, exif=exif)
        b = b.getvalue()
        want = feature.decode_example(dict(bytes=b, path=None))
        assert image_size(b) == want.size == open_image(b).size
        assert np.array_equal(
            np.asarray(open_image(b)), np.asarray(want.convert('RGB'))
        )


# --- settings that lead to the loader


def test_transforms_and_pictures_are_named_by_settings(tmp_path, monkeypatch):
    "`custom_transforms` by module:function, for training alone; `images_path` for JSON lines whose pictures lie elsewhere."
    from nanovlm_nb.core.config import evolve, preset
    from nanovlm_nb.data.loader import get_dataloaders

    (tmp_path / 'my_changes.py').write_text(
        'def blacken(picture, rng): return picture.point(lambda v: 0)\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / 'elsewhere').mkdir()
    for i in range(8):
        Image.new('RGB', (64, 64), 'white').save(tmp_path / 'elsewhere' / f'{i}.png')
    lines = [
        dict(
            image=f'{i}.png',
            conversations=[
                dict(role='user', content='What?<image>'),
                dict(role='assistant', content='White.'),
            ],
        )
        for i in range(8)
    ]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    vlm, cfg = preset('shapes')
    cfg = evolve(
        cfg,
        train_dataset_path=str(tmp_path / 'rows.jsonl'),
        images_path=str(tmp_path / 'elsewhere'),
        custom_transforms=['my_changes:blacken'],
        val_size=4,
        num_of_sequences=2,
        num_workers=0,
        val_workers=0,
        data_cutoff_idx=None,
    )
    brightest = [
        max(int(t.max()) for row in next(iter(loader))['images'] for t in row)
        for loader in get_dataloaders(cfg, vlm)
    ]
    assert brightest == [0, 255]


def png(side=8):
    "A picture, encoded."
    Image.new('RGB', (side, side)).save(file := io.BytesIO(), 'PNG')
    return file.getvalue()


@pytest.mark.parametrize('stream', (False, True))
def test_a_column_that_is_named_hides_no_other(tmp_path, cache, stream):
    rows = dict(
        photo=[dict(bytes=png(), path=None)] * 3,
        small=[png(4)] * 3,
        q=['What?'] * 3,
        a=['This.'] * 3,
        json=['{}'] * 3,
    )
    (tmp_path / 'd').mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / 'd' / 'x.parquet')
    with pytest.raises(UnusedColumn, match='may hold pictures'):
        load_configs(
            tmp_path / 'd',
            cache_dir=cache,
            streaming=stream,
            columns=['question=q', 'answer=a'],
        )
    found = load_configs(
        tmp_path / 'd',
        cache_dir=cache,
        streaming=stream,
        columns=['image=photo', 'question=q', 'answer=a'],
    )['default']
    row = to_row(
        next(iter(found)), 0
    )  # the thumbnail was not chosen, and `json` is a text
    assert len(row['images']) == 1 and row['texts'] == [
        dict(user='What?', assistant='This.')
    ]
    with pytest.raises(UnusedColumn):
        read_object(
            dict(photo=png(), small=png(4), q='What?', a='This.'),
            ['question=q', 'answer=a'],
        )
    assert read_object(
        dict(photo=png(), q='What?', a='This.'), ['question=q', 'answer=a']
    )['images'] == [png()]
    assert read_object(
        dict(photo=png(), small=png(4), q='What?', a='This.'),
        ['image=photo', 'question=q', 'answer=a'],
    )['images'] == [png()]


def test_turns_that_are_cut_are_counted_by_reason():
    turns = [dict(user='q', assistant=a) for a in ('yes', '', 'no')]
    row = dict(
        images=[dict(bytes=png(), path=None)], texts=turns, relevance_ratings=[5, 5, 1]
    )
    broken = row | dict(
        images=[dict(bytes=png(64)[:50], path=None)]
    )  # its header can be read
    cfg = tiny(relevance_min_rating=2)
    samples = make_samples(cfg[1], cfg[0], load_tokenizer(cfg[0]), [row, broken])
    assert samples[0] and samples[1] is None
    assert samples.drops.cut == {
        'sample/0': dict(ratings=1, no_answer=1)
    } and samples.drops.reasons == {'sample/1': 'unreadable_image'}


def test_rows_of_two_files_of_a_configuration_have_two_ids(tmp_path):
    for name, files in dict(one='ab', two='a').items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / f'{file}.jsonl').write_text(
                '{"question": "What?", "answer": "This."}\n' * 2
            )
    source = MapSource(load_configs(tmp_path, ('all',)), shuffle=False)
    assert [row['id'] for _, row in source.rows_of(0, 1, 0)] == [
        'one/a/1',
        'one/a/2',
        'one/b/1',
        'one/b/2',
        'two/a/1',
        'two/a/2',
    ]


def test_no_room_in_memory_is_no_damaged_file():
    assert not is_damage(pa.ArrowMemoryError('no room')) and is_damage(
        pa.ArrowInvalid('cut off')
    )
