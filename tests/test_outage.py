"A hub of parquet files goes away before and in the middle of a streamed run."
import json
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest
from huggingface_hub import constants, hf_file_system
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import _http

from nanovlm_nb.core.config import evolve, tiny
from nanovlm_nb.data.dataset import Unreachable
from nanovlm_nb.data.loader import config_names, load_configs, load_tokenizer, make_samples, pack_loader
from nanovlm_nb.core.dist import Dist
from nanovlm_nb.tools.inspect import stored_columns
from nanovlm_nb.uses.classify import load_splits
from nanovlm_nb.core.run_dir import read_log
from nanovlm_nb.runs.start import exit_code
from nanovlm_nb.runs.run import run
from nanovlm_nb.data.sources import StreamSource
from nanovlm_nb.core.tokenizer import get_tokenizer
from nanovlm_nb.core.usage import UsageError

pytestmark = pytest.mark.usefixtures('one_thread')
VLM, CFG = tiny(lm_max_length=128, max_sample_length=128, num_of_sequences=2, batch_size=1, gradient_accumulation_steps=2, max_val_batches=2, stats_log_interval=4, stream_dataset=True, data_cutoff_idx=10000, val_size=4)


class Server:
    "Serves the files of a folder as the hub does, as the data set `some/rows`, on a port of its own, whenever it is up."
    def __init__(self, folder):
        made = self
        class Handler(BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def log_message(self, *_): pass

            def send(self, code, data, **headers):
                self.send_response(code)
                for name, value in (headers | {'Content-Length': len(data), 'Connection': 'close'}).items(): self.send_header(name.replace('_', '-'), str(value))
                self.end_headers()
                if self.command != 'HEAD': self.wfile.write(data)

            def describe(self, asked=None):
                return [dict(type='file', path=p.name, size=p.stat().st_size, oid='1'*40) for p in sorted(folder.iterdir()) if asked is None or p.name in asked]

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers['Content-Length'])))['paths']
                self.send(200, json.dumps(self.describe(asked)).encode(), Content_Type='application/json')

            def do_GET(self):
                path = self.path.split('?')[0]
                if '/tree/' in path: return self.send(200, json.dumps(self.describe()).encode(), Content_Type='application/json')
                if path.startswith('/api/'): return self.send(200, json.dumps(dict(id='some/rows', sha='0'*40, siblings=[])).encode(), Content_Type='application/json')
                file = folder/path.split('/')[-1]
                if '/resolve/' not in path or not file.is_file() or file.name == made.missing: return self.send(404, b'', X_Error_Code='EntryNotFound')
                data, asked = file.read_bytes(), self.headers.get('Range')
                first, last = (int(n or len(data)-1) for n in asked.removeprefix('bytes=').split('-')) if asked else (0, len(data)-1)
                part = data[first:last+1]
                self.send(206 if asked else 200, part, Accept_Ranges='bytes', ETag='"1"', Content_Range=f'bytes {first}-{first+len(part)-1}/{len(data)}')

            do_HEAD = do_GET

        self.handler, self.port, self.server, self.missing = Handler, 0, None, None
        self.up()

    def up(self):
        self.server = ThreadingHTTPServer(('127.0.0.1', self.port), self.handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(.02,), daemon=True).start()

    def down(self):
        self.server.shutdown()
        self.server.socket.shutdown(socket.SHUT_RDWR)  # loader processes hold a copy, which would go on listening
        self.server.server_close()
        self.server = None


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    "Twelve files of ten rows, behind a server; `datasets` gives up quickly."
    folder = tmp_path_factory.mktemp('served')
    datasets.disable_progress_bars()
    for f in range(12):
        rows = [dict(images=[], texts=[dict(user=f'{f} {i}?', assistant='yes '*(5+(7*i+f) % 23))], source='served') for i in range(10)]
        datasets.Dataset.from_list(rows, features=datasets.Features(images=datasets.List(datasets.Image()), source=datasets.Value('string'),
            texts=datasets.List(dict(user=datasets.Value('string'), assistant=datasets.Value('string'))))).to_parquet(folder/f'{f}.parquet')
    made = Server(folder)
    with pytest.MonkeyPatch.context() as m:
        address = f'http://127.0.0.1:{made.port}'
        m.setattr(datasets.config, 'HF_ENDPOINT', address)
        for name, value in dict(ENDPOINT=address, HUGGINGFACE_CO_URL_TEMPLATE=address+'/{repo_id}/resolve/{revision}/{filename}', HF_HUB_CACHE=str(folder.parent/'hub')).items():
            m.setattr(constants, name, value)
        for name, value in dict(STREAMING_READ_MAX_RETRIES=2, STREAMING_READ_RETRY_INTERVAL=.1, STREAMING_OPEN_MAX_RETRIES=2, STREAMING_OPEN_RETRY_INTERVAL=.1).items():
            m.setattr(datasets.config, name, value)
        for module in (hf_file_system, _http):
            for name in ('http_backoff', 'http_stream_backoff'):
                if hasattr(module, name): m.setattr(module, name, partial(getattr(module, name), max_retries=1, base_wait_time=.1))
        yield made
    if made.server: made.down()


