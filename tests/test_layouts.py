"Twenty rows learned by heart, through files of layouts that the page on own data does not name: greedy answers are right for 20 of 20."

import io
import json

import datasets
import pandas as pd
import pytest
from PIL import Image, ImageDraw

from nanovlm_nb.answers.answer import Asker, answer_all, questions_of
from nanovlm_nb.core.config import tiny
from nanovlm_nb.data.samples import to_row
from nanovlm_nb.data.images import open_image
from nanovlm_nb.data.files import load_config
from nanovlm_nb.runs.run import run

COLOURS = dict(
    red=(215, 40, 40),
    green=(45, 155, 70),
    blue=(45, 95, 220),
    white=(240, 240, 240),
    yellow=(238, 214, 40),
)
STEPS = 150
BOXES = dict(
    square=[(14, 14, 50, 50)],
    bar=[(6, 26, 58, 38)],
    post=[(26, 6, 38, 58)],
    cross=[(26, 6, 38, 58), (6, 26, 58, 38)],
)


def chat(q, a, key='content'):
    return [{'role': 'user', key: q}, {'role': 'assistant', key: a}]


LAYOUTS = dict(  # name -> what a row has: name of the picture's file, its bytes, question, answer
    paligemma=lambda f, b, q, a: dict(image=f, prefix=q, suffix=a),
    alpaca=lambda f, b, q, a: dict(instruction=q, output=a, image=f),
    llama_factory=lambda f, b, q, a: dict(messages=chat(f'<image>{q}', a), images=[f]),
    qwen_vl=lambda f, b, q, a: dict(
        messages=chat([dict(image=f), dict(text=q)], [dict(text=a)])
    ),
    pandas=lambda f, b, q, a: dict(picture=b, query=q, response=a),
    datasets=lambda f, b, q, a: dict(
        image=Image.open(io.BytesIO(b)), conversation=chat(q, a)
    ),
)


def files(folder, layout):
    "Twenty pictures and a file of rows, as the tool of that name writes it; the answers."
    rows = []
    answers = []
    for colour, shape in ((c, s) for c in COLOURS for s in BOXES):
        im = Image.new('RGB', (64, 64), (16, 16, 16))
        b = io.BytesIO()
        for box in BOXES[shape]:
            ImageDraw.Draw(im).rectangle(box, fill=COLOURS[colour])
        im.save(b, 'PNG')
        answers.append(f'a {colour} {shape}')
        if layout not in ('pandas', 'datasets'):
            (folder / f'{colour} {shape}.png').write_bytes(b.getvalue())
        rows.append(
            LAYOUTS[layout](
                f'{colour} {shape}.png', b.getvalue(), 'What is it?', answers[-1]
            )
        )
    if layout == 'pandas':
        pd.DataFrame(rows).to_parquet(folder / 'x.parquet')
    elif layout == 'datasets':
        datasets.Dataset.from_list(rows).to_parquet(folder / 'x.parquet')
    else:
        (folder / 'x.json').write_text(json.dumps(rows))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize('layout', LAYOUTS)
def test_twenty_rows_by_heart(tmp_path, layout):
    (data := tmp_path / 'data').mkdir()
    answers = files(data, layout)
    vlm_cfg, train_cfg = tiny(
        vit_hidden_dim=64,
        lm_hidden_dim=64,
        lm_inter_dim=128,
        lm_n_blocks=2,
        vlm_checkpoint_path=str(tmp_path),
        train_dataset_path=str(data),
        data_cutoff_idx=None,
        val_size=0,
        num_of_sequences=2,
        max_training_steps=STEPS,
        eval_in_epochs=False,
        save_interval=STEPS,
        ask_samples=0,
        lr_mp=3e-3,
        lr_vision_backbone=3e-3,
        lr_language_backbone=3e-3,
        run_name='r',
        num_workers=0,
    )
    asker = Asker.from_checkpoint(run(vlm_cfg, train_cfg) / f'step_{STEPS}')
    table = load_config(data, 'default', cache_dir=str(tmp_path / 'cache'))
    rows = [to_row(table[i], i) for i in range(20)]
    said = answer_all(
        asker,
        questions_of(
            [
                r | dict(images=[open_image(p) for p in r['images']], kinds=['x'])
                for r in rows
            ]
        ),
    )
    assert [x.reply for x in said] == answers
