"A module with one rank for which each look into a directory of runs takes longer; run under torchrun: late.py RANK SECONDS MODULE ARGS."
import os
import runpy
import sys
import time
from pathlib import Path

rank, seconds, module = sys.argv[1], float(sys.argv[2]), sys.argv[3]


def late(look):
    "The same, after a while."
    def call(path, *args, **kw):
        if 'checkpoints' in path.parts: time.sleep(seconds)
        return look(path, *args, **kw)
    return call


if os.environ['RANK'] == rank:
    for name in ('is_file', 'is_dir', 'exists', 'read_bytes', 'read_text', 'iterdir'): setattr(Path, name, late(getattr(Path, name)))
sys.argv = [module, *sys.argv[4:]]
runpy.run_module(module, run_name='__main__')
