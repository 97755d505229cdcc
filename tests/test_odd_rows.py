"Rows of a kind that people have, each of which was once trained otherwise than it was given."

import csv
import io
import json
import tarfile

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image

from nanovlm_nb.core.fields import IGNORE
from nanovlm_nb.core.config import evolve, tiny
from nanovlm_nb.data.drops import Dropped
from nanovlm_nb.data.files import load_configs, own_rows, text_rows
from nanovlm_nb.data.loader import get_dataloaders, load_tokenizer
from nanovlm_nb.answers.answer import Asker, questions_of
from nanovlm_nb.data.samples import VQADataset, to_row
from nanovlm_nb.data.images import image_processor_of
from nanovlm_nb.data.prompts import (
    answer_frames,
    encode_chat,
    encode_prompt,
    render_chat,
)
from nanovlm_nb.model.vlm import VisionLanguageModel
from nanovlm_nb.data.sources import MapSource, StreamSource
from nanovlm_nb.core.usage import UsageError
from nanovlm_nb.core.tokenizer import get_tokenizer


def jpg(shade: int, kind: str = 'JPEG') -> bytes:
    Image.new('RGB', (40, 30), (shade, 0, 0)).save(file := io.BytesIO(), kind)
    return file.getvalue()


def write_tar(folder, samples: list[dict]):
    "A tar of samples: kind of file -> bytes."
    folder.mkdir()
    with tarfile.open(folder / 'a.tar', 'w') as tar:
        for i, sample in enumerate(samples):
            for kind, data in sample.items():
                info = tarfile.TarInfo(f'{i:04}.{kind}')
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder


def read(folder, tmp_path, streaming: bool, at=None) -> list:
    "What a source gives from a position on: (position, row)."
    found = load_configs(folder, cache_dir=str(tmp_path / 'cache'), streaming=streaming)
    source = (
        StreamSource(found) if streaming else MapSource(found['default'], shuffle=False)
    )
    return list(source.rows_of(0, 1, 0, at))


SAID = json.dumps(dict(question='q', answer='a')).encode()
ODD = dict(
    no_text=dict(jpg=jpg(0)),
    another_key=dict(jpg=jpg(0), json=SAID[:-1] + b', "more": 1}'),
    number=dict(jpg=jpg(0), json=b'{"question": "q", "answer": 3}'),
    no_picture=dict(json=SAID),
    other_ending=dict(png=jpg(0, 'PNG'), json=SAID),
    latin=dict(jpg=jpg(0), txt='é'.encode('latin-1')),
    broken=dict(jpg=jpg(0), json=b'{'),
)


@pytest.mark.parametrize('streaming', [True, False])
@pytest.mark.parametrize('odd', ODD)
def test_a_sample_unlike_its_neighbours_costs_itself_at_most(tmp_path, odd, streaming):
    "40 of 100 lies in the second table of 32 rows; `datasets` looks at the first five."
    rows = [
        r
        for _, r in read(
            write_tar(
                tmp_path / 't',
                [
                    dict(jpg=jpg(i), json=SAID) if i != 40 else ODD[odd]
                    for i in range(100)
                ],
            ),
            tmp_path,
            streaming,
        )
    ]
    assert len(rows) == 100 and all(
        len(r['images']) == 1 and r['texts'][0]['assistant'] == 'a'
        for i, r in enumerate(rows)
        if i != 40
    )
    used = dict(rows[40]) if isinstance(rows[40], dict) and rows[40]['texts'] else None
    assert bool(used) == (
        odd in ('another_key', 'number', 'no_picture', 'other_ending')
    ) and (not used or len(used['images']) == (odd != 'no_picture'))


@pytest.mark.parametrize('kind', ['tar', 'parquet'])
def test_damage_costs_a_resumed_run_the_same_rows(tmp_path, kind):
    if kind == 'tar':
        file = (
            write_tar(
                folder := tmp_path / 't',
                [dict(jpg=jpg(i), json=SAID) for i in range(100)],
            )
            / 'a.tar'
        )
    else:
        noise = np.random.default_rng(0)
        rows = [
            dict(
                image=dict(bytes=noise.bytes(900), path=None), question='q', answer='a'
            )
            for _ in range(200)
        ]
        (folder := tmp_path / 't').mkdir()
        datasets.Dataset.from_list(rows).to_parquet(
            file := folder / 'a.parquet', batch_size=96
        )
    whole = file.read_bytes()
    if kind == 'tar':
        file.write_bytes(whole[: whole.find(b'0070.jpg') + 600])
    else:
        at = whole.find(rows[120]['image']['bytes'])
        file.write_bytes(whole[: at - 400] + b'\xff' * 400 + whole[at:])
    places = [
        (p, r.args[:2] if isinstance(r, Dropped) else r['id'])
        for p, r in read(folder, tmp_path, True)
    ]
    assert [p[1][1] for p in places if isinstance(p[1], tuple)].count(
        'unreadable_shard'
    ) == 1 and len(places) > 50
    for k in (10, 40, len(places) - 2):
        assert [
            (p, r.args[:2] if isinstance(r, Dropped) else r['id'])
            for p, r in read(folder, tmp_path, True, places[k - 1][0])
        ] == places[k:]


