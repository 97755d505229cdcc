"An update without a picture leaves the parts that look at pictures as they are, however it is split."
import json
import sys
from pathlib import Path

import pytest
from commands import run


@pytest.fixture(scope='module')
def found(tmp_path_factory):
    "Sums of weights: alone with four micro-batches, and on two ranks in three kinds of sharding."
    cwd, script = tmp_path_factory.mktemp('text_only'), Path(__file__).with_name('text_only.py')
    run([sys.executable, script, cwd/'alone', 'ddp'], cwd)
    run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2, script, cwd/'two', 'ddp', 'zero2', 'zero3'], cwd)
    return dict(alone=json.loads((cwd/'alone').read_text())['ddp'], **json.loads((cwd/'two').read_text()))


@pytest.mark.parametrize('how', ['alone', 'ddp', 'zero2', 'zero3'])
def test_text_only_updates_decay_nothing_that_looks_at_pictures(found, how):
    "The second update changes the language model only; the third, with pictures on one rank of two, changes all."
    start, first, text, last = found[how]
    for part in ('vision', 'projector'):
        assert first[part] != start[part] and text[part] == first[part] and last[part] != text[part]
    assert text['language'] != first['language']
    for a, b in zip(found['alone'], found[how]): assert b == pytest.approx(a, rel=1e-6)
