#!/usr/bin/env bash
# Usage: bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of test.py]
# GPUS (8; 0 for one task on the CPU), GPUS_PER_NODE (8), CPUS_PER_TASK (5) and SRUN_ARGS configure the
# job. PYTHON is the interpreter.
set -euo pipefail

if (($# < 4)); then
    sed -n 's/^# Usage: //p' "$0" | sed 's/^/Error: needs its arguments: /' >&2
    exit 2
fi

GPUS=${GPUS:-8}
PER_NODE=${GPUS_PER_NODE:-8}
if [[ ! "$GPUS $PER_NODE" =~ ^(0|[1-9][0-9]*)\ [1-9][0-9]*$ ]]; then
    echo "Error: GPUS must be an integer from 0 and GPUS_PER_NODE from 1, got '$GPUS' and '$PER_NODE'" >&2
    exit 2
fi
if ((GPUS < PER_NODE)); then PER_NODE=$GPUS; fi
if ((GPUS > 0)); then
    SHAPE="--gres=gpu:$PER_NODE --ntasks=$GPUS --ntasks-per-node=$PER_NODE"
else
    SHAPE='--ntasks=1'
fi
# SHAPE and SRUN_ARGS contain several words each.
# shellcheck disable=SC2086
srun --partition="$1" --job-name="$2" $SHAPE --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$(dirname "$0")/test.py" "$3" "$4" --launcher slurm "${@:5}"
