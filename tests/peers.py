"""The same rows through other loaders, each in a process of its own.

    python tests/peers.py FOLDER make
    python tests/peers.py FOLDER KIND

A Python that has webdataset, mosaicml-streaming, litdata and datasets makes FOLDER and
reads it; KIND `nanovlm` runs in ours. All shuffle, none has workers. Each line is one of
nbs/benchmarks/peers.json: CPU seconds of all threads, without imports. A process reads
the epoch and saves its position at 90 %; another one goes on from there."""

import importlib
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from itertools import islice
from pathlib import Path

N = 30_000
SHARDS = 10
PLACE = N * 9 // 10
PACKAGES = dict(  # what is imported, what is installed
    webdataset=('webdataset', 'webdataset'),
    hf=('datasets', 'datasets'),
    mosaicml=('streaming', 'mosaicml-streaming'),
    litdata=('litdata', 'litdata'),
    nanovlm=('nanovlm_nb.data.loader', 'nanovlm_nb'),
)


def cpu():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def row(i):
    "A picture of 64 pixels and a question about it."
    from PIL import Image

    noise = bytes((i * 7 + k * k) % 251 for k in range(192))
    picture = Image.frombytes('RGB', (8, 8), noise).resize((64, 64))
    file = io.BytesIO()
    picture.save(file, 'PNG')
    texts = [dict(user=f'What is picture {i}?', assistant=f'It is {i % 97}.')]
    return file.getvalue(), texts


def sample(i):
    "A row for litdata."
    image, texts = row(i)
    return dict(image=image, texts=texts, id=i)


def make(folder):
    "The rows as parquet, tars, MDS and litdata's chunks."
    import datasets
    from litdata import optimize
    from streaming import MDSWriter

    rows = [row(i) for i in range(N)]
    step = N // SHARDS
    for name in ('parquet', 'tar'):
        os.makedirs(f'{folder}/{name}')
    for s in range(SHARDS):
        part = range(s * step, (s + 1) * step)
        table = datasets.Dataset.from_list(
            [dict(images=[rows[i][0]], texts=rows[i][1], row_id=i) for i in part]
        )
        table.to_parquet(f'{folder}/parquet/{s:03}.parquet', batch_size=1000)
        with tarfile.open(f'{folder}/tar/{s:03}.tar', 'w') as tar:
            for i in part:
                said = json.dumps(dict(texts=rows[i][1])).encode()
                for end, data in (('png', rows[i][0]), ('json', said)):
                    member = tarfile.TarInfo(f'{i:08}.{end}')
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    columns = dict(image='bytes', texts='json', id='int')
    with MDSWriter(out=f'{folder}/mds', columns=columns) as out:
        for i, (image, texts) in enumerate(rows):
            out.write(dict(image=image, texts=texts, id=i))

    optimize(
        fn=sample,
        inputs=[*range(N)],
        output_dir=f'{folder}/lit',
        num_workers=1,
        chunk_bytes='16MB',
    )


def decode(data):
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))


def webdataset(folder):
    "There is no state: what was read is read again, and left out before it is decoded."
    import webdataset as wds

    tars = f'{folder}/tar/{{000..{SHARDS - 1:03}}}.tar'
    ds = wds.WebDataset(tars, shardshuffle=SHARDS, seed=0).shuffle(1000, seed=0)

    def ids(position=0):
        for sample in islice(ds, position, None):
            decode(sample['png'])
            json.loads(sample['json'])
            yield int(sample['__key__'])

    return ids, lambda: PLACE


def hf(folder):
    "`datasets` as a stream of parquet files, with a shuffle buffer."
    import datasets

    ds = datasets.load_dataset(
        'parquet', data_files=f'{folder}/parquet/*.parquet', streaming=True
    )['train'].shuffle(seed=0, buffer_size=1000)

    def ids(position=None):
        if position:
            ds.load_state_dict(position)
        for sample in ds:
            decode(sample['images'][0])
            yield sample['row_id']

    return ids, ds.state_dict


