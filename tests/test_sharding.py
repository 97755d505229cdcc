"Shared out or whole, however a batch is split, on one rank, two or four: the same training. Real processes, started by torchrun, talking over gloo."

import json
import sys
from functools import partial
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from commands import run, updates
from safetensors.torch import load_file
import sharded
from sharded import HALF, UPDATES
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nanovlm_nb.core.dist import Dist, launch
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.model.files import Tensors
from nanovlm_nb.model.backbones import is_computed
from nanovlm_nb.tools.plan import memory, sizes
from nanovlm_nb.training.trainer import _saved_state
from nanovlm_nb.training.shard import pieces_of, read_rest, shard_model, use_whole

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope='module')
def out(tmp_path_factory):
    "What one process, then two, then four have left behind."
    out = tmp_path_factory.mktemp('sharded')
    for ranks in (1, 2, 4):
        launch = (
            ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', ranks]
            if ranks > 1
            else []
        )
        done = run(
            [sys.executable, *launch, HERE / 'sharded.py', out],
            out,
            timeout=600,
            PYTHONPATH=f'{HERE.parent}:{HERE}',
        )
        assert 'FutureWarning' not in done.stderr
    return out


@pytest.fixture(scope='module')
def facts(out):
    return {
        k: v
        for n in (1, 2, 4)
        for k, v in json.loads((out / f'facts_{n}.json').read_text()).items()
    }


def weights(file):
    """Weights of a training, without the biases of the keys: softmax does not see what all keys have in common, so the
    gradient of these is rounding and nothing else, and AdamW divides it by its own size."""
    found = load_file(file)
    for name in [n for n in found if n.endswith('qkv_proj.bias')]:
        query, _, value = found[name].chunk(3)
        found[name] = torch.cat([query, value])
    return found


def apart(a, b):
    "Largest difference between two sets of weights."
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a)


SAME = dict(
    whole=[
        'ddp',
        'zero2',
        'zero3',
        'zero2_offload',
        'zero3_offload',
        'zero3_recompute',
        'zero2_each',
        'zero3_each',
        'zero2_of_4',
        'ddp_to_zero2',
        'zero2_to_ddp',
        'offload_to_zero2',
        'zero2_to_4',
    ],
    frozen=['zero2_frozen'],
    moe=['zero2_moe'],
)


@pytest.mark.parametrize(
    'name, reference', [(n, ref) for ref, names in SAME.items() for n in names]
)
def test_same_training(out, facts, name, reference):
    "Losses, norms and weights of four updates, or of the two after a checkpoint of another kind; a micro-batch of one rank has no picture."
    a = torch.tensor(facts[name]['figures'])
    b = torch.tensor(facts[reference]['figures'])
    assert len(a) == (HALF if '_to_' in name else UPDATES)
    torch.testing.assert_close(a, b[-len(a) :], atol=2e-6, rtol=1e-6)
    assert (
        apart(
            weights(out / f'{name}.safetensors'),
            weights(out / f'{reference}.safetensors'),
        )
        < 1e-6
    )
    if 'val' in facts[name]:
        assert facts[name]['val'] == pytest.approx(facts[reference]['val'], abs=1e-6)


@pytest.mark.parametrize('name', ['at_once', 'ddp_pairs'])
def test_the_split_of_a_batch_does_not_matter(out, facts, name):
    "Micro-batches of four packs, or of two on two ranks, in place of one: entries whose gradient is rounding go their own way, all together do not."
    torch.testing.assert_close(
        torch.tensor(facts[name]['figures']),
        torch.tensor(facts['whole']['figures']),
        atol=2e-6,
        rtol=1e-6,
    )
    a, b = (
        torch.cat([w.flatten() for w in weights(out / f'{n}.safetensors').values()])
        for n in (name, 'whole')
    )
    assert (a - b).norm() < 1e-6 * b.norm()


