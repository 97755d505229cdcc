"A guide for classifying with Qwen2.5-VL: its two files as they are, the ways in which it starts a run, and models from anywhere."

import gzip
import random
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from small_smolvlm import small_model
from their_smolvlm import make_smolvlm
from tiny_qwen import flatten, write
from transformers import Qwen2_5_VLConfig

import nanovlm_nb
from commands import log_of, nanovlm, record, run, start_of, wait_for
from nanovlm_nb import VisionLanguageModel
from nanovlm_nb.cli import main
from nanovlm_nb.core.run_dir import find_checkpoint
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.uses.classify import (
    Settings,
    VLMClassifier,
    configs_of,
    load_classes,
    make_classifier,
)
from wandb_reader import read_wandb

pytestmark = pytest.mark.usefixtures('one_thread')
SCRIPT = Path(__file__).parent.parent / 'slurm' / 'classify.sh'
DATA = Path(__file__).parent / 'data'
GUIDE = (DATA / 'classify_guide.yaml').read_text()
DEEPSPEED = (DATA / 'classify_guide_ds.json').read_text()
MODEL = 'Qwen/Qwen2.5-VL-7B-Instruct'
CLOTHES = Path(
    '/usr/share/datasets/fashion-mnist'
)  # Debian's package dataset-fashion-mnist
CLASSIFY = [sys.executable, '-m', 'nanovlm_nb.cli', 'classify']
TORCHRUN = [
    sys.executable,
    '-m',
    'torch.distributed.run',
    '--standalone',
    '--nproc-per-node',
    '2',
    *CLASSIFY[1:],
]


def labelled(pictures, names):
    "A data set of pictures and numbers of their classes."
    features = datasets.Features(
        dict(image=datasets.Image(), label=datasets.ClassLabel(names=names))
    )
    return datasets.Dataset.from_list(
        [dict(image=image, label=label) for image, label in pictures], features=features
    )


def dishes(folder, counts, seed=0):
    "101 classes of pictures of any proportions; how many of each class there are in each split."
    rng = random.Random(seed)
    names = [f'dish {i}' for i in range(101)]
    folder.mkdir(parents=True)
    for split, n in counts.items():
        sizes = [(rng.randint(40, 150), rng.randint(40, 150)) for _ in range(101 * n)]
        labelled(
            [(Image.effect_noise(size, 90), i % 101) for i, size in enumerate(sizes)],
            names,
        ).to_parquet(folder / f'{split}.parquet')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "The guide's files, 101 classes of four pictures each and some more, models of transformers, and a checkpoint of ours that was moved."
    cwd = tmp_path_factory.mktemp('guide')
    (cwd / 'guide.yaml').write_text(GUIDE)
    (cwd / 'qwen.yaml').write_text(GUIDE.replace(MODEL, 'qwen'))
    for ranks in (1, 2):
        (cwd / f'ds{ranks}.json').write_text(
            DEEPSPEED.replace('256', str(8 * 4 * ranks))
        )
    dishes(cwd / 'food101', dict(train=4, validation=1))
    dishes(cwd / 'leftovers', dict(train=1, validation=2), seed=1)
    make_smolvlm(cwd / 'smol')
    flatten(write(cwd / 'qwen', max_pixels=12_845_056))  # as the hub has it
    small_model(image_convention='nanovlm').save_pretrained(cwd / 'made')
    (cwd / 'made').rename(cwd / 'moved')
    return cwd


