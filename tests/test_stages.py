"Stages: runs in which parts are frozen, recomputed, kept, or made of experts; MiniMind-V's first one."
import json

import pytest
import torch
from commands import TINY, nanovlm, train
from safetensors.torch import load_file
from transformers import SiglipVisionConfig, SiglipVisionModel

from nanovlm_nb.core.config import evolve, parse_args, preset
from nanovlm_nb.model.language import LanguageModel
from nanovlm_nb.training.optim import compile_blocks
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.model.weights import MINIMIND, their_names, to_minimind

SMALL = [*TINY, '--ask_samples', 0, '--dtype', 'float32', '--eval_interval', 3]
DROPOUT = ['--vit_dropout', .3, '--lm_dropout', .3]


def updates(cwd, name):
    "Loss and norm of each update."
    return [(r['batch_loss'], r['grad_norm']) for r in map(json.loads, (cwd/'checkpoints'/name/'log.jsonl').read_text().splitlines()) if 'batch_loss' in r]


def line(cwd, name, word):
    "The last line of a run's log that holds a word."
    return next(text for text in reversed((cwd/'checkpoints'/name/'train.log').read_text().splitlines()) if word in text).split(' INFO ')[-1]


def changed(cwd, name, last=6):
    "Names of the tensors that training has changed."
    before, after = (load_file(cwd/'checkpoints'/name/f'step_{n}'/'model.safetensors') for n in (0, last))
    assert before.keys() == after.keys()
    return {k for k in before if not torch.equal(before[k], after[k])}


def close(a, b, rel): assert [x for u in a for x in u] == pytest.approx([x for u in b for x in u], rel=rel)


# --- freezing

def test_projector_alone_on_two_ranks(tmp_path):
    for name, ranks, more in (('dropout', 1, DROPOUT), ('alone', 1, []), ('shared', 2, ['--batch_size', 1])):
        train([*SMALL, *more, '--run_name', name, '--lr_backbones', 0], tmp_path, ranks=ranks)
        assert changed(tmp_path, name) == {'MP.proj.weight'}
        assert line(tmp_path, name, 'trainable') == 'trainable: 0.004 M of 0.051 M (MP 0.004)'
    assert updates(tmp_path, 'dropout') == updates(tmp_path, 'alone'), 'dropout of frozen towers is off, after validations too'
    close(updates(tmp_path, 'shared'), updates(tmp_path, 'alone'), 1e-5)


def test_last_blocks_alone(tmp_path):
    train([*SMALL, '--run_name', 'last', '--lm_n_blocks', 3, '--lr_mp', 0, '--lr_vision_backbone', 0, '--language_last_blocks', 2], tmp_path)
    names = changed(tmp_path, 'last')
    assert {'.'.join(k.split('.')[:3]) for k in names} == {'decoder.blocks.1', 'decoder.blocks.2'}
    assert len(names) == 2*9, 'four matrices of attention, three of the MLP, two norms'
    failed = train([*SMALL, '--run_name', 'x', '--language_last_blocks', 4], tmp_path, check=False)
    assert failed.returncode and 'has 1 blocks: give fewer' in failed.stderr


def test_other_parts_are_another_optimizer(tmp_path):
    first = [*SMALL, '--run_name', 'r', '--lr_vision_backbone', 0]
    train([*first, '--max_training_steps', 3], tmp_path)
    thawed = [*SMALL, '--run_name', 'r', '--resume', 'True', '--lr_vision_backbone', 1e-4]
    refused = train(thawed, tmp_path, check=False)
    assert refused.returncode and "cannot resume: parts that train: {'MP': 'all', 'decoder': 'all'} ->" in refused.stderr
    train([*first, '--resume', 'True', '--lr_mp', 1e-4], tmp_path)
    assert len(updates(tmp_path, 'r')) == 6, 'another rate is no obstacle'
    train([*thawed, '--force_resume', 'True', '--max_training_steps', 8], tmp_path)
    assert len(updates(tmp_path, 'r')) == 8 and line(tmp_path, 'r', 'begins anew')
    assert any(k.startswith('vision_encoder') for k in changed(tmp_path, 'r', 8))


