"Nobody else's files: a run writes, moves and deletes only what runs have made, whatever stands in its directory."

import os
import re
import shutil
from pathlib import Path

import pytest
from commands import SHORT, record

from nanovlm_nb import VisionLanguageModel
from nanovlm_nb.answers.tasks import write_tasks
from nanovlm_nb.cli import main
from nanovlm_nb.core.settings import parse_args
from nanovlm_nb.core.dist import Dist
from nanovlm_nb.core.run_dir import check_new, write_manifest
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.runs.run import run

pytestmark = pytest.mark.usefixtures('one_thread')
FLAGS = [
    *SHORT,
    '--run_name',
    'r',
    '--lr_vision_backbone',
    '0',
    '--cache_features',
    'True',
]


def go(cwd, *more):
    "Train in this process, in the folder that is current; what the run has come to."
    return record(cwd / run(*parse_args([*FLAGS, *more])[:2], dist=Dist()))


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    "A run of four updates, with step_0, step_2 and step_4, and what it came to."
    cwd = tmp_path_factory.mktemp('trained')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        return cwd / 'checkpoints' / 'r', go(cwd)


@pytest.fixture
def begun(trained, tmp_path, monkeypatch):
    "The same run as it was at update 2; beside it somebody's files."
    run_dir = tmp_path / 'checkpoints' / 'r'
    shutil.copytree(trained[0], run_dir)
    shutil.rmtree(run_dir / 'step_4')
    (run_dir / 'last_checkpoint').write_text('step_2\n')
    mine = tmp_path / 'mine'
    mine.mkdir()
    for name in ('notes', 'step_1', 'step_3'):
        (mine / name).mkdir()
        (mine / name / 'thesis.tex').write_text('mine')
    shutil.copytree(run_dir / 'step_2', mine / 'checkpoint')
    (mine / 'keys').write_text('mine')
    shutil.copy(run_dir / 'config.yaml', mine)
    monkeypatch.chdir(tmp_path)
    return run_dir


def held(folder):
    "What lies under a folder: names, bytes and where links lead; nothing is read through a link."
    found = {}
    for at, folders, files in os.walk(folder):
        for path in (Path(at) / name for name in folders + files):
            name = path.relative_to(folder)
            if path.is_symlink():
                found[name] = os.readlink(path)
            else:
                found[name] = path.read_bytes() if path.is_file() else path.is_dir()
    return found


def link(name, target, way='symlink_to'):
    "Put a link in the place of a file or directory of the run."

    def make(run_dir):
        place = run_dir / name
        place.parent.mkdir(exist_ok=True, parents=True)
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        getattr(place, way)(run_dir.parent.parent / 'mine' / target)

    return make


def pipe(name):
    "Put a pipe in which nobody writes in the place of a file of the run."

    def make(run_dir):
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)

    return make


FILES = (
    'lock',
    'log.jsonl',
    'train.log',
    'dropped.jsonl',
    'status',
    'given.yaml',
    'record.md',
    'curves.png',
    'samples.png',
    'answers.json',
    'drops.json',
    'bad_updates.jsonl',
    'own_parts',
    'wandb_id',
    'last_checkpoint',
    'best_checkpoint',
    'status.nanovlm.tmp',
    'eval_results/step_2.todo',
    'eval_results/step_2.log',
)
FOLDERS = (
    'step_3.nanovlm.tmp',
    'abandoned.nanovlm.tmp',
    'eval_results',
    'features',
    'features/tower/ab',
    'tensorboard',
    'wandb',
    'base',
)
#: what leads out of a run's directory: its name, and how it comes there
OUT = {f'link {name}': (name, link(name, 'keys')) for name in FILES} | {
    f'link {name}': (name, link(name, 'notes')) for name in FOLDERS
}
OUT |= {
    f'hard link {name}': (name, link(name, 'keys', 'hardlink_to'))
    for name in ('lock', 'log.jsonl', 'curves.png', 'eval_results/step_2.todo')
}
OUT |= {f'pipe {name}': (name, pipe(name)) for name in ('lock', 'log.jsonl', 'status')}
OUT |= {
    f'dangling {name}': (name, link(name, 'nowhere')) for name in ('lock', 'log.jsonl')
}
OUT |= {
    'link config.yaml': ('config.yaml', link('config.yaml', 'config.yaml')),
    'link step_3': ('step_3', link('step_3', 'step_3')),
    'link step_4': ('step_4', link('step_4', 'checkpoint')),
    'folder step_3': (
        'step_3',
        lambda run_dir: shutil.copytree('mine/step_3', run_dir / 'step_3'),
    ),
    'file step_4': (
        'step_4',
        lambda run_dir: shutil.copy('mine/keys', run_dir / 'step_4'),
    ),
}


