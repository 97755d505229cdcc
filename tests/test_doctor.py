"The doctor: machines that nobody has as values, and this machine as it is."
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from commands import TINY, run

from nanovlm_nb.tools import doctor as dr
from nanovlm_nb.model.attention import BACKENDS
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import evolve, preset, save_yaml
from nanovlm_nb.tools.doctor import FAIL, PASS, SKIP

pytestmark = pytest.mark.usefixtures('one_thread')
SMALL = [*TINY, '--max_training_steps', '6']


# --- the matrix of machines

@pytest.mark.parametrize('glibc', ['2.17', '2.31', '2.32', '2.39', None])
@pytest.mark.parametrize('cuda', ['11.7', '11.8', '12.8', None])
@pytest.mark.parametrize('torch_version', ['1.13.1', '2.0.0', '2.9.1+cu128'])
@pytest.mark.parametrize('flash', ['1.0.9', '2.0.0', '2.8.3', None])
def test_flash_attention_on_every_machine(glibc, cuda, torch_version, flash):
    check = dr.check_flash(glibc, cuda, torch_version, flash)
    new = dict(GLIBC=glibc in ('2.32', '2.39'), CUDA=cuda in ('11.8', '12.8'), torch=torch_version[0] == '2', **{'flash-attn': flash in ('2.0.0', '2.8.3')})
    assert check.state == (SKIP if flash is None else PASS if all(new.values()) else FAIL)
    assert dr.doctor_exit_code([check]) == (check.state == FAIL)
    if check.state == FAIL:
        assert all((f'{name} ' in check.text) == (not ok) for name, ok in new.items()), 'names what is too old and nothing else'
        assert 'uninstall flash-attn' in dr.check_lines([check])[1]


@pytest.mark.parametrize('gpus,cuda,driver,state,part', [
    (8, '12.8', '570.86', PASS, '8 GPUs'), (1, '11.8', '450.80.02', PASS, '1 GPU'), (1, '12.1', '520.61', FAIL, 'too old'), (1, '13.0', '570.86', FAIL, 'too old'),
    (1, '11.7', '570.86', FAIL, '11.8 or newer'), (0, '12.8', '470.1', FAIL, 'sees no GPU'), (0, None, '570.86', FAIL, 'without CUDA'), (0, None, None, SKIP, 'on the CPU')])
def test_cuda_and_driver(gpus, cuda, driver, state, part):
    check = dr.check_cuda(gpus, cuda, driver)
    assert check.state == state and part in check.text and bool(check.remedy) == (state == FAIL)


def test_version_floors():
    assert [dr.check_version('transformers', v, '4.56', 'r').state for v in ('4.56.0', '5.1', '4.55.9', None)] == [PASS, PASS, FAIL, FAIL]
    needs = {c.name: c for c in dr.package_checks()}
    assert dr.version(needs['torch'].text.split('(')[1]) >= (2, 0) and dr.version(needs['transformers'].text.split('(')[1]) >= (4, 35)
    assert dr.version(dr.CUDA_FLOOR) == (11, 8) and dr.version(dr.FLASH_FLOORS['flash-attn']) == (2, 0) and dr.FLASH_FLOORS['GLIBC'] == '2.32'


# --- disk, data, reports, processes

def test_disk():
    nano = preset('nanovlm')[1]
    one = dr.checkpoint_bytes(*preset('nanovlm'))
    assert 5e9 < one < 6e9 and dr.checkpoints_kept(nano) == 5 and dr.checkpoints_kept(evolve(nano, max_keep_ckpts=-1)) == 81
    tight = dr.check_disk(100*10**9, one, 81)
    assert tight.state == FAIL and 'max_keep_ckpts' in tight.remedy and dr.check_disk(100*10**9, one, 5).state == PASS
    frozen = evolve(nano, lr_vision_backbone=0, lr_language_backbone=0)
    assert dr.checkpoint_bytes(preset('nanovlm')[0], frozen) < .45*one, 'what is frozen has no moments'


