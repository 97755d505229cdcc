"""Ten minutes on one card: everything that is claimed for a GPU, measured in eight phases.

    python tests/gpu/measure.py                        # measure; figures go to measured.json after every phase
    python tests/gpu/measure.py --rows measured.json   # rows for RESULTS.md, each beside its prediction of `predict.py`

Needs no network; torch 2.11 or later, Python 3.10 or later. It may be cut off after any phase, and a phase that fails
is written down and does not keep the next from beginning. Without a GPU it takes a tiny model: a rehearsal, whose figures mean nothing.
"""

import argparse
import gc
import io
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path

import torch

from nanovlm_nb.model.attention import BACKENDS, explicit_attention, problem_of
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.core.dist import Dist
from nanovlm_nb.model.flops import count_flops, peak_flops
from nanovlm_nb.core.layout import Layout
from nanovlm_nb.training.checkpoint import Saver
from nanovlm_nb.training.precision import compile_blocks
from nanovlm_nb.training.hooks import costs
from nanovlm_nb.training.trainer import Trainer, accumulate, make_trainer, train_step
from nanovlm_nb.training.update import tally, gather_update
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.tools.plan import example_batch, memory
from nanovlm_nb.training.lora import adapt
from arms import CHANGES
from predict import ARMS, LIKE_NANOVLM, WORKERS, nanovlm_loss, read_page, shown

HERE = Path(__file__).resolve().parent
WARM = 3
COUNTS = 'tiles', 'tokens', 'pairs', 'targets', 'window_pairs', 'picture_pairs'
ROUNDS = 10


# --- what is measured with


class Bench:
    "A device, sizes that fit it, and clocks that wait for it."

    def __init__(self, tiny: bool):
        self.cuda = torch.cuda.is_available() and not tiny
        self.device = torch.device('cuda' if self.cuda else 'cpu')
        self.model, self.run = preset('nanovlm')
        self.run = evolve(self.run, dtype='bfloat16', num_workers=0, log_wandb=False)
        self.pack = {}
        self.warm = WARM
        self.rounds = ROUNDS
        if not self.cuda:
            self.model = evolve(
                self.model,
                vit_hidden_dim=32,
                vit_n_heads=2,
                vit_n_blocks=1,
                vit_img_size=32,
                vit_inter_dim=64,
                max_img_size=64,
                mp_pixel_shuffle_factor=1,
                mp_image_token_length=4,
                lm_hidden_dim=32,
                lm_inter_dim=64,
                lm_n_heads=2,
                lm_n_kv_heads=1,
                lm_n_blocks=1,
                lm_max_length=128,
                lm_base_vocab_size=100,
            )
            self.pack = dict(documents=3, tiles=2)
            self.warm = 1
            self.rounds = 2

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, f) -> float:
        "Of one call, from an idle device to an idle device."
        self.sync()
        start = time.perf_counter()
        f()
        self.sync()
        return time.perf_counter() - start

    def timed(self, f, rounds=None) -> dict:
        for _ in range(self.warm):
            f()
        return spread([self.seconds(f) for _ in range(rounds or self.rounds)])

    def configs(self, how: dict):
        "Model and run with some fields changed; None if a field does not exist here."
        known = [{f.name for f in fields(c)} for c in (self.model, self.run)]
        if set(how) - known[0] - known[1]:
            return None
        return [
            evolve(c, **{k: v for k, v in how.items() if k in names})
            for c, names in zip((self.model, self.run), known)
        ]

    def trainer(self, how: dict, compiled=False, weights=None, changes=()) -> Trainer:
        model, run = self.configs(how)
        torch.manual_seed(0)
        with self.device:
            net = VisionLanguageModel(model, load_backbone=False).train()
        if weights is not None:
            net.load_state_dict(weights, assign=True)
        for change in changes:
            change(net)
        trainer = make_trainer(net, run, [], [], dist=Dist(device=self.device))
        if compiled:
            compile_blocks(trainer.base, **({} if self.cuda else dict(backend='eager')))
        return trainer

    def batch(self, trainer, contents=None) -> dict:
        made = example_batch(
            trainer.base.cfg, trainer.cfg.batch_size, **(contents or self.pack)
        )
        return pinned(made) if self.cuda else made