@pytest.fixture(scope='module')
def tokenizer(): return load_tokenizer(VLM)


def source(server):
    "All rows behind a server."
    files = [f'hf://datasets/some/rows/{f}.parquet' for f in range(12)]
    return StreamSource(dict(served=datasets.load_dataset('parquet', data_files=files, split='train', streaming=True)), val_size=4)


def loaders(server, tokenizer):
    "The two loaders of a run."
    train, samples = source(server), make_samples(CFG, VLM, tokenizer)
    return [pack_loader(s, samples, VLM, CFG, Dist(), shuffle, 0, most) for s, shuffle, most in ((train, True, None), (train.held_out(), False, CFG.max_val_batches))]


def test_what_is_not_there_is_an_error_and_no_outage(server, tokenizer):
    "A file that the server no longer knows."
    found = source(server)
    server.missing = '7.parquet'
    try:
        with pytest.raises(EntryNotFoundError): list(found.rows_of(0, 1, 0))
    finally: server.missing = None


def test_away_for_good_interrupts_the_run(server, tokenizer, tmp_path):
    "The run ends with a checkpoint, status interrupted and exit code 85; started again it goes on to the digests of an undisturbed run."
    def parts(leave=None):
        def leaving(step, max_lr, max_steps):
            if step == leave and server.server: server.down()
            return max_lr/10
        return dict(loaders=lambda *_: loaders(server, tokenizer), schedule=leaving)
    vlm = evolve(VLM, vlm_checkpoint_path=str(tmp_path))
    digests = lambda run_dir: [(r['step'], r['batch_digest']) for r in read_log(run_dir/'log.jsonl') if 'batch_digest' in r]
    whole = run(vlm, evolve(CFG, run_name='whole'), **parts(), dist=Dist())
    broken = run(vlm, evolve(CFG, run_name='broken'), **parts(1), dist=Dist())
    assert ((broken/'status').read_text(), exit_code(broken)) == ('interrupted\n', 85) and 'cannot be reached' in (broken/'train.log').read_text()
    done = len(digests(broken))
    assert 0 < done < 8 and (broken/f'step_{done}').is_dir()
    server.up()
    run(vlm, evolve(CFG, run_name='broken', resume=True), **parts(), dist=Dist())
    assert (broken/'status').read_text() == 'done\n' and digests(broken) == digests(whole)


# --- no network at all

@pytest.fixture
def no_hub(monkeypatch):
    "A hub that takes no connection."
    with socket.create_server(('127.0.0.1', 0)) as once: address = f'http://127.0.0.1:{once.getsockname()[1]}'
    for name in ('http_proxy', 'https_proxy', 'all_proxy'):
        for spelt in (name, name.upper()): monkeypatch.delenv(spelt, raising=False)
    for config, endpoint in ((constants, 'ENDPOINT'), (datasets.config, 'HF_ENDPOINT')):
        monkeypatch.setattr(config, endpoint, address)
        monkeypatch.setattr(config, 'HF_HUB_OFFLINE', False)


