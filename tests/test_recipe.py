"Parts from outside: the cells of the tutorial `Make it yours` are a user's file, and each of its recipes trains, stops in the middle and goes on."
import json
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import yaml
from commands import TINY
from commands import train as ranks_train
from safetensors.torch import load_file

from nanovlm_nb.answers.answer import Asker, load_asker
from nanovlm_nb.answers.eval_jobs import Evaluations
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import evolve, load_yaml
from nanovlm_nb.core.files import write_manifest
from nanovlm_nb.data.shapes import shapes_dataset
from nanovlm_nb.runs.arguments import eval_parser

pytestmark = pytest.mark.usefixtures('one_thread')
TUTORIAL = Path(__file__).resolve().parent.parent/'nbs'/'tutorials'/'make_it_yours.ipynb'
SHORT = [*TINY, '--data_cutoff_idx', '60', '--val_size', '8', '--num_of_sequences', '4', '--max_training_steps', '4', '--eval_interval', '4', '--save_interval', '2',
         '--max_val_batches', '1', '--ask_samples', '0', '--max_keep_ckpts', '-1', '--dtype', 'float32']
#: recipe -> settings of its run besides
RECIPES = dict(muon=[], llava=['--train_dataset_path', 'chat.parquet', '--data_cutoff_idx', '50'], mirror=[], norms=[], convolutions=[], up_and_down=[], lora=[], by_aspect=['--vit_img_size', '32'])
#: several of them in one run, which costs less: every test run tries all eight
TOGETHER = dict(muon_mirror_norms=['muon', 'mirror', 'norms'], llava_by_aspect=['llava', 'by_aspect'], convolutions_up_and_down=['convolutions', 'up_and_down'], lora_alone=['lora'])
JOINED = """
import dataclasses

def joined(*recipes):
    "One recipe that gives what several give."
    def recipe(vlm_cfg, train_cfg):
        parts = [r(vlm_cfg, train_cfg) for r in recipes]
        return Parts(**{f.name: v for p in parts for f in dataclasses.fields(p) if (v := getattr(p, f.name))})
    return recipe
"""


def own_cells() -> list[str]:
    "The cells of the tutorial that stand in the user's file."
    cells = json.loads(TUTORIAL.read_text(encoding='utf-8'))['cells']
    return [text for c in cells if c['cell_type'] == 'code' and (text := ''.join(c['source'])).startswith('# mine.py')]


def as_llava(row) -> dict:
    said = [dict(zip(('from', 'value'), pair)) for t in row['texts'] for pair in (('human', t['user']), ('gpt', t['assistant']))]
    return dict(id=row['row_id'], image=row['images'][0] if row['images'] else None, conversations=said)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory with the user's file and a parquet file of LLaVA's kind."
    cwd = tmp_path_factory.mktemp('own')
    made = [f'{name} = joined({", ".join(several)})' for name, several in TOGETHER.items()]
    made += [f'struck_{name} = struck({name})' for name in TOGETHER]
    (cwd/'mine.py').write_text('\n\n'.join([*own_cells(), JOINED, STRUCK, *made]))
    rows = [as_llava(r) for r in shapes_dataset(90) if len(r['images']) < 2][:60]
    texts = [{'from': datasets.Value('string'), 'value': datasets.Value('string')}]
    features = datasets.Features(id=datasets.Value('string'), image=datasets.Image(), conversations=texts)
    datasets.Dataset.from_list(rows, features=features).to_parquet(cwd/'chat.parquet')
    return cwd


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    "In that directory, and with a path as a console script has it: without the directory."
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, 'path', [p for p in sys.path if p not in ('', str(place))])


def train(name, *more):
    "A run by the command line, in this process; its directory."
    assert main(['train', *SHORT, '--run_name', name, *more]) == 0
    return Path('checkpoints')/name


def once(name):
    "The run of a recipe, made when it is first asked for."
    run_dir = Path('checkpoints')/name
    return run_dir if run_dir.is_dir() else train(name, '--recipe', f'mine:{name}', *flags_of(name))


def flags_of(name): return [flag for one in TOGETHER.get(name, [name]) for flag in RECIPES[one]]


