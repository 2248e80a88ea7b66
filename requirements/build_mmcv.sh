#!/usr/bin/env bash
# Compiles mmcv with its operators against the torch of an environment; the wheel is kept.
#   requirements/build_mmcv.sh PYTHON CACHE      the last line printed is the path of the wheel
# No wheels of mmcv 2.1 exist for today's torch. CUDA operators are built where a GPU and nvcc are there.
set -euo pipefail
# Absolute, because the build runs in another folder; not resolved, because a link marks a venv.
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
    # Its setup.py asks torch alone whether to build for CUDA, and fails without a compiler.
    [ "$device" != cpu ] || export CUDA_VISIBLE_DEVICES=
    building=$folder.building.$$
    trap 'rm -rf "$building"' EXIT
    mkdir -p "$building"
    # pip's own cache would give a wheel that was built for another torch, or without operators.
    # Python's own flags ask for debug symbols, which nobody reads; setuptools takes CFLAGS in their
    # place. Of ninja's lines the number and the file are shown.
    PATH=$bin:$PATH MMCV_WITH_OPS=1 CFLAGS="$flags -g0" MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        "$python" -m pip wheel -v --no-build-isolation --no-deps --no-binary mmcv --no-cache-dir \
        --wheel-dir "$building" --require-hashes -r "$requirements" 2>&1 | tee "$building/log" |
        sed -uEn 's/^ *(\[[0-9]+\/[0-9]+\]) .*[ /]([^ /]+\.(cpp|cu))( .*)?$/\1 \2/p' >&2 ||
        { tail -n 40 "$building/log" >&2; exit 1; }
    # Whole or not at all: a build that was stopped leaves nothing to install.
    mkdir -p "$folder"
    mv "$building"/mmcv-"$version"-*.whl "$folder"
    wheels=("$folder"/mmcv-"$version"-*.whl)
fi
echo "${wheels[0]}"
