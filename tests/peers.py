"""The same rows through other loaders, each in a process of its own: `python tests/peers.py FOLDER KIND`.
A Python that has webdataset, mosaicml-streaming, litdata and datasets makes FOLDER (KIND `make`) and reads it;
KIND `nanovlm` runs in ours. All shuffle, with no worker; figures are CPU seconds."""

import importlib
import io
import json
import os
import resource
import sys
import tarfile
from itertools import islice

N = 30_000
SHARDS = 10
PLACE = N * 9 // 10
IMPORTS = dict(
    webdataset='webdataset',
    hf='datasets',
    mosaicml='streaming',
    litdata='litdata',
    nanovlm='nanovlm_nb.data.loader',
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
    "An iterator of ids, and what goes on from a position: there is no state, so what was read is read again."
    import webdataset as wds

    tars = f'{folder}/tar/{{000..{SHARDS - 1:03}}}.tar'
    ds = wds.WebDataset(tars, shardshuffle=SHARDS, seed=0).shuffle(1000, seed=0)

    def ids():
        for sample in ds:
            decode(sample['png'])
            json.loads(sample['json'])
            yield int(sample['__key__'])

    return ids, lambda: PLACE, lambda state: islice(ids(), state, None)


def hf(folder):
    import datasets

    ds = datasets.load_dataset(
        'parquet', data_files=f'{folder}/parquet/*.parquet', streaming=True
    )['train'].shuffle(seed=0, buffer_size=1000)

    def ids():
        for sample in ds:
            decode(sample['images'][0])
            yield sample['row_id']

    def resumed(state):
        ds.load_state_dict(state)
        return ids()

    return ids, lambda: ds.state_dict(), resumed


def mosaicml(folder):
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    ds = StreamingDataset(
        local=f'{folder}/mds', shuffle=True, batch_size=8, shuffle_seed=0
    )

    def ids():
        for sample in ds:
            decode(sample['image'])
            yield sample['id']

    def resumed(state):
        ds.load_state_dict(state)
        return ids()

    return ids, lambda: ds.state_dict(PLACE, True), resumed


def litdata(folder):
    from litdata import StreamingDataLoader, StreamingDataset

    def loader():
        ds = StreamingDataset(f'{folder}/lit', shuffle=True, seed=0)
        return StreamingDataLoader(ds, batch_size=None, num_workers=0)

    first = loader()

    def ids(source=first):
        for sample in source:
            decode(sample['image'])
            yield sample['id']

    def resumed(state):
        again = loader()
        again.load_state_dict(state)
        return ids(again)

    return ids, first.state_dict, resumed


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
    first = get_dataloaders(cfg, vlm_cfg)[0]

    def ids(loader=first):
        for batch in loader:
            for id in batch['ids'][0]:
                yield int(id.rpartition('/')[2])

    def resumed(state):
        again = get_dataloaders(cfg, vlm_cfg)[0]
        again.load_state_dict(json.loads(json.dumps(state)))
        return ids(again)

    return ids, first.state_dict, resumed


def measure(kind, folder):
    "One line of the table; imports do not count."
    importlib.import_module(IMPORTS[kind.__name__])
    began = cpu()
    ids, state, resumed = kind(folder)
    coming = ids()
    start = cpu() - began
    seen = [next(coming)]
    first = cpu() - began - start
    begin = cpu()
    seen += islice(coming, 9 * PLACE // 10)
    each = (cpu() - begin) / (len(seen) - 1)
    seen += islice(coming, PLACE - len(seen))
    if kind is nanovlm:  # to the end of a pack
        now = state()
        while state() == now:
            seen.append(next(coming))
        last = seen.pop()
        position = now
        rest = [last, *coming]
    else:
        position = state()
        rest = [*coming]
    begin = cpu()
    again = resumed(position)
    found = [next(again, None)]
    resume = cpu() - begin
    found += again
    whole = {*seen, *rest}
    line = dict(
        kind=kind.__name__,
        start=round(start, 2),
        first=round(first, 3),
        us_a_sample=round(1e6 * each),
        resume=round(resume, 2),
        same=found == rest,
        lost=len({*rest} - {*found}),
        again=len({*found} & {*seen}),
        rows=len(whole),
    )
    print(json.dumps(line), flush=True)


if __name__ == '__main__':
    folder, name = sys.argv[1:]
    if name == 'make':
        make(folder)
    else:
        measure(globals()[name], folder)
    sys.stdout.flush()
    os._exit(0)
