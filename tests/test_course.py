"The course as a learner runs it: in Jupyter's kernel, every cell, in an empty folder, without a checkout and without a GPU."

import os
import re
import resource
import shutil
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel
from test_docs import COURSE, NBS, ROOT, cells

#: what other programs say on the standard error stream: of a missing extra of Jupyter, and of a tiny model of transformers
MEANT = re.compile(
    r'TqdmWarning|from \.autonotebook import|\[transformers\] Model config'
)
QUICK = ('14_data.images.ipynb', '15_data.prompts.ipynb', '44_training.precision.ipynb')


def run_all(notebook: Path, folder: Path) -> tuple[str, str]:
    "Run all code cells in a new kernel. The first error with the id of its cell, and what stood in red."
    source = cells(notebook, 'code')
    place = folder / 'nbs'
    place.mkdir()
    for name in {
        name
        for cell in source
        for name in re.findall(r"'(?:\.\./)+(tests/[^']+)'", cell['source'])
    }:  # the first cell fetches it in Colab
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    environment = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'OMP_NUM_THREADS': '1',
        'CUDA_VISIBLE_DEVICES': '',
    }
    manager, client = start_new_kernel(cwd=str(place), env=environment)
    red: list[str] = []

    def note(message):
        if message['content'].get('name') == 'stderr':
            red.append(message['content']['text'])

    try:
        for cell in source:
            reply = client.execute_interactive(
                cell['source'], output_hook=note, timeout=600
            )['content']
            if reply['status'] != 'ok':
                return f"{cell['id']}: {reply['ename']}: {reply['evalue']}", ''.join(
                    red
                )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return '', ''.join(red)


@pytest.mark.parametrize(
    'name',
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in COURSE
    ],
)
def test_every_cell_of_the_course_runs_in_a_kernel(name, tmp_path):
    "Those for a GPU too, which do nothing without one, and the install cell, which does nothing here; nothing unexpected stands in red."
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    error, red = run_all(NBS / name, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f'{name}: {after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.0f} CPU seconds'
    )
    assert not error
    assert not [
        line for line in red.splitlines() if line.strip() and not MEANT.search(line)
    ]


def test_a_notebook_does_not_start_the_script():
    "In a kernel `__name__` is `__main__`; in a program of its own the last cell of a script's notebook runs it."
    for name in ('97_cli.ipynb', '98_train.ipynb'):
        (cell,) = (
            c['source']
            for c in cells(NBS / name, 'code')
            if "__name__=='__main__'" in c['source']
        )
        code = compile(cell, name, 'exec')
        exec(code, dict(__name__='__main__'))
        called: list = []
        with pytest.raises(SystemExit):
            exec(
                code,
                dict(
                    __name__='__main__',
                    __file__=name,
                    sys=__import__('sys'),
                    main=lambda: called.append(1) or 3,
                ),
            )
        assert called == [1]


@pytest.mark.parametrize(
    'name', ['28_model.attention.ipynb', '47_training.shard.ipynb']
)
def test_cells_for_a_gpu_do_nothing_without_one(name):
    flagged = [
        c['source'] for c in cells(NBS / name, 'code') if '#| cuda' in c['source']
    ]
    assert flagged and all(
        source.splitlines()[1] == 'if torch.cuda.is_available():' for source in flagged
    )
    assert all(
        line.startswith((' ', '#'))
        for source in flagged
        for line in source.splitlines()[2:]
    )
