"A run with `--deterministic` has only algorithms that repeat themselves, to its end; one that does not is an error."

import os

import pytest
import torch
from commands import TINY, record, updates

from nanovlm_nb.training import trainer
from nanovlm_nb.training.precision import WORKSPACE
from nanovlm_nb.train import main

FLAGS = [
    str(f)
    for f in [
        *TINY,
        '--max_training_steps',
        3,
        '--eval_interval',
        3,
        '--ask_samples',
        2,
        '--use_lmms_eval',
        False,
    ]
]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(WORKSPACE, raising=False)


def test_a_strict_run_trains_validates_saves_asks_and_gives_the_bits_of_a_plain_one(
    monkeypatch,
):
    "Under errors, not warnings, and with memory that is NaN before it is written; on a CPU the plain run has the same bits."
    seen = []
    real = trainer.train_step

    def noted(run, update):
        seen.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                os.environ.get(WORKSPACE),
            )
        )
        return real(run, update)

    monkeypatch.setattr(trainer, 'train_step', noted)
    for name, more in (('a', ['--deterministic']), ('b', [])):
        assert main([*FLAGS, '--run_name', name, *more]) == 0
    assert seen == [(True, False, ':4096:8')] * 3 + [(False, False, None)] * 3
    assert (
        record('checkpoints/a') == record('checkpoints/b')
        and len(updates('checkpoints/a')) == 3
    )


def test_an_operation_without_a_twin_ends_the_run(monkeypatch):
    "With torch's own sentence, and the switches are as they were."
    real = trainer.train_step

    def adding_somehow(run, update):
        if run.step == 1:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        return real(run, update)

    monkeypatch.setattr(trainer, 'train_step', adding_somehow)
    with pytest.raises(
        RuntimeError, match='put_ does not have a deterministic implementation'
    ):
        main([*FLAGS, '--run_name', 'r', '--deterministic'])
    assert not torch.are_deterministic_algorithms_enabled()
