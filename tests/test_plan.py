"What a run costs, and advice: the arithmetic of batches, schedules in epochs, memory against what torch keeps, remedies, the command."
import json
import resource
import sys

import pytest
import torch
from commands import TINY, run, train

from nanovlm_nb.tools import plan as pl
from nanovlm_nb.core.advice import (MOST, advice, capped_workers, grouped, if_it_waits, lint, memory_remedies, more_workers, over_budget, range_notes,
                               save_notes, stability_advice)
from nanovlm_nb.cli import main as nanovlm
from nanovlm_nb.core.config import effective_batch_size, evolve, load_yaml, preset, save_yaml
from nanovlm_nb.training.optim import component_lrs, param_groups
from nanovlm_nb.training.schedule import get_schedule
from nanovlm_nb.model.vlm import VLMNet

pytestmark = pytest.mark.usefixtures('one_thread')
NANO_VLM, NANO = preset('nanovlm')
SIZES = pl.sizes(NANO_VLM, NANO)


# --- batches, iterations, epochs

def test_numbers_of_a_hundred_thousand_samples():
    b = pl.bookkeeping(100_000, 64, 2, 2, 8)
    assert b == pl.Bookkeeping(batch_size=64, gpus=2, accumulation=2, effective_batch=256, iterations_per_epoch=781, total_iterations=6248, updates=3124)
    assert [i for i in range(1, 9) if pl.is_update(i, 2)] == [2, 4, 6, 8]
    assert {pl.bookkeeping(100_000, 64, 2, a, 8).iterations_per_epoch for a in (1, 2, 5)} == {781}, 'accumulation does not matter'


def test_a_changed_batch_moves_the_counter():
    text = '\n'.join(pl.changed_batch(1500, pl.bookkeeping(100_000, 64, 2, 1, 8), pl.bookkeeping(100_000, 128, 2, 1, 8), 8))
    for part in ('390 iterations instead of 781', '3.8 epochs instead of 1.9', '48.1 % of the run instead of 24.0 %', '3.85', 'samples or updates stays', 'begin a new run'): assert part in text
    kept = pl.changed_batch(1500, pl.bookkeeping(100_000, 128, 2, 1, 8), pl.bookkeeping(100_000, 64, 2, 2, 8), 8)
    assert 'stays 256' in kept[-1] and '781 iterations instead of 390' in kept[0], 'the same effective batch, and still another meaning'
    assert round(pl.epoch_at(1500, 390), 2) == 3.85


@pytest.mark.parametrize('before,after', [((128, 2, 1), (64, 2, 2)), ((128, 2, 1), (64, 4, 1)), ((128, 2, 1), (32, 4, 2))])
def test_plans_that_keep_the_effective_batch(before, after):
    was, now = (pl.bookkeeping(100_000, *x, 8) for x in (before, after))
    assert was.effective_batch == now.effective_batch
    b, g, a = after
    assert (b, a, g) in pl.splits(was.effective_batch, g)


# --- schedules in epochs

def golden(scheduler, steps, **kw):
    "The rates of one of torch's schedulers."
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-4)
    s, rates = scheduler(opt, **kw), []
    for _ in range(steps):
        rates.append(opt.param_groups[0]['lr'])
        opt.step()
        s.step()
    return rates


def test_linear_and_cosine_equal_torchs():
    lr = torch.optim.lr_scheduler
    assert [pl.linear_lr(s, 2e-4, 40, 1e-5) for s in range(60)] == pytest.approx(golden(lr.LinearLR, 60, start_factor=1e-5, total_iters=40), rel=1e-9)
    assert [pl.cosine_annealing_lr(s, 2e-4, 80, 1e-6) for s in range(81)] == pytest.approx(golden(lr.CosineAnnealingLR, 81, T_max=80, eta_min=1e-6), rel=1e-9)


def test_epochs_become_updates():
    "A climb over 3 % of 8 epochs and a cosine to their end: the same curve, whatever an epoch has in updates."
    for updates in (100, 390, 781):
        schedule = get_schedule(pl.epoch_schedule(updates, 8, warmup_epochs=.24))
        climb, end = .24*updates, 8*updates
        assert [schedule(s, 2e-4, 1) for s in range(0, end+1, 17)] == pytest.approx(
            [pl.linear_lr(s, 2e-4, climb, 1e-5) if s < climb else pl.cosine_annealing_lr(s-climb, 2e-4, end-climb) for s in range(0, end+1, 17)])
        assert schedule(end+99, 2e-4, 1) == pytest.approx(0, abs=1e-12)