def test_opened_pictures_are_the_same_for_any_number_of_workers(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / 'a.png')
    opened = Image.open(tmp_path / 'a.png')
    vlm, cfg = tiny()
    rows = own_rows(
        [dict(image=opened, question=f'Number {i}?', answer='a') for i in range(40)]
    )
    seen = {}
    for workers in (0, 2):
        train, _ = get_dataloaders(
            evolve(cfg, num_workers=workers, val_workers=0, val_size=2, max_epochs=1),
            vlm,
            tokenizer=load_tokenizer(vlm),
            rows=rows,
        )
        seen[workers] = {
            t.numpy().tobytes() for b in train for row in b['images'] for t in row
        }
        assert not train.drops.reasons
    assert len(seen[0]) == 1 and seen[0] == seen[2]


def test_the_column_that_a_row_fills_counts(tmp_path):
    "As pandas writes rows of one and of several pictures."
    (tmp_path / 'a.jpg').write_bytes(jpg(1))
    lines = [
        dict(image='a.jpg', images=None),
        dict(image=None, images=['a.jpg']),
        dict(image='a.jpg', images=[]),
        dict(image='a.jpg'),
    ]
    (tmp_path / 't.jsonl').write_text(
        '\n'.join(
            json.dumps(line | dict(question='q', answer='a', texts=None))
            for line in lines
        )
        + '\n'
    )
    assert [(len(row['images']), row['texts']) for row in text_rows(tmp_path)] == [
        (1, [dict(user='q', assistant='a')])
    ] * 4


def test_a_line_with_odd_ratings_costs_itself(tmp_path):
    lines = [
        dict(question='q', answer='a', relevance_ratings=r)
        for r in ([5], 5, ['high'], None, [3.5, None])
    ]
    (tmp_path / 't.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    checked = [to_row(row, i) for i, row in enumerate(text_rows(tmp_path))]
    assert [(row.id, row.reason) for row in checked if isinstance(row, Dropped)] == [
        ('t/2', 'bad_row'),
        ('t/3', 'bad_row'),
    ] and len(checked) == 5


def test_names_with_a_comma_and_pictures_in_fields(tmp_path):
    (tmp_path / 'Paris, France.jpg').write_bytes(jpg(1))
    inside = 'data:image/jpeg;base64,' + 'A' * 200_000
    with open(tmp_path / 't.csv', 'w', newline='') as f:
        csv.writer(f).writerows(
            [
                ['image', 'question', 'answer'],
                ['Paris, France.jpg', 'q', 'a'],
                [inside, 'q', 'a'],
                ['x.jpg', 'q', 'a', 'b'],
            ]
        )
    *found, last = [to_row(row, i) for i, row in enumerate(text_rows(tmp_path))]
    assert [
        row['images'][0].endswith('/Paris, France.jpg') or row['images'][0] == inside
        for row in found
    ] == [True] * 2
    assert 'more fields than the header' in last.detail


def test_a_column_that_only_later_files_fill(tmp_path):
    rows = (
        dict(question='q', answer='a', relevance_ratings=None),
        dict(question='q', answer='a', relevance_ratings=[5]),
    )
    for name, row in zip('ab', rows):
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / 'd' / f'{name}.parquet')
    for streaming in (True, False):
        assert (
            len(
                [
                    r
                    for _, r in read(tmp_path / 'd', tmp_path, streaming)
                    if isinstance(r, dict)
                ]
            )
            == 2
        )


def test_a_table_of_pandas_is_what_its_rows_are():
    rated = pandas.DataFrame(
        [
            dict(
                images=[jpg(1)],
                texts=[dict(user='q', assistant='a')],
                relevance_ratings=np.array([5]),
            )
        ]
    )
    both = pandas.concat(
        [
            rated,
            pandas.DataFrame(
                [
                    dict(image=jpg(2), question='q', answer='a'),
                    dict(image=None, question='q', answer='b'),
                ]
            ),
        ]
    )
    rows = own_rows(both)
    assert [
        (len(r['images']), r.get('relevance_ratings'), r['texts'][0]['assistant'])
        for r in rows
    ] == [(1, [5.0], 'a'), (1, None, 'a'), (0, None, 'b')]