@pytest.mark.parametrize('kind', OUT)
def test_what_leads_out_of_a_run_is_named_and_nothing_is_changed(begun, kind):
    "A start is refused in one line, with the name and what to do; inside and outside every byte is as it was."
    name, make = OUT[kind]
    make(begun)
    before = held('.')
    with pytest.raises(UsageError) as refused:
        go(Path(), '--resume', 'True')
    said = str(refused.value)
    assert (
        f'checkpoints/r/{name} is ' in said
        and re.search('remove it|move it elsewhere', said)
        and '\n' not in said
    )
    assert held('.') == before


def relative_step(run_dir):
    (run_dir / 'step_9').symlink_to('../../mine/checkpoint')


def linked_abandoned(run_dir):
    (run_dir / 'abandoned_1').symlink_to('../../mine/notes')


def dangling_step(run_dir):
    (run_dir / 'step_8').symlink_to('nowhere')


def step_of_old(run_dir):
    shutil.copytree('mine/step_1', run_dir / 'step_1')


def somebodys_abandoned(run_dir):
    shutil.copytree('mine/notes', run_dir / 'abandoned_1')


def another_name(run_dir):
    shutil.copytree('mine/notes', run_dir / 'step_07')


def a_folder(run_dir):
    shutil.copytree('mine/notes', run_dir / 'figures')


def linked_manifest(run_dir):
    shutil.copytree('mine/step_1', run_dir / 'step_1')
    (run_dir / 'step_1' / 'manifest.json').symlink_to(
        '../../../mine/checkpoint/manifest.json'
    )


STRANGERS = (
    relative_step,
    linked_abandoned,
    dangling_step,
    step_of_old,
    somebodys_abandoned,
    another_name,
    a_folder,
    linked_manifest,
)