def test_the_guides_file_is_understood(place, monkeypatch, tmp_path):
    """Each of its lines has its place, what was translated is said, and a directory gives sizes, weights and tokenizer from anywhere.
    What is not built is refused."""
    monkeypatch.chdir(tmp_path)
    s = Settings.load(place / 'guide.yaml')
    assert (s.name, s.num_labels, s.memory_efficient_attention) == (MODEL, 101, True)
    assert (s.epochs, s.batch_size, s.warmup_steps, s.log_freq, s.eval_log_freq) == (
        10,
        8,
        100,
        10,
        50,
    )
    assert {'pretrained_name', 'num_epochs', 'training_log_freq'} <= {
        line.split(' in ')[0] for line in s.translations
    }
    s = replace(s, datasets=[str(place / 'food101')])
    data = load_classes(s.datasets)
    for name, convention, width in (
        ('smol', 'smolvlm', 48),
        ('moved', 'nanovlm', 48),
        ('qwen', 'qwen', 64),
    ):
        cfg, train_cfg = configs_of(replace(s, name=str(place / name)), data)
        assert (
            cfg.image_convention,
            cfg.lm_tokenizer,
            cfg.lm_hidden_dim,
            len(cfg.class_names),
        ) == (convention, str(place / name), width, 101)
        assert (
            train_cfg.max_training_steps,
            train_cfg.eval_interval,
            train_cfg.stats_log_interval,
        ) == (130, 50, 10)
        model = make_classifier(cfg, train_cfg)
        begun = VisionLanguageModel.from_pretrained(place / name)
        assert all(
            torch.equal(model.state_dict()[k], w)
            for k, w in begun.state_dict().items()
            if k != 'decoder.head.weight'
        )
        assert model.eval().predict([Image.new('RGB', (16, 16))])[1].shape == (1, 101)
    Qwen2_5_VLConfig().save_pretrained('mine')
    with pytest.raises(UsageError, match='mine has no preprocessor_config.json'):
        configs_of(replace(s, name='mine'), data)


# --- the longest row


def test_a_row_is_as_long_as_the_largest_picture_needs(place, tmp_path):
    "A table, a part of a table and folders, whose largest picture stands on its side and has lost all but its header: no pixel is read."
    for split, sizes in (
        ('train', [(112, 84), (300, 50), (64, 64)]),
        ('test', [(28, 28)]),
    ):
        for name in ('cat', 'dog'):
            folder = tmp_path / 'pets' / split / name
            folder.mkdir(parents=True)
            for i, size in enumerate(sizes):
                Image.effect_noise(size, 90).save(folder / f'{i}.jpg')
    exif = Image.Exif()
    exif[0x112] = 6  # a quarter turn
    tall = tmp_path / 'pets' / 'train' / 'cat' / 'tall.jpg'
    Image.effect_noise((840, 28), 90).save(tall, exif=exif)
    whole = tall.read_bytes()
    tall.write_bytes(whole[: whole.index(b'\xff\xda')])
    (tmp_path / 'pets' / 'train' / 'cat' / 'none.jpg').write_bytes(b'<html>')
    files = load_classes([str(tmp_path / 'pets')])
    names = files.names
    table = datasets.Dataset.from_list(
        [
            dict(image=r['images'][0], label=names[r['label']])
            for r in map(files.train.__getitem__, range(len(files.train)))
        ]
    )
    table.cast_column('image', datasets.Image()).shuffle(seed=0).save_to_disk(
        tmp_path / 'table'
    )
    s = Settings.load(place / 'guide.yaml')
    s = replace(s, name=str(place / 'qwen'), num_labels=None)
    lengths = {
        kind: configs_of(s, load_classes([str(tmp_path / kind)]))[0].lm_max_length
        for kind in ('pets', 'table')
    }
    text = (
        configs_of(s, load_classes([str(place / 'food101')]))[0].lm_max_length - 5 * 5
    )  # 150 x 150 pixels
    assert lengths == dict(pets=text + 30, table=text + 30)
    for split in ('train', 'test'):
        for file in (tmp_path / 'pets' / split).glob('*/*.jpg'):
            file.write_bytes(b'<html>')
    with pytest.raises(
        UsageError, match='no picture can be read; the last one: .*a web page'
    ):
        configs_of(s, load_classes([str(tmp_path / 'pets')]))


# --- what does not go with a Qwen2.5-VL


@pytest.fixture
def refusal(capsys):
    "The line with which a command ends."

    def ended(*words):
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, words)])
        printed = capsys.readouterr()
        *_, line = printed.err.splitlines()
        assert (
            stopped.value.code == 2
            and not printed.out
            and line.startswith(f'nanovlm {words[0]}: error: ')
        ), printed
        return line

    return ended


def test_a_file_without_pictures_is_told_what_it_lacks(place, refusal):
    assert 'guide.yaml names no pictures: write `datasets: [FOLDER]`' in refusal(
        'classify', '--config', place / 'guide.yaml'
    )


