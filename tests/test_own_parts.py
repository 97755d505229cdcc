"Parts from outside: the cells of the tutorial `Make it yours` are a user's script, and with each of its parts a run trains, stops in the middle and goes on."

import json
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import yaml
from commands import SHORT, record, run

from nanovlm_nb.cli import main
from nanovlm_nb.core.run_dir import write_manifest
from nanovlm_nb.data.shapes import shapes_dataset

pytestmark = pytest.mark.usefixtures('one_thread')
TUTORIAL = (
    Path(__file__).resolve().parent.parent / 'nbs' / 'tutorials' / 'make_it_yours.ipynb'
)
#: parts of a run, as the script hands them in; four runs try all eight
PARTS = dict(
    muon_mirror_norms="optimizer=muon, loaders=partial(get_dataloaders, transforms=[mirrored]), hooks=[ProjectorNorm()]",
    transcripts_by_aspect="loaders=partial(get_dataloaders, rows=Transcripts('talk.parquet'), processor=by_aspect)",
    convolutions_triangle="model=Sees, schedule=triangle",
    lora="model=with_lora, optimizer=adapters_alone",
)
FLAGS = dict(transcripts_by_aspect=['--vit_img_size', '32', '--data_cutoff_idx', '50'])
SCRIPT = """
import sys

if __name__ == '__main__':
    vlm_cfg, train_cfg, asked = parse_args(sys.argv[2:])
    run(vlm_cfg, train_cfg, **eval(f'dict({sys.argv[1]})'), asked=asked)
"""


def own_cells() -> list[str]:
    "The cells of the tutorial that stand in the user's file."
    cells = json.loads(TUTORIAL.read_text(encoding='utf-8'))['cells']
    return [
        text
        for c in cells
        if c['cell_type'] == 'code'
        and (text := ''.join(c['source'])).startswith('# mine.py')
    ]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory with the user's script and a parquet file of photos with transcripts."
    cwd = tmp_path_factory.mktemp('own')
    (cwd / 'mine.py').write_text('\n\n'.join([*own_cells(), SCRIPT]))
    rows = [
        dict(
            id=r['row_id'],
            photo=r['images'][0],
            transcript='\n'.join(
                f"Q: {t['user']}\nA: {t['assistant']}" for t in r['texts']
            ),
        )
        for r in shapes_dataset(90)
        if len(r['images']) == 1
    ][:60]
    features = datasets.Features(
        id=datasets.Value('string'),
        photo=datasets.Image(),
        transcript=datasets.Value('string'),
    )
    datasets.Dataset.from_list(rows, features=features).to_parquet(cwd / 'talk.parquet')
    return cwd


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def script(name, *more, ranks=1):
    "The script, alone or under torchrun, where ranks share the optimizer out; its directory."
    launch = (
        ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', ranks]
        if ranks > 1
        else []
    )
    shared = ['--sharding', 'zero2', '--batch_size', '1'] if ranks > 1 else []
    run(
        [
            sys.executable,
            *launch,
            'mine.py',
            PARTS[name],
            *SHORT,
            '--ask_samples',
            '2',
            *FLAGS.get(name, []),
            *shared,
            '--run_name',
            f'{name}_{ranks}',
            *more,
        ],
        Path.cwd(),
    )
    return Path('checkpoints') / f'{name}_{ranks}'


def once(name, ranks=1):
    "The run with some parts, made when it is first asked for."
    run_dir = Path('checkpoints') / f'{name}_{ranks}'
    return run_dir if run_dir.is_dir() else script(name, ranks=ranks)


@pytest.mark.parametrize(
    'name, ranks', [*((n, 1) for n in PARTS), ('muon_mirror_norms', 2)]
)
def test_a_run_with_own_parts_goes_on_as_if_nothing_had_been(name, ranks):
    "Back to update 2, and forward again: the same samples, losses, norms and weights. It has answered questions, with its own model and its own tiles."
    before = record(once(name, ranks))
    again = script(
        name,
        '--resume',
        'True',
        '--load_from',
        f'{once(name, ranks)}/step_2',
        ranks=ranks,
    )
    said = (again / 'train.log').read_text()
    assert (
        "the script's own: " in said
        and 'Resumed from the checkpoint' in said
        and 'held-out questions' in said
        and (again / 'status').read_text() == 'done\n'
    )
    assert before == record(again)
    assert (
        len([r for r in before[0] if 'batch_loss' in r]) == 4
        and (again / 'abandoned_1' / 'step_4').is_dir()
    )


