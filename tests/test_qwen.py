"Qwen2.5-VL is the same model here and in transformers: pixels, ids, scores, gradients, answers, files. `-s` shows the largest differences."

import json
import random
from dataclasses import fields, replace
from pathlib import Path

import datasets
import pytest
import torch
from commands import record, train
from PIL import Image
from safetensors.torch import load_file
from tiny_qwen import Theirs, flatten, limit, write
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.image_utils import load_image
from transformers.utils import logging

from nanovlm_nb.answers.answer import Asker, Chat
from nanovlm_nb.answers.heatmap import answer_heat
from nanovlm_nb.core.config import TrainConfig, check_configs, evolve
from nanovlm_nb.core.dist import launch
from nanovlm_nb.core.layout import Layout
from nanovlm_nb.core.run_dir import find_checkpoint, read_log
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data.drops import Dropped
from nanovlm_nb.data.samples import to_row
from nanovlm_nb.data.shapes import draw_scene, make_scene
from nanovlm_nb.data.images import image_size
from nanovlm_nb.data.loader import get_dataloaders
from nanovlm_nb.model.native import NativeTower
from nanovlm_nb.model.vision import to_pixels
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.files import read_tensors
from nanovlm_nb.model.backbones import their_tensors
from nanovlm_nb.model.formats import qwen_names
from nanovlm_nb.model.pretrained import base_digest, checkpoint_config, is_adapter
from nanovlm_nb.runs.run import run
from nanovlm_nb.training.lora import add_adapters, lower_base, merge_adapters
from nanovlm_nb.training.optim import make_optimizer
from nanovlm_nb.training.precision import compile_blocks
from nanovlm_nb.training.update import tally
from nanovlm_nb.training.trainer import Hook
from nanovlm_nb.uses.export import export_qwen

pytestmark = pytest.mark.usefixtures('one_thread')
KINDS = ('plain', 'tied', 'flat', 'parts')
SIZES = [
    (64, 64),
    (300, 120),
    (90, 200),
    (28, 28),
    (500, 400),
    (112, 112),
    (231, 57),
]  # one window, several, parts of windows; shrunk, enlarged


def drawing(width, height, seed=0):
    "A picture with structure, of any size."
    rng = random.Random(seed)
    return (
        draw_scene(make_scene('one', rng), rng, 96)
        .resize((width, height))
        .convert('RGB')
    )


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    "Checkpoints: plain; with a tied head; `config.json` as the hub's; several files of weights with an index."
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    place = tmp_path_factory.mktemp('qwen')
    made = dict(
        plain=write(place / 'plain'),
        tied=write(place / 'tied', tied=True, seed=1),
        flat=flatten(write(place / 'flat')),
        parts=write(place / 'parts', max_shard_size='300KB'),
    )
    assert len([*made['parts'].glob('*.safetensors')]) > 2
    return made


@pytest.fixture(scope='module')
def pairs(folders):
    "Each checkpoint as it is opened here, and by transformers."
    return {
        kind: (
            Asker.from_model(VisionLanguageModel.from_pretrained(folder)),
            Theirs(folder),
        )
        for kind, folder in folders.items()
    }


@pytest.fixture(scope='module')
def rows():
    "Questions about one picture, about three, and about none."
    pictures = [drawing(*size, seed=i) for i, size in enumerate(SIZES)]
    return [
        *(([p], 'What is this?') for p in pictures),
        (pictures[:3], 'Which colour is it?'),
        ([], 'yes or no?'),
    ]


def largest(a, b):
    "Largest difference, as a share of the largest number."
    return float((a - b).abs().max() / a.abs().max())


def show(what, figure):
    print(
        f'\n{what:<58}{figure:>10.1e}'
        if isinstance(figure, float)
        else f'\n{what:<58}{figure!s:>10}'
    )


# --- what goes in


def odd_files(folder):
    "Twenty pictures: of many sizes, grey, with a palette, transparent, turned by a flag."
    sizes = [
        *SIZES,
        (3000, 2000),
        (2000, 50),
        (41, 40),
        (1000, 1000),
        (97, 513),
        (14, 13),
        (70, 98),
    ]
    made = [drawing(*size, seed=i) for i, size in enumerate(sizes)]
    alpha = drawing(150, 90)
    alpha.putalpha(Image.linear_gradient('L').resize(alpha.size))
    made += [
        drawing(120, 80).convert('L'),
        drawing(80, 120).convert('P'),
        alpha,
        drawing(200, 100).convert('LA'),
        drawing(70, 70).convert('1'),
    ]
    files = [folder / f'{i}.png' for i in range(len(made))]
    for im, file in zip(made, files):
        im.save(file)
    turned = folder / 'turned.jpg'
    exif = Image.Exif()
    exif[0x0112] = 6
    drawing(160, 90).save(turned, exif=exif, quality=100)
    return [*files, turned]


