"`nanovlm check`: machines that nobody has as values, this machine as it is, and the command."

import json
import os
import re
import sys

import numpy as np
import pytest
from commands import TINY, nanovlm, run
from PIL import Image
from test_docs import NBS, cells

from nanovlm_nb.cli import main
from nanovlm_nb.core.config import evolve, preset, tiny
from nanovlm_nb.core.settings import load_yaml, save_yaml
from nanovlm_nb.tools import doctor as dr
from nanovlm_nb.tools.doctor import FAIL, SKIP
from nanovlm_nb.tools.plan import make_plan

pytestmark = pytest.mark.usefixtures('one_thread')
SMALL = [*TINY, '--max_training_steps', '6']


def test_a_checkpoint_is_as_large_as_said(tmp_path):
    "The file sizes of a real checkpoint, against the estimate."
    run(
        [
            sys.executable,
            '-m',
            'nanovlm_nb.train',
            *SMALL,
            '--run_name',
            'r',
            '--ask_samples',
            '0',
            '--eval_in_epochs',
            'False',
            '--lm_inter_dim',
            '2048',
            '--lm_hidden_dim',
            '256',
        ],
        tmp_path,
    )
    found = sum(
        p.stat().st_size
        for p in (tmp_path / 'checkpoints' / 'r' / 'step_6').rglob('*')
        if p.suffix == '.safetensors'
    )
    assert make_plan(*load_yaml(tmp_path / 'checkpoints' / 'r' / 'config.yaml'))[
        'disk'
    ]['checkpoint'] == pytest.approx(found, rel=0.05)


# --- the command


def checked(cwd, *args, **env):
    "`nanovlm check` in a process of its own: its exit code, its lines, and name -> (state, text) of the last finding with that name."
    done = nanovlm(['check', *args], cwd, check=False, **env)
    assert 'Traceback' not in done.stderr, done.stderr[-3000:]
    found = {
        m[2].strip(): (m[1], m[3])
        for m in re.finditer(r'^(pass|FAIL|skip)  (.{17}) (.*)$', done.stdout, re.M)
    }
    assert done.returncode == any(state == FAIL for state, _ in found.values())
    return done.returncode, done.stdout.splitlines(), found


def test_a_run_that_can_start(tmp_path):
    "One screen, everything that the first run needs is tried, and nothing stays behind."
    code, lines, found = checked(
        tmp_path, *SMALL, '--smoke', '--gpus', '1', PATH=os.path.dirname(sys.executable)
    )
    assert code == 0 and len(lines) < 40, lines
    assert (
        found['short run'][1].startswith('3 updates, loss')
        and found['Slurm'][0] == SKIP
    )
    table = next(
        c['source']
        for c in cells(next(NBS.glob('71_*.ipynb')), 'markdown')
        if c['id'] == 'f0140001'
    )
    listed = [
        n
        for row in table.splitlines()[4:]
        for n in re.findall(r'`([^`]+)`', row.rsplit('|', 2)[1])
    ]
    assert (
        listed
        == ['data', 'wandb', 'tasks', 'GPUs', 'short run', 'checkpoints', 'Slurm']
        and {*listed, 'start', 'packages', 'memory', 'time', 'packs'} <= found.keys()
    )
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_start(tmp_path):
    save_yaml(
        tmp_path / 'c.yaml',
        preset('shapes')[0],
        evolve(preset('shapes')[1], train_dataset_path='./missing', log_wandb=False),
    )
    code, _, found = checked(
        tmp_path,
        'c.yaml',
        '--gpus',
        '500',
        '--smoke',
        '1',
        '--load_from',
        'nowhere/step_5',
        PATH=os.path.dirname(sys.executable),
    )
    assert code == 1 and {n for n, (state, _) in found.items() if state == FAIL} == {
        'start',
        'GPUs',
        'columns',
        'data',
        'short run',
    }
    assert (
        '0 of 1 updates' in found['short run'][1]
        and 'nowhere/step_5' in found['start'][1]
    )


def test_the_exit_code_tells_a_fault_from_a_wrong_use(capsys):
    "0 and 1 are above."
    for args, code, said in (
        (
            ['--help'],
            0,
            'The exit code is 0 if all is well, 1 if something would fail, 2 if',
        ),
        (['--smok'], 2, 'did you mean `--smoke`?'),
    ):
        with pytest.raises(SystemExit) as e:
            main(['check', *args])
        assert e.value.code == code and said in ' '.join(
            ' '.join(capsys.readouterr()).split()
        )


