"`nanovlm inspect`: planted faults are named with the sample's id, clean data are not, and the page stands alone."
import io
import json
import random
import re
import resource
import sys
from html.parser import HTMLParser

import datasets
import pytest
import torch
import yaml
from commands import run
from PIL import Image, ImageDraw

from nanovlm_nb.tools import inspect as ins
from nanovlm_nb.cli import main as nanovlm
from nanovlm_nb.core.config import evolve, preset
from nanovlm_nb.data.dataset import VQADataset, read_row
from nanovlm_nb.tools.checks import answers_in, sample_hash
from nanovlm_nb.data.loader import load_sources, load_tokenizer, make_samples
from nanovlm_nb.data.packing import collate_packs, pack

pytestmark = pytest.mark.usefixtures('one_thread')
SIZES = dict(max_img_size=256, resize_to_max_side_len=False, lm_max_length=1024)
LIMITS = dict(max_sample_length=1024, val_size=20, num_of_sequences=8, num_workers=0, val_workers=0, stream_dataset=False, train_dataset_name=['default'])
FLAGS = [f'--{k}={v}' for k, v in (SIZES | LIMITS).items() if k != 'train_dataset_name'] + ['--train_dataset_name', 'default']


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
def clean(tmp_path_factory):
    "The folder of clean rows."
    return save(tmp_path_factory.mktemp('data')/'clean', ROWS, files=1)


@pytest.fixture(scope='module')
def few(tmp_path_factory):
    "The folder of a part of them."
    return save(tmp_path_factory.mktemp('data')/'few', FEW, files=1)