def theirs_of(file):
    "A picture as transformers loads it; what is transparent on white, as Qwen's own tools lay it."
    im = Image.open(file)
    if not im.has_transparency_data:
        return load_image(str(file))
    white = Image.new('RGBA', im.size, 'white')
    return Image.alpha_composite(white, im.convert('RGBA')).convert('RGB')


def patches_of(tiles):
    "Tiles (N, 3, 28, 28) as transformers lays patches, each twice: (4N, 3, 2, 14, 14)."
    patches = (
        tiles.unflatten(3, (2, 14))
        .unflatten(2, (2, 14))
        .permute(0, 2, 4, 1, 3, 5)
        .flatten(0, 2)
    )
    return torch.stack([patches, patches], 2)


def test_pixels_and_grids_of_twenty_pictures(pairs, tmp_path):
    asker, theirs = pairs['plain']
    files = odd_files(tmp_path)
    assert len(files) == 20
    worst = 0.0
    for most in (64, 1280):
        ours = replace(asker.image_processor, max_pixels=784 * most)
        limit(theirs.processor, 784 * most)
        for file in files:
            made = theirs.pixels(theirs_of(file))
            tiles, grid = ours(file)
            assert grid == ours.grid(*image_size(file)) == tiles.shape[:2]
            assert made['image_grid_thw'].tolist() == [[1, 2 * grid[0], 2 * grid[1]]], (
                file
            )
            pixels = to_pixels(
                tiles.flatten(0, 1),
                asker.model.cfg.pixel_mean,
                asker.model.cfg.pixel_std,
            )
            worst = max(
                worst, largest(made['pixel_values'], patches_of(pixels).flatten(1))
            )
    limit(theirs.processor, 784 * 64)
    show('pixels of 20 pictures, of 28 x 28 to 3000 x 2000', worst)
    assert worst < 1e-6


def test_ids_are_those_of_the_chat_template(pairs, rows):
    for asker, theirs in pairs.values():
        for pictures, question in rows:
            assert asker.prompt(pictures, question)[0] == theirs.ids(pictures, question)
    turns = [dict(user='What is this?', assistant='a ring'), dict(user='Where is it?')]
    said = [
        dict(
            role='user',
            content=[dict(type='image'), dict(type='text', text='What is this?')],
        ),
        dict(role='assistant', content='a ring'),
        dict(role='user', content='Where is it?'),
    ]
    text = theirs.tokenizer.apply_chat_template(
        said, tokenize=False, add_generation_prompt=True
    ).replace('<|image_pad|>', '<|image_pad|>' * 16)
    assert (
        asker.prompt([drawing(112, 112)], turns)[0]
        == theirs.tokenizer(text)['input_ids']
    )
    assert (
        '<|image_pad|>'
        not in asker.tokenizer.tokenize(
            asker.tokenizer.decode(asker.prompt([], 'an <|image_pad|> here')[0])
        )[1:3]
    )
    assert '<tool_call>' in asker.tokenizer.decode(
        asker.tokenizer('<tool_call>')['input_ids'], skip_special_tokens=True
    )  # it is not special for Qwen


def test_every_form_of_a_checkpoint_is_the_same_model(pairs, folders):
    "Nested or flat numbers, one file or several; names inside transformers, or those of the hub."
    plain = pairs['plain'][0].model
    for kind in ('flat', 'parts'):
        model = pairs[kind][0].model
        assert all(
            torch.equal(w, plain.state_dict()[k]) for k, w in model.state_dict().items()
        )
        assert all(
            getattr(model.cfg, f.name) == getattr(plain.cfg, f.name)
            for f in fields(plain.cfg)
            if f.name not in ('lm_tokenizer', 'lm_model_type', 'vit_model_type')
        )  # names of the folder
    cfg = plain.cfg
    assert (
        cfg.max_pixels,
        cfg.min_pixels,
        cfg.vit_full_blocks,
        cfg.lm_mrope_sections,
        cfg.vit_window_size,
    ) == (784 * 64, 784 * 4, [3], [2, 3, 3], 112)
    assert (
        pairs['tied'][0].model.decoder.head.weight
        is pairs['tied'][0].model.decoder.token_embedding.weight
    )
    assert checkpoint_config(folders['tied']).lm_tie_weights and not cfg.lm_tie_weights


