#!/usr/bin/env bash
# Usage: bash tools/benchmarks/first_gpu_hour.sh OUT_DIR [--dry-run]
# Everything that is to be measured on a GPU, in parts of ten minutes at most; a second call goes on
# where the first one was stopped. PYTHON names the interpreter.
set -euo pipefail

exec "${PYTHON:-python}" "$(dirname "$0")/first_gpu_hour.py" "$@"
