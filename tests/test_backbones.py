"Backbones saved by transformers give the same outputs here, whatever the file layout and the version of the configuration."

import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.model.language import KVCache, LanguageModel
from nanovlm_nb.core.tokenizer import check_tokenizer, get_tokenizer, train_tokenizer
from nanovlm_nb.model.vision import ViT
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.files import resolve_checkpoint
from nanovlm_nb.model.backbones import (
    language_config,
    load_language_backbone,
    load_vision_backbone,
)
from nanovlm_nb.model.backbones import vision_config

SMALL = dict(
    vit_img_size=64, max_img_size=64, mp_pixel_shuffle_factor=2, lm_max_length=64
)
VISION = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=64,
    patch_size=16,
)
LANGUAGE = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=120,
)


def load_lm(folder):
    "A language model with the numbers and weights of a directory."
    lm = LanguageModel(VLMConfig(**{**SMALL, **language_config(folder)})).eval()
    load_language_backbone(lm, folder)
    return lm


def load_vit(folder):
    "A vision tower with the numbers and weights of a directory."
    vit = ViT(VLMConfig(**{**SMALL, **vision_config(folder)})).eval()
    load_vision_backbone(vit, folder)
    return vit


def new_llama(folder, base=10000.0, tied=False, **save):
    "A fresh tiny Llama, saved in `folder`."
    torch.manual_seed(0)
    rope = dict(rope_theta=base, rope_type='default')
    model = LlamaForCausalLM(
        LlamaConfig(**LANGUAGE, rope_parameters=rope, tie_word_embeddings=tied)
    ).eval()
    model.save_pretrained(folder, **save)
    return model


@torch.no_grad()
def error(lm, model, n=120):
    "Largest difference of the scores of all known tokens, over rows longer than any other test here."
    ids = torch.randint(0, n, (2, 60))
    return (lm.head(lm(ids))[..., :n] - model(ids).logits).abs().max().item()


@torch.no_grad()
def test_golden_llama(golden):
    out = load_file(golden / 'backbones' / 'outputs.safetensors')
    lm = load_lm(golden / 'backbones' / 'llama')
    logits = lm.head(lm(out['lm_ids']))
    assert lm.cfg.lm_re_base == 100000
    assert logits.shape[-1] == 1066
    for name in ('transformers', 'reference'):
        assert (logits[..., :1000] - out[f'lm_logits_{name}']).abs().max() <= 1e-5


@torch.no_grad()
def test_golden_siglip(golden):
    out = load_file(golden / 'backbones' / 'outputs.safetensors')
    features = load_vit(golden / 'backbones' / 'siglip')(out['pixels'])
    for name in ('transformers', 'reference'):
        assert (features - out[f'vit_{name}']).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize('head', [True, False])
def test_fresh_siglip_vision(tmp_path, head):
    torch.manual_seed(0)
    model = SiglipVisionModel(SiglipVisionConfig(**VISION, vision_use_head=head)).eval()
    model.save_pretrained(tmp_path)
    pixels = torch.rand(2, 3, 64, 64)
    assert (
        load_vit(tmp_path)(pixels) - model(pixels).last_hidden_state
    ).abs().max() <= 1e-5


def test_hub_name_from_the_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / 'models--someone--tiny' / 'snapshots' / 'abc'
    model = new_llama(snapshot)
    (tmp_path / 'models--someone--tiny' / 'refs').mkdir()
    (tmp_path / 'models--someone--tiny' / 'refs' / 'main').write_text('abc')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    assert resolve_checkpoint('someone/tiny') == snapshot
    assert error(load_lm('someone/tiny'), model) <= 1e-5
    shutil.rmtree(tmp_path / 'models--someone--tiny')
    with pytest.raises(FileNotFoundError, match='someone/tiny is no directory'):
        resolve_checkpoint('someone/tiny')


# CLIP and Qwen