# --- what comes out


@torch.no_grad()
@pytest.mark.parametrize('kind', KINDS)
def test_scores_alone_padded_and_packed(pairs, rows, kind):
    asker, theirs = pairs[kind]
    prompts = [asker.prompt(*row) for row in rows]
    alone = [theirs.model(**theirs.inputs([row])).logits for row in rows]
    worst = max(
        largest(a, asker.model(torch.tensor([ids]), tiles)[0])
        for a, (ids, tiles) in zip(alone, prompts)
    )
    show(f'scores, one sample a row ({kind})', worst)
    assert worst < 2e-5
    inputs = theirs.inputs(rows)
    padded = asker.model(
        inputs['input_ids'], [tiles for _, tiles in prompts], inputs['attention_mask']
    )[0]
    mask = inputs['attention_mask'].bool()
    worst = largest(theirs.model(**inputs).logits[mask], padded[mask])
    show(f'scores, nine samples in a padded batch ({kind})', worst)
    assert worst < 2e-5
    ids, lens = (
        torch.cat([torch.tensor(ids) for ids, _ in prompts])[None],
        [len(ids) for ids, _ in prompts],
    )
    packed = asker.model(ids, [tiles for _, tiles in prompts], doc_lens=[lens])[0][
        0
    ].split(lens)
    worst = max(largest(a[0], b) for a, b in zip(alone, packed))
    show(f'scores, the nine packed into one row ({kind})', worst)
    assert worst < 2e-5


@torch.no_grad()
def test_another_sample_changes_no_bit(pairs, rows):
    asker, _ = pairs['plain']
    prompts = [asker.prompt(*row) for row in rows]
    ids, lens = (
        torch.cat([torch.tensor(ids) for ids, _ in prompts])[None],
        [len(ids) for ids, _ in prompts],
    )
    pictures = [tiles for _, tiles in prompts]
    before = asker.model(ids, pictures, doc_lens=[lens])[0][0]
    for changed in (0, 3, 7):  # one picture, another, three of them
        start = sum(lens[:changed])
        end = sum(lens[: changed + 1])
        other = [
            [255 - picture for picture in sample] if i == changed else sample
            for i, sample in enumerate(pictures)
        ]
        after = asker.model(ids, other, doc_lens=[lens])[0][0]
        assert torch.equal(after[:start], before[:start]) and torch.equal(
            after[end:], before[end:]
        )
        assert not torch.equal(after[start:end], before[start:end])


def test_gradients_of_every_tensor(pairs, rows):
    "A packed row's are the sum of those of its samples, each alone in transformers."
    asker, theirs = pairs['plain']
    model = asker.model.train()
    answers = [
        'a small red circle',
        'yes',
        'no',
        'ring',
        'blue bar',
        'one two three',
        'green',
        'red',
        'yes',
    ]
    model.zero_grad()
    theirs.model.zero_grad()
    ids = []
    labels = []
    lens = []
    total = 0.0
    for (pictures, question), answer in zip(rows, answers):
        row = torch.tensor(theirs.ids(pictures, question, answer))
        start = len(theirs.ids(pictures, question))
        wanted = row.clone()
        wanted[:start] = -100
        scores = theirs.model(**theirs.inputs([(pictures, question, answer)])).logits[
            0, :-1
        ]
        loss = torch.nn.functional.cross_entropy(scores, wanted[1:], reduction='sum')
        loss.backward()
        total += loss.item()
        ids.append(row)
        labels.append(torch.cat([wanted[1:], torch.tensor([-100])]))
        lens.append(len(row))
    pictures = [[asker.image_processor(im)[0] for im in images] for images, _ in rows]
    _, loss = model(
        torch.cat(ids)[None],
        pictures,
        targets=torch.cat(labels)[None],
        doc_lens=[lens],
        reduction='sum',
    )
    loss.backward()
    model.eval()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    ours = their_tensors(
        {k: p.grad for k, p in model.named_parameters()},
        lambda name: qwen_names(name, model.cfg),
    )
    named = {
        k.replace('model.visual.', 'visual.').replace(
            'model.language_model.', 'model.'
        ): p.grad
        for k, p in theirs.model.named_parameters()
    }
    assert ours.keys() == named.keys()
    worst = max(
        float((named[k] - ours[k]).abs().max() / max(named[k].abs().max(), 1e-3))
        for k in named
    )
    show(f'gradients of all {len(named)} tensors, packed and alone', worst)
    assert worst < 1e-4


