"What a run with parts of your own leaves behind says which of them it needs, and what is given in a wrong form is refused with the right one."

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from nanovlm_nb import EMA, Hook, VLMConfig, export, load, train
from nanovlm_nb.cli import main
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.data.images import ImageProcessor, image_processor_of
from nanovlm_nb.data.shapes import shapes_dataset
from nanovlm_nb.model.vlm import VisionLanguageModel

pytestmark = pytest.mark.usefixtures('one_thread')
ROWS = [row for row in shapes_dataset(50) if len(row['images']) == 1]
SHORT = dict(
    preset='tiny',
    val_rows=ROWS[:6],
    quiet=True,
    max_training_steps=2,
    eval_interval=2,
    save_interval=1,
    ask_samples=0,
    num_workers=0,
    batch_size=2,
    dtype='float32',
)


class Mirrored(ImageProcessor):
    "Sees pictures from behind."

    def __call__(self, image, rng=None):
        return super().__call__(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), rng)


def mirrored(cfg, transforms=()):
    return Mirrored(cfg.max_img_size, cfg.vit_img_size, custom_transforms=transforms)


@dataclass
class Queries(VLMConfig):
    n_queries: int = 4

    def derived(self):
        return super().derived() | dict(mp_image_token_length=self.n_queries)


class Resampler(torch.nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n = cfg.n_queries
        self.out = torch.nn.Linear(cfg.vit_hidden_dim, cfg.lm_hidden_dim)

    def forward(self, features):
        return self.out(features[:, : self.n])


class Asks(VisionLanguageModel):
    config_class = Queries

    def __init__(self, cfg, load_backbone=True):
        super().__init__(cfg, load_backbone)
        self.MP = Resampler(cfg)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('kept')


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


@pytest.fixture(scope='module')
def asker(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return train(ROWS, processor=mirrored, run_name='mirrored', **SHORT)


def picture():
    return ROWS[7]['images'][0]


def test_load_takes_the_processor_as_train_does(asker):
    "What makes it, or what is made."
    run = asker.run_dir.absolute()
    made = mirrored(asker.model.cfg)
    for processor in (mirrored, made):
        found = load(run, processor=processor)
        assert found.image_processor == made
        assert torch.equal(found.embed([picture()]), asker.embed([picture()]))
    with pytest.raises(UsageError, match='an image processor of its own'):
        load(run)


@pytest.mark.parametrize('way', ['save', 'save_pretrained', 'export', 'again'])
def test_a_saved_model_says_that_it_needs_the_processor(asker, tmp_path, way):
    folder = tmp_path / 'saved'
    if way == 'save':
        asker.save(folder)
    elif way == 'save_pretrained':
        asker.model.save_pretrained(folder, asker.tokenizer)
    elif way == 'export':
        export(asker, folder, 'nanovlm')
    else:  # opened and saved once more
        asker.save(tmp_path / 'first')
        load(tmp_path / 'first', processor=mirrored).save(folder)
    with pytest.raises(UsageError, match='bring it in Python, load'):
        load(folder)
    assert load(folder, processor=mirrored).image_processor == asker.image_processor
    load(folder, processor=image_processor_of).save(folder)  # as the library has it
    load(folder)


def test_a_run_that_begins_with_such_a_model_has_its_own_pictures(asker, tmp_path):
    asker.save(tmp_path / 'start')
    plain = train(ROWS, run_name='plain', load_from=tmp_path / 'start', **SHORT)
    assert load(plain.run_dir).image_processor == image_processor_of(plain.model.cfg)


def test_a_processor_of_another_kind_is_refused():
    with pytest.raises(UsageError, match='give a class that extends ImageProcessor'):
        train(ROWS, processor=lambda cfg, transforms: object(), run_name='odd', **SHORT)


class Api:
    "A hub that keeps the card."

    def create_repo(self, *_, **__): ...

    def upload_folder(self, folder_path, **_):
        self.card = (Path(folder_path) / 'README.md').read_text()


def test_a_card_names_what_a_model_needs(asker):
    api = Api()
    asker.push_to_hub('me/mirrored', api=api)
    assert "load('me/mirrored', processor=YOUR_PROCESSOR)" in api.card
    own = train(ROWS, model=Asks, run_name='card', **SHORT)
    own.push_to_hub('me/asks', api=api)
    assert "model = load('me/asks', model=Asks)" in api.card
    assert 'VisionLanguageModel.from_pretrained' not in api.card


def test_a_resumed_run_keeps_a_field_of_its_class_and_names_it():
    def go(steps, **more):
        how = SHORT | dict(max_training_steps=steps, run_name='queries') | more
        return train(ROWS, model=Asks, **how).model.cfg.n_queries

    assert go(2, n_queries=6) == 6
    assert go(3, resume=True) == 6
    with pytest.raises(UsageError, match=r'n_queries: 6 -> 4 \(refused'):
        go(4, resume=True, n_queries=4)


def test_what_a_killed_start_was_deleting_goes_with_the_next():
    class Looks(Hook):
        def begin(self, trainer):
            names.extend(p.name for p in trainer.log.run_dir.glob('*.nanovlm.tmp'))

    names = []
    first = train(ROWS, run_name='killed', **SHORT)
    for name in ('step_1.deleted.nanovlm.tmp', 'step_9.nanovlm.tmp'):
        shutil.copytree(first.run_dir / 'step_2', first.run_dir / name)
    more = SHORT | dict(max_training_steps=3, resume=True)
    train(ROWS, run_name='killed', hooks=[Looks()], **more)
    assert not names


def test_a_run_is_not_resumed_without_a_hook_that_has_its_weights(capsys):
    "Of `EMA` the checkpoint holds the average, the hook the weights that train. Nothing is changed by the refusal."
    run = train(ROWS, run_name='averaged', hooks=[EMA(0.9)], **SHORT).run_dir
    before = {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}
    again = ['train', '--run_name', 'averaged', '--resume', 'True']
    again += ['--max_training_steps', '3']
    with pytest.raises(SystemExit) as stopped:
        main(again)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert 'step_2 has tensors of hook EMA, which this run does not have: give' in said
    assert before == {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}
    assert main(['check', str(run)]) == 1
    assert 'has tensors of hooks of its own: start' in capsys.readouterr().out
    assert main([*again, '--force_resume', 'True']) == 0
    assert 'a state of hook EMA, which this run' in (run / 'train.log').read_text()


def test_vectors_are_of_lists(asker):
    for given in (dict(texts='a red ring'), dict(pictures=picture())):
        with pytest.raises(UsageError, match='give a list, with an entry for each'):
            asker.embed(**given)
    assert len(asker.embed(texts=['a red ring'])) == 1


def test_a_run_of_wandb_that_the_script_has_begun_goes_on(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv('WANDB_MODE', 'offline')
    wandb.teardown()  # it may have read another mode in this process
    with wandb.init(project='sweep', dir=tmp_path, config=dict(lr_mp=2e-3)) as own:
        for name in ('first', 'second'):
            swept = dict(run_name=name, log_wandb=True, lr_mp=own.config['lr_mp'])
            train(ROWS, **SHORT, **swept)
            assert wandb.run is own
        assert own.summary['batch_loss'] > 0
        own.log(dict(objective=1.0))
    assert wandb.run is None
