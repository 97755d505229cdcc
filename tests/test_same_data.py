"A run that was killed goes on with the data it had: positions of one's own come back as they were, and rows that are others, or in another order, are refused."

import json
import signal
import subprocess
import sys

import pytest
from commands import SHORT, nanovlm, record

from nanovlm_nb.core.run_dir import write_manifest

SCRIPT = """
import os, random, signal, sys

import numpy as np

from nanovlm_nb import Hook, train
from nanovlm_nb.data.shapes import shapes_dataset

class Kill(Hook):
    "Ends the process at once, as a power cut does."
    def after_update(self, trainer, figures):
        if trainer.step == 3: os.kill(os.getpid(), signal.SIGKILL)

class Lazy:
    "Rows by number, by code of one's own."
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return self.rows[i]

class Drawn(Lazy):
    "Rows that say something else each time."
    def __getitem__(self, i):
        turn = dict(user='?', assistant=f'{i} or {random.random()}')
        return dict(images=[], texts=[turn])

class Source(Lazy):
    "Positions and a description as a user writes them."
    def __init__(self, rows, kind): self.rows, self.kind = rows, kind
    def rows_of(self, lane, lanes, epoch, at=None):
        if at is not None: at = at[1] if self.kind == 'tuple' else int(at)
        for i in range(lane if at is None else at + lanes, len(self.rows), lanes):
            kinds = dict(int64=np.int64(i), tuple=('row', np.int32(i)), bytes=b'1')
            yield kinds[self.kind], self.rows[i]
    def describe(self): return dict(files=('a', 'b'), rows=np.int64(len(self.rows)))

def rows_of(kind):
    rows = [*shapes_dataset(60)]
    if kind == 'shuffled': random.Random(1).shuffle(rows)
    if kind in ('int64', 'tuple', 'bytes'): return Source(rows, kind)
    from nanovlm_nb.data.sources import MapSource
    if kind in ('lazy', 'drawn'): return MapSource((Drawn if kind == 'drawn' else Lazy)(rows))
    return rows

if __name__ == '__main__':
    name, kind, how, *steps = sys.argv[1:]
    train(rows_of(kind), 'tiny', val_rows=[*shapes_dataset(8, 'validation')], run_name=name,
        hooks=[Kill()] * (how == 'kill'), resume=how == 'resume', quiet=True, async_save=False,
        max_training_steps=6, save_interval=2, eval_interval=6, max_keep_ckpts=-1, ask_samples=0,
        num_of_sequences=2, batch_size=2, gradient_accumulation_steps=1, num_workers=0, dtype='float32')
"""


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    "Starts the script; the directory of its run, or what it said when it was refused."
    cwd = tmp_path_factory.mktemp('same')
    (cwd / 'mine.py').write_text(SCRIPT)

    def begin(name, kind, how='new', refused=False):
        words = [sys.executable, 'mine.py', name, kind, how]
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
        codes = dict(kill=-signal.SIGKILL)
        assert done.returncode == (1 if refused else codes.get(how, 0)), done.stderr
        return done.stderr if refused else cwd / 'checkpoints' / name

    begin.cwd = cwd
    return begin


@pytest.fixture(scope='module')
def whole(start):
    "Of the same rows, in a list."
    return record(start('whole', 'list'))


@pytest.mark.parametrize('kind', ['int64', 'tuple'])
def test_a_position_of_ones_own_comes_back_as_it_was(start, kind):
    whole = record(start(f'whole_{kind}', kind))
    killed = start(f'killed_{kind}', kind, 'kill')
    state = json.loads((killed / 'step_2' / 'trainer_state.json').read_text())['data']
    assert state['source'] == dict(files=['a', 'b'], rows=60)
    assert all(at is not None for _, at, *_ in state['states'].values())
    assert record(start(f'killed_{kind}', kind, 'resume')) == whole


def test_a_position_that_no_file_holds_is_refused_before_the_first_update(start):
    said = start('bytes', 'bytes', refused=True)
    assert "the position behind a row of the source holds b'1', a bytes" in said


def test_the_same_rows_go_on(start, whole):
    start('killed', 'list', 'kill')
    assert record(start('killed', 'list', 'resume')) == whole
    lazy = record(start('whole_lazy', 'lazy'))
    start('killed_lazy', 'lazy', 'kill')
    assert record(start('killed_lazy', 'lazy', 'resume')) == lazy


