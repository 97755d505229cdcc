"Every name, flag and file of the five guides: it is here, or a sentence leads to what does the same."

import json
import os
import re
import subprocess
import sys

import pytest
from test_docs import NBS, ROOT, text_of

import nanovlm_nb
from nanovlm_nb.core.config import FIELDS, TrainConfig, evolve
from nanovlm_nb.core.settings import load_yaml, parse_args
from nanovlm_nb.core.usage import OTHER_WORDS, UsageError

NANOVLM = '''VLMConfig TrainConfig VisionLanguageModel ViT LanguageModel ModalityProjector VQADataset ConstantLengthDataset VQACollator get_dataloaders
    synchronized_dataloader_step get_image_processor get_tokenizer get_image_string init_dist destroy_dist is_dist is_master get_world_size get_rank
    dist_gather dist_mean_scalar wrap_model PG_CPU seed_worker get_lr get_run_name train'''.split()
MINIMIND = 'MiniMindVLM init_model train_epoch init_distributed_mode Logger get_vision_model VLMDataset get_lr'.split()
XTUNER = 'CheckpointHook Runner DeepSpeedStrategy LinearLR CosineAnnealingLR'.split()
FLAGS = '''epochs learning_rate ddp save_interval accumulation_steps grad_clip log_interval use_wandb out_dir save_dir data_path images_path dim num_hidden_layers
    max_seq_len device dtype batch_size use_moe accumulative_counts save_steps save_total_limit work_dir param_scheduler max_keep_ckpts max_epochs load_from resume
    by_epoch runner_type local_rank num_train_epochs per_device_train_batch_size gradient_checkpointing deepspeed_config
    lr_mp lr_vision_backbone lr_language_backbone vlm_checkpoint_path compile log_wandb no_log_wandb resume_from_vlm_checkpoint train_dataset_path
    relevance_min_rating image_correspondence_min_rating visual_dependency_min_rating formatting_min_rating'''.split()
FILES = '''train.py generate.py models/config.py data/processors.py eval.slurm 1-pretrain_vlm.py lm_512.pth pretrain_vlm_512.pth iter_1500.pth last_checkpoint
    mp_rank_00_model_states.pt bf16_zero_pp_rank_0_optim_states.pt scripts/check_glibc_compatibility.py --local_rank=N checkpoint-1000 accumulative_counts save_steps
    save_total_limit work_dir param_scheduler runner_type convert_to_iter_based custom_lr_schedule lmms_eval_tasks push_to_hub'''.split()
REFERENCE = text_of(NBS / 'tutorials' / 'reference.ipynb')


@pytest.mark.parametrize('name', sorted({*NANOVLM, *MINIMIND, *XTUNER}))
def test_a_name_can_be_imported_or_says_where_it_is(name):
    "And it stands on the reference page, but for what is everybody's."
    try:
        exec(f'from nanovlm_nb import {name}', {})
    except ImportError as e:
        told = str(e)
        assert re.match(f'nanovlm_nb has no {name}: ', told)
        ours = re.findall(
            r'\b(\w+)(?=\(|=)|\b([A-Z]\w+[A-Z]\w+|[a-z]+_[a-z_]+)\b',
            told.partition(': ')[2],
        )
        words = {word for pair in ours for word in pair if word and word != name}
        assert any(word in FIELDS or word in nanovlm_nb.__all__ for word in words), told
    assert re.search(rf'\b{name}\b', REFERENCE) or name in (
        'train_epoch',
        'init_distributed_mode',
        'Logger',
    )


def test_what_an_error_sends_to_is_there():
    "Modules, settings and methods that the sentences name."
    told = ' '.join(nanovlm_nb._ELSEWHERE.values())
    for module in set(re.findall(r'nanovlm_nb\.([\w.]+)', told)):
        __import__(f'nanovlm_nb.{module.rstrip(".")}')
    from nanovlm_nb.data.loader import load_tokenizer
    from nanovlm_nb.runs.run import make_model

    assert (
        callable(nanovlm_nb.VisionLanguageModel.from_pth)
        and callable(make_model)
        and callable(load_tokenizer)
    )
    assert all(word in FIELDS for word in re.findall(r'(\w+)="', told))


@pytest.mark.parametrize('name', FLAGS)
def test_a_flag_is_ours_or_the_error_names_ours(name, tmp_path):
    "On the command line, in a YAML file and in Python."
    if name in FIELDS or name.removeprefix('no_') in FIELDS:
        return
    (tmp_path / 'run.yaml').write_text(f'train:\n  {name}: 4\n')
    ours = OTHER_WORDS[name]
    ways = [
        lambda: parse_args([f'--{name}', '4']),
        lambda: load_yaml(tmp_path / 'run.yaml'),
    ]
    if ours in TrainConfig.__dataclass_fields__ or ' ' in ours:
        ways += [
            lambda: evolve(TrainConfig(), **{name: 4}),
            lambda: TrainConfig(**{name: 4}),
        ]
    for way in ways:
        if (
            ours in FIELDS
            and ours not in TrainConfig.__dataclass_fields__
            and way is ways[1]
        ):
            continue  # a field of the model, under `train`
        with pytest.raises(UsageError, match=f'{name}`: .*{re.escape(ours)}'):
            way()