def record(run_dir, last=4) -> tuple[list, dict]:
    "What must not depend on an interruption: figures and weights."
    keep = ('step', 'batch_loss', 'batch_digest', 'grad_norm', 'lr_MP', 'lr_adapters', 'val_loss', 'mine/projector_norm', 'mine/largest')
    lines = [{k: v for k, v in json.loads(line).items() if k in keep} for line in (run_dir/'log.jsonl').read_text().splitlines()]
    return [line for line in lines if len(line) > 1], {k: w.clone() for k, w in load_file(run_dir/f'step_{last}'/'model.safetensors').items()}


# --- each part, from outside, in a real run

@pytest.mark.parametrize('name', [*TOGETHER, *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES)])
def test_a_recipe_trains_and_goes_on_as_if_nothing_had_been(name):
    "Back to update 2, and forward again: the same samples, losses, norms and weights."
    figures, weights = record(once(name))
    again = train(name, '--recipe', f'mine:{name}', *flags_of(name), '--resume', 'True', '--load_from', f'checkpoints/{name}/step_2')
    said = (again/'train.log').read_text()
    assert f'recipe mine:{name} gives ' in said and 'Resumed from the checkpoint' in said
    after = record(again)
    assert after[0] == figures and len([r for r in figures if 'batch_loss' in r]) == 4
    assert weights.keys() == after[1].keys() and all(w.equal(after[1][k]) for k, w in weights.items())
    assert (again/'abandoned_1'/'step_4').is_dir(), 'what was made before is another one'


@pytest.mark.slow
def test_a_compiled_run_leaves_an_encoder_of_another_make_as_it_is():
    "The decoder's blocks are compiled; the log names what is not, and the losses are those of the run that is not compiled."
    run_dir = train('compiled', '--recipe', 'mine:convolutions_up_and_down', '--compile', 'True')
    assert 'not compiled: vision_encoder, which has no blocks like ours' in (run_dir/'train.log').read_text()
    plain, compiled = ([r['batch_loss'] for r in record(r)[0] if 'batch_loss' in r] for r in (once('convolutions_up_and_down'), run_dir))
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_every_recipe_of_the_tutorial_is_tried_and_is_short():
    file = '\n\n'.join(own_cells())
    assert all(f'\ndef {name}(vlm_cfg, train_cfg)' in f'\n{file}' for name in RECIPES)
    assert file.count('(vlm_cfg, train_cfg)') == len(RECIPES) and max(len(c.splitlines()) for c in own_cells()) <= 30


# --- shared out over two ranks, killed in the middle, and gone on

STRUCK = """
import os, signal
from pathlib import Path

class Struck(Hook):
    "Ends its process as the machine's end would, after update 5, where a file says so."
    def after_update(self, trainer, figures):
        if trainer.step == 5 and Path('strike').is_file(): os.kill(os.getpid(), signal.SIGKILL)

def struck(recipe):
    "The same recipe with that hook."
    def parts(vlm_cfg, train_cfg):
        made = recipe(vlm_cfg, train_cfg)
        return dataclasses.replace(made, hooks=[*made.hooks, Struck()])
    return parts
"""


def on_two_ranks(name, run_name, sharding, *more, **kw):
    "A run of nine updates (or as `more` says) with a recipe that can be struck; it goes on where there is something to go on with."
    flags = [*SHORT, *flags_of(name), '--recipe', f'mine:struck_{name}', '--run_name', run_name, '--sharding', sharding, '--batch_size', '1', '--max_training_steps', '9',
             '--resume', 'True', *more]
    return ranks_train(flags, Path.cwd(), ranks=2, **kw), Path('checkpoints')/run_name


def struck_and_gone_on(name, sharding, *more):
    "The directory of a run that both ranks left by SIGKILL, and that went on."
    run_name = f'struck_{name}_{sharding}'
    Path('strike').touch()
    done, run_dir = on_two_ranks(name, run_name, sharding, *more, check=False)
    Path('strike').unlink()
    assert done.returncode and 'SIGKILL' in done.stderr and not (run_dir/'step_6').exists(), done.stderr[-3000:]
    on_two_ranks(name, run_name, sharding, *more)
    assert 'Auto resumed from the latest checkpoint' in (run_dir/'train.log').read_text()
    return run_dir


