"Documentation: docstrings, saved outputs, sidebar, links and the README."

import ast
import builtins
import importlib.util
import inspect
import json
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from nanovlm_nb.core.fields import rule_of
from nanovlm_nb.core.config import TrainConfig, VLMConfig, described, resume_rule

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / 'nbs'
NOTEBOOKS = sorted(
    p
    for p in NBS.rglob('*.ipynb')
    if not any(part[0] in '_.' for part in p.relative_to(NBS).parts)
)
MODULES = sorted(
    '.'.join(p.relative_to(ROOT / 'nanovlm_nb').with_suffix('').parts)
    for p in (ROOT / 'nanovlm_nb').rglob('*.py')
    if p.stem[0] != '_'
)
by_name = pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda p: p.stem)


def cells(notebook: Path, kind: str) -> list[dict]:
    "The code or markdown cells of a notebook, sources joined."
    found = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    return [
        {**c, 'source': ''.join(c['source'])} for c in found if c['cell_type'] == kind
    ]


def script(name: str):
    "A script of .ci/ as a module."
    spec = importlib.util.spec_from_file_location(name, ROOT / '.ci' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(notebook: Path) -> str:
    "All sources and text outputs of a notebook."
    code = cells(notebook, 'code')
    outputs = [
        ''.join(o.get('text') or o.get('data', {}).get('text/plain', ''))
        for c in code
        for o in c['outputs']
    ]
    return '\n'.join(
        [*(c['source'] for c in [*cells(notebook, 'markdown'), *code]), *outputs]
    )


# --- names


@pytest.mark.parametrize('module', MODULES)
def test_public_names_are_documented(module):
    mod = import_module(f'nanovlm_nb.{module}')
    public = {}
    for name in mod.__all__:
        value = getattr(mod, name)
        if inspect.isfunction(value):
            public[name] = value.__doc__
        if not inspect.isclass(value):
            continue
        public[name] = vars(value).get(
            '__doc__'
        )  # its own, not that of a class above it
        for n, f in vars(value).items():
            if n[0] != '_' and (
                inspect.isfunction(f)
                or isinstance(f, (property, cached_property, classmethod, staticmethod))
            ):
                public[f'{name}.{n}'] = f.__doc__
    assert not [name for name, doc in public.items() if not (doc or '').strip()]


@pytest.mark.parametrize('module', MODULES)
def test_short_lines_no_star_imports_no_error_of_any_kind(module):
    "At most 110 characters, so that two files stand side by side and a line is read at a glance."
    text = (ROOT / 'nanovlm_nb' / f"{module.replace('.', '/')}.py").read_text(
        encoding='utf-8'
    )
    written = re.sub(r'^__all__ = \[.*?\]$', '', text, flags=re.MULTILINE | re.DOTALL)
    assert not [
        line
        for line in written.splitlines()
        if len(line) > 110 and not line.startswith(('# %%', '"""'))
    ]
    nodes = list(ast.walk(ast.parse(text)))
    assert not [
        n.module
        for n in nodes
        if isinstance(n, ast.ImportFrom) and n.names[0].name == '*'
    ]
    any_kind = [
        n
        for n in nodes
        if isinstance(n, ast.ExceptHandler)
        and (
            n.type is None
            or getattr(n.type, 'id', '') in ('Exception', 'BaseException')
        )
    ]
    # an error of another's code is logged with its traceback; others are raised again, or kept until all ranks know of them
    assert module in ('core.dist', 'training.update') or not [
        n.lineno
        for n in any_kind
        if not re.search(r'\.exception\(|\braise\b', ast.unparse(n))
    ]


def test_the_page_of_settings_shows_the_fields_as_they_are():
    "Its saved tables: every field with its rule, its meaning and what a change does."
    page = ROOT / 'nbs' / 'tutorials' / 'settings.ipynb'
    rows = ''.join(
        ''.join(o['data']['text/markdown'])
        for c in cells(page, 'code')
        for o in c['outputs']
        if 'data' in o
    ).splitlines()
    found = {re.sub(r'\W', '', r.split(' | ')[0]): r for r in rows}
    for cls in (VLMConfig, TrainConfig):
        kinds = get_type_hints(cls, include_extras=True)
        for name, (_, text, common) in described(cls).items():
            assert all(
                part.replace('|', '\\|') in found[name]
                for part in (text, rule_of(kinds[name])[1], *resume_rule(name))
            ), name
            assert found[name].startswith('| **') == common, name


# --- notebooks


@by_name
def test_first_cell_names_and_summarises(notebook):
    "And does nothing else: nbdev makes the page's title and description of this cell, and drops what else it holds."
    first = json.loads(notebook.read_text(encoding='utf-8'))['cells'][0]
    lines = [line for line in ''.join(first['source']).splitlines() if line.strip()]
    assert (
        first['cell_type'] == 'markdown'
        and lines[0].startswith('# ')
        and lines[1].startswith('> ')
    )
    wrong = [
        line for line in lines[2:] if line != '- code-fold: true'
    ]  # a setting of the page
    assert not wrong, f'give a cell of its own to: {wrong[0]}'


def test_every_figure_says_what_it_shows():
    "Quarto hands `fig-alt`, one of the cell's first lines, to those who do not see the picture."
    told = re.compile(r'\A(?:#\|.*\n)*#\| fig-alt: "([^"\\]{30,})"\n')
    figures = {
        f'{p.stem} {c["id"]}': told.match(c['source'])
        for p in NOTEBOOKS
        for c in cells(p, 'code')
        if any(
            kind.startswith('image/')
            for o in c['outputs']
            for kind in o.get('data', {})
        )
    }
    bare = [cell for cell, found in figures.items() if not found]
    assert not bare, (
        f'no text of 30 characters or more in {bare}: begin the cell with #| fig-alt: "what is seen"'
    )
    texts = [found[1] for found in figures.values()]
    assert len(set(texts)) == len(texts), [t for t in texts if texts.count(t) > 1]


@by_name
def test_outputs_are_clean(notebook):
    text = json.dumps([c['outputs'] for c in cells(notebook, 'code')])
    text = re.sub(r'"image/png": "[^"]*"', '', text)
    for bad in (
        r'/home/',
        r'/root/',
        r'/tmp/',
        r'/work/',
        r'site-packages',
        r'0x[0-9a-f]{6,}',
        r'\d\d:\d\d:\d\d',
        r'Warning',
        r'"output_type": "error"',
        r'\\r',
    ):  # the last: progress bars
        assert not re.search(bad, text), f'saved output matches {bad}'
    assert notebook.stat().st_size < 170 * 1024, (
        'python .ci/figures.py makes saved figures small'
    )


@by_name
def test_links_between_notebooks_exist(notebook):
    "Of the text, and of tables that a cell has written."
    shown = [
        ''.join(o['data']['text/markdown'])
        for c in cells(notebook, 'code')
        for o in c['outputs']
        if 'text/markdown' in o.get('data', {})
    ]
    text = '\n'.join([*(c['source'] for c in cells(notebook, 'markdown')), *shown])
    for link in re.findall(r'\]\((?!https?:|#|mailto:)([^)\s#]+)', text):
        assert (notebook.parent / link).exists(), f'{link} does not exist'


def test_no_notebook_ends_with_its_source():
    "nbdev looks at the cell that follows one with `#| exports`, and stops where there is none."
    assert not [
        p.name
        for p in NOTEBOOKS
        if '#| exports'
        in ''.join(json.loads(p.read_text(encoding='utf-8'))['cells'][-1]['source'])
        and 'def ' not in cells(p, 'code')[-1]['source']
    ]


COURSE = [
    item['href']
    for item in yaml.safe_load((ROOT / '_quarto.yml').read_text())['website'][
        'sidebar'
    ]['contents']
    if isinstance(item, dict) and 'href' in item and item['href'] != 'index.ipynb'
]


def sidebar_pages() -> list[str]:
    "Notebooks that the sidebar lists, patterns resolved."

    def walk(items):
        for item in [items] if isinstance(items, str) else items:
            if isinstance(item, str):
                yield from (
                    [
                        str(p.relative_to(NBS))
                        for p in sorted(NBS.glob(item.lstrip('/')))
                    ]
                    if '*' in item
                    else [item]
                )
            else:
                yield from (
                    [item['href']]
                    if 'href' in item
                    else walk(item.get('contents', ()))  # a heading has none
                )

    return [
        p
        for p in walk(
            yaml.safe_load((ROOT / '_quarto.yml').read_text())['website']['sidebar'][
                'contents'
            ]
        )
        if p.endswith('.ipynb')
    ]


def test_sidebar_lists_every_notebook_once():
    pages = sidebar_pages()
    assert sorted(pages) == sorted(str(p.relative_to(NBS)) for p in NOTEBOOKS)
    numbered = [p for p in pages if re.match(r'\d\d_', p)]
    course = numbered[: len(COURSE)]
    workshop = numbered[len(COURSE) :]
    assert course == COURSE and workshop == sorted(workshop), (
        "the course has an order of its own, the workshop that of its imports"
    )


def test_the_page_of_reference_lists_every_module():
    text = '\n'.join(
        c['source'] for c in cells(NBS / 'tutorials' / 'reference.ipynb', 'markdown')
    )
    assert not [
        p.name
        for p in NOTEBOOKS
        if p.parent == NBS
        and re.match(r'\d\d_', p.name)
        and f'](../{p.name})' not in text
    ]


# --- the site and the README


def test_readme_is_the_index_notebook():
    assert (ROOT / 'README.md').read_text(encoding='utf-8') == script(
        'readme'
    ).readme_text(NBS / 'index.ipynb'), 'run `make readme`'


def test_readme_links_exist():
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    assert not [
        link
        for link in re.findall(r'\]\((?!https?:|#)([^)\s#]+)', text)
        if not (ROOT / link).exists()
    ]


@pytest.mark.parametrize('module', MODULES)
def test_annotations_in_quotes_name_what_stands_above(module):
    "The site shows a signature below the cell that defines it, where nothing is known of later cells."
    tree = ast.parse(
        Path(import_module(f'nanovlm_nb.{module}').__file__).read_text(encoding='utf-8')
    )
    known = set()
    for statement in tree.body:
        known |= {
            n.name if hasattr(n, 'name') else n.id
            for n in ast.walk(statement)
            if isinstance(n, (ast.FunctionDef, ast.ClassDef))
            or isinstance(n, ast.Name)
            and isinstance(n.ctx, ast.Store)
        }
        known |= {
            (n.asname or n.name).split('.')[0]
            for n in ast.walk(statement)
            if isinstance(n, ast.alias)
        }
        quoted = [
            a.value
            for n in ast.walk(statement)
            for a in (getattr(n, 'annotation', None), getattr(n, 'returns', None))
            if isinstance(a, ast.Constant) and isinstance(a.value, str)
        ]
        named = {
            n.id
            for text in quoted
            for n in ast.walk(ast.parse(text))
            if isinstance(n, ast.Name)
        }
        assert named <= known | {*dir(builtins)}, (statement.lineno, named - known)
