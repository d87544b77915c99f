#!/usr/bin/env bash
# One machine, one process per device:
#     PROCESSES=8 bash scripts/launch/one_machine.sh --sp 2 --tp 2 --out runs/eight
set -euo pipefail
cd "$(dirname "$0")/../.."

# change: the machine's GPUs; on CPU, the processes to try a layout with
PROCESSES=${PROCESSES:-4}
# change, on CPU only: cores / PROCESSES
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun --standalone --nproc_per_node "$PROCESSES" scripts/train.py "$@"
