#!/usr/bin/env bash
# Try the files of a release: check_install.sh PYTHON FOLDER
#
# pip chooses a wheel of FOLDER for this platform and installs it with its dependencies into an empty
# environment, where the C++ loops must be used and a trained model must sample. Then the sdist is unpacked and some of its tests run.
set -euo pipefail
python=$1
folder=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
version=$(basename "$folder"/aft_mm-*.tar.gz .tar.gz)
cd "$work"
pip install --quiet --find-links "$folder" --only-binary aft_mm --no-cache-dir "aft_mm==${version#aft_mm-}" aft_mm_minis
aft_mm doctor
aft_mm sample mnist --num 1 --out digit.png
python -m aft_mm.ops | grep -E '^aft_conv +cpu +no +used'

tar -xzf "$folder/$version.tar.gz"
cd "$version"
pip install --quiet pytest huggingface-hub
python setup.py -q build_ext --inplace
python -m pytest -q tests/test_ops/test_native.py tests/test_layers/test_mixers.py \
    tests/test_checkpoint.py tests/test_convert/test_published_weights.py
