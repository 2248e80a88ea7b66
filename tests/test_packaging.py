"""Wheel, metadata, dependencies and lock files."""

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_string
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import aft_mm
from aft_mm.cli.commands.quickstart import NAME as QUICKSTART
from aft_mm.cli.environment import PYTHON

from .helpers import load_script

licenses = load_script('requirements/licenses')
CARRIED = '*.py', '*.html', '*.js', '*.cpp', '*.h', 'py.typed'


def build_wheel(root, folder, **environment):
    words = f'-q egg_info -e {folder} build -b {folder}/build --build-lib {folder}/lib '
    words += f'bdist_wheel -d {folder} -b {folder}/bdist'
    command = [sys.executable, 'setup.py', *words.split()]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True, env=environment
    )
    (path,) = folder.glob('*.whl')
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        (name,) = [name for name in names if name.endswith('/METADATA')]
        return path, names, message_from_string(file.read(name).decode()), done.stderr


@pytest.fixture(scope='module')
def wheel(root, tmp_path_factory):
    """A wheel with the C++ loops; those of the checkout are reused if they are up to date."""
    folder = tmp_path_factory.mktemp('wheel')
    (folder / 'lib/aft_mm/ops/native').mkdir(parents=True)
    for path in (root / 'aft_mm/ops/native').glob('loops.*'):
        shutil.copy(path, folder / 'lib/aft_mm/ops/native')
    return build_wheel(root, folder)


@pytest.fixture(scope='module')
def pure_wheel(root, tmp_path_factory):
    return build_wheel(root, tmp_path_factory.mktemp('pure'), CC='false', CXX='false')


def files_below(folder, *patterns):
    return {
        path
        for pattern in patterns
        for path in folder.rglob(pattern)
        if path.is_file() and '__pycache__' not in path.parts
    }


def test_the_wheel_has_every_module_and_the_files_for_mim(wheel, root):
    names = {name for name in wheel[1] if '.dist-info/' not in name}
    package = files_below(root / 'aft_mm', *CARRIED)
    carried = files_below(root / 'configs', '*') | files_below(root / 'tools', '*')
    loops = {name for name in names if name.endswith(('.so', '.so.sha256'))}
    found = {Path(name).name.split('.')[1] for name in loops}  # one for each set of instructions
    assert found == {'any', 'avx2', 'avx512'} if platform.machine() == 'x86_64' else {'any'}
    assert {f'{name}.sha256' for name in loops if name.endswith('.so')} <= loops
    carried |= {root / 'model-index.yml'}
    assert names - loops == {path.relative_to(root).as_posix() for path in package} | {
        f'aft_mm/.mim/{path.relative_to(root).as_posix()}' for path in carried
    }


def test_metadata(wheel):
    path, _, metadata, warnings = wheel
    assert 'C++ loops' not in warnings
    # The wheel depends on the processor but not on the Python version.
    system = sysconfig.get_platform().replace('-', '_')
    assert path.name == f'aft_mm-{aft_mm.__version__}-py3-none-{system}.whl'
    assert metadata['Version'] == aft_mm.__version__
    assert SpecifierSet(metadata['Requires-Python']) == PYTHON
    # What is stated for each Python is stated once for all.
    stated = re.findall(r'Python :: (3[.]\d+)', '\n'.join(metadata.get_all('Classifier')))
    assert stated == [f'3.{minor}' for minor in range(20) if PYTHON.contains(f'3.{minor}')]
    assert {'dev', 'downstream', 'export'} < set(metadata.get_all('Provides-Extra'))


def test_a_wheel_without_loops_is_for_every_platform(wheel, pure_wheel):
    path, names, _, warnings = pure_wheel
    assert path.name == f'aft_mm-{aft_mm.__version__}-py3-none-any.whl'
    assert 'without the C++ loops, AFT-conv and AFT-simple are several times slower' in warnings
    others = {name for name in wheel[1] if not name.endswith(('.so', '.so.sha256'))}
    assert set(names) == others
    with zipfile.ZipFile(path) as file:
        (name,) = [name for name in names if name.endswith('/WHEEL')]
        assert b'Root-Is-Purelib: true\nTag: py3-none-any\n' in file.read(name)


def test_the_package_page_has_the_links_of_the_readme(wheel, root):
    metadata = wheel[2]
    assert metadata['Description-Content-Type'] == 'text/markdown'
    urls = dict(text.split(', ') for text in metadata.get_all('Project-URL'))
    links = re.findall(r'(!?)\[[^]]*\]\((.+?)\)', metadata.get_payload())
    tag = 'main' if 'dev' in aft_mm.__version__ else f'v{aft_mm.__version__}'
    assert len(links) > 30 and urls.keys() >= {'Source', 'Documentation', 'Changelog', 'Issues'}
    for picture, link in links:
        if not link.startswith('https://arxiv.org/'):
            start = f'{urls["Source"]}/{"raw" if picture else "blob"}/{tag}/'
            assert link.startswith(start), link
            assert (root / link.removeprefix(start).partition('#')[0]).is_file(), link