@pytest.mark.parametrize('kind', ('plain', 'tied'))
def test_greedy_answers_of_a_padded_batch(pairs, rows, kind):
    asker, theirs = pairs[kind]
    questions = [rows[4], rows[7], rows[8]]  # one picture, three, none
    texts = asker(questions, max_new_tokens=12)
    for row, text in zip(questions, texts):
        made = theirs.model.generate(
            **theirs.inputs([row]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=asker.tokenizer.eos_token_id,
        )
        assert (
            theirs.tokenizer.decode(
                made[0, len(theirs.ids(*row)) :], skip_special_tokens=True
            ).strip()
            == text
        )


def test_a_conversation_reads_its_picture_once(pairs, rows):
    asker, _ = pairs['plain']
    chat = Chat(asker, rows[2][0])
    turns = []
    for question in ('What is this?', 'Where is it?'):
        said = ''.join(chat.stream(question, 6)).strip()
        assert (
            said
            == asker([(rows[2][0], [*turns, dict(user=question)])], max_new_tokens=6)[0]
        )
        turns.append(dict(user=question, assistant=said))


def test_a_heat_map_has_a_square_for_each_token(pairs, rows):
    asker, _ = pairs['plain']
    heats = answer_heat(asker, rows[7][0], 'Which colour is it?', 'red')
    assert [tuple(h.tiles.shape) for h in heats] == [
        asker.image_processor.grid(*im.size) for im in rows[7][0]
    ] and all(h.whole is None for h in heats)


# --- files


@pytest.mark.parametrize('kind', ('plain', 'tied'))
def test_export_is_bit_for_bit(pairs, folders, rows, tmp_path, kind):
    asker, theirs = pairs[kind]
    export_qwen(asker.model, tmp_path / 'out')
    before = read_tensors(folders[kind])
    after = read_tensors(tmp_path / 'out')
    assert before.keys() == after.keys() and all(
        torch.equal(before[k], after[k]) for k in before
    )
    opened, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / 'out', output_loading_info=True
    )
    assert not any(report.values()) and type(opened) is type(theirs.model)
    again = Theirs(tmp_path / 'out')
    known = AutoConfig.from_pretrained(folders[kind])
    assert (
        again.ids(*rows[7]) == theirs.ids(*rows[7])
        and again.processor.size == theirs.processor.size
    )
    for part in ('text_config', 'vision_config'):
        old, new = (getattr(c, part).to_dict() for c in (known, again.model.config))
        free = {
            'dtype',
            'initializer_range',
            'head_dim',
            'rope_scaling',
            'rope_theta',
            'transformers_version',
            'eos_token_id',
            'bos_token_id',
            'pad_token_id',
            'tokens_per_second',
            'layer_types',
            'model_type',
        }
        assert {k: old[k] for k in old if k not in free} == {
            k: new.get(k) for k in old if k not in free
        }
    with torch.no_grad():
        assert torch.equal(
            again.model(**theirs.inputs(rows[:1])).logits,
            theirs.model(**theirs.inputs(rows[:1])).logits,
        )
    back = VisionLanguageModel.from_pretrained(tmp_path / 'out')
    assert (
        all(
            torch.equal(w, back.state_dict()[k])
            for k, w in asker.model.state_dict().items()
        )
        and Asker.from_model(back).prompt(*rows[7])[0] == asker.prompt(*rows[7])[0]
    )


def test_own_format_keeps_everything(folders, rows, tmp_path):
    "Also after a step, which transformers opens."
    model = VisionLanguageModel.from_pretrained(folders['plain'])
    ids, tiles = Asker.from_model(model).prompt(*rows[1])
    model.train()(torch.tensor([ids]), tiles, targets=torch.tensor([ids]))[1].backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    model.eval().save_pretrained(tmp_path / 'ours')
    back = VisionLanguageModel.from_pretrained(tmp_path / 'ours')
    assert type(back.vision_encoder) is NativeTower and all(
        torch.equal(w, back.state_dict()[k]) for k, w in model.state_dict().items()
    )
    export_qwen(back, tmp_path / 'theirs')
    theirs = Theirs(tmp_path / 'theirs')
    with torch.no_grad():
        worst = largest(
            theirs.model(**theirs.inputs([rows[1]])).logits,
            back(torch.tensor([ids]), tiles)[0],
        )
    show('scores after a step, exported', worst)
    assert worst < 2e-5