# --- parameters and memory

def test_parameters_of_the_default_model():
    assert abs(SIZES['decoder'].total/361.8e6-1) < .01
    assert sum(s.total for s in SIZES.values()) == sum(p.numel() for p in VLMNet(evolve(NANO_VLM, lm_n_blocks=1, vit_n_blocks=1)).parameters()) + sum(
        (n-1)*s.largest_block for n, s in ((32, SIZES['decoder']), (12, SIZES['vision_encoder'])))


@pytest.mark.parametrize('changes', [dict(lr_vision_backbone=0), dict(lr_language_backbone=0), dict(language_last_blocks=2), dict(lr_backbones=0.), {}])
def test_trained_parameters_are_the_optimizers(changes):
    vlm, cfg = preset('shapes')
    cfg = evolve(cfg, **changes)
    groups = param_groups(VLMNet(vlm), component_lrs(cfg), cfg.language_last_blocks)
    assert {n: s.trained for n, s in pl.sizes(vlm, cfg).items() if s.trained} == {g['name']: sum(p.numel() for p in g['params']) for g in groups}


def kept(net, cfg, tiles, docs):
    "Bytes that a forward pass of a packed row keeps for the backward pass, without weights and their 16-bit copies."
    shapes, storages = {tuple(p.shape) for p in net.parameters()}, {}

    def save(t):
        shape = tuple(t.shape)
        if not (len(shape) < 3 and (shape in shapes or shape[::-1] in shapes)): storages[t.untyped_storage().data_ptr()] = t
        return t

    ids = torch.full((1, cfg.lm_max_length), 5)
    ids[0, :tiles*cfg.mp_image_token_length] = cfg.image_token_id
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), torch.autocast('cpu', dtype=torch.bfloat16):
        net.hidden(ids, torch.rand(tiles, 3, *[cfg.vit_img_size]*2), doc_lens=[docs])
    return sum(t.untyped_storage().nbytes() for t in storages.values())


@pytest.mark.parametrize('changes', [{}, dict(lr_vision_backbone=0), dict(lr_language_backbone=0), dict(language_last_blocks=1, lr_vision_backbone=0, lr_mp=0),
                                     dict(language_checkpointing=True, vision_checkpointing=True), dict(vision_checkpointing=True)], ids=str)
def test_activations_are_what_torch_keeps(changes):
    vlm, cfg = preset('shapes')
    vlm = evolve(vlm, vit_img_size=160, max_img_size=160, lm_max_length=1024, attn_backend='sdpa', lm_base_vocab_size=450)
    cfg = evolve(cfg, batch_size=1, max_images_per_knapsack=8, max_images_per_example=4, **changes)
    torch.manual_seed(0)
    net = VLMNet(vlm).train()
    groups = param_groups(net, component_lrs(cfg), cfg.language_last_blocks)
    net.vision_encoder.recompute, net.decoder.recompute = cfg.vision_checkpointing, cfg.language_checkpointing
    found = kept(net, vlm, pl.most_tiles(vlm, cfg), [500, 300, 224])
    estimate = pl.activation_bytes(vlm, cfg, {g['name'] for g in groups})
    block = pl.language_bytes(vlm)*1024*cfg.language_checkpointing+pl.vision_bytes(vlm)*400*pl.most_tiles(vlm, cfg)*cfg.vision_checkpointing
    assert estimate-block == pytest.approx(found, rel=.1), 'the block that is being recomputed is not there yet'


def test_memory_of_the_default_run():
    def of(gpus=8, **how): return pl.memory(NANO_VLM, evolve(NANO, **how), gpus)
    ddp, zero2, zero3 = of(), of(sharding='zero2'), of(sharding='zero3')
    assert ddp.optimizer == 8*zero2.optimizer == 8*zero3.optimizer and zero3.weights == ddp.weights/8
    assert ddp.total > zero2.total > zero3.total > of(sharding='zero3', offload_optimizer=True, offload_params=True).total
    again = of(language_checkpointing=True, vision_checkpointing=True)
    assert again.activations < .3*ddp.activations and again.optimizer == ddp.optimizer
    assert of(lr_vision_backbone=0).total < .6*ddp.total, 'a frozen tower keeps nothing'
    small = evolve(NANO_VLM, lm_max_length=512), evolve(NANO, batch_size=1, gradient_accumulation_steps=1, num_workers=1, max_sample_length=512, max_images_per_knapsack=4, vision_checkpointing=True, language_checkpointing=True)
    states = [sum(pl.memory(small[0], evolve(small[1], sharding=s), 8, SIZES)[2:4]) for s in ('ddp', 'zero2')]
    assert 1-states[1]/states[0] == pytest.approx(7/8), 'of gradients and moments'


