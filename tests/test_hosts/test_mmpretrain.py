"""mmpretrain next to a Transformers that its multimodal models cannot use."""

import subprocess
import sys
from pathlib import Path

import pytest

# A Transformers 5 and pycocotools as mmpretrain sees them: names, versions and what is missing.
PACKAGES = {
    'transformers/__init__.py': '',
    'transformers/modeling_utils.py': '{helper}class PreTrainedModel: pass\n',
    'transformers-{version}.dist-info/METADATA': 'Name: transformers\nVersion: {version}\n',
    'pycocotools/__init__.py': '',
    'pycocotools-2.0.11.dist-info/METADATA': 'Name: pycocotools\nVersion: 2.0.11\n',
}
PROGRAM = """
import sys
import aft_mm.registry
from mmpretrain.utils import dependency
assert dependency.WITH_MULTIMODAL
try:
    import mmpretrain.models, mmpretrain.datasets
except Exception as error:
    print(type(error).__name__)
    raise SystemExit
from mmpretrain.registry import MODELS
MODELS.build(dict(type='mmpretrain.LinearClsHead', num_classes=2, in_channels=4))
try:
    MODELS.build(dict(type='mmpretrain.BlipCaption'))
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize('has_helper', [False, True])
def test_multimodal_models_are_left_out_if_transformers_lacks_their_parts(tmp_path, has_helper):
    version = '4.50.0' if has_helper else '5.24.0'
    helper = 'def apply_chunking_to_forward(): pass\n' if has_helper else ''
    for name, text in PACKAGES.items():
        path = tmp_path / name.format(version=version)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(version=version, helper=helper))
    run = subprocess.run(
        [sys.executable, '-c', f'import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}'],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    # This stand-in has nothing but the helper, so an import is seen to be tried.
    last = run.stdout.splitlines()[-1]
    assert 'Error' in last if has_helper else 'requires extra multi-modal' in last, run.stdout
