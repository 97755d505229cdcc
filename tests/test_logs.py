"Logs with the real wandb (offline), over several processes, and without wandb."
import subprocess
import sys

import pytest
from commands import TINY, run, train
from wandb_reader import read_wandb

from nanovlm_nb.core.config import TrainConfig, VLMConfig
from nanovlm_nb.core.dist import Dist, destroy_dist, init_dist
from nanovlm_nb.core.logs import RunLog, Stats
from nanovlm_nb.core.run_dir import read_log


@pytest.fixture
def no_login(monkeypatch, tmp_path):
    "A machine where nobody has logged in to wandb."
    for name in ('WANDB_MODE', 'WANDB_API_KEY'): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('NETRC', str(tmp_path/'netrc'))
    monkeypatch.setenv('WANDB_CONFIG_DIR', str(tmp_path/'settings'))
    monkeypatch.setenv('WANDB_SILENT', 'true')


def short_run(run_dir, project='nanoVLM'):
    "Five updates, a validation, a late evaluation."
    configs = dict(VLMConfig=VLMConfig().to_dict(), TrainConfig=TrainConfig().to_dict())
    with RunLog(run_dir, Dist(), ['wandb'], configs, 'a_run', None, project, total_steps=5) as log:
        for step in range(1, 6): log.log(dict(batch_loss=1/step, grad_norm=2., batch_digest='3f0a'), step)
        log.log(dict(val_loss=.5, nothing=None, diverged=float('nan')), 5)
        log.log({'lmms_eval/mmstar': .25, '<lmms-eval-step>': 3}, 5)
        assert log.where.startswith(f'{run_dir}/log.jsonl, ')
    return configs


def test_offline_run_can_be_read_back(tmp_path, no_login):
    configs = short_run(tmp_path/'run', project='pictures')
    run = read_wandb(tmp_path/'run')
    assert (run.project, run.name, run.exit_code) == ('pictures', 'a_run', 0)
    assert {k: run.config[k] for k in configs} == configs
    assert run.series('batch_loss') == {s: 1/s for s in range(1, 6)}
    assert run.series('val_loss') == {5: .5} and not run.series('nothing') and 'diverged' in run.history[-1]
    assert run.series('lmms_eval/mmstar') == {5: .25} and run.series('<lmms-eval-step>') == {5: 3}
    assert run.x_axes['lmms_eval/*'] == '<lmms-eval-step>'
    assert not any('batch_digest' in row for row in run.history)
    assert len(read_log(tmp_path/'run'/'log.jsonl')) == 7


def test_long_history_survives_block_boundaries(tmp_path, no_login):
    "More than one 32 KiB block in the file: the reader puts split records together."
    with RunLog(tmp_path, Dist(), ['wandb'], {}, 'long', every=1000) as log:
        for step in range(400): log.log({f'metric_{i}': step+i for i in range(8)} | dict(batch_loss=float(step)), step)
    assert read_wandb(tmp_path).series('batch_loss') == {s: float(s) for s in range(400)}


def test_wandb_mode_is_respected(tmp_path, no_login, monkeypatch):
    monkeypatch.setenv('WANDB_MODE', 'disabled')
    short_run(tmp_path)
    assert not list(tmp_path.glob('**/*.wandb'))
    assert len(read_log(tmp_path/'log.jsonl')) == 7


def test_a_failed_run_is_marked(tmp_path, no_login):
    with pytest.raises(OSError), RunLog(tmp_path, Dist(), ['wandb'], {}, 'bad') as log:
        log.log(dict(batch_loss=1.), 1)
        raise OSError('disk full')
    run = read_wandb(tmp_path)
    assert run.exit_code == 1 and run.series('batch_loss') == {1: 1.}


def test_wandb_that_cannot_start_is_said_once(tmp_path, no_login, monkeypatch, caplog):
    "The real wandb, sent to a server that is not there with settings that it refuses."
    monkeypatch.setenv('WANDB_BASE_URL', 'not a url')
    monkeypatch.setenv('WANDB_MODE', 'online')
    short_run(tmp_path)
    assert sum('wandb failed and is off' in m for m in caplog.messages) == 1
    assert (tmp_path/'train.log').read_text().count('wandb failed and is off') == 1
    assert len(read_log(tmp_path/'log.jsonl')) == 7


def test_wandb_is_not_imported_when_off(tmp_path, root):
    code = ("import sys; from nanovlm_nb.core.logs import RunLog; from nanovlm_nb.core.dist import Dist\n"
            f"with RunLog({str(tmp_path)!r}, Dist(), every=10) as log: log.log(dict(batch_loss=1.), 10)\n"
            "sys.exit('wandb' in sys.modules)")
    done = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path/'train.log').read_text().count('update 10 | loss 1') == 1


def one_rank(run_dir):
    "Every rank collects, all exchange, one writes."
    dist, stats = init_dist('cpu', timeout_s=60), Stats()
    stats.add('data_load_time', *range(dist.rank+1))
    with RunLog(run_dir, dist) as log:
        report = stats.aggregate(dist)
        log.log(report | dict(rank=dist.rank), 100)
    everyone = dist.gather(report)
    assert all(r == everyone[0] for r in everyone)
    assert stats.aggregate(dist) == {}
    destroy_dist()


def test_four_ranks_gather_and_one_writes(tmp_path):
    run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 4, __file__, tmp_path/'run'], tmp_path)
    records = read_log(tmp_path/'run'/'log.jsonl')
    assert records == [{'training_stats/avg_data_load_time': 1., 'training_stats/max_data_load_time': 3.,
                        'training_stats/min_data_load_time': 0., 'rank': 0, 'step': 100}]


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
