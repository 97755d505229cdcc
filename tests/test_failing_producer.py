"What fails behind a run ends it, soon and by name: nothing hangs."

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import TINY, ranks_of, run, start_of, updates, wait_for
from PIL import Image

from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.data.samples import VQADataset
from nanovlm_nb.data.shapes import shapes_tokenizer
from nanovlm_nb.data.images import get_image_processor
from nanovlm_nb.data.lanes import PackRules
from nanovlm_nb.data.loader import PackLoader
from nanovlm_nb.data.sources import MapSource


# What runs in another process, which may hang: `python test_failing_producer.py` plays all scenarios, one line of JSON each


class Unforeseen(Exception):
    "An error of a kind that nobody thought of."


def make_loader(rows, transforms=()):
    "A loader of four lanes of packs of 64, with two workers; pictures are numbered."
    cfg = VLMConfig()
    tokenizer = shapes_tokenizer(cfg.vlm_extra_tokens, cfg.lm_chat_template)
    source = [
        dict(
            images=[Image.new('RGB', (16, 16), (i % 256, 0, 0))],
            texts=[dict(user=f'{i}?', assistant='yes')],
            source='row',
        )
        for i in range(rows)
    ]
    return PackLoader(
        VQADataset([], tokenizer, get_image_processor(16, 16, False, transforms), 4),
        MapSource(source),
        PackRules(64, tokenizer.pad_token_id, window=4),
        2,
        2,
        num_workers=2,
    )


def outcome(batches):
    "How an iteration ends."
    start = time.monotonic()
    error = None
    try:
        for _ in batches:
            pass
    except Exception as e:
        error = repr(e)
    del batches
    seconds = time.monotonic() - start
    while multiprocessing.active_children() and time.monotonic() < start + 45:
        time.sleep(0.01)
    return dict(
        text=error, seconds=seconds, children=len(multiprocessing.active_children())
    )


def transform_raises(error):
    "A transform that fails on the picture of row 30."

    def transform(picture, rng):
        if picture.getpixel((0, 0))[0] == 30:
            raise error
        return picture

    return outcome(iter(make_loader(200, (transform,))))


def killed():
    "A worker that is gone while the consumer wants more."
    batches = iter(make_loader(2000))
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    return outcome(batches)


if __name__ == '__main__':
    print(
        json.dumps(
            [
                transform_raises(StopIteration('p')),
                transform_raises(Unforeseen('u')),
                killed(),
            ]
        )
    )


def test_what_fails_in_a_worker_ends_the_iteration_and_names_the_sample(tmp_path):
    "An error arrives with its type, its text and the id of the sample; no process is left."
    found = json.loads(
        run([sys.executable, __file__], tmp_path, timeout=180).stdout.splitlines()[-1]
    )
    for how, said in zip(
        found,
        ('sample row/30: StopIteration', 'sample row/30: Unforeseen', 'Error'),
        strict=True,
    ):
        assert said in how['text'] and how['children'] == 0 and how['seconds'] < 10, how


TRAIN = [
    '-m',
    'nanovlm_nb.train',
    *TINY,
    '--ask_samples',
    '0',
    '--run_name',
    'run',
    '--num_workers',
    '1',
]


def test_a_run_without_a_sample_ends(tmp_path):
    "All rows are dropped: an error, with a worker, and without validation too."
    for flags, said in (
        ((), 'no usable validation row among val_size'),
        (
            ('--eval_in_epochs', 'False', '--val_size', '0'),
            'an epoch without a single sample',
        ),
    ):
        assert (
            said
            in run(
                [sys.executable, *TRAIN, '--max_sample_length', '18', *flags],
                tmp_path,
                timeout=120,
                check=False,
            ).stderr
        )


def test_a_rank_that_never_starts_is_named(tmp_path):
    env = dict(
        PYTHONPATH=str(Path(__file__).parent.parent),
        RANK='0',
        WORLD_SIZE='2',
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT='0',
    )
    done = run(
        [
            sys.executable,
            '-c',
            "from nanovlm_nb.core.dist import init_dist; init_dist('cpu', 2)",
        ],
        tmp_path,
        timeout=60,
        check=False,
        fresh=True,
        **env,
    )
    assert (
        done.returncode == 1
        and 'rank 0 of 2: `init_dist` failed, its timeout is 2 s' in done.stderr
    )


@pytest.mark.skipif(
    not Path('/proc/self/task').exists(), reason='processes are found in /proc'
)
def test_two_ranks_end_when_a_worker_of_one_is_killed(tmp_path):
    "Neither the rank that has lost its worker nor the one that waits for its gradients hangs."
    launch = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc_per_node',
        '2',
    ]
    cmd, env = start_of(
        [*launch, *TRAIN, '--max_training_steps', '100000', '--eval_in_epochs', 'False']
    )
    errors = tmp_path / 'err'
    process = subprocess.Popen(
        cmd,
        cwd=tmp_path,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=errors.open('wb'),
        start_new_session=True,
    )
    try:
        assert wait_for(
            process, lambda: updates(tmp_path / 'checkpoints' / 'run'), 120
        ), errors.read_text()[-3000:]
        (rank,) = ranks_of(tmp_path, 1)
        workers = [
            w
            for task in Path(f'/proc/{rank}/task').iterdir()
            for w in (task / 'children').read_text().split()
        ]
        os.kill(int(workers[-1]), signal.SIGKILL)
        assert process.wait(timeout=60) != 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert any(
        e in errors.read_text()
        for e in (
            'DataLoader worker',
            'EOFError',
            'ConnectionResetError',
            'FileNotFoundError',
        )
    )