TRIMS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_templates_that_trim():
    "Llama 3 and Gemma do."
    vlm, _ = tiny()
    tok = load_tokenizer(evolve(vlm, lm_chat_template=TRIMS))
    ids, labels = encode_chat(
        tok,
        [
            dict(user='What is it?\n', assistant=' a cat'),
            dict(user=' Sure?', assistant='Yes.\n'),
        ],
    )
    assert (
        tok.decode(labels[labels != IGNORE]) == 'a cat<|im_end|>\nYes.<|im_end|>\n'
        or tok.decode(labels[labels != IGNORE]) == 'a cat<|im_end|>\nYes.<|im_end|>'
    )


def test_files_beside_those_that_are_read_are_named(tmp_path, caplog):
    for name in ('a.jsonl', 'b.jsonl', 'c.csv', 'd.parquet'):
        (tmp_path / name).write_text('{"question": "q", "answer": "a"}\n')
    assert (
        len(text_rows(tmp_path)) == 2
        and "left aside, beside a.jsonl: ['c.csv', 'd.parquet']" in caplog.text
    )


def test_a_template_with_the_date_writes_the_same_every_day(tmp_path):
    tok = load_tokenizer(tiny()[0])
    tok.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + TRIMS
    tok.save_pretrained(tmp_path)
    for _ in range(2):
        again = get_tokenizer(str(tmp_path))
        assert (
            again.apply_chat_template(
                [dict(role='user', content='q')], tokenize=False
            ).startswith('26 Jul 2024\n')
            and again.chat_template.count('macro strftime_now') == 1
        )
        again.save_pretrained(tmp_path)


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ODD_TEMPLATES = {  # what it does with an answer -> Jinja for the content, an answer that it changes
    'takes out thinking': ("m['content'].split('</think>')[-1]", '<think>x</think>a'),
    'joins lines': ("m['content'] | replace('\n\n', '\n')", 'a\n\nb'),
    'refuses': (
        "m['content'] if m['content'] | length < 40 else raise_exception('too long for me')",
        'a' * 60,
    ),
    'fails': (
        "m['content'] if (9//(m['content'] | length - 3)) is number else ''",
        'yes',
    ),
}


@pytest.mark.parametrize('name', ODD_TEMPLATES)
def test_a_row_that_the_template_changes_costs_itself(name):
    "The rows before and behind it are used; a run ends only if none is left."
    vlm, cfg = tiny(val_size=1, max_epochs=1, num_workers=0, val_workers=0)
    content, answer = ODD_TEMPLATES[name]
    vlm = evolve(vlm, lm_chat_template=CHATML.replace('CONTENT', content))
    rows = own_rows(
        [dict(question='1', answer=answer if i == 7 else '22') for i in range(12)]
    )
    train, _ = get_dataloaders(cfg, vlm, tokenizer=load_tokenizer(vlm), rows=rows)
    assert sum(
        len(ids) for b in train for ids in b['ids']
    ) == 10 and train.drops.counts == {'template': 1}
    train, _ = get_dataloaders(
        cfg,
        vlm,
        tokenizer=load_tokenizer(vlm),
        rows=own_rows([dict(question='1', answer=answer)] * 4),
    )
    assert (
        not list(train)
        and "of 3 rows that were left out are 'template'" in train.drops.blame
    )


LAST = {  # templates that write more around the last answer than around those before it: Phi-3, Qwen3
    'phi': "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    'qwen': "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
}


@pytest.mark.parametrize('name', LAST)
def test_the_last_answer_may_have_another_frame(name):
    tok = load_tokenizer(evolve(tiny()[0], lm_chat_template=LAST[name]))
    turns = [
        dict(user='a', assistant='b'),
        dict(user='a', assistant='b'),
        dict(user='a', assistant='b'),
    ]
    ids, labels = encode_chat(tok, turns)
    learned = tok.decode(labels[labels != IGNORE])
    assert (
        len(answer_frames(tok)) == 2
        and learned.startswith(dict(phi='b<|end|>\n', qwen='b<|im_end|>\n')[name] * 3)
        and 'think' not in learned
    )
    prompt = encode_prompt(tok, [*turns[:2], dict(user='a')])
    assert ids[: len(prompt)].equal(prompt)


MARKED = (
    '<image>\nWhat is it?',
    'What is it?\n<image>',
    'Is <image> darker than <image>?',
    '<image1><image2>\nWhich?',
    'First <image_2>, then <image_1>.',
    '<|vision_start|><|image_pad|><|vision_end|>What?',
    '<ImageHere>What?',
    'Picture 1: <img>a.png</img>\nPicture 2: <img>b.png</img>\nSame?',
    '<image>\n<image>\nIs <image_2> darker?',
    'No mark.',
    '<image> and <image> and <image>',
    'What does <|image|> mean?',
    '<image>a.png</image>What?',
)


