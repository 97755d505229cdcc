"Models go to transformers and come back: the same logits, ids, tiles and answers, whoever wrote the directory."

import json
import random
import sys

import numpy as np
import pytest
import torch
from commands import TINY
from huggingface_hub.utils import filter_repo_objects
from PIL import ExifTags, Image, ImageOps
from safetensors.torch import load_file
from small_smolvlm import QUESTIONS, pictures, small_model
from their_smolvlm import make_smolvlm, random_smolvlm
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.image_utils import load_image

from nanovlm_nb import Asker, VisionLanguageModel, read_log
from nanovlm_nb.cli import main
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.data.images import get_image_processor
from nanovlm_nb.data.prompts import encode_chat
from nanovlm_nb.model.files import HUB_FILES
from nanovlm_nb.model.formats import OWN_CONFIG
from nanovlm_nb.uses.export import export_smolvlm

pytestmark = pytest.mark.usefixtures('one_thread')
TILES = dict(vit_patch_size=4, vit_img_size=16, max_img_size=48)


def far(a, b):
    "Largest absolute difference."
    return (a - b).abs().max().item()


def opened(folder):
    "The model as transformers opens it, with nothing missing and nothing left over."
    theirs, report = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    return theirs.eval()


def their_prompt(processor, images, question):
    "What `AutoProcessor` makes of pictures and a question, with its own chat template."
    parts = [*[dict(type='image')] * len(images), dict(type='text', text=question)]
    text = processor.apply_chat_template(
        [dict(role='user', content=parts)], add_generation_prompt=True
    )
    return processor(text=text, images=images or None, return_tensors='pt')


@torch.no_grad()
def compare(folder, model, samples, new):
    "Ids, pixels, scores and greedy tokens are the same here and in transformers; how many tiles each sample has."
    theirs = opened(folder)
    processor = AutoProcessor.from_pretrained(folder)
    asker = Asker.from_model(model)
    (mean,) = model.cfg.pixel_mean
    (std,) = model.cfg.pixel_std
    counts = []
    for images, question in samples:
        made = their_prompt(processor, images, question)
        (ids, tiles) = asker.prompt(images, question)
        assert made['input_ids'][0].tolist() == ids
        if images:
            assert (
                far(
                    made['pixel_values'][0],
                    (torch.cat(tiles).float() / 255 - mean) / std,
                )
                <= 1e-6
            )
        assert (
            far(theirs(**made).logits[0], model(torch.tensor([ids]), tiles)[0][0])
            <= 1e-5
        )
        said = model.generate(
            torch.tensor([ids]), tiles, max_new_tokens=new, greedy=True
        )[0].tolist()
        heard = theirs.generate(**made, max_new_tokens=new, do_sample=False)[
            0, len(ids) :
        ].tolist()
        assert said[: len(heard)] == heard and (
            len(heard) == new or heard[-1] == model.tokenizer.eos_token_id
        )
        counts.append(sum(map(len, tiles)))
    return counts


# the golden checkpoint


@pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason='its transformers, 5.20, needs a multiple of the patch size '
    'as image tokens; this checkpoint has 52 of them',
)
@pytest.mark.parametrize('kind', ['smolvlm', 'idefics3'])
def test_golden_logits(golden, tmp_path, kind, capsys):
    "nanoVLM's golden batch through transformers: logits within 1e-5 of ours, and of the reference."
    gold = golden / 'nanovlm'
    main(['export', str(gold / 'checkpoint'), str(tmp_path / 'out'), '--format', kind])
    assert (
        'has no processor' in capsys.readouterr().err
    )  # it speaks nanoVLM's convention
    theirs = opened(tmp_path / 'out')
    ours = VisionLanguageModel.from_pretrained(gold / 'checkpoint')
    assert theirs.config.model_type == kind
    batch = load_file(gold / 'batch.safetensors')
    tiles = load_file(gold / 'samples.safetensors')
    rows = [
        [tiles[n] for n in row]
        for row in json.loads((gold / 'batch.json').read_text())['images_order']
    ]
    stacks = [torch.cat(row) if row else torch.zeros(0, 3, 64, 64) for row in rows]
    pixels = torch.nn.utils.rnn.pad_sequence(stacks, batch_first=True)
    mask = batch['attention_mask']
    real = batch['attention_mask'].bool()
    with torch.no_grad():
        got = theirs(
            input_ids=batch['input_ids'],
            attention_mask=mask,
            pixel_values=pixels,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        ).logits
        want = ours(batch['input_ids'], rows, mask)[0]
    assert far(got[real], want[real]) <= 1e-5
    assert far(got[batch['labels'] != -100], batch['logits_labelled']) <= 1e-5


