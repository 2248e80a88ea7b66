"""Wheel, metadata, dependencies and lock files."""

import ast
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_string
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import aft_mm
from aft_mm.cli.commands.quickstart import NAME as QUICKSTART
from aft_mm.cli.environment import PYTHON


@pytest.fixture(scope='module')
def wheel(root, tmp_path_factory):
    """Build a wheel outside the checkout; return path, file names and metadata."""
    folder = tmp_path_factory.mktemp('wheel')
    subprocess.run(
        [
            sys.executable,
            'setup.py',
            '-q',
            'egg_info',
            '-e',
            folder,
            'build',
            '-b',
            folder / 'build',
            'bdist_wheel',
            '-d',
            folder,
            '-b',
            folder / 'bdist',
        ],
        cwd=root,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob('*.whl')
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        (name,) = [name for name in names if name.endswith('/METADATA')]
        return path, names, message_from_string(file.read(name).decode())


def files_below(folder, *patterns):
    return {
        path
        for pattern in patterns
        for path in folder.rglob(pattern)
        if path.is_file() and '__pycache__' not in path.parts
    }


def test_the_wheel_has_every_module_and_the_files_for_mim(wheel, root):
    names = {name for name in wheel[1] if '.dist-info/' not in name}
    package = files_below(root / 'aft_mm', '*.py', '*.html', '*.js', '*.cpp', '*.h')
    package |= {root / 'aft_mm/py.typed'}
    carried = files_below(root / 'configs', '*') | files_below(root / 'tools', '*')
    loops = {name for name in names if name.endswith(('.so', '.so.sha256'))}
    found = {Path(name).name.split('.')[1] for name in loops}  # one for each set of instructions
    assert found == {'any', 'avx2', 'avx512'} if platform.machine() == 'x86_64' else {'any'}
    assert {f'{name}.sha256' for name in loops if name.endswith('.so')} <= loops
    assert names - loops == {path.relative_to(root).as_posix() for path in package} | {
        f'aft_mm/.mim/{path.relative_to(root).as_posix()}'
        for path in carried | {root / 'model-index.yml'}
    }


def test_metadata(wheel):
    path, _, metadata = wheel
    # The wheel depends on the processor but not on the Python version.
    system = sysconfig.get_platform().replace('-', '_')
    assert path.name == f'aft_mm-{aft_mm.__version__}-py3-none-{system}.whl'
    assert metadata['Version'] == aft_mm.__version__
    assert SpecifierSet(metadata['Requires-Python']) == PYTHON
    # What is stated for each Python is stated once for all.
    stated = re.findall(r'Python :: (3[.]\d+)', '\n'.join(metadata.get_all('Classifier')))
    assert stated == [f'3.{minor}' for minor in range(20) if PYTHON.contains(f'3.{minor}')]
    extras = {
        'downstream',
        'bench',
        'text',
        'speech',
        'analysis',
        'hub',
        'fid',
        'docs',
        'export',
        'dev',
    }
    assert set(metadata.get_all('Provides-Extra')) == extras


def test_imports_are_declared_as_dependencies(root):
    project = tomllib.loads((root / 'pyproject.toml').read_text())['project']
    lists = project['dependencies'], *project['optional-dependencies'].values()
    declared = {canonicalize_name(Requirement(text).name) for texts in lists for text in texts}
    tools = files_below(root / 'tools', '*.py')
    files = files_below(root / 'aft_mm', '*.py') | tools
    modules = {
        name
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    modules = {name.partition('.')[0] for name in modules} - sys.stdlib_module_names
    modules -= {'aft_mm', *(path.stem for path in tools)}  # tools import each other by file name
    modules -= {'triton'}  # torch brings the one that it was built with, or none
    owners = packages_distributions()
    missing = {
        name
        for name in modules
        if not declared.intersection(map(canonicalize_name, owners.get(name, [name])))
    }
    assert len(modules) > 30 and not missing


@pytest.fixture(scope='module')
def elsewhere(wheel, tmp_path_factory):
    """Return a function that runs commands in a new environment with the wheel.

    It shares the heavy packages of this environment. The checkout is not on its path.
    """
    folder = tmp_path_factory.mktemp('elsewhere')
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder / 'venv'], check=True)
    subprocess.run(
        [
            sys.executable,
            '-m',
            'pip',
            '--python',
            folder / 'venv/bin/python',
            'install',
            '-q',
            '--no-deps',
            '--no-index',
            wheel[0],
        ],
        check=True,
        capture_output=True,
    )
    # After the installation, so that pip sees no other aft_mm. Its .pth files are not read.
    (packages,) = folder.glob('venv/lib/python*/site-packages')
    (packages / 'heavy.pth').write_text(f'{sysconfig.get_path("purelib")}\n')

    def call(command, *words):
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ('PYTHONPATH', 'VIRTUAL_ENV', 'AFT_MM_DATA')
        }
        return subprocess.run(
            [folder / 'venv/bin' / command, *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            env={**environment, 'OMP_NUM_THREADS': '1'},
        )

    return folder, call


@pytest.mark.slow
def test_the_quickstart_from_a_wheel(elsewhere, root):
    """Trains, tests and plots without a checkout, with the files of aft_mm/.mim."""
    folder, call = elsewhere
    done = call(
        'aft_mm',
        'quickstart',
        '--work-dir',
        'out',
        '--cfg-options',
        'train_cfg.max_epochs=1',
        'param_scheduler=None',
        'train_dataloader.dataset.indices=128',
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r'^accuracy: +\d+[.]\d\d % of the held-out fifth$', done.stdout, re.M)
    assert re.search(r'^next: +source venv/bin/activate', done.stdout, re.M)
    assert {path.name for path in (folder / 'out').iterdir()} >= {
        'epoch_1.pth',
        'metrics.json',
        'position_bias.png',
    }
    assert str(root) not in done.stdout + done.stderr  # nothing was loaded from the checkout


def test_the_native_loops_of_a_wheel_are_used(elsewhere):
    _, call = elsewhere
    table = call('python', '-m', 'aft_mm.ops').stdout
    assert re.search(r'^aft_conv +cpu +no +used', table, re.M), table


def test_the_configs_of_a_wheel_are_listed(elsewhere, root):
    _, call = elsewhere
    done = call('aft_mm', 'list', 'quickstart', '--measured')
    assert 'Top 1 Accuracy 98.1' in done.stdout and done.returncode == 0, done.stderr
    configs = {path.stem for path in (root / 'configs').rglob('*.py') if '_base_' not in path.parts}
    assert set(call('aft_mm', 'list', '--names').stdout.split()) == configs
    closest = call('aft_mm', 'train', QUICKSTART.replace('digits', 'digit'))
    assert closest.stderr == (
        f"Error: config '{QUICKSTART[:-1]}' does not exist; did you mean {QUICKSTART}?\n"
    )


@pytest.fixture(scope='module')
def licenses(root):
    spec = importlib.util.spec_from_file_location('licenses', root / 'requirements/licenses.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pin_has_hashes_and_make_requires_them(root):
    for name in ('lock', 'dev', 'downstream', 'mmcv', 'docs'):
        pins = re.split(r'\n(?=\S)', (root / f'requirements/{name}.txt').read_text())
        assert pins and all(re.search('--hash=sha256:[0-9a-f]{64}', pin) for pin in pins)
    commands = (root / 'Makefile').read_text() + (root / 'requirements/build_mmcv.sh').read_text()
    installs = re.findall('(.*)-r (?:requirements/|"[$]req)', commands)
    assert len(installs) == 5
    assert all('$(PIN) ' in line or '--require-hashes ' in line for line in installs)
    (pin,) = re.findall('^PIN := (.*)', commands, re.M)
    assert '--no-deps --require-hashes' in pin


@pytest.mark.parametrize(
    'names', [['lock'], ['lock', 'dev'], ['lock', 'downstream'], ['lock', 'docs']], ids='+'.join
)
def test_a_lock_is_complete(root, licenses, names):
    """pip installs without resolving dependencies, so the lock must list all of them."""
    pinned = [
        pin
        for name in names
        for pin in licenses.pins(root / f'requirements/{name}.txt')
        if pin.marker is None or pin.marker.evaluate()
    ]
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pinned}
    looked = 0
    for pin in pinned:
        try:
            package = distribution(pin.name)
        except PackageNotFoundError:  # mmdet and mmseg come with `make downstream` only
            continue
        if package.version not in pin.specifier:
            continue
        looked += 1
        for requirement in map(Requirement, package.requires or ()):
            extras = pin.extras or {''}
            if requirement.marker is None or any(
                requirement.marker.evaluate({'extra': extra}) for extra in extras
            ):
                found = versions.get(canonicalize_name(requirement.name))
                assert found and requirement.specifier.contains(found, prereleases=True), (
                    f'{pin.name} needs {requirement}, and the locks have {found}'
                )
    assert looked > 60


def test_licenses_of_all_dependencies(root, licenses, capsys):
    licenses.main([root / 'requirements/lock.txt', root / 'requirements/dev.txt'])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert len(lines) > 90 and 'BSD' in lines['torch'] and 'Apache' in lines['mmengine']
    unstated = {name for name, line in lines.items() if 'not stated' in line}
    assert unstated <= {'cuda-toolkit'}  # a package without content, only dependencies


def test_the_lock_is_within_the_ranges(wheel, root, licenses):
    lock = {}
    for name in ('lock', 'dev'):
        for requirement in licenses.pins(root / f'requirements/{name}.txt'):
            lock.setdefault(requirement.name, []).append(requirement)
    for text in wheel[2].get_all('Requires-Dist'):
        requirement = Requirement(text)
        extras = ('', 'dev', 'analysis', 'export', 'text', 'speech')
        if (
            requirement.name == 'aft_mm'
            or requirement.marker
            and not any(requirement.marker.evaluate({'extra': extra}) for extra in extras)
        ):
            continue
        for pinned in lock[requirement.name]:
            (specifier,) = pinned.specifier
            assert requirement.specifier.contains(specifier.version), (text, str(pinned))


def test_downstream_is_within_the_ranges(wheel, root, licenses):
    pinned = {
        pin.name: pin.specifier for pin in licenses.pins(root / 'requirements/downstream.txt')
    }
    extra = [Requirement(text) for text in wheel[2].get_all('Requires-Dist')]
    extra = [
        requirement
        for requirement in extra
        if requirement.marker and requirement.marker.evaluate({'extra': 'downstream'})
    ]
    assert {'mmdet', 'mmsegmentation'} <= {requirement.name for requirement in extra}
    for requirement in extra:
        (specifier,) = pinned[requirement.name]
        assert requirement.specifier.contains(specifier.version), str(requirement)


def test_torch_and_torchvision_are_pinned_as_a_pair(root, licenses):
    pins = set(map(str, licenses.pins(root / 'requirements/lock.txt')))
    assert {'torch==2.11.0', 'torchvision==0.26.0'} <= pins
