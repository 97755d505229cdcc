"""Any vision tower with any language model, named and nothing else: sizes follow, features and scores are those of transformers.

The checkpoints are written by transformers, with the image size, patches, kind of heads, activation, epsilons and class token of
the real ones, but few layers and small widths. `NANOVLM_REAL_PARTS=DIR` adds real weights: DIR/dinov2_small and DIR/smollm2.
`python test_towers.py` prints the whole table."""

import functools
import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from commands import TINY
from small_smolvlm import small_model

from nanovlm_nb import train
from nanovlm_nb.cli import main as nanovlm
from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.core.tokenizer import check_tokenizer, train_tokenizer
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data.images import image_processor_of
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.pretrained import checkpoint_config, checkpoint_weights
from nanovlm_nb.runs.start import resolve_start

pytestmark = pytest.mark.usefixtures('one_thread')
REAL = os.environ.get('NANOVLM_REAL_PARTS')
SMALL = dict(
    hidden_size=48, intermediate_size=100, num_hidden_layers=2, num_attention_heads=4
)
TEXT = dict(
    hidden_size=24,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    vocab_size=30,
)
#: the kinds of towers: (class, configuration of the tower, what else the class needs)
SIGLIP = dict(layer_norm_eps=1e-6, hidden_act='gelu_pytorch_tanh')
CLIP = dict(layer_norm_eps=1e-5, hidden_act='quick_gelu')
#: name -> size and patch of the checkpoint, then side of the tile, patches a side, factor, image tokens that follow
TOWERS = {
    'siglip-base-patch16-224': (224, 16, 224, 14, 2, 49),
    'siglip-base-patch16-256': (256, 16, 256, 16, 2, 64),
    'siglip-base-patch16-384': (384, 16, 384, 24, 3, 64),
    'siglip2-base-patch16-512': (512, 16, 512, 32, 4, 64),
    'siglip2-base-patch32-256': (256, 32, 256, 8, 1, 64),
    'siglip2-patch32-512': (512, 32, 512, 16, 2, 64),
    'siglip-so400m-patch14-224': (224, 14, 224, 16, 2, 64),
    'siglip-so400m-patch14-384': (384, 14, 384, 27, 3, 81),
    'clip-vit-base-patch32': (224, 32, 224, 7, 1, 49),
    'clip-vit-large-patch14': (224, 14, 224, 16, 2, 64),
    'clip-vit-large-patch14-336': (336, 14, 336, 24, 3, 64),
    'dinov2-small': (518, 14, 224, 16, 2, 64),
}
LANGUAGES = {
    'SmolLM2-135M-Instruct': (
        tf.LlamaConfig,
        dict(
            num_attention_heads=9,
            num_key_value_heads=3,
            hidden_size=36,
            rms_norm_eps=1e-5,
        ),
        100000.0,
    ),
    'SmolLM2-1.7B-Instruct': (
        tf.LlamaConfig,
        dict(
            num_attention_heads=8,
            num_key_value_heads=8,
            hidden_size=32,
            rms_norm_eps=1e-5,
        ),
        130000.0,
    ),
    'Qwen2.5-0.5B-Instruct': (
        tf.Qwen2Config,
        dict(
            num_attention_heads=14,
            num_key_value_heads=2,
            hidden_size=56,
            rms_norm_eps=1e-6,
            use_sliding_window=False,
        ),
        1e6,
    ),
    'Qwen3-0.6B': (
        tf.Qwen3Config,
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=32,
            head_dim=16,
            rms_norm_eps=1e-6,
        ),
        1e6,
    ),
}
PAIRS = list(itertools.product(TOWERS, LANGUAGES))
QUICK = {(tower, [*LANGUAGES][i % 4]) for i, tower in enumerate(TOWERS)}


@functools.cache
def folder():
    return Path(tempfile.mkdtemp(prefix='towers-'))


def shaken(model, path):
    "A saved model none of whose biases is 0 and none of whose norms or layer scales is 1."
    torch.manual_seed(0)
    for w in model.parameters():
        w.data.add_(0.05 * torch.randn_like(w))
    model.save_pretrained(path)
    return model.eval()


@functools.cache
def tower(name):
    "Where a tower is, and its model."
    size, patch = TOWERS[name][:2]
    path = folder() / name
    common = SMALL | dict(image_size=size, patch_size=patch)
    if name.startswith('siglip'):
        model = tf.SiglipModel(
            tf.SiglipConfig(vision_config=common | SIGLIP, text_config=TEXT)
        )
    elif name.startswith('clip'):
        model = tf.CLIPModel(
            tf.CLIPConfig(vision_config=common | CLIP, text_config=TEXT)
        )
    else:
        model = tf.Dinov2Model(
            tf.Dinov2Config(**common | dict(layer_norm_eps=1e-6, hidden_act='gelu'))
        )
    shaken(model, path)
    kinds = dict(clip=tf.CLIPImageProcessorPil, dinov2=tf.BitImageProcessorPil)
    if name.split('-')[0] in kinds:
        kinds[name.split('-')[0]]().save_pretrained(path)
    return path, model.eval()


