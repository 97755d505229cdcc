"One update of a small model on fixed packs, split as the launch and the arguments say; run by test_trainer.py, alone or under torchrun."
import sys

import torch
from safetensors.torch import save_file

from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.core.dist import destroy_dist, init_dist, set_seed
from nanovlm_nb.data.packing import collate_packs, pack
from nanovlm_nb.training.trainer import Hook, make_trainer, train_step
from nanovlm_nb.training.optim import gather_update
from nanovlm_nb.model.vlm import VisionLanguageModel


def make_packs(cfg):
    "Four packs with 3, 20, 1 and 9 targets; the third has no picture."
    gen = torch.Generator().manual_seed(5)
    packs = []
    for k, (targets, n_images) in enumerate([(3, 1), (20, 2), (1, 0), (9, 1)]):
        tiles = [torch.randint(0, 256, (1, 3, cfg.vit_img_size, cfg.vit_img_size), generator=gen, dtype=torch.uint8) for _ in range(n_images)]
        text = torch.randint(0, cfg.lm_base_vocab_size, (30,), generator=gen)
        ids = torch.cat([torch.full((n_images*cfg.mp_image_token_length,), cfg.image_token_id), text])
        labels = torch.full_like(ids, -100)
        labels[-targets-1:-1] = ids[-targets:]
        sample = dict(id=f'packs/{k}', input_ids=ids, labels=labels, images=tiles, source='packs')
        packs.append(pack([sample], 96, pad_id=2))
    return packs


class Spy(Hook):
    "Keeps a copy of the gradients."
    def before_step(self, trainer, figures): self.grads = {k: p.grad.clone() for k, p in trainer.base.named_parameters()}


def main(batch_size, accumulation, out):
    dist = init_dist(device=torch.device('cpu'))
    torch.set_num_threads(1)
    vlm, train = preset('shapes')
    vlm = evolve(vlm, lm_max_length=96)
    train = evolve(train, batch_size=batch_size, gradient_accumulation_steps=accumulation, dtype='float32', max_training_steps=1, max_sample_length=96)
    set_seed(0)
    packs = make_packs(vlm)
    steps = [packs[i:i+batch_size*dist.world_size] for i in range(0, 4, batch_size*dist.world_size)]
    mine = [collate_packs(s[dist.rank*batch_size:(dist.rank+1)*batch_size]) for s in steps]
    spy = Spy()
    trainer = make_trainer(VisionLanguageModel(vlm, load_backbone=False).train(), train, mine, mine, [spy], dist)
    figures = train_step(trainer, gather_update(mine, dist))
    if dist.is_master:
        save_file({f'grad/{k}': v for k, v in spy.grads.items()} | {f'param/{k}': v.detach().clone() for k, v in trainer.base.named_parameters()}, out,
                  metadata=dict(loss=repr(figures['batch_loss']), norm=repr(figures['grad_norm']), digest=figures['batch_digest'], targets=str(figures['target_tokens'])))
    destroy_dist()


if __name__ == '__main__': main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