def test_the_sdist_has_every_file_of_the_checkout(wheel, root):
    if not (root / '.git').exists():
        pytest.skip('an unpacked sdist has no list of the files of the checkout')
    tracked = subprocess.run(
        ['git', 'ls-files', '--cached'], cwd=root, check=True, capture_output=True, text=True
    )
    sources = (wheel[0].parent / 'aft_mm.egg-info/SOURCES.txt').read_text().splitlines()
    expected = {name for name in tracked.stdout.splitlines() if (root / name).exists()}
    assert expected == {name for name in sources if 'egg-info/' not in name}


def test_release_files_are_checked(wheel, pure_wheel, root, tmp_path):
    check = load_script('packaging/check_files').check
    name = f'aft_mm-{aft_mm.__version__}'
    linux = tmp_path / f'{name}-py3-none-manylinux_2_17_{platform.machine()}.whl'
    shutil.copy2(wheel[0], linux)
    shutil.copy2(pure_wheel[0], tmp_path)
    with tarfile.open(tmp_path / f'{name}.tar.gz', 'w:gz') as file:
        for path in files_below(root / 'aft_mm', *CARRIED):
            file.add(path, f'{name}/{path.relative_to(root)}')
    check(tmp_path)
    shutil.copy2(pure_wheel[0], linux)
    with pytest.raises(ValueError, match=r'must have loops for .*any.*, got \[\]'):
        check(tmp_path)
    with zipfile.ZipFile(wheel[0]) as source, zipfile.ZipFile(linux, 'w') as target:
        for entry in source.namelist():
            damaged = b'0' if entry.endswith('.so.sha256') else source.read(entry)
            target.writestr(entry, damaged)
    with pytest.raises(ValueError, match='[.]so must have its sha256 next to it'):
        check(tmp_path)
    linux.unlink()
    with pytest.raises(ValueError, match='the files must be .*manylinux.*, got aft_mm'):
        check(tmp_path)


@pytest.mark.parametrize(
    ('edit', 'message'),
    [
        ({}, ''),
        ({'TAG': 'v1.2.4'}, r'TAG must be v and the version .*, got v1.2.4 and 1.2.3'),
        ({'aft_mm/__init__.py': "__version__ = '1.2.3.dev0'"}, 'TAG must be v and the version'),
        ({'CITATION.cff': 'version: 1.2.2\n'}, 'version of CITATION.cff must be 1.2.3, got 1.2.2'),
        ({'CITATION.cff': 'version: 1.2.3\n'}, 'got 1.2.3 .2026-11-23. and None'),
        ({'CHANGELOG.md': '# C\n\n## 1.2.3 (unreleased)\n'}, r'got 1.2.3 .unreleased. and 2026'),
        (
            {'pyproject.toml': '[project.urls]\nSource = "https://host/other"\n'},
            'Source of .project.urls. must be below https://host/me, got https://host/other',
        ),
    ],
    ids=str,
)
def test_a_tag_must_have_the_version_the_date_and_the_address(root, tmp_path, edit, message):
    files = {
        'aft_mm/__init__.py': "__version__ = '1.2.3'",
        'CITATION.cff': 'version: 1.2.3\ndate-released: 2026-11-23\n',
        'CHANGELOG.md': '# Changelog\n\n## 1.2.3 (2026-11-23)\n\n## 1.2.2 (2026-10-01)\n',
        'pyproject.toml': '[project.urls]\nSource = "https://host/me"\nDocs = "https://host/me/a"\n',
        **edit,
    }
    tag = files.pop('TAG', 'v1.2.3')
    (tmp_path / 'aft_mm').mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    check = load_script('packaging/check_tag').check
    if not message:
        return check(tmp_path, tag, 'https://host/me')
    with pytest.raises(ValueError, match=message):
        check(tmp_path, tag, 'https://host/me')


def test_the_release_workflow_pins_actions_and_images(root):
    text = (root / '.github/workflows/release.yml').read_text()
    used = re.findall(r'uses: (\S+)', text) + re.findall(r'image: (\S+)', text)
    assert len(used) >= 10
    assert all(re.search('@[0-9a-f]{40}$|@sha256:[0-9a-f]{64}$', name) for name in used)


