#!/bin/bash
# Train a classifier on this machine, on all of its GPUs, or as a job of one node.
#
#   slurm/classify.sh food.yaml                                        # all GPUs, or one process on the CPU
#   RANKS=2 slurm/classify.sh food.yaml --run_name food                # so many processes
#   slurm/classify.sh food.yaml --run_name food --resume_from latest   # begin, or go on
#   sbatch --gpus-per-node 8 --cpus-per-task 64 slurm/classify.sh food.yaml --run_name food --resume_from latest
#
# Slurm gives a job no GPU that it does not ask for, and one core: ask for eight cores a GPU. With a name and --resume_from latest
# the same command serves every start: the first begins with `model.name` of the file, a later one goes on from the last checkpoint.
#
# Guides for Qwen2.5-VL write
#   deepspeed --num_gpus 8 training/complete_train.py --config guide.yaml --deepspeed_config ds_config_zero2.json
# which is here, with the same two files,
#   RANKS=8 slurm/classify.sh guide.yaml --deepspeed_config ds_config_zero2.json --datasets food101
# The guide does not say where its pictures are. --model DIRECTORY takes a copy of Qwen2.5-VL, or another model, in place of the hub's.

#SBATCH --job-name=classify
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out

set -eu
[ $# -ge 1 ] || { echo "usage: $0 FILE.yaml [flags of nanovlm classify]" >&2; exit 2; }
config=$1; shift
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)
ranks=${RANKS:-${SLURM_GPUS_ON_NODE:-$gpus}}
cores=${SLURM_CPUS_ON_NODE:-$(nproc)}
[ "$cores" -ge "$ranks" ] || echo "TOO FEW CORES: $cores for $ranks ranks. Set RANKS, or give sbatch --cpus-per-task $((8 * ranks))" >&2
if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_GPUS_ON_NODE:-}" ] && sinfo -h -o %G 2>/dev/null | grep -q gpu; then
    echo "NO GPU: this job has none, and the cluster has some. Give sbatch --gpus-per-node 8" >&2
fi
[ "$ranks" -gt 1 ] || exec python -m nanovlm_nb.cli classify --config "$config" "$@"
exec python -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m nanovlm_nb.cli classify --config "$config" "$@"
