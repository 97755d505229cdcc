"Every command, module and test that a text names exists: in messages, notebooks and their outputs, documents, scripts and tests."

import ast
import re
from pathlib import Path

import pytest
from test_docs import ROOT, text_of

import nanovlm_nb
from nanovlm_nb.cli import COMMANDS
from nanovlm_nb.core.config import FIELDS

MODULES = {
    '.'.join(p.relative_to(ROOT / 'nanovlm_nb').with_suffix('').parts)
    for p in (ROOT / 'nanovlm_nb').rglob('*.py')
}
PACKAGES = (
    {m.rpartition('.')[0] for m in MODULES}
    | {'tasks', 'figures'}
    | {*nanovlm_nb.__all__}
)  # what the package offers; no code: the folder of lmms-eval's tasks, the style sheet of figures
#: what begins with the project's name and is no command: the package, the script, a preset, a loss and a step of the predictions, a file, a project of wandb, a field of others
OTHERS = {
    'nb',
    'train',
    'native',
    'loss',
    'step',
    'error',
    'classify',
    'config',
    'onnx',
}
#: what follows the name of the convention of prompts in a sentence
WORDS = {'or', 'convention'}


@pytest.fixture(scope='module')
def read() -> dict[str, str]:
    "Path -> text of everything that somebody may read."
    files = [
        p
        for pattern in (
            '*.md',
            'Makefile',
            '.ci/*',
            '.github/workflows/*',
            'slurm/*',
            'tests/*.py',
            'tests/gpu/*.[mp][dy]',
            'nanovlm_nb/**/*.py',
            'nbs/**/*.ipynb',
        )
        for p in ROOT.glob(pattern)
    ]
    kept = [
        p
        for p in files
        if p.is_file()
        and '.ipynb_checkpoints' not in p.parts
        and p.name not in ('_modidx.py', Path(__file__).name)
    ]
    return {
        str(p.relative_to(ROOT)): text_of(p)
        if p.suffix == '.ipynb'
        else p.read_text(encoding='utf-8')
        for p in kept
    }


def unknown(read, pattern: str, known) -> dict[str, set]:
    "What a pattern finds and is not known, by file."
    found = {
        path: {m[1] for m in re.finditer(pattern, text)} - set(known)
        for path, text in read.items()
    }
    return {path: names for path, names in found.items() if names}


def test_every_command_that_is_named_exists(read):
    assert (
        sum(len(re.findall(r'\bnanovlm train\b', text)) for text in read.values()) > 40
    )
    now = read | {
        'CHANGELOG.md': re.sub(
            r'nanovlm (generate|predict|chat|look|checkpoints|plot|xray|doctor|inspect|resume|invariance)\b',
            '',
            read['CHANGELOG.md'],
        )
    }  # there, a command may be one of its time
    assert not unknown(now, r'(?<![\w./-])nanovlm ([a-z]\w*)', [*COMMANDS, *WORDS])
    assert not unknown(read, r'(?<![\w./-])nanovlm_([a-z]\w*)', OTHERS), (
        'a script that is no more'
    )


def test_every_module_that_is_named_exists(read):
    "Also the one that is started as a program: only two of them do something then."
    assert not {
        path: names
        for path, names in unknown(
            read, r'\bnanovlm_nb\.([a-z]\w*(?:\.[a-z]\w*)?)', ()
        ).items()
        if any(
            n not in MODULES | PACKAGES and n.split('.')[0] not in MODULES
            for n in names
        )
    }
    started = {
        m[1]
        for text in read.values()
        for m in re.finditer(r"-m['\"]?,? ?['\"]?nanovlm_nb\.(\w+(?:\.\w+)*)", text)
    }
    assert started == {'cli', 'train'}
    assert not unknown(
        read,
        r"-m['\"]?,? ?['\"]?nanovlm_nb\.cli['\"]?,? ['\"]?(?=[a-z])(\w+)",
        COMMANDS,
    )


def test_every_test_that_is_named_exists(read):
    named = {
        m[0]
        for text in read.values()
        for m in re.finditer(r'\btests/[\w/]+\.py\b', text)
    }
    assert len(named) > 20 and not [
        name for name in sorted(named) if not (ROOT / name).is_file()
    ]


#: what only a command does: its flags are flags
COMMANDS_ALONE = {
    'cli.py',
    'core/config.py',
    'core/usage.py',
    'tools/check.py',
    'tools/doctor.py',
    'tools/plan.py',
    'tools/runs.py',
}


def messages(path: Path) -> list[str]:
    "Texts of a module; of an f-string what is fixed. No docstrings."
    tree = ast.parse(path.read_text(encoding='utf-8'))
    owners = [
        n
        for n in ast.walk(tree)
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and n.body
        and isinstance(n.body[0], ast.Expr)
    ]
    docstrings = {id(n.body[0].value) for n in owners}
    joined = [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    parts = {id(v) for j in joined for v in ast.walk(j) if isinstance(v, ast.Constant)}
    alone = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant)
        and isinstance(n.value, str)
        and id(n) not in docstrings | parts
    ]
    return alone + [
        ''.join(v.value if isinstance(v, ast.Constant) else ' ' for v in j.values)
        for j in joined
    ]


def test_messages_name_settings_as_python_does():
    "Flags are what a command makes of them: in Python there are none. A line for the shell is a command, and begins with it."
    found = {
        f'{path.relative_to(ROOT)}: {text}'
        for path in (ROOT / 'nanovlm_nb').rglob('*.py')
        if str(path.relative_to(ROOT / 'nanovlm_nb')) not in COMMANDS_ALONE
        for text in messages(path)
        if not re.search(r'\b(nanovlm|torchrun) |^--\w+( |$)', text)
        for m in re.finditer(r'--(\w+)', text)
        if m[1] in FIELDS
    }
    assert not found
