"Fixtures that every test may ask for, and the order of the files."

import gc
import os
import signal
from pathlib import Path

import commands
import pytest

#: the files that take longest, the longest first: with several workers none of them is begun when all others are done
LONG = (
    'stages',
    'sharding',
    'stream',
    'classify',
    'classify_guide',
    'docs',
    'run',
    'evaluate',
    'packing_certificate',
    'endings',
    'elastic',
    'concepts',
    'check',
    'own_parts',
    'inspect',
    'export',
    'histories',
    'bad_updates',
    'plan',
    'layering',
    'cli',
    'gate',
    'jsonl',
    'misuse',
    'flops',
    'logs',
    'lora',
    'failing_producer',
    'runs',
    'start',
    'damage',
    'packing',
    'trainer',
    'compiled',
    'file_kills',
    'types',
)
ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption(
        '--slow', action='store_true', help='also run tests that take minutes'
    )


def pytest_configure(config):
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # else what a script has started with & would pass on that it is ignored
    config.addinivalue_line('markers', 'slow: takes minutes; runs with --slow')
    config.option.loadscopereorder = (
        False  # xdist would begin with the files of many tests
    )
    if getattr(config.option, 'numprocesses', None) and not hasattr(
        config, 'workerinput'
    ):
        os.environ[commands.SHARED_WARM] = commands.warm().python


def pytest_collection_modifyitems(config, items):
    place = {f'test_{name}': n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
    if config.getoption('--slow'):
        return
    for item in items:
        if 'slow' in item.keywords:
            item.add_marker(
                pytest.mark.skip(
                    reason=f'takes minutes: pytest --slow {item.path.relative_to(ROOT)}'
                )
            )


def pytest_collection_finish():
    "What has been imported stays: to search it for garbage again and again takes seconds."
    gc.freeze()


def pytest_sessionfinish(session):
    "End the warm python, if some test has started it."
    if commands.warm.cache_info().currsize:
        commands.warm().close()


@pytest.fixture(scope='session')
def root() -> Path:
    "The checkout: notebooks, modules, settings."
    return ROOT


@pytest.fixture(scope='session')
def golden() -> Path:
    "What the nanoVLM reference and transformers computed on tiny random weights; its README.md says what is what."
    return ROOT / 'tests' / 'data' / 'golden'


@pytest.fixture(scope='module')
def one_thread():
    "Tensors this small are slowed down by threads, most of all on a busy machine."
    import torch  # not above: the process that only hands out the tests needs none of it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
