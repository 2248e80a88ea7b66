"""mmpretrain next to a Transformers that its multimodal models cannot use."""

import subprocess
import sys
from pathlib import Path

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


# In forks of one process, which has imported torch.
FORKS = """
import os, sys
import torch, torchvision
for folder in sys.argv[2:]:
    if process := os.fork():
        assert os.waitpid(process, 0)[1] == 0
        continue
    sys.path.insert(0, folder)
    print('----')
    exec(sys.argv[1])
    break
"""


def test_multimodal_models_are_left_out_if_transformers_lacks_their_parts(tmp_path):
    helper = 'def apply_chunking_to_forward(): pass\n'
    for version, text in (('4.50.0', helper), ('5.24.0', '')):
        for name, content in PACKAGES.items():
            path = tmp_path / version / name.format(version=version)
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(content.format(version=version, helper=text))
    run = subprocess.run(
        [sys.executable, '-c', FORKS, PROGRAM, tmp_path / '4.50.0', tmp_path / '5.24.0'],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    # The first stand-in has nothing but the helper, so an import is seen to be tried.
    tried, left_out = (text.splitlines()[-1] for text in run.stdout.split('----\n')[1:])
    assert 'Error' in tried and 'requires extra multi-modal' in left_out, run.stdout
