"A guide for classifying with Qwen2.5-VL, its settings file as it is, and models from anywhere."
import json
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from their_smolvlm import make_smolvlm
from transformers import Qwen2_5_VLConfig

from commands import log_of, run
from nanovlm_nb.uses.classify import Settings, VLMClassifier, configs_of, make_classifier, load_classes, sorted_in
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import VLMConfig, evolve
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.model.vlm import VisionLanguageModel

pytestmark = pytest.mark.usefixtures('one_thread')
SCRIPT = Path(__file__).parent.parent/'slurm'/'classify.sh'
GUIDE = '''
model:
  pretrained_name: "Qwen/Qwen2.5-VL-7B-Instruct"
  num_labels: 101

training:
  num_epochs: 10
  learning_rate: 1e-5
  batch_size: 8
  gradient_accumulation_steps: 4

  gradient_checkpointing: false
  memory_efficient_attention: true
  dataloader_num_workers: 16

monitor:
  all_freq:
    training_log_freq: 10
    eval_log_freq: 50
    perf_log_freq: 10
'''


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "The guide's file, 101 classes of four pictures each, and a SmolVLM that transformers made."
    cwd = tmp_path_factory.mktemp('guide')
    (cwd/'guide.yaml').write_text(GUIDE)
    features = datasets.Features(dict(image=datasets.Image(), label=datasets.ClassLabel(names=[f'dish {i}' for i in range(101)])))
    for split, n in (('train', 4), ('validation', 1)):
        rows = [dict(image=Image.fromarray(np.random.default_rng(i*9+k).integers(0, 256, (16, 16, 3), dtype=np.uint8)), label=i) for i in range(101) for k in range(n)]
        (cwd/'food101').mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows, features=features).to_parquet(cwd/'food101'/f'{split}.parquet')
    make_smolvlm(cwd/'smol')
    return cwd


def test_the_guides_file_is_understood(place, monkeypatch, tmp_path):
    "Each of its lines has its place, what was translated is said, and a SmolVLM directory gives sizes and tokenizer from anywhere."
    monkeypatch.chdir(tmp_path)
    s = Settings.load(place/'guide.yaml')
    assert (s.name, s.num_labels, s.memory_efficient_attention) == ('Qwen/Qwen2.5-VL-7B-Instruct', 101, True)
    assert (s.epochs, s.batch_size, s.warmup_steps, s.log_freq, s.eval_log_freq) == (10, 8, 100, 10, 50)
    assert [line.split(' in ')[0] for line in s.translations] == ['model.pretrained_name', 'training.num_epochs', 'training.memory_efficient_attention',
                                                          *(f'monitor.all_freq.{n}_log_freq' for n in ('training', 'eval', 'perf'))]
    s = replace(s, name=str(place/'smol'), datasets=[str(place/'food101')])
    cfg, train_cfg = configs_of(s, load_classes(s.datasets))
    assert (cfg.image_convention, cfg.lm_tokenizer, cfg.lm_hidden_dim, len(cfg.class_names)) == ('smolvlm', str(place/'smol'), 48, 101)
    assert (train_cfg.max_training_steps, train_cfg.eval_interval, train_cfg.stats_log_interval) == (130, 50, 10)
    model, begun = make_classifier(cfg, train_cfg), VisionLanguageModel.from_pretrained(place/'smol')
    assert all(torch.equal(model.state_dict()[k], w) for k, w in begun.state_dict().items() if k != 'decoder.head.weight')
    labels, probs = model.eval().predict([Image.new('RGB', (16, 16))])
    assert probs.shape == (1, 101)