# --- recomputing

@pytest.fixture
def quick_inductor(monkeypatch, tmp_path):
    "Inductor with plain loops in place of vector instructions: g++ is done with them in a quarter of the time. Nothing is found in, or left to, another run."
    import torch._inductor.config as config
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path/'inductor'))
    torch._dynamo.reset()
    with config.patch({'compile_threads': 1, 'cpp.vec_isa_ok': False}): yield  # no pool of processes, each of which would import torch


def two_rows(vlm):
    "Tokens and pictures."
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, (2, 40), generator=rng)
    ids[:, 3:19] = vlm.image_token_id
    return ids, [[torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8, generator=rng)] for _ in range(2)]


def loss_and_gradients(vlm, recompute, **compiling):
    "Of one step of a compiled model, and what that model says when it is asked."
    ids, images = two_rows(vlm)
    torch.manual_seed(0)
    model = VisionLanguageModel(vlm, load_backbone=False).train()
    compile_blocks(model, **compiling)
    model.vision_encoder.recompute = model.decoder.recompute = recompute
    torch.manual_seed(1)
    loss = model(ids, images, targets=ids.clamp(max=300), doc_lens=[[40], [19, 21]])[1]
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], lambda: model.eval()(ids, images)[0]


@pytest.mark.usefixtures('one_thread', 'quick_inductor')
@pytest.mark.parametrize('use_moe, dropout, blocks, backend', [  # aot_eager fails on dropout in training, recomputed or not
    (True, 0., 2, 'aot_eager'), *(pytest.param(False, .1, blocks, 'inductor', marks=pytest.mark.slow) for blocks in (1, 2))])
def test_recomputed_blocks_of_a_compiled_model(use_moe, dropout, blocks, backend):
    vlm = evolve(preset('shapes')[0], use_moe=use_moe, vit_dropout=dropout, lm_dropout=dropout, vit_n_blocks=blocks, lm_n_blocks=blocks)
    (once, ask), (again, ask_again) = (loss_and_gradients(vlm, recompute, backend=backend) for recompute in (False, True))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(once, again, strict=True))
    if blocks == 1: return  # what is asked is another graph to compile: the next test
    with torch.no_grad(): assert all(torch.equal(f(), f()) for f in (ask, ask_again))


def test_a_compiled_model_that_is_asked_drops_nothing():
    vlm = evolve(preset('shapes')[0], vit_dropout=.1, lm_dropout=.1)
    rows = two_rows(vlm)
    torch.manual_seed(0)
    model = VisionLanguageModel(vlm, load_backbone=False)
    with torch.no_grad():
        assert not torch.equal(*(model.train()(*rows)[0] for _ in range(2)))
        compile_blocks(model, backend='aot_eager')
        for model.vision_encoder.recompute in (False, True):
            model.decoder.recompute = model.vision_encoder.recompute
            assert torch.equal(*(model.eval()(*rows)[0] for _ in range(2)))


# --- experts

def test_experts_on_one_rank_and_two(tmp_path):
    moe = [*SMALL, '--use_moe', 'True', '--moe_experts', 3, '--lm_n_blocks', 2]
    train([*moe, '--run_name', 'one', '--ask_samples', 2], tmp_path)
    train([*moe, '--run_name', 'two', '--gradient_accumulation_steps', 1], tmp_path, ranks=2)
    train([*moe, '--run_name', 'unweighted', '--moe_aux_weight', 0, '--max_training_steps', 1], tmp_path)
    train([*moe, '--run_name', 'resumed', '--resume', 'True', '--load_from', tmp_path/'checkpoints'/'one'/'step_3'], tmp_path)
    close(updates(tmp_path, 'one'), updates(tmp_path, 'two'), 1e-5)
    assert updates(tmp_path, 'one')[0][0]-updates(tmp_path, 'unweighted')[0][0] == pytest.approx(.1*2, rel=.1), 'two blocks, each almost balanced'
    assert {k.split('.')[4] for k in changed(tmp_path, 'one') if k.startswith('decoder') and '.mlp.' in k} == {'router', 'experts', 'shared'}
    assert updates(tmp_path, 'resumed') == updates(tmp_path, 'one')[3:]
    assert json.loads((tmp_path/'checkpoints'/'one'/'answers.json').read_text())['answers']['all'][1] > 0