def test_golden_there_and_back(golden, tmp_path):
    "nanoVLM to SmolVLM to nanoVLM: the same bits, the same configuration, the same tokenizer."
    first = golden / 'nanovlm' / 'checkpoint'
    main(['export', str(first), str(tmp_path / 'smol')])
    main(
        [
            'export',
            str(tmp_path / 'smol'),
            str(tmp_path / 'back'),
            '--format',
            'nanovlm',
        ]
    )
    a, b = (load_file(d / 'model.safetensors') for d in (first, tmp_path / 'back'))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    old, new = (
        json.loads((d / 'config.json').read_text()) for d in (first, tmp_path / 'back')
    )
    assert {k for k in old.keys() | new.keys() if old.get(k) != new.get(k)} <= {
        'lm_tokenizer'
    }
    assert (
        VisionLanguageModel.from_pretrained(tmp_path / 'back').tokenizer.image_token_id
        == 1000
    )


# models that transformers made


@pytest.mark.parametrize(('kind', 'tied'), [('smolvlm', True), ('idefics3', False)])
def test_their_model_here(tmp_path, kind, tied):
    "In several files and bfloat16, as the hub has them, it gives their logits here in float32, and with other weights ours there."
    theirs = random_smolvlm(kind, tied, tokens=150, image=140, side=32).bfloat16()
    theirs.save_pretrained(tmp_path / 'first', max_shard_size='40KB')
    assert not (tmp_path / 'first' / 'model.safetensors').exists()
    ours = VisionLanguageModel.from_pretrained(tmp_path / 'first')
    theirs = theirs.float()
    assert (
        ours.cfg.lm_tie_weights,
        ours.cfg.lm_vocab_size,
        ours.cfg.image_token_id,
        ours.cfg.lm_re_base,
    ) == (tied, 150, 140, 7000)
    pixels = torch.rand(1, 2, 3, 32, 32)
    ids = torch.randint(3, 139, (1, 30))
    ids[0, 3:11] = 140
    with torch.no_grad():
        assert (
            far(
                ours(ids, pixels[0])[0],
                theirs(input_ids=ids, pixel_values=pixels).logits,
            )
            <= 1e-5
        )
    for w in ours.parameters():
        w.data.add_(0.02 * torch.randn_like(w))
    ours.tokenizer = train_tokenizer(QUESTIONS, 300)
    export_smolvlm(ours, tmp_path / 'second', kind)
    with torch.no_grad():
        assert (
            far(
                ours(ids, pixels[0])[0],
                opened(tmp_path / 'second')(input_ids=ids, pixel_values=pixels).logits,
            )
            <= 1e-5
        )


def test_their_default_template_trains_and_goes_back(tmp_path):
    "SmolVLM's default template asks with `Assistant:` and answers with a space: 20 updates here, then it answers there as here."
    folder = make_smolvlm(tmp_path / 'smol')
    small = TINY[TINY.index('--data_cutoff_idx') :]
    names = [p.name for p in folder.iterdir()]
    assert [
        *filter_repo_objects(names, allow_patterns=HUB_FILES)
    ] == names  # the template is a file of its own
    run = [
        '--run_name',
        'r',
        '--load_from',
        folder,
        '--vlm_checkpoint_path',
        tmp_path,
        '--train_dataset_path',
        'shapes',
    ]
    how = '--max_training_steps 20 --eval_interval 20 --lm_max_length 512 --ask_samples 0 --dtype float32 --lr_language_backbone 1e-2 --hf_repo_name None'
    main([str(a) for a in ('train', *small, *run, *how.split())])
    losses = [
        r['batch_loss']
        for r in read_log(tmp_path / 'r' / 'log.jsonl')
        if 'batch_loss' in r
    ]
    assert len(losses) == 20 and sum(losses[-4:]) < 0.8 * sum(losses[:4])
    main(['export', str(tmp_path / 'r' / 'step_20'), str(tmp_path / 'out')])
    mine = VisionLanguageModel.from_pretrained(tmp_path / 'r' / 'step_20')
    first = AutoProcessor.from_pretrained(folder)
    samples = [(pictures(n, n), QUESTIONS[0]) for n in range(3)]
    compare(tmp_path / 'out', mine, samples, 12)
    for sample in samples:
        assert (
            their_prompt(first, *sample)['input_ids'][0].tolist()
            == Asker.from_model(mine).prompt(*sample)[0]
        )
    chat = [
        dict(role=role, content=[dict(type='text', text=text)])
        for role, text in (('user', 'What?'), ('assistant', 'Two.'))
    ]
    assert mine.tokenizer.decode(
        encode_chat(mine.tokenizer, [dict(user='What?', assistant='Two.')])[0]
    ) == first.apply_chat_template(chat)


# ours there, and back


