"""What pip sees."""

import importlib.util
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import aft_mm


@pytest.fixture(scope='module')
def wheel(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp('wheel')
    subprocess.run([sys.executable, 'setup.py', '-q', 'bdist_wheel', '-d', folder, '-b',
                    folder / 'build', 'egg_info', '-e', folder], cwd=root, check=True,
                   capture_output=True)
    (path, ) = folder.glob('*.whl')
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        (name, ) = [name for name in names if name.endswith('/METADATA')]
        return path, names, message_from_string(file.read(name).decode())


def test_every_module_and_nothing_else_is_in_the_wheel(wheel, root):
    names = {name for name in wheel[1] if '.dist-info/' not in name}
    expected = {path.relative_to(root).as_posix() for pattern in ('*.py', '*.html', '*.js')
                for path in (root / 'aft_mm').rglob(pattern)}
    assert names == expected


def test_metadata(wheel):
    path, _, metadata = wheel
    assert path.name == f'aft_mm-{aft_mm.__version__}-py3-none-any.whl'  # nothing compiled
    assert metadata['Version'] == aft_mm.__version__
    assert metadata['Requires-Python'] == '>=3.11,<3.14'
    extras = {
        'downstream', 'bench', 'text', 'speech', 'analysis', 'hub', 'fid', 'docs', 'export',
        'dev'}
    assert set(metadata.get_all('Provides-Extra')) == extras


@pytest.fixture(scope='module')
def licenses(root):
    spec = importlib.util.spec_from_file_location('licenses', root / 'requirements/licenses.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pin_has_hashes_and_make_wants_them(root):
    for name in ('lock', 'dev', 'downstream', 'mmcv', 'docs'):
        pins = re.split(r'\n(?=\S)', (root / f'requirements/{name}.txt').read_text())
        assert pins and all(re.search('--hash=sha256:[0-9a-f]{64}', pin) for pin in pins)
    commands = (root / 'Makefile').read_text() + (root / 'requirements/build_mmcv.sh').read_text()
    installs = re.findall('(.*)-r (?:requirements/|"[$]req)', commands)
    assert len(installs) == 5
    assert all('$(PIN) ' in line or '--require-hashes ' in line for line in installs)
    (pin, ) = re.findall('^PIN := (.*)', commands, re.M)
    assert '--no-deps --require-hashes' in pin


@pytest.mark.parametrize('names', [
    ['lock'], ['lock', 'dev'], ['lock', 'downstream'], ['lock', 'docs']], ids='+'.join)
def test_a_lock_is_complete(root, licenses, names):
    """pip is told to look at no dependencies; those of what is not for this machine go unseen."""
    pinned = [pin for name in names for pin in licenses.pins(root / f'requirements/{name}.txt')
              if pin.marker is None or pin.marker.evaluate()]
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pinned}
    looked = 0
    for pin in pinned:
        try:
            package = distribution(pin.name)
        except PackageNotFoundError:  # mmdet and mmseg come with `make downstream` only
            continue
        if not pin.specifier.contains(package.version):
            continue  # of another version nothing follows
        needed = map(Requirement, package.requires or ())
        looked += 1
        for requirement in needed:
            extras = pin.extras or {''}
            if requirement.marker is None or any(
                    requirement.marker.evaluate({'extra': extra}) for extra in extras):
                found = versions.get(canonicalize_name(requirement.name))
                assert found and requirement.specifier.contains(found, prereleases=True), (
                    f'{pin.name} needs {requirement}, and the locks have {found}')
    assert looked > 60


def test_licenses_of_all_dependencies(root, licenses, capsys):
    licenses.main([root / 'requirements/lock.txt', root / 'requirements/dev.txt'])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert len(lines) > 90 and 'BSD' in lines['torch'] and 'Apache' in lines['mmengine']
    unstated = {name for name, line in lines.items() if 'not stated' in line}
    assert unstated <= {'cuda-toolkit'}  # which holds nothing but the names of others


def test_the_lock_is_within_the_ranges(wheel, root, licenses):
    lock = {}
    for name in ('lock', 'dev'):
        for requirement in licenses.pins(root / f'requirements/{name}.txt'):
            lock.setdefault(requirement.name, []).append(requirement)
    for text in wheel[2].get_all('Requires-Dist'):
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({'extra': 'dev'}):
            continue
        for pinned in lock[requirement.name]:
            (specifier, ) = pinned.specifier
            assert requirement.specifier.contains(specifier.version), (text, str(pinned))


def test_downstream_is_within_the_ranges(wheel, root, licenses):
    pinned = {pin.name: pin.specifier for name in ('downstream', 'mmcv')
              for pin in licenses.pins(root / f'requirements/{name}.txt')}
    extra = [Requirement(text) for text in wheel[2].get_all('Requires-Dist')]
    extra = [requirement for requirement in extra
             if requirement.marker and requirement.marker.evaluate({'extra': 'downstream'})]
    assert {'mmcv', 'mmdet', 'mmsegmentation'} <= {requirement.name for requirement in extra}
    for requirement in extra:
        (specifier, ) = pinned[requirement.name]
        assert requirement.specifier.contains(specifier.version), str(requirement)


def test_torch_and_torchvision_are_pinned_as_a_pair(root, licenses):
    pins = set(map(str, licenses.pins(root / 'requirements/lock.txt')))
    assert {'torch==2.11.0', 'torchvision==0.26.0'} <= pins
