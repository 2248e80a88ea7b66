"""mmpretrain: adapters, and a Transformers that its multimodal models cannot use."""

import subprocess
import sys
from pathlib import Path

import torch

from ..helpers import WITHOUT_WORKERS

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


def test_a_run_with_low_rank_adapters_resumes_and_starts_another(tool, config, tmp_path):
    (tmp_path / 'lora.py').write_text(f"""
_base_ = {config('tiny')!r}
backbone = dict(
    _delete_=True, type='LoRAModel', module=_base_.model.backbone, alpha=4, rank=2,
    targets=[dict(type='.*query'), dict(type='.*value')],
)
model = dict(backbone=backbone)
custom_hooks = []
""")

    def train(folder, *words):
        options = [*WITHOUT_WORKERS, 'param_scheduler=None', f'experiment_name=lora-{folder}']
        words = [*words[:-1], '--cfg-options', *options, *words[-1]]
        tool('train').main(
            [str(tmp_path / 'lora.py'), '--work-dir', str(tmp_path / folder), *words]
        )
        return torch.load(tmp_path / folder / 'epoch_2.pth', weights_only=True)['state_dict']

    whole = train('whole', ['train_cfg.max_epochs=2'])
    assert {name.split('.')[-2] for name in whole if 'backbone' in name} == {'lora_down', 'lora_up'}
    resumed = train(
        'part', '--resume', str(tmp_path / 'whole/epoch_1.pth'), ['train_cfg.max_epochs=2']
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    start = f'load_from={tmp_path / "whole/epoch_2.pth"}'
    other = train('other', [start, 'train_cfg.max_epochs=2', 'optim_wrapper.optimizer.lr=0'])
    assert all(torch.equal(value, other[name]) for name, value in whole.items())