def test_write_permission(tmp_path):
    assert dr.try_write(tmp_path/'a'/'b').state == PASS and not list(tmp_path.iterdir())
    (tmp_path/'file').write_text('')
    assert dr.try_write(tmp_path/'file'/'x').state == FAIL
    if os.geteuid() == 0: pytest.skip('root may write everywhere')
    (tmp_path/'closed').mkdir(mode=0o500)
    assert dr.try_write(tmp_path/'closed'/'x').state == FAIL


def test_a_checkpoint_is_as_large_as_said(tmp_path):
    "The file sizes of a real checkpoint, against the estimate."
    run([sys.executable, '-m', 'nanovlm_nb.train', *SMALL, '--run_name', 'r', '--ask_samples', '0', '--eval_in_epochs', 'False', '--lm_inter_dim', '2048', '--lm_hidden_dim', '256'], tmp_path)
    from nanovlm_nb.core.config import load_yaml
    vlm, cfg = load_yaml(tmp_path/'checkpoints'/'r'/'config.yaml')
    found = sum(p.stat().st_size for p in (tmp_path/'checkpoints'/'r'/'step_6').rglob('*') if p.suffix == '.safetensors')
    assert dr.checkpoint_bytes(vlm, cfg) == pytest.approx(found, rel=.05)


def test_data_that_are_not_there():
    vlm, cfg = preset('shapes')
    states = lambda v, c: {k.name: k.state for k in dr.data_checks(v, c)}
    assert states(vlm, evolve(cfg, data_cutoff_idx=8, val_size=2)) == {'data set': PASS, 'tokenizer': PASS, 'backbones': SKIP}
    lost = dr.data_checks(evolve(vlm, vlm_load_backbone_weights=True, vit_model_type='./none'), evolve(cfg, train_dataset_path='./none.jsonl'))
    assert [c.state for c in lost] == [FAIL, PASS, FAIL] and all(c.remedy for c in lost if c.state == FAIL)


def test_wandb(monkeypatch):
    cfg = evolve(preset('shapes')[1], log_wandb=True)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    assert dr.wandb_check(cfg) == dr.Probe('wandb', PASS, 'offline')
    assert dr.check_wandb(True, 'offline').state == FAIL and 'WANDB_MODE=offline' in dr.check_wandb(True, 'offline').remedy


@pytest.mark.parametrize('script,state,part', [('echo "gpu 4 idle"; echo "gpu 2 alloc"', PASS, '2 groups'), ('echo "sinfo: error: no controller" >&2; exit 1', FAIL, 'no controller')])
def test_slurm(tmp_path, script, state, part):
    (tmp_path/'sinfo').write_text(f'#!/bin/sh\n{script}\n')
    (tmp_path/'sinfo').chmod(0o755)
    check = dr.check_slurm(str(tmp_path/'sinfo'))
    assert check.state == state and part in check.text
    assert dr.check_slurm(str(tmp_path/'none')).state == SKIP


def test_two_processes_really_meet(warm_executable):
    "However long a busy machine takes: the time is only there to end what hangs."
    assert dr.two_processes(timeout_s=1800).state == PASS


def test_two_processes_that_do_not_meet(warm_executable, monkeypatch):
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'no_such_interface')
    check = dr.two_processes(timeout_s=1800)
    assert check.state == FAIL and 'Error' in check.text and 'GLOO_SOCKET_IFNAME' in check.remedy


def living(mark):
    "Processes with this word on their command line."
    found = []
    for p in os.listdir('/proc'):
        if not p.isdigit(): continue
        try:
            with open(f'/proc/{p}/cmdline', 'rb') as f: words = f.read().split(b'\0')
        except OSError: continue
        if mark.encode() in words: found.append(int(p))
    return found


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='looks into /proc')
def test_nothing_is_left_of_what_takes_too_long():
    "torchrun's workers are in sessions of their own: killing torchrun alone leaves them for ever."
    mark = f'61{os.getpid()}.5'
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '--no-python', 'sleep', mark]
    seen, stop = [], threading.Event()

    def watch():
        while not (seen or stop.wait(.1)): seen.extend(p for p in living(mark) if len(living(mark)) > 2)
    threading.Thread(target=watch, daemon=True).start()
    with pytest.raises(subprocess.TimeoutExpired): dr.run_to_end(command, 25)
    stop.set()
    assert seen, 'the workers had begun'
    assert not living(mark)