def test_what_cannot_work_is_said_in_a_sentence(
    place, refusal, capsys, caplog, monkeypatch, tmp_path
):
    "Export to what has no such model, kept features, videos; other commands lead a classifier to its own."
    monkeypatch.chdir(tmp_path)
    for kind in ('smolvlm', 'idefics3', 'gguf', 'onnx', 'web'):
        assert (
            'such a model is a Qwen2.5-VL: take --format qwen2_5_vl, or nanovlm'
            in refusal('export', place / 'qwen', 'out', '--format', kind)
        )
    s = replace(
        Settings.load(place / 'qwen.yaml'),
        name=str(place / 'qwen'),
        datasets=[str(place / 'food101')],
        num_labels=None,
    )
    cfg, train_cfg = configs_of(s, load_classes(s.datasets))
    make_classifier(cfg, train_cfg).save_pretrained('made')
    for words in (
        ['export', 'made', 'out'],
        ['ask', 'made', '--prompt', 'hi'],
        ['eval', 'made', '--tasks', 'shapes'],
    ):
        assert (
            'made is a classifier: use it with nanovlm classify --predict made PICTURE'
            in refusal(*words)
        )
    with pytest.raises(UsageError, match='made is a classifier: use it with'):
        nanovlm_nb.load('made')
    Path('kept.yaml').write_text(
        GUIDE.replace(MODEL, str(place / 'qwen')).replace(
            'training:', 'training:\n  lr_backbones: 0\n  cache_features: true'
        )
    )
    assert 'a tile sees the whole picture: set cache_features to False' in refusal(
        'classify', '--config', 'kept.yaml', '--datasets', place / 'food101'
    )
    Path('films', 'cat').mkdir(parents=True)
    films = [Path('films', 'cat', name) for name in ('a.mp4', 'b.mp4')]
    for film in films:
        film.write_bytes(b'\0\0\0\x18ftypmp42' + bytes(99))
    Path('films.yaml').write_text(
        GUIDE.replace(MODEL, str(place / 'qwen')).replace('num_labels: 101', '')
    )
    some = ['classify', '--config', 'films.yaml', '--datasets']
    assert 'videos are not read here, save pictures of them' in refusal(*some, 'films')
    Image.new('RGB', (9, 9)).save('a.png')
    predict = ['classify', '--predict', 'made', 'a.png']
    assert main([*predict, str(films[0]), 'a.png']) == 1  # the others are sorted
    assert 'it is a video: save pictures of it' in caplog.text
    told = capsys.readouterr().out.splitlines()
    assert [line.split('\t')[0] for line in told] == ['a.png'] * 2
    assert 'there is no picture b.png, did you mean a.png?' in refusal(
        *predict, 'b.png'
    )
    assert 'leave out --run_name, --tracker, which training reads' in refusal(
        *predict, '--run_name', 'a', '--tracker', 'none'
    )
    assert 'of its kind only Qwen2.5-VL is built here' in refusal(
        *some, 'digits', '--model', 'Qwen/Qwen3-VL-8B-Instruct'
    )
    assert not Path('out').exists() and not Path('outputs').exists()


# --- runs


