"""OpenCV without windows is as good as the distribution that pip is asked for."""

import os
import subprocess
import sys

import pytest

# Starts a command where no metadata of opencv-python are found.
PROGRAM = """
from importlib import metadata
find = metadata.MetadataPathFinder.find_distributions
metadata.MetadataPathFinder.find_distributions = staticmethod(
    lambda *args: (one for one in find(*args) if one.name != 'opencv-python'))
from aft_mm.cli.main import main
main(['doctor'])
"""


@pytest.mark.parametrize('name', ['opencv-python-headless', 'opencv-contrib-python-headless', None])
def test_the_doctor_accepts_another_opencv(name, tmp_path, root):
    if name:
        folder = tmp_path / f'{name.replace("-", "_")}-5.0.0.dist-info'
        folder.mkdir()
        (folder / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 5.0.0\n')
    paths = os.pathsep.join([str(root), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': paths},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert 'cannot be imported' not in said
    if name:
        assert done.stdout.startswith('fine: ') and f'{name} 5.0.0' in said
    else:
        assert 'opencv-python is missing' in said
