"Twenty questions about drawn pictures of all sorts of files, and how far two programs are apart on them."
import json
import random
from pathlib import Path

import torch
from PIL import ExifTags, Image

from nanovlm_nb.data.images import open_image
from nanovlm_nb.data.dataset import SORTS, draw_scene, make_scene

KINDS = 'rgb', 'grey', 'palette', 'palette with transparency', 'transparent', 'turned', '16 bits'


def draw(path, kind, rng):
    "A scene on a ground of any proportions, as a file of this kind."
    im = draw_scene(make_scene(rng.choice([s for s in SORTS if s != 'text']), rng), rng, rng.choice((40, 64, 100)))
    ground = Image.new('RGB', (im.width + rng.randint(0, 80), im.height + rng.randint(0, 80)), im.getpixel((0, 0)))
    ground.paste(im, (rng.randint(0, ground.width - im.width), rng.randint(0, ground.height - im.height)))
    seen = ground.convert('L').point(lambda v: 255*(v > 60))  # where something is drawn
    if kind == 'grey': ground.convert('L').save(path := path.with_suffix('.png'))
    elif kind == 'palette': ground.quantize(32).save(path := path.with_suffix('.png'))
    elif kind == 'palette with transparency': ground.quantize(32).save(path := path.with_suffix('.png'), transparency=0)
    elif kind == 'transparent':
        ground.putalpha(seen)
        ground.save(path := path.with_suffix('.png'))
    elif kind == 'turned':
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        ground.save(path := path.with_suffix('.jpg'), exif=exif, quality=95)
    elif kind == '16 bits': Image.frombytes('I;16', ground.size, b''.join((v*257).to_bytes(2, 'little') for v in ground.convert('L').tobytes())).save(path := path.with_suffix('.png'))
    else: ground.save(path := path.with_suffix('.png'))
    return str(path)


def make_samples(place, plain=False, n=20):
    "Questions, each with its pictures and what was said before; `plain`: the pictures as this library opens them, RGB and upright."
    rng, out = random.Random(5), []
    place.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        kind = KINDS[i % len(KINDS)]
        pictures = [draw(place/f'{i}_{j}', kind, rng) for j in range(1 + i % 3)]
        if plain:
            for p in pictures: open_image(p).save(p := Path(p).with_suffix('.png'))
            pictures = [str(Path(p).with_suffix('.png')) for p in pictures]
        asked = rng.sample(['How many squares are there?', 'What colour is it?', 'What is this?', 'Is it red?', 'Where is the circle?'], 2)
        turns = [dict(user=asked[0], assistant='one'), dict(user=asked[1])] if i % 4 == 3 else [dict(user=asked[0])]
        out.append(dict(kind=kind, pictures=pictures, turns=turns))
    (place/'samples.json').write_text(json.dumps(out))
    return out


@torch.inference_mode()
def ours(asker, samples):
    "What this library makes of them, as `their_programs.py` tells it of another."
    out = []
    for s in samples:
        ids, tiles = asker.prompt(s['pictures'], s['turns'])
        row = torch.tensor([ids])
        pixels = asker.model.cfg.pixel_mean, asker.model.cfg.pixel_std
        assert pixels == ([0.], [1.])
        said = asker.model.generate(row, tiles, max_new_tokens=8, greedy=True)[0]
        out.append(dict(ids=row[0], pixels=torch.cat(tiles).float()/255, logits=asker.model(row, tiles)[0][0], said=asker.tokenizer.decode(said, skip_special_tokens=True).strip()))
    return out


def apart(samples, theirs, mine):
    """How many ids and answers are equal, how far pixels are apart (in levels of 255), also by the kind of file, and scores: of all, and of those
    samples whose pixels are the same."""
    pairs = [(s, a, b) for s, a, b in zip(samples, theirs, mine, strict=True) if a and torch.equal(a['ids'], b['ids'])]
    far = lambda name, pairs: max([(a[name]-b[name]).abs().max().item() for _, a, b in pairs], default=float('nan'))
    alike = [p for p in pairs if far('pixels', [p]) < 1e-6]
    return dict(refused=theirs.count(None), ids=len(pairs), pixels=255*far('pixels', pairs), logits=far('logits', pairs), answers=sum(bool(a) and a['said'] == b['said'] for a, b in zip(theirs, mine)),
                same_pixels=len(alike), logits_there=far('logits', alike), answers_there=sum(a['said'] == b['said'] for _, a, b in alike),
                by_kind={k: round(255*far('pixels', [p for p in pairs if p[0]['kind'] == k]), 1) for k in KINDS})
