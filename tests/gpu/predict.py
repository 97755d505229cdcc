"""What one H200 is expected to take for an update, before it is measured: prints PREDICTED.md.

    python tests/gpu/predict.py

The real step runs on the meta device, and each operation is written down: its arithmetic, the bytes that it reads and writes, and the block that it
belongs to. Host and GPU are two clocks: the host asks for kernels and goes on, the GPU computes them in order at a share of its peaks.
"""

import sys
import weakref
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from nanovlm_nb.core.fields import IGNORE
from nanovlm_nb.core.config import change, evolve, preset
from nanovlm_nb.core.dist import Dist
from nanovlm_nb.model.attention import choose_backend
from nanovlm_nb.model.flops import count_flops, known_gpu
from nanovlm_nb.tools.plan import (
    LikeCuda,
    example_batch,
    like_cuda,
    meta_net,
    peak_memory,
)
from nanovlm_nb.training.hooks import costs
from nanovlm_nb.training.precision import blocks_of
from nanovlm_nb.training.trainer import accumulate, make_trainer
from nanovlm_nb.training.update import gather_update, tally

HERE = Path(__file__).resolve().parent
PREDICTED_ON = '2026-11-24'
CARD = 'H200'
BANDWIDTH = 4.8e12  # bytes a second, from its data sheet
#: name -> fields of the model or the run, blocks compiled?
ARMS: dict[str, tuple[dict, bool]] = {
    'dense mask': (dict(attn_backend='sdpa'), False),
    'varlen': (dict(attn_backend='auto'), False),
    'varlen, compiled': (dict(attn_backend='auto'), True),
    'varlen, compiled, tiles padded': (
        dict(attn_backend='auto', tile_multiple=8),
        True,
    ),
    'varlen, compiled, batch 4': (dict(attn_backend='auto', batch_size=4), True),
}
LIKE_NANOVLM = 'like nanoVLM'
#: the measured micro-batch that the changes of `arms.py` begin from: ms, tokens/s, MFU
MEASURED = 261, 31105, 0.332
#: ms that a change is expected to save of it, written down on 29 November 2026
SAVED = {
    # 32 layers, of which each took 1.95 ms with varlen and 1.10 with FlexAttention
    'flex': 32 * (1.95 - 1.10),
    # 2.4 TFLOP of q, k and v at 500 TFLOP/s in place of 343, 7.7 of gate and up at 650 in place of 600, less 0.7 ms of joining
    'joined products': 2.4e3 * (1 / 343 - 1 / 500) + 7.7e3 * (1 / 600 - 1 / 650) - 0.7,
    # 8 passes over 104 x 1024 x 768 numbers in 12 blocks and 8192 x 960 in 32, 2 bytes less each, at 3.4 TB/s
    'bfloat16 between blocks': 8
    * 2
    * (104 * 1024 * 768 * 12 + 8192 * 960 * 32)
    / 3.4e9,
}
SAVED['all three'] = sum(SAVED.values())
WORKERS = 4, 8, 12
CORE_S = (
    0.08 / 13
)  # of a core for a tile: a picture of 13 tiles takes 70 to 90 ms to decode, enlarge and cut
META = torch.device('meta')
UPDATE_BYTES = 40  # of a parameter: its norm 4, clipping 8, AdamW in one pass 28
FOREACH_BYTES = 80  # AdamW in ten passes, as the benchmark of nanoVLM makes it


class Rates(NamedTuple):
    "The rates that a GPU reaches, and what the host costs."

    matmul: float = 0.5  # share of the arithmetic, matrix products
    attention: float = 0.33  # flash attention
    masked: float = 0.11  # attention with a mask
    bandwidth: float = 0.7  # share of the bandwidth, everything else
    smallest: float = 3e-6  # seconds of the smallest kernel
    ask: float = 13e-6  # seconds of the host for a kernel of the forward pass
    ask_back: float = 13e-6  # of the backward pass, where the engine asks
    view: float = 3e-6  # for a view
    launch: float = 6e-6  # for a kernel of a compiled block
    link: float = 20e9  # bytes a second from pinned memory to the GPU
    pageable: float = (
        4e9  # bytes a second from other memory, the host's own copy included
    )


