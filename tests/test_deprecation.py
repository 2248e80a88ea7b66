"""Old names warn, and go in the version that they name."""

import ast
import re
import runpy
import warnings

import pytest
from packaging.version import Version

import aft_mm
from aft_mm.cli import main

from .documents import ROOT, text_of

SCRIPTS = [path for path in (ROOT / 'tools').rglob('*.py') if 'import script\n' in path.read_text()]


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_old_names_but_those_that_mim_starts(path, monkeypatch):
    ran = []
    monkeypatch.setattr(main, 'end_at_interrupt', lambda: None)
    monkeypatch.setattr(main, 'parse_args', lambda command, argv: None)
    monkeypatch.setattr(main, 'run', lambda command, args: ran.append(command))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('default')
        runpy.run_path(str(path), run_name='__main__')
    (command,) = ran
    assert command in main.COMMANDS
    if path.stem in ('train', 'test'):
        assert not caught
    else:
        (warning,) = caught
        assert warning.category is FutureWarning and warning.filename == str(path)
        assert f'{path} is now `aft_mm {command}`; the old name goes in aft_mm ' in str(
            warning.message
        )


def test_no_old_name_outlives_its_version():
    """The page lists what the code announces."""
    goes = {
        ast.literal_eval(node.args[2])
        for path in (ROOT / 'aft_mm').rglob('*.py')
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith('warn_old_name')
    }
    listed = set(re.findall(r'^\|.*\| (\d+[.]\d+[.]\d+) \|$', text_of('docs/deprecation.md'), re.M))
    assert goes == listed
    assert all(Version(version) > Version(aft_mm.__version__) for version in goes)
