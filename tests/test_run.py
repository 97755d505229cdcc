"Whole runs through the command line: what they leave behind, alone and under torchrun, and what the hub's client is asked to do."

import json
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from commands import TINY, nanovlm, run, train, updates
from PIL import Image
from safetensors.torch import load_file
from wandb_reader import read_wandb

from nanovlm_nb import load
from nanovlm_nb.core.settings import load_yaml
from nanovlm_nb.core.run_dir import read_log, read_pointer
from nanovlm_nb.data.shapes import shapes_dataset
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.runs.report import publish

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    "A short run of one process that was told to publish, without a connection; its directory."
    cwd = tmp_path_factory.mktemp('one')
    train(
        [
            *TINY,
            '--run_name',
            'r',
            '--max_training_steps',
            7,
            '--ask_samples',
            4,
            '--hf_repo_name',
            'me/tiny',
            '--notes',
            'does it end?',
            '--tracker',
            'tensorboard',
        ],
        cwd,
    )
    return cwd / 'checkpoints' / 'r'


def test_a_run_leaves_its_directory(one):
    assert {p.name for p in one.iterdir()} >= {
        'config.yaml',
        'log.jsonl',
        'train.log',
        'step_0',
        'step_3',
        'step_6',
        'step_7',
        'last_checkpoint',
        'best_checkpoint',
        'answers.json',
        'samples.png',
        'curves.png',
    }
    assert (one / 'last_checkpoint').read_text() == 'step_7\n'
    assert {p.name for p in (one / 'step_7').iterdir()} >= {
        'config.json',
        'model.safetensors',
        'trainer_state.json',
        'tokenizer.json',
    }
    with Image.open(one / 'samples.png') as im:
        assert im.width > 300
    records = read_log(one / 'log.jsonl')
    assert [r['step'] for r in records if 'batch_loss' in r] == list(range(1, 8))
    assert {
        'batch_loss',
        'grad_norm',
        'lr_MP',
        'lr_vision_encoder',
        'lr_decoder',
        'target_tokens',
        'tokens',
        'batch_digest',
        'tokens_per_second',
    } <= set(updates(one)[0])
    losses = {r['step']: r['val_loss'] for r in records if 'val_loss' in r}
    assert list(losses) == [0, 3, 6, 7]
    best = min(
        (3, 6, 7), key=losses.get
    )  # of the updates: what it began with is not its best
    assert (one / 'best_checkpoint').read_text() == f'step_{best}\n'
    state = json.loads(
        (one / 'step_7' / 'trainer_state.json').read_text()
    )  # written before its own validation
    assert state['best_step'] == min((3, 6), key=losses.get)
    assert [
        r['step'] for r in records if 'training_stats/avg_tokens_per_second' in r
    ] == [2, 4, 6]


def test_config_repeats_the_run_byte_for_byte(one, tmp_path):
    train(
        ['--config', one / 'config.yaml', '--hf_repo_name', 'me/tiny'],
        tmp_path,
        fresh=True,
    )  # where a run sends its model its file may not say
    again = tmp_path / 'checkpoints' / 'r'
    assert (again / 'config.yaml').read_bytes() == (one / 'config.yaml').read_bytes()
    first = updates(one)
    second = updates(again)
    assert [r['batch_digest'] for r in first] == [r['batch_digest'] for r in second]
    assert [r['batch_loss'] for r in first] == [r['batch_loss'] for r in second]


def test_two_ranks_train_like_one(one, tmp_path):
    "Also over the ends of epochs, where one rank has data left and the other has none. The ranks run the file, as nanoVLM's users type it."
    launch = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc_per_node',
        2,
        ROOT / 'nanovlm_nb' / 'train.py',
    ]
    done = run(
        [
            *launch,
            *TINY,
            '--run_name',
            'r',
            '--max_training_steps',
            9,
            '--data_cutoff_idx',
            79,
            '--gradient_accumulation_steps',
            1,
            '--dtype',
            'float32',
            '--ask_samples',
            2,
        ],
        tmp_path,
    )
    train(
        [
            *TINY,
            '--run_name',
            'alone',
            '--max_training_steps',
            9,
            '--data_cutoff_idx',
            79,
            '--dtype',
            'float32',
            '--num_workers',
            1,
            '--ask_samples',
            0,
        ],
        tmp_path,
    )
    two = updates(tmp_path / 'checkpoints' / 'r')
    alone = updates(tmp_path / 'checkpoints' / 'alone')
    assert [r['step'] for r in two] == list(range(1, 10)), (
        'one line an update, from one rank'
    )
    assert [r['batch_digest'] for r in two] == [r['batch_digest'] for r in alone]
    assert two[-1]['epoch'] >= 2
    for a, b in zip(two, alone, strict=True):
        assert a['target_tokens'] == b['target_tokens']
        assert a['batch_loss'] == pytest.approx(b['batch_loss'], rel=2e-4)
    assert (
        done.stderr.count('held-out questions')
        + done.stdout.count('held-out questions')
        == 1
    )


