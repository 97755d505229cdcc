"nanoVLM's own six updates and its learning rates, and what validation and means over micro-batches count; splits over ranks: test_sharding.py."

import json
import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file

from nanovlm_nb.core.config import TrainConfig, evolve, tiny
from nanovlm_nb.core.dist import Dist, launch
from nanovlm_nb.core.logs import RunLog
from nanovlm_nb.core.run_dir import read_log, read_pointer
from nanovlm_nb.data.loader import get_dataloaders, load_tokenizer
from nanovlm_nb.data.packing import collate_packs, pack
from nanovlm_nb.training import trainer as module
from nanovlm_nb.runs.hook_list import hooks_of
from nanovlm_nb.training.update import gather_update
from nanovlm_nb.training.schedule import get_lr
from nanovlm_nb.training.trainer import (
    Guard,
    Hook,
    accumulate,
    make_trainer,
    resume,
    save,
    train,
    train_step,
    updates,
    validation_loss,
    validation_updates,
)
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.runs.run import run


def noisy(grads):
    """Which entries of a parameter had, in some update, a gradient that is rounding noise: under 3e-5 of what the parameter's are.

    AdamW moves an entry by about the rate however small its gradient is, so there each processor goes its own way
    (always for the bias of the keys, which softmax cancels).
    """
    grads = torch.stack(grads)
    return (grads.abs() < 3e-5 * grads.pow(2).mean().sqrt()).any(0)


def assert_near(name, got, want, grads, lr):
    "Entries whose gradient is never noise differ by at most 3 % of a step, all by at most a step. `grads`: a tensor for each update."
    off = (got - want).abs()
    noise = noisy(grads)
    assert noise.float().mean() <= (
        0.4 if 'qkv_proj.bias' in name or 'k_proj.bias' in name else 0.01
    ), f'{name}: {noise.float().mean():.2%} of the gradients are noise'
    assert off.max() <= lr, name
    if not noise.all():
        assert off[~noise].max() <= 0.03 * lr, name


@pytest.mark.usefixtures(
    'one_thread'
)  # the order of sums decides about rounding noise, see below
def test_reproduces_the_references_six_updates(golden):
    data = golden / 'nanovlm'
    recorded = json.loads((data / 'train_steps.json').read_text())['updates']
    samples = json.loads((data / 'samples.json').read_text())['samples']
    tiles = load_file(data / 'samples.safetensors')

    def micro_batch(k):
        "The k-th sample, alone in its pack."
        s = samples[k]
        return collate_packs(
            [
                pack(
                    [
                        dict(
                            id=f's{k}',
                            input_ids=torch.tensor(s['input_ids']),
                            labels=torch.tensor(s['labels']),
                            source='golden',
                            images=[
                                tiles[f's{k}_img{j}'] for j in range(len(s['images']))
                            ],
                        )
                    ],
                    128,
                    pad_id=2,
                )
            ]
        )

    def schedule(step, max_lr, max_steps):
        "The recorded rates: the projector's, or the backbones'."
        return recorded[step]['lrs'][0 if max_lr > 1e-3 else 1]

    cfg = TrainConfig(
        gradient_accumulation_steps=2,
        loss_average='micro_batches',
        dtype='float32',
        max_training_steps=6,
    )
    model = VisionLanguageModel.from_pretrained(data / 'checkpoint').train()
    batches = [micro_batch(k) for u in recorded for k in u['micro']]
    trainer = make_trainer(model, cfg, batches, batches, schedule=schedule)
    grads = {n: [] for n, _ in model.named_parameters()}
    for n, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, n=n: grads[n].append(p.grad.clone())
        )
    figures = [train_step(trainer, update) for update in islice(updates(trainer), 6)]
    grads = {n: g[1::2] for n, g in grads.items()}  # of both micro-batches
    for ours, theirs in zip(figures, recorded, strict=True):
        assert ours['batch_loss'] == pytest.approx(
            sum(theirs['micro_losses']) / 2, abs=2e-5
        )
        assert ours['grad_norm'] == pytest.approx(theirs['grad_norm'], rel=1e-4)
        assert (
            ours['lr_MP'] == theirs['lrs'][0] and ours['lr_decoder'] == theirs['lrs'][2]
        )
    # entries whose gradient is rounding noise may differ by part of a step; a component differs by next to nothing
    after = load_file(data / 'after_train.safetensors')
    start = load_file(data / 'checkpoint' / 'model.safetensors')
    now = model.state_dict()
    for part, lr in zip(
        ('MP', 'vision_encoder', 'decoder'), recorded[0]['lrs'], strict=True
    ):
        names = [k for k in after if k.startswith(part) and k in start]
        off = torch.cat([(now[k] - after[k]).flatten() for k in names])
        moved = torch.cat([(after[k] - start[k]).flatten() for k in names])
        for k in names:
            assert_near(k, now[k], after[k], grads[k], lr)
        assert off.norm() <= 5e-4 * moved.norm(), part