CLIP_PIXELS = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def shaken(model, folder):
    "A saved model none of whose biases is 0 and none of whose norms is 1."
    torch.manual_seed(2)
    for w in model.parameters():
        w.data.add_(0.05 * torch.randn_like(w))
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize('act', ['quick_gelu', 'gelu'])
@pytest.mark.parametrize('whole', [True, False])
def test_fresh_clip(tmp_path, act, whole):
    "The patches of CLIP's last block, as LLaVA and MiniMind-V take them, from the tower alone and from the file of both towers."
    vision = VISION | dict(hidden_act=act)
    text = dict(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=30,
    )
    model = shaken(
        CLIPModel(CLIPConfig(vision_config=vision, text_config=text))
        if whole
        else CLIPVisionModel(CLIPVisionConfig(**vision)),
        tmp_path,
    )
    tower = model.vision_model if hasattr(model, 'vision_model') else model
    want = tower(CLIP_PIXELS).last_hidden_state[:, 1:]
    vit = load_vit(tmp_path)
    assert vit.cfg.vit_activation == act and not vit.cfg.vit_post_norm
    assert (vit(CLIP_PIXELS) - want).abs().max() <= 1e-5


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize(
    'kind,conf,more',
    [
        (Qwen2ForCausalLM, Qwen2Config, {}),
        (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=12)),
        (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=8)),
        (LlamaForCausalLM, LlamaConfig, dict(head_dim=20)),
        (LlamaForCausalLM, LlamaConfig, {}),
    ],
)
def test_fresh_language_models(tmp_path, kind, conf, more, tied):
    "Llama, biases of Qwen2, norms of Qwen3, heads of any width; also with a cache."
    model = shaken(
        kind(
            conf(
                **LANGUAGE,
                **more,
                rope_theta=1e6,
                rope_parameters=dict(rope_theta=1e6, rope_type='default'),
                tie_word_embeddings=tied,
            )
        ),
        tmp_path,
    )
    lm = load_lm(tmp_path)
    assert (lm.cfg.lm_tie_weights, lm.cfg.lm_re_base, lm.cfg.head_width) == (
        tied,
        1000000,
        more.get('head_dim', 8),
    )
    assert error(lm, model) <= 1e-5
    ids = torch.randint(0, 120, (2, 20))
    cache = KVCache(20)
    with torch.no_grad():
        steps = [
            lm.head(lm(part, cache=cache))
            for part in (ids[:, :15], *ids[:, 15:].split(1, 1))
        ]
    assert (torch.cat(steps, 1)[..., :120] - model(ids).logits).abs().max() <= 1e-5


def test_sliding_window_is_refused(tmp_path):
    Qwen2ForCausalLM(
        Qwen2Config(**LANGUAGE, use_sliding_window=True, sliding_window=8)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='use_sliding_window is True, but'):
        language_config(tmp_path)


def test_more_rows_than_tokens(tmp_path):
    "Qwen's matrix has spare rows; the tokens of pictures follow the tokenizer's, where the tokenizer puts them."
    shaken(Qwen2ForCausalLM(Qwen2Config(**LANGUAGE | dict(vocab_size=400))), tmp_path)
    tok = train_tokenizer(['some text'], 300)
    tok.save_pretrained(tmp_path)
    lm = load_lm(tmp_path)
    assert lm.cfg.lm_base_vocab_size == len(tok) < 400
    check_tokenizer(
        get_tokenizer(tmp_path, lm.cfg.vlm_extra_tokens, lm.cfg.lm_chat_template),
        lm.cfg,
    )


def test_clip_and_qwen_train_together(tmp_path):
    "A model of both starts from their weights, can learn, is saved and loaded."
    clip = shaken(CLIPVisionModel(CLIPVisionConfig(**VISION)), tmp_path / 'clip')
    shaken(Qwen3ForCausalLM(Qwen3Config(**LANGUAGE, head_dim=12)), tmp_path / 'qwen')
    cfg = VLMConfig(
        **SMALL
        | dict(
            vit_model_type=str(tmp_path / 'clip'), lm_model_type=str(tmp_path / 'qwen')
        )
    )
    model = VisionLanguageModel(cfg)
    pixels = torch.rand(1, 3, 64, 64)
    ids = torch.cat(
        [torch.full((1, 4), model.cfg.image_token_id), torch.randint(0, 120, (1, 16))],
        1,
    )
    tower = clip.vision_model if hasattr(clip, 'vision_model') else clip
    with torch.no_grad():
        mean, std = (
            torch.tensor(numbers)[:, None, None]
            for numbers in (model.cfg.pixel_mean, model.cfg.pixel_std)
        )
        wanted = tower((pixels - mean) / std).last_hidden_state[:, 1:]
        assert (model.eval().see(pixels) - wanted).abs().max() <= 1e-5
    model.train()(
        ids,
        pixels,
        targets=torch.where(torch.arange(20)[None] > 4, ids.roll(-1, 1), -100),
    )[1].backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval().save_pretrained(tmp_path / 'both')
    with torch.no_grad():
        assert torch.equal(
            VisionLanguageModel.from_pretrained(tmp_path / 'both')(ids, pixels)[0],
            model(ids, pixels)[0],
        )
