#!/bin/bash
# A process per GPU on four hosts of eight. JAX finds the coordinator, the number of processes and
# each one's index in what SLURM sets. Submit it in a folder that all hosts see: checkpoints go there.
#SBATCH --job-name=autopar
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

# If a process fails, SLURM ends the others: they would wait for it inside a step.
srun --kill-on-bad-exit=1 python "${TRAIN:-examples/clusters/train.py}" \
  --stages 4 --micro-batches 16 --batch 256 --steps 1000 --checkpoints checkpoints "$@"