@pytest.mark.parametrize(
    'a, b',
    [
        ('whole', 'offload'),
        ('zero2', 'zero2_offload'),
        ('zero2', 'zero3'),
        ('zero3', 'zero3_offload'),
        ('zero3', 'zero3_recompute'),
    ],
)
def test_to_the_last_bit(out, facts, a, b):
    "Where a number is kept, and whether it is kept or made again, does not change it."
    assert facts[a]['figures'] == facts[b]['figures']
    a, b = (load_file(out / f'{n}.safetensors') for n in (a, b))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_mixed_precision(out, facts):
    "In bfloat16 blocks are gathered in bfloat16; in float16 the ranks agree on the scale of the loss."
    a, b = (torch.tensor(facts[n]['figures'])[:, 0] for n in ('ddp_bf16', 'zero2_bf16'))
    torch.testing.assert_close(a, b, atol=2e-2, rtol=0)
    assert (
        0
        < apart(
            weights(out / 'ddp_bf16.safetensors'),
            weights(out / 'zero2_bf16.safetensors'),
        )
        < 2e-3
    )  # six steps of 3e-4
    scales = facts['zero3_fp16']['scales']
    assert (
        scales[0] == scales[1] > 1
        and facts['zero3_fp16']['val'][1] < facts['zero3_fp16']['val'][0]
    )


def kept_between_micro_batches(dist, each):
    "Numbers of gradients that a rank of zero2 keeps when all micro-batches of an update but the last are done, as a share of the model."
    trainer = sharded.make_trainer(
        dist, None, {}, dict(sharding='zero2', gradient_accumulation_steps=2, **each)
    )
    model = trainer.base
    kept = []

    def look(*_):
        kept.append(
            sum(
                whole_or_piece(p)
                for m in model.modules()
                if isinstance(m, FSDPModule)
                for p in m._get_fsdp_state()._fsdp_param_group.fsdp_params
            )
        )

    model.register_forward_pre_hook(look)
    sharded.updates(trainer, 1)
    return kept[-1] / sum(p.numel() for p in model.parameters())


def whole_or_piece(param):
    "How many numbers of a parameter's gradient are here."
    here = [
        param.unsharded_accumulated_grad,
        getattr(param, '_unsharded_param', param.sharded_param).grad,
        param.sharded_param.grad,
    ]
    return sum(
        (w.to_local() if isinstance(w, DTensor) else w).numel()
        for w in here
        if w is not None
    )


def largest_unit(parameters):
    "Numbers of a block, or of all that is in none: so many gradients are whole while they are exchanged."
    return max(
        sum(s.total - s.blocks for s in parameters.values()),
        *(s.largest_block for s in parameters.values()),
    )


@pytest.mark.parametrize(
    'each, share', [({}, 1), (sharded.EACH, 1 / 2)], ids=['once', 'each']
)
def test_gradients_kept_between_micro_batches(each, share):
    "Two ranks with two micro-batches: whole ones, or each rank its half."
    for kept in launch(lambda dist: kept_between_micro_batches(dist, each), 2):
        assert kept == pytest.approx(share, rel=0.02)


def held(dist, how):
    "Bytes of a rank in the second update, before its last backward pass, by part of the plan; and the plan."
    trainer = sharded.make_trainer(dist, None, {}, how)
    model = trainer.base
    found = []
    params = [
        p
        for m in model.modules()
        if isinstance(m, FSDPModule)
        for p in m._get_fsdp_state()._fsdp_param_group.fsdp_params
    ]

    def look(*_):
        gathered = sum(
            4 * p._unsharded_param.numel()
            for p in params
            if p.sharded_state.name == 'UNSHARDED'
        )
        moments = [
            m.to_local().nbytes
            for state in trainer.optimizer.state.values()
            for m in state.values()
            if m.ndim
        ]
        found.append(
            dict(
                weights=sum(p.sharded_param.to_local().nbytes for p in params),
                copies=gathered,
                gradients=4 * sum(map(whole_or_piece, params)),
                optimizer=sum(moments),
            )
        )

    model.register_forward_hook(look)
    sharded.updates(trainer, 2)
    return (
        found[-1],
        memory(model.cfg, trainer.cfg, dist.world_size)._asdict(),
        4 * largest_unit(sizes(model.cfg, trainer.cfg)),
    )


