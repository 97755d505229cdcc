"""Evaluation of checkpoints: beside a run that is killed and started again, through Slurm, in the trainer itself, and through lmms-eval.

That nothing is lost or counted twice whoever dies, evaluators too, is in 58_answers.tasks; here the trainer is a real one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import TINY, environment, run, start_of, train, wait_for
from nanovlm_nb import Asker, read_log
from nanovlm_nb.answers.answer import answer_all, questions_of
from nanovlm_nb.answers.tasks import (
    as_nanovlm_asks,
    flat_figures,
    has_lmms_eval,
    read_rows,
)
from nanovlm_nb.answers.tasks import write_tasks

STAND_IN = Path(__file__).with_name('stand_in_evaluator.py')
FLAGS = [
    *TINY,
    '--run_name',
    'a',
    '--ask_samples',
    '0',
    '--dtype',
    'float32',
    '--use_lmms_eval',
    'True',
    '--eval_backend',
    'subprocess',
    '--lmms_eval_tasks',
    'x,yy,zzz',
    '--eval_interval',
    '2',
    '--stats_log_interval',
    '1',
    '--max_val_batches',
    '1',
    '--data_cutoff_idx',
    '120',
    '--num_of_sequences',
    '3',
]
NAMES = {'x': 0.01, 'yy': 0.02, 'zzz': 0.03}
RUN = Path('checkpoints', 'a')


def command(*flags):
    "`nanovlm train`, whose evaluator is the stand-in."
    return [sys.executable, STAND_IN, 'train', *FLAGS, *flags]


def figures(run_dir):
    "(step, figure, value) of every evaluation in the log of a run, in order."
    rows = (
        [r for r in read_log(run_dir / 'log.jsonl') if '<lmms-eval-step>' in r]
        if (run_dir / 'log.jsonl').exists()
        else []
    )
    return [
        (int(r['<lmms-eval-step>']), k, v)
        for r in rows
        for k, v in r.items()
        if k.startswith('lmms_eval/')
    ]


def expected(*steps):
    return sorted(
        (s, f'lmms_eval/{n}_acc', s + d) for s in steps for n, d in NAMES.items()
    )


def said(cwd):
    return (
        (cwd / RUN / 'train.log').read_text()
        if (cwd / RUN / 'train.log').exists()
        else ''
    )


# --- beside the training


def test_each_result_is_logged_once_whoever_is_killed(tmp_path):
    "Two trainers are killed, while evaluators go on: every figure of every step is in the log once, and no checkpoint is kept for an evaluation."
    (tmp_path / 'go').touch()
    rng = random.Random(0)
    flags = '--max_training_steps 20 --save_interval 1 --resume True --max_keep_ckpts 2'.split()
    for die_after in (2, 5):  # results in the log
        args, env = start_of(command(*flags))
        trainer = subprocess.Popen(
            args,
            cwd=tmp_path,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for(trainer, lambda: len(figures(tmp_path / RUN)) >= die_after)
        time.sleep(rng.random() * 0.2)
        os.killpg(trainer.pid, signal.SIGKILL)
        assert trainer.wait() == -signal.SIGKILL, said(tmp_path)
    run(command(*flags), tmp_path)
    assert sorted(figures(tmp_path / RUN)) == expected(4, 8, 12, 16, 20), said(tmp_path)
    assert (
        not [*tmp_path.rglob('*.todo')] and len([*(tmp_path / RUN).glob('step_*')]) <= 3
    )  # two and the best


def test_training_does_not_wait_the_checkpoint_stays_and_a_resumed_run_collects(
    tmp_path,
):
    "An evaluator that never gets anywhere: all updates are made, its checkpoint is kept although it is old, and the run ends. Later the result is found."
    run_dir = tmp_path / RUN
    flags = ('--max_training_steps', 12, '--max_keep_ckpts', 1)
    run(command(*flags, '--eval_wait', 1), tmp_path)
    for words in (
        'the run waits for evaluations of steps 4, 8, 12',
        'evaluations of steps 4, 8, 12 are not waited for',
    ):
        assert words in said(tmp_path)
    assert (
        max(r['step'] for r in read_log(run_dir / 'log.jsonl') if 'batch_loss' in r)
        == 12
        and not figures(run_dir)
        and (run_dir / 'status').read_text() == 'done\n'
    )
    kept = {p.name for p in run_dir.glob('step_*')}
    best = (run_dir / 'best_checkpoint').read_text().strip()
    assert {'step_4', 'step_8', 'step_12'} <= kept and not {
        'step_2',
        'step_6',
    } & kept - {best}
    (tmp_path / 'go').touch()  # the evaluator has outlived the trainer
    run(command(*flags, '--resume', 'True', '--eval_wait', 60), tmp_path)
    assert (
        sorted(figures(run_dir)) == expected(4, 8, 12)
        and [p.read_text() for p in run_dir.rglob('*.starts')] == ['.'] * 3
    )
    assert {p.name for p in run_dir.glob('step_*')} <= {'step_12', best}


def test_other_weights_have_other_results(tmp_path):
    "A run that begins anew in its directory puts the old results aside."
    (tmp_path / 'go').touch()
    for anew in (False, True):
        for checkpoint in (tmp_path / RUN).glob('step_*'):
            shutil.rmtree(checkpoint)
        run(command('--max_training_steps', 4), tmp_path)
        assert (
            sorted(figures(tmp_path / RUN)) == expected(4)
            and (tmp_path / RUN / 'eval_results' / 'step_4.json.old').exists() == anew
        )


# --- Slurm

#: names of programs -> what they do here: a job runs at once, and its python only notes what it was asked
PROGRAMS = dict(
    sbatch='''echo 'Submitted batch job 4711'
bash "$@"''',
    python='''printf '%s\\n' "$@" > argv
echo '{"tasks": ["mme", "a task; touch pwned", "$(touch pwned)"], "results": {"mme_score": 7}}' > checkpoints/a/eval_results/step_4.json''',
)


def test_slurm_gets_a_list_of_arguments(root, tmp_path):
    "Words for sbatch, and by slurm/eval.slurm for the evaluator, are as they were, without a shell; the job's figures come into the log."
    (tmp_path / 'bin').mkdir()
    for name, lines in PROGRAMS.items():
        (tmp_path / 'bin' / name).write_text(f'#!/bin/sh\n{lines}\n')
        (tmp_path / 'bin' / name).chmod(0o755)
    script, tasks = (
        root / 'slurm' / 'eval.slurm',
        'mme,a task; touch pwned,$(touch pwned)',
    )
    flags = [
        '--eval_backend',
        'auto',
        '--eval_script',
        script,
        '--lmms_eval_tasks',
        tasks,
        '--lmms_eval_limit',
        8,
        '--eval_include_path',
        't t',
    ]
    train(
        [*FLAGS, *flags, '--max_training_steps', 6, '--eval_wait', 60],
        tmp_path,
        PATH=f'{tmp_path}/bin:{os.environ["PATH"]}',
    )
    want = dict(
        step=4,
        tasks=tasks,
        batch_size=64,
        prompts='nanovlm',
        out=tmp_path / RUN / 'eval_results' / 'step_4.json',
        limit=8.0,
        include_path=tmp_path / 't t',
    )
    words = [
        '-m',
        'nanovlm_nb.cli',
        'eval',
        tmp_path / RUN / 'step_4',
        *(w for k, v in want.items() for w in (f'--{k}', v)),
    ]
    assert (tmp_path / 'argv').read_text().splitlines() == [
        str(w) for w in words
    ] and not list(tmp_path.rglob('pwned*'))
    assert figures(tmp_path / RUN) == [(4, 'lmms_eval/mme_score', 7.0)]
    assert run([script, *'abc'], tmp_path, check=False).returncode == 2


# --- the evaluator itself

EVAL = [
    '--lmms_eval_limit',
    '10',
    '--lmms_eval_batch_size',
    '4',
    '--max_training_steps',
    '4',
]


@pytest.fixture(scope='module')
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp('tasks'), n_scenes=6, n_digits=12)


def evaluated(cwd, python, *flags, **kw):
    "The text of the result file of a run, without its place, what the training did, and the names of its figures."
    cwd.mkdir(exist_ok=True)
    train([*FLAGS, *EVAL, *flags], cwd, **kw) if python is None else run(
        [python, '-m', 'nanovlm_nb.train', *FLAGS, *EVAL, *flags], cwd, timeout=900
    )
    losses = [
        (r['batch_loss'], r['batch_digest'])
        for r in read_log(cwd / RUN / 'log.jsonl')
        if 'batch_loss' in r
    ]
    return (
        (cwd / RUN / 'eval_results' / 'step_4.json').read_text().replace(str(cwd), ''),
        losses,
        {k[10:] for _, k, _ in figures(cwd / RUN)},
    )


def test_beside_and_inside_write_the_same_file(tasks, tmp_path):
    "A process beside the training and the trainer itself, on the same questions; the training is not disturbed by either."
    lists = f'{tasks}/shapes.parquet,{tasks}/digits.parquet'
    beside, inside = (
        evaluated(tmp_path / b, None, '--eval_backend', b, '--lmms_eval_tasks', lists)
        for b in ('subprocess', 'in_process')
    )
    assert (
        beside == inside
        and json.loads(inside[0])['samples'] == {'digits': 10, 'shapes': 10}
        and inside[2] == {'shapes_exact_match', 'digits_exact_match'}
    )


def test_two_ranks_share_the_questions_and_what_cannot_be_asked_is_named(
    tasks, tmp_path
):
    flags = [
        '--batch_size',
        '1',
        '--eval_backend',
        'in_process',
        '--lmms_eval_tasks',
        'digits' if has_lmms_eval() else 'mme,digits,mmstar',
        '--eval_include_path',
        tasks,
    ]
    result, _, names = evaluated(tmp_path, None, *flags, ranks=2)
    assert names == {'digits_exact_match'} and json.loads(result)['samples'] == {
        'digits': 10
    }
    assert (
        has_lmms_eval()
        or "lmms-eval is not installed: mme, mmstar cannot be evaluated here. pip install 'nanovlm_nb[eval]'"
        in said(tmp_path)
    )


def test_benchmarks_are_asked_as_nanovlm_asks_them(golden):
    "Every question that its adapter has rewritten for us, word by word."
    rows = [
        r
        for name in ('questions', 'more_questions')
        for r in json.loads((golden / f'{name}.json').read_text())['rows']
    ]
    assert len(rows) == 141
    assert [
        r
        for r in rows
        if as_nanovlm_asks(r['task'], r['asked']) != (r['user'], r['assistant_start'])
    ] == []


# --- the real lmms-eval, the real Slurm

LMMS = os.environ.get('NANOVLM_LMMS_PYTHON') or (
    sys.executable if has_lmms_eval() else None
)
needs_lmms = pytest.mark.skipif(
    LMMS is None,
    reason="no lmms-eval: pip install 'nanovlm_nb[eval]', or NANOVLM_LMMS_PYTHON=python of an environment that has it",
)


@pytest.mark.slow
@needs_lmms
def test_all_roads_to_lmms_eval_agree(tasks, tmp_path):
    """A process beside the training, the trainer itself, and our plugin in lmms-eval, alone and on two ranks: the same figures.
    Our own count, without lmms-eval, has them too, of the same answers."""
    names = 'shapes,digits,digits_choice'
    flags = ['--init_std', '0.3', '--eval_include_path', tasks]
    beside, inside = (
        evaluated(
            tmp_path / b, LMMS, '--eval_backend', b, '--lmms_eval_tasks', names, *flags
        )
        for b in ('subprocess', 'in_process')
    )
    assert beside[::2] == inside[::2] and inside[2] == {
        'shapes_exact_match',
        'digits_exact_match',
        'digits_choice_acc',
    }
    checkpoint = tmp_path / 'subprocess' / RUN / 'step_4'
    want = json.loads(beside[0])['results']
    how = [
        '--model',
        'nanovlm_nb',
        '--model_args',
        f'pretrained={checkpoint}',
        '--tasks',
        names,
        '--include_path',
        tasks,
        '--limit',
        10,
        '--batch_size',
        4,
        '--process_with_media',
        '--log_samples',
        '--output_path',
    ]
    for where, launch in (
        ('one', []),
        ('two', ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2]),
    ):
        run(
            [LMMS, *launch, '-m', 'lmms_eval', *how, tmp_path / where],
            tmp_path,
            timeout=900,
        )
        (results,) = (tmp_path / where).rglob('*_results.json')
        assert (
            want.items()
            <= flat_figures(json.loads(results.read_text())['results']).items()
        )
    (samples,) = (tmp_path / 'one').rglob('*_samples_shapes.jsonl')
    asked = answer_all(
        Asker.from_checkpoint(checkpoint),
        questions_of(read_rows(tasks / 'shapes.parquet', 10)),
        4,
    )
    heard = [
        json.loads(line)['filtered_resps'] for line in samples.read_text().splitlines()
    ]
    assert [f if isinstance(f, str) else f[0] for f in heard] == [
        r.reply for r in asked
    ] and len({r.reply for r in asked}) > 1
    run(
        [
            sys.executable,
            '-m',
            'nanovlm_nb.cli',
            'eval',
            checkpoint,
            '--tasks',
            f'{tasks}/shapes.parquet,{tasks}/digits.parquet',
            '--limit',
            10,
            '--out',
            own := tmp_path / 'own.json',
        ],
        tmp_path,
    )
    ours = json.loads(own.read_text())['results']
    assert ours == {k: v for k, v in want.items() if k in ours} and len(ours) == 2


@pytest.mark.slow
def test_evaluation_as_a_real_slurm_job(root, tasks, tmp_path):
    "A run hands its checkpoint to Slurm, and logs what the job has found."
    cluster = pytest.importorskip('cluster')
    if why := cluster.missing():
        pytest.skip(why)
    with cluster.Slurm() as slurm:
        env = environment(
            PATH=f'{sys.exec_prefix}/bin:{cluster.PATH}',
            SLURM_CONF=slurm.env['SLURM_CONF'],
        )
        flags = [
            *FLAGS,
            *EVAL,
            '--eval_backend',
            'slurm',
            '--eval_script',
            str(root / 'slurm' / 'eval.slurm'),
            '--lmms_eval_tasks',
            f'{tasks}/digits.parquet',
            '--eval_wait',
            '300',
        ]
        done = subprocess.run(
            [sys.executable, '-m', 'nanovlm_nb.train', *flags],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=500,
        )
    jobs_said = ''.join(p.read_text() for p in tmp_path.glob('*.out'))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [f[:2] for f in figures(tmp_path / RUN)] == [
        (4, 'lmms_eval/digits_exact_match')
    ], said(tmp_path) + jobs_said
