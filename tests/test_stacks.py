"""requirements/stacks.py: the table of docs/supported_stacks.md, and the range in the metadata."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from .helpers import load_script

stacks = load_script('requirements/stacks')


@pytest.fixture(scope='module')
def rows():
    return json.loads(stacks.RESULTS.read_text())


def test_the_table_is_that_of_the_results(rows):
    content = stacks.PAGE.read_text()
    (table,) = [found.group() for found in stacks.REGION.finditer(content)]
    assert table == f'<!-- stacks -->\n{stacks.table(rows)}<!-- end of stacks -->'


def test_the_metadata_allows_the_oldest_to_the_newest_torch_that_was_run(rows, root):
    project = tomllib.loads((root / 'pyproject.toml').read_text())['project']
    required = {one.name: one.specifier for one in map(Requirement, project['dependencies'])}
    (locked,) = re.findall(r'^torch==(\S+)', (root / 'requirements/lock.txt').read_text(), re.M)
    run = {Version(row['packages']['torch']).minor for row in rows} | {Version(locked).minor}
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