# --- training


def settings(folder, place=Path('none'), **changes):
    "A model and a run of a few updates over drawn scenes, in float32."
    model = evolve(
        checkpoint_config(folder),
        vlm_checkpoint_path=str(place / 'runs'),
        lm_max_length=256,
        hf_repo_name=None,
    )
    plan = dict(
        train_dataset_path='shapes',
        data_cutoff_idx=400,
        val_size=8,
        stream_dataset=False,
        lr_mp=1e-3,
        lr_backbones=1e-3,
        max_training_steps=6,
        batch_size=1,
        gradient_accumulation_steps=4,
        max_sample_length=192,
        dtype='float32',
        eval_interval=100,
        ask_samples=0,
        use_lmms_eval=False,
        log_wandb=False,
        progress_bar=False,
        console_line='none',
        num_workers=0,
        val_workers=0,
        stats_log_interval=3,
        num_of_sequences=8,
        compile=False,
        peak_tflops=1.0,
        async_save=False,
    )
    return model, TrainConfig(**plan | changes)


@pytest.mark.parametrize(
    'how',
    (dict(batch_size=2), dict(batch_size=1, num_workers=1)),
    ids=('joined', 'made by a worker'),
)
def test_the_loader_says_what_the_model_would(folders, how):
    "Layouts of packs with pictures, made beside the model, and the counts of an update."
    cfg, train = settings(folders['plain'], **how)
    model = VisionLanguageModel.from_pretrained(folders['plain'], cfg)
    loader, _ = get_dataloaders(train, cfg)
    batch = next(iter(loader))
    assert {tuple(p.shape[2:]) for row in batch['images'] for p in row} == {(3, 28, 28)}
    made = batch['layout']
    again = model.layout_of(
        batch['input_ids'], None, batch['labels'], batch['doc_lens'], batch['images']
    )
    assert made == again and made.positions.shape[0] == 3
    assert all(
        torch.equal(getattr(made, name), getattr(again, name))
        for name in ('positions', 'slots', 'at', 'targets', 'cu', 'documents')
    )
    assert all(
        torch.equal(getattr(made.tiles, name), getattr(again.tiles, name))
        for name in ('order', 'places')
    )
    assert (made.tiles.windows, made.tiles.pictures) == (
        again.tiles.windows,
        again.tiles.pictures,
    )
    counts = tally(batch)
    grids = [p.shape[:2] for row in batch['images'] for p in row]
    assert counts['tiles'] == sum(r * c for r, c in grids) == len(
        made.slots
    ) and counts['picture_pairs'] == sum((4 * r * c) ** 2 for r, c in grids)
    with torch.no_grad():
        assert torch.equal(
            model(
                batch['input_ids'],
                batch['images'],
                targets=batch['labels'],
                doc_lens=batch['doc_lens'],
            )[1],
            model(batch['input_ids'], batch['images'], layout=made)[1],
        )


def test_blank_tiles_change_nothing(pairs, rows):
    "What fills a batch up to a multiple of tiles: one result, and few shapes."
    model = pairs['plain'][0].model
    ids, tiles = pairs['plain'][0].prompt(*rows[1])
    with torch.no_grad():
        alone = model(torch.tensor([ids]), tiles)[0]
    model.tile_multiple = 64
    with torch.no_grad():
        filled = model(torch.tensor([ids]), tiles)[0]
    model.tile_multiple = 1
    assert largest(alone, filled) < 1e-5


def test_compiled_blocks_see_any_number_of_tiles(folders):
    "Two graphs, one for each kind of block, serve batches of other pictures."
    torch._dynamo.reset()
    plain, compiled = (
        VisionLanguageModel.from_pretrained(folders['plain']).train() for _ in range(2)
    )
    compiled.tile_multiple = 8
    counter = CompileCounter()
    assert compile_blocks(compiled, backend=counter) == 6
    graphs = []
    for grids in (
        [(4, 5)],
        [(6, 6), (2, 3)],
        [(2, 2)] * 4,
        [(8, 9)],
        [(5, 4), (4, 5)],
        [(1, 1)],
    ):
        ids = torch.full((1, 160), 5)
        at = 3
        for r, c in grids:
            ids[0, at : at + r * c] = plain.cfg.image_token_id
            at += r * c + 4
        labels = torch.full((1, 160), -100)
        labels[0, at : at + 5] = 7
        images = [
            torch.randint(0, 255, (r, c, 3, 28, 28), dtype=torch.uint8)
            for r, c in grids
        ]
        losses = [
            m(ids, images, targets=labels, doc_lens=[[at + 8]])[1]
            for m in (plain, compiled)
        ]
        losses[1].backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-4)
        graphs.append(counter.frame_count)
    assert graphs == [2] * 6, graphs


