"""Test the package on other versions of torch and Python, and on the fork of OpenMMLab's packages.

python requirements/stacks.py --torch 2.11.0 2.15.0          # one fresh environment for each
python requirements/stacks.py --torch 2.11.0 --python python3.13 --family onedl
python requirements/stacks.py                                # only writes the table

Each environment gets torch, the torchvision that pip resolves for it and the other
packages of the locks, runs CHECKS, and is removed. Counts and failures are added to docs/results/stacks.json,
from which the table of docs/supported_stacks.md is written.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'docs/results/stacks.json'
PAGE = ROOT / 'docs/supported_stacks.md'
REGION = re.compile(r'(<!-- stacks -->\n).*?(<!-- end of stacks -->)', re.S)
#: Tests by the column of the table: files and functions below tests/.
CHECKS: dict[str, tuple[str, ...]] = {
    'ops': ('test_ops/test_invariants.py', 'test_ops/test_steps.py'),
    'layers, models': ('test_layers/test_mixers.py', 'test_models/test_aft_vit.py'),
    'compile': (
        'test_ops/test_compiled_training.py',
        'test_adversarial/test_compile_and_decide.py',
    ),
    'Triton': ('test_ops/test_triton_simple_compile.py',),
    'export': ('test_export/test_graphs.py',),
    'train, resume': (
        'test_adversarial/test_exact_resume.py::test_a_run_that_stops_resumes_to_the_same_bits',
        'test_integration.py::test_resume_after_a_kill_is_bit_identical',
    ),
    'mmcv operators': ('test_hosts/test_mmcv_ext.py',),
}
#: Packages that come with torch, and those of the lock that the fork replaces.
WITH_TORCH = re.compile('torch|torchvision|triton|nvidia-.*|cuda-.*')
OPENMMLAB = re.compile('mmengine|mmcv-lite|mmpretrain|mmdet|mmsegmentation')
# Without onedl-mmdetection, which imports imgaug, which fails with numpy 2, and without
# onedl-mmsegmentation: onedl-mmengine looks for the configs mmseg:: in a package mmsegmentation.
ONEDL = 'onedl-mmengine', 'onedl-mmcv', 'onedl-mmpretrain'
STATED = 'torch', 'torchvision', 'triton', 'numpy', 'mmengine', 'mmcv', 'mmcv-lite'
STATED += ('mmpretrain', 'mmdet', 'mmsegmentation', *ONEDL)


def pins(family: str) -> Iterator[str]:
    """Yield the pins of the locks, with hashes, that do not depend on the torch of a stack."""
    for name in ('lock', 'dev', 'downstream'):
        text = (ROOT / f'requirements/{name}.txt').read_text()
        for pin in re.split(r'\n(?=\S)', text.strip()):
            name = pin.partition('==')[0]
            if not (WITH_TORCH.fullmatch(name) or family == 'onedl' and OPENMMLAB.fullmatch(name)):
                yield pin


def install(python: str, torch: str, family: str, folder: Path) -> Path:
    """Make an environment in a folder and return its Python."""
    subprocess.run([python, '-m', 'venv', folder], check=True)
    inside = folder / 'bin/python'
    pip = [inside, '-m', 'pip', '--disable-pip-version-check', 'install', '-q', '--no-compile']

    def run(*words, **env):
        subprocess.run([*pip, *words], check=True, cwd=ROOT, env={**os.environ, **env})

    run(f'torch=={torch}', 'torchvision')
    (folder / 'pins.txt').write_text('\n'.join(dict.fromkeys(pins(family))) + '\n')
    run('--no-deps', '--require-hashes', '-r', folder / 'pins.txt')
    if family == 'onedl':
        # Source distributions; without operators mmcv is built in seconds.
        run('--no-deps', '--no-build-isolation', *ONEDL, MMCV_WITH_OPS='0')
    run('--no-deps', '--no-build-isolation', '-e', '.')
    return inside


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the packages in STATED that an environment has."""
    script = (
        'import importlib.metadata as m, json; '
        'print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))'
    )
    found = json.loads(subprocess.check_output([python, '-c', script], cwd=ROOT.parent))
    return {name: found[name] for name in STATED if name in found}


