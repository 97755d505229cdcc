"The stream of batches is one and the same, whatever the ranks, the workers and the interruptions; every row comes once or is named with a reason."

import hashlib
import io
import json
import logging
import multiprocessing
import os
import random
import shutil
import tarfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import nanovlm_nb.data.loader as loader_module
import nanovlm_nb.data.files as load
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.data.samples import VQADataset
from nanovlm_nb.core.dist import Dist, seed_worker
from nanovlm_nb.data.images import get_image_processor
from nanovlm_nb.data.lanes import PackRules
from nanovlm_nb.data.loader import PackLoader, merge_states, pack_workers
from nanovlm_nb.data.loader import (
    get_dataloaders,
    load_sources,
    load_tokenizer,
    make_samples,
    pack_loader,
)
from nanovlm_nb.data.sources import MapSource
from nanovlm_nb.training.update import gather_update

pytestmark = [
    pytest.mark.usefixtures('one_thread'),
    pytest.mark.filterwarnings('ignore:This DataLoader will create'),
]
LENGTH = 128
LONGEST = 112
FEATURES = datasets.Features(
    images=datasets.List(datasets.Image()),
    source=datasets.Value('string'),
    relevance_ratings=datasets.List(datasets.Value('int64')),
    texts=datasets.List(
        dict(user=datasets.Value('string'), assistant=datasets.Value('string'))
    ),
)
ROWS = dict(
    few=24, many=36, saved=12
)  # configuration -> rows; `few` has 3 shares, the others 12
FATES = {
    3: 'ratings',
    5: 'too_long',
    7: 'no_turns',
    8: 'cut',
    9: 'truncated',
    11: 'no_header',
}  # row number modulo 12 -> what is odd about it
REASONS = dict(
    ratings='ratings',
    too_long='too_long',
    no_turns='no_turns',
    truncated='unreadable_image',
    no_header='unreadable_image',
)


def png(dice, w=16, h=16):
    "A picture of noise, encoded."
    b = io.BytesIO()
    Image.frombytes('RGB', (w, h), dice.randbytes(3 * w * h)).save(b, 'PNG')
    return b.getvalue()


def make_row(name, i, dice):
    "A row whose `source` says which it is, with a fault that follows from its number."
    fate = FATES.get(i % 12)
    words = dice.randint(1, 8)
    pictures = [
        png(dice, dice.choice((16, 16, 32)))
        for _ in range(
            dice.choice((0, 1, 1, 2)) if fate not in ('truncated', 'no_header') else 1
        )
    ]
    if fate == 'truncated':
        pictures = [png(dice, 32, 32)[:-600]]
    if fate == 'no_header':
        pictures = [b'no picture']
    turns = [
        dict(
            user=f'{name} {i}?',
            assistant='yes ' * (90 if fate == 'too_long' else words),
        )
    ]
    if fate == 'cut':
        turns.append(dict(user='Sure?', assistant='no'))
    return dict(
        images=[dict(bytes=b, path=None) for b in pictures],
        texts=[] if fate == 'no_turns' else turns,
        source=f'{name}-{i}',
        relevance_ratings=dict(ratings=[0], cut=[3, 0]).get(fate, [3]),
    )


@pytest.fixture(scope='module', autouse=True)
def quiet(tmp_path_factory):
    "No progress bars; what `datasets` copies goes where the tests' files go."
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(
            datasets.config, 'HF_DATASETS_CACHE', tmp_path_factory.mktemp('cache')
        )
        yield
    datasets.enable_progress_bars()


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    "Three configurations: one file with few row groups, several files with many, a save_to_disk folder."
    root = tmp_path_factory.mktemp('stream')
    dice = random.Random(0)
    made = {
        name: datasets.Dataset.from_list(
            [make_row(name, i, dice) for i in range(n)], features=FEATURES
        )
        for name, n in ROWS.items()
    }
    for name, files, group in (('few', 1, 8), ('many', 3, 3)):
        (root / name).mkdir()
        for f in range(files):
            made[name].shard(files, f, contiguous=True).to_parquet(
                root / name / f'train-{f}.parquet', batch_size=group
            )
    made['saved'].save_to_disk(root / 'saved')
    return root


@pytest.fixture(scope='module')
def tokenizer():
    return load_tokenizer(VLM)


