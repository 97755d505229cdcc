"The race: its judge accepts an honest record, and rejects those that cheat."
import json
import sys
from dataclasses import replace

import pytest
import torch
from commands import SIZES, nanovlm
from datasets import concatenate_datasets

from nanovlm_nb.cli import main
from nanovlm_nb.core.config import TrainConfig, VLMConfig, evolve
from nanovlm_nb.core.recipe import Parts
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data.shapes import shapes_dataset
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.runs.speedrun import RaceRecord, RaceRules, all_records, judge, read_record, records_folder, valid_results, write_record_file
from nanovlm_nb.training.trainer import Hook

pytestmark = pytest.mark.usefixtures('one_thread')
SCENES, ASKED = 30, 5
RECITED = 30  # scenes, so many that a guess is not always right

#: a course for a model that learns nothing in three updates: the goal is nothing, everything else is as in the race
RULES = RaceRules(goal=0., scenes=SCENES, asked=ASKED, digests={})
QUICK = SIZES | dict(data_cutoff_idx=SCENES, val_size=2, num_of_sequences=4, num_workers=0, max_training_steps=3, eval_interval=100,
                     max_val_batches=1, dtype='float32')


def held_out_rows(vlm_cfg: VLMConfig, train_cfg: TrainConfig) -> Parts:
    "Trains on scenes that will be asked about."
    def rows(c): return concatenate_datasets([shapes_dataset(SCENES, 'train', c.seed), shapes_dataset(ASKED, 'validation', c.seed)])
    return Parts(rows=rows)


def other_scenes(vlm_cfg: VLMConfig, train_cfg: TrainConfig) -> Parts:
    "Draws more data than there are: scenes of another seed."
    return Parts(rows=lambda c: shapes_dataset(SCENES, 'train', c.seed+7))


class Reciting(VisionLanguageModel):
    "Knows the answers in the order of the questions, and never looks."
    def stream(self, input_ids, images=None, attention_mask=None, max_new_tokens=5, ended=None, **how):
        answers = [t['assistant'] for r in shapes_dataset(RECITED, 'validation', 0) for t in r['texts']]
        ids = [self.tokenizer.encode(a) + [self.tokenizer.eos_token_id] for a in answers]
        assert len(ids) == len(input_ids)
        for i in range(max(map(len, ids))):
            column = torch.tensor([row[min(i, len(row)-1)] for row in ids])
            if ended: ended(column)
            yield column


def reciting(vlm_cfg: VLMConfig, train_cfg: TrainConfig) -> Parts:
    return Parts(model=lambda vlm_cfg, train_cfg, resuming=False: Reciting(vlm_cfg, load_backbone=False).train())


class Practising(Hook):
    "Learns more from every batch, beside the updates that are counted from the settings."
    def after_update(self, trainer, update):
        for batch in update.micro_batches:
            trainer.forward_backward(batch, update, True)
            trainer.optimizer_step(1., None)


class Peeping(Hook):
    "Learns from the validation batches."
    def after_update(self, trainer, update):
        for batch in trainer.validation_batches(): trainer.forward_backward(batch, update, True)


def practising(vlm_cfg: VLMConfig, train_cfg: TrainConfig) -> Parts: return Parts(hooks=[Practising()])


def peeping(vlm_cfg: VLMConfig, train_cfg: TrainConfig) -> Parts: return Parts(hooks=[Peeping()])


def judged(folder, recipe=None, results=(), rules=RULES):
    return judge(RaceRecord('mine', 'a test', QUICK, recipe and f'{__name__}:{recipe.__name__}', [*results]), 0, folder, rules)


@pytest.fixture(scope='module')
def honest(tmp_path_factory):
    return judged(tmp_path_factory.mktemp('honest'))


def test_an_honest_run_has_nothing_against_it_and_its_own_flops_are_confirmed(honest):
    assert honest['reasons'] == [] and honest['updates'] == 3 and honest['flops'] > 1e8
    assert 0 <= honest['blank'] <= honest['guess']


def test_held_out_scenes_in_the_training_data_are_found(tmp_path):
    reasons = judged(tmp_path, held_out_rows)['reasons']
    assert len(reasons) == 1 and 'training data: row ' in reasons[0] and 'is a held-out scene' in reasons[0]


def test_scenes_of_another_data_set_are_found(tmp_path):
    reasons = judged(tmp_path, other_scenes)['reasons']
    assert len(reasons) == 1 and 'is no scene of the embedded training data' in reasons[0]


