"""OpenCV without windows is as good as the distribution that pip is asked for."""

import os
import subprocess
import sys

# Calls the doctor where no metadata of opencv-python are found: alone, then with each folder.
PROGRAM = """
import sys
from aft_mm.cli.commands import doctor
from aft_mm.cli.main import main
find = doctor.distributions
doctor.distributions = lambda: (one for one in find() if one.name != 'opencv-python')
paths = [*sys.path]
for folder in ([], *([folder] for folder in sys.argv[1:])):
    sys.path[:] = [*paths, *folder]
    print('----')
    try:
        main(['doctor'])
    except SystemExit:
        pass
"""
NAMES = 'opencv-python-headless', 'opencv-contrib-python-headless'


def test_the_doctor_accepts_another_opencv(tmp_path, root):
    for name in NAMES:
        folder = tmp_path / name / f'{name.replace("-", "_")}-5.0.0.dist-info'
        folder.mkdir(parents=True)
        (folder / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 5.0.0\n')
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, *(tmp_path / name for name in NAMES)],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'cannot be imported' not in done.stdout + done.stderr
    missing, *others = done.stdout.split('----\n')[1:]
    assert 'opencv-python is missing' in missing
    for name, said in zip(NAMES, others, strict=True):
        assert said.startswith('fine: ') and f'{name} 5.0.0' in said
