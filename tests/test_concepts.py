"What a guide to checkpoints and resuming promises: names, numbers and messages of a run on two ranks."
import json

import pytest
from commands import TINY, nanovlm, train

from nanovlm_nb.cli import main
from nanovlm_nb.core.run_dir import read_log
from nanovlm_nb.training.schedule import warmup_cosine

FLAGS = [*TINY, '--run_name', 'r', '--batch_size', 1, '--save_interval', 2, '--eval_interval', 100, '--max_training_steps', 8, '--max_keep_ckpts', 3, '--ask_samples', 0, '--dtype', 'float32']


@pytest.fixture(scope='module')
def cwd(tmp_path_factory):
    "Eight updates on two ranks, a checkpoint every second one, three are kept."
    folder = tmp_path_factory.mktemp('concepts')
    train(FLAGS, folder, ranks=2)
    return folder


@pytest.fixture
def run_dir(cwd): return cwd/'checkpoints'/'r'


def steps(run_dir): return sorted(int(p.name[5:]) for p in run_dir.glob('step_*'))


def test_checkpoints_come_in_time_and_the_oldest_go(run_dir):
    "Every second update; the newest three stay, and step 0, which was the best."
    best = int((run_dir/'best_checkpoint').read_text().strip()[5:])
    assert steps(run_dir) == sorted({4, 6, 8, best})
    assert (run_dir/'last_checkpoint').read_text() == 'step_8\n'


def test_each_rank_draws_numbers_of_its_own(run_dir):
    "With one seed every rank would drop the same units."
    one, two = (json.loads((run_dir/'step_8'/f'rng_{rank}.json').read_text())['torch'] for rank in (0, 1))
    assert one != two


def refusal(capsys, *flags):
    "What a training says that does not begin."
    with pytest.raises(SystemExit) as ended: main(['train', *map(str, flags)])
    assert ended.value.code
    return capsys.readouterr().err


def test_listing_names_the_newest_and_what_is_missing(run_dir, cwd, monkeypatch, capsys):
    shard = run_dir/'step_6'/'optimizer'/'rank_1.safetensors'
    kept = shard.read_bytes()
    shard.unlink()
    said = nanovlm(['runs', run_dir], cwd).stdout.splitlines()
    assert said[0] == 'r: done' and said[2].startswith('step_8') and 'complete' in said[2] and 'last' in said[2]
    assert any('step_6' in line and 'lacks optimizer/rank_1.safetensors' in line for line in said)
    monkeypatch.chdir(cwd)
    assert 'lacks optimizer/rank_1.safetensors' in refusal(capsys, *FLAGS, '--gradient_accumulation_steps', 4, '--resume', 'True', '--load_from', run_dir/'step_6')
    shard.write_bytes(kept)


@pytest.mark.parametrize('flags, said', [
    (['--load_from', 'checkpoints/r/step_8/model.safetensors'], 'give the checkpoint directory that holds it'),
    (['--load_from', 'checkpoints/r/step_9'], 'there is no directory'),
    (['--gradient_accumulation_steps', 1], 'must be one of: 1 x 4, 2 x 2, 4 x 1'),
    (['--lm_n_blocks', 2], 'the model would be another'),
])
def test_refusals_say_what_to_do(cwd, flags, said, monkeypatch, capsys):
    monkeypatch.chdir(cwd)
    assert said in refusal(capsys, *FLAGS, '--resume', 'True', *(['--gradient_accumulation_steps', 4] if 'accumulation' not in flags[0] else []), *flags)


def test_three_ways_to_begin(cwd, run_dir):
    "The newest, a chosen one, or weights only; each says so in the log."
    one = [*FLAGS, '--gradient_accumulation_steps', 4, '--max_keep_ckpts', -1]
    train([*one, '--resume', 'True', '--max_training_steps', 9], cwd)
    assert f'Auto resumed from the latest checkpoint {run_dir/"step_8"}.' in (run_dir/'train.log').read_text().replace('from the latest checkpoint checkpoints', f'from the latest checkpoint {cwd}/checkpoints')
    train([*one, '--resume', 'True', '--load_from', 'checkpoints/r/step_6', '--max_training_steps', 10], cwd)
    text = (run_dir/'train.log').read_text()
    assert f'Resumed from the checkpoint {run_dir/"step_6"}.' in text and 'max_training_steps: 8 -> 10 (careful' in text
    train([*one, '--run_name', 'fresh', '--load_from', 'checkpoints/r/step_8'], cwd)
    assert 'optimizer and data begin anew' in (cwd/'checkpoints'/'fresh'/'train.log').read_text()
    first = json.loads((cwd/'checkpoints'/'fresh'/'log.jsonl').read_text().splitlines()[0])
    assert first['step'] == 0 or first['step'] == 1


def test_a_schedule_in_samples_goes_on_with_another_batch_and_other_ranks(tmp_path, capsys):
    "One rank, then two with updates of twice the packs: the rate keeps to its curve over the samples, and the run ends when they are seen."
    pairs = zip(FLAGS[::2], FLAGS[1::2])
    flags = [w for name, value in pairs if name != '--max_training_steps' for w in (name, value)]+['--lr_schedule', 'cosine', '--max_keep_ckpts', -1]
    train([*flags, '--max_training_samples', 120], tmp_path)
    run_dir = tmp_path/'checkpoints'/'r'
    first = {r['step']: r for r in read_log(run_dir/'log.jsonl') if 'lr_MP' in r}
    begun = max(n for n in steps(run_dir) if sum(first[s]['samples'] for s in range(1, n+1)) <= 70)
    there = ['--load_from', str(run_dir/f'step_{begun}')]
    assert main(['check', str(run_dir), '--gpus', '2', *there]) == 1
    assert 'of 120 samples' in (said := capsys.readouterr().out) and 'packs in an update the rest takes about' in said
    train([*flags, '--max_training_samples', 120, '--resume', 'True', *there, '--force_resume', 'True'], tmp_path, ranks=2)
    log = [r for r in read_log(run_dir/'log.jsonl') if 'lr_MP' in r]
    assert [r['lr_MP'] for r in log[:begun]] == [first[s]['lr_MP'] for s in range(1, begun+1)] and begun < len(log) < len(first)
    seen = 0
    for r in log:
        place = seen/r['samples'], 120/r['samples']
        assert r['lr_MP'] == pytest.approx(warmup_cosine(place[0], 6e-4, place[1], .03, .02), rel=1e-9)
        seen += r['samples']
    assert seen-log[-1]['samples'] < 120 <= seen
