"MiniMind's files come in and go out: its own model code, of two times, gives the scores."

import json
from pathlib import Path

import pytest
import torch
from minimind_golden import CASES, MARK, batch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from nanovlm_nb.core.config import VLMConfig, evolve
from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.model.vlm import VisionLanguageModel, fill_slots
from nanovlm_nb.model.minimind import load_pth, save_pth
from nanovlm_nb.runs.run import get_vision_model

pytestmark = pytest.mark.usefixtures('one_thread')
HERE = Path(__file__).parent / 'data' / 'minimind'


def config(case):
    "A model of ours with the sizes of a case."
    s = json.loads((HERE / 'sizes.json').read_text())
    today = case.startswith('today')
    kind = (
        dict(
            lm_rms_eps=1e-6,
            lm_qk_norm=True,
            mp_kind='mlp',
            moe_top_k=1,
            moe_shared_experts=0,
            lm_n_kv_heads=s['kv_heads'],
        )
        if today
        else dict(mp_kind='linear_bias')
    )
    return VLMConfig(
        vit_hidden_dim=s['vision'],
        vit_inter_dim=16,
        vit_n_heads=2,
        vit_n_blocks=1,
        vit_patch_size=16,
        vit_img_size=32,
        max_img_size=32,
        mp_pixel_shuffle_factor=1,
        lm_hidden_dim=s['width'],
        lm_inter_dim=s['inside'],
        lm_re_base=1_000_000,
        lm_base_vocab_size=s['tokens'],
        lm_n_heads=s['heads'],
        lm_n_blocks=s['blocks'],
        lm_max_length=64,
        moe_experts=s['experts'],
        use_moe=case.endswith('moe'),
        vlm_extra_tokens={'image_token': '<|image|>'},
        **dict(lm_n_kv_heads=s['kv_heads']) | kind,
    )


@torch.no_grad()
def scores(model):
    "Logits of the golden batch as text and with its pictures."
    ids, features = batch()
    x = model.decoder.token_embedding(ids)
    slots = (ids == MARK).flatten().nonzero()[:, 0]
    for part in ('MP.norm', 'MP.proj', 'MP.out'):
        features = model.get_submodule(part)(
            features
        )  # a row of features has no grid to shuffle
    head = lambda h: model.decoder.head(model.decoder(h))[..., :48]
    return dict(text=head(x), pictures=head(fill_slots(x, slots, features)))


def far(a, b, names=('text', 'pictures')):
    return max((a[k] - b[k]).abs().max().item() for k in names)


@pytest.mark.parametrize('case', CASES)
def test_its_files_come_in_and_go_out(case, tmp_path):
    """A stage file of MiniMind-V, in each of its formats, dense and with experts, and its file of a language model alone give its scores here.
    What goes out has its names and numbers, so its model loads the file with strict=True; it holds no tower, and is as large as its tensors."""
    model, again, text = (
        VisionLanguageModel(config(case), load_backbone=False).eval() for _ in range(3)
    )
    theirs = torch.load(HERE / case / 'scores.pt')
    given = torch.load(HERE / case / 'weights.pth')
    assert load_pth(model, HERE / case / 'weights.pth') == ['vision_encoder']
    assert (
        far(scores(model), theirs) <= 1e-5
        and far(dict(text=theirs['pictures']), theirs, ['text']) > 0.1
    ), 'the picture counts'
    torch.save(
        {k: w for k, w in given.items() if not k.startswith('vision')},
        tmp_path / 'lm.pth',
    )
    assert (
        load_pth(text, tmp_path / 'lm.pth') == ['vision_encoder', 'MP']
        and far(scores(text), theirs, ['text']) <= 1e-5
    )
    file = save_pth(tmp_path, model.state_dict(), model.cfg)
    held = torch.load(file)
    assert held.keys() == given.keys() and all(
        torch.equal(held[k].float(), given[k].float()) for k in given
    )
    assert file.name.startswith('pretrain_vlm_') and file.stat().st_size < sum(
        w.nbytes for w in held.values()
    ) + 1000 * len(held)
    assert (
        load_pth(again, file) == ['vision_encoder']
        and far(scores(again), scores(model)) == 0
    )


# --- the stage with CLIP


def test_the_preset_for_clip_sees_as_clip_does(tmp_path):
    "On a tiny tower that transformers saved: pixels as its processor has them, and a tower that stays as it is."
    small = dict(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3
    )
    clip = CLIPModel(
        CLIPConfig(
            vision_config=small | dict(image_size=32, patch_size=8),
            text_config=small | dict(vocab_size=20),
        )
    ).eval()
    clip.save_pretrained(tmp_path / 'clip')
    CLIPImageProcessor(
        size=dict(shortest_edge=32), crop_size=dict(height=32, width=32)
    ).save_pretrained(tmp_path / 'clip')
    sizes = '--lm_hidden_dim 32 --lm_inter_dim 64 --lm_n_heads 4 --lm_n_kv_heads 2 --lm_n_blocks 1 --lm_base_vocab_size 48 --vit_hidden_dim 24 --vit_n_heads 3 --vit_patch_size 8 --vit_img_size 32 --max_img_size 32'
    vlm, run, _ = parse_args(
        [
            '--preset',
            'minimind_clip',
            *sizes.split(),
            '--vit_model_type',
            str(tmp_path / 'clip'),
        ]
    )
    assert (
        vlm.mp_kind,
        vlm.mp_image_token_length,
        run.lr_backbone_pair,
        len(vlm.pixel_mean),
    ) == ('linear_bias', 16, (0.0, 0.0), 3)
    tower, preprocess = get_vision_model(vlm)
    picture = Image.effect_noise((32, 32), 80).convert('RGB')
    tiles, grid = preprocess(picture)
    theirs = CLIPImageProcessor.from_pretrained(tmp_path / 'clip')(
        picture, return_tensors='pt'
    ).pixel_values
    with torch.no_grad():
        want = clip.vision_model(theirs).last_hidden_state[:, 1:]
    model = VisionLanguageModel(
        evolve(vlm, vit_n_blocks=2, vit_inter_dim=40), load_backbone=False
    )
    model.vision_encoder.load_state_dict(tower.state_dict())
    assert grid == (1, 1) and not any(p.requires_grad for p in tower.parameters())
    assert (model.see(tiles) - want).abs().max() <= 1e-5, (
        'pixels have the mean and the deviation of each colour'
    )