def test_answers_that_do_not_come_from_the_picture_are_found(tmp_path):
    found = judged(tmp_path, reciting, rules=replace(RULES, asked=RECITED))
    assert found['right'] == found['blank'] == found['shuffled'] == 1.
    assert [r.partition(' right with ')[2].partition(',')[0] for r in found['reasons']] == ['blank pictures', 'shuffled pictures']


def test_arithmetic_that_the_record_does_not_state_is_found(honest, tmp_path):
    found = judged(tmp_path, practising, [dict(seed=0, flops=honest['flops'])])
    assert found['updates'] == honest['updates'] and found['flops'] > 1.5*honest['flops']
    assert found['reasons'] == [f"{found['flops']:.4g} FLOPs were counted, the record says {honest['flops']:.4g}"]


def test_learning_from_validation_batches_is_found(tmp_path):
    reasons = judged(tmp_path, peeping)['reasons']
    assert reasons == ['update 1: the model learns from something else than its batch']


@pytest.mark.parametrize('part', ['loaders', 'trainer'])
def test_a_recipe_cannot_bring_what_the_judge_stands_for(tmp_path, monkeypatch, part):
    module = sys.modules[__name__]
    monkeypatch.setattr(module, 'own', lambda vlm_cfg, train_cfg: Parts(**{part: lambda *a: None}), raising=False)
    with pytest.raises(UsageError, match=f'brings its own {part}'):
        judge(RaceRecord('mine', 'a test', QUICK, f'{__name__}:own'), 0, tmp_path, RULES)


def test_a_recipe_cannot_set_what_the_race_fixes(tmp_path, monkeypatch):
    module = sys.modules[__name__]
    monkeypatch.setattr(module, 'own', lambda vlm_cfg, train_cfg: Parts(train_cfg=evolve(train_cfg, seed=5)), raising=False)
    with pytest.raises(UsageError, match='sets seed: the race fixes it'):
        judge(RaceRecord('mine', 'a test', QUICK, f'{__name__}:own'), 0, tmp_path, RULES)


def test_the_table_shows_every_record_and_the_baseline_first(capsys):
    assert main(['speedrun']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ['record', *(r.name for r in all_records())]
    assert 'baseline' in {r.name for r in all_records()}


def test_the_results_of_each_record_are_those_of_its_settings():
    "A change of the default changes records that leave something to it: they must say what they had, or be judged again."
    for record in map(read_record, records_folder().glob('*.json')): assert len(valid_results(record)) == len(record.results) > 0, record.name


@pytest.mark.slow
def test_verify_runs_a_record_from_its_file_in_a_process_of_its_own(tmp_path):
    "The whole course with a recipe beside the file, of a model that cannot arrive. What was found counts until settings or recipe change."
    code = 'from nanovlm_nb.core.recipe import Parts\ndef plain(vlm_cfg, train_cfg): return Parts()\n'
    (tmp_path/'mine.py').write_text(code)
    flags = {k: v for k, v in QUICK.items() if k != 'data_cutoff_idx'}
    write_record_file(tmp_path/'try.json', RaceRecord('try', 'three updates', flags, 'mine:plain'))

    def verify():
        done = nanovlm(['speedrun', 'verify', 'try.json', '--seeds', 0, '--out', 'try.json'], tmp_path, check=False)
        assert done.returncode == 1 and 'the goal is 95%' in done.stdout and 'try is refused' in done.stdout
        found, = json.loads((tmp_path/'try.json').read_text())['results']
        return found, 'do not count' in done.stdout, 'the record says' in done.stdout

    (first, *said), (_, *again) = verify(), verify()
    assert (first['updates'], said, again) == (3, [False, False], [False, False])
    record = read_record(tmp_path/'try.json')
    write_record_file(tmp_path/'try.json', replace(record, flags=flags | dict(max_training_steps=4)))
    (longer, *said) = verify()
    assert (longer['updates'], said) == (4, [True, False]) and longer['flops'] > first['flops']
    (tmp_path/'mine.py').write_text(code + '# another\n')
    assert verify()[1:] == (True, False)
    write_record_file(tmp_path/'try.json', replace(read_record(tmp_path/'try.json'), results=[longer | dict(flops=1e9, settings=verify()[0]['settings'])]))
    assert verify()[1:] == (False, True)
