"A guide for classifying with Qwen2.5-VL, its settings file as it is, and models from anywhere."
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from small_smolvlm import small_model
from their_smolvlm import make_smolvlm
from transformers import Qwen2_5_VLConfig

from commands import log_of, run
from nanovlm_nb import VisionLanguageModel
from nanovlm_nb.cli import main
from nanovlm_nb.uses.classify import Settings, VLMClassifier, configs_of, make_classifier, load_classes
from nanovlm_nb.core.usage import UsageError

pytestmark = pytest.mark.usefixtures('one_thread')
SCRIPT = Path(__file__).parent.parent/'slurm'/'classify.sh'
GUIDE = (Path(__file__).parent/'data'/'classify_guide.yaml').read_text()


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "The guide's file, 101 classes of four pictures each, a SmolVLM that transformers made, and a checkpoint of ours that was moved."
    cwd = tmp_path_factory.mktemp('guide')
    (cwd/'guide.yaml').write_text(GUIDE)
    features = datasets.Features(dict(image=datasets.Image(), label=datasets.ClassLabel(names=[f'dish {i}' for i in range(101)])))
    (cwd/'food101').mkdir()
    for split, n in (('train', 4), ('validation', 1)):
        rows = [dict(image=Image.effect_noise((16, 16), 90), label=i) for i in range(101) for _ in range(n)]
        datasets.Dataset.from_list(rows, features=features).to_parquet(cwd/'food101'/f'{split}.parquet')
    make_smolvlm(cwd/'smol')
    small_model(image_convention='nanovlm').save_pretrained(cwd/'made')
    (cwd/'made').rename(cwd/'moved')
    return cwd


def test_the_guides_file_is_understood(place, monkeypatch, tmp_path):
    """Each of its lines has its place, what was translated is said, and a directory gives sizes, weights and tokenizer from anywhere.
    What is not built is refused."""
    monkeypatch.chdir(tmp_path)
    s = Settings.load(place/'guide.yaml')
    assert (s.name, s.num_labels, s.memory_efficient_attention) == ('Qwen/Qwen2.5-VL-7B-Instruct', 101, True)
    assert (s.epochs, s.batch_size, s.warmup_steps, s.log_freq, s.eval_log_freq) == (10, 8, 100, 10, 50)
    assert {'pretrained_name', 'num_epochs', 'training_log_freq'} <= {line.split(' in ')[0] for line in s.translations}
    s = replace(s, datasets=[str(place/'food101')])
    data = load_classes(s.datasets)
    for name, convention in (('smol', 'smolvlm'), ('moved', 'nanovlm')):
        cfg, train_cfg = configs_of(replace(s, name=str(place/name)), data)
        assert (cfg.image_convention, cfg.lm_tokenizer, cfg.lm_hidden_dim, len(cfg.class_names)) == (convention, str(place/name), 48, 101)
        assert (train_cfg.max_training_steps, train_cfg.eval_interval, train_cfg.stats_log_interval) == (130, 50, 10)
        model, begun = make_classifier(cfg, train_cfg), VisionLanguageModel.from_pretrained(place/name)
        assert all(torch.equal(model.state_dict()[k], w) for k, w in begun.state_dict().items() if k != 'decoder.head.weight')
        assert model.eval().predict([Image.new('RGB', (16, 16))])[1].shape == (1, 101)
    Qwen2_5_VLConfig().save_pretrained('mine')
    with pytest.raises(UsageError, match='mine has no preprocessor_config.json'): configs_of(replace(s, name='mine'), data)


def test_a_file_without_pictures_is_told_what_it_lacks(place, capsys):
    with pytest.raises(SystemExit) as stopped: main(['classify', '--config', str(place/'guide.yaml')])
    assert stopped.value.code == 2 and 'guide.yaml names no pictures: write `datasets: [FOLDER]`' in capsys.readouterr().err


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
    assert 'num_epochs in used.yaml is ' in (one/'train.log').read_text()
    records = log_of(one)
    assert max(r['step'] for r in records) == 130
    assert [r['step'] for r in records if 'eval/food101_accuracy' in r] == [0, 50, 100, 130]
    assert [r['step'] for r in records if 'training/loss' in r][:3] == [10, 20, 30]
    assert (one/'checkpoints'/'checkpoint-130').exists() and (two/'checkpoints'/'checkpoint-4').exists()
    assert VLMClassifier.from_pretrained(one/'step_130').cfg.class_names[100] == 'dish 100'
