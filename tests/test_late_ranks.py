"A rank on a slow file system reads the run's directory after another has changed it: all ranks must still go the same way."
import json
import sys
from pathlib import Path

from commands import TINY, run

HERE = Path(__file__).resolve().parent
RUN = [*TINY, '--run_name', 'r', '--eval_in_epochs', 'False', '--ask_samples', 0, '--max_val_batches', 1, '--data_cutoff_idx', 60, '--num_of_sequences', 3, '--dtype', 'float32']


def ranks(cwd, late, *flags):
    "Two ranks of which one is late; were they to wait for each other, the time would run out."
    launch = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2]
    run([sys.executable, *launch, HERE/'late.py', late, .2, 'nanovlm_nb.train', *RUN, *flags], cwd, timeout=240)
    return [json.loads(line) for line in (cwd/'checkpoints'/'r'/'log.jsonl').read_text().splitlines()]


def test_a_resume_with_a_slow_rank(tmp_path):
    "The validation after the last checkpoint is cut from the log by rank 0, and made again, while rank 1 still reads."
    first = ranks(tmp_path, 0, '--max_training_steps', 2)
    again = ranks(tmp_path, 1, '--max_training_steps', 3, '--resume', 'True')
    losses = [(r['step'], r['val_loss']) for r in again if 'val_loss' in r]
    assert losses[0] == next((r['step'], r['val_loss']) for r in first if 'val_loss' in r)
    assert [step for step, _ in losses] == [2, 3]