def test_every_remedy_saves_what_it_says():
    for gib, gpus in ((48, 8), (24, 8), (10, 1)):
        needed = pl.memory(NANO_VLM, NANO, gpus, SIZES).total
        vlm, cfg = NANO_VLM, NANO
        steps = pl.until_it_fits(NANO_VLM, NANO, gpus, gib)
        assert steps
        for remedy, after in steps:
            vlm, cfg = pl.change(vlm, cfg, remedy.changes)
            assert after == pl.memory(vlm, cfg, gpus, SIZES).total < .99*needed
            needed = after
        before_last = pl.until_it_fits(NANO_VLM, NANO, gpus, gib)[:-1]
        assert not before_last or before_last[-1][1] > pl.USABLE*gib*pl.GB, 'no remedy too many'


def test_claims_and_what_they_leave_out():
    hours, memory, tokens = pl.claims(NANO_VLM, NANO)
    assert '15.6 h' in hours and 'language model alone' in memory and 'vision tower (86.4 M)' in memory and '5851' in tokens


# --- advice

BAD = dict(data=.4, forward_backward=.3, communication=.2, optimizer=.05, validation=.05)


def test_shares_of_the_trainers_clock():
    assert grouped(BAD) == pytest.approx(dict(compute=.3, data=.4, communication=.2, other=.1))
    assert set(over_budget(BAD)) == {'data', 'compute', 'communication', 'other'}
    assert over_budget(dict(data=.09, compute=.71, communication=.15, other=.05)) == {} and MOST == dict(data=.1, communication=.15, other=.05)


def test_advice_has_a_line_for_each_fault():
    lines = advice(BAD, NANO, NANO_VLM, oom=True, unstable=True)
    assert [line.split(':')[0].split(' ')[0] for line in lines] == ['out', 'unstable', 'data', 'communication', 'other', 'forward']
    assert 'batch_size 1, gradient_accumulation_steps 16' in lines[0] and 'max_images_per_knapsack 10' in lines[0] and 'lm_max_length 2048' in lines[0]
    assert 'language_checkpointing' in lines[0] and 'max_img_size 1024' in lines[0]
    assert 'lr_mp 0.00512 -> 0.001' in lines[1] and 'warmup_ratio 0.03 -> 0.06' in lines[1] and 'max_grad_norm 1.0 -> 0.5' in lines[1]
    assert 'num_workers 3 -> 6' in lines[2] and 'gradient_accumulation_steps 8 -> 16' in lines[3]
    assert advice(dict(data=.01, compute=.95, other=.04), NANO)[0].startswith('the time is well spent; to go faster: compile True')


def test_the_clip_threshold_goes_down():
    for norm in (None, 4., 1., .25):
        line = next(line for line in stability_advice(evolve(NANO, max_grad_norm=norm)) if line.startswith('max_grad_norm'))
        assert float(line.split('-> ')[1].split(':')[0]) <= (norm or 1.)


def test_every_remedy_is_a_valid_configuration():
    for vlm, cfg, gpus in ((NANO_VLM, NANO, 8), (*preset('shapes'), 1), (NANO_VLM, evolve(NANO, batch_size=8, gradient_accumulation_steps=4), 4)):
        packs = effective_batch_size(cfg)
        for remedy in memory_remedies(vlm, cfg, gpus):
            vlm, cfg = pl.change(vlm, cfg, remedy.changes)
            assert effective_batch_size(cfg) == packs, 'no remedy changes the update'
    assert memory_remedies(NANO_VLM, evolve(NANO, batch_size=8, gradient_accumulation_steps=4))[0].changes == dict(batch_size=4, gradient_accumulation_steps=8)


def test_loader_processes():
    assert [capped_workers(16, 8, r) for r in (1, 2, 16)] == [8, 4, 1]
    assert [more_workers(evolve(NANO, num_workers=n), cpus=64) for n in (0, 3, 6, 16)] == [6, 6, 16, None]
    assert next(text for ok, text in if_it_waits(NANO_VLM, evolve(NANO, num_workers=16))['data'] if ok).startswith('resize_to_max_side_len')