def test_what_cannot_be_done_is_said_at_once(folders, rows, pairs):
    model, train = settings(folders['plain'], lr_backbones=0.0, cache_features=True)
    with pytest.raises(
        UsageError, match='a tile sees the whole picture: set cache_features to False'
    ):
        check_configs(model, train)
    with pytest.raises(UsageError, match='is no directory|files'):
        checkpoint_config('no/such/model')
    with pytest.raises(UsageError, match='set it to 28, and max_pixels'):
        evolve(
            model,
            max_img_size=56,
            vlm_extra_tokens={
                **model.vlm_extra_tokens,
                'r1c1': 'a',
                'r1c2': 'b',
                'r2c1': 'c',
                'r2c2': 'd',
            },
        )
    ids, (tiles,) = pairs['plain'][0].prompt(*rows[0])
    with pytest.raises(UsageError, match='a picture of this model is a grid of tiles'):
        pairs['plain'][0].model(torch.tensor([ids]), tiles.flatten(0, 1))
    with pytest.raises(ValueError, match='the layout has no grids'):
        pairs['plain'][0].model(
            torch.tensor([ids]),
            [tiles],
            layout=Layout.of(torch.tensor([ids]), model.image_token_id),
        )
    asked = [
        dict(
            role='user',
            content=[
                dict(type='video', video='a.mp4'),
                dict(type='text', text='What happens?'),
            ],
        ),
        dict(role='assistant', content='nothing'),
    ]
    for row, said in (
        (
            dict(messages=asked),
            "a part of a message is 'video': only text and image can be read",
        ),
        (
            dict(video='a.mp4', question='What?', answer='no'),
            'column `video` may hold pictures',
        ),
    ):
        dropped = to_row(row, 0)
        assert isinstance(dropped, Dropped) and said in dropped.detail


# --- whole runs


class StopAt(Hook):
    "Ends a run as a signal does."

    def __init__(self, step):
        self.step = step

    def after_update(self, trainer, figures):
        if trainer.step == self.step:
            trainer.asked.set()


def go(folder, place, name, stop=None, dist=None, **changes):
    "A run, begun or gone on with."
    model, train = settings(folder, place, run_name=name, **changes)
    train = train if train.resume else evolve(train, load_from=str(folder))
    return run(model, train, dist=dist, hooks=[StopAt(stop)] if stop else [])


def end(place, name):
    "Weights, the samples of each update, and the log."
    weights = load_file(
        Path(find_checkpoint(place / 'runs' / name)) / 'model.safetensors'
    )
    log = read_log(place / 'runs' / name / 'log.jsonl')
    return weights, [r['batch_digest'] for r in log if 'batch_loss' in r], log


def compare(place, name, bits=False):
    "A run against the one that nothing has disturbed."
    (a, samples, _), (b, others, _) = end(place, 'straight'), end(place, name)
    assert samples == others and a.keys() == b.keys()
    away = max(float((a[k] - b[k]).abs().max()) for k in a)
    show(f'six updates of 1e-3: {name}', away)
    assert away == 0 if bits else away < 3e-4


@pytest.mark.slow
def test_runs_are_the_same_however_they_are_made(folders, tmp_path):
    folder = folders['plain']
    place = tmp_path
    go(folder, place, 'straight')
    weights, _, log = end(place, 'straight')
    losses = [r['batch_loss'] for r in log if 'batch_loss' in r]
    figures = [r['perf/mfu'] for r in log if 'perf/mfu' in r]
    assert (
        losses[-1] < losses[0] and len(figures) == 2 and all(0 < f < 1 for f in figures)
    )
    go(folder, place, 'split', batch_size=2, gradient_accumulation_steps=2)
    compare(place, 'split')
    go(folder, place, 'workers', num_workers=2)
    compare(place, 'workers', bits=True)
    go(folder, place, 'broken', stop=3)
    go(folder, place, 'broken', resume=True)
    compare(place, 'broken', bits=True)
    go(
        folder,
        place,
        'recomputed',
        vision_checkpointing=True,
        language_checkpointing=True,
    )
    compare(place, 'recomputed', bits=True)
    export_qwen(
        VisionLanguageModel.from_pretrained(
            find_checkpoint(place / 'runs' / 'straight')
        ),
        place / 'out',
    )
    theirs = read_tensors(place / 'out')
    named = their_tensors(
        {k: w for k, w in weights.items() if 'inv_freq' not in k},
        lambda name: qwen_names(name, checkpoint_config(folder)),
    )
    assert theirs.keys() == named.keys() and all(
        torch.equal(theirs[k], named[k]) for k in named
    )


