"Classification as a user runs it: own processes, several ranks, kills. That metrics are scikit-learn's is in 81_uses.classify."

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import datasets
import pytest
import yaml
from safetensors.torch import load_file

from commands import SIZES, log_of, nanovlm, ranks_of, record, run, start_of, wait_for
from small_smolvlm import small_model
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.uses.classify import Settings, digits_splits, shapes_splits, split_pair
from nanovlm_nb.uses.export import export_smolvlm

UPDATES = 12
EVERY = 3


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with two small data sets: real digits as parquet files, shapes as `save_to_disk` writes them."
    cwd = tmp_path_factory.mktemp('classify')
    digits = digits_splits()
    shapes = shapes_splits((60, 30))
    (cwd / 'numerals').mkdir()
    for split, n in (('train', 140), ('test', 45)):
        digits[split].select(range(n)).to_parquet(cwd / 'numerals' / f'{split}.parquet')
    datasets.DatasetDict(shapes).save_to_disk(cwd / 'figures')
    return cwd


def settings(cwd, name, model=SIZES, **training):
    "Write the file of a small run."
    more = (
        dict(
            datasets=['numerals', 'figures'],
            run_name=name,
            epochs=20,
            max_training_steps=UPDATES,
            learning_rate=3e-3,
            warmup_steps=2,
            batch_size=4,
            gradient_accumulation_steps=2,
            dataloader_num_workers=0,
            dtype='float32',
            progress_bar=False,
            save_total_limit=-1,
        )
        | training
    )
    monitor = dict(
        eval_log_freq=EVERY,
        log_freq=2,
        perf_log_freq=2,
        gpu_log_freq=2,
        use_wandb=False,
    )
    (cwd / f'{name}.yaml').write_text(
        yaml.safe_dump(
            dict(model=dict(name='shapes') | model, training=more, monitor=monitor)
        )
    )
    return cwd / f'{name}.yaml'


def command(file, *more, ranks=1):
    "The command line of a run."
    launch = [
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc_per_node',
        ranks,
    ] * (ranks > 1)
    return [
        str(a)
        for a in (
            sys.executable,
            *launch,
            '-m',
            'nanovlm_nb.cli',
            'classify',
            '--config',
            file,
            *more,
        )
    ]


@pytest.fixture(scope='module')
def whole(place):
    "An undisturbed run."
    run(command(settings(place, 'whole')), place)
    return place / 'outputs' / 'whole'


# --- what a run leaves behind


def test_a_run_leaves_its_best_and_reports_that_came_when_they_were_due(whole):
    "The best is the first of the highest, and never the untrained model; checkpoints and logs lie where the guide has them."
    log = log_of(whole)
    evaluations = [r for r in log if 'eval/overall_accuracy' in r]
    assert [r['step'] for r in evaluations] == list(range(0, UPDATES + 1, EVERY))
    for i in range(1, len(evaluations)):
        best = max(evaluations[1 : i + 1], key=lambda r: r['eval/overall_accuracy'])
        assert (
            evaluations[i]['best_overall_accuracy'],
            evaluations[i]['best_model_step'],
        ) == (best['eval/overall_accuracy'], best['step'])
    assert (whole / 'best_checkpoint').read_text().strip() == f"step_{best['step']}"
    for key in (
        'training/loss',
        'training/lr',
        'training/grad_norm',
        'training/epoch',
        'perf/step_time',
        'perf/samples_per_second',
        'perf/gpu_memory_gb',
    ):
        assert [r['step'] for r in log if key in r][: UPDATES // 2] == list(
            range(2, UPDATES + 1, 2)
        ), key
    assert {p.name for p in (whole / 'checkpoints').iterdir()} == {
        f'checkpoint-{n}' for n in range(0, UPDATES + 1, EVERY)
    }
    assert (
        'update 10/12' in (whole / 'logs' / 'train.log').read_text()
        and log_of(whole / 'logs') == log
    )
    weights = load_file(whole / 'checkpoints' / 'checkpoint-12' / 'model.safetensors')
    assert weights['score.weight'].shape == (16, 32) and not [
        k for k in weights if k.startswith('decoder.head')
    ]
    assert Settings.load(whole / 'classify.yaml').vlm == SIZES


