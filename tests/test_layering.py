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
NOTEBOOK = re.compile(r'(\d\d)_([\w.]+)\.ipynb')
TORCH_FREE = ('usage', 'config', 'run_dir', 'schedule', 'advice', 'flops', 'train', 'cli')
CONVENTIONAL = ('main', 'logger', 'train')  # in every module that has one; a run is trained, and rows in a line of code
HEAVY = ('torch', 'transformers', 'datasets', 'numpy', 'wandb', 'matplotlib', 'PIL')
LATER = {('evaluate', 'cli')}  # starts it as a process of its own


def exports(notebook: Path) -> str:
    "The module that a notebook becomes, below the package: its `default_exp`."
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    return next(m[1] for c in cells for m in [re.match(r'#\| ?default_exp ([\w.]+)', ''.join(c['source']))] if m)


NOTEBOOKS = {exports(p): p for p in sorted((ROOT/'nbs').glob('??_*.ipynb')) if p.name != '00_one_page.ipynb'}  # it exports nothing
MODULES = sorted(NOTEBOOKS)


def source(module: str) -> Path: return ROOT/'nanovlm_nb'/f"{module.replace('.', '/')}.py"


def number(module: str) -> int: return int(NOTEBOOKS[module].name[:2])


def named(name: str) -> str:
    "The module of that name, in whatever package."
    return next(m for m in MODULES if m.split('.')[-1] == name)


def imported(module: str) -> set[str]:
    "Modules of the package that a module imports anywhere in its code, or names in a string."
    names, here = set(), module.split('.')
    for node in ast.walk(ast.parse(source(module).read_text(encoding='utf-8'))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[:len(here)-node.level] + (node.module.split('.') if node.module else [])
            names |= {'.'.join(base)} if node.module else {'.'.join([*base, a.name]) for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or '').startswith('nanovlm_nb.'): names.add(node.module.partition('.')[2])
        elif isinstance(node, ast.Import): names |= {a.name.partition('.')[2] for a in node.names if a.name.startswith('nanovlm_nb.')}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str): names |= {m for m in MODULES if re.match(rf'nanovlm_nb\.{m}\b', node.value)}
    return names - {module} - {m for m in MODULES if (here[-1], m.split('.')[-1]) in LATER}


def test_every_numbered_notebook_has_one_module_and_the_reverse():
    assert all(NOTEBOOK.fullmatch(p.name)[2] == m for m, p in NOTEBOOKS.items()), 'the name of a notebook is its number and its module'
    assert len(NOTEBOOKS)+1 == len(list((ROOT/'nbs').glob('??_*.ipynb')))
    modules = {'.'.join(p.relative_to(ROOT/'nanovlm_nb').with_suffix('').parts) for p in (ROOT/'nanovlm_nb').rglob('*.py') if p.name[0] != '_'}
    assert modules == set(MODULES)


