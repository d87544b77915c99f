#!/usr/bin/env bash
# Trainium 1: torch 2.9, torch-xla 2.9, torch-neuronx 2.9 (--device xla). Written, never run:
#     bash scripts/launch/trn1.sh --tp 8 --no-pack --seq-len 2048 --out runs/trn1
# On several machines set HOST, MACHINES and start the same line on each.
set -euo pipefail
cd "$(dirname "$0")/../.."

# change: 32 cores on trn1.32xlarge, 2 on trn1.2xlarge
PROCESSES=${PROCESSES:-32}
# change, for more than one machine: their number, and the name of one of them
MACHINES=${MACHINES:-1}
HOST=${HOST:-localhost}
# change: where compiled programs are kept for the next start; s3:// works
export NEURON_COMPILE_CACHE_URL=${NEURON_COMPILE_CACHE_URL:-$HOME/neuron-cache}
# keep: precision is --dtype's alone, so the compiler casts nothing and rounds to nearest
export NEURON_CC_FLAGS="--model-type=transformer --auto-cast=none --enable-saturate-infinity"
export NEURON_RT_STOCHASTIC_ROUNDING_EN=0
export NEURON_FUSE_SOFTMAX=1 MALLOC_ARENA_MAX=64
# keep, for more than one machine: the network between them
export FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1
unset XLA_USE_BF16 XLA_DOWNCAST_BF16  # train.py refuses them

exec torchrun --nnodes "$MACHINES" --nproc_per_node "$PROCESSES" \
    --rdzv_backend c10d --rdzv_endpoint "$HOST:29400" --rdzv_id minitrain \
    scripts/train.py --device xla "$@"