RATES = Rates()


class Op(NamedTuple):
    "Something that torch was asked for."

    kind: str  # 'matmul', 'attention', 'masked', 'pointwise', 'copy', 'view' or 'wait'
    backward: bool
    region: int  # number of the block that it belongs to; 0: none
    flops: int = 0
    reads: dict[int, int] = {}  # storage -> bytes
    writes: dict[int, int] = {}
    compiled: bool = False  # it belongs to a compiled block
    adds: bool = False  # it adds up gradients, outside of blocks


def size_of(x: torch.Tensor) -> int:
    n = x.element_size()
    for length, stride in zip(x.shape, x.stride()):
        n *= length if stride else 1
    return n


class Census(TorchDispatchMode):
    "Writes down what torch is asked for while it is active."

    def __init__(
        self, documents: int = 0
    ):  # pairs of positions that packed attention looks at
        super().__init__()
        self.ops: list[Op] = []
        self.documents = documents
        self.region = 0
        self.before = 0
        self.put = 0
        self.numbers, self.nodes, self.next = weakref.WeakKeyDictionary(), {}, count(1)

    def enter(self, region: int, *_):
        self.region = region

    def watch(self, net):
        "Blocks say when they begin and end."
        for i, block in enumerate(blocks_of(net), 1):
            block.register_forward_pre_hook(partial(self.enter, i))
            block.register_forward_hook(partial(self.enter, 0))
        return self

    def where(self) -> dict:
        "In the backward pass an operation belongs to the block whose forward pass made its node."
        node = torch._C._current_autograd_node()
        adds = (
            node is not None
            and not self.region
            and node._sequence_nr() not in self.nodes
        )
        self.before = (
            self.region
            if node is None or self.region
            else self.nodes.get(node._sequence_nr(), self.before)
        )
        if node is None or self.region:
            self.nodes.setdefault(
                torch._C._autograd._get_sequence_nr() - 1, self.before
            )
        return dict(backward=node is not None, region=self.before, adds=adds)

    def sizes(self, tensors) -> dict[int, int]:
        "Storage -> bytes."
        return {
            self.numbers.setdefault(x.untyped_storage(), next(self.next)): size_of(x)
            for x in tensors
            if x.is_meta
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__.split('.')[0]
        where = self.where()
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(x.is_meta for x in inputs) and 'meta' not in str(
            kwargs.get('device')
        ):
            return func(*args, **kwargs)
        if (
            name.strip('_') in ('index', 'index_put', 'index_put_impl')
            and args[1][0] is not None
            and args[1][0].dtype == torch.bool
        ):
            return self.by_flags(name, *args[:3], where=where)
        out = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        reads = self.sizes(inputs)
        writes = self.sizes(outputs)
        kind = kind_of(func, name, inputs, set(writes) <= set(reads))
        if kind == 'copy' and not kwargs.get('non_blocking'):
            self.ops.append(Op('wait', writes=writes, **where))
        self.ops.append(
            Op(
                kind,
                flops=self.flops(func, args, kwargs, out),
                reads=reads,
                writes=writes,
                **where,
            )
        )
        return out

    def by_flags(self, name: str, x, flags, values=None, *, where: dict):
        "The host reads how many flags are True, unless all of them get one value."
        if values is None or values.numel() > 1:
            self.ops.append(Op('wait', **where))
        if values is None:
            return x.new_empty(self.put, *x.shape[flags[0].ndim :])
        if values.ndim:
            self.put = len(values)
        return x if name.endswith('_') else torch.empty_like(x)

    def flops(self, func, args, kwargs, out) -> int:
        "With a causal mask flash attention leaves out half; packed documents do not see each other."
        given = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        causal = given.get('is_causal') or 0 in (given.get('window_size') or ())
        if 'varlen' in func.__name__:
            q = given['query']
            return (
                q.shape[1]
                * q.shape[2]
                * (self.documents if causal else len(q) * given['max_q'])
                * (10 if 'backward' in func.__name__ else 4)
            )
        if func.overloadpacket not in flop_registry:
            return 0
        return flop_registry[func.overloadpacket](*args, **kwargs, out_val=out) // (
            2 if causal else 1
        )


