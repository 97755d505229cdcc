"""How much there may be: code lines, tokens and public names by package, lines of tests, and how many cells of the numbered notebooks show something.
The limits are what there is; a package that grows pays in another. Comments, docstrings and blank lines are free, so that explaining costs nothing;
tokens are counted beside lines, so that crowding a line gains nothing."""
import ast
import collections
import io
import itertools
import re
import subprocess
import tokenize
from pathlib import Path

from test_docs import NBS, ROOT, cells

DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
LINES = {'.': 273, 'answers': 919, 'compat': 90, 'core': 1654, 'data': 1577, 'model': 1477, 'runs': 615, 'tools': 883, 'training': 1327, 'uses': 981}
TOKENS, PUBLIC, TEST_LINES, NUMBERED = 130_634, 529, 6_499, 50
OVER_20, SHOWING = .11, .90  # cells that define more than 20 lines, at most; visible cells that show something, at least


def docstring_lines(tree: ast.Module) -> set[int]:
    "The lines of all docstrings."
    owners = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, *DEFINITION)) and ast.get_docstring(n, clean=False) is not None]
    return {line for n in owners for line in range(n.body[0].lineno, n.body[0].end_lineno + 1)}


def mass(text: str) -> tuple[int, int, int]:
    "Code lines, tokens and public definitions of a module."
    tree = ast.parse(text)
    free = docstring_lines(tree)
    found = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in FREE and t.start[0] not in free]
    lines = {line for t in found for line in range(t.start[0], t.end[0] + 1)}
    kinds = [tokenize.tok_name[t.type].removeprefix('FSTRING_') for t in found]  # since Python 3.12 an f-string is many tokens; here it is one
    depth = itertools.accumulate([0, *((k == 'START')-(k == 'END') for k in kinds)])
    return len(lines), sum(not d for d, _ in zip(depth, found)), sum(isinstance(n, DEFINITION) and not n.name.startswith('_') for n in tree.body)


def masses(folder: Path) -> dict[Path, tuple[int, int, int]]:
    "The same of every module of a folder; the index that nbdev writes is none."
    return {p.relative_to(folder): mass(p.read_text(encoding='utf-8')) for p in folder.rglob('*.py') if p.name != '_modidx.py'}


def test_no_package_grows():
    lines: collections.Counter = collections.Counter()
    found = masses(ROOT/'nanovlm_nb')
    for path, (n, *_) in found.items(): lines[path.parts[0] if len(path.parts) > 1 else '.'] += n
    assert not {name: (n, LINES.get(name)) for name, n in lines.items() if n > LINES.get(name, 0)}
    assert sum(n for _, n, _ in found.values()) <= TOKENS and sum(n for *_, n in found.values()) <= PUBLIC
    assert sum(n for n, *_ in masses(ROOT/'tests').values()) <= TEST_LINES


def test_notebooks_show_what_they_define():
    assert len(notebooks := sorted(NBS.glob('[0-9][0-9]_*.ipynb'))) <= NUMBERED
    code = [c for p in notebooks for c in cells(p, 'code') if c['source'].strip()]
    flags = [set(re.findall(r'^\s*#\s*\|\s*([\w-]+)', c['source'], re.MULTILINE)) for c in code]
    size = [sum(bool(line.strip()) and not line.startswith('#|') for line in c['source'].split('\n'))
            for c, f in zip(code, flags) if f & {'export', 'exports'} and re.search(r'^(?:async )?(?:def|class) ', c['source'], re.MULTILINE)]
    shown = [bool(c['outputs']) for c, f in zip(code, flags) if not f & {'export', 'exports', 'exporti', 'hide', 'hide_input', 'default_exp'}]
    assert sum(n > 20 for n in size)/len(size) <= OVER_20 and sum(shown)/len(shown) >= SHOWING


def test_nothing_else_stands_at_the_top():
    "A build's leftovers are easily committed with the rest."
    kept = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True).stdout.split('\n')
    assert {name.split('/')[0] for name in kept if name} <= {*'.ci .gitattributes .github .gitignore nbs nanovlm_nb settings.ini tests _quarto.yml setup.py README.md'.split(),
                                                             *'constraints.txt Makefile LICENSE CHANGELOG.md CONTRIBUTING.md MANIFEST.in slurm'.split()}
