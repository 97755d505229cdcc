"What is named in a call counts, and nothing else does: settings of a run that goes on, rows set aside, columns, long answers."

import json
import shutil
from pathlib import Path

import datasets
import pytest
from test_own_rows import COLOURS, ROWS, SETTINGS, picture

from nanovlm_nb import Asker, evaluate, load, read_log, train
from nanovlm_nb.answers import look
from nanovlm_nb.cli import main

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A working directory with a run of rows in memory."
    cwd = tmp_path_factory.mktemp('named')
    with pytest.MonkeyPatch.context() as m:
        m.chdir(cwd)
        train(ROWS, run_name='r', **SETTINGS)
    return cwd


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def losses(run: str) -> dict:
    "Loss and learning rate of the projector by update."
    records = read_log(f'checkpoints/{run}/log.jsonl')
    return {
        r['step']: (r['batch_loss'], r['lr_MP']) for r in records if 'batch_loss' in r
    }


@pytest.mark.parametrize('back', [True, False])
def test_a_run_that_goes_on_keeps_its_settings(back):
    "It goes back to a checkpoint, or on from its last one, and nothing is said again."
    rates = dict(lr_mp=3e-4, lr_language_backbone=2e-4, random_crop=None)
    name = f'goes_on_{back}'
    train(ROWS, run_name=name, **rates, **SETTINGS)
    whole = losses(name)
    if back:
        start = dict(load_from=f'checkpoints/{name}/step_2')
    else:
        for step in (4, 6):
            shutil.rmtree(f'checkpoints/{name}/step_{step}')
        start = {}
    train(ROWS, run_name=name, resume=True, quiet=True, **start)
    assert losses(name) == whole and len(whole) == 6


def test_rows_that_are_set_aside_are_all_asked_about():
    settings = SETTINGS | dict(max_training_steps=1)
    model = train(ROWS, run_name='aside', val_size=20, **settings)
    answers = json.loads((model.run_dir / 'answers.json').read_text())
    assert answers['answers']['all'][1] == 20


def test_a_long_answer_is_asked_for_to_its_end():
    "Its model says it word for word, and is right."
    answer = 'one two three four five six seven eight nine ten ' * 2
    rows = [(image, 'Count!', answer) for image, *_ in ROWS[:8]]
    model = load('checkpoints/r')
    ids = model.tokenizer(answer.strip()).input_ids
    assert len(ids) > 32

    class Says(Asker):
        def __call__(self, questions, max_new_tokens=32, **how):
            return [self.tokenizer.decode(ids[:max_new_tokens])] * len(questions)

    asker = Says(model.model, model.tokenizer, model.image_processor)
    assert evaluate(asker, rows).accuracy == 1


def test_odd_columns_and_turns_without_an_answer_are_no_end():
    "`source` is a number, `kinds` a text, a turn has no answer, or too low a rating: only what was learned is asked."
    image = ROWS[0][0]
    turns = [dict(user='Which?', assistant='red'), dict(user='Why?', assistant=None)]
    rated = [turns[0], turns[0] | dict(user='How?')]
    odd = [
        dict(images=[image], texts=turns),
        dict(images=[image], texts=rated, relevance_ratings=[5, 0]),
        dict(image=image, question='Which?', answer='red', source=3),
        dict(image=image, question='Which?', answer='red', source=4, kinds='animal'),
    ]
    settings = SETTINGS | dict(max_training_steps=1, val_size=4)
    model = train(odd + ROWS[:4], val_rows=odd, run_name='odd', **settings)
    answers = json.loads((model.run_dir / 'answers.json').read_text())
    assert answers['answers']['all'][1] == 4
    found = evaluate(model, odd)
    assert found['answers']['all'][1] == 5  # an evaluation knows no ratings
    assert [result.answer for result in found.answered] == ['red'] * 5


def test_files_for_validation_and_evaluation_have_their_own_columns_and_pictures(
    tmp_path,
):
    "Two folders with the same names of files; the second is held out."
    for part, shift in (('train', 0), ('test', 1)):
        (tmp_path / part / 'images').mkdir(parents=True)
        lines = ['photo,q,a']
        for i in range(6):
            picture(i + shift).save(tmp_path / part / 'images' / f'{i}.png')
            lines.append(f'{i}.png,Which colour?,{[*COLOURS][(i + shift) % 3]}')
        (tmp_path / part / 'rows.csv').write_text('\n'.join(lines))
    learned, held = tmp_path / 'train' / 'rows.csv', tmp_path / 'test' / 'rows.csv'
    pictures = tmp_path / 'train' / 'images'
    settings = SETTINGS | dict(
        max_training_steps=1, columns='image=photo question=q answer=a'
    )
    model = train(
        learned, val_rows=learned, images_path=pictures, run_name='apart', **settings
    )
    other = tmp_path / 'test' / 'images'
    for folder in ([], ['--images_path', other]):
        said = tmp_path / f'said{len(folder)}.jsonl'
        words = ['eval', 'checkpoints/apart', '--data', held, '--answers', said]
        with pytest.MonkeyPatch.context() as m:
            seen = []
            real = look.questions_of
            m.setattr(
                look, 'questions_of', lambda rows: seen.append(rows) or real(rows)
            )
            assert main([str(w) for w in [*words, *folder]]) in (0, None)
        for row, i in zip(seen[0], range(6)):
            assert row['images'][0].tobytes() == picture(i + 1).tobytes()
        shown = [json.loads(line)['answer'] for line in said.read_text().splitlines()]
        assert shown == [[*COLOURS][(i + 1) % 3] for i in range(6)]
    columns = ['image=photo', 'question=q', 'answer=a']
    found = evaluate(model, held, columns)  # its pictures are beside it
    for result, i in zip(found.answered, range(6)):
        assert result.images[0].tobytes() == picture(i + 1).tobytes()


def test_a_row_of_a_data_set_that_cannot_be_used_is_named(tmp_path):
    image = tmp_path / 'red.png'
    ROWS[0][0].save(image)
    rows = datasets.Dataset.from_list(
        [dict(image=str(image), question='q?', answer=answer) for answer in ('a', None)]
    )
    with pytest.raises(ValueError, match='1: .*answer'):
        evaluate('checkpoints/r', rows)