def test_a_short_run_publishes_nothing_and_begins_with_the_same_weights(
    tmp_path, monkeypatch
):
    "Of three updates however short the run would be, in a folder of its own, with weights named from where the user stands."
    asked = []

    def short_run(vlm_cfg, small, folder, timeout_s):
        return asked.append((vlm_cfg, small, folder)) or [1.0, 1.0, 1.0], ''

    monkeypatch.setattr(dr, '_short_run', short_run)
    vlm_cfg, cfg = tiny(
        hf_repo_name='me/model',
        vlm_checkpoint_path='out/a',
        resume_from_vlm_checkpoint=True,
        max_epochs=1,
    )
    dr.check_short_run(vlm_cfg, cfg)
    ((v, c, folder),) = asked
    assert (
        v.hf_repo_name,
        v.vlm_checkpoint_path,
        c.load_from,
        c.resume_from_vlm_checkpoint,
        c.max_epochs,
    ) == (None, folder, 'out/a', False, None)


def test_a_short_run_from_a_relative_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nanovlm(['train', *SMALL, '--run_name', 'a', '--ask_samples', '0'], tmp_path)
    vlm_cfg, cfg = load_yaml('checkpoints/a/config.yaml')
    assert '3 updates' in dr.check_short_run(
        vlm_cfg, evolve(cfg, load_from='checkpoints/a', resume=False)
    )
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['a']


def test_a_plan_of_few_rows_is_no_refusal():
    plan = make_plan(*tiny(data_cutoff_idx=10, val_size=2))
    assert plan['epochs']['iterations_per_epoch'] == 1
    with pytest.raises(ValueError, match='mfu is 0'):
        make_plan(*tiny(), mfu=0.0)


def test_an_update_is_made_again_with_the_settings_of_its_start(tmp_path):
    "A run goes on with other rates: an update before that is repeated as it was."
    one = [
        '--run_name',
        'r',
        '--ask_samples',
        '0',
        '--save_interval',
        '2',
        '--eval_interval',
        '6',
        '--max_keep_ckpts',
        '-1',
        '--dtype',
        'float32',
    ]
    nanovlm(['train', *SMALL, *one], tmp_path)
    nanovlm(
        [
            'train',
            '--run_name',
            'r',
            '--resume',
            'True',
            '--max_training_steps',
            '10',
            '--lr_mp',
            '.02',
            '--lr_vision_backbone',
            '.02',
            '--lr_language_backbone',
            '.02',
        ],
        tmp_path,
    )
    for update in (4, 9):
        said = nanovlm(
            ['replay', tmp_path / 'checkpoints' / 'r', update], tmp_path, check=False
        ).stdout
        loss, norm, *logged = re.search(
            r'loss ([\d.]+), gradient norm ([\d.]+) \(in the log ([\d.]+) and ([\d.]+)\)',
            said,
        ).groups()
        assert [loss, norm] == logged


def test_what_spoils_the_data_without_leaving_it_out(tmp_path):
    "Pictures of 12 bits in files of 16, and two questions that are always asked in the same order; the reasons of all rows that are left out; the time of this machine."
    noise = np.random.default_rng(0)
    lines = []
    for i in range(24):
        Image.fromarray(noise.integers(0, 4096, (64, 64), dtype=np.uint16)).save(
            tmp_path / f'{i}.png'
        )
        lines.append(
            dict(
                image=f'{i}.png',
                texts=[
                    dict(user='What is it?', assistant='a slice'),
                    dict(user='Is it bright?', assistant='no'),
                    dict(user='Sure?', assistant=''),
                ],
            )
        )
    lines[1] |= dict(image='gone.png')
    lines[2] |= dict(image='page.jpg')
    lines[3] |= dict(texts=[dict(user='q', assistant=' ')])
    (tmp_path / 'page.jpg').write_text('<html>404</html>')
    (tmp_path / 't.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    data = [
        '--train_dataset_path',
        't.jsonl',
        '--val_size',
        '2',
        '--stream_dataset',
        'False',
        '--data_cutoff_idx',
        '99',
    ]
    code, _, found = checked(
        tmp_path, *SMALL, *data, PATH=os.path.dirname(sys.executable)
    )
    assert code == 1 and {n for n, (state, _) in found.items() if state == FAIL} == {
        'left out',
        'pixels',
        'questions',
    }
    assert (
        'come out dark, 16 of 255 at most; set pixel_max to 4095' in found['pixels'][1]
    )
    assert "ask 'What is it?', then 'Is it bright?'" in found['questions'][1]
    assert all(
        said in found['left out'][1]
        for said in (
            't/2: no file',
            't/3: UnidentifiedImageError',
            'a web page: download',
            '1 no_turns',
            'cut_no_answer',
        )
    )
    assert (
        'on this machine, where a pack takes' in found['time'][1]
        and 'H100' not in found['time'][1]
    )
    _, _, found = checked(
        tmp_path,
        *SMALL,
        *data,
        '--pixel_max',
        '4095',
        PATH=os.path.dirname(sys.executable),
    )
    assert found['pixels'] == (
        'pass',
        '20 pictures of more than 8 bits a pixel, with values from 0 to 4095',
    )  # 24 without two that cannot be read and two of validation
