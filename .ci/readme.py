"Write README.md from nbs/index.ipynb: text as it is, visible code with its text output, links to notebooks made to work from the root."
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = re.compile(r'^#\|\s*(hide|default_exp|export\b)', re.M)
LINK = re.compile(r'\]\((?!https?:|#|/|\.\./)([^)\s]+)\)')
NOTE = '<!-- Written from nbs/index.ipynb by `make readme`. Edit the notebook. -->'


def code_text(cell: dict) -> str:
    "A code cell and its text outputs as fenced blocks; nothing for a hidden cell."
    source = ''.join(cell['source'])
    if HIDDEN.search(source): return ''
    shown = '\n'.join(line for line in source.split('\n') if not line.startswith('#|'))
    blocks = [f'```python\n{shown}\n```']
    for out in cell['outputs']:
        text = out.get('text') or out.get('data', {}).get('text/plain', '')
        if text: blocks.append('```\n' + ''.join(text).rstrip() + '\n```')
    return '\n\n'.join(blocks)


def readme_text(notebook: Path) -> str:
    "The markdown of a notebook in nbs/, as the file at the root."
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    parts = [LINK.sub(r'](nbs/\1)', ''.join(c['source']))
        if c['cell_type'] == 'markdown' else code_text(c) for c in cells]
    return '\n\n'.join([NOTE, *filter(None, parts)]) + '\n'


if __name__ == '__main__':
    (ROOT/'README.md').write_text(readme_text(ROOT/'nbs'/'index.ipynb'),
        encoding='utf-8')
