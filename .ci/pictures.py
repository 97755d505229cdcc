"""Write the pictures of the home page into nbs/. `make readme` runs it.
The map is drawn here; the others are figures that notebooks have saved, so that a caption's run is the figure's run."""
import base64
import html
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

NBS = Path(__file__).resolve().parent.parent/'nbs'
SAVED = {  # picture -> notebook, cell, parts of the figure (left, top, right, bottom) as shares of its width and height
    'answers.png': ('tutorials/first_run.ipynb', '381cab00',
        [(c/4, r/3, (c+1)/4, (r+1)/3) for r, c in ((0, 0), (0, 3), (1, 2), (2, 3))]),
    'same_curve.png': ('tutorials/stop_and_go.ipynb', 'a6d227f9', [(0, 0, 1, 1)])}

GROUND, FILLED = 0x22, 45  # grey level of a dark page; pixels, odd
WIDTH, BOX = 1000, 168
BLUE, GREEN, PURPLE, LINE = '#1f5f9e', '#1d6b45', '#6a3d9a', '#767d86'

PICTURE = [  # title, what it does, shape after it
    ('picture', 'any size', '3 x 900 x 1024'),
    ('tiles', '16 and a global view', '17 x 3 x 512 x 512'),
    ('vision tower', 'patches of 16 x 16', '17 x 1024 x 768'),
    ('pixel shuffle', '4 x 4 neighbours', '17 x 64 x 12288'),
    ('projector', 'one matrix', '17 x 64 x 960')]
TEXT = [
    ('conversation', 'words and 1088 slots', '1138 ids'),
    ('pack', 'samples end to end', '4096 ids'),
    ('fill the slots', 'table or image token', '4096 x 960'),
    ('language model', '32 blocks', '4096 x 960'),
    ('head and loss', 'at targets alone', 'sum / all targets')]
PROCESSES = [
    ('loader worker', 'reads, tiles, packs', 'some for each rank'),
    ('lane', 'packs in their order', 'one for each pack'),
    ('rank', 'forward, backward', 'one for each GPU'),
    ('update', 'a pack of each lane', 'AdamW, 3 groups'),
    ('checkpoint', 'complete or absent', 'weights, lane states')]


def text(x: float, y: float, said: str, size: int, fill: str,
    weight: str = 'normal') -> str:
    "A centred line of text."
    return (f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
            f'text-anchor="middle">{html.escape(said)}</text>')


def box(x: float, y: float, fill: str, title: str, does: str, shape: str) -> list[str]:
    "A box of three lines."
    middle = x+BOX/2
    return [f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="86" rx="8" fill="{fill}"/>',
            text(middle, y+26, title, 17, '#ffffff', 'bold'),
            text(middle, y+48, does, 14, '#ffffff'),
            text(middle, y+72, shape, 14, '#ffe9a8')]


def arrow(points: str) -> str:
    "A line with a head at its end."
    return f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="3" marker-end="url(#head)"/>'


def column(k: int) -> float:
    "Left side of the k-th box of a row."
    return 10+k*(WIDTH-20-BOX)/4


def row(y: float, fill: str, boxes: list[tuple[str, str, str]]) -> list[str]:
    "Five boxes with arrows between them."
    found = [part for k, b in enumerate(boxes) for part in box(column(k), y, fill, *b)]
    return found + [arrow(f'{column(k)+BOX+4:g},{y+43:g} {column(k+1)-8:g},{y+43:g}')
        for k in range(len(boxes)-1)]


def draw() -> str:
    "The map as SVG."
    middle = column(4)+BOX/2
    down = f'{middle:g},130 {middle:g},148 {column(2)+BOX/2:g},148 {column(2)+BOX/2:g},168'
    return '\n'.join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 440" width="{WIDTH}" height="440" '
        'font-family="system-ui, sans-serif" role="img" aria-labelledby="title">',
        '<title id="title">A picture becomes tiles, patches and image tokens; they fill slots in a pack of text, '
        'which the language model reads; the loss looks at answers. Below: workers fill lanes, ranks compute packs, '
        'an update takes one pack of each lane, a checkpoint keeps all.</title>',
        f'<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{LINE}"/></marker></defs>',
        text(WIDTH/2, 26, 'The path of a sample, with the shapes of the preset nanovlm',
            17, LINE, 'bold'),
        *row(42, BLUE, PICTURE), arrow(down), *row(174, GREEN, TEXT),
        text(WIDTH/2, 304, 'The processes', 17, LINE, 'bold'),
        *row(322, PURPLE, PROCESSES), '</svg>', ''])


def saved(notebook: str, cell: str,
    parts: list[tuple[float, float, float, float]]) -> bytes:
    "Parts of one size of the figure that a cell of a notebook shows, side by side, as PNG."
    found = next(c
        for c in json.loads((NBS/notebook).read_text(encoding='utf-8'))['cells']
        if c['id'] == cell)
    data = next(o['data']['image/png'] for o in found['outputs']
        if 'image/png' in o.get('data', {}))
    image = Image.open(io.BytesIO(base64.b64decode(''.join(data))))
    cuts = [image.crop([round(share*side) for share, side in zip(part, image.size*2)])
        for part in parts]
    row, buffer = Image.new('RGB', (sum(c.width for c in cuts), cuts[0].height), 'white'), io.BytesIO()
    for n, cut in enumerate(cuts): row.paste(cut.convert('RGB'), (n*cuts[0].width, 0))
    row.save(buffer, 'PNG', optimize=True)
    return buffer.getvalue()


def opened(image: Image.Image) -> Image.Image:
    "Leaves of a black-and-white picture what is `FILLED` pixels wide and high: steps of a pixel, which take a tenth of the time of one wide filter."
    for grow in (ImageFilter.MinFilter(3), ImageFilter.MaxFilter(3)):
        for _ in range(FILLED//2): image = image.filter(grow)
    return image


def dark(data: bytes) -> bytes:
    """The same picture for a page with a dark ground: white becomes that ground, black becomes white, hues stay.
    What is filled (a photograph, a coloured field) keeps its colours; lines and letters are thinner than `FILLED`."""
    image = Image.open(io.BytesIO(data)).convert('RGB')
    colours = np.asarray(image, dtype=float)
    drawn = Image.fromarray((colours.min(-1) < 250).astype(np.uint8)*255)
    filled = np.asarray(opened(drawn)) > 0
    turned = colours + 255 - colours.max(-1, keepdims=True) - colours.min(-1,
        keepdims=True)
    out = np.where(filled[..., None], colours, GROUND + turned*(255-GROUND)/255)
    Image.fromarray(out.round().astype(np.uint8)).save(buffer := io.BytesIO(), 'PNG',
        optimize=True)
    return buffer.getvalue()


def pictures() -> dict[str, bytes]:
    "Name and content of each picture of the home page; those of a dark page end with _dark."
    found = {name: saved(*of) for name, of in SAVED.items()}
    return {'map.svg': draw().encode()} | found | {name.replace('.', '_dark.'): dark(data) for name, data in found.items()}


if __name__ == '__main__':
    for name, content in pictures().items(): (NBS/name).write_bytes(content)
