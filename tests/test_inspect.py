"What `nanovlm check` says about data: planted faults are named with the sample's id, clean data have none."
import io
import random
import resource

import datasets
import pytest
from commands import nanovlm
from PIL import Image, ImageDraw

from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.data.dataset import VQADataset
from nanovlm_nb.data.loader import load_tokenizer
from nanovlm_nb.tools import inspect as ins
from nanovlm_nb.tools.doctor import FAIL

pytestmark = pytest.mark.usefixtures('one_thread')
SIZES = dict(max_img_size=256, resize_to_max_side_len=False, lm_max_length=1024)
LIMITS = dict(max_sample_length=1024, val_size=20, num_of_sequences=8, stream_dataset=False, train_dataset_name=['default'])


def png(picture: Image.Image) -> dict:
    "A picture as `datasets` stores it."
    out = io.BytesIO()
    picture.save(out, 'PNG', compress_level=1)
    return dict(bytes=out.getvalue(), path=None)


def picture(rng: random.Random) -> Image.Image:
    "A few rectangles on a ground of any size up to 160."
    im = Image.new('RGB', (rng.randint(20, 160), rng.randint(20, 160)), tuple(rng.randrange(256) for _ in range(3)))
    for _ in range(3):
        x, y = rng.randrange(im.width), rng.randrange(im.height)
        ImageDraw.Draw(im).rectangle((x, y, x+30, y+30), fill=tuple(rng.randrange(256) for _ in range(3)))
    return im


def row(i: int) -> dict:
    "A clean row: text alone, one picture or two, one to three turns, odd characters, special tokens spelled out."
    rng = random.Random(i)
    odd = ['', 'é世界🙂 ', '<|im_end|> and <|image|> ', ' \n ', 'a < b & c '][i % 5]
    texts = [dict(user=f'{odd}Question {i}.{k}?', assistant=f'Answer {i}.{k} {odd}'+'word '*rng.randrange(20)) for k in range(1+i % 3)]
    return dict(images=[png(picture(rng)) for _ in range([1, 0, 1, 2][i % 4])], texts=texts, source='made',
                **{f'{r}_ratings': [5]*len(texts) for r in ('relevance', 'image_correspondence', 'visual_dependency', 'formatting')})


ROWS = [row(i) for i in range(220)]
FEW = ROWS[:60]


def save(folder, rows: list[dict], files: int = 2):
    "Rows as a folder of parquet files."
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(files): datasets.Dataset.from_list(rows[k::files]).to_parquet(folder/f'train-{k:05d}.parquet')
    return folder


@pytest.fixture(scope='module')
def few(tmp_path_factory):
    "The folder of a part of them."
    return save(tmp_path_factory.mktemp('data')/'few', FEW, files=1)


def configs(path, **changes):
    "The two configurations of a run on these data."
    vlm, train = preset('shapes')
    return evolve(vlm, **SIZES), evolve(train, train_dataset_path=str(path), **LIMITS | changes)


def found(path, n=200, **changes):
    "Name -> finding."
    return {f.name: f for f in ins.data_findings(*configs(path, **changes), n)}


def failures(findings):
    "Name -> what is said, of the checks that fail."
    return {name: f.text for name, f in findings.items() if f.state == FAIL}


# --- nothing planted

def test_200_clean_samples_have_no_fault(tmp_path):
    findings = found(save(tmp_path/'d', ROWS, files=1))
    assert not failures(findings) and findings['samples'].text.startswith('200 of 200 rows of training and 20 of 20 of validation: ')


@pytest.mark.parametrize('stream', [True, False])
def test_streams_and_several_configurations_with_weights(tmp_path, few, stream):
    if stream: assert not failures(found(few, stream_dataset=True))
    for name, part in (('a', ROWS[:50]), ('b', ROWS[50:100])): save(tmp_path/'d'/name, [r | dict(source=name) for r in part])
    findings = found(tmp_path/'d', 30, train_dataset_name=['a', 'b'], train_dataset_weights=[1, 3], stream_dataset=stream)
    assert not failures(findings) and findings['samples'].text.startswith('30 of 30 rows of training and 20 of 20')


def test_texts_alone(tmp_path):
    findings = found(save(tmp_path/'d', [{k: v for k, v in r.items() if k != 'images'} for r in FEW]))
    assert not failures(findings) and ' 0 tiles' in findings['samples'].text


# --- planted

