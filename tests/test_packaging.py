"""Dependencies, lock files, and the checks of a release; the wheel is in test_wheel.py."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from .errors import refuses
from .helpers import load_script

licenses = load_script('requirements/licenses')
stacks = load_script('requirements/stacks')


def files_below(folder, *patterns):
    return {
        path
        for pattern in patterns
        for path in folder.rglob(pattern)
        if path.is_file() and '__pycache__' not in path.parts
    }


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
        (
            {'README.md': 'git clone https://example.org/aft_mm'},
            'README.md must have the address of the repository, got https://example.org/aft_mm; ',
        ),
    ],
    ids=str,
)
def test_a_tag_must_have_the_version_the_date_and_the_address(
    root, tmp_path, monkeypatch, edit, message
):
    files = {
        'aft_mm/__init__.py': "__version__ = '1.2.3'",
        'CITATION.cff': 'version: 1.2.3\ndate-released: 2026-11-23\n',
        'CHANGELOG.md': '# Changelog\n\n## 1.2.3 (2026-11-23)\n\n## 1.2.2 (2026-10-01)\n',
        'pyproject.toml': '[project.urls]\nSource = "https://host/me"\nDocs = "https://host/me/a"\n',
        'README.md': 'git clone https://host/me',
        'packaging/conda/recipe.yaml': 'homepage: https://host/me',
        **edit,
    }
    tag = files.pop('TAG', 'v1.2.3')
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(root / 'packaging')
    check = load_script('packaging/check_tag').check
    if not message:
        return check(tmp_path, tag, 'https://host/me')
    refuses(message, check, tmp_path, tag, 'https://host/me')


def test_one_command_sets_the_address_everywhere(root, tmp_path, monkeypatch):
    """A tag of the files of this checkout is then accepted."""
    monkeypatch.syspath_prepend(root / 'packaging')
    place, check = load_script('packaging/source_address'), load_script('packaging/check_tag').check
    old = place.source_of(root)
    names = subprocess.run(['git', 'ls-files'], cwd=root, capture_output=True, text=True).stdout
    if not names:
        pytest.skip('not a clone')
    having = {
        name
        for name in names.splitlines()
        if (root / name).is_file() and old.encode() in (root / name).read_bytes()
    }
    known = {*place.FILES, 'packaging/source_address.py', 'tests/test_packaging.py'}
    assert {*place.FILES} <= having <= known
    for name in (*place.FILES, 'aft_mm/__init__.py', 'CITATION.cff', 'CHANGELOG.md'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (root / name).read_text()
        text = re.sub('^__version__ = .*', "__version__ = '0.2.0'", text, flags=re.M)
        text = re.sub(r'^## 0.2.0 .*', '## 0.2.0 (2026-11-29)', text, flags=re.M)
        if name == 'CITATION.cff':
            text = re.sub(r'^(version|date-released):.*\n', '', text, flags=re.M)
            text += 'version: 0.2.0\ndate-released: 2026-11-29\n'
        (tmp_path / name).write_text(text)
    if old == place.PLACEHOLDER:
        refuses('pyproject.toml must have the address of', check, tmp_path, 'v0.2.0')
    for wrong in ('', 'http://host/me', 'https://host', 'https://host/me/aft_mm"'):
        refuses('ADDRESS must be https://HOST/OWNER/NAME, got', place.replace, tmp_path, wrong)
    new = 'https://host.test/me/aft_mm'
    place.replace(tmp_path, new)
    check(tmp_path, 'v0.2.0')
    check(tmp_path, 'v0.2.0', new)
    for name in place.FILES:
        before, after = ((folder / name).read_text() for folder in (root, tmp_path))
        assert after == before.replace(old, new)


def test_workflows_pin_actions_and_images(root):
    text = '\n'.join(path.read_text() for path in (root / '.github/workflows').glob('*.yml'))
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


def test_every_pin_has_hashes_and_make_requires_them(root):
    for name in (
        'lock',
        'dev',
        'downstream',
        'mmcv',
        'docs',
        'release',
        'transformers',
        'demo',
        'weights',
        'audit',
    ):
        pins = re.split(r'\n(?=\S)', (root / f'requirements/{name}.txt').read_text())
        assert pins and all(re.search('--hash=sha256:[0-9a-f]{64}', pin) for pin in pins)
    names = 'Makefile', 'requirements/build_mmcv.sh', 'packaging/build.sh'
    commands = ''.join((root / name).read_text() for name in names)
    installs = re.findall('(.*)-r (?:requirements/|"[$]req)', commands)
    assert len(installs) == 10
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


def test_every_file_is_attested_before_it_is_published(root):
    text = (root / '.github/workflows/release.yml').read_text()
    job = yaml.safe_load(text)['jobs']['publish']
    assert job['permissions'] == dict.fromkeys(('attestations', 'contents', 'id-token'), 'write')
    steps = [step.get('uses', step.get('run')) for step in job['steps']]
    names = [text.split('@')[0].split()[0] for text in steps]
    assert names == [
        'actions/download-artifact',
        'actions/attest-build-provenance',
        'mv',
        'pypa/gh-action-pypi-publish',
        'gh',
    ]
    assert job['steps'][1]['with'] == {'subject-path': 'dist/*'}
    assert 'attestations' not in job['steps'][3]['with']  # on by default


def test_the_oldest_pins_are_the_lower_bounds(root):
    ranges = load_script('requirements/ranges')
    project = tomllib.loads((root / 'pyproject.toml').read_text())['project']
    pins = {pin.name: pin for pin in map(Requirement, ranges.oldest(project))}
    assert {'torch', 'transformers', 'mmdet', 'mmpretrain', 'mmcv-lite', 'pillow'} <= set(pins)
    declared = [*project['dependencies'], *sum(project['optional-dependencies'].values(), [])]
    for requirement in map(Requirement, declared):
        if requirement.name in pins:
            (pin,) = pins[requirement.name].specifier
            assert requirement.specifier.contains(pin.version)
            older = f'{Version(pin.version).major - 1}.99'
            assert not requirement.specifier.contains(older)
    for test in ranges.TESTS:
        assert (root / 'tests' / test.partition('::')[0]).exists()


@pytest.fixture(scope='module')
def stack_rows():
    return json.loads(stacks.RESULTS.read_text())


def test_the_table_is_that_of_the_results(stack_rows):
    content = stacks.PAGE.read_text()
    (table,) = [found.group() for found in stacks.REGION.finditer(content)]
    assert table == f'<!-- stacks -->\n{stacks.table(stack_rows)}<!-- end of stacks -->'


def test_the_metadata_allows_the_oldest_to_the_newest_torch_that_was_run(stack_rows, root):
    project = tomllib.loads((root / 'pyproject.toml').read_text())['project']
    required = {one.name: one.specifier for one in map(Requirement, project['dependencies'])}
    (locked,) = re.findall(r'^torch==(\S+)', (root / 'requirements/lock.txt').read_text(), re.M)
    run = {Version(row['packages']['torch']).minor for row in stack_rows} | {Version(locked).minor}
    allowed = [minor for minor in range(100) if required['torch'].contains(f'2.{minor}.99')]
    assert allowed == list(range(min(run), max(run) + 1))


def test_the_locks_without_torch_pin_everything_once():
    names = [pin.partition('==')[0] for pin in dict.fromkeys(stacks.pins('openmmlab'))]
    assert {'mmengine', 'mmdet', 'pytest', 'torchmetrics'} < set(names)
    assert not {'torch', 'torchvision', 'triton', 'cuda-toolkit'} & set(names)
    fork = [pin.partition('==')[0] for pin in stacks.pins('onedl')]
    theirs = 'mmengine mmcv-lite mmpretrain mmdet mmsegmentation'
    assert set(names) - set(fork) == set(theirs.split())


def test_tests_are_counted_by_column_and_failures_named(tmp_path, monkeypatch):
    (tmp_path / 'tests/test_ops').mkdir(parents=True)
    (tmp_path / 'tests/test_ops/test_some.py').write_text(
        'import pytest\n'
        'class TestA:\n'
        '    def test_a(self): pass\n'
        'def test_b(): assert 0, "two\\nlines"\n'
        'def test_c(): pytest.skip("none")\n'
    )
    (tmp_path / 'tests/test_other.py').write_text(
        'def test_d(): pass\n'
        'def test_e(): assert 0  # is not selected\n'
    )  # fmt: skip
    groups = {'ops': ('test_ops/test_some.py',), 'other': ('test_other.py::test_d',)}
    monkeypatch.setattr(stacks, 'ROOT', tmp_path)
    monkeypatch.setattr(stacks, 'CHECKS', groups)
    found = stacks.check(Path(sys.executable), tmp_path)
    (failure,) = found['ops'].pop('failed')
    assert failure.startswith('test_b: AssertionError: two lines')
    assert found == {
        'ops': dict(passed=1, skipped=1),
        'other': dict(passed=1, skipped=0, failed=[]),
    }
