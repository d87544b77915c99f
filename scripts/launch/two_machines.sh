#!/usr/bin/env bash
# Two machines, or more. Start the same line on each; they wait for each other at HOST:PORT:
#     HOST=node-a PROCESSES=8 bash scripts/launch/two_machines.sh --tp 8 --out /shared/runs/two
# The code, the data and --out must be at the same paths on both, --out on a shared file system.
set -euo pipefail
cd "$(dirname "$0")/../.."

# change: name or address of one of the machines, which all others can reach
HOST=${HOST:?set it to the name of one of the machines}
# change: a port that is free on HOST and open between the machines
PORT=${PORT:-29400}
# change, for more than two
MACHINES=${MACHINES:-2}
# change: GPUs of each machine
PROCESSES=${PROCESSES:-8}
# change: another word for each job that shares HOST and PORT
JOB=${JOB:-minitrain}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun --nnodes "$MACHINES" --nproc_per_node "$PROCESSES" \
    --rdzv_backend c10d --rdzv_endpoint "$HOST:$PORT" --rdzv_id "$JOB" \
    scripts/train.py "$@"
