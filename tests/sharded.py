"Small trainings in every kind of sharding, as many ranks as the launch says; run by test_sharding.py, alone or under torchrun: sharded.py FOLDER."

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from commands import TINY
from safetensors.torch import save_file

from nanovlm_nb.training.checkpoint import load_optimizer
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.core.dist import (
    destroy_dist,
    init_dist,
    is_sharded,
    set_seed,
    this_rank,
)
from nanovlm_nb.data.packing import collate_packs, pack
from nanovlm_nb.runs.run import run
from nanovlm_nb.training.shard import load_full_weights, pieces_of, use_whole
from nanovlm_nb.training.trainer import Guard
from nanovlm_nb.training.trainer import NoLog, save, train_step, validation_loss
from nanovlm_nb.training.trainer import make_trainer as put_together
from nanovlm_nb.training.update import gather_update
from nanovlm_nb.model.vlm import VisionLanguageModel

UPDATES = 4
HALF = 2  # of a case, and when it writes its checkpoint
WORKERS = {1: 0, 2: 2, 4: 1}  # loader workers of the stage with so many ranks
SMALL = dict(
    vit_hidden_dim=64,
    vit_n_heads=2,
    vit_n_blocks=2,
    lm_hidden_dim=64,
    lm_inter_dim=128,
    lm_n_heads=2,
    lm_n_kv_heads=1,
    lm_n_blocks=2,
    lm_max_length=96,
    loss_chunk_size=16,
)
RECOMPUTE = dict(vision_checkpointing=True, language_checkpointing=True)
FROZEN = dict(lr_vision_backbone=0)
EACH = dict(reduce_every_micro_batch=True)
AT_ONCE, PAIRS = (dict(batch_size=n, gradient_accumulation_steps=1) for n in (4, 2))
DEEPSPEED = dict(
    train_batch_size=4,
    zero_optimization=dict(
        stage=2, overlap_comm=True, offload_optimizer=dict(device='cpu')
    ),
    bf16=dict(enabled=False),
)

#: name -> (settings of the model, settings of the run)
CASES = {
    1: dict(
        whole=({}, {}),
        at_once=({}, AT_ONCE),
        frozen=({}, FROZEN),
        offload=({}, dict(sharding='zero2', offload_optimizer=True)),
        moe=(dict(use_moe=True), {}),
    ),
    2: dict(
        ddp=({}, {}),
        ddp_pairs=({}, PAIRS),
        zero2=({}, dict(sharding='zero2')),
        zero3=({}, dict(sharding='zero3')),
        zero2_offload=({}, dict(sharding='zero2', offload_optimizer=True)),
        zero3_offload=(
            {},
            dict(sharding='zero3', offload_params=True, offload_optimizer=True),
        ),
        zero3_recompute=({}, dict(sharding='zero3', **RECOMPUTE)),
        zero2_each=({}, dict(sharding='zero2', **EACH)),
        zero3_each=({}, dict(sharding='zero3', **EACH)),
        zero2_frozen=({}, dict(sharding='zero2', **FROZEN)),
        zero2_moe=(dict(use_moe=True), dict(sharding='zero2')),
        ddp_bf16=({}, dict(dtype='bfloat16')),
        zero2_bf16=({}, dict(sharding='zero2', dtype='bfloat16')),
        zero3_fp16=({}, dict(sharding='zero3', dtype='float16')),
    ),
    4: dict(zero2_of_4=({}, dict(sharding='zero2'))),
}


def make_packs(cfg):
    "Four packs with 3, 20, 1 and 9 targets; the third has no picture."
    gen = torch.Generator().manual_seed(5)
    packs = []
    for k, (targets, n_images) in enumerate([(3, 1), (20, 2), (1, 0), (9, 1)]):
        tiles = [
            torch.randint(
                0,
                256,
                (1, 3, cfg.vit_img_size, cfg.vit_img_size),
                generator=gen,
                dtype=torch.uint8,
            )
            for _ in range(n_images)
        ]
        text = torch.randint(0, cfg.lm_base_vocab_size, (30,), generator=gen)
        ids = torch.cat(
            [
                torch.full((n_images * cfg.mp_image_token_length,), cfg.image_token_id),
                text,
            ]
        )
        labels = torch.full_like(ids, -100)
        labels[-targets - 1 : -1] = ids[-targets:]
        sample = dict(
            id=f'packs/{k}', input_ids=ids, labels=labels, images=tiles, source='packs'
        )
        packs.append(pack([sample], 96, pad_id=2))
    return packs


class Quiet(NoLog):
    "A log that goes nowhere, for a run that has a directory."

    def __init__(self, run_dir):
        self.run_dir = run_dir


def new_model(changes):
    "A small model with the same random weights each time."
    set_seed(0)
    return VisionLanguageModel(
        evolve(preset('shapes')[0], **SMALL | changes), load_backbone=False
    ).train()


def full_weights(model):
    "The state dict of a plain model; of a sharded one on rank 0's CPU, and an empty one elsewhere; all ranks call."
    if not is_sharded(model):
        return model.state_dict()
    weights = {}
    use_whole(pieces_of(model), this_rank(), weights.update)
    return weights


def make_trainer(dist, run_dir, model, run):
    "A trainer on four packs, which are one update; one of them, in most cases alone in its micro-batch, has no picture."
    base = new_model(model)
    cfg = base.cfg
    train = preset('shapes')[1]
    train = evolve(
        train,
        **dict(
            batch_size=1,
            gradient_accumulation_steps=4 // dist.world_size,
            dtype='float32',
            max_training_steps=UPDATES,
            max_sample_length=96,
        )
        | run,
    )
    packs = make_packs(cfg)[dist.rank :: dist.world_size]
    mine = [
        collate_packs(packs[i : i + train.batch_size])
        for i in range(0, len(packs), train.batch_size)
    ]
    return put_together(base, train, mine, mine, [Guard()], dist, Quiet(run_dir))


