"Fixtures that every test may ask for."
from pathlib import Path

import commands
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='also run tests that take minutes')


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: takes minutes; runs with --slow')


def pytest_collection_modifyitems(config, items):
    if config.getoption('--slow'): return
    for item in items:
        if 'slow' in item.keywords: item.add_marker(pytest.mark.skip(reason=f'takes minutes: pytest --slow {item.path.relative_to(ROOT)}'))


def pytest_sessionfinish(session):
    "End the warm python, if some test has started it."
    if commands.warm.cache_info().currsize: commands.warm().close()


@pytest.fixture
def warm_executable(monkeypatch):
    "What starts `sys.executable` in this process gets the warm python, see commands.py."
    monkeypatch.setenv('PYTHON_EXEC', commands.warm().python)
    monkeypatch.setattr('sys.executable', commands.warm().python)


@pytest.fixture(scope='session')
def root() -> Path:
    "The checkout: notebooks, modules, settings."
    return ROOT


@pytest.fixture(scope='session')
def golden() -> Path:
    "What the nanoVLM reference and transformers computed on tiny random weights; its README.md says what is what."
    return ROOT/'tests'/'data'/'golden'


@pytest.fixture(scope='module')
def one_thread():
    "Tensors this small are slowed down by threads, most of all on a busy machine."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
