"Classification as a user runs it: own processes, several ranks, kills, and scikit-learn as the judge."
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import yaml
from safetensors.torch import load_file

from commands import SIZES, ranks_of, run, start_of
from small_smolvlm import small_model
from nanovlm_nb.uses.classify import ClassConfig, Settings, VLMClassifier, confusion, metrics_of, read_predictions
from nanovlm_nb.cli import main
from nanovlm_nb.tools.export import export_smolvlm
from nanovlm_nb.uses.labels import digits_splits, load_classes, shapes_splits

UPDATES, EVERY = 12, 3
FIGURES = ('step', 'batch_loss', 'grad_norm', 'batch_digest', 'val_loss', 'epoch_loss', 'samples', 'epoch', 'best_overall_accuracy', 'best_model_step')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with two small data sets: real digits as parquet files with `image` and `label`, shapes in this library's own schema."
    cwd = tmp_path_factory.mktemp('classify')
    digits, shapes = digits_splits(), shapes_splits((60, 30))
    (cwd/'numerals').mkdir()
    for split, n in (('train', 140), ('test', 45)): digits[split].select(range(n)).to_parquet(cwd/'numerals'/f'{split}.parquet')
    names = shapes['train'].features['label'].names
    turned = {k: ds.map(lambda r: dict(images=[r['image']], texts=[dict(user='?', assistant=names[r['label']])]), remove_columns=ds.column_names) for k, ds in shapes.items()}
    datasets.DatasetDict(turned).save_to_disk(cwd/'figures')
    return cwd


def settings(cwd, name, **training):
    "Write the file of a small run."
    more = dict(datasets=['numerals', 'figures'], run_name=name, epochs=20, max_training_steps=UPDATES, learning_rate=3e-3, warmup_steps=2, batch_size=4, gradient_accumulation_steps=2,
                dataloader_num_workers=0, dtype='float32', progress_bar=False, save_total_limit=-1) | training
    monitor = dict(eval_log_freq=EVERY, log_freq=2, perf_log_freq=2, gpu_log_freq=2, use_wandb=False)
    (cwd/f'{name}.yaml').write_text(yaml.safe_dump(dict(model=SIZES, training=more, monitor=monitor)))
    return cwd/f'{name}.yaml'


def command(file, *more, ranks=1):
    "The command line of a run."
    launch = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', ranks] if ranks > 1 else []
    return [str(a) for a in (sys.executable, *launch, '-m', 'nanovlm_nb.cli', 'classify', '--config', file, *more)]


def log(cwd, name):
    return [json.loads(line) for line in (cwd/'outputs'/name/'log.jsonl').read_text().splitlines()]


def figures(records):
    "What must not depend on kills."
    return [{k: v for k, v in r.items() if k in FIGURES or k.startswith('eval/')} for r in records]


@pytest.fixture(scope='module')
def whole(place):
    "An undisturbed run."
    run(command(settings(place, 'whole')), place)
    return place/'outputs'/'whole'


# --- what a run leaves behind

def test_metrics_are_scikit_learns(place, whole):
    from sklearn.metrics import accuracy_score, confusion_matrix, f1_score
    judged, names, step = read_predictions(whole)
    best = next(r for r in log(place, 'whole') if r['step'] == step and 'eval/overall_accuracy' in r)
    by_set = {n: [j for j in judged if n == j.dataset] for n in ('numerals', 'figures')} | dict(overall=judged)
    for name, rows in by_set.items():
        assert best[f'eval/{name}_accuracy'] == accuracy_score([j.label for j in rows], [j.predicted for j in rows])
    truth, said = [j.label for j in judged], [j.predicted for j in judged]
    assert best['eval/overall_macro_f1'] == pytest.approx(f1_score(truth, said, average='macro'), abs=1e-12)
    assert (confusion(judged, len(names)) == confusion_matrix(truth, said, labels=range(len(names)))).all()
    sizes = {n: len(r) for n, r in by_set.items()}
    assert sizes == dict(numerals=45, figures=30, overall=75) and len({j.id for j in judged}) == 75
    assert best['eval/overall_accuracy'] == pytest.approx((45*best['eval/numerals_accuracy']+30*best['eval/figures_accuracy'])/75, abs=1e-12)
    assert best | metrics_of(judged, len(names)) == best