def test_the_same_prompts_and_answers(tmp_path):
    "20 pairs of 0 to 3 pictures and a question, with many numbers of tiles; tiles and grids of 300 sizes, strips and squares among them."
    export_smolvlm(model := small_model(**TILES), tmp_path / 'out')
    counts = compare(
        tmp_path / 'out',
        model,
        [(pictures(i % 4, i), QUESTIONS[i // 4 % 4]) for i in range(20)],
        32,
    )
    assert len(set(counts)) >= 10
    processor = AutoProcessor.from_pretrained(tmp_path / 'out').image_processor
    mine = get_image_processor(48, 16, True, convention='smolvlm')
    rng = random.Random(0)
    sizes = [
        (1, 1),
        (1, 300),
        (300, 1),
        (48, 48),
        (48, 47),
        (49, 48),
        (17, 16),
        (32, 31),
    ] + [(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(292)]
    for k, size in enumerate(sizes):
        im = Image.fromarray(
            np.random.default_rng(k).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        )
        made = processor([[im]], return_tensors='pt', return_row_col_info=True)
        (tiles, grid) = mine(im)
        assert (made['rows'][0][0] or 1, made['cols'][0][0] or 1) == grid, size
        assert far(made['pixel_values'][0], tiles.float() / 255) <= 1e-6, size


def test_what_is_transparent_is_white_where_the_card_says_so(tmp_path, monkeypatch):
    "Of a picture with hidden colours that was held sideways: transformers sees our pixels by the lines of the card and of a PIL image; of a path it sees what is hidden."
    export_smolvlm(small_model(**TILES), tmp_path / 'out')
    monkeypatch.chdir(tmp_path)
    hidden = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (40, 70, 4), dtype=np.uint8)
    )
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    hidden.save('picture.png', exif=exif)
    processor = AutoProcessor.from_pretrained('out').image_processor
    tiles, _ = get_image_processor(48, 16, True, convention='smolvlm')('picture.png')

    def off(picture):
        return far(
            processor([[picture]], return_tensors='pt')['pixel_values'][0],
            tiles.float() / 255,
        )

    lines = (
        (tmp_path / 'out' / 'README.md')
        .read_text()
        .split('```')[1]
        .removeprefix('python')
    )
    exec(lines, said := {})
    assert off(said['picture']) <= 1e-6
    assert off(ImageOps.exif_transpose(Image.open('picture.png'))) <= 1e-6
    assert off(load_image('picture.png')) > 0.3


@pytest.mark.parametrize(
    'fields',
    [
        {},
        dict(lm_qkv_bias=True, pixel_mean=0.5, pixel_std=0.5),
        dict(lm_qk_norm=True, lm_head_dim=20, pixel_mean=0.48, pixel_std=0.27),
        dict(lm_tie_weights=False, vit_activation='quick_gelu'),
    ],
)
def test_other_networks_and_pixels_go_out_and_come_back(tmp_path, fields):
    "Also without the configuration of ours, as transformers saves them anew."
    model = small_model(**TILES, **fields)
    for w in model.parameters():
        w.data.add_(0.02 * torch.randn_like(w))
    export_smolvlm(model, tmp_path / 'out')
    compare(tmp_path / 'out', model, [(pictures(2, 5), QUESTIONS[0])], 8)
    for part in (
        opened(tmp_path / 'out'),
        AutoProcessor.from_pretrained(tmp_path / 'out'),
    ):
        part.save_pretrained(tmp_path / 'anew')
    assert not (tmp_path / 'anew' / OWN_CONFIG).exists()
    again = VisionLanguageModel.from_pretrained(tmp_path / 'anew')
    assert all(
        torch.equal(w, again.state_dict()[k]) for k, w in model.state_dict().items()
    )
    for name in (
        'lm_base_vocab_size',
        'image_convention',
        'max_img_size',
        'pixel_mean',
        'pixel_std',
        'mp_image_token_length',
        'vlm_extra_tokens',
    ):
        assert getattr(again.cfg, name) == getattr(model.cfg, name), name
    asked = [(pictures(2, 3), 'What?')]
    assert Asker.from_model(again)(asked) == Asker.from_model(model)(asked)


@pytest.mark.parametrize('how', ['smolvlm', 'onnx'])
def test_a_network_that_smolvlm_has_not_is_refused(tmp_path, how, capsys):
    "And nothing is written; a projector of two layers used to lose one in silence."
    small_model(mp_kind='mlp').save_pretrained(tmp_path / 'ours')
    with pytest.raises(SystemExit):
        main(['export', str(tmp_path / 'ours'), str(tmp_path / 'out'), '--format', how])
    assert (
        'mp_kind is mlp, but SmolVLM has' in capsys.readouterr().err
        and not (tmp_path / 'out').exists()
    )
