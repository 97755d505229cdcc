"A finished run, its card, and what the hub's client is asked to do."
import json
import re
from pathlib import Path

import pytest
from commands import TINY, train

from nanovlm_nb.core.run_dir import read_pointer
from nanovlm_nb.core.config import load_yaml
from nanovlm_nb.core.run_dir import read_log
from nanovlm_nb.runs.start import publish, training_card, where_to_publish
from nanovlm_nb.model.vlm import VisionLanguageModel


class FakeHub:
    "The two calls of the hub's client that publishing makes; keeps what would have been uploaded."
    def __init__(self): self.calls, self.files, self.loaded = [], {}, None

    def create_repo(self, repo_id, private, exist_ok): self.calls.append(('create', repo_id, private, exist_ok))

    def upload_folder(self, repo_id, folder_path, commit_message):
        self.calls.append(('upload', repo_id))
        self.files = {p.name: p.stat().st_size for p in Path(folder_path).iterdir()}
        self.card = (Path(folder_path)/'README.md').read_text()
        self.loaded = VisionLanguageModel.from_pretrained(folder_path)


@pytest.fixture(scope='module')
def ended(tmp_path_factory):
    "A run that was told to publish, without a connection."
    folder = tmp_path_factory.mktemp('runs')
    done = train(['--preset', 'shapes', *TINY, '--vlm_checkpoint_path', folder, '--run_name', 'tiny', '--hf_repo_name', 'me/tiny', '--notes', 'does it end?', '--ask_samples', '4'], folder)
    return folder/'tiny', done


def test_a_run_without_connection_ends_well(ended):
    "It is done, and says how to publish later."
    run_dir, done = ended
    assert 'not published as me/tiny' in done.stdout + done.stderr
    assert (run_dir/'answers.json').is_file()


def test_one_upload_of_the_best(ended):
    "A private repository and one upload: the best checkpoint, loadable, and a card."
    run_dir, hub = ended[0], FakeHub()
    publish(run_dir, 'me/tiny', hub)
    assert hub.calls == [('create', 'me/tiny', True, True), ('upload', 'me/tiny')]
    assert {'README.md', 'config.json', 'model.safetensors', 'tokenizer.json'} <= hub.files.keys()
    best = VisionLanguageModel.from_pretrained(read_pointer(run_dir, 'best_checkpoint'))
    assert all((w == hub.loaded.state_dict()[k]).all() for k, w in best.state_dict().items())


def test_nowhere():
    "Unset, empty, or nanoVLM's default, which is nobody's."
    assert not any(where_to_publish(name)[0] for name in (None, '', 'nanoVLM'))


def test_the_card_says_what_was_measured(ended):
    "Figures of the card are those of the run's files; nothing is left to fill in."
    run_dir, hub = ended[0], FakeHub()
    publish(run_dir, 'me/tiny', hub)
    card, log = hub.card, read_log(run_dir/'log.jsonl')
    loss, step = min((r['val_loss'], r['step']) for r in log if 'val_loss' in r)
    assert f'best val_loss {loss:.4f} at update {step}' in card
    answers = json.loads((run_dir/'answers.json').read_text())
    right, n = answers['answers']['all']
    assert f'answers: {right} of {n} questions right' in card and re.search(rf'^all +{n} +{100*right/n:.1f}%', card, re.M)
    train_cfg = load_yaml(run_dir/'config.yaml')[1]
    assert 'does it end?' in card and f'data: {train_cfg.train_dataset_path}' in card
    assert not re.search(r'[{}]|TODO|None|placeholder|more information needed', card, re.I)
    assert training_card(run_dir) in card