def test_the_best_is_the_first_of_the_highest(place, whole):
    evaluations = [r for r in log(place, 'whole') if 'eval/overall_accuracy' in r]
    assert [r['step'] for r in evaluations] == list(range(0, UPDATES+1, EVERY))
    for i, r in enumerate(evaluations[1:], 1):  # the untrained model is never the best
        highest = max(e['eval/overall_accuracy'] for e in evaluations[1:i+1])
        first = next(e['step'] for e in evaluations[1:] if e['eval/overall_accuracy'] == highest)
        assert (r['best_overall_accuracy'], r['best_model_step']) == (highest, first)
    assert (whole/'best_checkpoint').read_text().strip() == f"step_{evaluations[-1]['best_model_step']}"


def test_reports_come_when_they_are_due(place, whole):
    wanted = ('training/loss', 'training/lr', 'training/grad_norm', 'training/epoch', 'perf/step_time', 'perf/samples_per_second', 'perf/gpu_memory_gb')
    for key in wanted: assert [r['step'] for r in log(place, 'whole') if key in r][:UPDATES//2] == list(range(2, UPDATES+1, 2)), key


def test_layout(whole):
    assert {p.name for p in (whole/'checkpoints').iterdir()} == {f'checkpoint-{n}' for n in range(0, UPDATES+1, EVERY)}
    assert 'update 10/12' in (whole/'logs'/'train.log').read_text()
    assert (whole/'logs'/'log.jsonl').read_text() == (whole/'log.jsonl').read_text()
    assert (whole/'checkpoints'/'checkpoint-3'/'model.safetensors').is_file()
    assert (whole/'confusion.png').read_bytes()[:4] == b'\x89PNG'


def test_checkpoint_holds_classes_and_head(whole):
    cfg = ClassConfig.load(whole/'step_12')
    assert cfg.class_names == [*'0123456789', 'bar', 'circle', 'cross', 'ring', 'square', 'triangle'] and cfg.class_prompt == 'What is this?'
    weights = load_file(whole/'step_12'/'model.safetensors')
    assert weights['score.weight'].shape == (16, 32) and not [k for k in weights if k.startswith('decoder.head')]


def test_predicting_from_the_command_line(place, whole):
    judged, names, step = read_predictions(whole)
    rows = load_classes([str(place/'numerals'), str(place/'figures')]).val
    files = [place/f'{i}.png' for i in (0, 50)]
    for f, i in zip(files, (0, 50)): f.write_bytes(rows[i]['images'][0]['bytes'])
    done = run([sys.executable, '-m', 'nanovlm_nb.cli', 'classify', '--predict', whole, *files], place)
    assert [line.split('\t')[:2] for line in done.stdout.splitlines()] == [[str(f), names[judged[i].predicted]] for f, i in zip(files, (0, 50))]

    again = run(command(place/'whole.yaml'), place, check=False).stderr.splitlines()[-1]
    assert 'give another run_name, or go on with: nanovlm classify --config ' in again and again.endswith('--run_name whole --resume_from latest')
    (place/'words.png').write_text('no picture')
    refused = lambda *line: run([sys.executable, '-m', 'nanovlm_nb.cli', *line], place, check=False).stderr.splitlines()
    *_, line = refused('classify', '--predict', whole, files[0], 'nope.png', '.', 'words.png')
    assert all(part in line for part in ('nope.png: there is no such file; ', '.: this is a directory; ', 'words.png: cannot identify'))
    for others in (['ask', whole, '--prompt', 'hi'], ['eval', whole, '--tasks', 'shapes'], ['look', whole], ['export', whole, 'out']):
        *_, line = refused(*others)
        assert f'{whole}/step_' in line and ' is a classifier: use it with nanovlm classify --predict ' in line


# --- ranks

def test_two_ranks_are_one_rank(place, whole):
    run(command(settings(place, 'ranks', batch_size=2), ranks=2), place)
    one, two = log(place, 'whole'), log(place, 'ranks')
    assert [r['batch_digest'] for r in one if 'batch_digest' in r] == [r['batch_digest'] for r in two if 'batch_digest' in r]
    for a, b in zip(figures(one), figures(two), strict=True):
        for key in a.keys() & {'batch_loss', 'grad_norm', 'eval/overall_loss', 'val_loss'}: assert a[key] == pytest.approx(b[key], rel=2e-3), (key, a['step'])
    (mine, *_), (theirs, *_) = read_predictions(whole), read_predictions(place/'outputs'/'ranks')
    assert [j.id for j in mine] == [j.id for j in theirs], 'each picture once, in the order of the rows'


# --- kills and resumes

def killed(file, place, folder):
    "Start a run, and end it by SIGKILL when its sixth update is saved."
    args, env = start_of(command(file))
    process = subprocess.Popen(args, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic()+300
    while not (folder/'step_6').exists() and process.poll() is None and time.monotonic() < end: time.sleep(.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder/'step_12').exists(), 'it was too fast to be killed'


def test_kill_and_resume(place, whole):
    file, folder = settings(place, 'killed'), place/'outputs'/'killed'
    killed(file, place, folder)
    run(command(file, '--resume_from', 'latest'), place)
    assert figures(log(place, 'killed')) == figures(log(place, 'whole'))
    assert (folder/'step_12'/'model.safetensors').read_bytes() == (whole/'step_12'/'model.safetensors').read_bytes()
    assert read_predictions(folder) == read_predictions(whole)


@pytest.mark.parametrize('kind', ['smolvlm', 'nanovlm'])
def test_kill_and_resume_of_what_began_as_another_model(place, kind):
    "It names backbones that cannot be had here, and the run does not need them: the command that is printed goes on."
    model, begun, folder = small_model(), place/f'{kind}_model', place/'outputs'/kind
    model.save_pretrained(begun) if kind == 'nanovlm' else export_smolvlm(model, begun)
    own = dict(output_dir=str(folder.parent), run_name=kind, datasets=['numerals'], epochs=20, max_training_steps=9, warmup_steps=2, batch_size=4, dataloader_num_workers=0, dtype='float32', progress_bar=False, save_total_limit=-1)
    file = place/f'{kind}.yaml'
    file.write_text(yaml.safe_dump(dict(model=dict(name=str(begun)), training=own, monitor=dict(eval_log_freq=3, use_wandb=False))))
    killed(file, place, folder)
    said = run(command(file), place, check=False).stderr
    run([sys.executable, '-m', 'nanovlm_nb.cli', *shlex.split(said.split('go on with: nanovlm ')[1])], place)
    assert [r['step'] for r in log(place, kind) if 'batch_loss' in r] == [*range(1, 10)] and 'best accuracy ' in (folder/'record.md').read_text()


def test_resume_from_a_named_checkpoint(place, whole):
    state = json.loads((whole/'step_6'/'trainer_state.json').read_text())
    evaluations = [r for r in log(place, 'whole') if 'best_model_step' in r and r['step'] < 6]  # that of update 6 follows its checkpoint
    assert {k: evaluations[-1][k] for k in ('best_overall_accuracy', 'best_model_step')} == {k: state['hooks']['ValidateClasses'][k] for k in ('best_overall_accuracy', 'best_model_step')}
    before = figures(log(place, 'whole'))
    run(command(place/'whole.yaml', '--resume_from', 'checkpoint-6'), place)
    assert 'Resumed from the checkpoint' in (whole/'train.log').read_text()
    assert figures(log(place, 'whole')) == before


def test_other_classes_are_refused(place, whole):
    done = run(command(settings(place, 'fewer', datasets=['numerals']), '--resume_from', whole/'checkpoints'/'checkpoint-6'), place, check=False)
    assert done.returncode == 2 and 'cannot resume' in done.stderr and 'class_names' in done.stderr


# --- the other way, and mistakes

def test_names_as_answers(place, whole):
    sections = yaml.safe_load((place/'whole.yaml').read_text())
    sections['model']['method'], sections['training'] = 'answers', sections['training'] | dict(run_name='words', max_training_steps=4)
    (place/'words.yaml').write_text(yaml.safe_dump(sections))
    run(command(place/'words.yaml', ranks=2), place)
    folder = place/'outputs'/'words'
    judged, names, step = read_predictions(folder)
    model = VLMClassifier.from_pretrained(folder/f'step_{step}')
    rows = load_classes([str(place/'numerals'), str(place/'figures')]).val
    labels, probs = model.predict([rows[i]['images'][0] for i in range(0, 75, 5)])
    assert labels == [names[j.predicted] for j in judged[::5]]
    assert [-p[j.label].log().item() for p, j in zip(probs, judged[::5])] == pytest.approx([j.loss for j in judged[::5]], rel=1e-3)


def test_yaml_round_trip(whole):
    s = Settings.load(whole/'classify.yaml')
    assert s.training.run_name == 'whole' and s.vlm == SIZES
    s.save(whole.parent/'copy.yaml')
    assert Settings.load(whole.parent/'copy.yaml') == s


@pytest.mark.parametrize('text, said', [
    ('training:\n  learning_rat: 1e-5', 'did you mean `training.learning_rate`'), ('monitr: {}', 'did you mean `monitor`'), ('model:\n  num_labels: 101', 'have 10 classes'),
    ('model:\n  name: no/such/model', 'neither a preset nor a checkpoint'), ('training:\n  datasets: [nowhere]', 'nowhere')])
def test_mistakes_name_the_remedy(tmp_path, capsys, text, said):
    (tmp_path/'bad.yaml').write_text(text)
    with pytest.raises(SystemExit) as stopped: main(['classify', '--config', str(tmp_path/'bad.yaml')])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_sharded_weights_learn_the_same(place, whole):
    "The head is a part like any other when weights are cut among ranks."
    run(command(settings(place, 'sharded', batch_size=2, sharding='zero3'), ranks=2), place)
    losses = [[r for r in log(place, name) if 'val_loss' in r] for name in ('whole', 'sharded')]
    for a, b in zip(*losses, strict=True): assert a['val_loss'] == pytest.approx(b['val_loss'], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize('sharding', ['ddp', 'zero2', 'zero3'])
def test_killed_on_two_ranks_it_ends_as_if_it_had_not_been(place, sharding):
    "Both ranks are killed in the middle: the same figures, weights and predictions, whoever keeps what."
    files = {name: settings(place, f'{name}_{sharding}', batch_size=2, sharding=sharding) for name in ('left_alone', 'struck')}
    run(command(files['left_alone'], ranks=2), place)
    alone, struck = (place/'outputs'/f'{name}_{sharding}' for name in files)
    args, env = start_of(command(files['struck'], ranks=2))
    process = subprocess.Popen(args, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic()+300
    while not (struck/'step_6').exists() and process.poll() is None and time.monotonic() < end: time.sleep(.01)
    for rank in (0, 1):
        for pid in ranks_of(place, rank): os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=120) and not (struck/'step_12').exists(), 'it was too fast to be killed'
    run(command(files['struck'], '--resume_from', 'latest', ranks=2), place)
    assert figures(log(place, struck.name)) == figures(log(place, alone.name))
    ours, theirs = (load_file(d/'step_12'/'model.safetensors') for d in (struck, alone))
    assert ours.keys() == theirs.keys() and all(w.equal(theirs[k]) for k, w in ours.items())
    assert read_predictions(struck) == read_predictions(alone)