KILLS = """
import os, signal
from pathlib import Path
def rate(step, max_lr, max_steps):
    "A rate that never changes; the first start is killed before update 5, when the fourth is in the log."
    log = Path('checkpoints/run/log.jsonl')
    if step == 4 and log.exists() and log.read_text().count('batch_loss') == 4 and not Path('killed').exists():
        Path('killed').touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return max_lr
"""


@pytest.mark.slow
def test_killed_in_the_middle_of_a_stream(folders, tmp_path):
    "Pictures of many shapes from parquet files, two loader workers, kill -9, the same command with `--resume True`: the same bytes."
    rows = [
        dict(
            images=[drawing(*size, seed=i)],
            texts=[dict(user='What is this?', assistant=f'number {i}')],
        )
        for i, size in enumerate(SIZES * 12)
    ]
    place = tmp_path / 'data'
    place.mkdir()
    for k in range(3):
        datasets.Dataset.from_list(rows[k::3]).cast_column(
            'images', datasets.Sequence(datasets.Image())
        ).to_parquet(place / f'{k}.parquet')
    flags = f"""--load_from {folders['plain']} --train_dataset_path {place} --stream_dataset True --run_name run --val_size 4 --batch_size 1 --gradient_accumulation_steps 2
        --lm_max_length 512 --max_sample_length 400 --num_of_sequences 4 --num_workers 2 --val_workers 0 --max_training_steps 8 --save_interval 2 --eval_interval 100
        --lr_backbones 1e-3 --dtype float32 --ask_samples 0 --log_wandb False --progress_bar False --lr_schedule kills:rate""".split()
    found = {}
    for name in ('straight', 'killed'):
        cwd = tmp_path / name
        cwd.mkdir()
        (cwd / 'kills.py').write_text(KILLS)
        if name == 'straight':
            (cwd / 'killed').touch()
        first = train(flags, cwd, check=False, PYTHONPATH=str(cwd))
        assert first.returncode == (-9 if name == 'killed' else 0), first.stderr[-2000:]
        if name == 'killed':
            train([*flags, '--resume', 'True'], cwd, PYTHONPATH=str(cwd))
        run_dir = cwd / 'checkpoints' / 'run'
        found[name] = (
            record(run_dir),
            (run_dir / 'step_8' / 'model.safetensors').read_bytes(),
        )
    assert found['straight'] == found['killed']


@pytest.mark.slow
def test_two_ranks_make_the_same_run(folders, tmp_path):
    folder = folders['plain']
    place = tmp_path
    go(folder, place, 'straight')
    for kind in ('ddp', 'zero2', 'zero3'):
        launch(
            lambda dist: go(
                folder,
                place,
                kind,
                dist=dist,
                gradient_accumulation_steps=2,
                sharding=kind,
            ),
            2,
            240.0,
        )
        compare(place, kind)
    launch(
        lambda dist: go(
            folder,
            place,
            'cut',
            stop=3,
            dist=dist,
            gradient_accumulation_steps=2,
            sharding='zero2',
        ),
        2,
        240.0,
    )
    go(folder, place, 'cut', resume=True)
    compare(place, 'cut')


def adapted(folder, ids, pictures, lens, lower=True, recompute=False):
    "Adapters of both towers after three updates in bfloat16: losses, adapters, the model."
    model = VisionLanguageModel.from_pretrained(folder)
    torch.manual_seed(0)
    add_adapters(
        model,
        4,
        targets=['decoder', 'vision_encoder'],
        base=dict(path=str(folder), sha256=base_digest(folder)),
    )
    if lower:
        lower_base(model, torch.bfloat16)
    optimizer = make_optimizer(model, TrainConfig(lora_rank=4, lr_lora=1e-2))
    model.vision_encoder.recompute = model.decoder.recompute = recompute
    losses = []
    for _ in range(3):
        with torch.autocast('cpu', torch.bfloat16):
            loss = model(ids, pictures, targets=ids, doc_lens=[lens])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (
        losses,
        {k: p.clone() for k, p in model.named_parameters() if is_adapter(k)},
        model,
    )