def as_deepspeed_starts(words, cwd, ranks):
    "What `deepspeed --num_gpus N --module nanovlm_nb.cli WORDS` starts: a process for each rank, which it tells by the environment and by a flag."
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    started = []
    for rank in map(str, range(ranks)):
        args, env = start_of([*CLASSIFY[:3], f'--local_rank={rank}', *words])
        env |= dict(
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=str(ranks),
            MASTER_ADDR='127.0.0.1',
            MASTER_PORT=str(port),
        )
        started.append(
            subprocess.Popen(
                args,
                cwd=cwd,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    ends = [(p.communicate(timeout=240)[0], p.returncode) for p in started]
    assert not any(code for _, code in ends), ends


def in_updates(history, key):
    "The updates in which wandb got a figure."
    return [line['_step'] for line in history if key in line]


def test_two_ranks_as_deepspeed_starts_them(place):
    "Four updates on two data sets. The figures of the guide come when they are due, files lie where it has them, and the result sorts pictures."
    shorter = 'training:\n  max_training_steps: 4\n  warmup_steps: 2\n  peak_tflops: 1'
    (place / 'short.yaml').write_text(
        GUIDE.replace(MODEL, 'qwen')
        .replace('training:', shorter)
        .replace('log_freq: 10', 'log_freq: 2')
        .replace('log_freq: 50', 'log_freq: 4')
    )
    as_deepspeed_starts(
        [
            'classify',
            '--config',
            'short.yaml',
            '--deepspeed_config',
            'ds2.json',
            '--datasets',
            'food101',
            'leftovers',
            '--run_name',
            'short',
        ],
        place,
        2,
    )
    out = place / 'outputs' / 'short'
    history = read_wandb(out).history
    for key in 'training/loss training/lr training/grad_norm training/epoch perf/mfu perf/step_time perf/samples_per_second perf/gpu_memory_gb'.split():
        assert in_updates(history, key) == [2, 4], key
    for key in 'eval/overall_loss eval/overall_accuracy eval/food101_accuracy eval/leftovers_accuracy'.split():
        assert in_updates(history, key) == [0, 4], key
    for key in ('best_overall_accuracy', 'best_model_step'):
        assert in_updates(history, key) == [4], key
    for line in history:
        if 'eval/overall_accuracy' in line:
            shares = (
                line['eval/food101_accuracy'] * 101
                + line['eval/leftovers_accuracy'] * 202
            ) / 303
            assert line['eval/overall_accuracy'] == pytest.approx(shares)
        if 'perf/mfu' in line:
            assert 0 < line['perf/mfu'] < 1
    said = (out / 'logs' / 'train.log').read_text()
    for words in (
        'ddp -> zero2',
        'dtype auto -> bfloat16',
        'pretrained_name in short.yaml is name here',
        '101 classes; food101 404 train',
        'for training (asked for 16)',
    ):
        assert words in said, words
    assert {p.name for p in (out / 'checkpoints').iterdir()} == {
        'checkpoint-0',
        'checkpoint-4',
    } and log_of(out / 'logs') == log_of(out)
    assert (out / 'given.yaml').read_bytes() == (place / 'short.yaml').read_bytes()
    model = VLMClassifier.from_pretrained(out / 'checkpoints' / 'checkpoint-4')
    pictures = [
        Image.effect_noise((600, 900), 90),
        Image.effect_noise((30, 50), 90),
    ]  # the first is larger than all in training
    for i, picture in enumerate(pictures):
        picture.save(place / f'{i}.png')
    lines = nanovlm(
        ['classify', '--predict', out, '0.png', '1.png'], place
    ).stdout.splitlines()
    assert [line.split('\t')[1] for line in lines] == model.predict(pictures)[0]


@pytest.mark.slow
@pytest.mark.parametrize('name', ('smol', 'qwen'))
def test_the_guides_files_run_on_one_process(place, name):
    "All 130 updates, from the launch script."
    run(
        [
            SCRIPT,
            'guide.yaml',
            '--deepspeed_config',
            'ds1.json',
            '--model',
            name,
            '--datasets',
            'food101',
            '--run_name',
            name,
        ],
        place,
        timeout=900,
        RANKS='1',
    )
    out = place / 'outputs' / name
    records = log_of(out)
    assert max(r['step'] for r in records) == 130
    assert [r['step'] for r in records if 'eval/food101_accuracy' in r] == [
        0,
        50,
        100,
        130,
    ]
    assert [r['step'] for r in records if 'training/loss' in r] == [*range(10, 131, 10)]
    assert (
        out / 'checkpoints' / 'checkpoint-130'
    ).exists() and VLMClassifier.from_pretrained(out / 'step_130').cfg.class_names[
        100
    ] == 'dish 100'


@pytest.mark.slow
def test_the_guides_files_on_two_ranks_stopped_by_a_signal_and_resumed(place):
    "The same 130 updates, figures and bytes as without the signal."
    dishes(place / 'more' / 'food101', dict(train=8, validation=2))
    words = [
        '--config',
        'qwen.yaml',
        '--deepspeed_config',
        'ds2.json',
        '--datasets',
        'more/food101',
        '--run_name',
    ]
    run([*TORCHRUN, *words, 'whole'], place, timeout=900)
    whole, broken = (place / 'outputs' / name for name in ('whole', 'broken'))
    args, env = start_of([*TORCHRUN, *words, 'broken'])
    process = subprocess.Popen(
        args, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert wait_for(process, (broken / 'checkpoints' / 'checkpoint-50').exists)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    last = max(broken.glob('step_*'), key=lambda p: int(p.name[5:])).name[5:]
    assert (
        50 <= int(last) < 130
        and f'stopped by a signal after update {last}'
        in (broken / 'logs' / 'train.log').read_text()
    )
    run(
        [
            *TORCHRUN,
            *words,
            'broken',
            '--resume_from',
            f'outputs/broken/checkpoints/checkpoint-{last}',
        ],
        place,
        timeout=900,
    )
    assert record(broken) == record(whole)
    weights = [
        (out / 'step_130' / 'model.safetensors').read_bytes() for out in (whole, broken)
    ]
    assert weights[0] == weights[1]
    history = read_wandb(whole).history
    for key in 'training/loss training/lr training/grad_norm training/epoch perf/step_time perf/samples_per_second perf/gpu_memory_gb'.split():
        assert in_updates(history, key) == [*range(10, 131, 10)], key
    for key in 'eval/overall_loss eval/overall_accuracy eval/food101_accuracy'.split():
        assert in_updates(history, key) == [0, 50, 100, 130], key
    assert (
        in_updates(history, 'best_overall_accuracy')
        == in_updates(history, 'best_model_step')
        == [50, 100, 130]
    )


# --- what it learns


def clothes(kind, rows):
    "Some of Debian's pictures of clothes, with their classes: (N, 28, 28) and (N,)."
    pixels, classes = (
        gzip.open(CLOTHES / f'{kind}-{name}-ubyte.gz').read()
        for name in ('images-idx3', 'labels-idx1')
    )
    return np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28)[
        rows
    ], np.frombuffer(classes, np.uint8, offset=8)[rows]


TRAINED = 30_000  # pictures; each is shown twice
LEARN = """
model:
  pretrained_name: small-qwen
  num_labels: 10
training:
  datasets: [clothes]
  num_epochs: 2
  learning_rate: 3e-3
  batch_size: 32
  gradient_accumulation_steps: 1
  warmup_steps: 50
  dataloader_num_workers: 1
  dtype: float32
  betas: [0.9, 0.99]
  min_lr_ratio: 0.02
  run_name: clothes
monitor:
  use_wandb: false
  all_freq:
    training_log_freq: 25
    eval_log_freq: 375
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not CLOTHES.is_dir(), reason='apt-get install dataset-fashion-mnist'
)
def test_it_learns_ten_kinds_of_clothes(tmp_path):
    """A Qwen2.5-VL of transformers' making, of random weights, is right about 85 of 100 real pictures that have chosen nothing: the best checkpoint
    is that of 1,000 others. `-s` shows both shares."""
    names = (
        'T-shirt,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot'.split(
            ','
        )
    )
    parts = dict(
        train=clothes('train', slice(TRAINED)),
        validation=clothes('train', slice(-1000, None)),
    )
    splits = {
        split: labelled(
            [(Image.fromarray(x), int(y)) for x, y in zip(*part, strict=True)], names
        )
        for split, part in parts.items()
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / 'clothes')
    flatten(write(tmp_path / 'small-qwen', max_pixels=12_845_056))
    (tmp_path / 'learn.yaml').write_text(LEARN)
    run([*CLASSIFY, '--config', 'learn.yaml'], tmp_path, timeout=3000)
    x, y = clothes('t10k', slice(1000))
    said = VLMClassifier.from_pretrained(
        find_checkpoint(tmp_path / 'outputs' / 'clothes')
    ).predict([*map(Image.fromarray, x)])[0]
    share = np.mean([name == names[i] for name, i in zip(said, y, strict=True)])
    pixels, classes = parts['train']
    plain = LogisticRegression(max_iter=1000, tol=1e-3).fit(
        pixels.reshape(-1, 784) / np.float32(255), classes
    )
    print(
        f'Qwen2.5-VL {share:.1%}, logistic regression {plain.score(x.reshape(-1, 784) / np.float32(255), y):.1%}'
    )
    assert share >= 0.85