@pytest.mark.parametrize(
    'words',
    [
        [
            'train',
            '--run_name',
            'lora_1',
            '--resume',
            'True',
            '--max_training_steps',
            '6',
        ],
        ['replay', 'checkpoints/lora_1', '3'],
    ],
)
def test_a_plain_command_says_what_such_a_run_needs(words, capsys):
    once('lora')
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert (
        stopped.value.code == 2
        and 'was made with model and optimizer of its own, and this start gives none: start the script that made it again'
        in capsys.readouterr().err
    )


# --- whom one trusts

HOSTILE = dict(
    custom_transforms=['hostile:f'],
    lr_schedule='hostile:f',
    eval_script='hostile.sh',
    eval_include_path='hostile',
    hf_repo_name='thief/loot',
    tracker='wandb',
    wandb_entity='thief',
    wandb_project='loot',
)


@pytest.mark.parametrize('field', HOSTILE)
def test_files_of_a_run_name_no_code_and_no_place(tmp_path, monkeypatch, capsys, field):
    "Whatever its files say, a run from elsewhere executes nothing and sends nothing, even if one stands in its directory; the user may name the same."
    run_dir = tmp_path / 'runs' / 'begun'
    if not Path('checkpoints/begun').is_dir():
        assert main(['train', *SHORT, '--run_name', 'begun']) == 0
    shutil.copytree('checkpoints/begun', run_dir)
    config = yaml.safe_load((run_dir / 'config.yaml').read_text())
    states = list(run_dir.glob('step_*/trainer_state.json'))
    section = 'vlm' if field in config['vlm'] else 'train'
    config[section][field] = HOSTILE[field]
    (run_dir / 'config.yaml').write_text(yaml.safe_dump(config))
    for file in states:
        state = json.loads(file.read_text())
        state['configs'][section][field] = HOSTILE[field]
        file.write_text(json.dumps(state))
        write_manifest(file.parent)
    ran = tmp_path / 'ran'
    (run_dir / 'hostile.py').write_text(
        f'open({str(ran)!r}, "w")\ndef f(*_): return 0.\n'
    )
    (run_dir / 'hostile.sh').write_text(f'touch {ran}')
    monkeypatch.chdir(run_dir)
    flags = [f'--{field}', *([v] if isinstance(v := HOSTILE[field], str) else v)]
    step = str(sorted(states)[-1].parent)
    again = [
        '--run_name',
        'begun',
        '--resume',
        'True',
        '--vlm_checkpoint_path',
        '..',
        '--max_training_steps',
        '5',
    ]
    (Path('..') / 'copied').mkdir()
    shutil.copytree(
        Path(step), Path('..') / 'copied' / Path(step).name
    )  # a checkpoint alone: its state has the settings
    copied = ['--run_name', 'copied', *again[2:]]
    refused = [
        ['check', '.'],
        ['train', *copied],
        ['train', *again],
        *([c, '--config', 'config.yaml'] for c in ('plan', 'check')),
        ['train', '--resume', 'True', '--load_from', step],
    ]
    for words in refused:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(words)
        said = capsys.readouterr().err
        assert (
            stopped.value.code == 2
            and 'names code' in said
            and f'add {" ".join(flags)} if you trust it' in said
        ), (words, said)
    for words in (
        ['runs', '.'],
        ['runs', '.', '--curves', str(tmp_path / 'c.png')],
        ['eval', step, '--rows', '2'],
        ['ask', step, '--prompt', 'x'],
    ):
        main(words)
    assert not ran.exists()


def test_a_file_of_your_own_names_places_and_the_printed_command_repeats_them(
    tmp_path, monkeypatch, capsys
):
    "What goes into the run by `--config`, by whichever name, is typed again by the command that a refused start prints; without it the run is refused."
    monkeypatch.chdir(tmp_path)
    Path('mine.yaml').write_text(
        'train: {tracker: "tensorboard,none", wandb_entity: me, wandb_project: mine}\nvlm: {hf_repo_name: ""}\n'
    )
    assert main(['train', *SHORT, '--config', 'mine.yaml', '--run_name', 'r']) == 0
    with pytest.raises(SystemExit):
        main(['train', *SHORT, '--config', 'mine.yaml', '--run_name', 'r'])
    command = capsys.readouterr().err.partition('go on with: nanovlm ')[2].split()
    assert command == [
        *'train --config checkpoints/r/config.yaml --run_name r --resume True --tracker tensorboard,none --wandb_entity me --wandb_project mine'.split()
    ]
    with pytest.raises(SystemExit):
        main(command[:7])
    assert (
        'add --tracker tensorboard,none --wandb_entity me --wandb_project mine if you trust it'
        in capsys.readouterr().err
    )
    assert main([*command, '--max_training_steps', '5']) == 0
    with pytest.raises(SystemExit):
        main(['replay', 'checkpoints/r', '99'])
    assert 'update 99 was never made' in capsys.readouterr().err, (
        'to repeat an update, nothing of this is asked for'
    )
