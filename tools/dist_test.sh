#!/usr/bin/env bash
# Usage: bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]
# For several machines set NNODES, NODE_RANK, MASTER_ADDR and PORT. Without GPUs the processes run on
# the CPU. PYTHON is the interpreter.
set -euo pipefail

if (($# < 3)) && [[ ${1:-} != -h && ${1:-} != --help ]]; then
    sed -n 's/^# Usage: /Error: needs its arguments: /p' "$0" >&2
    exit 2
fi

exec "${PYTHON:-python}" "$(dirname "$0")/launch.py" test "$@"