def updates(trainer, n):
    "Loss and norm of some updates on the same packs."
    made = [
        train_step(trainer, gather_update(list(trainer.loader), trainer.dist))
        for _ in range(n)
    ]
    return [[m['batch_loss'], m['grad_norm']] for m in made]


def keep(out, name, trainer):
    "Write the weights of a training."
    weights = full_weights(trainer.base)
    if trainer.dist.is_master:
        save_file(
            {k: v.clone() for k, v in weights.items()}, out / f'{name}.safetensors'
        )


def case(dist, out, name, model, run):
    "Four updates, with a checkpoint after two; what is worth knowing about them."
    trainer = make_trainer(dist, out / name, model, run)
    before = validation_loss(trainer)
    figures = updates(trainer, HALF)
    save(trainer)
    figures += updates(trainer, UPDATES - HALF)
    trainer.saver.wait()
    keep(out, name, trainer)
    return dict(
        val=[before, validation_loss(trainer)],
        figures=figures,
        parameters=sum(p.numel() for p in trainer.base.parameters()),
        scales=dist.gather(trainer.scaler.get_scale()),
    )


def continued(dist, out, name, source, run):
    "Two updates from another case's checkpoint."
    trainer = make_trainer(dist, out / name, {}, run)
    checkpoint = out / source / f'step_{HALF}'
    load_full_weights(
        trainer.base, VisionLanguageModel.from_pretrained(checkpoint).state_dict()
    )
    load_optimizer(checkpoint / 'optimizer', trainer.base, trainer.optimizer, dist)
    trainer.step = HALF
    figures = updates(trainer, UPDATES - HALF)
    keep(out, name, trainer)
    return dict(figures=figures)


def without_pictures(batch, cfg):
    "The same pack as if its pictures were words."
    return batch | dict(
        input_ids=torch.where(
            batch['input_ids'] == cfg.image_token_id, 5, batch['input_ids']
        ),
        images=[[] for _ in batch['images']],
    )


def sums(trainer):
    "What the weights of each part add up to, in absolute value, on rank 0."
    weights = full_weights(trainer.base)
    return {
        part: sum(
            w.double().abs().sum().item()
            for k, w in weights.items()
            if k.startswith(part)
        )
        for part in ('vision_encoder.', 'MP.', 'decoder.')
    }


def text_only(dist, out, sharding):
    "The sums before three updates and after each: with pictures, without any, with pictures on the last rank only."
    trainer = make_trainer(
        dist,
        out,
        {},
        dict(sharding=sharding, weight_decay=0.1)
        if dist.world_size > 1
        else dict(weight_decay=0.1),
    )
    packs = [collate_packs([p]) for p in make_packs(trainer.base.cfg)]
    text = [without_pictures(p, trainer.base.cfg) for p in packs]
    found = [sums(trainer)]
    for four in (packs, text, [text[0], packs[1], text[2], packs[3]]):
        train_step(trainer, gather_update(four[dist.rank :: dist.world_size], dist))
        found.append(sums(trainer))
    return found


def stage(dist, out, name, steps, workers, **changes):
    "The next updates of a run on real samples."
    vlm, train, _ = parse_args([*TINY, '--run_name', name])
    train = replace(
        train,
        data_cutoff_idx=60,
        num_of_sequences=3,
        ask_samples=0,
        eval_in_epochs=False,
        dtype='float32',
        resume=True,
        max_training_steps=steps,
        num_workers=workers,
        batch_size=2 if dist.world_size == 1 else 1,
        gradient_accumulation_steps=1 if dist.world_size == 4 else 2,
        **changes,
    )
    run(
        replace(vlm, vlm_checkpoint_path=str(out / 'runs')),
        train,
        schedule=lambda step, max_lr, max_steps: max_lr * 0.95**step,
        dist=dist,
    )


def main(out):
    dist = init_dist(device=torch.device('cpu'))
    torch.set_num_threads(1)
    n = dist.world_size
    facts = {}
    for name, (model, run) in CASES[n].items():
        facts[name] = case(dist, out, name, model, run)
    if n == 2:
        facts |= dict(
            ddp_to_zero2=continued(
                dist, out, 'ddp_to_zero2', 'ddp', dict(sharding='zero2')
            ),
            zero2_to_ddp=continued(dist, out, 'zero2_to_ddp', 'zero2', {}),
            offload_to_zero2=continued(
                dist, out, 'offload_to_zero2', 'offload', dict(sharding='zero2')
            ),
        )
    if n == 4:
        facts['zero2_to_4'] = continued(
            dist, out, 'zero2_to_4', 'zero2', dict(sharding='zero3')
        )
    for how in {1: ['ddp'], 2: ['ddp', 'zero2', 'zero3'], 4: []}[n]:
        facts[f'text_{n}_{how}'] = text_only(dist, out, how)
    if n == 1:
        stage(dist, out, 'undisturbed', 12, 0)
    file = out / 'deepspeed.json'
    if dist.is_master:
        file.write_text(json.dumps(DEEPSPEED))
    steps = {1: 4, 2: 8, 4: 12}[n]
    dist.barrier()
    stage(dist, out, 'ddp', steps, WORKERS[n])
    stage(dist, out, 'zero2', steps, WORKERS[n], deepspeed_config=str(file))
    if dist.is_master:
        (out / f'facts_{n}.json').write_text(json.dumps(facts))
    dist.barrier()
    destroy_dist()


if __name__ == '__main__':
    main(Path(sys.argv[1]))