@dataclass(frozen=True)
class Data:
    "What decides about the order of the packs."

    names: tuple  # configurations
    weights: tuple  # empty: pooled
    stream: bool
    lanes: int  # S
    window: int
    seed: int

    def __str__(self):
        return f"{'stream' if self.stream else 'map'}-{'+'.join(self.names)}-{'x'.join(map(str, self.weights)) if self.weights else 'pooled'}-S{self.lanes}-w{self.window}-s{self.seed}"


def draw_data(seed):
    "One of the data configurations."
    dice = random.Random(seed)
    names = [
        ('few',),
        ('many',),
        ('few', 'saved'),
        ('few', 'many', 'saved'),
        ('many', 'saved'),
    ][seed % 5]
    weights = (
        tuple(dice.choice((1, 2, 3)) for _ in names)
        if len(names) > 1 and seed // 5 % 2
        else ()
    )
    return Data(
        names,
        weights,
        seed % 2 == 0,
        dice.choice((4, 8)),
        dice.choice((1, 1, 2, 3)),
        seed,
    )


def splits_of(lanes):
    "(ranks, batch size, accumulation) whose product is `lanes`."
    return [
        (w, b, lanes // w // b)
        for w in (1, 2, 4)
        for b in (1, 2, 4, 8)
        if lanes % (w * b) == 0
    ]


def draw_segments(data, case):
    "One to three pieces of a run: (ranks, batch size, accumulation), workers, updates."
    dice = random.Random(f'{data.seed}/{case}')

    def piece():
        w, b, a = dice.choice(splits_of(data.lanes))
        workers = (
            dice.choice([n for n in (1, 3) if n <= a * b])
            if w < 4 and dice.random() < 0.15
            else 0
        )
        return (w, b, a), workers, dice.randint(1, 3)

    return [piece() for _ in range(dice.randint(1, 3))]


DATA = [draw_data(seed) for seed in range(20)]
CASES_EACH = 5


class Exchange:
    "What ranks that are threads of this process tell each other; all of them wait for the last."

    def __init__(self, ranks):
        self.said = [None] * ranks
        self.barrier = threading.Barrier(ranks)

    def all_of(self, rank, what):
        self.said[rank] = what
        self.barrier.wait()
        said = list(self.said)
        self.barrier.wait()
        return said


@dataclass(frozen=True)
class Played(Dist):
    "One of the ranks that are threads of one process."

    exchange: Exchange = None

    def gather(self, obj):
        return self.exchange.all_of(self.rank, obj)

    def reduce(self, numbers, op='sum'):
        add = dict(sum=sum, max=max)[op]
        return [add(column) for column in zip(*self.gather(numbers), strict=True)]

    def to_master(self, data, size):
        everyone = self.gather(data.ljust(size, b'\0'))
        return everyone if self.is_master else []


def packs_of(batch):
    "The packs of a micro-batch: sample ids, document lengths, and a digest of token ids, labels and pixels."
    for ids, lens, *tensors, tiles in zip(
        batch['ids'],
        batch['doc_lens'],
        batch['input_ids'],
        batch['labels'],
        batch['images'],
    ):
        assert sum(lens) <= LENGTH and len(lens) == len(ids)
        yield (
            ids,
            lens,
            hashlib.sha1(
                b'|'.join(x.numpy().tobytes() for x in (*tensors, *tiles))
            ).hexdigest(),
        )


def global_updates(loaders, accumulation):
    "The rest of an epoch as all ranks see it: for each update the packs of all ranks, in the order in which the gradient adds them up."
    batches = [iter(l) for l in loaders]
    while True:
        mine = [list(islice(b, accumulation)) for b in batches]
        exchange = Exchange(len(loaders))
        with ThreadPoolExecutor(len(loaders)) as ranks:
            asked = [
                ranks.submit(
                    gather_update,
                    ms,
                    Played(r, len(loaders), exchange=exchange),
                    l.idle,
                )
                for r, (ms, l) in enumerate(zip(mine, loaders))
            ]
        updates = [update.result() for update in asked]
        if None in updates:
            break
        assert (
            len(
                {
                    (u.digest, u.targets, u.tokens, u.samples, len(u.micro_batches))
                    for u in updates
                }
            )
            == 1
        )
        yield [
            p
            for m in range(accumulation)
            for u in updates
            for p in packs_of(u.micro_batches[m])
        ]
    assert not any(updates)


VLM = evolve(
    preset('shapes')[0],
    vit_img_size=16,
    vit_patch_size=4,
    max_img_size=32,
    lm_max_length=LENGTH,
)


def train_cfg(root, names, **changes):
    "A run on some of the configurations."
    return evolve(
        preset('shapes')[1],
        train_dataset_path=str(root),
        train_dataset_name=list(names),
        data_cutoff_idx=None,
        max_sample_length=LONGEST,
        max_images_per_example=3,
        max_images_per_knapsack=3,
        **dict(dict(stream_dataset=True, val_size=5, num_workers=0), **changes),
    )


class Runs:
    "Runs on one data configuration."

    def __init__(self, data, root, tokenizer, val_size=5):
        self.cfg = train_cfg(
            root,
            data.names,
            train_dataset_weights=list(data.weights),
            stream_dataset=data.stream,
            num_of_sequences=data.window,
            seed=data.seed,
            val_size=val_size,
        )
        self.data = data
        self.tokenizer = tokenizer
        self.train, self.val = load_sources(self.cfg)

    def loader(self, dist, batch, accumulation, workers=0):
        "The loader of a rank."
        cfg = evolve(
            self.cfg, batch_size=batch, gradient_accumulation_steps=accumulation
        )
        return pack_loader(
            self.train,
            make_samples(cfg, VLM, self.tokenizer),
            VLM,
            cfg,
            dist,
            True,
            workers,
        )

    def play(self, split, workers=0, state=None):
        "After each update: its packs, the merged state as JSON, and what has been dropped so far. Epoch after epoch."
        world, batch, accumulation = split
        loaders = [
            self.loader(Dist(rank=r, world_size=world), batch, accumulation, workers)
            for r in range(world)
        ]
        if state:
            [l.load_state_dict(json.loads(state)) for l in loaders]
        while True:
            with closing(global_updates(loaders, accumulation)) as updates:
                for update in updates:
                    yield (
                        update,
                        json.dumps(merge_states([l.state_dict() for l in loaders])),
                        {
                            k: v
                            for l in loaders
                            for k, v in l.samples.drops.reasons.items()
                        },
                    )
            for l in loaders:
                l.set_epoch(l.epoch + 1)

    def fates(self, source):
        "Sample id -> the row's `source`, for all rows of a source."
        return {row['id']: row['source'] for _, row in source.rows_of(0, 1, 0)}


def expected(tag):
    "Why a row is left out, or None."
    return REASONS.get(FATES.get(int(tag.split('-')[1]) % 12))


@pytest.fixture(scope='module', params=DATA, ids=str)
def runs(request, root, tokenizer):
    return Runs(request.param, root, tokenizer)


@pytest.fixture(scope='module')
def whole(runs):
    "An uninterrupted run of one rank without workers: for each update its packs, epoch, merged state and drops so far. One epoch and a bit, or two."
    epochs = 2 if runs.data.seed < 4 else 1
    made = []
    for update, state, drops in runs.play((1, runs.data.lanes, 1)):
        made.append((update, state, drops, json.loads(state)['epoch']))
        if sum(e >= epochs for *_, e in made) == 3:
            return made


def test_every_row_once_or_named(runs, whole):
    "Per epoch each sound row once (in mixtures at least once), the others dropped for the expected reason; nothing from the validation rows."
    tags = runs.fates(runs.train)
    held_out = runs.fates(runs.val)
    everything = {f'{name}-{i}' for name in runs.data.names for i in range(ROWS[name])}
    assert (
        not set(tags.values()) & set(held_out.values())
        and {*tags.values(), *held_out.values()} == everything
        and len(held_out) == 5
    )
    reasons = {i: expected(tag) for i, tag in tags.items()}
    for epoch in range(2 if runs.data.seed < 4 else 1):
        seen = Counter(
            i
            for update, _, _, e in whole
            if e == epoch
            for ids, _, _ in update
            for i in ids
        )
        assert seen.keys() == {i for i, reason in reasons.items() if reason is None}
        assert runs.data.weights or set(seen.values()) == {1}
    dropped = next(drops for _, _, drops, e in whole if e)
    assert dropped == {i: reason for i, reason in reasons.items() if reason}
    assert whole[-1][2] == dropped


@pytest.mark.parametrize('case', range(CASES_EACH))
def test_goes_on_as_if_nothing_had_happened(runs, whole, case):
    "Stopped after any update, resumed once to three times with other ranks and workers: the same packs, positions and drops."
    ends = sum(not e for *_, e in whole)  # updates of the first epoch
    n = [
        0,
        ends - 1,
        ends,
        *random.Random(f'{runs.data} {case}').sample(range(len(whole) - 3), 2),
    ][case]
    state, drops = whole[n - 1][1:3] if n else (None, {})
    for split, workers, more in draw_segments(runs.data, case):
        what = f'after {n} updates as (ranks, batch, accumulation) {split} with {workers} workers'
        with closing(runs.play(split, workers, state)) as run:
            for update, state, found in islice(run, min(more, len(whole) - n)):
                assert [ids for ids, *_ in update] == [
                    ids for ids, *_ in whole[n][0]
                ], what
                assert update == whole[n][0], what
                assert json.loads(state) == json.loads(whole[n][1]), what
                assert drops | found == whole[n][2], what
                n += 1
        drops = whole[n - 1][2]


@pytest.mark.parametrize('stream', [True, False])
def test_ranks_and_validation_share_no_row(root, tokenizer, stream):
    "Two ranks, three workers for training and for validation: four disjoint parts, and together every row; the validation part has `val_size` rows."
    cfg = train_cfg(
        root,
        ('few', 'many'),
        stream_dataset=stream,
        val_size=14,
        batch_size=3,
        num_workers=3 if stream else 0,
        val_workers=3 if stream else 0,
    )
    parts = {}
    for rank in (0, 1):
        for part, loader in zip(
            ('train', 'val'),
            get_dataloaders(cfg, VLM, Dist(rank=rank, world_size=2), tokenizer),
        ):
            kept = [i for batch in loader for ids in batch['ids'] for i in ids]
            assert (
                len(kept) == len(set(kept))
                and not set(kept) & loader.samples.drops.reasons.keys()
            )
            parts[part, rank] = {*kept, *loader.samples.drops.reasons}
    assert (
        sum(map(len, parts.values()))
        == len(set.union(*parts.values()))
        == ROWS['few'] + ROWS['many']
    )
    assert len(parts['val', 0]) + len(parts['val', 1]) == 14 and all(parts.values())


def test_shards_with_a_corrupt_one(root, tokenizer, tmp_path, caplog):
    "Three folders of shards and a broken one, streamed: it is named, the others are read; if all are broken, that is an error."
    ds = datasets.load_from_disk(str(root / 'saved'))
    for i in range(3):
        ds.shard(3, i).save_to_disk(tmp_path / 'most' / f'shard_{i}')
    for name in ('most/shard_3', 'none/shard_0'):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / '0.parquet').write_bytes(b'PAR1 but not for long')
    with caplog.at_level(logging.WARNING, 'nanovlm_nb'):
        loader, _ = get_dataloaders(
            train_cfg(tmp_path / 'most', ['shards'], val_size=0),
            VLM,
            tokenizer=tokenizer,
        )
    assert [
        'shard_3' in r.getMessage()
        for r in caplog.records
        if r.name.startswith('nanovlm_nb')
    ] == [True]
    seen = [i for batch in loader for ids in batch['ids'] for i in ids]
    assert len({*seen, *loader.samples.drops.reasons}) == 12 and {
        i.split('/')[0] for i in seen
    } == {'shard_0', 'shard_1', 'shard_2'}
    with pytest.raises(ValueError, match=r'No valid datasets were loaded\.'):
        get_dataloaders(
            train_cfg(tmp_path / 'none', ['shards']), VLM, tokenizer=tokenizer
        )


