#!/usr/bin/env bash
# Usage: bash tools/dist_train.sh CONFIG GPUS [arguments of train.py]
# On several machines set NNODES, NODE_RANK, MASTER_ADDR and PORT; without GPUs the processes run on
# the CPU. PYTHON names the interpreter.
set -euo pipefail

if (($# < 2)); then
    sed -n 's/^# Usage: //p' "$0" | sed 's/^/Error: needs its arguments: /' >&2
    exit 2
fi
if ! [[ $2 =~ ^[1-9][0-9]*$ ]]; then
    echo "Error: GPUS must be a number, 1 or larger, got '$2'" >&2
    exit 2
fi

"${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$2" \
    "$(dirname "$0")/train.py" "$1" --launcher pytorch "${@:3}"
