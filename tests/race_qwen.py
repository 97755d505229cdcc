"""A Qwen2.5-VL trained here and in a plain loop of transformers: CPU time and memory of the same updates.

OMP_NUM_THREADS=1 python tests/race_qwen.py [ROUNDS]

Both train the same small model with AdamW on the same samples. The plain loop pads a batch, as the processor of transformers makes it;
here its samples are packed into one row. Preparing is not timed. Rounds alternate; losses must be those of the other."""

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from test_qwen import drawing
from tiny_qwen import Theirs, write
from transformers.utils import logging

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.core.layout import Layout
from nanovlm_nb.model.vlm import VisionLanguageModel

SAMPLES = 8
UPDATES = 4
WORDS = (
    'a small large red blue green circle ring square bar top left bottom right'.split()
)


def samples(seed):
    "Pictures of 84 to 560 pixels a side, one or two in a sample; answers of 1 to 24 words."
    rng = random.Random(seed)
    side = lambda: int(84 * (560 / 84) ** rng.random())
    return [
        (
            [
                drawing(side(), side(), seed=rng.random())
                for _ in range(rng.choice((1, 1, 1, 2)))
            ],
            'What is this?',
            ' '.join(rng.choices(WORDS, k=rng.randint(1, 24))),
        )
        for _ in range(SAMPLES)
    ]


def padded(theirs, rows):
    "A batch of the plain loop: inputs with labels, -100 where nothing is to be learnt."
    inputs = theirs.inputs(rows)
    labels = inputs['input_ids'].masked_fill(inputs['attention_mask'] == 0, -100)
    for row, label in zip(rows, labels):
        label[: len(theirs.ids(*row[:2]))] = -100
    return inputs | dict(labels=labels)


def packed(asker, theirs, rows):
    "The same samples in one row."
    parts = [(theirs.ids(*row), len(theirs.ids(*row[:2]))) for row in rows]
    targets = [
        torch.tensor([-100] * (start - 1) + ids[start:] + [-100])
        for ids, start in parts
    ]
    ids = torch.tensor([i for ids, _ in parts for i in ids])[None]
    images = [
        [asker.image_processor(im)[0] for im in pictures] for pictures, *_ in rows
    ]
    cfg = asker.model.cfg
    grids = tuple(tuple(im.shape[:2]) for pictures in images for im in pictures)
    layout = Layout.of(
        ids,
        cfg.image_token_id,
        torch.cat(targets)[None],
        doc_lens=[[len(i) for i, _ in parts]],
        grids=grids,
        window=cfg.tiles_per_window,
    )
    return dict(input_ids=ids, images=images, layout=layout)


def kept(model, batch, loss_of):
    "Bytes that wait for the backward pass: storages of saved tensors that are no weights."
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def note(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (
                storage.nbytes(),
                t,
            )  # held, so that no address comes twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss_of(model(**batch))
    return sum(size for size, _ in seen.values())


def seconds(model, batches, loss_of):
    "CPU time of an update, and the losses."
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses = []
    start = time.process_time()
    for batch in batches:
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (time.process_time() - start) / len(batches), losses


def main(rounds=7):
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), max_pixels=28 * 28 * 400)
        asker = Asker.from_model(VisionLanguageModel.from_pretrained(folder))
        theirs = Theirs(Path(folder))
        drawn = [samples(seed) for seed in range(UPDATES)]
        batches = (
            [packed(asker, theirs, rows) for rows in drawn],
            [padded(theirs, rows) for rows in drawn],
        )
        losses_of = (lambda out: out[1]), (lambda out: out.loss)
        filled = sum(b['input_ids'].numel() for b in batches[0]) / sum(
            b['input_ids'].numel() for b in batches[1]
        )
        memory = [
            statistics.mean(kept(m.train(), b, loss_of) for b in part)
            for m, part, loss_of in zip((asker.model, theirs.model), batches, losses_of)
        ]
        print(
            f'{SAMPLES} samples an update, {statistics.mean(len(b["layout"].slots) for b in batches[0]):.0f} image tokens; {filled:.0%} of the padded batch are tokens'
        )
        print(
            f'kept for backward: {memory[0] / 2**20:.1f} MiB here, {memory[1] / 2**20:.1f} there, ratio {memory[0] / memory[1]:.2f}'
        )
        ratios = []
        for k in range(rounds + 1):  # the first one warms up
            models = (
                VisionLanguageModel.from_pretrained(folder),
                Theirs(Path(folder)).model,
            )
            order = (0, 1) if k % 2 else (1, 0)
            made = {i: seconds(models[i], batches[i], losses_of[i]) for i in order}
            assert torch.allclose(
                torch.tensor(made[0][1]), torch.tensor(made[1][1]), rtol=1e-4
            ), made
            if k:
                ratios.append(made[0][0] / made[1][0])
            if k:
                print(
                    f'round {k}: an update takes {1e3 * made[0][0]:.0f} ms of CPU time here, {1e3 * made[1][0]:.0f} there, ratio {ratios[-1]:.2f}',
                    flush=True,
                )
        print(
            f'CPU time: ratio {statistics.median(ratios):.2f} (median of {rounds} rounds, {min(ratios):.2f} to {max(ratios):.2f}); losses agree'
        )


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
