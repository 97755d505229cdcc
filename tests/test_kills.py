"A run that is killed at any moment goes on as if nothing had happened."
import re
import signal

import pytest
from kills import disturbed, undisturbed


@pytest.fixture(scope='module')
def whole(tmp_path_factory): return undisturbed(tmp_path_factory.mktemp('whole'), 1, 1, 14)


@pytest.mark.parametrize('how, kills, fresh', [(signal.SIGKILL, 3, False), (signal.SIGTERM, 1, True)])
def test_same_run(whole, tmp_path, how, kills, fresh):
    "Losses, gradients, samples and weights, bit for bit. SIGTERM reaches the loader workers too."
    killed, when = disturbed(tmp_path, kills, 1, 1, 14, seed=3, how=how, fresh=fresh)
    assert killed == whole, f'killed {when}\n{(tmp_path/"stderr").read_text()[-3000:]}'
    assert [f['step'] for f in killed[0] if 'batch_loss' in f] == list(range(1, 15))
    begun = re.findall(r'Auto resumed from the latest checkpoint \S*step_(\d+)', (tmp_path/'checkpoints'/'killed'/'train.log').read_text())
    assert begun and int(begun[0]) > 0, f'killed {when}: no start went on from anything'