def test_ranks_and_gpus():
    assert [dr.check_gpus(asked, 4).state for asked in (1, 4, 8)] == [PASS, PASS, FAIL] and dr.check_gpus(8, 0).state == FAIL
    assert 'there are 4 GPUs' in dr.check_gpus(8, 4).text and dr.check_gpus(8, 4).remedy == '--gpus 4'


def test_attention_backends_compute():
    found = {b: dr.try_backend(b, torch.device('cpu')) for b in BACKENDS}
    assert {b for b, c in found.items() if c.state == PASS} >= {'explicit', 'sdpa', 'docs'} and FAIL not in {c.state for c in found.values()}
    for b in ('flash', 'varlen'):
        if found[b].state == PASS: continue
        assert found[b].state == SKIP and 'cannot be used on cpu' in found[b].text, 'a backend that gives way to another has not passed'
        assert dr.try_backend(b, torch.device('cpu'), wanted=b).state == FAIL, 'the run asks for it'
    assert found['flash'].state == SKIP, 'it needs CUDA'


# --- the command

def examined(cwd, *args, **env):
    "`nanovlm doctor --json` in a process of its own: name -> check, and the exit code."
    done = run([sys.executable, '-m', 'nanovlm_nb.cli', 'doctor', *args, '--json'], cwd, check=False, **env)
    assert 'Traceback' not in done.stderr, done.stderr[-3000:]
    checks = json.loads(done.stdout)
    assert done.returncode == any(c['state'] == FAIL for c in checks)
    return {c['name']: c for c in checks}


def test_a_machine_that_can_train(tmp_path):
    "Everything that a run needs is tried, and a short run is made; nothing stays behind."
    checks = examined(tmp_path, *SMALL, '--smoke', PATH=os.path.dirname(sys.executable))
    assert [n for n, c in checks.items() if c['state'] == FAIL] == []
    assert checks['short run']['text'].startswith('3 updates, loss') and checks['Slurm']['state'] == SKIP
    assert {'python', 'torch', 'datasets', 'disk', 'checkpoint directory', 'data set', 'tokenizer', 'wandb', 'two processes', 'attention docs'} <= set(checks)
    notebook = json.loads(next(Path(__file__).parents[1].glob('nbs/*doctor.ipynb')).read_text(encoding='utf-8'))
    rows = next(c['source'] for c in notebook['cells'] if c['id'] == 'f0140001')[3:]
    listed = re.findall(r'`([^`]+)`', ' '.join(row.rsplit('|', 2)[1] for row in rows if row.startswith('|')))
    assert listed == ['data set', 'wandb', 'tasks', 'GPUs', 'short run', 'checkpoint directory', 'disk', 'Slurm'] and set(listed) <= set(checks)
    assert not list(tmp_path.iterdir())


def test_a_configuration_that_cannot_train(tmp_path):
    save_yaml(tmp_path/'c.yaml', preset('shapes')[0], evolve(preset('shapes')[1], train_dataset_path='./missing', log_wandb=False, num_workers=2))
    checks = examined(tmp_path, 'c.yaml', '--gpus', '500', '--smoke', '1')
    assert {'GPUs', 'data set', 'loader processes', 'short run'} <= {n for n, c in checks.items() if c['state'] == FAIL}
    assert 'num_workers 2 -> 1' in checks['loader processes']['remedy'] and '0 of 1 updates' in checks['short run']['text']


def test_lines_for_people(capsys):
    lines = dr.check_lines([dr.Probe('a', PASS, 'fine', 'never shown'), dr.Probe('b', FAIL, 'bad', 'do this')])
    assert lines == ['pass  a                    fine', 'fail  b                    bad', '      -> do this']
    with pytest.raises(SystemExit): main(['doctor', '--gpus', '0'])
    assert 'give a whole number, 1 or more' in capsys.readouterr().err