def test_muon_an_augmentation_and_a_hook_on_two_ranks_that_share_the_weights():
    "Killed and gone on, the samples are those of one process, and the losses are close: Muon rounds to bfloat16, which pieces do in another order."
    shared, alone = record(struck_and_gone_on('muon_mirror_norms', 'zero2', '--max_training_steps', '6', '--eval_in_epochs', 'False'), 6)[0], record(once('muon_mirror_norms'))[0]
    shared, alone = ([r for r in figures if 'batch_loss' in r] for figures in (shared, alone))
    assert [r['batch_digest'] for r in shared[:4]] == [r['batch_digest'] for r in alone] and len(shared) == 6
    assert shared[0]['batch_loss'] == pytest.approx(alone[0]['batch_loss'], rel=1e-5) and shared[0]['grad_norm'] == pytest.approx(alone[0]['grad_norm'], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('sharding', ['ddp', 'zero2', 'zero3'])
@pytest.mark.parametrize('name', TOGETHER)
def test_killed_on_two_ranks_a_recipe_ends_as_if_it_had_not_been(name, sharding):
    "Figures, samples and weights to the last bit."
    _, whole = on_two_ranks(name, f'whole_{name}_{sharding}', sharding)
    (a, weights), (b, others) = record(whole, 9), record(struck_and_gone_on(name, sharding), 9)
    assert a == b and len([r for r in a if 'batch_loss' in r]) == 9
    assert weights.keys() == others.keys() and all(w.equal(others[k]) for k, w in weights.items())


# --- from the command to the loss

WATCHED = """
import sys
from pathlib import Path
import nanovlm_nb
from nanovlm_nb.core.recipe import Parts
from nanovlm_nb.runs.run import make_model

HOME, seen = str(Path(nanovlm_nb.__file__).parent), []

def watched(vlm_cfg, train_cfg):
    def model(*args):
        made = make_model(*args)
        made.register_forward_pre_hook(lambda *_: seen.append(stack()) if made.training else None)
        return made
    return Parts(model=model)

def stack():
    frame, names = sys._getframe(), []
    while frame := frame.f_back:
        if frame.f_code.co_filename.startswith(HOME): names.append((Path(frame.f_code.co_filename).stem, frame.f_code.co_name))
    return names[::-1]
"""


def test_a_traceback_is_short():
    "Who meets an error in a model reads how the command came there in six frames of three files."
    Path('watched.py').write_text(WATCHED)
    train('watched', '--recipe', 'watched:watched', '--compile', 'False')
    import watched
    assert {tuple(way) for way in watched.seen} == {(('cli', 'main'), ('run', 'main'), ('run', 'run'), ('trainer', 'train'), ('trainer', 'train_step'), ('trainer', 'accumulate'))}


PROJECTED = """
from torch import nn
from nanovlm_nb.core.recipe import Parts
from nanovlm_nb.runs.run import make_model

class Placed(nn.Module):
    def __init__(self, projector, cfg):
        super().__init__()
        self.projector, self.place = projector, nn.Embedding(cfg.mp_image_token_length, cfg.lm_hidden_dim)

    def forward(self, x): return self.projector(x)+self.place.weight

def projected(vlm_cfg, train_cfg):
    def model(cfg, *more):
        made = make_model(cfg, *more)
        made.MP = Placed(made.MP, cfg)
        return made
    return Parts(model=model)
"""


def test_a_projector_of_another_making_is_trained_looked_at_and_asked():
    "Nothing in the library reaches into the projector for its matrix."
    Path('projected.py').write_text(PROJECTED)
    run_dir = train('projected', '--recipe', 'projected:projected', '--look_interval', '2', '--ask_samples', '2')
    assert (run_dir/'status').read_text() == 'done\n' and 'held-out questions' in (run_dir/'train.log').read_text()
    assert any('look/accuracy' in line for line in (run_dir/'log.jsonl').read_text().splitlines())


# --- whom one trusts

def test_a_checkpoint_runs_nobodys_code(place, capsys):
    "Its configuration names a recipe, which neither asking nor a look at the checkpoints imports."
    shutil.copytree(once('convolutions_up_and_down'), 'checkpoints/trusted')
    (place/'bad.py').write_text('open("ran", "w")\nfrom mine import *\n')
    best = Path('checkpoints')/'trusted'/'step_4'
    capsys.readouterr()
    for file in (best/'recipe.json', best/'trainer_state.json', best.parent/'config.yaml'):
        file.write_text(file.read_text().replace('mine:', 'bad:'))
    (best/'manifest.json').unlink(missing_ok=True)
    for words in (['ask', str(best), '--prompt', 'x'], ['eval', str(best), '--tasks', 'shapes'], ['export', str(best), 'out'], ['look', str(best)], ['chat', str(best)]):
        with pytest.raises(SystemExit) as stopped: main(words)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and len(said.strip().splitlines()) == 1, said
    main(['runs', str(best.parent)])
    assert not Path('ran').exists()
    assert type(Asker.from_checkpoint(best, recipe='mine:convolutions').model.vision_encoder).__name__ == 'Convolutions'


HOSTILE = dict(recipe='hostile:f', custom_transforms=['hostile:f'], lr_schedule='hostile:f', eval_script='hostile.sh', eval_include_path='hostile')


@pytest.mark.parametrize('field', HOSTILE)
def test_files_of_a_run_name_no_code(tmp_path, monkeypatch, capsys, field):
    "Whatever its files say, a run from elsewhere executes nothing, even if one stands in its directory; the user may name the same code."
    run_dir = tmp_path/'runs'/'begun'
    shutil.copytree(train('begun') if not Path('checkpoints/begun').is_dir() else 'checkpoints/begun', run_dir)
    config, states = yaml.safe_load((run_dir/'config.yaml').read_text()), list(run_dir.glob('step_*/trainer_state.json'))
    config['train'][field] = HOSTILE[field]
    (run_dir/'config.yaml').write_text(yaml.safe_dump(config))
    for file in states:
        state = json.loads(file.read_text())
        state['configs']['train'][field] = HOSTILE[field]
        file.write_text(json.dumps(state))
        write_manifest(file.parent)
    (run_dir/'guide.yaml').write_text(yaml.safe_dump(dict(training={field: HOSTILE[field]})))
    ran = tmp_path/'ran'
    (run_dir/'hostile.py').write_text(f'open({str(ran)!r}, "w")\ndef f(*_): return 0.\n')
    (run_dir/'hostile.sh').write_text(f'touch {ran}')
    monkeypatch.chdir(run_dir)
    flags, step = [f'--{field}', *([v] if isinstance(v := HOSTILE[field], str) else v)], str(sorted(states)[-1].parent)
    again = ['--run_name', 'begun', '--resume', 'True', '--vlm_checkpoint_path', '..', '--max_training_steps', '5']
    refused = [['resume', '.'], ['train', *again], ['train', '--config', 'config.yaml', *again], ['plan', '--config', 'config.yaml'], ['inspect', '--config', 'config.yaml'], ['xray', '--config', 'config.yaml'],
               ['doctor', '--config', 'config.yaml'], ['invariance', '--config', 'config.yaml'], ['train', '--resume', 'True', '--load_from', step], ['classify', '--config', 'guide.yaml']]
    if field in ('recipe', 'custom_transforms', 'lr_schedule'): refused.append(['replay', '.', '3'])
    for words in refused:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped: main(words)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and f'names code, {field} ' in said and f'add {" ".join(flags)} if you trust it' in said, (words, said)
    for words in (['runs', '.'], ['plot', '.', '--out', str(tmp_path/'c.png')], ['look', step, '--batches', '1'], ['ask', step, '--prompt', 'x']):
        try: main(words)
        except SystemExit as stopped: assert field == 'recipe' and words[0] == 'look' and stopped.code == 2
    (run_dir/'config.yaml').write_text('damaged: [')
    with pytest.raises(SystemExit): main(['train', *again])
    assert f'step_4 names code, {field}' in capsys.readouterr().err and not ran.exists()


def test_an_evaluator_beside_the_run_gets_its_recipe(place, monkeypatch):
    "The command of a run's own evaluator loads the checkpoint, which without the recipe is refused; a job file that names another recipe is not believed."
    monkeypatch.setenv('PYTHONPATH', str(place))
    run_dir = once('convolutions_up_and_down')
    cfg = evolve(load_yaml(run_dir/'config.yaml', given=None)[1], use_lmms_eval=True, eval_backend='subprocess', lmms_eval_tasks='shapes')
    jobs = Evaluations(run_dir, cfg, 'shapes')
    jobs.submit(run_dir/'step_4', 4)
    file = jobs.log(4).with_name('job.json')
    file.write_text(file.read_text().replace('mine:', 'bad:'))
    job = Evaluations(run_dir, cfg, 'shapes').jobs[4]
    asked = eval_parser().parse_args(job.local(Path('out.json'))[4:])
    assert asked.recipe == 'mine:convolutions_up_and_down'
    assert type(load_asker(asked.checkpoint, None, asked.recipe).model.vision_encoder).__name__ == 'Convolutions'
    with pytest.raises(ValueError, match='was trained with the recipe'): load_asker(asked.checkpoint)


# --- on resume

@pytest.mark.parametrize('flags, said', [(['--recipe', 'None'], "recipe: 'mine:lora_alone' -> None (refused: model, rows and optimizer would be others)"), (['--recipe', 'mine:norms'], "recipe: 'mine:lora_alone' -> 'mine:norms'")])
def test_another_recipe_is_refused_on_resume(flags, said, capsys):
    once('lora_alone')
    with pytest.raises(SystemExit): main(['train', *SHORT, '--run_name', 'lora_alone', '--resume', 'True', *flags])
    assert said in capsys.readouterr().err


def test_the_recipe_is_recorded():
    run_dir = once('lora_alone')
    assert 'recipe: mine:lora_alone' in (run_dir/'config.yaml').read_text() and 'recipe mine:lora_alone gives model, optimizer' in (run_dir/'train.log').read_text()
    assert json.loads((run_dir/'step_4'/'trainer_state.json').read_text())['configs']['train']['recipe'] == 'mine:lora_alone'
    assert json.loads((run_dir/'step_4'/'recipe.json').read_text()) == dict(recipe='mine:lora_alone', gives=['model'])


def test_the_base_of_an_adapter_stays_bit_by_bit():
    first, last = (load_file(once('lora_alone')/f'step_{n}'/'model.safetensors') for n in (0, 4))
    assert {k.split('.')[-2] for k in first if not first[k].equal(last[k])} == {'down', 'up'}


# --- what foretells a run, and what repeats it

@pytest.mark.parametrize('words, said', [
    (['plan', *SHORT, '--recipe', 'mine:lora'], 'recipe mine:lora makes the model of the run, of which nanovlm plan knows nothing'),
    (['xray', *SHORT, '--recipe', 'mine:convolutions'], 'recipe mine:convolutions makes the model of the run, of which nanovlm xray knows nothing'),
    (['train', '--recipe', 'nowhere:f'], "recipe 'nowhere:f': no module 'nowhere'; is it in the working directory or on PYTHONPATH?"),
    (['train', '--recipe', 'mine:muoon'], "recipe 'mine:muoon': module 'mine' has no function 'muoon'"),
    (['train', '--recipe', 'mine'], "recipe is 'mine': give module:function"),
    (['train', '--recipe', 'mine:triangle'], "recipe 'mine:triangle', called with (vlm_cfg, train_cfg): "),
    (['train', '--recipe', 'mine:joined'], "recipe 'mine:joined' returned <function joined"),
])
def test_what_cannot_be_done_with_a_recipe_is_one_line(words, said, capsys):
    before = sorted(Path('.').rglob('*'))
    with pytest.raises(SystemExit) as stopped: main(words)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and said in err and len(err.strip().splitlines()) == 1
    assert [p for p in sorted(Path('.').rglob('*')) if '__pycache__' not in str(p)] == [p for p in before if '__pycache__' not in str(p)]


def test_commands_that_repeat_a_run_follow_its_recipe(capsys):
    run_dir = once('llava_by_aspect')
    digest = next(json.loads(line)['batch_digest'] for line in (run_dir/'log.jsonl').read_text().splitlines() if '"step": 3,' in line and 'batch_digest' in line)
    assert main(['replay', str(run_dir), '3', '--recipe', 'mine:llava_by_aspect']) in (0, 1) and 'the same samples as in the log' in capsys.readouterr().out and digest
    main(['resume', str(run_dir), '--recipe', 'mine:llava_by_aspect'])
    out = capsys.readouterr().out
    assert 'would go on from the latest checkpoint' in out and 'cannot resume' not in out and 'recipe' not in out, out
    data = [*SHORT, '--recipe', 'mine:llava_by_aspect', *flags_of('llava_by_aspect')]
    assert main(['inspect', *data, '--samples', '6', '--compare', '6', '--html', '']) == 0 and 'recipe mine:llava_by_aspect gives rows, processor' in capsys.readouterr().out
    assert main(['invariance', *data, '--packs', '4']) == 0