def cut_picture(rows):
    "The second half of a picture is missing."
    k = next(i for i in range(30, 60) if rows[i]['images'])
    rows[k] = rows[k] | dict(images=[dict(bytes=rows[k]['images'][0]['bytes'][:len(rows[k]['images'][0]['bytes'])//2], path=None)])
    return [k]


def overlong(rows):
    "An answer of more tokens than a sample may have."
    rows[40] = rows[40] | dict(texts=[dict(user='Which?', assistant='word '*3000)])
    return [40]


def renamed(rows):
    "Texts under another name."
    for i, r in enumerate(rows): rows[i] = {('text' if k == 'texts' else k): v for k, v in r.items()}
    return ['default/0']


def other_form(rows):
    "Texts that are one string."
    for i, r in enumerate(rows): rows[i] = r | dict(texts='Question? Answer.')
    return ['default/0']


def misspelt(rows):
    "A rating that the pipeline does not know."
    for i, r in enumerate(rows): rows[i] = {('relevence_ratings' if k == 'relevance_ratings' else k): v for k, v in r.items()}
    return ['default/0']


def rated_low(rows):
    "No turn is good enough."
    for i, r in enumerate(rows): rows[i] = r | dict(relevance_ratings=[2]*len(r['texts']))
    return range(60)


FAULTS = [(cut_picture, 'left out', 'unreadable_image: ', {}), (overlong, 'left out', 'too_long: ', {}),
          (rated_low, 'samples', "are 'ratings', for example", dict(relevance_min_rating=3)), (misspelt, 'columns', 'did you mean `relevance_ratings`', {})]


@pytest.mark.parametrize('plant, name, part, changes, stream', [(*FAULTS[0], True), *((*fault, False) for fault in FAULTS)])
def test_faults_in_the_data(plant, name, part, changes, stream, tmp_path):
    rows = list(FEW)
    ids = [f'default/{w}' if stream or isinstance(w, str) else f'made/{w}' for w in plant(rows)]
    said = failures(found(save(tmp_path/'d', rows, files=1), stream_dataset=stream, val_size=9, **changes))
    assert list(said) == [name] and part in said[name], said
    if plant in (cut_picture, overlong): assert any(i in said[name] for i in ids) or stream, said


@pytest.mark.parametrize('plant', [renamed, other_form])
def test_a_column_of_another_form(plant, tmp_path):
    rows = list(FEW)
    plant(rows)
    said = failures(found(save(tmp_path/'d', rows, files=1)))
    assert "40 of 40 rows that were left out are 'bad_row'" in said['samples'] and ': give ' in said['samples']


def test_what_cannot_be_loaded(tmp_path, few):
    datasets.Dataset.from_list([]).save_to_disk(tmp_path/'empty'/'default')
    for path, changes, said in ((tmp_path/'empty', {}, 'empty has no rows'), (few, dict(val_size=999), 'val_size 999 leaves no training rows'), (tmp_path/'nowhere', {}, 'o such file or directory')):
        assert said in failures(found(path, **changes))['data']
    for name in ('good', 'bad'): save(tmp_path/'d'/name, ROWS[:50], files=1)
    file = tmp_path/'d'/'bad'/'train-00000.parquet'
    file.write_bytes(file.read_bytes()[:1000])
    findings = found(tmp_path/'d', 20, train_dataset_name=['good', 'bad'])
    assert failures(findings) == dict(columns=f'bad: {file}: damaged, or no parquet file; remove it, or copy it again')
    assert findings['samples'].text.startswith('20 of 20 rows of training'), 'as in training, the others are read'
    assert 'damaged' in failures(found(tmp_path/'d', train_dataset_name=['bad']))['data']


TEMPLATES = {'roles': ("message['role']", "'user'"), 'no end': ("+ '<|im_end|>' ", ''), 'other start': ("assistant\\n' }}", "assistant\\n\\n' }}"),
             'changed texts': ("message['content']", "message['content'] | upper"), 'no program': ('endfor', 'end')}


@pytest.mark.parametrize('name', TEMPLATES)
def test_a_bad_chat_template(name, few):
    old, new = TEMPLATES[name]
    vlm, train = configs(few)
    assert old in vlm.lm_chat_template
    said = failures({f.name: f for f in ins.data_findings(evolve(vlm, lm_chat_template=vlm.lm_chat_template.replace(old, new)), train, 60)})
    assert list(said) in (['data'], ['template']) and 'template' in ' '.join(said.values()), said


def test_what_would_stop_a_run_is_named(few, monkeypatch):
    def fails(self, row): raise ValueError('no token r9c9')
    monkeypatch.setattr(VQADataset, 'plan_row', fails)
    said = failures(found(few, 3))
    assert list(said) == ['data'] and 'sample made/' in said['data'] and 'no token r9c9' in said['data']


def test_control_characters_do_not_reach_the_terminal():
    tokenizer = load_tokenizer(preset('shapes')[0])
    ids = tokenizer('\x1b[2J\x07bad', return_tensors='pt').input_ids[0]
    assert '\x1b' not in ins.sample_text(dict(input_ids=ids, labels=ids*0-100), tokenizer)


# --- the command

def test_the_command_shows_samples_and_ends_with_1_at_a_fault(tmp_path):
    "In a process of its own; a minute of work is the limit, however busy the machine."
    rows = list(FEW)
    k, = cut_picture(rows)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    flags = [f'--{k}={v}' for k, v in (SIZES | LIMITS).items() if k != 'train_dataset_name']
    done = nanovlm(['check', *flags, '--train_dataset_path', save(tmp_path/'d', rows, files=1), '--rows', '2'], tmp_path, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1 and f'unreadable_image: made/{k}: ' in done.stdout and 'Traceback' not in done.stderr, done.stdout+done.stderr
    assert done.stdout.count('<|im_start|>assistant\n[[') >= 2
    assert after.ru_utime-before.ru_utime+after.ru_stime-before.ru_stime < 60
