"""A stand-in for the evaluator, without a model: OUT TASKS GO. It writes one figure a task, and none before the file GO is there.

`python stand_in_evaluator.py train FLAGS` is `nanovlm train` whose evaluations are made by it; GO is `go` in the working directory."""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path


def evaluate(out, tasks, go):
    "What nanovlm eval does to its result file; OUT.starts counts how often."
    with open(f'{out}.starts', 'a') as f:
        f.write('.')
    while not go.exists():
        time.sleep(0.02)
    step = int(out.stem[5:])
    done = []
    for task in tasks.split(','):
        time.sleep(0.15)
        done.append(task)
        tmp = out.with_name(f'{out.name}.{os.getpid()}.tmp')
        tmp.write_text(
            json.dumps(
                dict(
                    global_step=step,
                    tasks=done,
                    results={f'{t}_acc': step + len(t) / 100 for t in done},
                )
            )
        )
        tmp.replace(out)


def command(run_dir, cfg, tasks, step):
    return [
        sys.executable,
        __file__,
        str(run_dir / 'eval_results' / f'step_{step}.json'),
        tasks,
        'go',
    ]


def train(argv):
    "nanovlm train with this evaluator, and as if lmms-eval were there."
    import nanovlm_nb.runs.run as run
    from nanovlm_nb.train import main

    run.Evaluations = partial(run.Evaluations, command=command)
    run.possible_tasks = lambda cfg: (cfg.lmms_eval_tasks, None)
    return main(argv)


if __name__ == '__main__':
    if sys.argv[1] == 'train':
        sys.exit(train(sys.argv[2:]))
    evaluate(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
