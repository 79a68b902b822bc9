#!/bin/bash
# sbatch docker/examples/slurm.sh: one torchrun a node, rank 0 reports to the server.
#SBATCH --job-name=noisescale-example
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
set -euo pipefail

export NOISESCALE_REPORT_TO=http://noisescale.example.com:8000
# A requeued job is the same run: its new attempt takes up the same page.
export NOISESCALE_RUN="example-${SLURM_JOB_ID}"
export NOISESCALE_TOKEN_FILE="${HOME}/.config/noisescale/write_token"

first_node=$(scontrol show hostnames "${SLURM_JOB_NODELIST}" | head -n 1)
srun torchrun \
    --nnodes="${SLURM_NNODES}" \
    --nproc-per-node=8 \
    --rdzv-id="${SLURM_JOB_ID}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${first_node}:29500" \
    train.py
