#!/usr/bin/env bash
# Build the files of a release: build.sh PYTHON OUT
#
# OUT gets the sdist, and three wheels that are built from it: one with the C++ loops, whose tag auditwheel
# finds, one without them for every platform, and aft_mm_minis, the trained models. An SBOM has the pins of
# requirements/lock.txt. Tools come from requirements/release.txt.
set -euo pipefail
python=$1
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
if [ -n "$(ls -A "$out")" ]; then
    echo "OUT must be a new or empty folder, got $out" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'tail -40 "$work/log" >&2' ERR
"$python" -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
pip install --quiet --no-deps --require-hashes -r requirements/release.txt
build() { python -m build --no-isolation --wheel --outdir "$@" >> "$work/log" 2>&1; }

python setup.py -q egg_info --egg-base "$work" sdist --dist-dir "$out" >> "$work/log" 2>&1
tar -xzf "$out"/aft_mm-*.tar.gz -C "$work"
cd "$work"/aft_mm-*/
build "$work/linux" .
auditwheel repair --wheel-dir "$out" "$work"/linux/*.whl >> "$work/log" 2>&1
rm -rf build
CC=false CXX=false build "$out" .
grep 'without the C++ loops' "$work/log"
build "$out" minis

twine check --strict "$out"/*
name=$(basename "$out"/aft_mm-*.tar.gz .tar.gz)
sed "s/^dynamic = .*/version = '${name#aft_mm-}'/" pyproject.toml > "$work/pyproject.toml"
cyclonedx-py requirements --pyproject "$work/pyproject.toml" --mc-type library --output-reproducible \
    --output-file "$out/$name.cdx.json" requirements/lock.txt 2>> "$work/log"
python packaging/check_files.py "$out"
