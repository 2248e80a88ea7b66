#!/usr/bin/env bash
# Compile mmcv with its operators against the torch of an environment, and cache the wheel.
#   requirements/build_mmcv.sh PYTHON CACHE      prints the path of the wheel last
# No wheels of mmcv 2.1 exist for current torch. CUDA operators are built if there are a GPU and nvcc.
set -euo pipefail
# Absolute, since the build runs in another folder; not resolved, since a venv is recognised by its link.
bin=$(cd "$(dirname "$1")" && pwd)
python=$bin/$(basename "$1")
requirements=$(cd "$(dirname "$0")" && pwd)/mmcv.txt
version=$(sed -n 's/^mmcv==\([0-9.]*\).*/\1/p' "$requirements")
about=$("$python" - <<'END'
import os
import platform
import sys
import sysconfig

import torch
from torch.utils.cpp_extension import CUDA_HOME

nvcc = CUDA_HOME is not None and os.path.exists(os.path.join(CUDA_HOME, 'bin/nvcc'))
device = f'cuda{torch.version.cuda}' if nvcc and torch.cuda.is_available() else 'cpu'
about = f'py{sys.version_info[0]}.{sys.version_info[1]}', f'torch{torch.__version__}', device
print('-'.join((*about, platform.system(), platform.machine())), device,
      sysconfig.get_config_var('CFLAGS') or '')
END
)
read -r key device flags <<<"$about"
folder=$2/mmcv-$version-$key
wheels=("$folder"/mmcv-"$version"-*.whl)
if [ ! -e "${wheels[0]}" ]; then
    echo "compiling mmcv $version ($device); it took 11 minutes on two cores" >&2
    # Its setup.py builds for CUDA if torch has it, and fails without a compiler.
    [ "$device" != cpu ] || export CUDA_VISIBLE_DEVICES=
    building=$folder.building.$$
    trap 'rm -rf "$building"' EXIT
    mkdir -p "$building"
    # The cache of pip may have a wheel that was built for another torch, or without operators.
    # CFLAGS replace Python's flags, which include debug symbols. Of the output of ninja, only number
    # and file are shown.
    PATH=$bin:$PATH MMCV_WITH_OPS=1 CFLAGS="$flags -g0" MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        "$python" -m pip wheel -v --no-build-isolation --no-deps --no-binary mmcv --no-cache-dir \
        --wheel-dir "$building" --require-hashes -r "$requirements" 2>&1 | tee "$building/log" |
        sed -uEn 's/^ *(\[[0-9]+\/[0-9]+\]) .*[ /]([^ /]+\.(cpp|cu))( .*)?$/\1 \2/p' >&2 ||
        { tail -n 40 "$building/log" >&2; exit 1; }
    # Atomic, so that an interrupted build leaves no wheel.
    mkdir -p "$folder"
    mv "$building"/mmcv-"$version"-*.whl "$folder"
    wheels=("$folder"/mmcv-"$version"-*.whl)
fi
echo "${wheels[0]}"
