#!/usr/bin/env bash
# Usage: bash tools/benchmarks/first_gpu_hour.sh OUT_DIR [--dry-run]
# Measures what matters on a GPU, in parts of three minutes at most; a second call continues.
# PYTHON names the interpreter.
set -euo pipefail

exec "${PYTHON:-python}" "$(dirname "$0")/first_gpu_hour.py" "$@"