def test_the_conda_recipe_has_the_dependencies(root):
    names = {'torch': 'pytorch', 'mmcv-lite': 'mmcv', 'matplotlib': 'matplotlib-base'}
    names['opencv-python'] = 'py-opencv'
    project = tomllib.loads((root / 'pyproject.toml').read_text())['project']
    expected = [('python', SpecifierSet(project['requires-python']))]
    for requirement in map(Requirement, project['dependencies']):
        expected.append((names.get(requirement.name, requirement.name), requirement.specifier))
    recipe = yaml.safe_load((root / 'packaging/conda/recipe.yaml').read_text())
    found = [text.partition(' ') for text in recipe['requirements']['run']]
    assert {name: SpecifierSet(spec) for name, _, spec in found} == dict(expected)
    build = tomllib.loads((root / 'pyproject.toml').read_text())['build-system']['requires']
    host = [Requirement(text) for text in recipe['requirements']['host'] if ' ' in text]
    assert host == list(map(Requirement, build))
    assert recipe['about']['repository'] == project['urls']['Source']


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
    words = f'-m pip --python {folder}/venv/bin/python install -q --no-deps --no-index {wheel[0]}'
    subprocess.run([sys.executable, *words.split()], check=True, capture_output=True)
    # After the installation, so that pip sees no other aft_mm. Its .pth files are not read.
    (packages,) = folder.glob('venv/lib/python*/site-packages')
    (packages / 'heavy.pth').write_text(f'{sysconfig.get_path("purelib")}\n')

    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    for name in ('PYTHONPATH', 'VIRTUAL_ENV', 'AFT_MM_DATA'):
        environment.pop(name, None)

    def call(command, *words):
        words = [folder / 'venv/bin' / command, *words]
        options = dict(cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        return subprocess.run(words, **options)

    return folder, call


@pytest.mark.slow
def test_the_quickstart_from_a_wheel(elsewhere, root):
    """Trains, tests and plots without a checkout."""
    folder, call = elsewhere
    words = 'quickstart --work-dir out --cfg-options train_cfg.max_epochs=1 param_scheduler=None'
    done = call('aft_mm', *words.split(), 'train_dataloader.dataset.indices=128')
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r'^accuracy: +\d+[.]\d\d % of the held-out fifth$', done.stdout, re.M)
    assert re.search(r'^next: +source venv/bin/activate', done.stdout, re.M)
    assert 'native backend used for aft_conv' in done.stdout + done.stderr
    for name in ('epoch_1.pth', 'metrics.json', 'position_bias.png'):
        assert (folder / 'out' / name).stat().st_size
    assert str(root) not in done.stdout + done.stderr  # nothing was loaded from the checkout


def test_the_configs_of_a_wheel_are_listed(elsewhere, root):
    _, call = elsewhere
    done = call('aft_mm', 'list', 'quickstart', '--measured')
    assert 'Top 1 Accuracy 98.1' in done.stdout and done.returncode == 0, done.stderr
    configs = {path.stem for path in (root / 'configs').rglob('*.py') if '_base_' not in path.parts}
    assert set(call('aft_mm', 'list', '--names').stdout.split()) == configs
    wrong = QUICKSTART.replace('digits', 'xdigits')
    closest = call('aft_mm', 'train', wrong)
    assert closest.stderr == (
        f"Error: config '{wrong}' does not exist; did you mean {QUICKSTART}?\n"
    )


def test_every_pin_has_hashes_and_make_requires_them(root):
    for name in ('lock', 'dev', 'downstream', 'mmcv', 'docs', 'release', 'transformers', 'demo'):
        pins = re.split(r'\n(?=\S)', (root / f'requirements/{name}.txt').read_text())
        assert pins and all(re.search('--hash=sha256:[0-9a-f]{64}', pin) for pin in pins)
    names = 'Makefile', 'requirements/build_mmcv.sh', 'packaging/build.sh'
    commands = ''.join((root / name).read_text() for name in names)
    installs = re.findall('(.*)-r (?:requirements/|"[$]req)', commands)
    assert len(installs) == 8
    assert all('$(PIN) ' in line or '--require-hashes ' in line for line in installs)
    (pin,) = re.findall('^PIN := (.*)', commands, re.M)
    assert '--no-deps --require-hashes' in pin


@pytest.mark.parametrize(
    'names',
    ['lock+dev', 'lock+downstream', 'lock+docs', 'lock+dev+transformers', 'lock+dev+demo', 'lock'],
)
def test_a_lock_is_complete(root, names):
    """pip installs without resolving dependencies, so the lock must list all of them."""
    pinned = [
        pin
        for name in names.split('+')
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


def test_licenses_of_all_dependencies(root, capsys):
    licenses.main([root / 'requirements/lock.txt', root / 'requirements/dev.txt'])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert len(lines) > 90 and 'BSD' in lines['torch'] and 'Apache' in lines['mmengine']
    unstated = {name for name, line in lines.items() if 'not stated' in line}
    assert unstated <= {'cuda-toolkit'}  # only dependencies


@pytest.mark.parametrize(
    'locks, extras',
    [('lock dev', ' dev analysis export text speech timm'), ('downstream', 'downstream')],
)
def test_locks_are_within_the_ranges(wheel, root, locks, extras):
    pins = [
        pin for name in locks.split() for pin in licenses.pins(root / f'requirements/{name}.txt')
    ]
    checked = set()
    for requirement in map(Requirement, wheel[2].get_all('Requires-Dist')):
        marker = requirement.marker
        if locks == 'downstream' and not marker or requirement.name == 'aft_mm':
            continue
        if marker and not any(marker.evaluate({'extra': extra}) for extra in extras.split(' ')):
            continue
        found = [pin for pin in pins if pin.name == requirement.name]
        assert found, requirement.name
        for pin in found:
            (specifier,) = pin.specifier
            assert requirement.specifier.contains(specifier.version), (str(requirement), str(pin))
        checked.add(requirement.name)
    assert checked >= ({'mmdet', 'mmsegmentation'} if locks == 'downstream' else {'torch', 'timm'})