@pytest.mark.parametrize('module', MODULES)
def test_imports_go_to_lower_numbers(module):
    for other in imported(module):
        assert other in NOTEBOOKS, f'{module} imports {other}, which has no notebook'
        assert number(other) < number(module), f'{number(module)}_{module} imports {number(other)}_{other}'
        assert {number(other)//10, number(module)//10} != {1, 2}, f'model and data import each other: {module}, {other}'


def test_no_class_gets_its_methods_from_outside():
    "What `@patch` adds, no editor and no type checker sees."
    found = [f'{m}.py' for m in MODULES if re.search(r'^@patch', source(m).read_text(encoding='utf-8'), re.MULTILINE)]
    assert not found


def test_an_editor_completes_the_parts_of_a_run():
    "jedi reads the source, as editors do, and imports nothing."
    import jedi
    text = 'from nanovlm_nb.training.trainer import Trainer\nfrom nanovlm_nb.answers.evaluate import Evaluations\ndef f(t: Trainer, e: Evaluations):\n    t.\n    e.\n'
    script = jedi.Script(text, project=jedi.Project(ROOT))
    for line, name in ((4, 'Trainer'), (5, 'Evaluations')):
        module = re.search(rf'nanovlm_nb\.([\w.]+) import {name}', text)[1]
        tree = ast.parse(source(module).read_text(encoding='utf-8'))
        classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
        wanted, at = set(), classes[name]
        while at is not None:  # the chapters, from the last to the first
            wanted |= {f.name for f in at.body if isinstance(f, ast.FunctionDef)} | {f.target.id for f in at.body if isinstance(f, ast.AnnAssign)}
            at = next((classes[b.id] for b in at.bases if isinstance(b, ast.Name) and b.id in classes), None)
        assert len(wanted) > 10 and wanted <= {c.name for c in script.complete(line, 6)}


def test_the_modules_of_the_table_exist():
    "They are imported by name; nothing else is, but what a user names."
    from nanovlm_nb.cli import COMMANDS, EXPORTS
    assert {name.partition(':')[0] for name in (*COMMANDS.values(), *EXPORTS.values())} <= {*NOTEBOOKS}
    assert {m.split('.')[-1] for m in MODULES if 'import_module(' in source(m).read_text(encoding='utf-8')} == {'config', 'cli', 'api'}


def loaded_by(code: str) -> set[str]:
    "Which of the heavy packages a new Python has loaded after `code`."
    code += f'\nimport sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))'
    done = subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': str(ROOT)}, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_imports_nothing():
    assert not loaded_by('import nanovlm_nb; dir(nanovlm_nb)')


def test_the_package_offers_names_that_exist_and_that_editors_see():
    "Each is an object of its module, and stands among the imports that only type checkers read; the script's module does not hide `train`."
    import nanovlm_nb
    import nanovlm_nb.train  # noqa: F401
    tree = ast.parse((ROOT/'nanovlm_nb'/'__init__.py').read_text(encoding='utf-8'))
    seen = {a.asname: n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level for a in n.names}
    assert {*seen} == {*nanovlm_nb.__all__} == {*dir(nanovlm_nb)}
    for name, module in seen.items():
        value = getattr(nanovlm_nb, name)
        assert value is getattr(sys.modules[f'nanovlm_nb.{module}'], name) and value.__module__ == f'nanovlm_nb.{module}'
    with pytest.raises(ImportError, match="cannot import name 'trian'"): exec('from nanovlm_nb import trian')


@pytest.mark.parametrize('module', TORCH_FREE)
def test_light_modules_import_nothing_heavy(module):
    assert not loaded_by(f'import nanovlm_nb.{named(module)}')


@pytest.mark.parametrize('module', ['schedule', 'packing'])
def test_pure_modules_do_no_io(module):
    tree = ast.parse(source(named(module)).read_text(encoding='utf-8'))
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
    names = {n for n in constants(source(named('run_dir'))) if re.fullmatch(r'\w+(\.(jsonl?|yaml|log|md)|_checkpoint)', n)}
    assert {'log.jsonl', 'last_checkpoint'} <= names
    names -= {'config.json'}  # of a model, as transformers calls it
    for module in sorted(set(MODULES) - {named('run_dir')}):
        assert not (names if module == named('config') else names | {'config.yaml'}) & constants(source(module)), f'{module} spells a file name that run_dir or config has'


def test_a_run_loads_neither_plots_nor_wandb():
    "Most runs draw nothing and report nowhere: both are loaded where they are used."
    assert not loaded_by(f"import nanovlm_nb.train, nanovlm_nb.{named('run')}") & {'matplotlib', 'wandb'}


def test_every_number_and_every_public_name_is_used_once():
    "Both folders show the architecture, and a name that is read anywhere has one meaning."
    numbers = [number(m) for m in MODULES]
    assert len(numbers) == len(set(numbers))
    owners = {}
    for module in MODULES:
        for node in ast.parse(source(module).read_text(encoding='utf-8')).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == '__all__':
                for name in ast.literal_eval(node.value): owners.setdefault(name, []).append(module)
    assert len(owners) > 500
    assert not {name: where for name, where in owners.items() if len(where) > 1 and name not in CONVENTIONAL}