def test_rows_that_the_run_has_kept_are_the_same(start, whole):
    "The command goes on with RUN/rows.parquet where Python was killed."
    killed = start('by_command', 'list', 'kill')
    nanovlm(['train', *'--run_name by_command --resume True'.split()], start.cwd)
    assert (killed / 'rows.parquet').is_file() and record(killed) == whole


@pytest.mark.parametrize('kind', ['list', 'lazy'])
def test_rows_in_another_order_are_refused(start, kind):
    name = f'shuffled_{kind}'
    killed = start(name, kind, 'kill')
    said = start(name, 'shuffled', 'resume', refused=True)
    assert 'source.digest: the rows are others than before, or in another order' in said
    file = killed / 'step_2' / 'trainer_state.json'
    state = json.loads(file.read_text())
    assert state['data']['source'].pop('digest')
    file.write_text(json.dumps(state))  # as an older version has saved it
    write_manifest(file.parent)
    assert start(name, 'shuffled', 'resume') == killed


def test_rows_that_are_drawn_have_no_digest_and_go_on(start):
    killed = start('drawn', 'drawn', 'kill')
    state = json.loads((killed / 'step_2' / 'trainer_state.json').read_text())
    assert state['data']['source']['digest'] is None
    start('drawn', 'drawn', 'resume')


def lines_of(begin, end):
    turn = '{"texts": [{"user": "Which number?", "assistant": "%d"}]}\n'
    return ''.join(turn % i for i in range(begin, end))


@pytest.fixture(scope='module')
def read_from(tmp_path_factory):
    "A run whose rows are in a file; answers what commands say about it, asked in one of three directories."
    cwd = tmp_path_factory.mktemp('file')
    for place, begin in (('.', 0), ('other', 100)):
        (cwd / place / 'rows').mkdir(parents=True)
        (cwd / place / 'rows' / 't.jsonl').write_text(lines_of(begin, begin + 40))
    (cwd / 'none').mkdir()
    data = '--train_dataset_path rows/t.jsonl --data_cutoff_idx None --val_size 8'
    nanovlm(['train', *SHORT, *data.split(), '--run_name', 'r'], cwd)

    def say(place):
        run = cwd / 'checkpoints' / 'r'
        longer = ['--max_training_steps', '6', '--resume', 'True']
        start = ['--config', run / 'config.yaml', '--vlm_checkpoint_path', run.parent]
        commands = dict(
            eval=['eval', run],
            check=['check', run, '--max_training_steps', '6'],
            train=['train', *start, '--run_name', 'r', *longer],
        )
        said = {}
        for name, words in commands.items():
            done = nanovlm(words, cwd / place, check=False)
            assert done.returncode == (1 if name == 'check' else 2), done.stdout
            said[name] = done.stdout if name == 'check' else done.stderr
        return said

    say.file = cwd / 'rows' / 't.jsonl'
    return say


def test_rows_that_a_run_has_learned_do_not_become_held_out(read_from):
    "The file has grown: `eval` and `check` say what a resume says; restored, the same rows are asked about."
    read_from.file.write_text(lines_of(0, 41))
    said = read_from('.')
    read_from.file.write_text(lines_of(0, 40))
    refusal = said['train'].partition('error: ')[2].strip()
    assert 'source.rows was 40, is 41; source.digest: the rows are others' in refusal
    assert f'FAIL  resume            {refusal}\n' in said['check']
    assert 'source.rows was 40, is 41; source.digest' in said['eval']
    assert 'restore the file, or name other rows, --data FILE' in said['eval']
    for words, answer in (
        (['eval', 'checkpoints/r'], 'blind guess'),
        (['check', 'checkpoints/r', '--max_training_steps', '6'], ' 0 FAIL'),
    ):
        assert answer in nanovlm(words, read_from.file.parent.parent).stdout


@pytest.mark.parametrize(
    ['place', 'why'],
    [
        ('other', 'a relative path: go where the run began'),
        (
            'none',
            "one in a run's settings is relative to the directory in which the run began",
        ),
    ],
)
def test_a_relative_path_is_that_of_the_directory_in_which_the_run_began(
    read_from, place, why
):
    assert all(why in text for text in read_from(place).values())
