"The ten lines of the front door: 400 pictures of one's own, 200 updates, and questions about new pictures."
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from nanovlm_nb import train

COLOURS = dict(teal=(20, 140, 140), magenta=(200, 40, 160), brown=(130, 80, 40), navy=(20, 30, 120))
QUESTIONS = 'Which colour is it?', 'Is it a ball or a stick?'


def picture(colour: str, shape: str, rng: np.random.Generator) -> Image.Image:
    "96 x 96 pixels like a bad photograph: something before a blurred ground, with noise; unlike the embedded data in each respect."
    blurred = rng.integers(70, 220, (4, 4, 1)) + rng.integers(-20, 21, (4, 4, 3))
    ground = Image.fromarray(blurred.astype(np.uint8)).resize((96, 96), Image.Resampling.BICUBIC)
    tint = tuple(int(np.clip(c + rng.integers(-15, 16), 0, 255)) for c in COLOURS[colour])
    (x, y), r, draw = rng.uniform(36, 60, 2), rng.uniform(20, 28), ImageDraw.Draw(ground)
    if shape == 'ball': draw.ellipse((x-r, y-r, x+r, y+r), fill=tint)
    else: draw.rectangle((x-r/5, 0, x+r/5, 96), fill=tint)
    pixels = np.asarray(ground.filter(ImageFilter.GaussianBlur(.7))) + rng.normal(0, 8, (96, 96, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def rows(n: int, seed: int, questions: int) -> list[dict]:
    "Pictures, each with the first question, or with one of both."
    rng = np.random.default_rng(seed)
    drawn = [(str(rng.choice(list(COLOURS))), str(rng.choice(['ball', 'stick']))) for _ in range(n)]
    return [dict(image=picture(*truth, rng), question=QUESTIONS[i % questions], answer=truth[i % questions]) for i, truth in enumerate(drawn)]


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize(('questions', 'least'), [(1, 30), (2, 28)])
def test_400_pictures_and_200_updates_answer_30_new_ones(tmp_path, questions, least, seed):
    "Colours are certain; a ball at the edge may be taken for a stick."
    model = train(rows(400, seed, questions), max_training_steps=200, seed=seed, vlm_checkpoint_path=tmp_path, run_name='mine', quiet=True)
    new, choices = rows(30, 1000+seed, questions), {QUESTIONS[0]: list(COLOURS), QUESTIONS[1]: ['ball', 'stick']}
    right = sum(model.ask(r['image'], r['question']) == r['answer'] for r in new)
    chosen = sum(model.ask(r['image'], r['question'], choices=choices[r['question']]) == r['answer'] for r in new)
    print(f'{right} of 30 right, {chosen} with choices')
    assert right >= least and chosen >= least
