"Backbones saved by transformers give the same outputs here, whatever the file layout and the version of the configuration."
import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (LlamaConfig, LlamaForCausalLM, SiglipConfig, SiglipModel, SiglipVisionConfig,
                          SiglipVisionModel)

from nanovlm_nb.config import VLMConfig
from nanovlm_nb.language import LanguageModel
from nanovlm_nb.vision import ViT
from nanovlm_nb.weights import (language_config, load_language_backbone, load_vision_backbone, resolve_checkpoint,
                                vision_config)

SMALL = dict(vit_img_size=64, max_img_size=64, mp_pixel_shuffle_factor=2, lm_max_length=64)
VISION = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, image_size=64, patch_size=16)
LANGUAGE = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, vocab_size=120)


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


def new_llama(folder, base=10000., tied=False, **save):
    "A fresh tiny Llama, saved in `folder`."
    torch.manual_seed(0)
    rope = dict(rope_theta=base, rope_type='default')
    model = LlamaForCausalLM(LlamaConfig(**LANGUAGE, rope_parameters=rope, tie_word_embeddings=tied)).eval()
    model.save_pretrained(folder, **save)
    return model


@torch.no_grad()
def error(lm, model, n=120):
    "Largest difference of the scores of all known tokens, over rows longer than any other test here."
    ids = torch.randint(0, n, (2, 60))
    return (lm.head(lm(ids))[..., :n]-model(ids).logits).abs().max().item()


@torch.no_grad()
def test_golden_llama(golden):
    out = load_file(golden/'backbones'/'outputs.safetensors')
    lm = load_lm(golden/'backbones'/'llama')
    logits = lm.head(lm(out['lm_ids']))
    assert lm.cfg.lm_re_base == 100000
    assert logits.shape[-1] == 1066
    for name in ('transformers', 'reference'):
        assert (logits[..., :1000]-out[f'lm_logits_{name}']).abs().max() <= 1e-5


@torch.no_grad()
def test_golden_siglip(golden):
    out = load_file(golden/'backbones'/'outputs.safetensors')
    features = load_vit(golden/'backbones'/'siglip')(out['pixels'])
    for name in ('transformers', 'reference'):
        assert (features-out[f'vit_{name}']).abs().max() <= 1e-5


@pytest.mark.parametrize('base', [10000., 100000., 500000.])
@pytest.mark.parametrize('tied', [True, False])
def test_fresh_llama(tmp_path, base, tied):
    model = new_llama(tmp_path, base, tied)
    lm = load_lm(tmp_path)
    assert (lm.cfg.lm_tie_weights, lm.cfg.lm_re_base) == (tied, base)
    assert error(lm, model) <= 1e-5


def test_old_rope_theta(tmp_path):
    model = new_llama(tmp_path, 77000.)
    config = json.loads((tmp_path/'config.json').read_text())
    del config['rope_parameters']
    (tmp_path/'config.json').write_text(json.dumps(config | dict(rope_theta=77000.)))
    assert error(load_lm(tmp_path), model) <= 1e-5


def test_wrong_rope_base_is_seen(tmp_path):
    new_llama(tmp_path, 77000.)
    cfg = VLMConfig(**{**SMALL, **language_config(tmp_path), 'lm_re_base': 10000})
    with pytest.raises(ValueError, match='lm_re_base is 10000'):
        load_language_backbone(LanguageModel(cfg), tmp_path)


@pytest.mark.parametrize('size', ['5KB', '40KB', '10MB'])
def test_shards(tmp_path, size):
    model = new_llama(tmp_path, max_shard_size=size)
    assert (tmp_path/'model.safetensors.index.json').exists() == (size != '10MB')
    assert error(load_lm(tmp_path), model) <= 1e-5


def test_missing_shard_tensor_is_named(tmp_path):
    new_llama(tmp_path)
    state = load_file(tmp_path/'model.safetensors')
    del state['model.layers.1.mlp.up_proj.weight']
    save_file(state, tmp_path/'model.safetensors')
    with pytest.raises(ValueError, match=r'lacks model\.layers\.1\.mlp\.up_proj\.weight'):
        load_lm(tmp_path)


def test_bfloat16_checkpoint(tmp_path):
    model = new_llama(tmp_path).bfloat16()
    model.save_pretrained(tmp_path)
    lm = load_lm(tmp_path)
    assert lm.norm.weight.dtype == torch.float32
    assert error(lm, model.float()) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize('head', [True, False])
def test_fresh_siglip_vision(tmp_path, head):
    torch.manual_seed(0)
    model = SiglipVisionModel(SiglipVisionConfig(**VISION, vision_use_head=head)).eval()
    model.save_pretrained(tmp_path)
    pixels = torch.rand(2, 3, 64, 64)
    assert (load_vit(tmp_path)(pixels)-model(pixels).last_hidden_state).abs().max() <= 1e-5


@torch.no_grad()
def test_fresh_siglip_with_text_tower(tmp_path):
    torch.manual_seed(0)
    text = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4, vocab_size=30)
    model = SiglipModel(SiglipConfig(vision_config=VISION, text_config=text)).eval()
    model.save_pretrained(tmp_path, max_shard_size='50KB')
    pixels = torch.rand(2, 3, 64, 64)
    assert (load_vit(tmp_path)(pixels)-model.vision_model(pixels).last_hidden_state).abs().max() <= 1e-5


def test_sparse_config_has_the_defaults_of_transformers(tmp_path):
    (tmp_path/'config.json').write_text(json.dumps(dict(model_type='siglip', vision_config=dict(image_size=512))))
    cfg = VLMConfig(**vision_config(tmp_path))
    assert (cfg.vit_hidden_dim, cfg.vit_n_blocks, cfg.vit_img_size, cfg.vit_patch_size) == (768, 12, 512, 16)


def test_hub_name_from_the_cache(tmp_path, monkeypatch):
    snapshot = tmp_path/'models--someone--tiny'/'snapshots'/'abc'
    model = new_llama(snapshot)
    (tmp_path/'models--someone--tiny'/'refs').mkdir()
    (tmp_path/'models--someone--tiny'/'refs'/'main').write_text('abc')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    assert resolve_checkpoint('someone/tiny') == snapshot
    assert error(load_lm('someone/tiny'), model) <= 1e-5
    shutil.rmtree(tmp_path/'models--someone--tiny')
    with pytest.raises(FileNotFoundError, match='someone/tiny is no directory'):
        resolve_checkpoint('someone/tiny')