@pytest.mark.parametrize('convention', ['nanovlm', 'smolvlm'])
def test_a_question_is_asked_as_it_was_learned(convention):
    "With one, two and three pictures, alone and in a conversation; no mark is left as text, each picture is there once."
    vlm = evolve(tiny()[0], image_convention=convention)
    tok = load_tokenizer(vlm)
    asker = Asker.from_model(VisionLanguageModel(vlm, load_backbone=False), tok)
    samples = VQADataset([], tok, image_processor_of(vlm), vlm.mp_image_token_length)
    for question in MARKED:
        for n in (1, 2, 3):
            pictures = [Image.new('RGB', (64, 64), (80 * k, 0, 0)) for k in range(n)]
            turns = [
                dict(user=question, assistant='yes'),
                dict(user='And <image>?' if n > 2 else 'Sure?', assistant='no'),
            ]
            row = to_row(dict(images=pictures, texts=turns), 0)
            learned = samples.load_row(row)['input_ids'].tolist()
            slots = vlm.mp_image_token_length * n
            assert learned.count(tok.image_token_id) == slots, question
            for asked in (turns[:1], turns, row['texts']):
                prompt, _ = asker.prompt(
                    pictures, [*asked[:-1], dict(user=asked[-1]['user'])]
                )
                assert prompt.count(tok.image_token_id) == slots and (
                    convention == 'smolvlm'
                    and n > 2
                    and len(asked) == 1
                    or learned[: len(prompt)] == prompt
                ), (question, n)
            text = tok.decode(learned)
            assert not any(
                mark in text.replace(tok.image_token, '')
                for mark in (
                    '<image>',
                    '<image1>',
                    '<image_1>',
                    'image_pad',
                    'ImageHere',
                    '<img>',
                )
            ), text
            first = questions_of([row])[0]
            assert (
                asker.prompt(pictures, first.question)[0]
                == learned[: len(asker.prompt(pictures, first.question)[0])]
                or n > 2
            )


FAMILIES = {  # how they write their turns, from memory -> the first and the last answer that is learned of 'a' to 'b', 'c' to 'b'
    'llama2': (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
        ' b <|im_end|>',
        ' b <|im_end|>',
    ),
    'gemma3': (
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}{% if m['content'] is string %}{{ m['content'] | trim }}"
        "{% else %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        'b<end_of_turn>\n',
        'b<end_of_turn>\n',
    ),
    'chatglm2': (
        "{% for m in messages %}{% if m['role'] == 'user' %}[Round {{ loop.index0//2 + 1 }}]\n\nQ: {{ m['content'] }}\n\n{% else %}A: {{ m['content'] }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}",
        ' b\n\n',
        ' b\n\n',
    ),
    'olmo2': (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{{ eos_token if m['role'] == 'assistant' }}{{ '\n' if not loop.last or m['role'] == 'user' }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        'b<|im_end|>',
        'b<|im_end|>',
    ),
    'default system': (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou see b.<|im_end|>\n{% endif %}"
        + CHATML.replace('CONTENT', "m['content']"),
        'b<|im_end|>\n',
        'b<|im_end|>\n',
    ),
}


@pytest.mark.parametrize('name', FAMILIES)
def test_what_is_learned_and_asked_of_families_of_models(name):
    template, first, last = FAMILIES[name]
    tok = load_tokenizer(evolve(tiny()[0], lm_chat_template=template))
    turns = [dict(user='a', assistant='b'), dict(user='c', assistant='b')]
    for n in (1, 2):
        ids, labels = encode_chat(tok, turns[:n], ['<|image|>'])
        learned = tok.decode(labels[labels != IGNORE])
        assert (
            learned == (first + last if n == 2 else last)
            and int((ids == tok.image_token_id).sum()) == 1
        )
        for k in range(n):
            assert ids[
                : len(
                    prompt := encode_prompt(
                        tok, [*turns[:k], dict(user=turns[k]['user'])], ['<|image|>']
                    )
                )
            ].equal(prompt)


@pytest.mark.parametrize(
    'template, why',
    [
        (
            "{% for m in messages %}{{ m['role'] }}: {% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
            'does not want a list of parts',
        ),
        (
            CHATML.replace('CONTENT', "m['content']").replace(
                'assistant\n', 'assistant\n<think>\n'
            ),
            'writes another text before an answer in training',
        ),
        (
            "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}",
            'fails: TemplateError: no tools',
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_a_sentence(template, why):
    tok = load_tokenizer(evolve(tiny()[0], lm_chat_template=template))
    with pytest.raises(UsageError, match=why):
        VQADataset([], tok, image_processor_of(tiny()[0]), 1)


def test_a_template_that_does_not_end():
    "It is stopped by a count of its steps, whatever the clock says."
    tok = load_tokenizer(tiny()[0])
    tok.chat_template = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(
        ValueError, match='the chat template fails: TemplateError: it does not end'
    ):
        render_chat(tok, [dict(role='user', content='q')])