def test_wandb_offline_has_what_the_log_has(tmp_path):
    train(
        [
            *TINY,
            '--run_name',
            'r',
            '--log_wandb',
            'True',
            '--wandb_entity',
            'somebody',
            '--max_training_steps',
            40,
            '--ask_samples',
            4,
        ],
        tmp_path,
    )
    run_dir = tmp_path / 'checkpoints' / 'r'
    sent = read_wandb(run_dir)
    records = read_log(run_dir / 'log.jsonl')
    vlm, cfg = load_yaml(run_dir / 'config.yaml', given=None)
    assert (
        sent.config['VLMConfig'] == vlm.to_dict()
        and sent.config['TrainConfig'] == cfg.to_dict()
    )
    assert (sent.project, sent.entity, sent.name, sent.exit_code) == (
        'nanoVLM',
        'somebody',
        'r',
        0,
    )
    assert sent.x_axes['lmms_eval/*'] == '<lmms-eval-step>'
    for name in (
        'batch_loss',
        'val_loss',
        'grad_norm',
        'lr_MP',
        'training_stats/avg_fw_bw_time',
        'epoch_loss',
        'answers/all',
    ):
        here = {r['step']: r[name] for r in records if name in r}
        assert here and {
            row['_step']: row[name] for row in sent.history if name in row
        } == pytest.approx(here), name


def test_tensorboard_shows_what_the_log_has(one):
    "TensorBoard's own reader sees each figure of log.jsonl."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = read_log(one / 'log.jsonl')
    board = EventAccumulator(str(one / 'tensorboard')).Reload()
    names = {
        k
        for r in records
        for k, v in r.items()
        if isinstance(v, (int, float)) and k != 'step'
    }
    assert {'batch_loss', 'val_loss', 'lr_MP'} <= names == set(board.Tags()['scalars'])
    for name in names:
        assert {e.step: e.value for e in board.Scalars(name)} == pytest.approx(
            {r['step']: r[name] for r in records if r.get(name) is not None}, rel=1e-6
        )


def test_compiled_run_equals_the_eager_one(tmp_path):
    flags = [
        *TINY,
        '--max_training_steps',
        2,
        '--ask_samples',
        0,
        '--dtype',
        'float32',
        '--batch_size',
        1,
        '--max_val_batches',
        1,
    ]
    runs = {}
    for name in ('True', 'False'):
        train([*flags, '--run_name', name, '--compile', name], tmp_path)
        runs[name] = tmp_path / 'checkpoints' / name
    for a, b in zip(updates(runs['True']), updates(runs['False']), strict=True):
        assert a['batch_loss'] == pytest.approx(b['batch_loss'], rel=1e-5)
    keys = [set(load_file(r / 'step_2' / 'model.safetensors')) for r in runs.values()]
    assert keys[0] == keys[1] and not any('_orig_mod' in k for k in keys[0])


def test_a_held_out_row_that_is_too_long_is_left_out(tmp_path):
    "The run ends as done, asks the others, and names the row."
    (tmp_path / 'data').mkdir()

    def longer(row, i):
        return row | dict(
            texts=[
                dict(t, user=t['user'] + ' please' * (300 * (i % 2)))
                for t in row['texts']
            ]
        )

    shapes_dataset(40, 'train', 0).map(longer, with_indices=True).to_parquet(
        tmp_path / 'data' / 'train-00000.parquet'
    )
    flags = [
        '--train_dataset_path',
        'data',
        '--stream_dataset',
        False,
        '--data_cutoff_idx',
        24,
        '--max_training_steps',
        1,
        '--eval_in_epochs',
        False,
        '--dtype',
        'float32',
    ]
    train(
        [
            *TINY,
            *flags,
            '--lm_max_position_embeddings',
            600,
            '--ask_samples',
            8,
            '--run_name',
            'r',
        ],
        tmp_path,
    )
    run_dir = tmp_path / 'checkpoints' / 'r'
    assert (run_dir / 'status').read_text() == 'done\n' and json.loads(
        (run_dir / 'answers.json').read_text()
    )['answers']['all'][1] > 0
    left_out = json.loads((run_dir / 'drops.json').read_text())['val']
    assert (
        left_out
        and all(int(i.removeprefix('shapes/train')) % 2 for i in left_out)
        and set(left_out.values()) == {'too_long'}
    )


