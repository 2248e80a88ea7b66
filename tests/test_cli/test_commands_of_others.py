"""Commands of other packages, by the entry points ``aft_mm.commands``."""

import os
import subprocess
import sys

import pytest

from ..documents import ROOT

MODULE = '''"""Count the bytes of a file."""
from aft_mm.errors import UserError

def arguments(parser):
    parser.add_argument('path')

def run(args):
    if not (size := len(open(args.path, 'rb').read())):
        raise UserError(f'PATH {args.path!r} is empty')
    print(size)
'''


@pytest.fixture
def call(tmp_path):
    """Return a function that calls aft_mm with an entry point, and returns the status and the output."""
    metadata = tmp_path / 'theirs-1.0.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text('Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n')
    (tmp_path / 'count.py').write_text(MODULE)
    (tmp_path / 'three').write_text('abc')
    (tmp_path / 'empty').touch()

    def run(entry, *words):
        (metadata / 'entry_points.txt').write_text(f'[aft_mm.commands]\n{entry}\n')
        done = subprocess.run(
            [sys.executable, '-m', 'aft_mm', *words],
            cwd=tmp_path,
            env={**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    'words, printed',
    [
        (['three'], (0, '3\n')),
        (['empty'], (1, "Error: PATH 'empty' is empty\n")),
        (['gone'], (1, "Error: PATH 'gone' does not exist\n")),
    ],
)
def test_one_runs_like_ours(words, printed, call):
    assert call('count-bytes = count', 'count-bytes', *words) == printed


def test_the_help_has_it(call):
    status, text = call('count-bytes = count', '--help')
    assert status == 0 and 'count-bytes' in text and 'Count the bytes of a file.' in text
    assert call('count-bytes = count', 'count-bytes', '-h')[1].startswith('usage: aft_mm count-b')


@pytest.mark.parametrize('name', ['train', 'plot', 'plot mine', '-x'])
def test_none_replaces_ours(name, call):
    status, text = call(f'{name} = count', 'count-bytes')
    assert status == 1 and text == (
        'Error: a command of another package must have a new name of a-z, 0-9 and -, got '
        f"'{name}' of count\n"
    )
    assert call(f'{name} = count', 'train', '--help')[1].startswith('usage: aft_mm train')


def test_a_broken_one_is_named(call):
    assert call('mine = nowhere', 'mine') == (
        1,
        'Error: the command mine (nowhere) cannot be imported: '
        "ModuleNotFoundError: No module named 'nowhere'\n",
    )
