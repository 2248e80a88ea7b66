#!/usr/bin/env bash
# Usage: bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]
# On several machines set NNODES, NODE_RANK, MASTER_ADDR and PORT; without GPUs the processes run on
# the CPU. PYTHON names the interpreter.
set -euo pipefail

if (($# < 3)); then
    sed -n 's/^# Usage: //p' "$0" | sed 's/^/Error: needs its arguments: /' >&2
    exit 2
fi
if ! [[ $3 =~ ^[1-9][0-9]*$ ]]; then
    echo "Error: GPUS must be a number, 1 or larger, got '$3'" >&2
    exit 2
fi

"${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$3" \
    "$(dirname "$0")/test.py" "$1" "$2" --launcher pytorch "${@:4}"