@pytest.mark.parametrize(
    'how',
    [
        dict(sharding='zero2'),
        dict(sharding='zero2', **sharded.EACH),
        dict(sharding='zero3'),
        dict(sharding='zero3', **sharded.EACH),
    ],
    ids=str,
)
def test_the_plan_is_what_a_rank_holds(how):
    "Weights, gradients and moments; the whole weights, of zero3 at most those of two blocks and the rest."
    for found, plan, exchanged in launch(lambda dist: held(dist, how), 2):
        if 'reduce_every_micro_batch' in how:
            plan['gradients'] -= exchanged
        for part in ('weights', 'gradients', 'optimizer'):
            assert found[part] == pytest.approx(plan[part], rel=0.02), part
        assert found['copies'] <= 1.001 * plan['copies'] and (
            how['sharding'] == 'zero3' or found['copies'] > 0.999 * plan['copies']
        )


def test_ranks_fail_together():
    "Rank 0 reads and writes for all; what stops it there reaches the others, who wait for the next tensor."

    def tried(dist):
        def out_of_order(name):
            raise UsageError(f'no {name}')

        model = sharded.new_model({})
        said = []
        model.unread = Tensors(
            {name: partial(out_of_order, name) for name in model.state_dict()}
        )
        model = shard_model(model, dist, 'zero3')
        for action in (
            lambda: read_rest(model, dist),
            lambda: use_whole(
                pieces_of(model),
                dist,
                lambda whole: out_of_order([whole[k] for k in whole][0].ndim),
            ),
        ):
            with pytest.raises(UsageError) as error:
                action()
            said.append(str(error.value))
        return said

    first, second = launch(tried, 2)
    assert (
        first == second
        and first[0].startswith('no vision_encoder')
        and first[1].startswith('no ')
    )


def test_one_tensor_is_whole_at_a_time():
    "What rank 0 reads for others, or gathers to write, is let go before the next; the other ranks read nothing."

    def seen(dist):
        model = sharded.new_model({})
        alive = WeakSet()
        most = [0]
        values = {name: w.clone() for name, w in model.state_dict().items()}

        def make(name):
            made = values[name].clone()
            alive.add(made.untyped_storage())
            most.append(len(alive))
            return made

        model.unread = Tensors(
            {name: partial(make, name) for name in values if not is_computed(name)}
        )
        model = read_rest(shard_model(model, dist, 'zero3'), dist)
        after = sharded.full_weights(model)
        reads = most[:]

        def write(whole):
            for name in whole:
                alive.add(whole[name].untyped_storage()), most.append(len(alive))

        use_whole(pieces_of(model), dist, write)
        return (
            max(reads),
            len(reads) - 1,
            max(most),
            all(torch.equal(values[k], w) for k, w in after.items()),
        )

    (most, reads, written, right), (_, none, _, _) = launch(seen, 2)
    assert right and most <= 2 and written <= 2 and reads > 40 and none == 0


def test_a_hook_that_keeps_sharded_weights_is_saved_whole():
    "What it remembers has the shapes and values of the whole model; a position and a text stay as they are."

    class Copies:
        def __init__(self, model):
            self.kept = {
                name: p.detach().clone() for name, p in model.named_parameters()
            }

        def state_dict(self):
            return self.kept | dict(step=3, note='kept')

        def load_state_dict(self, state):
            self.kept = state

    def saved(dist):
        model = sharded.new_model({})
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        model = read_rest(shard_model(model, dist, 'zero3'), dist)
        copies = Copies(model)
        assert any(isinstance(w, DTensor) for w in copies.kept.values())
        state = _saved_state('Copies', copies)
        plain = state.pop('step'), state.pop('note')
        return plain, state.keys() == whole.keys() and all(
            type(w) is torch.Tensor and torch.equal(w, whole[name])
            for name, w in state.items()
        )

    assert launch(saved, 2) == [((3, 'kept'), True)] * 2