def test_other_commands_leave_a_classifier_to_its_own(place, whole):
    for others in (
        ['ask', whole, '--prompt', 'hi'],
        ['eval', whole, '--tasks', 'shapes'],
        ['export', whole, 'out'],
        ['check', whole],
    ):
        *_, line = nanovlm(others, place, check=False).stderr.splitlines()
        assert 'nanovlm classify --' in line, line


@pytest.mark.parametrize(('share', 'n'), [(0.1, 1), (0.0, 2), (1.0, 2)])
def test_a_share_that_leaves_nothing_is_refused(share, n):
    rows = datasets.Dataset.from_dict(dict(label=[0] * n))
    with pytest.raises(UsageError, match=f'val_share {share} of {n} pictures'):
        split_pair(dict(train=rows), share)


# --- ranks


def test_two_ranks_are_one_rank_and_sharded_weights_learn_the_same(place, whole):
    one = record(whole)[0]
    for name, sharding in (('ranks', 'ddp'), ('sharded', 'zero3')):
        run(
            command(settings(place, name, batch_size=2, sharding=sharding), ranks=2),
            place,
        )
        two = record(place / 'outputs' / name)[0]
        assert [r.get('batch_digest') for r in one] == [
            r.get('batch_digest') for r in two
        ]
        for a, b in zip(one, two, strict=True):
            for key in a.keys() & {
                'batch_loss',
                'grad_norm',
                'eval/overall_loss',
                'val_loss',
            }:
                assert a[key] == pytest.approx(b[key], rel=2e-3), (key, a['step'])


# --- kills and resumes


def killed(file, place, ranks=1):
    "Start a run, and end it by SIGKILL when its sixth update is saved; its directory."
    folder = place / 'outputs' / file.stem
    (args, env) = start_of(command(file, ranks=ranks))
    process = subprocess.Popen(
        args,
        cwd=place,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert wait_for(process, (folder / 'step_6').exists)
    for pid in (
        [pid for rank in range(ranks) for pid in ranks_of(place, rank)]
        if ranks > 1
        else ()
    ):
        os.kill(pid, signal.SIGKILL)
    if ranks == 1:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=120) and not (folder / 'step_12').exists(), (
        'it was too fast to be killed'
    )
    return folder


@pytest.mark.parametrize(
    'sharding',
    [
        None,
        *(pytest.param(s, marks=pytest.mark.slow) for s in ('ddp', 'zero2', 'zero3')),
    ],
)
def test_killed_it_ends_as_if_it_had_not_been(place, whole, sharding):
    "One process, or both ranks: the same figures and weights, whoever keeps what."
    ranks = 1
    alone = whole
    more = {}
    if sharding:
        ranks = 2
        more = dict(batch_size=2, sharding=sharding)
        run(command(settings(place, f'alone_{sharding}', **more), ranks=2), place)
        alone = place / 'outputs' / f'alone_{sharding}'
    folder = killed(file := settings(place, f'killed_{sharding}', **more), place, ranks)
    run(command(file, '--resume_from', 'latest', ranks=ranks), place)
    ours, theirs = (
        load_file(d / 'step_12' / 'model.safetensors') for d in (folder, alone)
    )
    assert ours.keys() == theirs.keys() and all(
        w.equal(theirs[k]) for k, w in ours.items()
    )
    assert record(folder)[0] == record(alone)[0]


@pytest.mark.parametrize('kind', ['smolvlm', 'nanovlm'])
def test_kill_and_resume_of_what_began_as_another_model(place, kind):
    "It names backbones that cannot be had here, and the run does not need them: the command that is printed goes on."
    model = small_model()
    begun = place / f'{kind}_model'
    model.save_pretrained(begun) if kind == 'nanovlm' else export_smolvlm(model, begun)
    file = settings(
        place,
        kind,
        dict(name=str(begun)),
        output_dir=str(place / 'outputs'),
        datasets=['numerals'],
    )
    folder = killed(file, place)
    nanovlm(
        shlex.split(
            run(command(file), place, check=False).stderr.split('go on with: nanovlm ')[
                1
            ]
        ),
        place,
    )
    assert [r['step'] for r in log_of(folder) if 'batch_loss' in r] == [
        *range(1, UPDATES + 1)
    ] and 'best accuracy ' in (folder / 'record.md').read_text()


