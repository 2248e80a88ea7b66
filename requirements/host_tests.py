"""Run the tests in the source distributions of host packages on the operators of aft_mm.hosts.

python requirements/host_tests.py
python requirements/host_tests.py mmsegmentation

The versions are the installed ones. The tests of requirements/host_failures.txt, one a line with the
reason, must fail; any other failure is an error.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
#: Arguments of pytest by package. Backbones of mmseg use no operator; other packages ship no tests.
SUITES = {
    'mmsegmentation': ('tests', '--ignore=tests/test_models/test_backbones'),
}


def known_failures() -> dict[str, str]:
    """Return the reason by test, such as ``tests/test_models/test_a.py::test_b``."""
    lines = (FOLDER / 'host_failures.txt').read_text().splitlines()
    return {test: reason for test, _, reason in (line.partition('  ') for line in lines)}


def pytest_configure() -> None:
    import aft_mm.registry  # noqa: F401 - supplies the operators of mmcv


def pytest_collection_modifyitems(items: list) -> None:
    import pytest

    reasons = known_failures()
    for item in items:
        test, _, _ = item.nodeid.partition('[')
        if test in reasons:
            item.add_marker(pytest.mark.xfail(reason=reasons[test], strict=True))


def run(package: str) -> int:
    """Return the exit status of the tests of a package."""
    with tempfile.TemporaryDirectory(prefix='host-') as name:
        folder, pip = Path(name), [sys.executable, '-m', 'pip', '--disable-pip-version-check']
        options = ['--no-deps', '--no-build-isolation', '--no-binary', package, '-d', folder]
        pinned = f'{package}=={version(package)}'
        subprocess.run([*pip, 'download', '-q', *options, pinned], check=True)
        (archive,) = folder.glob('*.tar.gz')
        with tarfile.open(archive) as file:
            file.extractall(folder, filter='data')
        root = next(path for path in folder.iterdir() if path.is_dir())
        (root / 'configs').symlink_to('mmseg/.mim/configs')  # its tests look for them here
        plugin = ['-p', 'host_tests', '-p', 'no:cacheprovider', f'--rootdir={root}']
        path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get('PYTHONPATH')])])
        return subprocess.run(
            [sys.executable, '-m', 'pytest', '-q', '-rfEX', *plugin, *SUITES[package]],
            cwd=root,
            env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': path},
        ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('packages', nargs='*', metavar='PACKAGE', help=f'of {", ".join(SUITES)}')
    args = parser.parse_args()
    if unknown := {*args.packages} - {*SUITES}:
        parser.error(f'PACKAGE must be of {", ".join(SUITES)}, got {", ".join(unknown)}')
    return max(map(run, args.packages or SUITES))


if __name__ == '__main__':
    sys.exit(main())
