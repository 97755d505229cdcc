"""Make the saved figures of notebooks small: colours from a palette, one picture an output. usage: figures.py [NOTEBOOK ...]

A figure is saved at two pixels for one of the page, for sharp screens. Of its four numbers a pixel few are needed:
a chart has a few dozen colours. What a palette would change visibly, photographs, stays as it is. In a notebook
that is still too large, figures get three pixels for two of the page, or one for one."""
import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

NBS = Path(__file__).resolve().parent.parent/'nbs'
LARGEST = 150*1024  # bytes of a notebook
MEAN, FLAT = 1., 10  # grey levels that a palette may be off: on average, and in the colour of any area


def alike(picture: Image.Image, palette: Image.Image) -> bool:
    "Whether nobody would see the difference: every area keeps its colour, only the blur of edges may be coarser."
    new, old = np.asarray(palette.convert('RGB'), dtype=int), np.asarray(picture,
        dtype=int)
    _, places, counts = np.unique(old.reshape(-1, 3) @ [1 << 16, 1 << 8, 1],
        return_inverse=True, return_counts=True)
    away = np.abs(new - old).reshape(-1, 3).max(-1)
    return np.abs(new - old).mean() <= MEAN and not (away[(counts >= counts.sum()/2000)[places]] > FLAT).any()


def png(picture: Image.Image) -> bytes:
    "The picture as the bytes of a PNG file."
    picture.save(out := io.BytesIO(), 'PNG', optimize=True)
    return out.getvalue()


def smaller(data: bytes, width: int = 0) -> bytes:
    "The same picture in fewer bytes, on white where it was transparent; of at most so many pixels, if `width` is given."
    picture = Image.open(io.BytesIO(data)).convert('RGBA')
    if 0 < width < picture.width:
        picture = picture.resize((width, round(width*picture.height/picture.width)),
            Image.Resampling.BOX)
    white = Image.new('RGBA', picture.size, 'white')
    white.alpha_composite(picture)
    picture = white.convert('RGB')
    tried = (picture.quantize(n, dither=Image.Dither.NONE, kmeans=3)
        for n in (16, 32, 64, 128, 256))
    best = png(next((p for p in tried if alike(picture, p)), picture))
    return best if len(best) < .95*len(data) else data  # what saves little is no change worth reading


def written(nb: dict) -> str:
    "As nbdev writes it."
    return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + '\n'


def shrink(notebook: Path) -> int:
    "Bytes that the file lost."
    before = notebook.read_text(encoding='utf-8')
    nb = json.loads(before)
    outputs = [o for c in nb['cells'] for o in c.get('outputs', [])
        if 'image/png' in o.get('data', {})]
    for share in (0, 3/2, 1):
        if share and len(written(nb).encode()) < LARGEST: break
        for o in outputs:
            o['data'].pop('image/jpeg', None)  # the same once more, from PIL
            old = base64.b64decode(''.join(o['data']['image/png']))
            new = smaller(old,
                int(share*o['metadata'].get('image/png', {}).get('width', 0)))
            if new != old: o['data']['image/png'] = base64.b64encode(new).decode()
    after = written(nb)
    if after != before: notebook.write_text(after, encoding='utf-8')
    return len(before) - len(after)


if __name__ == '__main__':
    for path in [Path(a) for a in sys.argv[1:]] or sorted(NBS.rglob('*.ipynb')):
        if lost := shrink(path): print(f'{path.name}: {lost:,} bytes less')