def test_ranges_and_saving():
    assert not range_notes(evolve(NANO, batch_size=16, lr_mp=4e-4, lr_backbones=0), 4)
    assert len(range_notes(evolve(NANO, batch_size=4, lr_mp=1e-3, lr_backbones=1e-5), 8)) == 4
    early, later = evolve(NANO, save_interval=100, max_keep_ckpts=3), evolve(NANO, save_interval=1000, max_keep_ckpts=1)
    assert save_notes(early) == save_notes(later) == []
    assert '50 to 100 with max_keep_ckpts 3' in save_notes(evolve(NANO, save_interval=3000, max_keep_ckpts=1))[0]
    assert any('outside' in n for n in lint(NANO_VLM, evolve(NANO, lr_schedule='minimind'))) and not any('outside' in n for n in lint(NANO_VLM, NANO))


# --- the command

def planned(*args, cwd):
    "`nanovlm plan` in a process of its own: output and seconds of work."
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run([sys.executable, '-m', 'nanovlm_nb.cli', 'plan', *args], cwd, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 'Traceback' not in done.stderr, done.stderr[-3000:]
    return done, after.ru_utime-before.ru_utime+after.ru_stime-before.ru_stime


def test_the_default_model(tmp_path):
    done, seconds = planned('--preset', 'nanovlm', '--gpus', '8', '--claims', cwd=tmp_path)
    assert done.returncode == 0 and seconds < 30, f'{seconds:.1f} s of work: 4 s on a machine with nothing else to do'
    for part in ('361.9 M', '460.1 M', '2 x 8 x 8 = 128 packs', 'zero3', 'A100', 'RTX 4090', 'first batch_size 1', '15.6 h'): assert part in done.stdout, part
    assert not list(tmp_path.iterdir())


def test_no_weights_are_made(tmp_path):
    "The weights alone would take 1.84 GB; to know all models of transformers takes over a second."
    code = """
import sys
from nanovlm_nb.cli import main
main(['plan', '--preset', 'nanovlm', '--gpus', '8', '--json'])
import nanovlm_nb.runs.run
print('transformers.models' in sys.modules, next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))
"""
    all_models, memory = run([sys.executable, '-c', code], tmp_path, fresh=True).stdout.splitlines()[-1].split()
    assert int(memory) < 1.2e6, 'kB'
    assert all_models == 'False', 'no command starts with them'


def test_a_file_and_flags(tmp_path):
    save_yaml(tmp_path/'c.yaml', *preset('shapes'))
    done, _ = planned('c.yaml', '--gpus', '2', '--json', '--gpu', 'T4', 'H100', '--batch_size', '4', '--documents', '1', '--samples', '1000', '--epochs', '3', cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert plan['batch'] == dict(batch_size=4, gpus=2, accumulation=1, splits=[[1, 4, 2], [2, 2, 2], [4, 1, 2]]) and list(plan['devices']) == ['T4', 'H100']
    assert plan['epochs']['iterations_per_epoch'] == 125 and plan['epochs']['total_iterations'] == 375


@pytest.mark.parametrize('args,message', [(['--gpu', 'toaster'], "'toaster' is unknown"), (['--gpus', '0'], "'0' will not do"), (['--mfu', '3'], 'from 0 to 1'), (['--was', '3'], "'3' is no batch"),
                                          (['--was', '64x2x1', '--preset', 'nanovlm'], 'give --samples'), (['--like', 'nowhere'], 'nowhere'), (['--no_such', '1'], 'unknown flag')])
def test_wrong_flags_are_named(args, message, capsys):
    with pytest.raises(SystemExit) as e: nanovlm(['plan', *args])
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_packs_of_a_real_run(tmp_path):
    train([*TINY, '--run_name', 'r', '--ask_samples', '0', '--eval_in_epochs', 'False'], tmp_path)
    vlm, cfg = load_yaml(tmp_path/'checkpoints'/'r'/'config.yaml')
    pack = pl.pack_of_run(tmp_path/'checkpoints'/'r', vlm)
    assert 0 < pack.targets < pack.tokens <= vlm.lm_max_length and 1 < pack.documents < 40 and 1 <= pack.tiles <= pl.most_tiles(vlm, cfg)
    plan = pl.make_plan(vlm, cfg, pack=pack, devices=('T4',))
    assert plan['work']['useful'] < plan['work']['flops'], 'its packs have padding'
