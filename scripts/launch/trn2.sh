#!/usr/bin/env bash
# Trainium 2 and later: TorchNeuron, torch-neuronx 2.13 or later (--device neuron). Written, never
# run:
#     bash scripts/launch/trn2.sh --tp 4 --seq-len 4096 --out runs/trn2
# On several machines set HOST, MACHINES and start the same line on each.
set -euo pipefail
cd "$(dirname "$0")/../.."

# change: logical cores: 64 on trn2.48xlarge, 4 on trn2.3xlarge
PROCESSES=${PROCESSES:-64}
# change, for more than one machine: their number, and the name of one of them
MACHINES=${MACHINES:-1}
HOST=${HOST:-localhost}
# change: where compiled programs are kept for the next start; s3:// works
export NEURON_COMPILE_CACHE_URL=${NEURON_COMPILE_CACHE_URL:-$HOME/neuron-cache}
# keep in containers, where collectives hang without
export TORCH_NEURONX_ENABLE_HOST_CC=1 TORCH_NEURONX_ENABLE_ASYNC_NRT=1
# keep: an operation that fails is an error, instead of running on the CPU unsaid
export TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS=1
# keep, for more than one machine: the network between them
export FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1

exec torchrun --nnodes "$MACHINES" --nproc_per_node "$PROCESSES" \
    --rdzv_backend c10d --rdzv_endpoint "$HOST:29400" --rdzv_id minitrain \
    scripts/train.py --device neuron "$@"