def kind_of(func, name: str, inputs: list, same: bool) -> str:
    if 'attention' in name or 'varlen' in name:
        return 'masked' if 'efficient' in name else 'attention'
    if func.overloadpacket in flop_registry:
        return 'matmul'
    if (
        name == '_to_copy'
        and not inputs[0].is_meta
        or name == 'copy_'
        and not inputs[-1].is_meta
    ):
        return 'copy'
    return (
        'view'
        if same
        and not func._schema.is_mutable
        or name.startswith(('empty', 'new_empty'))
        else 'pointwise'
    )


def fuse(ops: list[Op]) -> list[Op]:
    "The same step with compiled blocks: a run of pointwise operations is one kernel, which writes what is read later."
    last = {s: i for i, o in enumerate(ops) for s in o.reads}
    out = []
    run = []
    for i, o in enumerate(ops):
        if o.region and o.kind == 'view':
            continue
        joins = o.region and o.kind == 'pointwise' and not o.adds
        if run and not (
            joins and (o.region, o.backward) == (run[0][1].region, run[0][1].backward)
        ):
            out, run = [*out, joined(run, last)], []
        if joins:
            run.append((i, o))
        else:
            out.append(o._replace(compiled=bool(o.region) and not o.adds))
    return out + ([joined(run, last)] if run else [])


def joined(run: list, last: dict) -> Op:
    written = {s for _, o in run for s in o.writes}
    end = run[-1][0]
    reads = {s: n for _, o in run for s, n in o.reads.items() if s not in written}
    writes = {
        s: n for _, o in run for s, n in o.writes.items() if last.get(s, end + 1) > end
    }
    return run[0][1]._replace(flops=0, reads=reads, writes=writes, compiled=True)


def kernel_seconds(o: Op) -> float:
    "The roofline: the slower of arithmetic and memory."
    if o.kind in ('view', 'wait', 'copy'):
        return 0.0
    moved = sum(o.reads.values()) + sum(o.writes.values())
    return max(
        RATES.smallest,
        o.flops
        / (known_gpu(CARD).tflops * 1e12 * getattr(RATES, o.kind, RATES.matmul)),
        moved / (BANDWIDTH * RATES.bandwidth),
    )


def host_seconds(o: Op) -> float:
    if o.kind == 'wait':
        return sum(o.writes.values()) / RATES.pageable
    if o.kind == 'view':
        return RATES.view
    return RATES.launch if o.compiled else RATES.ask_back if o.backward else RATES.ask


def two_clocks(ops: list[Op]) -> tuple[float, float]:
    "Seconds until host and GPU are done, and those in which the GPU computes."
    host = gpu = busy = 0.0
    for o in ops:
        host += host_seconds(o)
        if o.kind == 'wait':
            host = max(host, gpu)
        elif seconds := kernel_seconds(o):
            gpu, busy = max(gpu, host) + seconds, busy + seconds
    return max(host, gpu), busy


def masked_block(block, x, cos, sin, mask):
    "A block whose attention adds a mask to the scores."
    q, k, v = block.attn.heads(block.norm1(x), cos, sin)
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
    x = x + block.attn.out_proj(mixed.transpose(1, 2).flatten(2))
    return x + block.mlp(block.norm2(x))


