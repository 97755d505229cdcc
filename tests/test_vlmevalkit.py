"""VLMEvalKit asks a checkpoint of ours, with its own code and nanoVLM's own model, and hears the answers that we hear.

Both checkouts and what VLMEvalKit imports must be there: NANOVLM_PATH=... VLMEVALKIT=... PYTHONPATH=... pytest --slow -s tests/test_vlmevalkit.py"""
import os

import pytest
import torch

from nanovlm_nb.answers.answer import Asker
from nanovlm_nb.cli import main
from nanovlm_nb.core.config import tiny
from nanovlm_nb.data.images import open_image
from nanovlm_nb.data.loader import load_tokenizer
from nanovlm_nb.data.dataset import shapes_dataset
from nanovlm_nb.model.vlm import VisionLanguageModel

ASKED, LONGEST = 12, 8


def stay_on_the_cpu(monkeypatch, kind: type) -> None:
    "Let `.to('cuda')` of the others' code do nothing where no GPU is."
    plain = kind.to
    monkeypatch.setattr(kind, 'to', lambda self, *args, **more: self if args == ('cuda',) else plain(self, *args, **more))


@pytest.fixture
def their_model(monkeypatch):
    "VLMEvalKit's class."
    there = os.environ.get('NANOVLM_PATH'), os.environ.get('VLMEVALKIT')
    if not all(there): pytest.skip('needs checkouts of nanoVLM (NANOVLM_PATH) and of VLMEvalKit (VLMEVALKIT)')
    for place in there: monkeypatch.syspath_prepend(place)
    if not torch.cuda.is_available():
        # torchvision for GPUs, whose compiled part cannot be loaded here: its Python code asks whether these exist
        operators = torch.library.Library('torchvision', 'DEF')
        for name in ('nms', 'qnms'): operators.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
        for kind in (torch.nn.Module, torch.Tensor): stay_on_the_cpu(monkeypatch, kind)
    from vlmeval.vlm.nanovlm import NanoVLM
    return NanoVLM


@pytest.mark.slow
def test_vlmevalkit_hears_the_answers_that_we_hear(tmp_path, their_model):
    "A model of random, large weights, whose answers differ from picture to picture."
    cfg = tiny(init_std=.3)[0]
    torch.manual_seed(0)
    VisionLanguageModel(cfg, load_backbone=False).save_pretrained(tmp_path/'ours', load_tokenizer(cfg))
    main(['export', str(tmp_path/'ours'), str(tmp_path/'nanovlm'), '--format', 'nanovlm'])
    theirs = their_model(model_path=str(tmp_path/'nanovlm'), max_new_tokens=LONGEST)
    ours = Asker.from_checkpoint(tmp_path/'ours', torch.device('cpu'))
    heard = []
    for row in shapes_dataset(ASKED, 'validation', 0):
        for turn in row['texts'] if row['images'] else []:
            picture = open_image(row['images'][0])
            picture.save(tmp_path/'picture.png')
            said = theirs.generate([dict(type='image', value=str(tmp_path/'picture.png')), dict(type='text', value=turn['user'])])
            heard.append((said, *ours([([picture], turn['user'])], max_new_tokens=LONGEST)))
    same = sum(a == b for a, b in heard)
    print(f'{same} of {len(heard)} answers equal, {len({a for a, _ in heard})} different ones')
    assert len({a for a, _ in heard}) > len(heard)/2 and same == len(heard)
