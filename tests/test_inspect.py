"What `nanovlm check` says about data: planted faults are named with the sample's id, clean data have none."

import datasets
import pytest
from commands import nanovlm

from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.data.samples import VQADataset
from nanovlm_nb.data.shapes import shapes_dataset
from nanovlm_nb.tools import inspect as ins
from nanovlm_nb.tools.doctor import FAIL

pytestmark = pytest.mark.usefixtures('one_thread')
LIMITS = dict(
    val_size=20,
    num_of_sequences=8,
    stream_dataset=False,
    train_dataset_name=['default'],
)
ROWS = list(
    shapes_dataset(220).cast_column(
        'images', datasets.List(datasets.Image(decode=False))
    )
)
PLACE = next(
    i for i in range(30, 60) if ROWS[i]['images']
)  # of a row that has a picture


def save(folder, rows: list[dict]):
    "Rows as a folder with a parquet file."
    folder.mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / 'train.parquet')
    return folder


def found(path, n=200, template=lambda text: text, **changes):
    "Name -> finding."
    vlm, train = preset('shapes')
    vlm = evolve(vlm, lm_chat_template=template(vlm.lm_chat_template))
    return {
        f.name: f
        for f in ins.data_findings(
            vlm, evolve(train, train_dataset_path=str(path), **LIMITS | changes), n
        )
    }


def failures(findings):
    "Name -> what is said, of the checks that fail."
    return {name: f.text for name, f in findings.items() if f.state == FAIL}


# --- nothing planted


def test_clean_samples_have_no_fault(tmp_path):
    findings = found(save(tmp_path / 'd', ROWS))
    assert not failures(findings) and findings['samples'].text.startswith(
        '200 of 200 rows of training and 20 of 20 of validation: '
    )
    findings = found(
        save(
            tmp_path / 'texts',
            [{k: v for k, v in r.items() if k != 'images'} for r in ROWS],
        )
    )
    assert not failures(findings) and ' 0 tiles' in findings['samples'].text


@pytest.mark.parametrize('stream', [True, False])
def test_several_configurations_with_weights(tmp_path, stream):
    for name, part in (('a', ROWS[:50]), ('b', ROWS[50:100])):
        save(tmp_path / name, [r | dict(source=name) for r in part])
    findings = found(
        tmp_path,
        30,
        train_dataset_name=['a', 'b'],
        train_dataset_weights=[1, 3],
        stream_dataset=stream,
    )
    assert not failures(findings) and findings['samples'].text.startswith(
        '30 of 30 rows of training and 20 of 20'
    )


# --- planted


def half(r):
    return r | dict(
        images=[
            dict(
                bytes=r['images'][0]['bytes'][: len(r['images'][0]['bytes']) // 2],
                path=None,
            )
        ]
    )


def misspelt(r):
    return {
        ('relevence_ratings' if k == 'relevance_ratings' else k): v
        for k, v in r.items()
    }


FAULTS = {  # which rows, what is done to them; the check that fails, what it says; settings
    'half a picture': (
        [PLACE],
        half,
        'left out',
        f'unreadable_image: shapes/train{PLACE}: ',
        {},
    ),
    'overlong': (
        [40],
        lambda r: r | dict(texts=[dict(user='Which?', assistant='word ' * 3000)]),
        'left out',
        'too_long: shapes/train40',
        {},
    ),
    'rated low': (
        range(60),
        lambda r: r | dict(relevance_ratings=[2] * len(r['texts'])),
        'samples',
        "are 'ratings', for example",
        dict(relevance_min_rating=3),
    ),
    'misspelt': (
        range(60),
        misspelt,
        'columns',
        'did you mean `relevance_ratings`',
        {},
    ),
    'one string': (
        range(60),
        lambda r: r | dict(texts='Question? Answer.'),
        'samples',
        "51 of 51 rows that were left out are 'bad_row'",
        {},
    ),
}


def planted(fault):
    return [
        FAULTS[fault][1](r) if i in FAULTS[fault][0] else r
        for i, r in enumerate(ROWS[:60])
    ]


@pytest.mark.parametrize('fault', FAULTS)
def test_faults_in_the_data(fault, tmp_path):
    _, _, name, part, changes = FAULTS[fault]
    said = failures(found(save(tmp_path / 'd', planted(fault)), val_size=9, **changes))
    assert [*said] == [name] and part in said[name], said


def test_what_cannot_be_loaded(tmp_path):
    datasets.Dataset.from_list([]).save_to_disk(tmp_path / 'empty' / 'default')
    for name in ('good', 'bad'):
        save(tmp_path / 'd' / name, ROWS[:50])
    for path, changes, said in (
        (tmp_path / 'empty', {}, 'empty has no rows'),
        (
            tmp_path / 'd' / 'good',
            dict(val_size=999),
            'val_size 999 leaves no training rows',
        ),
        (tmp_path / 'nowhere', {}, 'o such file or directory'),
    ):
        assert said in failures(found(path, **changes))['data']
    (file := tmp_path / 'd' / 'bad' / 'train.parquet').write_bytes(
        file.read_bytes()[:1000]
    )
    findings = found(tmp_path / 'd', 20, train_dataset_name=['good', 'bad'])
    assert failures(findings) == dict(
        columns=f'bad: {file}: damaged, or no parquet file; remove it, or copy it again'
    )
    assert findings['samples'].text.startswith('20 of 20 rows of training'), (
        'as in training, the others are read'
    )


@pytest.mark.parametrize(
    'old, new',
    [
        ("message['role']", "'user'"),
        ("+ '<|im_end|>' ", ''),
        ("assistant\\n' }}", "assistant\\n\\n' }}"),
        ('endfor', 'end'),
    ],
)
def test_a_bad_chat_template(old, new, tmp_path):
    said = failures(
        found(save(tmp_path / 'd', ROWS[:60]), 30, lambda text: text.replace(old, new))
    )
    assert [*said] in (['data'], ['template']) and 'template' in ' '.join(
        said.values()
    ), said


def test_what_would_stop_a_run_is_named(tmp_path, monkeypatch):
    def fails(self, row):
        raise ValueError('no token r9c9')

    monkeypatch.setattr(VQADataset, 'plan_row', fails)
    said = failures(found(save(tmp_path / 'd', ROWS[:60]), 3))
    assert (
        [*said] == ['data']
        and 'sample shapes/' in said['data']
        and 'no token r9c9' in said['data']
    )


# --- the command


def test_the_command_shows_samples_and_ends_with_1_at_a_fault(tmp_path):
    flags = [
        '--val_size',
        '9',
        '--num_of_sequences',
        '8',
        '--stream_dataset',
        'False',
        '--train_dataset_path',
        save(tmp_path / 'd', planted('half a picture')),
    ]
    done = nanovlm(['check', *flags, '--rows', '2'], tmp_path, check=False)
    assert (
        done.returncode == 1
        and FAULTS['half a picture'][3] in done.stdout
        and 'Traceback' not in done.stderr
    ), done.stdout + done.stderr
    assert done.stdout.count('<|im_start|>assistant\n[[') >= 2