def pinned(x):
    "As the loader hands it over."
    if isinstance(x, torch.Tensor):
        return x.pin_memory()
    if isinstance(x, Layout):
        return x.each(torch.Tensor.pin_memory)
    if isinstance(x, dict):
        return {k: pinned(v) for k, v in x.items()}
    return [pinned(v) for v in x] if isinstance(x, list) else x


def spread(values: list) -> dict:
    "Median and range, in milliseconds."
    ms = sorted(1e3 * v for v in values)
    return dict(
        ms=round(statistics.median(ms), 3),
        lowest=round(ms[0], 3),
        highest=round(ms[-1], 3),
        n=len(ms),
    )


def release(bench):
    gc.collect()
    if bench.cuda:
        torch.cuda.empty_cache()


# --- phases


def phase_1_machine(b) -> dict:
    "Versions, the device, matrix products of a round size and of the model's own sizes."
    n, big = (8192, 8192) if b.cuda else (64, 64)
    D = b.model.vit_hidden_dim
    H = b.model.vit_inter_dim
    L = b.model.lm_hidden_dim
    I = b.model.lm_inter_dim
    tiles = 104 * b.model.n_patches if b.cuda else 64
    shapes = dict(
        square=(big, n, n),
        vision_qkv=(tiles, D, 3 * D),
        vision_up=(tiles, D, H),
        vision_down=(tiles, H, D),
        language_q=(n, L, L),
        language_up=(n, L, I),
        language_down=(n, I, L),
    )
    rates = {}
    for name, (m, k, o) in shapes.items():
        x, w = (
            torch.randn(s, device=b.device, dtype=torch.bfloat16)
            for s in ((m, k), (k, o))
        )
        t = b.timed(lambda: x @ w)
        rates[name] = dict(t, tflops=round(2 * m * k * o / t['ms'] / 1e9, 1))
    more = (
        dict(
            name=torch.cuda.get_device_name(),
            capability=torch.cuda.get_device_capability(),
            gib=torch.cuda.get_device_properties(0).total_memory / 2**30,
            cudnn=torch.backends.cudnn.version(),
            cuda=torch.version.cuda,
            driver=driver(),
        )
        if b.cuda
        else dict(name='CPU')
    )
    return dict(
        date=datetime.now(timezone.utc).isoformat(timespec='seconds'),
        python=platform.python_version(),
        torch=torch.__version__,
        cores=os.cpu_count(),
        **more,
        matmul=rates,
    )


def driver() -> str:
    asked = subprocess.run(
        ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'],
        capture_output=True,
        text=True,
        timeout=20,
    )
    return asked.stdout.strip()


