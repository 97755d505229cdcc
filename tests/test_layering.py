"The numbers of the notebooks are the order of imports."

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, cells

from nanovlm_nb.cli import COMMANDS

NOTEBOOK = re.compile(r'(\d\d)_([\w.]+)\.ipynb')
TORCH_FREE = (
    'usage',
    'fields',
    'config',
    'settings',
    'run_dir',
    'schedule',
    'advice',
    'flops',
    'train',
    'cli',
)
HEAVY = ('torch', 'transformers', 'datasets', 'numpy', 'wandb', 'matplotlib', 'PIL')
LATER = {
    ('evaluations', 'cli'),
    ('doctor', 'train'),
}  # starts it as a process of its own


def exports(notebook: Path) -> str:
    "The module that a notebook becomes, below the package: its `default_exp`."
    return next(
        m[1]
        for c in cells(notebook, 'code')
        if (m := re.match(r'#\| ?default_exp ([\w.]+)', c['source']))
    )


NOTEBOOKS = {
    exports(p): p
    for p in sorted((ROOT / 'nbs').glob('??_*.ipynb'))
    if p.name != '00_one_page.ipynb'
}  # it exports nothing
MODULES = sorted(NOTEBOOKS)


def source(module: str) -> Path:
    return ROOT / 'nanovlm_nb' / f"{module.replace('.', '/')}.py"


def number(module: str) -> int:
    return int(NOTEBOOKS[module].name[:2])


def named(name: str) -> str:
    "The module of that name, in whatever package."
    return next(m for m in MODULES if m.split('.')[-1] == name)


def imported(module: str) -> set[str]:
    "Modules of the package that a module imports anywhere in its code, or names in a string."
    names = set()
    here = module.split('.')
    for node in ast.walk(ast.parse(source(module).read_text(encoding='utf-8'))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level] + (
                node.module.split('.') if node.module else []
            )
            names |= (
                {'.'.join(base)}
                if node.module
                else {'.'.join([*base, a.name]) for a in node.names}
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or '').startswith(
            'nanovlm_nb.'
        ):
            names.add(node.module.partition('.')[2])
        elif isinstance(node, ast.Import):
            names |= {
                a.name.partition('.')[2]
                for a in node.names
                if a.name.startswith('nanovlm_nb.')
            }
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {m for m in MODULES if re.match(rf'nanovlm_nb\.{m}\b', node.value)}
    return (
        names - {module} - {m for m in MODULES if (here[-1], m.split('.')[-1]) in LATER}
    )


def test_every_numbered_notebook_has_one_module_and_the_reverse():
    assert all(NOTEBOOK.fullmatch(p.name)[2] == m for m, p in NOTEBOOKS.items()), (
        'the name of a notebook is its number and its module'
    )
    assert len(NOTEBOOKS) + 1 == len(list((ROOT / 'nbs').glob('??_*.ipynb')))
    modules = {
        '.'.join(p.relative_to(ROOT / 'nanovlm_nb').with_suffix('').parts)
        for p in (ROOT / 'nanovlm_nb').rglob('*.py')
        if p.name[0] != '_'
    }
    assert modules == set(MODULES)


@pytest.mark.parametrize('module', MODULES)
def test_imports_go_to_lower_numbers(module):
    for other in imported(module):
        assert other in NOTEBOOKS, f'{module} imports {other}, which has no notebook'
        assert number(other) < number(module), (
            f'{number(module)}_{module} imports {number(other)}_{other}'
        )
        assert {other.split('.')[0], module.split('.')[0]} != {'model', 'data'}, (
            f'model and data import each other: {module}, {other}'
        )


def test_each_command_imports_what_it_does():
    "In its own body: the start of one command costs no other. Only the script imports the command line."
    tree = ast.parse(source('cli').read_text(encoding='utf-8'))
    bodies = {
        n.name.strip('_'): [
            m.module for m in ast.walk(n) if isinstance(m, ast.ImportFrom)
        ]
        for n in tree.body
        if isinstance(n, ast.FunctionDef)
    }
    assert {name for name, modules in bodies.items() if modules} == {*COMMANDS}
    assert {module for module in MODULES if 'cli' in imported(module)} == {'train'}


def loaded_by(code: str) -> set[str]:
    "Which of the heavy packages a new Python has loaded after `code`."
    code += f'\nimport sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))'
    done = subprocess.run(
        [sys.executable, '-c', code],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_offers_names_that_exist_and_that_editors_see():
    "Each is an object of its module, and stands among the imports that only type checkers read; the script's module does not hide `train`."
    import nanovlm_nb
    import nanovlm_nb.train  # noqa: F401

    tree = ast.parse((ROOT / 'nanovlm_nb' / '__init__.py').read_text(encoding='utf-8'))
    seen = {
        a.asname: n.module
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.level
        for a in n.names
    }
    assert {*seen} == {*nanovlm_nb.__all__} - {'PG_CPU'} and {*nanovlm_nb.__all__} == {
        *dir(nanovlm_nb)
    }, 'one of them is no object but a look-up'
    for name, module in seen.items():
        value = getattr(nanovlm_nb, name)
        assert (
            value is getattr(sys.modules[f'nanovlm_nb.{module}'], name)
            and value.__module__ == f'nanovlm_nb.{module}'
        )
    with pytest.raises(ImportError, match="cannot import name 'trian'"):
        exec('from nanovlm_nb import trian')


@pytest.mark.parametrize(
    'code',
    [
        'import nanovlm_nb; dir(nanovlm_nb)',
        *(f'import nanovlm_nb.{named(name)}' for name in TORCH_FREE),
    ],
)
def test_light_modules_import_nothing_heavy(code):
    assert not loaded_by(code)


def test_a_run_loads_neither_plots_nor_wandb():
    "Most runs draw nothing and report nowhere: both are loaded where they are used."
    assert not loaded_by(f"import nanovlm_nb.train, nanovlm_nb.{named('run')}") & {
        'matplotlib',
        'wandb',
    }