def test_get_lr_is_the_recorded_schedule_without_its_overshoot(golden):
    curves = json.loads((golden / 'lr_schedule.json').read_text())
    whole = 0
    clipped = 0
    for c in curves:
        top = c['max_lr']
        n = c['max_steps']
        exact = math.isclose(0.03 * n, round(0.03 * n))
        whole += exact
        for it, want in enumerate(c['lr']):
            if want > top * (1 + 1e-9):
                assert not exact and it == math.floor(
                    0.03 * n
                )  # only the last warm-up step, only if it is a broken one
                assert get_lr(it, top, n) == top
                clipped += 1
            else:
                assert math.isclose(get_lr(it, top, n), want, rel_tol=1e-12)
    assert whole and clipped


def test_the_order_of_the_hooks():
    "What judges the weights follows the checkpoint, and hooks of the user's come before it and before the log."

    class Late(Hook):
        order = 25

    class OwnGuard(Guard):
        "In the place of the one that it extends."

    hooks = [
        type(hook).__name__
        for hook in hooks_of(TrainConfig(), [Late(), OwnGuard(), Hook()])
    ]
    assert hooks == [
        'OwnGuard',
        'BadUpdates',
        'LeftOut',
        'Meters',
        'Hook',
        'Log',
        'Checkpoint',
        'Late',
        'Validate',
        'Evaluate',
    ]


def small(folder, batch_size=2, **fields):
    "A trainer of a tiny model, four packs an update, on the drawn scenes."
    vlm_cfg, cfg = tiny(
        batch_size=batch_size,
        gradient_accumulation_steps=4 // batch_size,
        async_save=False,
        **fields,
    )
    torch.manual_seed(0)
    tokenizer = load_tokenizer(vlm_cfg)
    loaders = get_dataloaders(cfg, vlm_cfg, Dist(), tokenizer)
    return make_trainer(
        VisionLanguageModel(vlm_cfg, load_backbone=False),
        cfg,
        *loaders,
        log=RunLog(folder, Dist(), quiet=True),
        tokenizer=tokenizer,
    )


def test_validation_scores_64_batches_without_gradients_and_frees_cached_memory_first(
    tmp_path, monkeypatch
):
    t = small(tmp_path)
    calls = []
    first = next(iter(t.held_out))
    t = make_trainer(
        t.base,
        evolve(t.cfg, max_val_batches=TrainConfig().max_val_batches),
        [],
        [first] * 70,
    )
    t.base.register_forward_pre_hook(
        lambda model, _: calls.append((model.training, torch.is_grad_enabled()))
    )
    validation_loss(t)
    assert (calls, t.model.training, torch.is_grad_enabled()) == (
        [(False, False)] * 64,
        True,
        True,
    )
    calls.clear()
    monkeypatch.setattr(torch.cuda, 'empty_cache', lambda: calls.append('empty_cache'))
    monkeypatch.setattr(
        module, 'validation_updates', lambda t: calls.append('batches') or iter(())
    )
    for device in ('cuda:0', 'cpu'):
        t.dist = replace(t.dist, device=torch.device(device))
        validation_loss(t)
    assert calls == ['empty_cache', 'batches', 'batches']


def test_validation_scores_the_same_packs_after_a_new_split(tmp_path):
    "One batch of two packs when the run began; one, two and four packs in a batch afterwards. The loss differs by the order of the sum."

    def score(t):
        return sum(
            bool(ids)
            for update in validation_updates(t)
            for ids in update.micro_batches[0]['ids']
        ), validation_loss(t)

    began = small(tmp_path, max_val_batches=1)
    save(began)
    packs, loss = score(began)
    for batch_size in (1, 4):
        n, again = score(
            resume(small(tmp_path, batch_size, max_val_batches=1), tmp_path / 'step_0')
        )
        assert n == packs and abs(again - loss) < 1e-6 * loss
    assert score(small(tmp_path / 'other', 1, max_val_batches=1))[0] != packs


def test_idle_micro_batches_have_no_part_in_a_mean_of_means(tmp_path):
    vlm_cfg, cfg = tiny(
        loss_average='micro_batches',
        batch_size=1,
        gradient_accumulation_steps=1,
        dtype='float32',
        data_cutoff_idx=40,
    )
    loader, _ = get_dataloaders(cfg, vlm_cfg)
    first, second = islice(loader, 2)
    t = make_trainer(VisionLanguageModel(vlm_cfg, load_backbone=False), cfg, [], [])

    def loss(*ranks):
        "The mean over ranks of what each adds up; the ranks are processes."

        def part(dist):
            t.dist = dist
            return accumulate(
                t, gather_update(ranks[dist.rank], dist, loader.idle)
            ).item()

        return sum(launch(part, len(ranks))) / len(ranks)

    assert (
        loss([first], [])
        == pytest.approx(loss([first]), rel=1e-6)
        == pytest.approx(loss([first, loader.idle()]), rel=1e-6)
    )
    assert (
        loss([first, second], [])
        == pytest.approx((loss([first]) + loss([second])) / 2, rel=1e-6)
        == pytest.approx(loss([first], [second]), rel=1e-6)
    )