def rows_of(n: int, T: int, rows: int = 2) -> Layout:
    "`n` documents of uneven length in rows of T."
    rng = random.Random(n)
    lens = []
    for k in [n // rows] * rows:
        cuts = sorted(rng.sample(range(8, T - 8), k - 1)) if k > 1 else []
        lens.append([e - s for s, e in zip([0, *cuts], [*cuts, T])])
    return Layout.from_doc_lens(lens, T)


def phase_2_attention(b) -> dict:
    "Truth, isolation, and a layer's time for each backend and number of documents."
    c = b.model
    T = b.model.lm_max_length
    H = c.lm_n_heads
    G = c.lm_n_kv_heads
    D = c.head_width

    def qkv(T, dtype):
        return [
            torch.randn(2, h, T, D, device=b.device, dtype=dtype, requires_grad=True)
            for h in (H, G, G)
        ]

    torch.manual_seed(0)
    small = qkv(min(T, 1024), torch.bfloat16)
    layout = rows_of(6, min(T, 1024))
    truth = explicit_attention(*(x.double() for x in small), layout, True, 0.0)
    names = [
        n
        for n in ('sdpa', 'docs', 'varlen')
        if n != 'varlen' or problem_of('varlen', b.device.type, torch.bfloat16) is None
    ]
    errors = {
        n: (BACKENDS[n](*small, layout, True, 0.0).double() - truth).abs().max().item()
        for n in names
    }
    found = {
        n: BACKENDS[n](small[0], small[1], small[2], layout, True, 0.0) for n in names
    }
    leaks = {
        n: torch.autograd.grad(
            out[0, :, : layout.doc_lens[0][0]].sum(), small[2], retain_graph=True
        )[0][0, :, layout.doc_lens[0][0] :]
        .abs()
        .max()
        .item()
        for n, out in found.items()
    }
    layers = {}
    for n_docs in (4, 17, 60):
        big = qkv(T, torch.bfloat16)
        layout = rows_of(n_docs, T).to(b.device)
        for n in names:
            try:
                layers[f'{n}, {n_docs} documents'] = b.timed(
                    lambda: BACKENDS[n](*big, layout, True, 0.0).sum().backward(),
                    5 if b.cuda else 1,
                )
            except RuntimeError as e:
                layers[f'{n}, {n_docs} documents'] = dict(
                    error=' '.join(str(e).split())[:300]
                )
    return dict(
        error_against_float64=errors, gradient_from_other_documents=leaks, layer=layers
    )


def phase_3_waits(b) -> dict:
    "One micro-batch while every wait for the card is an error."
    t = b.trainer({})
    batch = b.batch(t)
    update = gather_update([batch], t.dist)
    for _ in range(2):
        train_step(t, update)
    b.sync()
    if b.cuda:
        torch.cuda.set_sync_debug_mode('error')
    try:
        accumulate(t, update)
    except RuntimeError as e:
        return dict(
            waits=1,
            first=' '.join(str(e).split())[:300],
            where=[
                f'{Path(f.filename).name}:{f.lineno}'
                for f in traceback.extract_tb(e.__traceback__)
            ][-6:],
        )
    finally:
        if b.cuda:
            torch.cuda.set_sync_debug_mode('default')
    return dict(waits=0)


def naive_step(b, trainer, batch):
    "Forward and backward as nanoVLM makes them, on the weights of a trainer."
    tiles = torch.cat([t for row in batch['images'] for t in row]).float() / 255
    batch = {
        k: batch[k].to(b.device) for k in ('input_ids', 'labels', 'attention_mask')
    }

    def step():
        with torch.autocast(b.device.type, torch.bfloat16):
            loss = nanovlm_loss(
                trainer.base,
                batch['input_ids'],
                tiles,
                batch['attention_mask'],
                batch['labels'],
            )
        loss.backward()

    return step


def make_arms(b) -> dict:
    "Name -> (a micro-batch, its trainer, its batch); all on the same weights."
    first = b.trainer({})
    weights = first.base.state_dict(keep_vars=True)
    arms = {}
    arms[LIKE_NANOVLM] = (naive_step(b, first, b.batch(first)), first, b.batch(first))
    wanted = [(name, how, compiled, ()) for name, (how, compiled) in ARMS.items()]
    for name, changes in CHANGES.items():
        if b.cuda or 'flex' not in [f.__name__.removeprefix('use_') for f in changes]:
            wanted.append((name, {}, b.cuda, changes))
    for name, how, compiled, changes in wanted:
        if b.configs(how) is None:
            continue
        t = b.trainer(how, compiled, weights, changes)
        batch = b.batch(t)
        update = gather_update([batch], t.dist)
        arms[name] = (
            lambda t=t, batch=batch, update=update: accumulate(t, update),
            t,
            batch,
        )
    return arms


def phase_4_arms(b) -> dict:
    "Milliseconds of a micro-batch by arm, one round of all arms after the other, and of an update."
    arms = make_arms(b)
    found = {}
    times = {name: [] for name in arms}
    for name, (step, _, _) in arms.items():
        start = time.perf_counter()
        try:
            for _ in range(b.warm):
                step()
        except (RuntimeError, ValueError, NotImplementedError) as e:
            found[name] = dict(error=' '.join(str(e).split())[:300])
        b.sync()
        found.setdefault(name, {})['warm_up_s'] = round(time.perf_counter() - start, 2)
    for _ in range(b.rounds):
        for name, (step, _, _) in arms.items():
            if 'error' not in found[name]:
                times[name].append(b.seconds(step))
    peak = peak_flops(torch.cuda.get_device_name()) if b.cuda else None
    for name, (_, t, batch) in arms.items():
        if 'error' in found[name]:
            continue
        d = tally(batch)
        s = spread(times[name])
        useful = count_flops(
            costs(t), d['tiles'], d['tokens'], d['pairs'], d['targets']
        )
        found[name] |= s | dict(
            tokens_per_second=round(1e3 * d['tokens'] / s['ms']),
            mfu=round(1e3 * useful / s['ms'] / peak, 4) if peak else None,
        )
    t, batch = arms['varlen'][1:]
    t.optimizer.zero_grad(set_to_none=True)
    update = gather_update([batch], t.dist)
    whole = b.timed(lambda: train_step(t, update), 3 if b.cuda else 1)
    micro = found['varlen']['ms']
    return dict(
        micro_batch=found,
        update=dict(whole, beyond_micro_batch_ms=round(whole['ms'] - micro, 3)),
        skipped=[n for n in ARMS if n not in arms],
    )


def phase_6_memory(b) -> dict:
    "The highest point of an update with 1, 2 and 4 packs."
    found = {}
    for rows in (1, 2, 4):
        release(b)
        t = b.trainer(dict(batch_size=rows))
        batch = b.batch(t)
        update = gather_update([batch, batch], t.dist)
        train_step(t, update)
        if b.cuda:
            torch.cuda.reset_peak_memory_stats()
        train_step(t, update)
        found[str(rows)] = (
            round(torch.cuda.max_memory_allocated() / 2**30, 2) if b.cuda else None
        )
        del t
    return dict(gib=found)


def pictures(folder: Path, n: int, side: int) -> Path:
    "A parquet file of JPEGs with a question each."
    from datasets import Dataset, Features, Image, Sequence, Value
    from PIL import Image as PIL

    rng = torch.Generator().manual_seed(0)

    def jpeg():
        small = torch.randint(
            0, 256, (side // 4, side // 4, 3), generator=rng, dtype=torch.uint8
        ).numpy()
        file = io.BytesIO()
        PIL.fromarray(small).resize((side, side), PIL.Resampling.BICUBIC).save(
            file, 'JPEG', quality=85
        )
        return file.getvalue()

    kinds = Features(
        dict(
            images=Sequence(Image()),
            texts=[dict(user=Value('string'), assistant=Value('string'))],
        )
    )
    shots = [jpeg() for _ in range(min(n, 32))]
    rows = dict(
        images=[[dict(bytes=shots[i % len(shots)], path=None)] for i in range(n)],
        texts=[[dict(user='what colour is the circle', assistant='red')]] * n,
    )
    (folder / 'data').mkdir()
    Dataset.from_dict(rows, features=kinds).to_parquet(
        folder / 'data' / 'train.parquet'
    )
    return folder / 'data'


def phase_7_trainer(b) -> dict:
    "The whole command with 4, 8 and 12 loader workers: the share of the time that waits for data."
    found = {}
    model = b.model
    shapes = preset('shapes')[0]
    own = [
        f'--{f.name}={getattr(model, f.name)}'
        for f in fields(model)
        if f.name.startswith(('vit_', 'lm_', 'mp_'))
        and isinstance(getattr(model, f.name), (int, float))
        and f.name not in ('lm_base_vocab_size', 'lm_vocab_size', 'lm_use_tokens')
        and getattr(model, f.name) != getattr(shapes, f.name)
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = pictures(Path(folder), 3000 if b.cuda else 40, 1024 if b.cuda else 64)
        for workers in WORKERS if b.cuda else (0,):
            flags = f'''--preset shapes --lm_tokenizer shapes --train_dataset_path {data} --val_size 0 --num_workers {workers} --batch_size 2 --gradient_accumulation_steps {8 if b.cuda else 1}
                --max_training_steps {6 if b.cuda else 2} --num_of_sequences 32 --eval_interval 1000 --save_interval 0 --stats_log_interval 2 --log_wandb False --progress_bar False
                --run_name w{workers} --dtype bfloat16 --max_sample_length {model.lm_max_length} --max_img_size {model.max_img_size}'''.split()
            done = subprocess.run(
                [sys.executable, '-m', 'nanovlm_nb.train', *flags, *own],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=150,
                env=os.environ
                | dict(
                    PYTHONPATH=os.pathsep.join(
                        [str(HERE.parents[1]), os.environ.get('PYTHONPATH', '')]
                    ),
                    WANDB_MODE='offline',
                    HF_HUB_OFFLINE='1',
                ),
            )
            found[str(workers)] = (
                shares(Path(folder) / 'checkpoints' / f'w{workers}' / 'log.jsonl')
                if done.returncode == 0
                else dict(error=done.stderr[-400:])
            )
    return dict(workers=found)


def shares(log: Path) -> dict:
    "The last report of a run."
    reports = [
        r
        for r in map(json.loads, log.read_text(encoding='utf-8').splitlines())
        if 'time/data' in r
    ]
    return {
        k: round(reports[-1][k], 4)
        for k in (
            'time/data',
            'time/forward_backward',
            'perf/step_time',
            'tokens_per_second',
            'perf/mfu',
        )
        if k in reports[-1]
    }


def phase_8_determinism(b) -> dict:
    "Five updates twice, with torch's strict algorithms; what they cost; and the pause of a checkpoint."

    def five(strict):
        torch.use_deterministic_algorithms(strict, warn_only=False)
        if b.cuda:
            torch.backends.cuda.enable_cudnn_sdp(not strict)
        t = b.trainer({})
        update = gather_update([b.batch(t)], t.dist)
        times = [b.seconds(lambda: train_step(t, update)) for _ in range(5)]
        return (
            torch.stack(
                [p.detach().double().sum() for p in t.base.parameters()]
            ).tolist(),
            spread(times[2:]),
            t,
        )

    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    try:
        (one, slow, _), (two, *_) = five(True), five(True)
    finally:
        torch.use_deterministic_algorithms(False)
        if b.cuda:
            torch.backends.cuda.enable_cudnn_sdp(True)
    _, quick, t = five(False)
    pauses = {}
    for background in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            saver = Saver(t.dist, background)
            pauses['background' if background else 'waiting'] = [
                round(
                    1e3
                    * b.seconds(
                        lambda step=step: saver.save(
                            t.base, Path(folder), step, None, {}, t.optimizer
                        )
                    ),
                    1,
                )
                for step in (1, 2)
            ]
            saver.wait()
    return dict(equal=one == two, strict=slow, usual=quick, checkpoint_pause_ms=pauses)


def leak_of(b, net, batch) -> float:
    "The largest change of the other samples' scores when the picture of the first sample is another."
    images = [[tiles.to(b.device) for tiles in row] for row in batch['images']]
    ids = batch['input_ids'].to(b.device)
    layout = batch['layout'].to(b.device)
    end = layout.doc_lens[0][0]
    other = [[255 - images[0][0], *images[0][1:]], *images[1:]]
    with torch.no_grad(), torch.autocast(b.device.type, torch.bfloat16):
        before, after = (
            net(ids, pictures, layout=layout, return_logits=True)[0][0, end:]
            for pictures in (images, other)
        )
    return (before - after).abs().max().item()


def phase_9_qwen(b) -> dict:
    "Qwen2.5-VL with random weights, all of it and adapters: a micro-batch, its memory beside the plan, isolation."
    model, run = preset('qwen2_5_vl_3b')
    run = evolve(run, load_from=None, dtype='bfloat16', num_workers=0, log_wandb=False)
    if not b.cuda:
        model = evolve(
            model,
            vit_hidden_dim=32,
            vit_inter_dim=64,
            vit_n_heads=2,
            vit_n_blocks=2,
            vit_full_blocks=[1],
            lm_hidden_dim=48,
            lm_inter_dim=96,
            lm_n_heads=4,
            lm_n_kv_heads=2,
            lm_n_blocks=1,
            lm_max_length=128,
            lm_base_vocab_size=100,
            lm_vocab_size=128,
            lm_mrope_sections=[2, 2, 2],
        )
    found = {}
    for name, how in dict(all={}, adapters=dict(lora_rank=16)).items():
        release(b)
        cfg = evolve(run, **how)
        torch.manual_seed(0)
        with b.device:
            net = VisionLanguageModel(model, load_backbone=False).train()
        if cfg.lora_rank:
            adapt(net, cfg, None, b.device)
        t = make_trainer(net, cfg, [], [], dist=Dist(device=b.device))
        batch = example_batch(model, cfg.batch_size)
        update = gather_update([batch, batch], t.dist)
        train_step(t, update)
        if b.cuda:
            torch.cuda.reset_peak_memory_stats()
        times = b.timed(lambda: train_step(t, update), 5 if b.cuda else 1)
        d = tally(batch)
        useful = 2 * count_flops(costs(t), **{k: d[k] for k in COUNTS})
        found[name] = dict(
            times,
            tokens_per_second=round(2e3 * d['tokens'] / times['ms']),
            planned_gib=round(
                memory(model, evolve(cfg, gradient_accumulation_steps=2)).total / 2**30,
                2,
            ),
        )
        if b.cuda:
            found[name] |= dict(
                gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
                mfu=round(
                    1e3
                    * useful
                    / times['ms']
                    / peak_flops(torch.cuda.get_device_name()),
                    4,
                ),
            )
        if not cfg.lora_rank:
            found['change_of_other_samples'] = leak_of(b, t.base, batch)
        del t, net
    return found


PHASES = {
    int(name.split('_')[1]): f
    for name, f in list(globals().items())
    if name.startswith('phase_')
}


def measure(b, out: Path, wanted: list) -> dict:
    "All phases, each written down at once; one that fails is written down too."
    found = json.loads(out.read_text()) if out.is_file() else {}
    for number in wanted:
        start = time.perf_counter()
        try:
            result = PHASES[number](b)
        except Exception as e:
            result = dict(
                error=f'{type(e).__name__}: {e}'[:600],
                where=[
                    f'{Path(f.filename).name}:{f.lineno}'
                    for f in traceback.extract_tb(e.__traceback__)
                ][-6:],
            )
        release(b)
        found[PHASES[number].__name__] = dict(
            result, took_s=round(time.perf_counter() - start, 1)
        )
        part = out.with_suffix('.part')
        part.write_text(json.dumps(found, indent=1))
        os.replace(part, out)
        sys.stderr.write(
            f"{PHASES[number].__name__}: {'FAILED, ' + result['error'] if 'error' in result else 'done'}, {found[PHASES[number].__name__]['took_s']} s\n"
        )
    return found


# --- beside predictions


def figures(measured: dict) -> dict:
    "What was measured, under the names of `predict.predict`."

    def of(number):
        return measured.get(PHASES[number].__name__, {})

    found = {}
    for name, a in of(4).get('micro_batch', {}).items():
        if 'ms' in a:
            found |= {
                f'{name}: ms of a micro-batch': a['ms'],
                f'{name}: tokens/s': a['tokens_per_second'],
                f'{name}: MFU': a['mfu'],
            }
    arms = of(4).get('micro_batch', {})
    if {LIKE_NANOVLM, 'varlen, compiled'} <= {n for n, a in arms.items() if 'ms' in a}:
        found['two packs against the arm like nanoVLM'] = (
            arms[LIKE_NANOVLM]['ms'] / arms['varlen, compiled']['ms']
        )
    if 'update' in of(4):
        found['update beyond its micro-batch, ms'] = of(4)['update'][
            'beyond_micro_batch_ms'
        ]
    if 'waits' in of(3):
        found['waits inside a micro-batch'] = of(3)['waits']
    for n, w in of(7).get('workers', {}).items():
        if 'time/data' in w:
            found[f'waiting for data, {n} workers'] = w['time/data']
    for rows, gib in of(6).get('gib', {}).items():
        found[f'peak memory, {rows} packs, GiB'] = gib
    return found


def result_rows(measured: dict, predicted: dict) -> str:
    "Rows for RESULTS.md."
    machine = measured.get(PHASES[1].__name__, {})
    head = f"Measured {machine.get('date', '?')} on {machine.get('name', '?')}, torch {machine.get('torch', '?')}, CUDA {machine.get('cuda', 'none')}, Python {machine.get('python', '?')}."
    rows = []
    for name, x in figures(measured).items():
        expected = predicted.get(name)
        off = f'{x / expected - 1:+.0%}' if x is not None and expected else '-'
        rows.append(f'| {name} | {shown(expected)} | {shown(x)} | {off} |')
    failed = [
        f"- {name} failed: {p['error']}" for name, p in measured.items() if 'error' in p
    ]
    return '\n'.join(
        [
            head,
            '',
            '| figure | predicted | measured | off by |',
            '|---|---|---|---|',
            *rows,
            *(['', *failed] if failed else []),
            '',
        ]
    )


def main(argv=None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        '--out',
        type=Path,
        default=Path('measured.json'),
        help='what was measured (default: %(default)s); phases that it holds are kept unless they are measured again',
    )
    p.add_argument(
        '--phases',
        type=int,
        nargs='+',
        default=sorted(PHASES),
        choices=sorted(PHASES),
        help='default: all',
    )
    p.add_argument(
        '--tiny',
        action='store_true',
        help='a rehearsal on the CPU, also where there is a GPU',
    )
    p.add_argument(
        '--rows', type=Path, metavar='JSON', help='print rows for RESULTS.md'
    )
    a = p.parse_args(argv)
    os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')
    if a.rows:
        sys.stdout.write(
            result_rows(
                json.loads(a.rows.read_text()), read_page(HERE / 'PREDICTED.md')
            )
        )
    else:
        measure(Bench(a.tiny), a.out, a.phases)
    return 0


if __name__ == '__main__':
    sys.exit(main())