def test_what_is_damaged_within_a_stream(root, tokenizer, tmp_path):
    "A torn page, a file of other types, one without texts and a text that is not UTF-8 cost their own rows, under a name, at any number of lanes and after a resume."
    folder = shutil.copytree(root / 'many', tmp_path / 'many')
    torn = bytearray((folder / 'train-1.parquet').read_bytes())
    texts = pq.ParquetFile(folder / 'train-1.parquet').metadata.row_group(1).column(3)
    torn[
        texts.data_page_offset : texts.data_page_offset
        + texts.total_compressed_size // 2
    ] = b'\xff' * (texts.total_compressed_size // 2)
    (folder / 'train-1.parquet').write_bytes(torn)
    datasets.Dataset.from_dict(dict(x=[1])).to_parquet(folder / 'train-3.parquet')
    datasets.Dataset.from_dict(dict(texts=['a'])).to_parquet(folder / 'train-4.parquet')
    sound = (folder / 'train-2.parquet').read_bytes()
    (folder / 'train-2.parquet').write_bytes(sound.replace(b'Sure?', b'Sur\xe9?'))
    runs = Runs(Data(('many',), (), True, 4, 1, 0), tmp_path, tokenizer, val_size=0)
    for split in ((1, 4, 1), (4, 1, 1)):
        whole = [
            r
            for r in takewhile(
                lambda r: json.loads(r[1])['epoch'] == 0, runs.play(split)
            )
        ]
        drops = whole[-1][2]
        assert {i for i, reason in drops.items() if reason == 'unreadable_shard'} == {
            'many/5',
            'many/13',
        }
        assert [i for i, reason in drops.items() if reason == 'bad_row'] == [
            'many/10:2'
        ] and drops['many/12:0'] == 'no_turns'
        seen = [i for update, *_ in whole for ids, *_ in update for i in ids]
        assert (
            len(seen) == len(set(seen)) and len({*seen, *drops}) == ROWS['many'] - 3 + 3
        )  # without the three rows of one share, with two names of shares and the row of `x`
        rest = [
            u
            for u, *_ in islice(runs.play((2, 2, 1), state=whole[1][1]), len(whole) - 2)
        ]
        assert rest == [u for u, *_ in whole[2:]]


def text_rows(name, n):
    return [
        dict(images=[], texts=[dict(user=f'{i}?', assistant='yes')], source=name)
        for i in range(n)
    ]


def resident():
    "Megabytes that this process holds in memory."
    return (
        int(Path('/proc/self/statm').read_text().split()[1])
        * os.sysconf('SC_PAGE_SIZE')
        / 1e6
    )


@pytest.mark.skipif(
    not Path('/proc/self/statm').exists(), reason='memory is read from /proc'
)
def test_memory_does_not_grow_with_the_stream(tmp_path, tokenizer):
    "A stream has no length, and 120 MB of rows pass through windows of a few MB: memory after the first quarter stays where it is."
    small = png(random.Random(0))
    (tmp_path / 'noise').mkdir()
    for f in range(4):
        rows = [
            dict(
                images=[dict(bytes=small + os.urandom(300_000), path=None)],
                texts=[dict(user=f'{i}?', assistant='yes')],
                source='noise',
                relevance_ratings=None,
            )
            for i in range(100)
        ]
        datasets.Dataset.from_list(rows, features=FEATURES).to_parquet(
            tmp_path / 'noise' / f'{f}.parquet', batch_size=10
        )
    loader, _ = get_dataloaders(
        train_cfg(tmp_path, ['noise'], val_size=0, num_of_sequences=2),
        VLM,
        tokenizer=tokenizer,
    )
    with pytest.raises(TypeError, match='has no len'):
        len(loader)
    held = [(resident(), sum(map(len, batch['ids']))) for batch in loader]
    assert sum(n for _, n in held) == 400
    quarter = len(held) // 4
    assert max(m for m, _ in held[quarter:]) - max(m for m, _ in held[:quarter]) < 20


def test_loader_attributes(root, tokenizer):
    "The workers of both loaders, fresh ones for each epoch; memory is pinned for a GPU only. What nanoVLM's drop_last does is not wanted: see above."
    cfg = train_cfg(
        root,
        ['few'],
        batch_size=2,
        gradient_accumulation_steps=2,
        num_workers=3,
        val_workers=1,
    )
    for device in ('cpu', 'cuda'):
        train, val = map(
            pack_workers,
            get_dataloaders(cfg, VLM, Dist(device=torch.device(device)), tokenizer),
        )
        for loader, workers in ((train, 3), (val, 1)):
            assert (
                loader.num_workers,
                loader.persistent_workers,
                loader.drop_last,
                loader.batch_size,
            ) == (workers, False, False, None)
            assert (
                loader.pin_memory == (device == 'cuda')
                and loader.worker_init_fn is seed_worker
            )
            assert (
                loader.prefetch_factor * workers >= 4
            )  # an update, at least, is on its way


class Counting(VQADataset):
    "Counts over all processes how many samples have been decoded."

    def finish(self, plan, pictures, rng=None):
        with self.made.get_lock():
            self.made.value += 1
        return super().finish(plan, pictures, rng)


def settled(made, most):
    "The number, when it has stopped growing; `most` is what is expected."
    end = time.monotonic() + 20
    while made.value < most and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    return made.value


@pytest.mark.parametrize('lanes, workers', [(1, 1), (4, 1), (4, 3)])
def test_workers_keep_the_queue_full(tokenizer, lanes, workers):
    "While the consumer waits, workers prepare as many packs as the prefetch depth says, not one more; closing the iterator leaves no process."
    samples = Counting([], tokenizer, get_image_processor(32, 16), 4)
    samples.made, rows = (
        torch.multiprocessing.get_context('fork').Value('i', 0),
        [
            r | dict(texts=[dict(user='q', assistant='a')])
            for r in text_rows('text', 400)
        ],
    )
    one = samples.plan_row(rows[0] | dict(id='0')).tokens
    loader = PackLoader(
        samples,
        MapSource(rows),
        PackRules(one, tokenizer.pad_token_id, window=4),
        lanes,
        num_workers=workers,
    )
    turns = -(-lanes // workers)
    ahead = max(2, turns) // turns * lanes
    batches = iter(loader)
    for taken in range(1, 4):
        next(batches)
        assert settled(samples.made, taken * lanes + ahead) == taken * lanes + ahead
    assert len(multiprocessing.active_children()) == workers
    batches.close()
    end = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.01)
    assert not multiprocessing.active_children()


def test_windows_grow_and_resume_anywhere(tokenizer):
    "Windows of 2, 2 more than before, up to 16: the rest of the epoch is the same from each state on."

    def played(state=None):
        loader = PackLoader(
            VQADataset([], tokenizer, get_image_processor(32, 16), 4),
            MapSource(text_rows('text', 300)),
            PackRules(64, tokenizer.pad_token_id, window=16, first=2),
            4,
        )
        if state:
            loader.load_state_dict(state)
        return [(b['ids'], loader.state_dict()) for b in loader]

    whole = played()
    befores = sorted({s[2] for _, state in whole for s in state['states'].values()})
    assert befores[2] - befores[1] > befores[1] > 0 and len(whole) > 10
    for n, (_, state) in enumerate(whole):
        assert [ids for ids, _ in played(state)] == [ids for ids, _ in whole[n + 1 :]]


def write_tar(path, n, more=''):
    "A tar of texts, the parts of a sample apart from each other."
    with tarfile.open(path, 'w') as tar:
        for end in ('png', 'json'):
            for i in range(n):
                data = (
                    png(random.Random(i))
                    if end == 'png'
                    else json.dumps(dict(question=f'{i}{more}?', answer='yes')).encode()
                )
                info = tarfile.TarInfo(f'{i:03}.{end}')
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_lines(path, n):
    path.write_text(
        '\n'.join(
            json.dumps(dict(question=f'{i}?', answer='yes ' * (i % 9)))
            for i in range(1, n + 1)
        )
    )


def questions(source, lane=0, lanes=1, at=None):
    return [
        row['texts'][0]['user'].split()[-1]
        for _, row in source.rows_of(lane, lanes, 0, at)
    ]


def test_a_tar_is_indexed_once_and_a_lane_reads_its_own_samples(tmp_path, monkeypatch):
    "The index is made again when it is damaged and when the tar has changed; of four lanes, and after a resume, none reads a sample of another."
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    scans = []
    scan = load._sample_places
    monkeypatch.setattr(
        load, '_sample_places', lambda file: scans.append(file) or scan(file)
    )
    write_tar(tmp_path / 'a.tar', 40)

    def source():
        load._open_tar.cache_clear()
        return load_sources(train_cfg(tmp_path / 'a.tar', ['default'], val_size=0))[0]

    whole = questions(source())
    assert (
        whole == [f'{i}?' for i in range(40)] == questions(source()) and len(scans) == 1
    )
    index, lock = sorted(
        (tmp_path / 'cache' / 'nanovlm').iterdir(), key=lambda p: p.suffix == '.lock'
    )
    made = index.read_bytes()
    for damaged in (b'', made[:-9], made[:200] + b'x' + made[201:]):
        index.write_bytes(damaged)
        assert questions(source()) == whole
    assert len(scans) == 4 and index.read_bytes() == made
    opened = source()
    read = []
    parsed = load._Tar.parsed
    monkeypatch.setattr(
        load._Tar,
        'parsed',
        lambda self, file, place: (
            read.append(place['starts'][0]) or parsed(self, file, place)
        ),
    )
    mine = [*opened.rows_of(1, 4, 0)]
    assert len(mine) == len(read) == 10
    assert (
        questions(opened, 1, 4, mine[6][0])
        == [row['texts'][0]['user'].split()[-1] for _, row in mine[7:]]
        and len(read) == 13
    )
    write_tar(tmp_path / 'a.tar', 40, ' new')
    assert questions(opened) == ['new?'] * 40 and len(scans) == 5


@pytest.mark.parametrize('stream', [True, False])
def test_lines_are_read_when_they_are_due(tmp_path, tokenizer, stream):
    "A table and a stream of JSON lines: exact after a resume; a broken line is left out under its number; 30,000 lines of which none is parsed at the start."
    write_lines(tmp_path / 't.jsonl', 200)
    text = (tmp_path / 't.jsonl').read_text().splitlines()
    text[76] = '{"question": '
    (tmp_path / 't.jsonl').write_text('\n'.join(text))
    cfg = train_cfg(
        tmp_path / 't.jsonl',
        ['default'],
        stream_dataset=stream,
        val_size=0,
        num_of_sequences=3,
        batch_size=2,
    )

    def loader():
        return get_dataloaders(cfg, VLM, tokenizer=tokenizer)[0]

    first = loader()
    whole = [(batch['ids'], json.dumps(first.state_dict())) for batch in first]
    dropped = first.samples.drops.reasons
    assert [
        (id.split('/')[-1], reason)
        for id, reason in dropped.items()
        if reason != 'no_turns'
    ] == [('77', 'bad_row')]
    seen = [id for ids, _ in whole for pack in ids for id in pack]
    assert len(seen) == len({*seen}) == 200 - len(dropped) and len(dropped) < 30
    for n in (0, len(whole) // 2, len(whole) - 2):
        again = loader()
        again.load_state_dict(json.loads(whole[n][1]))
        assert [batch['ids'] for batch in again] == [ids for ids, _ in whole[n + 1 :]]


@pytest.mark.skipif(
    not Path('/proc/self/fd').exists(), reason='descriptors are read from /proc'
)
def test_many_lanes_hold_no_file_open(root, tokenizer, monkeypatch):
    "Twenty lanes in a process give the packs that they give with their files open, and hold none; a state of an older version goes on."
    cfg = train_cfg(
        root,
        ['many', 'saved'],
        val_size=0,
        batch_size=4,
        gradient_accumulation_steps=5,
        num_of_sequences=2,
    )

    def played(state=None):
        loader, _ = get_dataloaders(cfg, VLM, tokenizer=tokenizer)
        if state:
            loader.load_state_dict(state)
        before = len(os.listdir('/proc/self/fd'))
        batches = iter(loader)
        first = next(batches)['ids']
        held = len(os.listdir('/proc/self/fd')) - before
        return [first, *(b['ids'] for b in batches)], held, loader.state_dict()

    packs, held, state = played()
    assert held <= 2 and state['rules']['first'] == 6
    older = state | dict(
        rules=state['rules'] | dict(first=8),
        states={k: [0, None, 0, 0] for k in state['states']},
    )
    again, _, then = played(older)
    assert then['rules']['first'] == 8 and sorted(
        i for ids in again for p in ids for i in p
    ) == sorted(i for ids in packs for p in ids for i in p)
    monkeypatch.setattr(loader_module, 'OPEN_LANES', 99)
    assert played()[0] == packs