@pytest.mark.parametrize(
    'more',
    [(), pytest.param(('--load_from', 'checkpoints/r/step_0'), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize('make', STRANGERS)
def test_what_is_not_of_a_run_stays_where_it_is(trained, begun, make, more):
    "The run resumes, prunes and goes back beside it, and comes to the same."
    ours = held('checkpoints')
    make(begun)
    strange = held('.')
    for name in ours:
        strange.pop(Path('checkpoints') / name)
    if more and (begun / 'step_1').exists():  # the way from step_0 leads over it
        with pytest.raises(
            UsageError,
            match='step_1 is in the way of a checkpoint, and is not of a run: move it elsewhere',
        ):
            go(Path(), '--resume', 'True', *more)
        assert (
            held('checkpoints').items() >= ours.items()
            and {name: held('.').get(name) for name in strange} == strange
        )
        return
    assert (
        go(Path(), '--resume', 'True', '--max_keep_ckpts', '1', *more)[0]
        == trained[1][0]
    )
    after = held('.')
    assert {name: after.get(name) for name in strange} == strange
    if more:
        assert any((begun / f'abandoned_{n}' / 'step_2').is_dir() for n in (1, 2))


@pytest.mark.parametrize(
    'name',
    [
        'config.yaml',
        'log.jsonl',
        'curves.png',
        'record.md',
        'rows.parquet',
        'held_out.parquet',
        'classify.yaml',
    ],
)
def test_a_new_run_replaces_nobodys_files(trained, begun, name):
    "Not in a directory in which none has begun; the file of settings that it is given may lie there, and is kept."
    (place := Path('checkpoints/new')).mkdir()
    (place / name).write_text('mine')
    before = held('.')
    with pytest.raises(
        UsageError,
        match=f'{name} would be replaced, and is not of a run: move it elsewhere',
    ):
        go(Path(), '--run_name', 'new')
    assert held('.') == before
    check_new(place, place / name)
    (place / 'status').write_text('failed')  # of a run that had no checkpoint yet
    check_new(place)


def test_the_directory_of_a_run_may_be_a_link(trained, begun):
    "On a larger disk, and so may the directory above it; the path may be relative."
    begun.rename('larger')
    begun.symlink_to('../larger')
    begun.parent.rename('above')
    begun.parent.symlink_to('above')
    assert go(Path(), '--resume', 'True') == trained[1]
    assert Path('larger/step_4').is_dir()


# --- nanovlm runs DIR --delete_...


def runs(capsys, *words):
    "What the command says, and its exit code."
    try:
        code = main(['runs', *words])
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    return code, said.out + said.err


def test_nothing_is_deleted_where_no_run_is(begun, capsys):
    Path('mine/config.yaml').unlink()
    before = held('.')
    for words in (['--delete_older_than', '0'], ['--delete_abandoned']):
        code, said = runs(capsys, 'mine', *words)
        assert (
            code == 2
            and 'mine is no run, nothing in it is deleted' in said
            and 'deleted step' not in said
        )
    assert held('.') == before


def test_only_what_a_run_has_made_is_deleted(begun, capsys):
    "Old checkpoints go; a step without our manifest, one with somebody's file in it, links and strangers' directories stay and are named."
    shutil.copytree(begun / 'step_2', begun / 'step_1')  # as good as one of ours
    for name in ('step_3', 'step_4'):
        shutil.copytree('mine/step_3', begun / name)
    (begun / 'step_0' / 'thesis.tex').write_text('mine')
    (begun / 'step_5').symlink_to('../../mine/checkpoint')
    (begun / 'step_6').write_text('mine')
    for n in (1, 2):
        (begun / f'abandoned_{n}').mkdir()
    (begun / 'abandoned_1' / 'thesis.tex').write_text('mine')
    shutil.copytree(begun / 'step_2', begun / 'abandoned_2' / 'step_2')
    (begun / 'abandoned_2' / 'log.jsonl').write_text('{"step": 2}\n')
    write_manifest(begun / 'abandoned_2', deep=False)
    (begun / 'abandoned_3').symlink_to('../../mine/notes')
    before = held('.')
    code, said = runs(
        capsys, str(begun), '--delete_older_than', '0', '--delete_abandoned'
    )
    deleted, kept = (
        sorted(re.findall(f'^{word} (\\w+)', said, re.M))
        for word in ('deleted', 'kept')
    )
    assert (code, deleted, kept) == (
        0,
        ['abandoned_2', 'step_1', 'step_2'],
        ['abandoned_1', 'step_0', 'step_3', 'step_4'],
    ), said  # step_2 of abandoned_2
    after = held('.')
    gone = {name.parts[2] for name in before.keys() - after.keys()}
    assert gone == {'step_1', 'abandoned_2'} and all(
        after[name] == before[name] for name in after
    )


@pytest.mark.skipif(os.geteuid() == 0, reason='root can delete anything')
def test_what_cannot_be_deleted_is_named(begun, capsys):
    (begun / 'step_0' / 'optimizer').chmod(0o500)
    code, said = runs(capsys, str(begun), '--delete_older_than', '0')
    assert code == 0 and 'step_0.deleted.nanovlm.tmp cannot be deleted' in said


def test_a_model_that_is_written_into_a_folder_replaces_no_more_than_its_files(begun):
    (folder := Path('mine/out')).mkdir()
    for name in (
        'tokenizer_notes.json',
        'model_notes.safetensors',
        'model-00001-of-00002.safetensors',
    ):
        (folder / name).write_text('mine')
    VisionLanguageModel.from_pretrained(begun / 'step_2').save_pretrained(folder)
    assert (folder / 'tokenizer_notes.json').exists() and (
        folder / 'model_notes.safetensors'
    ).exists()
    assert not (
        folder / 'model-00001-of-00002.safetensors'
    ).exists()  # or two models would lie there
    before = held('.')
    with pytest.raises(UsageError, match='mine/out is not empty: give a new directory'):
        write_tasks(folder, 1, 1)
    for out in ('mine/out', 'dangling'):
        if out == 'dangling':
            Path(out).symlink_to('nowhere')
        with pytest.raises(SystemExit):
            main(['export', str(begun), out, '--format', 'nanovlm'])
    os.unlink('dangling')
    assert held('.') == before


@pytest.mark.parametrize('name', ['model.safetensors', 'tokenizer.json'])
@pytest.mark.parametrize('manifest', [True, False])
def test_a_pipe_in_a_checkpoint_is_named(begun, name, manifest):
    if not manifest:
        (begun / 'step_2' / 'manifest.json').unlink()
    pipe(f'step_2/{name}')(begun)
    with pytest.raises(UsageError, match=f'{name} is a pipe or a device'):
        VisionLanguageModel.from_pretrained(begun / 'step_2')
