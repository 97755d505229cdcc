"Logs of several processes, and with the real wandb where it is off or cannot start; what wandb and TensorBoard get, see test_run.py."

import pytest

from nanovlm_nb.core.dist import Dist, launch
from nanovlm_nb.core.clock import over_ranks
from nanovlm_nb.core.logs import RunLog
from nanovlm_nb.core.run_dir import read_log


@pytest.mark.parametrize(
    'env, complaints',
    [
        (dict(WANDB_MODE='disabled'), 0),
        (dict(WANDB_BASE_URL='not a url', WANDB_MODE='online'), 1),
    ],
)
def test_wandb_that_is_off_or_cannot_start_costs_no_figure(
    tmp_path, monkeypatch, env, complaints
):
    "The second is sent to a server that is not there; that is said once."
    for name, value in dict(
        WANDB_SILENT='true', WANDB_API_KEY='', NETRC=str(tmp_path / 'netrc'), **env
    ).items():
        monkeypatch.setenv(name, value)
    with RunLog(
        tmp_path, Dist(), ['wandb'], dict(lr=0.1), 'a_run', None, 'pictures'
    ) as log:
        for step in range(1, 31):
            log.log(dict(batch_loss=1 / step, diverged=float('nan')), step)
    assert (
        not list(tmp_path.glob('**/*.wandb'))
        and len(read_log(tmp_path / 'log.jsonl')) == 30
    )
    assert (tmp_path / 'train.log').read_text().count(
        'wandb failed and is off'
    ) == complaints


def test_four_ranks_gather_and_one_writes(tmp_path):
    def rank(dist):
        values = dict(data_load_time=[float(x) for x in range(dist.rank + 1)])
        with RunLog(tmp_path, dist, quiet=True) as log:
            log.log((report := over_ranks(values, dist)) | dict(rank=dist.rank), 100)
        return report, over_ranks(values, dist)

    of_all = {
        f'training_stats/{kind}_data_load_time': x
        for kind, x in dict(avg=1.0, max=3.0, min=0.0).items()
    }
    assert launch(rank, 4) == [(of_all, {})] * 4 and read_log(
        tmp_path / 'log.jsonl'
    ) == [of_all | dict(rank=0, step=100)]
