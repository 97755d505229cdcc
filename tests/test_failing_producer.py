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
from commands import TINY, ranks_of, run, start_of
from PIL import Image

from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.data.dataset import VQADataset, shapes_tokenizer
from nanovlm_nb.data.images import get_image_processor
from nanovlm_nb.data.lanes import PackLoader, PackRules
from nanovlm_nb.data.sources import MapSource


# What runs in another process, which may hang: `python test_failing_producer.py` plays all scenarios, one line of JSON each

class Unforeseen(Exception): "An error of a kind that nobody thought of."


def make_loader(rows, transforms=()):
    "A loader of four lanes of packs of 64, with two workers; pictures are numbered."
    cfg = VLMConfig()
    tokenizer = shapes_tokenizer(cfg.vlm_extra_tokens, cfg.lm_chat_template)
    source = [dict(images=[Image.new('RGB', (16, 16), (i % 256, 0, 0))], texts=[dict(user=f'{i}?', assistant='yes')], source='row') for i in range(rows)]
    return PackLoader(VQADataset([], tokenizer, get_image_processor(16, 16, False, transforms), 4), MapSource(source), PackRules(64, tokenizer.pad_token_id, window=4), 2, 2, num_workers=2)


def outcome(batches):
    "How an iteration ends."
    start, error = time.monotonic(), None
    try:
        for _ in batches: pass
    except Exception as e: error = repr(e)
    del batches
    seconds = time.monotonic()-start
    while multiprocessing.active_children() and time.monotonic() < start+45: time.sleep(.01)
    return dict(text=error, seconds=seconds, children=len(multiprocessing.active_children()))


def transform_raises(error):
    "A transform that fails on the picture of row 30."
    def transform(picture, rng):
        if picture.getpixel((0, 0))[0] == 30: raise error
        return picture
    return outcome(iter(make_loader(200, (transform,))))


def killed():
    "A worker that is gone while the consumer wants more."
    batches = iter(make_loader(2000))
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    return outcome(batches)


if __name__ == '__main__': print(json.dumps([transform_raises(StopIteration('p')), transform_raises(Unforeseen('u')), killed()]))


def test_what_fails_in_a_worker_ends_the_iteration_and_names_the_sample(tmp_path):
    "An error arrives with its type, its text and the id of the sample; no process is left."
    found = json.loads(run([sys.executable, __file__], tmp_path, timeout=180).stdout.splitlines()[-1])
    for how, said in zip(found, ('sample row/30: StopIteration', 'sample row/30: Unforeseen', 'Error'), strict=True):
        assert said in how['text'] and how['children'] == 0 and how['seconds'] < 10, how


def train_flags(*more):
    "A small run; what comes later wins."
    return [sys.executable, '-m', 'nanovlm_nb.train', *TINY, '--ask_samples', '0', '--run_name', 'run', *more]


@pytest.mark.parametrize('flags, message', [
    ('', 'no usable validation row among val_size'),
    ('--eval_in_epochs False --val_size 0', 'an epoch without a single sample')])
def test_a_run_without_a_sample_ends(tmp_path, flags, message):
    "All rows are dropped: an error, with a worker and without validation too."
    done = run(train_flags('--max_sample_length', '18', '--num_workers', '1', *flags.split()), tmp_path, timeout=120, check=False)
    assert message in done.stderr


def children_of(pid):
    "Numbers of a process's children."
    return [int(c) for t in Path(f'/proc/{pid}/task').iterdir() for c in (t/'children').read_text().split()]


@pytest.mark.skipif(not Path('/proc/self/task').exists(), reason='processes are found in /proc')
def test_two_ranks_end_when_a_worker_of_one_is_killed(tmp_path):
    "Neither the rank that has lost its worker nor the one that waits for its gradients hangs."
    cmd = train_flags('--num_workers', '1', '--max_training_steps', '100000', '--eval_in_epochs', 'False')
    cmd[1:2] = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '-m']
    cmd, env = start_of(cmd)
    with open(tmp_path/'err', 'wb') as err:
        process = subprocess.Popen(cmd, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)
        try:
            log, end = tmp_path/'checkpoints'/'run'/'log.jsonl', time.monotonic()+120
            while not (log.exists() and b'batch_loss' in log.read_bytes()):
                assert process.poll() is None and time.monotonic() < end, (tmp_path/'err').read_text()[-3000:]
                time.sleep(.05)
            workers = [w for rank in ranks_of(tmp_path, 1) for w in children_of(rank)]
            os.kill(workers[-1], signal.SIGKILL)
            assert process.wait(timeout=60) != 0
        finally:
            if process.poll() is None: os.killpg(process.pid, signal.SIGKILL)
    said = (tmp_path/'err').read_text()
    assert any(e in said for e in ('DataLoader worker', 'EOFError', 'ConnectionResetError', 'FileNotFoundError'))
