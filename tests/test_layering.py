"The numbers of the notebooks are the order of imports."
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NUMBERED = re.compile(r'(\d\d)_(\w+)\.ipynb')
TORCH_FREE = ('usage', 'files', 'config', 'run_dir', 'schedule', 'advice', 'flops')
HEAVY = ('torch', 'transformers', 'datasets', 'numpy', 'wandb', 'matplotlib', 'PIL')


def numbers() -> dict[str, int]:
    "Module name -> number of its notebook."
    found = [NUMBERED.fullmatch(p.name) for p in (ROOT/'nbs').glob('*.ipynb')]
    return {m[2]: int(m[1]) for m in found if m}


def imported(module: str) -> set[str]:
    "Modules of the package that a module imports, anywhere in its code."
    path = ROOT/'nanovlm_nb'/f'{module}.py'
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.ImportFrom) and node.level == 1: names |= {node.module} if node.module else {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or '').startswith('nanovlm_nb.'): names.add(node.module.split('.')[1])
        elif isinstance(node, ast.Import): names |= {a.name.split('.')[1] for a in node.names if a.name.startswith('nanovlm_nb.')}
    return names


MODULES = sorted(m for m in numbers() if (ROOT/'nanovlm_nb'/f'{m}.py').exists())


def test_every_numbered_notebook_has_one_module_and_the_reverse():
    stems = [NUMBERED.fullmatch(p.name)[2] for p in (ROOT/'nbs').glob('??_*.ipynb')]
    assert len(stems) == len(set(stems))
    modules = {p.stem for p in (ROOT/'nanovlm_nb').glob('*.py')} - {'__init__', '_modidx'}
    assert modules == set(stems)


@pytest.mark.parametrize('module', MODULES)
def test_imports_go_to_lower_numbers(module):
    number = numbers()
    for other in imported(module):
        assert other in number, f'{module} imports {other}, which has no notebook'
        assert number[other] < number[module], f'{number[module]}_{module} imports {number[other]}_{other}'
        assert {number[other]//10, number[module]//10} != {1, 2}, f'model and data import each other: {module}, {other}'


def loaded_by(code: str) -> set[str]:
    "Which of the heavy packages a new Python has loaded after `code`."
    code += f'\nimport sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))'
    done = subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': str(ROOT)}, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_imports_nothing():
    assert not loaded_by('import nanovlm_nb')


@pytest.mark.parametrize('module', TORCH_FREE)
def test_light_modules_import_nothing_heavy(module):
    if module not in MODULES: pytest.skip(f'no {module} yet')
    assert not loaded_by(f'import nanovlm_nb.{module}')


@pytest.mark.parametrize('module', ['schedule', 'packing'])
def test_pure_modules_do_no_io(module):
    if module not in MODULES: pytest.skip(f'no {module} yet')
    tree = ast.parse((ROOT/'nanovlm_nb'/f'{module}.py').read_text(encoding='utf-8'))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or '' for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not [n for n in names if n.startswith(('torch.distributed', 'datasets', 'PIL', 'pathlib', 'os'))]
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, 'id', '') == 'open']


def constants(path: Path) -> set[str]:
    "String constants of a module, without its docstrings."
    tree = ast.parse(path.read_text(encoding='utf-8'))
    said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in said}


def test_file_names_of_a_run_are_spelled_in_one_module():
    names = {n for n in constants(ROOT/'nanovlm_nb'/'run_dir.py') if re.fullmatch(r'\w+(\.(jsonl?|yaml|log|md)|_checkpoint)', n)}
    assert {'log.jsonl', 'config.yaml', 'last_checkpoint'} <= names
    names -= {'config.json'}  # of a model, as transformers calls it
    for module in sorted(set(MODULES) - {'run_dir'}):
        assert not names & constants(ROOT/'nanovlm_nb'/f'{module}.py'), f'{module} spells a file name that run_dir has'