def nanovlm_loss(net, input_ids, tiles, attention_mask, targets) -> torch.Tensor:
    "The loss as nanoVLM computes it: float pictures, plain causal attention over the whole row, scores everywhere."
    decoder = net.decoder
    T = input_ids.shape[1]
    seen = net.MP(net.vision_encoder(tiles.to(input_ids.device)))
    x = decoder.token_embedding(input_ids).clone()
    x[input_ids == net.cfg.image_token_id] = seen.flatten(0, 1).to(x.dtype)
    allowed = (
        torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        & attention_mask.bool()[:, None, None]
    )
    mask = torch.zeros(allowed.shape, device=x.device).masked_fill(
        ~allowed, torch.finfo(torch.float32).min
    )
    cos, sin = decoder.rotary_embd(torch.arange(T, device=x.device)[None])
    for block in decoder.blocks:
        x = masked_block(block, x, cos, sin, mask)
    scores = decoder.head(decoder.norm(x))
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


def nanovlm_step(cfg, rows: int, tokens: int, tiles: int) -> list[Op]:
    "The operations of a step as nanoVLM makes it."
    net = meta_net(cfg, evolve(preset('nanovlm')[1], tile_multiple=1))
    for p in net.parameters():
        p.grad = None
    census = Census().watch(net)
    for i, block in enumerate(net.decoder.blocks, 1000):
        block.norm1.register_forward_pre_hook(partial(census.enter, i))
    net.decoder.norm.register_forward_pre_hook(partial(census.enter, 0))
    pixels = torch.zeros(1, 1, 1, 1).expand(rows * tiles, 3, *[cfg.vit_img_size] * 2)
    ids = torch.empty(rows, tokens, dtype=torch.long, device=META)
    with census, LikeCuda():
        loss = nanovlm_loss(net, ids, pixels, ids, ids)
    with census:
        loss.backward()
    return census.ops


