"Generation against other truths: transformers' processors and its generate, reading without a cache, rows alone; text that is streamed; files that people pass."

import json
import random
import sys

import pytest
import torch
from commands import run
from nanovlm_nb.answers.answer import Asker, Chat, left_pad
from nanovlm_nb.core.config import tiny
from nanovlm_nb.model.generate import TextStream, sample, top_k_top_p_filtering
from nanovlm_nb.data.loader import load_tokenizer
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.model.vlm import VisionLanguageModel
from PIL import Image
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

pytestmark = pytest.mark.usefixtures('one_thread')
QUESTIONS = [
    'What colour?',
    'Which shape do you see, if I may ask?',
    'And what else can be said about it?',
]


def gen(seed):
    return torch.Generator().manual_seed(seed)


# --- scores, against transformers


@pytest.mark.parametrize('vocabulary', [7, 300])
@pytest.mark.parametrize(
    'top_k, top_p', [(0, 0.9), (5, 1.0), (5, 0.5), (50, 0.9), (1, 1e-6), (0, 0.999)]
)
def test_filters_are_those_of_transformers(vocabulary, top_k, top_p):
    scores = 3 * torch.randn(200, vocabulary, generator=gen(0))
    want = scores / 0.7
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    assert TemperatureLogitsWarper(0.7)(None, scores).equal(scores / 0.7)
    got = top_k_top_p_filtering(scores / 0.7, top_k, top_p)
    # a probability is added up in another order there: what is kept may differ where the sum is that of top_p to the last digits
    other = got.isfinite() != want.isfinite()
    probs, order = (scores.double() / 0.7).softmax(-1).sort(-1)
    below = torch.zeros_like(probs).scatter(1, order, probs.cumsum(-1))
    assert ((below[other] - (1 - top_p)).abs() < 1e-6).all() and other.sum() <= 2
    assert got[~other].equal(want[~other])


# --- a model: cache, batch, conversation


@pytest.fixture(scope='module')
def asker():
    "Untrained, but with scores that differ; pictures of up to 2 x 2 tiles."
    cfg, _ = tiny(
        lm_n_heads=4,
        lm_n_kv_heads=2,
        lm_n_blocks=2,
        max_img_size=128,
        resize_to_max_side_len=False,
        init_std=0.3,
    )
    torch.manual_seed(1)
    return Asker.from_model(
        VisionLanguageModel(cfg, load_backbone=False), load_tokenizer(cfg)
    )


def noise(width, height, seed):
    return Image.frombytes(
        'RGB', (width, height), random.Random(seed).randbytes(3 * width * height)
    )


@pytest.fixture(scope='module')
def mixed():
    "No picture, one, several of different grids; a conversation."
    turns = [dict(user='What is this?', assistant='a ring'), dict(user='Where is it?')]
    return [
        ([], QUESTIONS[0]),
        ([noise(64, 64, 0)], QUESTIONS[1]),
        ([noise(128, 60, 1), noise(64, 128, 2)], QUESTIONS[2]),
        ([noise(128, 128, 3)], turns),
    ]


HOW = dict(greedy={}, sampled=dict(temperature=1.2, top_k=20, top_p=0.95))


def test_batch_equals_alone(asker, mixed):
    "Left-padded, with pictures or without: each row says what it says alone."
    batch = asker(mixed, 10)
    assert batch == [asker([q], 10)[0] for q in mixed] and len(set(batch)) > 1


@pytest.mark.parametrize('how', HOW)
@torch.no_grad()
def test_cache_equals_reading_anew(asker, mixed, how):
    "Left-padded, with pictures or without; greedy and sampled: every token is what the whole row, read at once, gives."
    prompts, tiles = zip(*(asker.prompt(*q) for q in mixed))
    ids, mask = left_pad([*prompts], 0, asker.device)

    def rule():
        return HOW[how] | (
            dict(generator=gen(0)) if 'temperature' in HOW[how] else dict(greedy=True)
        )

    written = torch.stack(
        [*asker.model.stream(ids, [*tiles], mask, 8, (), **rule())], 1
    )
    how = rule()
    whole = ids
    real = mask
    for _ in range(8):
        whole = torch.cat(
            [
                whole,
                sample(
                    asker.model(whole, [*tiles], attention_mask=real)[0][:, -1], **how
                )[:, None],
            ],
            1,
        )
        real = torch.cat([real, torch.ones_like(real[:, :1])], 1)
    assert written.equal(whole[:, ids.shape[1] :])


