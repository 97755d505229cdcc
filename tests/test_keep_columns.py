"A column that a loss of your own needs is kept from every kind of file: the run is that of the same rows in memory."

import csv
import io
import json
import tarfile

import datasets
import pytest

from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.data.files import unread_columns
from nanovlm_nb.data.loader import get_dataloaders
from nanovlm_nb.data.shapes import shapes_dataset

KEEP = ['weight', 'corner']


def rows():
    "Thirty drawn pictures with a number and two numbers each."
    pictures = [row for row in shapes_dataset(60) if len(row['images']) == 1][:30]
    return [
        dict(
            image=row['images'][0],
            question=row['texts'][0]['user'],
            answer=row['texts'][0]['assistant'],
            weight=1.0 + i % 3,
            corner=[i, 2 * i],
        )
        for i, row in enumerate(pictures)
    ]


def png(picture):
    file = io.BytesIO()
    picture.save(file, 'PNG')
    return file.getvalue()


def named(row, i):
    return dict(row, image=f'{i:02}.png')


def write_json_lines(folder, rows):
    lines = [json.dumps(named(row, i)) for i, row in enumerate(rows)]
    (folder / 'rows.jsonl').write_text('\n'.join(lines))
    for i, row in enumerate(rows):
        row['image'].save(folder / f'{i:02}.png')
    return folder


def write_csv(folder, rows):
    with open(folder / 'rows.csv', 'w', newline='') as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        for i, row in enumerate(rows):
            row['image'].save(folder / f'{i:02}.png')
            writer.writerow(named(row, i))
    return folder


def write_json(folder, rows):
    write_json_lines(folder, rows)
    lines = (folder / 'rows.jsonl').read_text().splitlines()
    (folder / 'rows.jsonl').unlink()
    (folder / 'rows.json').write_text(json.dumps([*map(json.loads, lines)]))
    return folder


def write_tar(folder, rows):
    with tarfile.open(folder / 'rows.tar', 'w') as tar:
        for i, row in enumerate(rows):
            told = {name: value for name, value in row.items() if name != 'image'}
            parts = dict(png=png(row['image']), json=json.dumps(told).encode())
            for kind, data in parts.items():
                member = tarfile.TarInfo(f'{i:02}.{kind}')
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


def write_parquet(folder, rows):
    datasets.Dataset.from_list(rows).to_parquet(folder / 'rows.parquet')
    return folder


def write_saved(folder, rows):
    datasets.Dataset.from_list(rows).save_to_disk(folder / 'saved')
    return folder / 'saved'


WRITERS = dict(
    json_lines=write_json_lines,
    json=write_json,
    csv=write_csv,
    tar=write_tar,
    parquet=write_parquet,
    saved=write_saved,
)


@pytest.fixture(scope='module')
def weighed():
    "The columns of each sample, by its question and picture."
    return [(row['weight'], row['corner']) for row in rows()]


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('kind', WRITERS)
def test_all_samples_bring_their_columns(tmp_path, weighed, kind, stream):
    "Read once through a loader, each sample has the numbers of its row."
    path = WRITERS[kind](tmp_path, rows())
    vlm_cfg, train_cfg = preset('tiny')
    train_cfg = evolve(
        train_cfg,
        train_dataset_path=str(path),
        stream_dataset=stream,
        keep_columns=KEEP,
        val_size=3,
        num_workers=0,
        val_workers=0,
    )
    found = []
    for loader in get_dataloaders(train_cfg, vlm_cfg):
        for batch in loader:
            for columns in batch['columns']:
                found += [(c['weight'], c['corner']) for c in columns]
    assert sorted(found) == sorted(weighed)


def test_what_is_kept_is_not_said_to_be_unread(tmp_path, caplog):
    "Without the setting the log names both columns, with it neither."
    path = write_json_lines(tmp_path, rows())
    assert unread_columns(path, 'default') == {'weight', 'corner'}
    vlm_cfg, train_cfg = preset('tiny')
    train_cfg = evolve(train_cfg, train_dataset_path=str(path), val_size=3)
    caplog.set_level('INFO', 'nanovlm_nb')
    get_dataloaders(train_cfg, vlm_cfg)
    assert 'not read: corner, weight' in caplog.text
    caplog.clear()
    get_dataloaders(evolve(train_cfg, keep_columns=KEEP), vlm_cfg)
    assert 'not read' not in caplog.text