# --- a frozen vision tower

@pytest.fixture
def siglip(tmp_path):
    "A backbone with the sizes of the tower below."
    torch.manual_seed(0)
    SiglipVisionModel(SiglipVisionConfig(hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=16)).save_pretrained(tmp_path/'siglip')
    return tmp_path/'siglip'


def test_features_are_kept(tmp_path):
    frozen = [*SMALL, '--lr_vision_backbone', 0, '--data_cutoff_idx', 40]
    train([*frozen, '--run_name', 'live'], tmp_path)
    cached = [*frozen, '--cache_features', 'True']
    train([*cached, '--run_name', 'kept'], tmp_path)
    train([*cached, '--run_name', 'two', '--batch_size', 1], tmp_path, ranks=2)
    close(updates(tmp_path, 'kept'), updates(tmp_path, 'live'), 1e-5)
    close(updates(tmp_path, 'two'), updates(tmp_path, 'live'), 1e-5)
    files = {name: {p.name for p in (tmp_path/'checkpoints'/name/'features').rglob('*') if p.is_file()} for name in ('kept', 'two')}
    assert files['kept'] == files['two'], 'two ranks make and find the same'
    words = line(tmp_path, 'kept', 'tiles seen').split()
    assert int(words[1]) == len(files['kept']) and int(words[4]) > int(words[1]), 'two epochs and two validations'
    train([*cached, '--run_name', 'kept', '--resume', 'True', '--max_training_steps', 8], tmp_path)
    assert line(tmp_path, 'kept', 'tiles seen').startswith('features: 0 tiles seen')
    trains = train([*SMALL, '--run_name', 'x', '--cache_features', 'True'], tmp_path, check=False)
    assert trains.returncode == 2 and 'cache_features needs a frozen vision tower' in trains.stderr


# --- MiniMind-V's commands

def test_minimind_commands_parse():
    for name, batch in (('minimind', 16), ('minimind_ddp', 4)):
        vlm, cfg, _ = parse_args(['--preset', name])
        assert (cfg.max_epochs, cfg.batch_size, cfg.lr_mp, cfg.lr_backbone_pair, vlm.lm_hidden_dim) == (4, batch, 4e-4, (0., 0.), 512)