def test_a_checkpoint_is_classified_from_anywhere(place, monkeypatch, tmp_path):
    "A checkpoint of ours that was moved brings its tokenizer, wherever the command is given."
    cfg = VLMConfig(vit_hidden_dim=32, vit_n_heads=2, vit_n_blocks=1, vit_patch_size=8, vit_img_size=32, max_img_size=32, mp_pixel_shuffle_factor=2, lm_hidden_dim=32, lm_inter_dim=64,
                    lm_n_heads=2, lm_n_kv_heads=1, lm_n_blocks=1, lm_max_length=256)
    tok = train_tokenizer(['What is this?']*9, 300, cfg.vlm_extra_tokens, cfg.lm_chat_template)
    model = VisionLanguageModel(evolve(cfg, lm_base_vocab_size=len(tok)-len(cfg.vlm_extra_tokens), lm_tokenizer='a-tokenizer'), load_backbone=False)
    model.tokenizer = tok
    (tmp_path/'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path/'elsewhere')
    model.save_pretrained('made')
    shutil.move('made', tmp_path/'moved')
    s = Settings(**sorted_in(dict(model=dict(name=str(tmp_path/'moved')), training=dict(datasets=[str(place/'food101')], epochs=10))))
    found, train_cfg = configs_of(s, load_classes(s.datasets))
    assert found.lm_tokenizer == str(tmp_path/'moved')
    assert len(make_classifier(found, train_cfg).eval().predict([Image.new('RGB', (16, 16))])[0]) == 1


def test_what_is_not_built_is_refused_in_one_sentence(place, tmp_path, capsys):
    "Qwen2.5-VL by name, before anything is fetched, and as a directory that transformers wrote."
    Qwen2_5_VLConfig().save_pretrained(tmp_path/'mine')
    pictures = ['--datasets', str(place/'food101')]
    for argv, said in [(['--config', str(place/'guide.yaml'), *pictures], "model.name is 'Qwen/Qwen2.5-VL-7B-Instruct', a Qwen-VL"),
                       (['--config', str(place/'guide.yaml'), '--model', str(tmp_path/'mine'), *pictures], "is a model of type 'qwen2_5_vl'"),
                       (['--config', str(place/'guide.yaml')], 'num_labels is 101, but digits have 10 classes'),
                       (['--datasets', 'nowhere'], 'nowhere')]:
        with pytest.raises(SystemExit) as ended: main(['classify', *argv])
        err = capsys.readouterr().err
        assert ended.value.code == 2 and said in err and err.count('\n') <= 2, err


@pytest.mark.slow
def test_the_guides_file_runs(place):
    "All 130 updates, from the launch script with the guide's DeepSpeed file, on one process and for some updates on two."
    stage = dict(stage=2, allgather_partitions=True, overlap_comm=True, reduce_scatter=True, contiguous_gradients=True)
    for ranks, more in ((1, []), (2, ['--run_name', 'two'])):
        (place/'ds.json').write_text(json.dumps(dict(train_batch_size=32*ranks, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=4, zero_optimization=stage,
                                                     bf16=dict(enabled=True), fp16=dict(enabled=False))))
        (place/'used.yaml').write_text(GUIDE if ranks == 1 else GUIDE.replace('training:', 'training:\n  warmup_steps: 2\n  max_training_steps: 4'))
        run([SCRIPT, 'used.yaml', '--deepspeed_config', 'ds.json', '--model', 'smol', '--datasets', 'food101', *more], place, timeout=900, RANKS=str(ranks))
    one, two = sorted((place/'outputs').iterdir(), key=lambda p: p.name == 'two')
    assert (two/'given.yaml').read_bytes() == (place/'used.yaml').read_bytes()
    text = (one/'train.log').read_text()
    assert 'training.num_epochs in used.yaml is training.epochs here' in text and 'attention' in text
    records = log_of(one)
    assert max(r['step'] for r in records) == 130
    assert [r['step'] for r in records if 'eval/food101_accuracy' in r] == [0, 50, 100, 130]
    assert [r['step'] for r in records if 'training/loss' in r][:3] == [10, 20, 30]
    assert (one/'checkpoints'/'checkpoint-130').exists() and (two/'checkpoints'/'checkpoint-4').exists()
    assert VLMClassifier.from_pretrained(one/'step_130').cfg.class_names[100] == 'dish 100'
