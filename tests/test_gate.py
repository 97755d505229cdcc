"The gate notices what was not generated, in a clone that is thrown away."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
NOTEBOOK, OTHER = Path('nbs/02_core.config.ipynb'), Path('nanovlm_nb/core/dist.py')


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
