#!/usr/bin/env bash
# Usage: bash tools/benchmarks/first_gpu_hour.sh OUT_DIR [--dry-run]
# Run all measurements on a GPU in parts of at most three minutes; a second call continues.
# PYTHON is the interpreter.
set -euo pipefail

exec "${PYTHON:-python}" "$(dirname "$0")/first_gpu_hour.py" "$@"
