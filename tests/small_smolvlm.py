"A small random model of ours in SmolVLM's form, with a tokenizer of its own, and pictures for it."

import random

import numpy as np
import torch
from PIL import Image, ImageDraw

from nanovlm_nb import VisionLanguageModel, VLMConfig
from nanovlm_nb.core.config import evolve
from nanovlm_nb.core.tokenizer import train_tokenizer

QUESTIONS = [
    'How many squares are red?',
    'What is this?',
    'Describe the picture in a few words, please.',
    'Is 12 + 30 = 42? Why?',
]
SIZES = dict(
    vit_hidden_dim=48,
    vit_n_heads=3,
    vit_n_blocks=2,
    vit_patch_size=8,
    vit_img_size=32,
    max_img_size=96,
    mp_pixel_shuffle_factor=2,
    lm_hidden_dim=48,
    lm_inter_dim=96,
    lm_n_heads=4,
    lm_n_kv_heads=2,
    lm_n_blocks=2,
    lm_max_length=1024,
    lm_max_position_embeddings=2048,
    image_convention='smolvlm',
    init_std=0.1,
)


def small_model(texts=QUESTIONS, **fields):
    "One with other fields, and a tokenizer that has read these texts."
    cfg = VLMConfig(**SIZES | fields)
    tok = train_tokenizer(texts * 2, 300, cfg.vlm_extra_tokens, cfg.lm_chat_template)
    torch.manual_seed(0)
    model = VisionLanguageModel(
        evolve(cfg, lm_base_vocab_size=len(tok) - len(cfg.vlm_extra_tokens)),
        load_backbone=False,
    ).eval()
    model.tokenizer = tok
    return model


def pictures(n, seed):
    "Drawings of different sizes and proportions, some of them partly black."
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        size = rng.randint(5, 200), rng.randint(5, 200)
        im = Image.fromarray(
            np.random.default_rng(rng.randint(0, 999)).integers(
                0, 256, (size[1], size[0], 3), dtype=np.uint8
            )
        )
        ImageDraw.Draw(im).rectangle([0, 0, size[0] // 2, size[1] // 2], fill='black')
        out.append(im)
    return out