@functools.cache
def language(name):
    "Where a language model is, and its model."
    kind, fields, base = LANGUAGES[name]
    path = folder() / name
    tokenizer = train_tokenizer(['some text'], 300)
    tokenizer.save_pretrained(path)
    rope = dict(rope_theta=base, rope_type='default')
    config = kind(
        **SMALL | fields, vocab_size=320, rope_parameters=rope, tie_word_embeddings=True
    )
    return path, shaken(tf.AutoModelForCausalLM.from_config(config), path)


@torch.no_grad()
def features(model, pixels):
    "What transformers makes of the patches: without the class token, and of CLIP without the last norm."
    if isinstance(model, tf.Dinov2Model):
        return model(pixels).last_hidden_state[:, 1:]
    inside = model.vision_model if hasattr(model, 'vision_model') else model
    seen = inside(pixels).last_hidden_state
    return seen[:, 1:] if isinstance(model, tf.CLIPModel) else seen


@torch.no_grad()
def compare(command, eye, mouth):
    "Sizes that follow from a command, and the largest differences of features and scores, beside the largest value of each."
    cfg, _, lines = resolve_start(*parse_args([str(word) for word in command])[:2])
    torch.manual_seed(1)
    model = VisionLanguageModel(cfg).eval()
    assert model.cfg == cfg
    known = cfg.lm_base_vocab_size
    pixels = torch.rand(2, 3, cfg.vit_img_size, cfg.vit_img_size)
    ids = torch.randint(0, known, (2, 40))
    found = []
    for ours, theirs in (
        (model.vision_encoder(pixels), eye and features(eye, pixels)),
        (
            model.decoder.head(model.decoder(ids))[..., :known],
            mouth and mouth(ids).logits[..., :known],
        ),
    ):
        if theirs is None:
            continue
        assert ours.shape == theirs.shape
        found.append(((ours - theirs).abs().max().item(), theirs.abs().max().item()))
    return cfg, found, lines, model


def named(eye, mouth):
    return ['--vit_model_type', tower(eye)[0], '--lm_model_type', language(mouth)[0]]


