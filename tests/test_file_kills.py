"A run that is killed at any file operation goes on as if nothing had happened, and leaves nothing lying about."

import json
import sys
from pathlib import Path

import pytest
from commands import run


def killed_at(which, tmp_path, timeout):
    "What `file_kills.py` found."
    return json.loads(
        run(
            [sys.executable, Path(__file__).with_name('file_kills.py'), which],
            tmp_path,
            timeout=timeout,
        ).stdout.splitlines()[-1]
    )


def test_weights_log_and_files_are_those_of_the_run_that_nobody_killed(tmp_path):
    "Inside a save, between two, and in the last lines."
    found = killed_at('.3,.96', tmp_path, 240)
    assert found['operations'] > 100 and len(found['found']) == 2
    assert not any(found['found'].values()), found['found']


@pytest.mark.slow
def test_at_every_fifth_file_operation(tmp_path):
    found = killed_at('5', tmp_path, 3600)
    assert {k: v for k, v in found['found'].items() if v} == {}