def test_conversations_equal_a_fresh_reading(asker):
    "Whatever is asked, stopped or repeated: the cache says what the whole conversation says when it is read at once."
    rng = random.Random(0)
    pictures = [noise(128, 64, 5), noise(64, 64, 6)]
    chat = Chat(asker, pictures)
    turns = []
    reread = []
    for i in range(8):
        question = f'{rng.choice(QUESTIONS)} {i}'
        if rng.random() < 0.4:  # somebody stops listening
            cut = chat.stream('Never mind.', 9)
            for _ in range(rng.randint(1, 4)):
                next(cut, None)
            cut.close()
        said = chat(question, 7)
        turns.append(dict(user=question))
        assert said == asker([(pictures, turns)], 7)[0], i
        turns[-1]['assistant'] = said
        ids = asker.prompt(pictures, turns[:-1] + [dict(user=question)])[0]
        reread.append(len(ids) - chat.shared(ids))
    assert chat.turns == turns
    assert max(reread) == 1, 'all but the last token was known'


def test_stops_are_of_their_row(asker, mixed):
    plain = asker(mixed[:3], 10)
    token = asker.tokenizer(plain[1], add_special_tokens=False)['input_ids'][3]
    stopped = asker(mixed[:3], 10, stop=[token])
    for a, b in zip(plain, stopped):
        assert a.startswith(b)
    assert len(stopped[1]) < len(plain[1])
    text = plain[2][3:5]
    by_text = asker(mixed[:3], 10, stop=[text])
    assert by_text[2] == plain[2][
        : plain[2].index(text)
    ].strip() and text not in ''.join(by_text)


# --- text in pieces

ALPHABET = 'abc .,\n' + 'äßé' + '猫犬' + '🙂👩‍🚀' + 'ﷺ' + '\ufffd'


@pytest.mark.parametrize('seed', range(12))
def test_text_streams_never_break_a_letter(seed):
    "Random texts and random tokens: the pieces are the text, each ends with a whole letter, and a stop string never shows."
    rng = random.Random(seed)
    tokenizer = train_tokenizer(['abc abc ab äß.'] * 9, 270, {})
    text = ''.join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 40)))
    ids = tokenizer(text, add_special_tokens=False)['input_ids']
    if seed % 2:
        ids += rng.choices(range(3, len(tokenizer)), k=10)  # bytes that are no text
    whole = tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    stream = TextStream(tokenizer)
    pieces = [stream.add(i) for i in ids]
    assert all(not p.endswith('\ufffd') for p in pieces)
    assert ''.join(pieces) + stream.finish() == whole == stream.text
    for stop in (whole[3:5], whole[-3:], 'never there'):
        if not stop:
            continue
        stream = TextStream(tokenizer, [stop, 'also never'])
        shown = ''
        for i in ids:
            shown += stream.add(i)
            assert stop not in shown and whole.startswith(shown)
        assert shown + stream.finish() == whole.split(stop)[0]


# --- the command


def test_many_questions_as_json(asker, tmp_path):
    asker.model.save_pretrained(tmp_path / 'model', asker.tokenizer)
    noise(64, 50, 7).save(tmp_path / 'scene.png')
    code = f"import sys, io; from nanovlm_nb.cli import main; sys.stdin = io.StringIO({chr(10).join(QUESTIONS)!r}); main()"
    done = run(
        [
            sys.executable,
            '-c',
            code,
            'ask',
            'model',
            '--max_new_tokens',
            6,
            '--image',
            'scene.png',
            '--image',
            'scene.png',
            '--prompt',
            '-',
            '--json',
        ],
        tmp_path,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a['prompt'] for a in answers] == QUESTIONS and answers[0]['images'] == [
        'scene.png'
    ] * 2
    with Image.open(tmp_path / 'scene.png') as im:
        assert [a['answer'] for a in answers] == asker(
            [([im, im], q) for q in QUESTIONS], 6
        )
