"The gate notices what was not generated, in a clone that is thrown away."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MODULE, NOTEBOOK, OTHER = Path('nanovlm_nb/core/config.py'), Path('nbs/02_core.config.ipynb'), Path('nanovlm_nb/core/dist.py')


def sh(clone: Path, *command: str) -> subprocess.CompletedProcess:
    "Run a command in the clone, with the tools of this environment."
    env = {**os.environ, 'PATH': f'{BIN}:{os.environ["PATH"]}', 'GIT_AUTHOR_NAME': 'a', 'GIT_COMMITTER_NAME': 'a', 'GIT_AUTHOR_EMAIL': 'a@b', 'GIT_COMMITTER_EMAIL': 'a@b'}
    return subprocess.run(command, cwd=clone, env=env, text=True, capture_output=True, timeout=300)


def make(clone: Path) -> subprocess.CompletedProcess: return sh(clone, 'make', 'generated')


@pytest.fixture(scope='module')
def first(tmp_path_factory):
    "A clone in which everything generated is committed, and what `make generated` said there before."
    if sh(ROOT, 'git', 'rev-parse', '--git-dir').returncode: pytest.skip('no git checkout')
    clone = tmp_path_factory.mktemp('gate')/'clone'
    assert sh(ROOT, 'git', 'clone', '-q', str(ROOT), str(clone)).returncode == 0
    done = make(clone)
    sh(clone, 'git', 'add', '-A')
    sh(clone, 'git', 'commit', '-qm', 'settled')
    return clone, done


@pytest.fixture
def clone(first):
    "The settled clone, put back afterwards."
    settled, _ = first
    head = sh(settled, 'git', 'rev-parse', 'HEAD').stdout.strip()
    yield settled
    sh(settled, 'git', 'reset', '-q', '--hard', head)
    sh(settled, 'git', 'clean', '-qfd')


def test_passes_when_nothing_was_touched(first):
    _, done = first
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_hooks_that_contributing_names_change_nothing(clone):
    assert 'nbdev_install_hooks' in (clone/'CONTRIBUTING.md').read_text() and sh(clone, 'nbdev_install_hooks').returncode == 0
    assert sh(clone, 'git', 'status', '--porcelain').stdout == ''


def test_planted_edit_of_a_module_fails(clone):
    file = clone/MODULE
    file.write_text(file.read_text() + 'planted = 1\n')
    done = make(clone)
    assert done.returncode != 0 and str(MODULE) in done.stdout and 'planted = 1' in done.stdout


def test_what_is_committed_but_not_exported_or_not_cleaned_fails(clone):
    "An edit of a module, a cell that was not exported, and a cell that was not cleaned: all three are shown."
    (clone/OTHER).write_text((clone/OTHER).read_text() + 'by_hand = 1\n')
    file = clone/NOTEBOOK
    nb = json.loads(file.read_text())
    next(c for c in nb['cells'] if c['cell_type'] == 'code')['execution_count'] = 7
    nb['cells'].insert(-1, dict(cell_type='code', id='planted0', metadata={}, execution_count=None, outputs=[], source=['#| export\n', 'planted = 1']))
    file.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + '\n')
    sh(clone, 'git', 'commit', '-qam', 'planted')
    done = make(clone)
    assert done.returncode != 0
    assert all(line in done.stdout for line in ('-by_hand = 1', '+planted = 1', '-   "execution_count": 7,')), done.stdout[-2000:]


@pytest.mark.parametrize('names', [['nbs/planted.css', 'nanovlm_nb/planted.txt'], ['nanovlm_nb/planted.py']])
def test_file_that_was_not_committed_fails(clone, names):
    for name in names: (clone/name).write_text('')
    done = make(clone)
    assert done.returncode != 0
    if names[0].endswith('.py'): assert 'planted' in done.stdout
    else: assert 'not committed: ' in done.stdout and all(name in done.stdout for name in names)


@pytest.mark.parametrize('python, message', [('no-such-python', 'missing: Python 3.10 to 3.13'), ('', 'missing: Python 3.10 to 3.13')])
def test_missing_python_is_said_in_one_line(clone, python, message):
    done = sh(clone, 'make', 'test', f'PYTHON={python}')
    assert done.returncode != 0
    assert [line for line in done.stdout.splitlines() if line][0].startswith(message)


def test_missing_venv_is_said_in_one_line(clone, tmp_path):
    fake = tmp_path/'python3'
    fake.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; *) exec {sys.executable} "$@";; esac\n')
    fake.chmod(0o755)
    done = sh(clone, 'make', 'train', f'PYTHON={fake}')
    assert done.returncode != 0 and done.stdout.startswith('missing: the venv module')


def test_continuous_integration_runs_the_command_of_the_readme():
    assert 'make test' in (ROOT/'README.md').read_text()
    assert (ROOT/'.ci'/'run').read_text().splitlines()[-1] == 'exec make test'
    assert os.access(ROOT/'.ci'/'run', os.X_OK)
    assert 'run: .ci/run' in (ROOT/'.github'/'workflows'/'test.yaml').read_text()