@pytest.mark.parametrize(
    'eye, mouth',
    [
        pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_two_names_are_enough(eye, mouth):
    cfg, found, lines, model = compare(
        named(eye, mouth), tower(eye)[1], language(mouth)[1]
    )
    _, patch, tile, side, factor, tokens = TOWERS[eye]
    assert (
        cfg.vit_img_size,
        cfg.vit_patch_size,
        cfg.patches_per_side,
        cfg.mp_pixel_shuffle_factor,
        cfg.mp_image_token_length,
    ) == (tile, patch, side, factor, tokens)
    assert (
        cfg.max_img_size == tile
        and cfg.lm_base_vocab_size < 300
        and cfg.lm_tokenizer == str(language(mouth)[0])
    )
    assert [difference for difference, _ in found] == pytest.approx([0, 0], abs=2e-5)
    if not eye.startswith('siglip'):
        assert cfg.pixel_std != [1.0], 'the normalisation of its image processor'
    check_tokenizer(model.tokenizer, cfg)


@pytest.mark.parametrize('part', ['vit', 'lm'])
def test_the_other_part_is_new(part):
    "One name: that part has its weights, the other the sizes of the preset and random numbers."
    path, other = tower('dinov2-small') if part == 'vit' else language('Qwen3-0.6B')
    cfg, found, lines, _ = compare(
        [f'--{part}_model_type', path],
        *((other, None) if part == 'vit' else (None, other)),
    )
    assert [difference for difference, _ in found] == pytest.approx([0], abs=2e-5)
    usual = parse_args([])[0]
    kept = (
        ('lm_hidden_dim', 'lm_tokenizer')
        if part == 'vit'
        else ('vit_hidden_dim', 'vit_img_size', 'mp_pixel_shuffle_factor')
    )
    assert all(getattr(cfg, name) == getattr(usual, name) for name in kept)
    assert {n: getattr(cfg, n) for n in ('vit_model_type', 'lm_model_type')} == dict(
        vit_model_type=None, lm_model_type=None
    ) | {f'{part}_model_type': str(path)}


def test_what_is_given_counts():
    "Tiles of another size, positions interpolated as transformers does; pictures of several tiles; a factor."
    path, eye = tower('dinov2-small')
    command = [
        '--vit_model_type',
        path,
        '--vit_img_size',
        112,
        '--max_img_size',
        336,
        '--mp_pixel_shuffle_factor',
        4,
    ]
    cfg, found, *_ = compare(command, eye, None)
    assert (cfg.patches_per_side, cfg.mp_image_token_length, cfg.max_img_size) == (
        8,
        4,
        336,
    ) and found[0][0] <= 2e-5
    path, eye = tower('siglip-base-patch16-224')
    sized = parse_args(['--vit_model_type', str(path), '--vit_img_size', '128'])
    model = VisionLanguageModel(resolve_start(*sized[:2])[0]).eval()
    pixels = torch.rand(1, 3, 128, 128)
    with torch.no_grad():
        want = eye.vision_model(pixels, interpolate_pos_encoding=True).last_hidden_state
    assert (model.vision_encoder(pixels) - want).abs().max() <= 2e-5


@pytest.mark.parametrize(
    'words, said',
    [
        (
            ['--mp_pixel_shuffle_factor', '4'],
            'does not divide the 27 patches along a side of a tile: give one of 1, 3, 9, 27',
        ),
        (
            ['--max_img_size', '1000'],
            'max_img_size 1000 is no multiple of vit_img_size 384',
        ),
        (
            ['--vit_patch_size', '16'],
            "vit_patch_size is 16, but .* was trained with 14: leave vit_patch_size out",
        ),
    ],
)
def test_one_number_is_asked_for(words, said):
    with pytest.raises(UsageError, match=said):
        resolve_start(
            *parse_args(
                [*map(str, named('siglip-so400m-patch14-384', 'Qwen3-0.6B')), *words]
            )[:2]
        )


def test_a_preset_with_backbones():
    "Where a preset loads both, a name replaces one of them, None makes a part new; as many tiles a picture as before."
    eye, mouth = map(
        str,
        (tower('siglip-so400m-patch14-384')[0], language('SmolLM2-135M-Instruct')[0]),
    )
    cfg = resolve_start(
        *parse_args(
            ['--preset', 'nanovlm', '--vit_model_type', eye, '--lm_model_type', mouth]
        )[:2]
    )[0]
    assert (cfg.max_img_size, cfg.mp_pixel_shuffle_factor, cfg.lm_n_heads) == (
        4 * 384,
        3,
        9,
    )
    cfg = resolve_start(
        *parse_args(
            ['--preset', 'nanovlm', '--vit_model_type', eye, '--lm_model_type', 'None']
        )[:2]
    )[0]
    assert (cfg.lm_hidden_dim, cfg.backbones) == (960, dict(vit=eye))
    cfg = resolve_start(
        *parse_args(['--vit_model_type', eye, '--vlm_load_backbone_weights', 'False'])[
            :2
        ]
    )[0]
    assert not cfg.backbones and cfg.vit_img_size == 64


@torch.no_grad()
@pytest.mark.parametrize('kind', ['smolvlm', 'idefics3'])
def test_a_smolvlm_of_2_2_billion_has_27_patches_a_side(tmp_path, kind):
    "384 pixels with patches of 14: six are left over, as in transformers."
    vision = SMALL | SIGLIP | dict(image_size=384, patch_size=14)
    text = SMALL | dict(
        hidden_size=32, num_key_value_heads=2, vocab_size=320, model_type='llama'
    )
    config, cls = dict(
        smolvlm=(tf.SmolVLMConfig, tf.SmolVLMForConditionalGeneration),
        idefics3=(tf.Idefics3Config, tf.Idefics3ForConditionalGeneration),
    )[kind]
    theirs = shaken(
        cls(
            config(
                vision_config=vision,
                text_config=text,
                scale_factor=3,
                image_token_id=310,
                pad_token_id=0,
                tie_word_embeddings=False,
            )
        ),
        tmp_path,
    )
    cfg, _ = checkpoint_weights(tmp_path)
    assert (
        cfg.patches_per_side,
        cfg.mp_image_token_length,
        checkpoint_config(tmp_path),
    ) == (27, 81, cfg)
    model = VisionLanguageModel.from_pretrained(tmp_path)
    pixels = torch.rand(2, 3, 384, 384)
    seen = theirs.get_image_features(pixels[None]).pooler_output[0]
    assert (
        model.MP(model.vision_encoder(pixels)).flatten(0, 1) - seen
    ).abs().max() <= 2e-5 * seen.abs().max()
    assert image_processor_of(cfg).splitted_image_size == 384


def test_it_trains(tmp_path, monkeypatch):
    "The command as it is typed: a run from two names, and what a checkpoint of it is."
    monkeypatch.chdir(tmp_path)
    run = [
        *TINY[18:],
        '--max_training_steps',
        '2',
        '--eval_in_epochs',
        'False',
        '--ask_samples',
        '0',
        '--run_name',
        'r',
    ]
    assert (
        nanovlm(
            ['train', *map(str, named('siglip-so400m-patch14-384', 'Qwen3-0.6B')), *run]
        )
        == 0
    )
    cfg = checkpoint_config('checkpoints/r/step_2')
    assert (cfg.vit_img_size, cfg.lm_qk_norm, cfg.mp_image_token_length) == (
        384,
        True,
        81,
    )
    assert (
        nanovlm(
            [
                'train',
                '--run_name',
                'r',
                '--resume',
                'True',
                '--max_training_steps',
                '3',
            ]
        )
        == 0
    )


def test_ten_lines_that_begin_with_something(tmp_path, monkeypatch):
    "Backbones, one of them, or a whole model with adapters, and no other word."
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [
        (rng.integers(0, 256, (40, 50, 3), dtype=np.uint8), 'What is this?', 'noise')
        for _ in range(12)
    ]
    quick = dict(max_training_steps=2, quiet=True)
    eye, mouth = (
        str(tower('dinov2-small')[0]),
        str(language('Qwen2.5-0.5B-Instruct')[0]),
    )
    both = train(
        rows, vit_model_type=eye, lm_model_type=mouth, run_name='both', **quick
    )
    assert (
        both.model.cfg.mp_image_token_length == 64
        and len(both.ask(rows[0][0], 'What?')) >= 0
    )
    one = train(rows, vit_model_type=eye, run_name='one', **quick)
    assert one.model.cfg.backbones == dict(vit=eye)
    small_model().save_pretrained('small')
    adapted = train(rows, load_from='small', lora_rank=8, run_name='adapted', **quick)
    assert adapted.model.cfg.max_img_size == 96
    model = small_model(lm_max_length=4096, max_img_size=256)
    model.save_pretrained('large')  # pictures of 65 tiles, 4 tokens each
    fitted = train(rows, load_from='large', run_name='fitted', **quick)
    assert fitted.model.cfg.max_img_size == 192, (
        '37 tiles, and 128 tokens of text, are less than 512'
    )
    assert (
        'max_img_size is 192, so that a picture'
        in Path('checkpoints/fitted/train.log').read_text()
    )


def test_check_and_plan_say_it(capsys):
    "One line each for the sizes and for the stages."
    command = [*map(str, named('dinov2-small', 'Qwen3-0.6B')), *TINY[18:]]
    for name in ('plan', 'check'):
        nanovlm([name, *command])
        said = capsys.readouterr().out
        assert (
            'a tile has 224 x 224 pixels, 16 x 16 patches and 64 image tokens' in said
        )
        assert (
            'projector_steps 0.1: the projector begins alone, the backbones follow'
            in said
        )


@pytest.mark.skipif(
    not REAL, reason='NANOVLM_REAL_PARTS names no folder with real weights'
)
def test_real_weights():
    for command, found in real():
        assert all(difference <= 1e-4 * largest for difference, largest in found), (
            command,
            found,
        )


def real():
    "The command and the differences of real DINOv2 and real SmolLM2, together and with the small ones."
    eye = (
        tf.Dinov2Model.from_pretrained(f'{REAL}/dinov2_small').eval(),
        f'{REAL}/dinov2_small',
    )
    mouth = (
        tf.AutoModelForCausalLM.from_pretrained(f'{REAL}/smollm2').eval(),
        f'{REAL}/smollm2',
    )
    pairs = [
        (eye, mouth),
        (eye, language('Qwen3-0.6B')[::-1]),
        (tower('siglip-so400m-patch14-384')[::-1], mouth),
    ]
    for (seen, vit), (said, lm) in pairs:
        command = ['--vit_model_type', vit, '--lm_model_type', lm]
        yield compare(command, seen, said)[:2]


if __name__ == '__main__':

    def line(eye, mouth, cfg, found):
        (a, x), (b, y) = found
        print(
            f'| {eye} | {mouth} | {cfg.vit_img_size} | {cfg.patches_per_side} | {cfg.mp_pixel_shuffle_factor} | {cfg.mp_image_token_length} | {cfg.lm_hidden_dim} x {cfg.lm_n_heads}/{cfg.lm_n_kv_heads} | {a:.1e} of {x:.1f} | {b:.1e} of {y:.1f} |',
            flush=True,
        )

    print(
        '| --vit_model_type | --lm_model_type | tile | patches a side | factor | tokens | width, heads | features | scores |\n|---|---|---|---|---|---|---|---|---|'
    )
    for pair in PAIRS:
        line(*pair, *compare(named(*pair), tower(pair[0])[1], language(pair[1])[1])[:2])
    for cfg, found in real() if REAL else ():
        line(
            cfg.vit_model_type.split('/')[-1],
            cfg.lm_model_type.split('/')[-1],
            cfg,
            found,
        )