def test_a_run_without_a_directory_writes_and_deletes_nothing(tmp_path, monkeypatch):
    "Not even where it is run: files of these names are somebody's. An update that is skipped is counted all the same."
    monkeypatch.chdir(tmp_path)
    names = (
        'dropped.jsonl',
        'bad_updates.jsonl',
        'log.jsonl',
        'best_checkpoint',
        'last_checkpoint',
    )
    for name in names:
        (tmp_path / name).write_text('mine\n')
    (tmp_path / 'step_0').mkdir()
    vlm_cfg, cfg = tiny(
        max_training_steps=4, save_interval=1, eval_interval=2, max_sample_length=90
    )
    loaders = get_dataloaders(cfg, vlm_cfg)

    class Second(Hook):
        def before_step(self, trainer, figures):
            return 'the second' if trainer.step == 1 else None

    t = train(
        make_trainer(
            VisionLanguageModel(vlm_cfg, load_backbone=False),
            cfg,
            *loaders,
            hooks_of(cfg, [Second()]),
        )
    )
    assert (t.step, t.skipped, t.saved) == (4, 1, None) and t.best_step in (2, 4)
    assert {p.name for p in tmp_path.iterdir()} == {*names, 'step_0'} and all(
        (tmp_path / name).read_text() == 'mine\n' for name in names
    )
    assert not list((tmp_path / 'step_0').iterdir())


def test_the_first_error_is_the_one_that_is_raised():
    "A hook that could not begin is not ended; an error of an end hides none before it, and is one itself if it is alone."
    said = []

    class Says(Hook):
        def __init__(self, name, fails=()):
            self.name, self.fails = name, fails

        def begin(self, trainer):
            self.say('begin')

        def end(self, trainer):
            self.say('end')

        def say(self, what):
            said.append(f'{self.name} {what}')
            if what in self.fails:
                raise ValueError(said[-1])

    def ends(*hooks):
        vlm_cfg, cfg = tiny()
        said.clear()
        t = make_trainer(
            VisionLanguageModel(vlm_cfg, load_backbone=False), cfg, [], [], hooks
        )
        t.stop = 'a signal'  # before the first update
        with pytest.raises(ValueError) as error:
            train(t)
        return str(error.value), list(said)

    assert ends(Says('a', ['end']), Says('b', ['begin', 'end']), Says('c')) == (
        'b begin',
        ['a begin', 'b begin', 'a end'],
    )
    assert ends(Says('a', ['end']), Says('b', ['end'])) == (
        'b end',
        ['a begin', 'b begin', 'b end', 'a end'],
    )


class HalfAPicture(list):
    "Held-out micro-batches, the second of which cannot be read."

    def __iter__(self):
        yield self[0]
        raise KeyError('half a picture')


@pytest.mark.parametrize('broken', (0, 1))
def test_a_data_error_of_one_rank_in_a_validation_reaches_all_ranks(broken):
    "Two processes: neither waits for the other, both say what it was, and the one that is whole says whose it was."
    vlm_cfg, cfg = tiny(
        batch_size=1, gradient_accumulation_steps=1, dtype='float32', data_cutoff_idx=40
    )
    batches = list(islice(get_dataloaders(cfg, vlm_cfg)[0], 3))

    def validate(dist):
        torch.manual_seed(0)
        t = make_trainer(
            VisionLanguageModel(vlm_cfg, load_backbone=False),
            cfg,
            batches,
            HalfAPicture(batches) if dist.rank == broken else batches,
            dist=dist,
        )
        with pytest.raises((KeyError, RuntimeError)) as error:
            validation_loss(t)
        return str(error.value)

    said = launch(validate, timeout_s=60)
    assert said[broken] == "'half a picture'"
    assert (
        said[1 - broken]
        == f"the data of rank {broken} have failed: KeyError: 'half a picture'"
    )


def test_the_first_of_two_equal_judgements_stays_the_best(tmp_path):
    "In the log, in the files, and after the run has been resumed between the two."

    def go(last, **fields):
        vlm_cfg, cfg = tiny(
            max_training_steps=last,
            save_interval=2,
            eval_interval=2,
            max_keep_ckpts=-1,
            run_name='r',
            **fields,
        )
        return run(
            evolve(vlm_cfg, vlm_checkpoint_path=str(tmp_path)),
            cfg,
            judge=lambda trainer: 1.0,
        )

    for last, fields in ((4, {}), (6, dict(resume=True))):
        run_dir = go(last, **fields)
        assert read_pointer(run_dir, 'best_checkpoint').name == 'step_2'
        assert [
            r['best_step']
            for r in read_log(run_dir / 'log.jsonl')
            if r.get('best_step')
        ] == [2] * (last // 2)
        assert (run_dir / 'train.log').read_text().count('the best so far') == 1