def test_words_lead_to_settings_that_exist():
    named = {
        word
        for told in OTHER_WORDS.values()
        for word in re.findall(r'\b[a-z]+(?:_[a-z]+)+\b', told)
    } - {'nproc_per_node', 'nanovlm_nb'}
    assert named <= FIELDS.keys() and not OTHER_WORDS.keys() & FIELDS.keys()


@pytest.mark.parametrize('name', FILES)
def test_a_file_or_a_word_stands_on_the_reference_page(name):
    assert name in REFERENCE


def test_a_launcher_may_add_the_local_rank(tmp_path):
    "To the script by its path and to the command; typed by hand, the answer is how ranks are started."

    def end(*words, **more):
        env = (
            {k: v for k, v in os.environ.items() if k != 'LOCAL_RANK'}
            | dict(PYTHONPATH=str(ROOT))
            | more
        )
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        ).stderr

    for program in (
        [ROOT / 'nanovlm_nb' / 'train.py', '--local_rank=1'],
        ['-m', 'nanovlm_nb.cli', '--local-rank=1', 'train'],
    ):
        assert (
            end(*program, '--epochs', '3', LOCAL_RANK='1')
            == 'nanovlm train: error: unknown flag `--epochs`: did you mean `--max_epochs`?\n'
        )
    assert 'start with torchrun' in end('-m', 'nanovlm_nb.train', '--local_rank=1')


LOOP = """
import contextlib, json
import torch
import nanovlm_nb
from nanovlm_nb import (ConstantLengthDataset, VisionLanguageModel, VQACollator, VQADataset, destroy_dist, dist_gather, dist_mean_scalar, get_dataloaders,
    get_image_processor, get_rank, get_world_size, init_dist, is_dist, is_master, seed_worker, synchronized_dataloader_step, wrap_model)
from nanovlm_nb.core.config import tiny
from nanovlm_nb.data.shapes import shapes_dataset, shapes_tokenizer
from torch.utils.data import DataLoader

init_dist()
torch.manual_seed(0)
vlm_cfg, train_cfg = tiny(lm_max_length=256, max_sample_length=256)
tokenizer = shapes_tokenizer(vlm_cfg.vlm_extra_tokens, vlm_cfg.lm_chat_template)
processor = get_image_processor(vlm_cfg.max_img_size, vlm_cfg.vit_img_size)
rows = shapes_dataset(50).select(range(30) if is_master() else range(30, 50))
dataset = VQADataset(rows, tokenizer, processor, vlm_cfg.mp_image_token_length)
dataset = ConstantLengthDataset(dataset, infinite=False, max_sample_length=256, seq_length=256, num_of_sequences=2*64, queue_size=2*128,
    max_images_per_example=4, max_images_per_knapsack=18)
loader = DataLoader(dataset, batch_size=2, collate_fn=VQACollator(tokenizer, 256), num_workers=1, drop_last=False, worker_init_fn=seed_worker)
iter_train_loader = iter(loader)
model = wrap_model(VisionLanguageModel(vlm_cfg, load_backbone=False))
optimizer, losses, ids = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
for i, batch in enumerate(synchronized_dataloader_step(iter_train_loader, is_dist())):
    is_update_step = (i + 1) % 2 == 0
    images = batch['images']
    input_ids = batch['input_ids'].to('cpu')
    labels = batch['labels'].to('cpu')
    attention_mask = batch['attention_mask'].to('cpu')
    with model.no_sync() if is_dist() and not is_update_step else contextlib.nullcontext():
        _, loss = model(input_ids, images, attention_mask=attention_mask, targets=labels)
    (loss/2).backward()
    losses.append(dist_mean_scalar(loss.item()))
    ids += [name for row in batch['ids'] for name in row]
    if is_update_step:
        optimizer.step()
        optimizer.zero_grad()
weights = float(sum(p.double().sum() for p in model.parameters()))
own = [name for batch in get_dataloaders(train_cfg, vlm_cfg)[0] for row in batch['ids'] for name in row]
told = dist_gather(dict(batches=i+1, weights=weights, ids=ids, own=own, group=torch.distributed.get_backend(nanovlm_nb.PG_CPU)))
if is_master(): print('TOLD', json.dumps(dict(told=told, losses=losses)))
destroy_dist()
"""


def test_the_guides_loop_runs_on_two_ranks(tmp_path):
    """Its own lines, under torchrun: both ranks stop with the one that has fewer rows, each sample comes once, weights stay equal.
    `get_dataloaders` without a word about ranks gives each its own rows."""
    (tmp_path / 'loop.py').write_text(LOOP)
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc_per_node',
        '2',
        'loop.py',
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ
        | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES=''),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    end = json.loads(re.search('^TOLD (.*)$', done.stdout, re.M)[1])
    one, two = end['told']
    assert (
        one['batches'] == two['batches'] == len(end['losses']) >= 4
        and one['weights'] == two['weights']
    )
    assert (
        len(two['ids']) == 20
        and len({*one['ids'], *two['ids']}) == len(one['ids']) + 20
    )
    assert (
        one['own']
        and two['own']
        and not {*one['own']} & {*two['own']}
        and len({*one['own'], *two['own']}) == 60
    )
    assert one['group'] == two['group'] == 'gloo'