@pytest.mark.parametrize('ask', [lambda name: load_configs(name), lambda name: config_names(name, ['all']), load_splits, get_tokenizer, lambda name: stored_columns(name, 'default')],
                         ids=['rows', 'configurations', 'classes', 'tokenizer', 'columns'])
def test_a_name_is_refused_at_once(no_hub, caplog, ask):
    "The libraries would ask six times in half a minute, for each file."
    with pytest.raises((OSError, ValueError), match='own/nowhere'): ask('own/nowhere')
    assert 'does not answer: own/nowhere is looked for' in caplog.text and 'Retrying' not in caplog.text
    assert not constants.HF_HUB_OFFLINE


def test_what_was_downloaded_before_is_found(no_hub, monkeypatch, tmp_path, tokenizer, caplog):
    snapshot = tmp_path/'models--own--tokens'/'snapshots'/('0'*40)
    tokenizer.save_pretrained(snapshot)
    (snapshot/'config.json').write_text('{"model_type": "llama"}')
    (tmp_path/'models--own--tokens'/'refs').mkdir()
    (tmp_path/'models--own--tokens'/'refs'/'main').write_text('0'*40)
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    assert get_tokenizer('own/tokens', VLM.vlm_extra_tokens, VLM.lm_chat_template).get_vocab() == tokenizer.get_vocab()
    assert 'Retrying' not in caplog.text


def test_a_path_is_never_a_name(no_hub, caplog):
    "`./rows` that is not here must not become `rows` of somebody."
    for ask in (load_configs, get_tokenizer):
        with pytest.raises(FileNotFoundError, match='^./rows: No such file or directory'): ask('./rows')
    with pytest.raises(FileNotFoundError, match='./rows: No such file or directory'): load_splits('./rows')
    assert not caplog.records


HUB = evolve(CFG, train_dataset_path='some/rows', train_dataset_name=('default',), max_training_steps=3, eval_in_epochs=False)


def test_a_data_set_that_cannot_be_reached_is_not_skipped(server, tmp_path, caplog):
    "One of several that does not exist is a warning; one whose server is away must not be missing from the run without a word."
    server.down()
    try:
        with pytest.raises(Unreachable, match=r'some/rows \(default\) cannot be reached'): load_configs('some/rows', ['default', 'other'], cache_dir=str(tmp_path))
    finally: server.up()
    assert not any('skipped' in m for m in caplog.messages)


def test_away_at_the_start_of_a_job_interrupts_the_run(server, tmp_path):
    "No update was made: status interrupted and exit code 85, as a scheduler understands it; the same job, started again, trains."
    vlm, cfg = evolve(VLM, vlm_checkpoint_path=str(tmp_path)), evolve(HUB, run_name='late', resume=True) # as the job files have it
    server.down()
    try: run_dir = run(vlm, cfg, dist=Dist())
    finally: server.up()
    assert ((run_dir/'status').read_text(), exit_code(run_dir)) == ('interrupted\n', 85) and 'the data cannot be reached' in (run_dir/'train.log').read_text()
    run(vlm, cfg, dist=Dist())
    assert (run_dir/'status').read_text() == 'done\n' and (run_dir/'step_3').is_dir()


def test_by_hand_a_first_start_does_not_wait(server, tmp_path):
    "Nobody would start it again, and the one who did is looking: one line, and nothing is left behind."
    server.down()
    try:
        with pytest.raises(Unreachable, match=r'some/rows \(default\) cannot be reached: check the network') as e:
            run(evolve(VLM, vlm_checkpoint_path=str(tmp_path/'runs')), evolve(HUB, run_name='early'), dist=Dist())
    finally: server.up()
    assert isinstance(e.value, UsageError) and not [p for p in tmp_path.rglob('*') if p.is_file()]
