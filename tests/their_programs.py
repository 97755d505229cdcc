"""What another program makes of a checkpoint or an export. Run by that program's own Python, which knows nothing of this library:
python their_programs.py nanovlm|vlmevalkit|transformers DIRECTORY SAMPLES.json OUT.pt"""

import json
import os
import sys

import torch
from PIL import Image


def with_nanovlm(folder):
    "nanoVLM's own code, used as its generate.py uses it; NANOVLM_PATH is a checkout."
    sys.path.insert(0, os.environ['NANOVLM_PATH'])
    from data.processors import get_image_processor, get_image_string, get_tokenizer
    from models.vision_language_model import VisionLanguageModel

    model = VisionLanguageModel.from_pretrained(folder).eval()
    cfg = model.cfg
    tok = get_tokenizer(cfg.lm_tokenizer, cfg.vlm_extra_tokens, cfg.lm_chat_template)
    cut = get_image_processor(
        cfg.max_img_size, cfg.vit_img_size, cfg.resize_to_max_side_len
    )

    def ask(pictures, turns):
        tiles, grids = zip(*(cut(Image.open(p).convert('RGB')) for p in pictures))
        tiles = [
            t[1:]
            if not hasattr(tok, 'global_image_token') and rows * cols == len(t) - 1
            else t
            for t, (rows, cols) in zip(tiles, grids)
        ]
        said = [
            dict(role=role, content=t[role])
            for t in turns
            for role in ('user', 'assistant')
            if role in t
        ]
        said[0]['content'] = (
            get_image_string(tok, grids, cfg.mp_image_token_length) + said[0]['content']
        )
        ids = torch.tensor(
            tok.apply_chat_template([said], tokenize=True, add_generation_prompt=True)
        )
        embedded = model._replace_img_tokens_with_embd(
            ids,
            model.decoder.token_embedding(ids),
            model.MP(model.vision_encoder(torch.cat(tiles))),
        )
        return (
            ids,
            torch.cat(tiles),
            model.decoder.head(model.decoder(embedded)[0]),
            model.generate(ids, list(tiles), max_new_tokens=8, greedy=True),
        )

    return ask, tok


def with_transformers(folder):
    "transformers: AutoProcessor and AutoModelForImageTextToText, nothing else."
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, report = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    processor = AutoProcessor.from_pretrained(folder)

    def ask(pictures, turns):
        said = [
            dict(role=role, content=[dict(type='text', text=t[role])])
            for t in turns
            for role in ('user', 'assistant')
            if role in t
        ]
        said[0]['content'] = [dict(type='image')] * len(pictures) + said[0]['content']
        made = processor(
            text=processor.apply_chat_template(said, add_generation_prompt=True),
            images=[Image.open(p) for p in pictures],
            return_tensors='pt',
        )
        heard = model.eval().generate(**made, max_new_tokens=8, do_sample=False)
        return (
            made['input_ids'],
            made['pixel_values'][0],
            model(**made).logits,
            heard[:, made['input_ids'].shape[1] :],
        )

    return ask, processor.tokenizer


def with_vlmevalkit(folder):
    "VLMEvalKit's model for such checkpoints; VLMEVALKIT is a checkout. It takes one question, and gives a text."
    sys.path.insert(0, os.environ['VLMEVALKIT'])
    if not torch.cuda.is_available():  # then its `.to('cuda')` does nothing
        for kind in (torch.nn.Module, torch.Tensor):
            kind.to = lambda self, *args, plain=kind.to, **more: (
                self if args == ('cuda',) else plain(self, *args, **more)
            )
    from vlmeval.vlm.nanovlm import NanoVLM

    model = NanoVLM(model_path=folder, max_new_tokens=8)
    return lambda pictures, turns: model.generate(
        [
            *(dict(type='image', value=p) for p in pictures),
            dict(type='text', value=turns[-1]['user']),
        ]
    ), None


PROGRAMS = dict(
    nanovlm=with_nanovlm, vlmevalkit=with_vlmevalkit, transformers=with_transformers
)


@torch.inference_mode()
def main(program, folder, samples, out):
    "Ids, pixels, scores of the prompt and greedy answer of each sample, or the answer alone."
    ask, tok = PROGRAMS[program](folder)
    answers = []
    for s in json.loads(open(samples).read()):
        told = ask(s['pictures'], s['turns'])
        if tok:
            ids, pixels, logits, said = told
            told = dict(
                ids=ids[0],
                pixels=pixels.clone(),
                logits=logits[0].float().clone(),
                said=tok.decode(said[0], skip_special_tokens=True).strip(),
            )
        answers.append(told)
    torch.save(answers, out)


if __name__ == '__main__':
    main(*sys.argv[1:])
