"The stream of batches is one and the same, whatever the ranks, the workers and the interruptions; every row comes once or is named with a reason."
import hashlib
import io
import json
import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

import datasets
import pytest
from PIL import Image

from nanovlm_nb.config import evolve, preset
from nanovlm_nb.dataset import Dropped, VQADataset
from nanovlm_nb.dist import Dist, FromGather
from nanovlm_nb.lanes import PackLoader, merge_states
from nanovlm_nb.loader import load_sources, load_tokenizer, make_samples, pack_loader
from nanovlm_nb.trainer import describe, gather_update

pytestmark = [pytest.mark.usefixtures('one_thread'), pytest.mark.filterwarnings('ignore:This DataLoader will create')]
LENGTH, LONGEST = 128, 112
FEATURES = datasets.Features(images=datasets.List(datasets.Image()), source=datasets.Value('string'), relevance_ratings=datasets.List(datasets.Value('int64')),
                             texts=datasets.List(dict(user=datasets.Value('string'), assistant=datasets.Value('string'))))
ROWS = dict(few=24, many=36, saved=12)                                          # configuration -> rows; `few` has 3 shares, the others 12
FATES = {3: 'ratings', 5: 'too_long', 7: 'no_turns', 8: 'cut', 9: 'truncated', 11: 'no_header'}  # row number modulo 12 -> what is odd about it
REASONS = dict(ratings='ratings', too_long='too_long', no_turns='no_turns', truncated='unreadable_image', no_header='unreadable_image')


def png(dice, w=16, h=16):
    "A picture of noise, encoded."
    b = io.BytesIO(); Image.frombytes('RGB', (w, h), dice.randbytes(3*w*h)).save(b, 'PNG')
    return b.getvalue()


def make_row(name, i, dice):
    "A row whose `source` says which it is, with a fault that follows from its number."
    fate, words = FATES.get(i % 12), dice.randint(1, 8)
    pictures = [png(dice, dice.choice((16, 16, 32))) for _ in range(dice.choice((0, 1, 1, 2)) if fate not in ('truncated', 'no_header') else 1)]
    if fate == 'truncated': pictures = [png(dice, 32, 32)[:-600]]
    if fate == 'no_header': pictures = [b'no picture']
    turns = [dict(user=f'{name} {i}?', assistant='yes '*(90 if fate == 'too_long' else words))]
    if fate == 'cut': turns.append(dict(user='Sure?', assistant='no'))
    return dict(images=[dict(bytes=b, path=None) for b in pictures], texts=[] if fate == 'no_turns' else turns, source=f'{name}-{i}',
                relevance_ratings=dict(ratings=[0], cut=[3, 0]).get(fate, [3]))


@pytest.fixture(scope='module', autouse=True)
def quiet(tmp_path_factory):
    "No progress bars; what `datasets` copies goes where the tests' files go."
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path_factory.mktemp('cache'))
        yield
    datasets.enable_progress_bars()


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    "Three configurations: one file with few row groups, several files with many, a save_to_disk folder."
    root, dice = tmp_path_factory.mktemp('stream'), random.Random(0)
    made = {name: datasets.Dataset.from_list([make_row(name, i, dice) for i in range(n)], features=FEATURES) for name, n in ROWS.items()}
    for name, files, group in (('few', 1, 8), ('many', 3, 3)):
        (root/name).mkdir()
        for f in range(files): made[name].shard(files, f, contiguous=True).to_parquet(root/name/f'train-{f}.parquet', batch_size=group)
    made['saved'].save_to_disk(root/'saved')
    return root


@pytest.fixture(scope='module')
def tokenizer(): return load_tokenizer(VLM)


@dataclass(frozen=True)
class Data:
    "What decides about the order of the packs."
    names: tuple        # configurations
    weights: tuple      # empty: pooled
    stream: bool
    lanes: int          # S
    window: int
    seed: int

    def __str__(self): return f"{'stream' if self.stream else 'map'}-{'+'.join(self.names)}-{'x'.join(map(str, self.weights)) if self.weights else 'pooled'}-S{self.lanes}-w{self.window}-s{self.seed}"