def mosaicml(folder):
    "MDS shards, shuffled by its default, py1e."
    from streaming import StreamingDataset

    ds = StreamingDataset(
        local=f'{folder}/mds', shuffle=True, batch_size=8, shuffle_seed=0
    )

    def ids(position=None):
        if position:
            ds.load_state_dict(position)
        for sample in ds:
            decode(sample['image'])
            yield sample['id']

    return ids, lambda: ds.state_dict(PLACE, True)


def litdata(folder):
    "Its chunks, shuffled within and among each other. Its loader asserts a batch size."
    from litdata import StreamingDataLoader, StreamingDataset

    ds = StreamingDataset(f'{folder}/lit', shuffle=True, seed=0)
    loader = StreamingDataLoader(ds, batch_size=1, num_workers=0, collate_fn=list)

    def ids(position=None):
        if position:
            loader.load_state_dict(position)
        for (sample,) in loader:
            decode(sample['image'])
            yield sample['id']

    return ids, loader.state_dict


def nanovlm(folder):
    "Ours filters, tokenises, cuts tiles and packs as well."
    from nanovlm_nb.core.config import tiny
    from nanovlm_nb.data.loader import get_dataloaders

    vlm_cfg, cfg = tiny(
        train_dataset_path=f'{folder}/parquet',
        stream_dataset=True,
        data_cutoff_idx=None,
        val_size=0,
        num_workers=0,
        batch_size=1,
        gradient_accumulation_steps=1,
        lm_max_length=512,
        max_sample_length=512,
        num_of_sequences=16,
    )
    loader = get_dataloaders(cfg, vlm_cfg)[0]

    def ids(position=None):
        if position:
            loader.load_state_dict(position)
        for batch in loader:
            for id in batch['ids'][0]:
                yield int(id.rpartition('/')[2])

    return ids, loader.state_dict


def whole_pack(coming, state):
    "The rest of the pack that was begun, the position behind it, and what follows."
    here, done = state(), []
    while state() == here:
        done.append(next(coming))
    return done[:-1], here, done[-1:]


def resume(kind, folder, file):
    "A process of its own: CPU seconds from nothing to the first sample, and all ids."
    began = cpu()
    coming = kind(folder)[0](json.loads(Path(file).read_text()))
    found = [next(coming)]
    seconds = cpu() - began
    found += coming
    print(json.dumps(dict(resume=seconds, found=found)), flush=True)


def measure(kind, folder):
    "One line of the table."
    began = cpu()
    ids, state = kind(folder)
    coming = ids()
    start = cpu() - began
    seen = [next(coming)]
    first = cpu() - began - start
    begin = cpu()
    seen += islice(coming, PLACE - 1)
    each = (cpu() - begin) / (PLACE - 1)
    rest = []
    if kind is nanovlm:
        done, position, rest = whole_pack(coming, state)
        seen += done
    else:
        position = state()
    with tempfile.NamedTemporaryFile('w', suffix='.json') as file:
        file.write(json.dumps(position))
        file.flush()
        rest += coming
        command = [sys.executable, __file__, folder, kind.__name__, file.name]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    again = json.loads(out.stdout.splitlines()[-1])
    found = again['found']
    line = dict(
        kind=kind.__name__,
        version=version(PACKAGES[kind.__name__][1]),
        start=round(start, 3),
        first=round(first, 3),
        us_a_sample=round(1e6 * each),
        resume=round(again['resume'], 2),
        seen=len(seen),
        rows=len({*seen, *rest}),
        lost=len({*range(N)} - {*seen} - {*found}),
        repeated=len(found) - len({*found} - {*seen}),
        same_order=found == rest,
    )
    print(json.dumps(line), flush=True)


if __name__ == '__main__':
    folder, name, *position = sys.argv[1:]
    if name == 'make':
        make(folder)
    else:
        importlib.import_module(PACKAGES[name][0])
        if position:
            resume(globals()[name], folder, *position)
        else:
            measure(globals()[name], folder)
    os._exit(0)  # threads of some loaders would keep it
