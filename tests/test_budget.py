"""How much there may be: tokens and public names of the package, and how many cells of the numbered notebooks show something.
Lines are free: comments, docstrings and statements of their own cost nothing, so that nothing is gained by crowding a line."""

import ast
import io
import itertools
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from test_docs import NBS, ROOT, cells

DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
TOKENS = 181_600
PUBLIC = 676
#: at most, see `density`
DENSITY = dict(
    nanovlm_nb=dict(
        width=45, wide=84, tuples=0.2, comprehensions=48, ternaries=33, walrus=0.3
    ),
    tests=dict(
        width=45, wide=84, tuples=1.3, comprehensions=54, ternaries=11, walrus=2.5
    ),
)
OVER_40 = 0.042  # share of the defining cells with more than 40 statements, at most
SHOWING = 0.92  # share of the visible cells that show something, at least; one that only defines has nothing to show


def docstring_lines(tree: ast.Module) -> set[int]:
    "The lines of all docstrings."
    owners = [
        n
        for n in ast.walk(tree)
        if isinstance(n, (ast.Module, *DEFINITION))
        and ast.get_docstring(n, clean=False) is not None
    ]
    return {
        line
        for n in owners
        for line in range(n.body[0].lineno, n.body[0].end_lineno + 1)
    }


def mass(text: str) -> tuple[int, int]:
    "Tokens and public definitions of a module."
    tree = ast.parse(text)
    free = docstring_lines(tree)
    found = [
        t
        for t in tokenize.generate_tokens(io.StringIO(text).readline)
        if t.type not in FREE and t.start[0] not in free
    ]
    kinds = [
        tokenize.tok_name[t.type].removeprefix('FSTRING_') for t in found
    ]  # since Python 3.12 an f-string is many tokens; here it is one
    depth = itertools.accumulate([0, *((k == 'START') - (k == 'END') for k in kinds)])
    # a comma before a bracket is layout: a signature of one parameter a line has it
    layout = [
        t.string == ',' and after.string in (')', ']', '}')
        for t, after in zip(found, [*found[1:], *found[-1:]])
    ]
    tokens = sum(not d and not free for d, free in zip(depth, layout))
    public = [
        n for n in tree.body if isinstance(n, DEFINITION) and not n.name.startswith('_')
    ]
    return tokens, len(public)


def test_the_package_does_not_grow():
    modules = [
        path
        for path in (ROOT / 'nanovlm_nb').rglob('*.py')
        if path.name != '_modidx.py'
    ]  # the index that nbdev writes is none
    found = [mass(path.read_text(encoding='utf-8')) for path in modules]
    assert sum(tokens for tokens, _ in found) <= TOKENS
    assert sum(public for _, public in found) <= PUBLIC


def density(texts: list[str]) -> dict[str, float]:
    "Width of a code line in characters, median and of nine in ten; per 1000 such lines, how often several things share one."
    widths: list[int] = []
    seen: Counter[str] = Counter()
    for text in texts:
        tree = ast.parse(text)
        code = {
            line
            for t in tokenize.generate_tokens(io.StringIO(text).readline)
            if t.type not in FREE
            for line in range(t.start[0], t.end[0] + 1)
        } - docstring_lines(tree)
        lines = text.split('\n')
        widths += [len(lines[line - 1].strip()) for line in code]
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Tuple)
                and isinstance(node.value, ast.Tuple)
            ):
                seen['tuples'] += 1
            elif isinstance(
                node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
            ):
                seen['comprehensions'] += 1
            elif isinstance(node, ast.IfExp):
                seen['ternaries'] += 1
            elif isinstance(node, ast.NamedExpr):
                seen['walrus'] += 1
    widths.sort()
    of_lines = {name: 1000 * count / len(widths) for name, count in seen.items()}
    return dict(
        width=widths[len(widths) // 2], wide=widths[len(widths) * 9 // 10], **of_lines
    )


@pytest.mark.parametrize('folder', DENSITY)
def test_a_line_holds_one_thought(folder):
    "Narrow lines, and few that assign, choose and loop at once."
    texts = [
        p.read_text(encoding='utf-8')
        for p in (ROOT / folder).rglob('*.py')
        if p.name != '_modidx.py'
    ]
    found = density(texts)
    assert not {
        name: found[name]
        for name, limit in DENSITY[folder].items()
        if found[name] > limit
    }


def test_tests_are_laid_out_by_a_formatter():
    "What differs is named; `ruff format tests` lays it out."
    found = subprocess.run(
        [sys.executable, '-m', 'ruff', 'format', '--check', 'tests'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert not found.returncode, found.stdout + found.stderr


def test_notebooks_show_what_they_define():
    code = [
        c
        for p in sorted(NBS.glob('[0-9][0-9]_*.ipynb'))
        for c in cells(p, 'code')
        if c['source'].strip()
    ]
    flags = [
        set(re.findall(r'^\s*#\s*\|\s*([\w-]+)', c['source'], re.MULTILINE))
        for c in code
    ]
    size = [
        sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(c['source'])))
        for c, f in zip(code, flags)
        if f & {'export', 'exports'}
        and re.search(r'^(?:async )?(?:def|class) ', c['source'], re.MULTILINE)
    ]
    shown = [
        bool(c['outputs'])
        for c, f in zip(code, flags)
        if not f & {'export', 'exports', 'exporti', 'hide', 'hide_input', 'default_exp'}
        and not all(
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            for node in ast.parse(c['source']).body
        )
    ]
    assert (
        sum(n > 40 for n in size) / len(size) <= OVER_40
        and sum(shown) / len(shown) >= SHOWING
    )


def test_nothing_else_stands_at_the_top():
    "A build's leftovers are easily committed with the rest."
    kept = subprocess.run(
        ['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True
    ).stdout.split('\n')
    assert {name.split('/')[0] for name in kept if name} <= {
        *'.ci .gitattributes .github .gitignore nbs nanovlm_nb settings.ini tests _quarto.yml setup.py README.md'.split(),
        *'constraints.txt Makefile LICENSE CHANGELOG.md CONTRIBUTING.md MANIFEST.in slurm'.split(),
    }
