"The gate notices what was not generated, in a clone that is thrown away."

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = Path('nbs/03_core.config.ipynb')
OTHER = Path('nanovlm_nb/core/dist.py')


def sh(clone: Path, *command: str) -> subprocess.CompletedProcess:
    "Run a command in the clone, with the tools of this environment."
    env = {
        **os.environ,
        'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}',
        'GIT_AUTHOR_NAME': 'a',
        'GIT_COMMITTER_NAME': 'a',
        'GIT_AUTHOR_EMAIL': 'a@b',
        'GIT_COMMITTER_EMAIL': 'a@b',
    }
    return subprocess.run(
        command, cwd=clone, env=env, text=True, capture_output=True, timeout=300
    )


def test_what_is_committed_but_not_exported_or_not_cleaned_fails(tmp_path):
    "An untouched clone passes, also with the hooks of CONTRIBUTING. An edit of a module, a cell that was not exported, and one that was not cleaned: all three are shown."
    if sh(ROOT, 'git', 'rev-parse', '--git-dir').returncode:
        pytest.skip('no git checkout')
    clone = tmp_path / 'clone'
    assert sh(ROOT, 'git', 'clone', '-q', str(ROOT), str(clone)).returncode == 0
    done = sh(clone, 'make', 'generated')
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        sh(clone, 'nbdev_install_hooks').returncode == 0
        and not sh(clone, 'git', 'status', '--porcelain').stdout
    )
    (clone / OTHER).write_text((clone / OTHER).read_text() + 'by_hand = 1\n')
    nb = json.loads((clone / NOTEBOOK).read_text())
    next(c for c in nb['cells'] if c['cell_type'] == 'code')['execution_count'] = 7
    nb['cells'].insert(
        -1,
        dict(
            cell_type='code',
            id='planted0',
            metadata={},
            execution_count=None,
            outputs=[],
            source=['#| export\n', 'planted = 1'],
        ),
    )
    (clone / NOTEBOOK).write_text(json.dumps(nb, indent=1, ensure_ascii=False) + '\n')
    sh(clone, 'git', 'commit', '-qam', 'planted')
    done = sh(clone, 'make', 'generated')
    assert done.returncode != 0
    assert all(
        line in done.stdout
        for line in ('-by_hand = 1', '+planted = 1', '-   "execution_count": 7,')
    ), done.stdout[-2000:]
