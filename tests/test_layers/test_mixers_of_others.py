"""Mixers of other packages, by the entry points ``aft_mm.mixers``."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIXER = """
from aft_mm.layers import TokenMixer
from aft_mm.registry import MODELS

@MODELS.register_module()
class Halves(TokenMixer):
    def _mix(self, query, key, value, grid, key_mask):
        return value / 2
"""
PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    from aft_mm.registry import MODELS
    mixer = MODELS.build(dict(type='aft_mm.Halves', embed_dims=8))
    texts = [str(one.message) for one in caught]
    print(type(mixer).__name__, *(text for text in texts if text.startswith('mixers of')))
"""


def test_a_package_adds_mixers_and_a_broken_one_is_named(tmp_path):
    (tmp_path / 'halves.py').write_text(MIXER)
    for name, module in (('good', 'halves'), ('bad', 'nowhere')):
        folder = tmp_path / f'{name}-1.0.dist-info'
        folder.mkdir()
        (folder / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
        (folder / 'entry_points.txt').write_text(f'[aft_mm.mixers]\nmine = {module}\n')
    environment = {**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    broken = (
        "mixers of bad (nowhere) cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
    )
    assert done.stdout == f'Halves {broken}\n'