def column(case: ElementTree.Element) -> str:
    """Return the label in CHECKS of a test case of a report."""
    # A file that cannot be imported is a case without a class.
    module = f'{case.get("classname")}.{case.get("name")}.'
    for label, tests in CHECKS.items():
        for test in tests:
            file = test.partition('.py')[0].replace('/', '.')
            if f'.{file}.' in module:
                return label
    raise ValueError(f'{module} is in none of CHECKS')


def check(python: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Run CHECKS; return, for each, how many tests passed and the names of those that did not."""
    report = folder / 'report.xml'
    tests = [f'tests/{test}' for group in CHECKS.values() for test in group]
    subprocess.run(
        [python, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', f'--junitxml={report}', *tests]
        + ['--continue-on-collection-errors', '--basetemp', folder / 'tests'],
        cwd=ROOT,
        env={
            **os.environ,
            'OMP_NUM_THREADS': '1',
            'PATH': f'{python.parent}:{os.environ["PATH"]}',
        },
    )
    counts = {label: dict(passed=0, skipped=0, failed=[]) for label in CHECKS}
    for case in ElementTree.parse(report).iter('testcase'):
        count = counts[column(case)]
        (problem,) = [*case] or [None]
        if problem is None:
            count['passed'] += 1
        elif problem.tag == 'skipped':
            count['skipped'] += 1
        else:
            message = ' '.join((problem.get('message') or '').split())
            count['failed'].append(f'{case.get("name")}: {message[:200]}')
    return counts


def run(python: str, torch: str, family: str) -> dict[str, Any]:
    """Install a stack, run the checks on it and return the row of the results."""
    with tempfile.TemporaryDirectory(prefix='stack-') as name:
        inside = install(python, torch, family, Path(name))
        return row_of(inside, family, Path(name))


def row_of(python: Path, family: str, folder: Path) -> dict[str, Any]:
    """Run the checks on an environment and return the row of the results."""
    script = 'import platform; print(platform.python_version())'
    version = subprocess.check_output([python, '-c', script], text=True).strip()
    packages, checks = versions(python), check(python, folder)
    return dict(family=family, python=version, packages=packages, checks=checks)


def key(row: dict[str, Any]) -> tuple[bool, Version, Version]:
    """Order of the rows: OpenMMLab's packages first, then by Python and torch."""
    python = Version(row['python'])
    return row['family'] == 'onedl', Version(f'3.{python.minor}'), Version(row['packages']['torch'])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table of the results."""
    lines = [['torch', 'Triton', 'Python', 'OpenMMLab', 'passed', 'failed']]
    lines.append(['---'] * 4 + ['---:', '---'])
    for row in rows:
        packages, checks = row['packages'], row['checks']
        family = dict(openmmlab='official', onedl='OneDL')[row['family']]
        failed = [
            f'{len(checks[label]["failed"])} of {label}'
            for label in CHECKS
            if checks[label]['failed']
        ]
        passed = sum(checks[label]['passed'] for label in CHECKS)
        lines.append([packages['torch'], packages.get('triton', '–'), row['python'], family])
        lines[-1] += [f'{passed:,}', '; '.join(failed) or '–']
    return ''.join(f'| {" | ".join(cells)} |\n' for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--torch', nargs='*', default=[], metavar='VERSION')
    parser.add_argument('--python', default=sys.executable, metavar='FILE')
    parser.add_argument('--family', choices=('openmmlab', 'onedl'), default='openmmlab')
    args = parser.parse_args()
    for torch in args.torch:
        new = run(args.python, torch, args.family)
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        rows = sorted([*(row for row in rows if key(row) != key(new)), new], key=key)
        RESULTS.write_text(json.dumps(rows, indent=1) + '\n')
    content = REGION.sub(rf'\g<1>{table(json.loads(RESULTS.read_text()))}\g<2>', PAGE.read_text())
    PAGE.write_text(content)


if __name__ == '__main__':
    main()