@pytest.mark.parametrize('kind', ('plain', 'tied'))
def test_a_base_in_bfloat16_changes_no_bit(pairs, folders, rows, kind, tmp_path):
    "Nor do blocks that are computed again. Merged, adapters stand on the numbers of the file."
    pytest.importorskip('peft')
    prompts = [pairs[kind][0].prompt(*row) for row in rows]
    batch = (
        torch.cat([torch.tensor(ids) for ids, _ in prompts])[None],
        [tiles for _, tiles in prompts],
        [len(ids) for ids, _ in prompts],
    )
    losses, adapters, model = adapted(folders[kind], *batch)
    assert losses[-1] < losses[0]
    size = sum(
        p.nbytes for k, p in model.named_parameters() if not is_adapter(k)
    ) / sum(p.nbytes for p in pairs[kind][0].model.parameters())
    show(f'bytes of a base in bfloat16, as a share of float32 ({kind})', f'{size:.2f}')
    for other in (dict(lower=False), dict(recompute=True)):
        again, same, _ = adapted(folders[kind], *batch, **other)
        assert again == losses and all(
            torch.equal(w, adapters[k]) for k, w in same.items()
        )
    model.save_pretrained(tmp_path / 'kept')
    plain = VisionLanguageModel.from_pretrained(tmp_path / 'kept').state_dict()
    merged = merge_adapters(model).state_dict()
    assert plain.keys() == merged.keys() and all(
        torch.equal(w, merged[k]) for k, w in plain.items()
    )


@pytest.mark.slow
def test_adapters_learn(folders, tmp_path):
    "Tower and language model get them; what they stand on stays, and both together are a Qwen2.5-VL again."
    go(
        folders['plain'],
        tmp_path,
        'lora',
        lora_rank=4,
        lora_targets=['decoder', 'vision_encoder'],
        lr_lora=1e-2,
    )
    losses = [
        r['batch_loss']
        for r in read_log(tmp_path / 'runs' / 'lora' / 'log.jsonl')
        if 'batch_loss' in r
    ]
    assert losses[-1] < losses[0] - 0.5
    made = Path(find_checkpoint(tmp_path / 'runs' / 'lora'))
    assert json.loads((made / 'lora.json').read_text())['rank'] == 4
    export_qwen(VisionLanguageModel.from_pretrained(made), tmp_path / 'out')
    before = read_tensors(folders['plain'])
    after = read_tensors(tmp_path / 'out')
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert (
        before.keys() == after.keys()
        and {'visual.blocks.0.attn.qkv.weight', 'model.layers.1.mlp.up_proj.weight'}
        <= changed
    )
    assert not {k for k in changed if 'norm' in k or 'embed' in k}


@pytest.mark.slow
def test_adapters_in_bfloat16_go_on_bit_for_bit(folders, tmp_path):
    "Resumed, computed again, and on two ranks that share the base or have all of it."
    how = dict(
        lora_rank=4,
        lora_targets=['decoder', 'vision_encoder'],
        lr_lora=1e-2,
        dtype='bfloat16',
    )

    def made(name):
        log = read_log(tmp_path / 'runs' / name / 'log.jsonl')
        return load_file(
            Path(find_checkpoint(tmp_path / 'runs' / name)) / 'lora.safetensors'
        ), [r['batch_loss'] for r in log if 'batch_loss' in r]

    go(folders['plain'], tmp_path, 'straight', **how)
    weights, losses = made('straight')
    go(folders['plain'], tmp_path, 'broken', stop=3, **how)
    go(folders['plain'], tmp_path, 'broken', resume=True, **how)
    go(
        folders['plain'],
        tmp_path,
        'recomputed',
        vision_checkpointing=True,
        language_checkpointing=True,
        **how,
    )
    for name in ('broken', 'recomputed'):
        assert made(name)[1] == losses and all(
            torch.equal(w, weights[k]) for k, w in made(name)[0].items()
        )
    for kind in ('ddp', 'zero2', 'zero3'):
        launch(
            lambda dist: go(
                folders['plain'],
                tmp_path,
                kind,
                dist=dist,
                gradient_accumulation_steps=2,
                sharding=kind,
                **how,
            ),
            2,
            240.0,
        )
        assert made(kind)[1] == pytest.approx(losses, rel=2e-3)
