"Three updates of a small model, the second without a picture and the third with pictures on the last rank only; run by test_text_only.py, alone or under torchrun: text_only.py FILE SHARDING..."
import json
import sys
from pathlib import Path

import torch
from sharded import make_trainer
from split_update import make_packs

from nanovlm_nb.core.dist import destroy_dist, init_dist
from nanovlm_nb.data.packing import collate_packs
from nanovlm_nb.training.shard import full_weights
from nanovlm_nb.training.trainer import train_step
from nanovlm_nb.training.update import gather_update

PARTS = dict(vision='vision_encoder.', projector='MP.', language='decoder.')


def without_pictures(batch, cfg):
    "The same pack as if its pictures were words."
    return batch | dict(input_ids=torch.where(batch['input_ids'] == cfg.image_token_id, 5, batch['input_ids']), images=[[] for _ in batch['images']])


def sums(trainer):
    "What the weights of each part add up to, in absolute value, on rank 0."
    weights = full_weights(trainer.base)
    return {name: sum(w.double().abs().sum().item() for k, w in weights.items() if k.startswith(prefix)) for name, prefix in PARTS.items()}


def case(dist, folder, sharding):
    "The sums before, and after each update."
    trainer = make_trainer(dist, folder, {}, dict(sharding=sharding, weight_decay=.1) if dist.world_size > 1 else dict(weight_decay=.1))
    cfg = trainer.base.cfg
    packs = [collate_packs([p]) for p in make_packs(cfg)]
    text = [without_pictures(p, cfg) for p in packs]
    found = [sums(trainer)]
    for four in (packs, text, [text[0], packs[1], text[2], packs[3]]):
        train_step(trainer, gather_update(four[dist.rank::dist.world_size], dist))
        found.append(sums(trainer))
    return found


if __name__ == '__main__':
    dist = init_dist(device=torch.device('cpu'))
    torch.set_num_threads(1)
    found = {s: case(dist, Path(sys.argv[1]).parent, s) for s in sys.argv[2:]}
    if dist.is_master: Path(sys.argv[1]).write_text(json.dumps(found))
    destroy_dist()
