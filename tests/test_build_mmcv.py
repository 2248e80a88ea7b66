"""The cache of requirements/build_mmcv.sh, with a fake Python that compiles nothing."""

import os
import subprocess

import pytest

# Fake Python: prints the version of torch, and writes a wheel instead of running pip.
STAND_IN = """#!/usr/bin/env bash
if [ "$1" = - ]; then
    cat >/dev/null
    [ -n "$TORCH" ] || exit 3
    echo "py3.11-torch$TORCH-cpu cpu -g -O3"
    exit
fi
echo "  [1/2] c++ -MMD -c /a/b/nms.cpp -o b/nms.o -g0"
echo "$CFLAGS,$MMCV_WITH_OPS,${CUDA_VISIBLE_DEVICES-unset},${PATH%%:*} $*" >>"$CALLS"
while [ "$1" != --wheel-dir ]; do shift; done
mkdir -p "$2"
[ -z "$STOP" ] || echo 'error: no such header'
echo part >"$2/mmcv-2.1.0-cp311.whl.part"
[ -z "$STOP" ] || kill -"$STOP" $PPID
[ -z "$STOP" ] || exit 1
mv "$2/mmcv-2.1.0-cp311.whl.part" "$2/mmcv-2.1.0-cp311.whl"
"""


@pytest.fixture
def build(root, tmp_path):
    (tmp_path / 'venv/bin').mkdir(parents=True)
    (tmp_path / 'venv/bin/python').write_text(STAND_IN)
    (tmp_path / 'venv/bin/python').chmod(0o755)

    def call(torch='2.11.0', stop=''):
        result = subprocess.run(
            [root / 'requirements/build_mmcv.sh', 'venv/bin/python', 'some cache'],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, 'TORCH': torch, 'STOP': stop, 'CALLS': str(tmp_path / 'calls')},
        )
        calls = tmp_path / 'calls'
        call.log = result.stderr
        return (
            result.returncode,
            result.stdout.strip(),
            calls.read_text().splitlines() if calls.exists() else [],
        )

    return call


def files(tmp_path):
    return [
        str(path.relative_to(tmp_path))
        for path in (tmp_path / 'some cache').rglob('*')
        if path.is_file()
    ]


def test_a_wheel_is_built_once(build, tmp_path):
    wheel = 'some cache/mmcv-2.1.0-py3.11-torch2.11.0-cpu/mmcv-2.1.0-cp311.whl'
    code, printed, calls = build()
    assert (code, printed, files(tmp_path)) == (0, wheel, [wheel])
    (call,) = calls
    # Optimised, without debug symbols, with operators, for no GPU, with the ninja of the
    # environment, and not from pip's cache.
    assert call.startswith(f'-g -O3 -g0,1,,{tmp_path}/venv/bin -m pip wheel ')
    assert build.log.splitlines()[-1] == '[1/2] nms.cpp'
    assert '--no-cache-dir' in call and '--no-build-isolation' in call
    assert build() == (0, wheel, calls)


def test_another_torch_has_another_wheel(build, tmp_path):
    first, second = build()[1], build(torch='2.12.0')[1]
    assert first != second and set(files(tmp_path)) == {first, second}


@pytest.mark.parametrize('signal', ['INT', 'TERM', 'KILL', '0'])  # pip fails
def test_a_stopped_build_leaves_no_wheel(build, tmp_path, signal):
    code, printed, _ = build(stop=signal)
    assert code != 0 and printed == ''
    assert signal != '0' or 'error: no such header' in build.log
    assert not [path for path in files(tmp_path) if path.endswith('.whl')]
    if signal != 'KILL':
        assert not list((tmp_path / 'some cache').glob('*'))
    code, wheel, calls = build()
    assert code == 0 and (tmp_path / wheel).read_text() == 'part\n' and len(calls) == 2


def test_without_torch_nothing_is_built(build):
    assert build(torch='') == (3, '', [])