def test_the_panel_of_a_checkpoint_asks_whether_it_looks(one):
    table = json.loads(nanovlm(['eval', one, '--json'], one).stdout)
    assert table == json.loads((one / 'answers.json').read_text()), (
        'the table of the end of the run'
    )
    assert {*table} == {'answers', 'another picture', 'blind guess', 'picture helps'}
    asked = table['answers']['all'][1]
    assert [table[name]['all'][1] for name in ('another picture', 'blind guess')] == [
        asked
    ] * 2
    said = (one / 'train.log').read_text()
    assert 'the answers do not beat guessing: ' in said and 'what may help: ' in said


# --- publishing


class FakeHub:
    "The two calls of the hub's client that publishing makes; keeps what would have been uploaded."

    def create_repo(self, repo_id, private, exist_ok):
        self.created = repo_id, private, exist_ok

    def upload_folder(self, repo_id, folder_path, commit_message):
        assert not hasattr(self, 'files'), 'one upload'
        self.files = {p.name for p in Path(folder_path).iterdir()}
        self.card, self.model = (
            (Path(folder_path) / 'README.md').read_text(),
            VisionLanguageModel.from_pretrained(folder_path),
        )


class Scaled(VisionLanguageModel):
    "A class of one's own, whose files no other one opens."

    def __init__(self, cfg, **how):
        super().__init__(cfg, **how)
        self.scale = torch.nn.Parameter(torch.ones(1))


def test_a_model_of_a_class_of_ones_own_is_published(one, tmp_path):
    cfg = VisionLanguageModel.from_pretrained(one).cfg
    Scaled(cfg, load_backbone=False).save_pretrained(tmp_path / 'step_1')
    shutil.copy(one / 'record.md', tmp_path)
    hub = Mock()
    cards = []
    hub.upload_folder.side_effect = lambda folder_path, **_: cards.append(
        (Path(folder_path) / 'README.md').read_text()
    )
    publish(tmp_path / 'step_1', 'me/scaled', hub, model=Scaled)
    assert "load('me/scaled', model=Scaled)" in cards[0]
    assert 'does it end?' in cards[0]


def test_publishing_uploads_the_best_and_a_card_of_what_was_measured(one):
    "Without a connection the run is done all the same. A private repository and one upload; the figures of the card are those of the run's files."
    assert (
        'not published as me/tiny' in (one / 'train.log').read_text()
        and (one / 'status').read_text() == 'done\n'
    )
    hub = FakeHub()
    publish(one, 'me/tiny', hub)
    assert (
        hub.created == ('me/tiny', True, True)
        and {'README.md', 'config.json', 'model.safetensors', 'tokenizer.json'}
        <= hub.files
    )
    loaded = FakeHub()
    load(one).push_to_hub('me/tiny', api=loaded)
    assert loaded.card == hub.card, 'of a model that was loaded, too'
    best = VisionLanguageModel.from_pretrained(read_pointer(one, 'best_checkpoint'))
    assert all(
        (w == hub.model.state_dict()[k]).all() for k, w in best.state_dict().items()
    )
    loss, step = min(
        (r['val_loss'], r['step'])
        for r in read_log(one / 'log.jsonl')
        if 'val_loss' in r
    )
    right, n = json.loads((one / 'answers.json').read_text())['answers']['all']
    assert (
        f'best val_loss {loss:.4f} at update {step}' in hub.card
        and f'answers: {right} of {n} questions right' in hub.card
    )
    assert (
        'does it end?' in hub.card
        and f"data: {load_yaml(one / 'config.yaml', given=None)[1].train_dataset_path}"
        in hub.card
    )
    assert not re.search(
        r'[{}]|TODO|None|placeholder|more information needed', hub.card, re.I
    )
