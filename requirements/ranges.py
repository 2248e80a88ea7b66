"""Try the newest or the oldest release of every range of pyproject.toml.

python requirements/ranges.py newest
python requirements/ranges.py oldest --python python3.12

One fresh environment gets aft_mm with all EXTRAS, and trains every task by TESTS. It is removed
afterwards. The exit status is that of pip or of the tests.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
#: `demo` needs an older Pillow than the others.
EXTRAS = 'downstream', 'text', 'speech', 'timm', 'transformers', 'export', 'hub'
EXTRAS += ('clouds', 'quality')
TESTS = (
    'test_own_data.py::test_a_folder_without_parts_is_split_trained_on_and_tuned_further',
    'test_own_data.py::test_a_text_file',
    'downstream/test_own_data.py::test_the_new_config_trains',
    'test_drawing_runs.py',
    'test_speech_run.py',
    'test_translation_run.py',
    'test_integration.py::test_resume_after_a_kill_is_bit_identical',
    'test_transformers.py',
    'test_transformers_interface.py',
    'test_timm.py',
    'test_hosts',
    'test_export/test_graphs.py',
)


def oldest(project: dict) -> Iterator[str]:
    """Yield pins of the lower bounds of all requirements of a table [project]."""
    groups = [project['dependencies'], *map(project['optional-dependencies'].get, EXTRAS)]
    for text in [text for group in groups for text in group]:
        requirement = Requirement(text)
        for bound in requirement.specifier:
            if bound.operator == '>=' and requirement.name != 'setuptools':
                yield f'{requirement.name}=={bound.version}'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('end', choices=('newest', 'oldest'))
    parser.add_argument('--python', default=sys.executable, metavar='FILE')
    args = parser.parse_args()
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    with tempfile.TemporaryDirectory(prefix='ranges-') as name:
        folder = Path(name)
        subprocess.run([args.python, '-m', 'venv', folder], check=True)
        python = folder / 'bin/python'
        pins = folder / 'pins.txt'
        pins.write_text('\n'.join(oldest(project) if args.end == 'oldest' else ()) + '\n')
        pip = [python, '-m', 'pip', '--disable-pip-version-check']
        install = [*pip, 'install', '-q', '-c', pins]
        packages = ['setuptools>=77', 'wheel', 'pytest', 'pytest-xdist']
        subprocess.run([*install, *packages], check=True, cwd=ROOT)
        own = ['--no-build-isolation', '-e', f'.[{",".join(EXTRAS)}]']
        subprocess.run([*install, *own], check=True, cwd=ROOT)
        subprocess.run([*pip, 'list'], check=True, cwd=ROOT)
        subprocess.run([python, '-m', 'aft_mm', 'doctor'], check=True, cwd=ROOT)
        tests = [f'tests/{test}' for test in TESTS]
        path = f'{python.parent}{os.pathsep}{os.environ["PATH"]}'
        return subprocess.run(
            [python, '-m', 'pytest', '-p', 'no:cacheprovider', *tests],
            cwd=ROOT,
            env={**os.environ, 'OMP_NUM_THREADS': '1', 'PATH': path},
        ).returncode


if __name__ == '__main__':
    sys.exit(main())
