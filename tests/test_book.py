"The way through the book: chapter zero is one page, the home page shows what notebooks computed."

import ast
import builtins
import io
import json
import os
import re
import subprocess
import symtable
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_docs import COURSE, NBS, ROOT, cells, script, text_of

ZERO = NBS / '00_one_page.ipynb'


def shown(notebook: Path) -> list[str]:
    "The code that a reader sees unfolded, without directives."
    code = [
        c['source']
        for c in cells(notebook, 'code')
        if not re.search(
            r'^#\| ?(hide|hide_input|code-fold.*)$', c['source'], re.MULTILINE
        )
    ]
    return [
        line
        for c in code
        for line in c.splitlines()
        if line.strip() and not line.startswith('#|')
    ]


def test_chapter_zero_is_one_page_of_plain_pytorch():
    lines = shown(ZERO)
    assert 60 < len(lines) <= 120, f'{len(lines)} lines'
    assert max(map(len, lines)) <= 110
    tree = ast.parse('\n'.join(lines))
    names = {
        n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
    }
    assert names == {
        're',
        'matplotlib.pyplot',
        'numpy',
        'torch',
        'torch.nn',
        'nanovlm_nb.data.shapes',
    }


def test_pictures_of_the_home_page_are_what_notebooks_show():
    home = text_of(NBS / 'index.ipynb') + text_of(
        NBS / 'tutorials' / 'reference.ipynb'
    ).replace('](../', '](')
    styles = (NBS / 'styles.css').read_text(encoding='utf-8')
    for name, content in script('pictures').pictures().items():
        there = (NBS / name).read_bytes()
        same = (
            there == content
            if name.endswith('.svg')
            else np.array_equal(
                *(
                    np.asarray(Image.open(io.BytesIO(b)).convert('RGB'))
                    for b in (there, content)
                )
            )
        )
        assert same, f'nbs/{name} is not what its notebook shows: run `make readme`'
        if not name.endswith('_dark.png'):
            assert f']({name})' in home
        else:
            assert (
                f'body.quarto-dark img[src$="{name.replace("_dark", "")}"] {{ content: url("{name}"); }}'
                in styles
            )


def test_figures_of_the_home_page_are_those_of_the_first_run():
    home = text_of(NBS / 'index.ipynb')
    run = text_of(NBS / 'tutorials' / 'first_run.ipynb')
    (claim,) = re.findall(
        r'of ([\d,]+) held-out questions ([\d.]+) % are answered right, ([\d.]+) % when another scene is shown, '
        r'and ([\d.]+) % at best without looking',
        home,
    )
    (row,) = re.findall(
        r'^all +(\d+) +([\d.]+)% +([\d.]+)% +([\d.]+)% +[\d.]+%$', run, re.MULTILINE
    )
    assert (claim[0].replace(',', ''), *claim[1:]) == row


def test_the_table_of_benchmarks_is_what_the_pages_measured(monkeypatch):
    "Made anew from the outputs that the pages saved, it is the table that is saved; every page is in it, its code folded away."
    summary = NBS / 'benchmarks' / 'summary.ipynb'
    monkeypatch.chdir(summary.parent)
    made: dict = {}
    for c in cells(summary, 'code'):
        exec(c['source'], made)
    (saved,) = (
        ''.join(o['data']['text/markdown'])
        for c in cells(summary, 'code')
        for o in c['outputs']
    )
    assert made['table'] == saved, 'run nbs/benchmarks/summary.ipynb and save it'
    pages = [p for p in (NBS / 'benchmarks').glob('*.ipynb') if p != summary]
    assert len(pages) >= 5 and {p.name for p in pages} == set(
        re.findall(r'\]\(([^)\s#]+\.ipynb)', saved)
    )
    for p in pages:
        assert (
            cells(p, 'markdown')[0]['source'].splitlines()[-1] == '- code-fold: true'
        ), p.name
    assert (
        len(re.findall(r'\*\*.*\d.*\*\*', saved)) == len(saved.splitlines()) - 2
    )  # a figure in each row


@pytest.mark.slow
def test_chapter_zero_trains_and_looks():
    "All of its cells, the minute of training included, with what they assert."
    done = subprocess.run(
        [f'{sys.exec_prefix}/bin/nbdev_test', '--path', ZERO, '--flags', 'slow'],
        cwd=ROOT,
        env=os.environ | dict(OMP_NUM_THREADS='1'),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def names_of(source: str) -> tuple[set[str], set[str], set[str]]:
    "What a cell loads from outside of its functions, what it binds, and what it imports."

    def loaded(table, top=True):
        yield from (
            s.get_name()
            for s in table.get_symbols()
            if s.is_referenced() and (top or s.is_global())
        )
        for inner in table.get_children():
            yield from loaded(inner, top=False)

    table = symtable.symtable(source, 'cell', 'exec')
    imported = {
        (a.asname or a.name).partition('.')[0]
        for n in ast.walk(ast.parse(source))
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for a in n.names
    }
    bound = {
        s.get_name()
        for s in table.get_symbols()
        if s.is_assigned() or s.is_imported() or s.is_namespace()
    }
    return {*loaded(table)}, bound - imported, imported


def unexplained(notebook: Path) -> tuple[set[str], set[str]]:
    "Names in cells that the page shows which only left-out cells define; of the library's, those that no text names."
    known = {*dir(builtins)}
    needed: set[str] = set()
    library: set[str] = set()
    every = cells(notebook, 'code')
    for cell in every:
        loads, binds, imports = names_of(re.sub(r'(?m)^[%!].*', '', cell['source']))
        known |= imports
        if re.search(
            r'^#\| ?(hide|hide_input|default_exp.*|echo: *false)$',
            cell['source'],
            re.MULTILINE,
        ):
            continue
        if re.search(r'^#\| ?export$', cell['source'], re.MULTILINE):
            library |= binds
        else:
            needed |= loads
            known |= binds
    text = '\n'.join(
        [
            *(c['source'] for c in cells(notebook, 'markdown')),
            *re.findall(r'code-summary: "(.*)"', '\n'.join(c['source'] for c in every)),
        ]
    )
    named = set(re.findall(r'\w+', text))
    return needed - known - library, (needed & library) - known - named


@pytest.mark.parametrize('name', COURSE)
def test_a_page_of_the_course_explains_the_names_that_it_uses(name):
    "No cell that a reader sees needs a value of one that the page leaves out; what it takes from the library, a sentence names."
    hidden, unnamed = unexplained(NBS / name)
    assert not hidden, f'{name}: the page does not define {sorted(hidden)}'
    assert not unnamed, f'{name}: no text says what {sorted(unnamed)} do'


def test_a_name_of_a_left_out_cell_is_found(tmp_path):
    page = tmp_path / 'page.ipynb'
    sources = (
        ('code', '#| export\nfrom os import sep\ndef told():...\ndef untold():...'),
        ('code', '#| hide\nsecret = shown = 1'),
        ('code', 'shown = [secret for x in sep]\ndef f(x): return told, untold, later'),
        ('code', '#| exports\ndef later(): return f'),
        ('markdown', '`told` returns nothing.'),
    )
    found = [dict(cell_type=kind, source=source) for kind, source in sources]
    page.write_text(json.dumps(dict(cells=found)), encoding='utf-8')
    assert unexplained(page) == ({'secret'}, {'untold'})