def test_one_exchange_of_gradients_per_update():
    "Two ranks with two micro-batches each; there is one bucket."

    def exchanges(dist):
        trainer = sharded.make_trainer(dist, None, {}, {})
        seen = []

        def noted(state, bucket):
            seen.append(bucket.index())
            return allreduce_hook(state, bucket)

        trainer.model.register_comm_hook(None, noted)
        sharded.updates(trainer, 1)
        return seen

    assert launch(exchanges, 2) == [[0], [0]]


@pytest.mark.parametrize(
    'name, ranks',
    [
        ('whole', 1),
        ('zero2', 2),
        ('zero3', 2),
        ('zero2_offload', 2),
        ('zero3_offload', 2),
        ('zero2_of_4', 4),
    ],
)
def test_files_of_a_checkpoint(out, facts, name, ranks):
    "One model, and of the optimizer, two moments in float32, a file for each rank that holds its share."
    folder = out / name / f'step_{HALF}'
    assert [p.name for p in folder.glob('*.safetensors')] == ['model.safetensors']
    sizes = {
        p.name: p.stat().st_size for p in (folder / 'optimizer').glob('*.safetensors')
    }
    assert sorted(sizes) == [f'rank_{r}.safetensors' for r in range(ranks)]
    share = 8 * facts[name]['parameters'] / ranks
    assert (
        share < max(sizes.values()) < 1.3 * share + 2e5
    )  # names and places of the pieces


def test_a_sharded_checkpoint_in_one_process(out, facts):
    "Two ranks wrote it; here are none."
    found = sharded.continued(Dist(), out, 'zero2_to_1', 'zero2', {})
    torch.testing.assert_close(
        torch.tensor(found['figures']),
        torch.tensor(facts['whole']['figures'][HALF:]),
        atol=2e-6,
        rtol=1e-6,
    )
    assert (
        apart(
            weights(out / 'zero2_to_1.safetensors'), weights(out / 'whole.safetensors')
        )
        < 1e-6
    )


@pytest.mark.parametrize('how', ['1_ddp', '2_ddp', '2_zero2', '2_zero3'])
def test_text_only_updates_decay_nothing_that_looks_at_pictures(facts, how):
    "The second update changes the language model only; the third, with pictures on one rank of two, changes all."
    start, first, text, last = facts[f'text_{how}']
    for part in ('vision_encoder.', 'MP.'):
        assert (
            first[part] != start[part]
            and text[part] == first[part]
            and last[part] != text[part]
        )
    assert text['decoder.'] != first['decoder.']
    for a, b in zip(facts['text_1_ddp'], facts[f'text_{how}']):
        assert b == pytest.approx(a, rel=1e-6)


def record(out, name):
    "Losses, digests and epochs of a run on real samples, and its last weights."
    lines = updates(out / 'runs' / name)
    return (
        [r['batch_loss'] for r in lines],
        [(r['step'], r['epoch'], r['samples'], r['batch_digest']) for r in lines],
        weights(out / 'runs' / name / 'step_12' / 'model.safetensors'),
    )


@pytest.mark.parametrize('name', ['ddp', 'zero2'])
def test_resumed_on_more_ranks(out, name):
    "Four updates each on one rank, two and four, with no, two and one loader workers; zero2 as a DeepSpeed file says it."
    (losses, samples, last), (was, were, then) = (
        record(out, name),
        record(out, 'undisturbed'),
    )
    assert (
        samples == were
    )  # the same samples in the same order, in three epochs and a part of the fourth
    assert were[-1][:2] == (12, 3)
    assert losses == pytest.approx(was, abs=1e-6)
    assert apart(last, then) < 1e-5
