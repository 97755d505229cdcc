"""Close in Jupyter and Colab the cells that the site hides or folds. usage: fold.py [NOTEBOOK ...]

The flags of a cell speak to nbdev and Quarto alone. JupyterLab reads `jupyter` of a cell's metadata, Colab `cellView`;
settings.ini lets `nbdev_clean` keep both. This sets them from the flags, so a notebook never says two things.
Of a closed cell JupyterLab shows the first line: that is `code-summary`. The text for those who do not see a figure
is the last of the options."""
import json
import re
import sys
from itertools import takewhile
from pathlib import Path

NBS = Path(__file__).resolve().parent.parent/'nbs'
CLOSED = re.compile(r'^#\| *(hide|hide_input|export|default_exp|echo: *false|code-fold: *true)\b', re.M)
# outputs are closed too: of a cell that the site leaves out, and of the solution of an exercise
ALL_CLOSED = re.compile(r'^#\| *(hide$|code-summary: *"Solution)', re.M)


def view(source: str) -> dict:
    "The metadata of a code cell: empty for one that stays open."
    if not CLOSED.search(source): return {}
    closed = dict(source_hidden=True)
    if ALL_CLOSED.search(source): closed['outputs_hidden'] = True
    return dict(cellView='form', jupyter=closed)


def ordered(lines: list[str]) -> list[str]:
    "The lines of a code cell, its options in the order in which they are read."
    options = list(takewhile(lambda line: line.startswith('#|'), lines))
    place = {'#| code-summary': 0, '#| fig-alt': 2}
    first = sorted(options, key=lambda line: place.get(line.partition(':')[0], 1))
    return first + lines[len(options):]


def fold(notebook: Path) -> int:
    "How many cells changed."
    nb = json.loads(notebook.read_text(encoding='utf-8'))
    found = 0
    for cell in nb['cells']:
        if cell['cell_type'] == 'code':
            wanted = dict(metadata=view(''.join(cell['source'])), source=ordered(cell['source']))
        else: wanted = dict(metadata={})
        found += any(cell[k] != v for k, v in wanted.items())
        cell |= wanted
    if found:
        text = json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + '\n'
        notebook.write_text(text, encoding='utf-8')
    return found


if __name__ == '__main__':
    for path in [Path(a) for a in sys.argv[1:]] or sorted(NBS.rglob('*.ipynb')):
        if n := fold(path): print(f'{path.name}: {n} cells')