def our_step(model, run, batch) -> tuple[list[Op], int]:
    "The operations of a micro-batch as the trainer makes it, to which others have been added; FLOPs that its answer needs."
    run = evolve(
        run, dtype='bfloat16', compile=False, tile_multiple=run.tile_multiple or 8
    )
    net = like_cuda(meta_net(model, run))
    trainer = make_trainer(net, run, [], [], dist=Dist(device=META))
    choose_backend(model.attn_backend, True, 'meta', torch.bfloat16)  # tries it, once
    update = gather_update([batch], trainer.dist)
    d = tally(batch)
    census = Census(
        sum(n * (n + 1) // 2 for row in batch['doc_lens'] for n in row)
    ).watch(net)
    with census:
        accumulate(trainer, update)
    return census.ops, count_flops(
        costs(trainer), d['tiles'], d['tokens'], d['pairs'], d['targets']
    )


def of_arm(name: str, seconds: float, tokens: int, useful: float) -> dict:
    return {
        f'{name}: ms of a micro-batch': 1e3 * seconds,
        f'{name}: tokens/s': tokens / seconds,
        f'{name}: MFU': useful / seconds / (known_gpu(CARD).tflops * 1e12),
    }


def predict(model, run) -> dict:
    "Figure -> what is expected, under the names that `measure.figures` gives to what is measured."
    found = {}
    update = (
        UPDATE_BYTES
        * sum(p.numel() for p in meta_net(model, run).parameters())
        / (BANDWIDTH * RATES.bandwidth)
    )
    for name, (how, compiled) in ARMS.items():
        v, c = change(model, run, how)
        batch = example_batch(v, c.batch_size)
        ops, useful = our_step(v, c, batch)
        d = tally(batch)
        (seconds, busy) = two_clocks(fuse(ops) if compiled else ops)
        found |= of_arm(name, seconds, d['tokens'], useful)
        if name == 'varlen':
            found |= waiting(d['tiles'] / seconds) | {
                'update beyond its micro-batch, ms': 1e3 * update,
                'waits inside a micro-batch': sum(o.kind == 'wait' for o in ops),
            }
        if name == 'varlen, compiled':
            found['card busy, share of the wall clock'] = (busy + update) / (
                seconds + update
            )
        if name == 'varlen':
            theirs = of_arm(
                LIKE_NANOVLM,
                two_clocks(
                    nanovlm_step(
                        v, c.batch_size, v.lm_max_length, d['tiles'] // c.batch_size
                    )
                )[0],
                d['tokens'],
                useful,
            )
    found |= theirs
    for rows in (1, 2, 4):
        found[f'peak memory, {rows} packs, GiB'] = (
            peak_memory(
                model, evolve(run, batch_size=rows), example_batch(model, rows)
            ).total()
            / 2**30
        )
    return found | {
        'two packs against the arm like nanoVLM': found[
            f'{LIKE_NANOVLM}: ms of a micro-batch'
        ]
        / found['varlen, compiled: ms of a micro-batch']
    }


def waiting(tiles_per_second: float) -> dict:
    "The share of the time that waits for pictures, if each loader worker has a core."
    return {
        f'waiting for data, {n} workers': max(0.0, 1 - n / (CORE_S * tiles_per_second))
        for n in WORKERS
    }


def shown(x) -> str:
    if x is None:
        return '-'
    return (
        f'{x:.0f}' if abs(x) >= 100 or x == 0 or float(x).is_integer() else f'{x:.3g}'
    )


def of_changes() -> dict:
    "What the changes of `arms.py` are expected to reach."
    ms, tokens, mfu = MEASURED
    found = {}
    for name, saved in SAVED.items():
        faster = ms / (ms - saved)
        found |= {
            f'{name}: ms of a micro-batch': ms - saved,
            f'{name}: tokens/s': tokens * faster,
            f'{name}: MFU': mfu * faster,
        }
    return found


def page(found: dict, model, run) -> str:
    "PREDICTED.md."
    rates = ', '.join(f'{k} {v:g}' for k, v in RATES._asdict().items())
    d = tally(example_batch(model, 2))
    return '\n'.join(
        [
            f'# What is expected of one {CARD}',
            '',
            f'Written on {PREDICTED_ON}, before anything of this was measured, by `python tests/gpu/predict.py`. What was measured since then stands in RESULTS.md, beside these figures.',
            '',
            f"The micro-batch: 2 packs of {model.lm_max_length} positions, {d['tokens']} tokens, {d['tiles']} tiles, {d['targets']} targets; the preset `nanovlm`, bfloat16, all parts learn; batch 4 has twice as much. "
            f'On a GPU the tiles of a micro-batch are filled up with blank ones to a multiple of {run.tile_multiple or 8}, and these are computed too. '
            f'Data are there when they are asked for; a tile takes {1e3 * CORE_S:.1f} ms of a core, and each loader worker has one.',
            '',
            f'Assumed of the card and its host (`Rates` in `tests/gpu/predict.py` says what each means): {rates}. They fit sixteen published times of an H200 within 25 %. So a figure here that misses by more than 25 % says something new. '
            'Not foreseen: what a compiler saves by computing cheap things twice, kernels that are much better or worse than their kind, other programs on the machine.',
            '',
            '| figure | predicted |',
            '|---|---|',
            *(f'| {name} | {shown(x)} |' for name, x in found.items()),
            *(f'| {name} | {shown(x)} |' for name, x in of_changes().items()),
            '',
            f'The last rows are the changes of `arms.py` with compiled blocks, expected on 29 November 2026 from the {MEASURED[0]} ms that *varlen, compiled* took on the 26th (`SAVED` in `predict.py` has the arithmetic).',
            '',
        ]
    )


def read_page(path: Path) -> dict:
    "The figures of PREDICTED.md."
    rows = [
        line.strip('| \n').split(' | ')
        for line in path.read_text(encoding='utf-8').splitlines()
        if line.startswith('|')
    ]
    return {r[0]: float(r[1]) for r in rows[2:]}


if __name__ == '__main__':
    sys.stdout.write(page(predict(*preset('nanovlm')), *preset('nanovlm')))
