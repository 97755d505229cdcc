"Logs with the real wandb (offline), with TensorBoard's own reader, over several processes, and without wandb."
import sys

import pytest
from commands import TINY, run, train
from wandb_reader import read_wandb

from nanovlm_nb.core.dist import Dist, destroy_dist, init_dist
from nanovlm_nb.core.logs import RunLog, over_ranks
from nanovlm_nb.core.run_dir import read_log


def short_run(run_dir, fails=False):
    "Updates enough for more than one 32 KiB block of wandb's file, a validation, a late evaluation."
    with RunLog(run_dir, Dist(), ['wandb'], dict(lr=.1), 'a_run', None, 'pictures', every=1000) as log:
        for step in range(1, 301): log.log({f'figure_{i}': step+i for i in range(8)} | dict(batch_loss=1/step, batch_digest='3f0a'), step)
        log.log(dict(val_loss=.5, nothing=None, diverged=float('nan')), 300)
        log.log({'lmms_eval/mmstar': .25, '<lmms-eval-step>': 3}, 300)
        if fails: raise OSError('disk full')


@pytest.fixture
def no_login(monkeypatch, tmp_path):
    "A machine where nobody has logged in to wandb."
    for name in ('WANDB_MODE', 'WANDB_API_KEY'): monkeypatch.delenv(name, raising=False)
    for name in ('NETRC', 'WANDB_CONFIG_DIR'): monkeypatch.setenv(name, str(tmp_path/name))
    monkeypatch.setenv('WANDB_SILENT', 'true')


@pytest.mark.parametrize('fails', [False, True])
def test_offline_run_can_be_read_back(tmp_path, no_login, fails):
    if not fails: short_run(tmp_path/'run')
    else: pytest.raises(OSError, short_run, tmp_path/'run', True)
    run = read_wandb(tmp_path/'run')
    assert (run.project, run.name, run.config['lr'], run.exit_code) == ('pictures', 'a_run', .1, int(fails))
    assert run.series('batch_loss') == {s: 1/s for s in range(1, 301)} and not run.series('batch_digest')
    assert run.series('val_loss') == {300: .5} and not run.series('nothing') and any('diverged' in row for row in run.history)
    assert [list(run.series(name).values()) for name in ('lmms_eval/mmstar', '<lmms-eval-step>')] == [[.25], [3]]
    assert run.x_axes['lmms_eval/*'] == '<lmms-eval-step>'


@pytest.mark.parametrize('env, complaints', [(dict(WANDB_MODE='disabled'), 0), (dict(WANDB_BASE_URL='not a url', WANDB_MODE='online'), 1)])
def test_wandb_that_is_off_or_cannot_start_costs_no_figure(tmp_path, no_login, monkeypatch, caplog, env, complaints):
    "The second is sent to a server that is not there; that is said once."
    for name, value in env.items(): monkeypatch.setenv(name, value)
    short_run(tmp_path)
    assert not list(tmp_path.glob('**/*.wandb')) and len(read_log(tmp_path/'log.jsonl')) == 302
    assert sum('wandb failed and is off' in m for m in caplog.messages) == (tmp_path/'train.log').read_text().count('wandb failed and is off') == complaints


def one_rank(run_dir):
    "Every rank collects, all exchange, one writes."
    dist = init_dist('cpu', timeout_s=60)
    values = dict(data_load_time=[float(x) for x in range(dist.rank+1)])
    with RunLog(run_dir, dist) as log: log.log((report := over_ranks(values, dist)) | dict(rank=dist.rank), 100)
    assert dist.gather(report) == [report]*4 and over_ranks(values, dist) == {}
    destroy_dist()


def test_four_ranks_gather_and_one_writes(tmp_path):
    run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 4, __file__, tmp_path/'run'], tmp_path)
    of_all = {f'training_stats/{kind}_data_load_time': x for kind, x in dict(avg=1., max=3., min=0.).items()}
    assert read_log(tmp_path/'run'/'log.jsonl') == [of_all | dict(rank=0, step=100)]


if __name__ == '__main__': one_rank(sys.argv[1])


def test_tensorboard_shows_what_the_record_has_after_going_back(tmp_path):
    "Six updates; back to the third with another rate. TensorBoard's own reader sees each figure of log.jsonl, each step once."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    flags = [*TINY, '--run_name', 'r', '--ask_samples', 0, '--tracker', 'tensorboard']
    train(flags, tmp_path)
    train([*flags, '--resume', 'True', '--load_from', 'checkpoints/r/step_3', '--force_resume', 'True', '--lr_mp', '0.01'], tmp_path)
    run_dir = tmp_path/'checkpoints'/'r'
    records, board = read_log(run_dir/'log.jsonl'), EventAccumulator(str(run_dir/'tensorboard')).Reload()
    names = {k for r in records for k, v in r.items() if isinstance(v, (int, float)) and k != 'step'}
    assert {'batch_loss', 'val_loss', 'lr_MP'} <= names == set(board.Tags()['scalars'])
    for name in names:
        assert {e.step: e.value for e in board.Scalars(name)} == pytest.approx({r['step']: r[name] for r in records if r.get(name) is not None}, rel=1e-6)
    assert [e.step for e in board.Scalars('batch_loss')] == [1, 2, 3, 4, 5, 6]