def command(cwd, *args):
    "The console command in a process of its own: exit code and output; a minute of work is the limit, however busy the machine."
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run([sys.executable, '-m', 'nanovlm_nb.cli', 'inspect', *args], cwd, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 'Traceback' not in done.stderr, done.stderr[-3000:]
    assert after.ru_utime-before.ru_utime+after.ru_stime-before.ru_stime < 60
    return done.returncode, done.stdout


def here(capsys, *args):
    "The same command in this process."
    code = nanovlm(['inspect', *FLAGS, *map(str, args)])
    return code, capsys.readouterr().out


def faults(text: str) -> dict[str, list[str]]:
    "Kind -> ids, as the summary lists them; warnings are left out."
    return {m[1]: re.sub(r' and \d+ more$', '', m[2]).split(', ') for m in re.finditer(r'^FAULT +(\w+): (.*)$', text, re.M)}


# --- nothing planted

def test_200_clean_samples_have_no_fault(clean, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = here(capsys, '--train_dataset_path', clean)
    assert (code, faults(text)) == (0, {}) and 'warning' not in text, text
    assert '200 of training, 20 of validation, 220 inspected, 0 left out' in text
    assert (tmp_path/'inspect.html').stat().st_size < 1_500_000


def test_the_preset_has_no_fault(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nanovlm(['inspect', '--samples', '50', '--compare', '100', '--num_of_sequences', '8', '--data_cutoff_idx', '300', '--val_size', '60', '--html', '']) == 0
    text = capsys.readouterr().out
    assert faults(text) == {} and '50 of training, 50 of validation, 100 inspected, 0 left out' in text
    assert not list(tmp_path.iterdir()), 'no page was asked for'


def test_clean_samples_when_streamed(few, tmp_path, capsys):
    code, text = here(capsys, '--train_dataset_path', few, '--stream_dataset', 'True', '--html', '')
    assert (code, faults(text)) == (0, {}) and '40 of training, 20 of validation' in text


@pytest.mark.parametrize('stream', ['True', 'False'])
def test_several_configurations_with_weights(tmp_path, capsys, stream):
    for name, part in (('a', ROWS[:50]), ('b', ROWS[50:100])): save(tmp_path/'d'/name, [r | dict(source=name) for r in part])
    code, text = here(capsys, '--train_dataset_path', tmp_path/'d', '--train_dataset_name', 'a', 'b', '--train_dataset_weights', '1', '3',
                      '--stream_dataset', stream, '--val_size', '20', '--samples', '30', '--html', '')
    assert (code, faults(text)) == (0, {}) and '30 of training, 20 of validation, 50 inspected' in text


def test_texts_alone(tmp_path, capsys):
    save(tmp_path/'d', [{k: v for k, v in r.items() if k != 'images'} for r in FEW])
    code, text = here(capsys, '--train_dataset_path', tmp_path/'d', '--html', tmp_path/'x.html')
    assert (code, faults(text)) == (0, {}) and 'tiles a sample        0 to 0' in text


def lines(folder, n: int = 60) -> list[str]:
    "JSON lines beside a folder of pictures."
    (folder/'images').mkdir(parents=True)
    said = []
    for i in range(n):
        (folder/'images'/f'{i}.png').write_bytes(png(picture(random.Random(i)))['bytes'])
        said.append(json.dumps(dict(image=f'{i}.png', conversations=[dict(role='user', content=f'<image>What is {i}?'), dict(role='assistant', content=f'It is {i}.')])))
    return said


def test_json_lines(tmp_path, capsys):
    said = lines(tmp_path/'d')
    (tmp_path/'d'/'train.jsonl').write_text('\n'.join(said))
    code, text = here(capsys, '--train_dataset_path', tmp_path/'d', '--html', '')
    assert (code, faults(text)) == (0, {}) and '40 of training, 20 of validation' in text
    (tmp_path/'d'/'images'/'5.png').unlink()
    (tmp_path/'d'/'train.jsonl').write_text('\n'.join([*said[:9], '{"conversations": 3}', *said[10:]]))
    code, text = here(capsys, '--train_dataset_path', tmp_path/'d', '--html', '')
    assert code == 1 and faults(text) == {'corrupt_picture': ['train/6'], 'columns': ['train/10']}, text


def test_what_cannot_be_loaded_at_all(tmp_path, few, capsys):
    datasets.Dataset.from_list([]).save_to_disk(tmp_path/'empty'/'default')
    for path, more, said in ((tmp_path/'empty', [], 'nothing could be loaded'), (few, ['--val_size', '999'], 'val_size 999 leaves no training rows')):
        code, text = here(capsys, '--train_dataset_path', path, *more, '--html', '')
        assert code == 1 and said in text and len(faults(text)) == 1
    with pytest.raises(SystemExit, match='2'): here(capsys, '--train_dataset_path', tmp_path/'nowhere', '--html', '')
    assert capsys.readouterr().err.endswith(f"{tmp_path/'nowhere'}: there is no such file or directory: correct the path\n")


# --- faults of the data and of the configuration, by the command itself

def cut_picture(rows):
    "The second half of a picture is missing."
    k = next(i for i in range(30, 60) if rows[i]['images'])
    rows[k] = rows[k] | dict(images=[dict(bytes=rows[k]['images'][0]['bytes'][:len(rows[k]['images'][0]['bytes'])//2], path=None)])
    return [k]


def duplicate(rows):
    "Every sample twice, so that chance puts some on both sides."
    rows[:] = [r for r in rows[:30] for _ in range(2)]
    return range(60)


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


IN_DATA = {'corrupt_picture': (cut_picture, []), 'in_both_splits': (duplicate, []), 'too_long': (overlong, []),
           'columns': (renamed, []), 'ratings': (rated_low, ['--relevance_min_rating', 3])}


def planted(tmp_path, plant):
    "A folder with a fault, and the ids that may be named for it."
    rows = list(FEW)
    where = plant(rows)
    return save(tmp_path/'d', rows, files=1), [w if isinstance(w, str) else f'made/{w}' for w in where]


@pytest.mark.parametrize('kind', IN_DATA)
def test_faults_in_the_data(kind, tmp_path, capsys):
    plant, args = IN_DATA[kind]
    folder, ids = planted(tmp_path, plant)
    args = ['--train_dataset_path', folder, '--html', tmp_path/'inspect.html', *args]
    code, text = command(tmp_path, *FLAGS, *args) if kind == 'corrupt_picture' else here(capsys, *args)
    found = faults(text)
    assert code == 1 and list(found) == [kind] and set(found[kind]) <= set(ids), text
    page = (tmp_path/'inspect.html').read_text()
    assert found[kind][0] in page and kind in page and 'remedy: ' in text


TEMPLATES = {'roles': ("message['role']", "'user'"), 'no end': ("+ '<|im_end|>' ", ''), 'other start': ("assistant\\n' }}", "assistant\\n\\n' }}"),
             'changed texts': ("message['content']", "message['content'] | upper"), 'trimmed': ("message['content']", "message['content'] | trim"), 'no program': ('endfor', 'end')}


@pytest.mark.parametrize('name', TEMPLATES)
def test_a_bad_chat_template(name, few, tmp_path, capsys):
    old, new = TEMPLATES[name]
    template = preset('shapes')[0].lm_chat_template
    assert old in template
    (tmp_path/'run.yaml').write_text(yaml.safe_dump(dict(vlm=dict(lm_chat_template=template.replace(old, new)))))
    code, text = here(capsys, '--config', tmp_path/'run.yaml', '--train_dataset_path', few, '--html', tmp_path/'x.html')
    found = faults(text)
    assert code == 1 and list(found) == ['chat_template'] and all(re.fullmatch(r'made/\d+', i) for i in found['chat_template']), text


@pytest.mark.parametrize('plant', [other_form, misspelt])
def test_more_wrong_columns(plant, tmp_path, capsys):
    folder, ids = planted(tmp_path, plant)
    code, text = here(capsys, '--train_dataset_path', folder, '--html', '')
    assert code == 1 and faults(text) == {'columns': ids}
    if plant is misspelt: assert 'did you mean `relevance_ratings`' in text


def test_a_broken_configuration_is_named(tmp_path, capsys):
    for name in ('good', 'bad'): save(tmp_path/'d'/name, ROWS[:50], files=1)
    file = tmp_path/'d'/'bad'/'train-00000.parquet'
    file.write_bytes(file.read_bytes()[:1000])
    code, text = here(capsys, '--train_dataset_path', tmp_path/'d', '--train_dataset_name', 'good', 'bad', '--samples', '20', '--html', '')
    assert code == 1 and faults(text) == {'columns': ['bad']} and '20 of training, 20 of validation' in text
    code, text = here(capsys, '--train_dataset_path', tmp_path/'d', '--train_dataset_name', 'bad', '--html', '')
    assert code == 1 and faults(text) == {'columns': ['bad']} and 'nothing could be loaded' in text


def test_ratings_that_take_more_than_half_are_a_warning(tmp_path, capsys):
    save(tmp_path/'d', [r | dict(relevance_ratings=[5 if i % 3 == 0 else 2]*len(r['texts'])) for i, r in enumerate(FEW)])
    code, text = here(capsys, '--train_dataset_path', tmp_path/'d', '--relevance_min_rating', '3', '--html', '')
    assert code == 0 and faults(text) == {} and 'warning ratings: made/' in text and 'left out: ratings' in text


@pytest.mark.parametrize('plant, kind', [(cut_picture, 'corrupt_picture'), (overlong, 'too_long'), (duplicate, 'in_both_splits')])
def test_faults_of_streams(plant, kind, tmp_path, capsys):
    folder, _ = planted(tmp_path, plant)
    code, text = here(capsys, '--train_dataset_path', folder, '--stream_dataset', 'True', '--val_size', '9', '--samples', '60', '--html', '')
    found = faults(text)
    assert code == 1 and list(found) == [kind] and all(re.fullmatch(r'default/\d+:\d+', i) for i in found[kind]), text


# --- faults of a pipeline: the command runs on one that does something wrong to a single sample

def roll(labels, by):
    "Labels moved by some places."
    return labels.roll(by)


def without(s, places):
    "A sample without some of its tokens."
    keep = [t for t in range(len(s['labels'])) if t not in set(places)]
    return s | {k: s[k][keep] for k in ('input_ids', 'labels')}


def images_at(s, tokenizer):
    "Places of the placeholders."
    return (s['input_ids'] == tokenizer.image_token_id).nonzero().flatten().tolist()


def everything(s):
    "All tokens learned."
    return s | dict(labels=torch.cat([s['input_ids'][1:], torch.tensor([-100])]))


def pad_hidden(s, tokenizer):
    "Labels masked wherever they equal the padding."
    return s | dict(labels=s['labels'].masked_fill(s['labels'] == tokenizer.pad_token_id, -100))


IN_PIPELINE = {
    'placeholders': lambda s, tok: without(s, images_at(s, tok)[3:5]),
    'image_cut': lambda s, tok: s | {k: s[k][images_at(s, tok)[20]:] for k in ('input_ids', 'labels')},
    'no_target': lambda s, tok: s | dict(labels=torch.full_like(s['labels'], -100)),
    'label_shift': lambda s, tok: s | dict(labels=roll(s['labels'], 1)),
    'prompt_learned': lambda s, tok: everything(s),
    'tile_grid': lambda s, tok: s | dict(images=[s['images'][0][:-1], *s['images'][1:]]),
    'answer_end': pad_hidden,
}
MORE = {
    'label_shift': [lambda s, tok: s | dict(labels=roll(s['labels'], -1)),
                    lambda s, tok: s | dict(labels=s['labels'].masked_fill(roll(s['labels'], 1) == -100, -100))],
    'image_cut': [lambda s, tok: s | {k: torch.cat([s[k][:images_at(s, tok)[0]-1], s[k][images_at(s, tok)[-1]+1:]]) for k in ('input_ids', 'labels')}],
    'placeholders': [lambda s, tok: s | dict(input_ids=s['input_ids'].index_fill(0, torch.tensor([2]), tok.image_token_id))],
    'tile_grid': [lambda s, tok: s | dict(input_ids=s['input_ids'].where(s['input_ids'] != tok.r1c2_id, tok.r2c2_id))],
    'corrupt_picture': [lambda s, tok: s | dict(images=[s['images'][0].float()/0*0, *s['images'][1:]])],
}


def a_sample(samples):
    "The first made sample whose picture has several tiles, and more than one turn."
    return next(s for s in samples if s['images'] and len(s['images'][0]) > 3 and len(s['images']) == 1 and s['turns'] > 1)


@pytest.fixture(scope='module')
def tokenizer():
    "The tokenizer of the preset."
    return load_tokenizer(evolve(preset('shapes')[0], **SIZES))


def configs():
    "The two configurations that the flags mean."
    vlm, train = preset('shapes')
    return evolve(vlm, **SIZES), evolve(train, **LIMITS)


@pytest.fixture(scope='module')
def made(tokenizer):
    "Samples of a part of the rows, by id."
    vlm, train = configs()
    samples = make_samples(train, vlm, tokenizer, FEW)
    return {s['id']: s | dict(texts=r['texts'], turns=len(r['texts'])) for i, r in enumerate(FEW) for s in [samples.load(i)]}


def faulty(monkeypatch, wrong, only):
    "Let the pipeline do something wrong to a sample when it is inspected; packs are made without it."
    finish = VQADataset.finish

    def planted(self, plan, pictures, rng=None):
        sample = finish(self, plan, pictures, rng)
        return wrong(sample, self.tokenizer) if plan.id == only and rng is None else sample
    monkeypatch.setattr(VQADataset, 'finish', planted)


@pytest.mark.parametrize('kind', IN_PIPELINE)
def test_faults_of_the_pipeline(kind, few, made, monkeypatch, tmp_path, capsys):
    source = load_sources(evolve(configs()[1], train_dataset_path=str(few)))[0]
    ids = [row['id'] for _, (_, row) in zip(range(20), source.rows_of(0, 1, 0))]
    target = next(i for i in ids if made[i]['images'] and len(made[i]['images'][0]) > 3)
    faulty(monkeypatch, IN_PIPELINE[kind], target)
    code, text = here(capsys, '--train_dataset_path', few, '--samples', '20', '--html', tmp_path/'x.html')
    assert code == 1 and faults(text) == {kind: [target]}, text
    assert f'{target}<span class="tag bad">{kind}</span>' in (tmp_path/'x.html').read_text()


def test_packs_without_targets(few, monkeypatch, capsys):
    finish = VQADataset.finish

    def masked(self, plan, pictures, rng=None):
        s = finish(self, plan, pictures, rng)
        return s if rng is None else s | dict(labels=torch.full_like(s['labels'], -100))
    monkeypatch.setattr(VQADataset, 'finish', masked)
    code, text = here(capsys, '--train_dataset_path', few, '--samples', '20', '--html', '')
    found = faults(text)
    assert code == 1 and list(found) == ['no_target_in_pack'] and all(re.fullmatch(r'made/\d+', i) for i in found['no_target_in_pack']), text


def test_what_stops_the_pipeline_is_a_fault(few, monkeypatch, capsys):
    def fails(self, row): raise ValueError('no token r9c9')
    monkeypatch.setattr(VQADataset, 'plan_row', fails)
    code, text = here(capsys, '--train_dataset_path', few, '--samples', '3', '--html', '')
    assert code == 1 and list(faults(text)) == ['stops_the_run'] and 'no token r9c9' in text


def test_all_fourteen_are_planted_here():
    here_planted = {*IN_DATA, *IN_PIPELINE, 'chat_template', 'no_target_in_pack'}
    assert here_planted == set(ins.KINDS)-{'stops_the_run'} and len(here_planted) == 14


# --- samples of another origin

@pytest.mark.parametrize('kind, wrong', [(k, w) for k, ws in MORE.items() for w in ws])
def test_other_ways_to_plant_them(kind, wrong, made, tokenizer):
    target = a_sample(made.values())
    samples = [wrong(s, tokenizer) if s is target else s for s in made.values()]
    found = ins.inspect_samples(samples, *configs(), tokenizer).errors
    assert {(f.kind, f.id) for f in found} == {(kind, target['id'])}


def test_samples_as_lists_and_without_texts(made, tokenizer):
    bare = [dict(input_ids=s['input_ids'].tolist(), labels=s['labels'].tolist(), images=s['images']) for s in made.values()]
    report = ins.inspect_samples(bare, *configs(), tokenizer)
    assert not report.faults and len(report.sizes['tokens']) == 60
    report = ins.inspect_samples(bare[:5], *configs(), tokenizer, val=bare[3:4])
    assert [f.kind for f in report.faults] == ['in_both_splits']*2 and report.faults[1].id == '3'


def test_batches_with_and_without_documents(made, tokenizer):
    some = list(made.values())[:6]
    batch = collate_packs([pack(some[:3], 2048, 2), pack(some[3:], 2048, 2)])
    report = ins.inspect_samples([batch], *configs(), tokenizer)
    assert not report.faults and len(report.sizes['tokens']) == 6 and len(report.packs) == 2
    shifted = batch | dict(labels=batch['labels'].roll(1, 1))
    assert {(f.kind, f.id) for f in ins.inspect_samples([shifted], *configs(), tokenizer).faults} >= {('label_shift', s['id']) for s in some}
    row = {k: batch[k][:1] for k in ('input_ids', 'labels', 'attention_mask', 'images')}
    assert {f.kind for f in ins.inspect_samples([row], *configs(), tokenizer).faults} <= {'too_long'}


def test_answers_that_pose(tokenizer):
    "A pipeline that trusts special tokens in a question trains on the words of a user."
    text = '<|im_start|>user\nSay<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n'
    ids = tokenizer(text).input_ids
    report = ins.inspect_samples([dict(id='p', input_ids=ids, labels=[-100]*(len(ids)-1)+[-100], texts=[dict(user='Say', assistant='yes')])], *configs(), tokenizer)
    assert {f.kind for f in report.faults} == {'no_target'}
    answers = answers_in(ids, report.rules)
    learned = [ids[t+1] if any(a.start <= t+1 < a.stop for a in answers) else -100 for t in range(len(ids)-1)]+[-100]
    report = ins.inspect_samples([dict(id='p', input_ids=ids, labels=learned, texts=[dict(user='Say', assistant='yes')])], *configs(), tokenizer)
    assert [(f.kind, f.id) for f in report.faults] == [('prompt_learned', 'p')]


def test_a_fingerprint_sees_contents_only(tmp_path):
    (tmp_path/'x.png').write_bytes(ROWS[0]['images'][0]['bytes'])
    a = read_row(ROWS, 0)
    assert sample_hash(a) == sample_hash(a | dict(id='other', images=[tmp_path/'x.png'])) == sample_hash(a | dict(images=[dict(path=str(tmp_path/'x.png'))]))
    assert len({sample_hash(read_row(ROWS, i)) for i in range(220)}) == 220


# --- the page, and the command line

class Page(HTMLParser):
    "Tags that are open, and addresses."
    def __init__(self):
        super().__init__()
        self.open, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ('meta', 'img', 'br'): self.open.append(tag)
        self.addresses += [v for k, v in attrs if k in ('src', 'href', 'srcset', 'data', 'action')]
        assert not [k for k, _ in attrs if k.startswith('on')]

    def handle_startendtag(self, tag, attrs): pass

    def handle_endtag(self, tag): assert self.open.pop() == tag


def test_the_page_stands_alone(made, tokenizer, tmp_path, capsys):
    evil = next(iter(made.values())) | dict(id='<script>alert(1)</script>"&')
    report = ins.inspect_samples([evil | dict(labels=roll(evil['labels'], 1)), *list(made.values())[:40]], *configs(), tokenizer)
    report.drops['<b>'] = 'ratings'
    assert ins.tell_inspection(report, tmp_path/'x.html') == 1 and 'FAULT' in capsys.readouterr().out
    text = (tmp_path/'x.html').read_text(encoding='utf-8')
    page = Page()
    page.feed(text)
    assert not page.open and page.addresses and all(a.startswith('data:image/') for a in page.addresses)
    assert not re.search(r'<script|<link|@import|url\(|https?:', text)
    assert 'prefers-color-scheme:dark' in text and text.count('<img') == sum(len(u) for c in report.shown for *_, u in c.pictures)


def test_control_characters_do_not_reach_the_terminal(tokenizer):
    ids = tokenizer('\x1b[2J\x07bad').input_ids
    report = ins.inspect_samples([dict(id='x', input_ids=ids, labels=[-100]*len(ids))], *configs(), tokenizer)
    assert '\x1b' not in ins.summary(report) and '\x1b[2J' not in ins.summary(report, True)


HELP = '''
import sys
from nanovlm_nb.cli import main
try: main(['inspect', '--help'])
except SystemExit as e: code = e.code
print('loaded:', *[m for m in ('torch', 'datasets', 'wandb', 'matplotlib') if m in sys.modules], file=sys.stderr)
sys.exit(code)
'''


def test_help_loads_no_torch_and_knows_all_flags(tmp_path):
    done = run([sys.executable, '-c', HELP], tmp_path, fresh=True)
    assert done.stderr.split() == ['loaded:']
    assert all(f'--{flag}' in done.stdout for flag in ('samples', 'compare', 'html', 'config', 'preset', 'train_dataset_path', 'max_img_size'))


@pytest.mark.parametrize('flags, said', [(['--sample', '3'], 'unknown flag `--sample`'), (['--samples', '0'], 'give a whole number, 1 or more'), (['--batch_sise', '3'], '--batch_size')])
def test_wrong_flags_are_said_in_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as e: nanovlm(['inspect', *flags])
    assert e.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_ids_of_many_faults_are_in_the_page(tokenizer, made):
    wrong = [s | dict(labels=torch.full_like(s['labels'], -100)) for s in made.values()]
    report = ins.inspect_samples(wrong, *configs(), tokenizer)
    page = ins.to_html(report)
    assert len(report.errors) == 60 and all(i in page for i in made) and 'and 55 more' in ins.summary(report)
    assert json.dumps([f._asdict() for f in report.faults])