@pytest.mark.parametrize('kind', ['smolvlm', 'nanovlm'])
def test_a_new_head_trains_beside_adapters_and_is_saved_with_them(place, kind):
    "The log names both; the best sorts pictures, and the run goes on bit for bit, also on a base of transformers' form."
    pytest.importorskip('peft')
    model = small_model()
    begun = place / f'{kind}_adapted_model'
    model.save_pretrained(begun) if kind == 'nanovlm' else export_smolvlm(model, begun)
    file = settings(
        place,
        f'{kind}_adapted',
        dict(name=str(begun)),
        datasets=['numerals'],
        lora_rank=2,
    )
    run(command(file), place)
    folder = place / 'outputs' / file.stem
    said = (folder / 'train.log').read_text()
    assert re.search(r'trainable: .*\(lora [\d.]+, score [\d.]+\)', said)
    first, last = (
        load_file(folder / step / 'lora.safetensors') for step in ('step_0', 'step_12')
    )
    assert {k for k in last if 'lora_' not in k} == {'score.weight'} and not first[
        'score.weight'
    ].equal(last['score.weight'])
    digits_splits()['test'][0]['image'].save(place / 'digit.png')
    (place / 'broken.png').write_bytes(b'a picture')
    sorting = ['classify', '--predict', folder, 'broken.png', 'digit.png']
    done = nanovlm(sorting, place, check=False)
    assert (done.returncode, done.stdout[:10]) == (1, 'digit.png\t')
    assert "'broken.png' cannot be read" in done.stderr
    before = record(folder)
    run(command(file, '--resume_from', 'checkpoint-6'), place)
    assert record(folder) == before


def test_a_run_that_is_shorter_than_its_warm_up_trains(place):
    "A tenth of the updates is warm-up then, and a line says so."
    file = settings(place, 'short', datasets=['numerals'], warmup_steps=100)
    run(command(file), place)
    assert (
        'warmup_steps 100, but the run has 12 updates: the learning rate rises in 1 of them'
        in (place / 'outputs' / 'short' / 'train.log').read_text()
    )
    rates = [
        r['lr_score'] for r in log_of(place / 'outputs' / 'short') if 'lr_score' in r
    ]
    assert max(rates) == pytest.approx(3e-3, rel=0.03) and rates[-1] < rates[2]


def test_resume_from_a_named_checkpoint_but_not_with_other_classes(place, whole):
    best = ('best_overall_accuracy', 'best_model_step')
    before = record(whole)[0]
    state = json.loads((whole / 'step_6' / 'trainer_state.json').read_text())['hooks'][
        'ValidateClasses'
    ]
    known = [r for r in log_of(whole) if 'best_model_step' in r and r['step'] < 6][
        -1
    ]  # that of update 6 follows its checkpoint
    assert [known[k] for k in best] == [state[k] for k in best]
    run(command(place / 'whole.yaml', '--resume_from', 'checkpoint-6'), place)
    assert (
        'Resumed from the checkpoint' in (whole / 'train.log').read_text()
        and record(whole)[0] == before
    )
    fewer = command(
        settings(place, 'fewer', datasets=['numerals']),
        '--resume_from',
        whole / 'checkpoints' / 'checkpoint-6',
    )
    for more, said in (
        (['--run_name', 'whole'], 'class_names'),
        ([], 'is of another run than outputs/fewer'),
    ):
        done = run([*fewer, *more], place, check=False)
        assert (
            done.returncode == 2
            and 'cannot resume' in done.stderr
            and said in done.stderr
        )


def test_what_is_best_after_going_back(place):
    "A resume from before the best: the page names the best that is left."
    file = settings(place, 'back')
    folder = place / 'outputs' / 'back'
    run(command(file), place)
    file = settings(place, 'back', learning_rate=1e-12)
    run(command(file, '--resume_from', 'checkpoint-3'), place)
    best = json.loads((folder / 'step_12' / 'trainer_state.json').read_text())['hooks'][
        'ValidateClasses'
    ]
    page = (folder / 'record.md').read_text()
    assert (
        f"best accuracy {best['best_overall_accuracy']:.1%} at update {best['best_model_step']}"
        in page
    )
