"What fails behind a run ends it, soon and by name: nothing hangs. Each part runs in a process of its own, under a watchdog."
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import TINY, ranks_of, start_of


def watched(cmd, cwd, timeout):
    "Output and error output of a command; a command that is still there after `timeout` seconds is killed with all its children, and fails the test."
    cmd, env = start_of(cmd)
    process = subprocess.Popen(cmd, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try: return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f'still running after {timeout} s\n{out[-2000:]}\n{err[-2000:]}')
    finally:
        if process.poll() is None: os.killpg(process.pid, signal.SIGKILL)


# What runs in the other process: `python test_failing_producer.py` plays all scenarios, one line of JSON each

class Unforeseen(Exception): "An error of a kind that nobody thought of."


ERRORS = dict(value=ValueError('v'), stop=StopIteration('p'), unforeseen=Unforeseen('u'))


def make_rows(n=400):
    "Pictures and texts, numbered; row 30 says so in its text."
    from PIL import Image
    return [dict(images=[Image.new('RGB', (16, 16), (i % 256, 0, 0))], texts=[dict(user=f'{i}?', assistant='yes')], source='row') for i in range(n)]


def make_loader(rows, transforms=(), workers=2, **more):
    "A loader of four lanes of packs of 64."
    from nanovlm_nb.core.config import VLMConfig
    from nanovlm_nb.data.dataset import VQADataset, shapes_tokenizer
    from nanovlm_nb.data.images import get_image_processor
    from nanovlm_nb.data.lanes import PackLoader, PackRules
    from nanovlm_nb.data.sources import MapSource, Mixture
    cfg = VLMConfig()
    make_loader.tokenizer = tokenizer = getattr(make_loader, 'tokenizer', None) or shapes_tokenizer(cfg.vlm_extra_tokens, cfg.lm_chat_template)
    samples = VQADataset([], tokenizer, get_image_processor(16, 16, False, transforms), 4, **more)
    source = Mixture([MapSource(dict(a=rows)), MapSource(dict(b=rows))], [3, 1]) if more else MapSource(rows)
    return PackLoader(samples, source, PackRules(64, tokenizer.pad_token_id, window=4), 2, 2, num_workers=workers)


def outcome(batches):
    "How an iteration ends."
    start, seen = time.monotonic(), 0
    try:
        for _ in batches: seen += 1
        error = None
    except Exception as e: error = e
    found = dict(seen=seen, kind=type(error).__name__, text=f'{type(error).__name__}: {error}', seconds=time.monotonic()-start)
    del batches, error
    while multiprocessing.active_children() and time.monotonic() < start+45: time.sleep(.01)
    return found | dict(children=len(multiprocessing.active_children()))


def transform_raises(error):
    "A transform that fails on the picture of row 30."
    def transform(picture, rng):
        if picture.getpixel((0, 0))[0] == 30: raise error
        return picture
    return outcome(iter(make_loader(make_rows(200), (transform,))))


def template_refuses():
    "A chat template that raises an error of its own for row 30, as templates do when roles do not alternate."
    loader = make_loader(make_rows(200))
    template = loader.samples.tokenizer.chat_template
    loader.samples.tokenizer.chat_template = "{% if messages[0]['content'].endswith('>30?') %}{{ raise_exception('Roles must alternate') }}{% endif %}"+template
    found = outcome(iter(loader))
    loader.samples.tokenizer.chat_template = template
    return found


def killed(how):
    "A worker that is gone while the consumer wants more."
    batches = iter(make_loader(make_rows(2000)))
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, how)
    return outcome(batches)


def all_dropped():
    "A mixture without a single sample that is short enough."
    return outcome(iter(make_loader(make_rows(40), max_sample_length=5)))


SCENARIOS = {**{f'transform_{name}': (transform_raises, e) for name, e in ERRORS.items()}, 'template': (template_refuses,),
             'sigkill': (killed, signal.SIGKILL), 'all_dropped': (all_dropped,)}

if __name__ == '__main__':
    for name, (play, *args) in SCENARIOS.items(): print(json.dumps(dict(name=name, **play(*args))), flush=True)


# What is asked about it

@pytest.fixture(scope='module')
def played(tmp_path_factory):
    "Scenario -> how it ended."
    out, err = watched([sys.executable, __file__], tmp_path_factory.mktemp('played'), 180)
    found = [json.loads(line) for line in out.splitlines()]
    assert [f['name'] for f in found] == list(SCENARIOS), err[-3000:]
    return {f['name']: f for f in found}


@pytest.mark.parametrize('name, said', [
    *((f'transform_{name}', f'sample row/30: {type(e).__name__}') for name, e in ERRORS.items()),
    ('template', 'sample row/30: UsageError: the chat template fails: TemplateError: Roles must alternate'),
    ('sigkill', 'Error: '), ('all_dropped', 'None')])
def test_what_fails_in_a_worker_ends_the_iteration_and_names_the_sample(played, name, said):
    "An error arrives with its type, its text and the id of the sample; no process is left."
    found = played[name]
    assert said in found['text'] and found['children'] == 0 and found['seconds'] < 10


def train_flags(*more):
    "A small run; what comes later wins."
    return [sys.executable, '-m', 'nanovlm_nb.train', *TINY, '--ask_samples', '0', '--run_name', 'run', *more]


@pytest.mark.parametrize('flags, message', [
    ('', 'no usable validation row among val_size'),
    ('--eval_in_epochs False --val_size 0', 'an epoch without a single sample')])
def test_a_run_without_a_sample_ends(tmp_path, flags, message):
    "All rows are dropped: an error, with a worker and without validation too."
    _, err = watched(train_flags('--max_sample_length', '18', '--num_workers', '1', *flags.split()), tmp_path, 120)
    assert message in err


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
        run = subprocess.Popen(cmd, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)
        try:
            log, end = tmp_path/'checkpoints'/'run'/'log.jsonl', time.monotonic()+120
            while not (log.exists() and b'batch_loss' in log.read_bytes()):
                assert run.poll() is None and time.monotonic() < end, (tmp_path/'err').read_text()[-3000:]
                time.sleep(.05)
            workers = [w for rank in ranks_of(tmp_path, 1) for w in children_of(rank)]
            os.kill(workers[-1], signal.SIGKILL)
            assert run.wait(timeout=60) != 0
        finally:
            if run.poll() is None: os.killpg(run.pid, signal.SIGKILL)
    said = (tmp_path/'err').read_text()
    assert any(e in said for e in ('DataLoader worker (pid', 'EOFError', 'ConnectionResetError', 'FileNotFoundError'))