@pytest.mark.parametrize('use_moe', [False, True])
def test_minimind_stage(tmp_path, siglip, use_moe):
    "From a language model's file, on two ranks, to the file of the stage, and on from there."
    flags = [*SMALL, '--vit_model_type', siglip, '--vit_img_size', 64, '--vit_patch_size', 16, '--max_img_size', 64, '--lm_base_vocab_size', 448,
             '--lm_tokenizer', 'shapes', '--train_dataset_path', 'shapes', '--use_moe', use_moe, '--batch_size', 4, '--gradient_accumulation_steps', 1]
    start = ['--preset', 'minimind_ddp', *flags]
    vlm, _, _ = parse_args([str(a) for a in start])
    torch.manual_seed(0)
    lm = LanguageModel(vlm)
    state, names = lm.state_dict(), {k: their_names(k, MINIMIND)[0] for k in lm.state_dict() if 'inv_freq' not in k}
    (tmp_path/'out').mkdir()
    file = tmp_path/'out'/('lm_32_moe.pth' if use_moe else 'lm_32.pth')
    torch.save({n: (state[k][:448] if k in ('token_embedding.weight', 'head.weight') else state[k]).half() for k, n in names.items()}, file)
    train([*start, '--run_name', 'r'], tmp_path, ranks=2)
    run_dir = tmp_path/'checkpoints'/'r'
    assert changed(tmp_path, 'r') == {'MP.proj.weight'} and line(tmp_path, 'r', 'trainable').endswith('(MP 0.001)')
    trained = VisionLanguageModel.from_pretrained(run_dir/'step_6').decoder.state_dict()
    assert all(torch.equal(trained[k][:448] if 'embedding' in k or 'head' in k else trained[k], w[:448].half().float() if 'embedding' in k or 'head' in k else w.half().float())
               for k, w in state.items() if 'inv_freq' not in k)
    if use_moe: return
    train([*start, '--run_name', 'r', '--resume', 'True', '--max_training_steps', 8], tmp_path, ranks=2)
    assert len(updates(tmp_path, 'r')) == 8, 'the same command goes on'
    exported = nanovlm(['runs', run_dir, '--pth', 'out'], tmp_path).stdout.splitlines()[0]
    assert exported == str(file.relative_to(tmp_path)).replace('lm_32', 'pretrain_vlm_32')
    train([*start, '--run_name', 'next', '--load_from', exported, '--max_training_steps', 1], tmp_path)
    best = VisionLanguageModel.from_pretrained(run_dir/(run_dir/'best_checkpoint').read_text().strip()).state_dict()
    begun = VisionLanguageModel.from_pretrained(tmp_path/'checkpoints'/'next'/'step_0').state_dict()
    assert all(torch.equal(best[k][:448], begun[k][:448]) for k in best), 'the tower comes from its backbone, rows of image tokens begin anew'


@pytest.mark.slow
def test_minimind_stage_with_clip(tmp_path):
    "The command of the preset for CLIP, two epochs of nothing but the projector, from a file of MiniMind to one."
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel
    CLIPVisionModel(CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=16)).save_pretrained(tmp_path/'clip')
    CLIPImageProcessor().save_pretrained(tmp_path/'clip')
    flags = [*SMALL, '--vit_model_type', tmp_path/'clip', '--vit_img_size', 64, '--vit_patch_size', 16, '--max_img_size', 64, '--lm_base_vocab_size', 448,
             '--lm_tokenizer', 'shapes', '--train_dataset_path', 'shapes', '--batch_size', 4, '--gradient_accumulation_steps', 1]
    start = ['--preset', 'minimind_clip', *flags]
    vlm, _, _ = parse_args([str(a) for a in start])
    torch.manual_seed(0)
    state, cfg = {f'decoder.{k}': w for k, w in LanguageModel(vlm).state_dict().items()}, vlm
    (tmp_path/'out').mkdir()
    torch.save({k: w.half() for k, w in to_minimind(state, cfg).items()}, tmp_path/'out'/'lm_32.pth')
    train([*start, '--run_name', 'r'], tmp_path)
    assert changed(tmp_path, 'r') == {'MP.proj.weight', 'MP.proj.bias'}
    saved = json.loads((tmp_path/'checkpoints'/'r'/'step_6'/'config.json').read_text())
    assert saved['pixel_mean'] == pytest.approx([.48145466, .4578275, .40821073]) and saved['mp_kind'] == 'linear_bias'
    nanovlm(['runs', tmp_path/'checkpoints'/'r', '--pth', 'out'], tmp_path)
    held = torch.load(tmp_path/'out'/'pretrain_vlm_32.pth')
    assert len(held['model.embed_tokens.weight']) == 448 and 'vision_proj.vision_proj.0.bias' in held
    train([*start, '--run_name', 'next', '--load_from', 'out/pretrain_vlm_32.pth', '--max_training_steps', 1], tmp_path)
    ours = VisionLanguageModel.from_pretrained(tmp_path/'checkpoints'/'next'/'step_0').state_dict()
    assert torch.equal(ours['MP.proj.weight'], held['vision_proj.vision_proj.0.weight'])