def draw_data(seed):
    "One of the data configurations."
    dice = random.Random(seed)
    names = [('few',), ('many',), ('few', 'saved'), ('few', 'many', 'saved'), ('many', 'saved')][seed % 5]
    weights = tuple(dice.choice((1, 2, 3)) for _ in names) if len(names) > 1 and seed//5 % 2 else ()
    return Data(names, weights, seed % 2 == 0, dice.choice((4, 8)), dice.choice((1, 1, 2, 3)), seed)


def draw_segments(data, dice):
    "Two to four pieces of a run: (ranks, batch size, accumulation), workers, updates."
    splits = [(w, b, data.lanes//w//b) for w in (1, 2, 4) for b in (1, 2, 4, 8) if data.lanes % (w*b) == 0]
    def piece():
        w, b, a = dice.choice(splits)
        workers = dice.choice([n for n in (1, 3) if n <= a*b]) if w < 4 and dice.random() < .12 else 0
        return (w, b, a), workers, dice.randint(1, 3)
    return [piece() for _ in range(dice.randint(1, 3))]


DATA = [draw_data(seed) for seed in range(20)]
CASES_EACH = 5


class Remembering(VQADataset):
    "Plans and decodes equal rows once, since many runs read the same few."
    def plan_row(self, row):
        key = repr(row['texts']), repr(row['relevance_ratings']), tuple(map(content, row['images']))
        if key not in self.plans: self.plans[key] = super().plan_row(row)
        return replace(self.plans[key], id=row['id'])

    def finish(self, plan, pictures, rng=None):
        key = plan.ids.tobytes(), tuple(map(content, pictures))
        if key not in self.made: self.made[key] = super().finish(plan, pictures, rng)
        return self.made[key] | dict(id=plan.id)


def content(picture):
    "The bytes of an encoded picture."
    picture.seek(0)
    return picture.read()


@dataclass(frozen=True)
class Played(FromGather):
    "One of the ranks that are played in one process; it knows what all of them say."
    rank: int
    world_size: int
    said: list

    def gather(self, obj):
        assert obj == self.said[self.rank]
        return self.said


def packs_of(batch):
    "The packs of a micro-batch: sample ids, document lengths, and a digest of token ids, labels and pixels."
    for ids, lens, *tensors, tiles in zip(batch['ids'], batch['doc_lens'], batch['input_ids'], batch['labels'], batch['images']):
        assert sum(lens) <= LENGTH and len(lens) == len(ids)
        yield ids, lens, hashlib.sha1(b'|'.join(x.numpy().tobytes() for x in (*tensors, *tiles))).hexdigest()


def global_updates(loaders, accumulation):
    "The rest of an epoch as all ranks see it: for each update the packs of all ranks, in the order in which the gradient adds them up."
    batches = [iter(l) for l in loaders]
    while True:
        mine = [list(islice(b, accumulation)) for b in batches]
        said = [[describe(b) for b in ms] for ms in mine]
        updates = [gather_update(ms, Played(r, len(loaders), said), l.idle) for r, (ms, l) in enumerate(zip(mine, loaders))]
        if None in updates: break
        assert len({(u.digest, u.targets, u.tokens, u.samples, len(u.micro_batches)) for u in updates}) == 1
        yield [p for m in range(accumulation) for u in updates for p in packs_of(u.micro_batches[m])]
    assert not any(updates)


VLM = evolve(preset('shapes')[0], vit_img_size=16, vit_patch_size=4, max_img_size=32, lm_max_length=LENGTH)


def train_cfg(root, names, **changes):
    "A run on some of the configurations."
    return evolve(preset('shapes')[1], train_dataset_path=str(root), train_dataset_name=list(names), data_cutoff_idx=None, max_sample_length=LONGEST,
                  max_images_per_example=3, max_images_per_knapsack=3, **dict(dict(stream_dataset=True, val_size=5, num_workers=0), **changes))


class Runs:
    "Runs on one data configuration."
    def __init__(self, data, root, tokenizer):
        self.cfg = train_cfg(root, data.names, train_dataset_weights=list(data.weights), stream_dataset=data.stream, num_of_sequences=data.window, seed=data.seed)
        self.data, self.tokenizer, self.plans, self.made = data, tokenizer, {}, {}
        self.train, self.val = load_sources(self.cfg)

    def samples(self):
        "What makes samples, with a memory that all runs share."
        made = make_samples(self.cfg, VLM, self.tokenizer)
        made.__class__, made.plans, made.made = Remembering, self.plans, self.made
        return made

    def loader(self, dist, batch, accumulation, workers=0):
        "The loader of a rank."
        cfg = evolve(self.cfg, batch_size=batch, gradient_accumulation_steps=accumulation)
        return pack_loader(self.train, self.samples(), VLM, cfg, dist, True, workers)

    def play(self, split, workers=0, state=None):
        "After each update: its packs, the merged state as JSON, and what has been dropped so far. Epoch after epoch."
        world, batch, accumulation = split
        loaders = [self.loader(Dist(rank=r, world_size=world), batch, accumulation, workers) for r in range(world)]
        if state: [l.load_state_dict(json.loads(state)) for l in loaders]
        while True:
            with closing(global_updates(loaders, accumulation)) as updates:
                for update in updates:
                    yield update, json.dumps(merge_states([l.state_dict() for l in loaders])), {k: v for l in loaders for k, v in l.samples.drops.reasons.items()}
            for l in loaders: l.set_epoch(l.epoch+1)

    def fates(self, source):
        "Sample id -> the row's `source`, for all rows of a source."
        return {row['id']: row['source'] for _, row in source.rows_of(0, 1, 0)}


def expected(tag):
    "Why a row is left out, or None."
    return REASONS.get(FATES.get(int(tag.split('-')[1]) % 12))


@pytest.fixture(scope='module', params=DATA, ids=str)
def runs(request, root, tokenizer): return Runs(request.param, root, tokenizer)


@pytest.fixture(scope='module')
def whole(runs):
    "An uninterrupted run of one rank without workers: for each update its packs, epoch, merged state and drops so far. One epoch and a bit, or two."
    epochs, made = 2 if runs.data.seed < 4 else 1, []
    for update, state, drops in runs.play((1, runs.data.lanes, 1)):
        made.append((update, state, drops, json.loads(state)['epoch']))
        if sum(e >= epochs for *_, e in made) == 3: return made


def test_every_row_once_or_named(runs, whole):
    "Per epoch each sound row once (in mixtures at least once), the others dropped for the expected reason; nothing from the validation rows."
    tags, held_out = runs.fates(runs.train), runs.fates(runs.val)
    everything = {f'{name}-{i}' for name in runs.data.names for i in range(ROWS[name])}
    assert not set(tags.values()) & set(held_out.values()) and {*tags.values(), *held_out.values()} == everything and len(held_out) == 5
    reasons = {i: expected(tag) for i, tag in tags.items()}
    for epoch in range(2 if runs.data.seed < 4 else 1):
        seen = Counter(i for update, _, _, e in whole if e == epoch for ids, _, _ in update for i in ids)
        assert seen.keys() == {i for i, reason in reasons.items() if reason is None}
        assert runs.data.weights or set(seen.values()) == {1}
    dropped = next(drops for _, _, drops, e in whole if e)
    assert dropped == {i: reason for i, reason in reasons.items() if reason}
    assert whole[-1][2] == dropped


@pytest.mark.parametrize('case', range(CASES_EACH))
def test_goes_on_as_if_nothing_had_happened(runs, whole, case):
    "Stopped after any update, resumed once to three times with other ranks and workers: the same packs, positions' worth, and the same drops."
    dice = random.Random(f'{runs.data.seed}/{case}')
    n = dice.randrange(len(whole)) if case else 0       # updates of the uninterrupted run before the first stop
    state, drops = whole[n-1][1:3] if n else (None, {})
    for split, workers, more in draw_segments(runs.data, dice):
        what = f'{runs.data}, after {n} updates as (ranks, batch, accumulation) {split} with {workers} workers'
        with closing(runs.play(split, workers, state)) as run:
            for update, state, found in islice(run, min(more, len(whole)-n)):
                assert [ids for ids, *_ in update] == [ids for ids, *_ in whole[n][0]], what
                assert update == whole[n][0], what
                assert json.loads(state) == json.loads(whole[n][1]), what
                assert drops | found == whole[n][2], what
                n += 1
            drops = drops | found if more and n else drops
