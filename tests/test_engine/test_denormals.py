"""Training on a CPU treats denormal numbers as 0, and nothing else does."""

import json

import torch

from aft_mm.engine.denormals import denormals_as_zero

HOOK = """
import json, torch
from pathlib import Path
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

@HOOKS.register_module()
class Smallest(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        many = torch.full((100_000,), 1e-40)  # for all threads
        found = [(many * 1).max().item(), torch.full((), 2e-38).mul(1).item()]
        Path(runner.work_dir, 'smallest.json').write_text(json.dumps(found))
"""


def product(value=1e-40):
    return torch.full((), value).mul(1).item()


def test_the_setting_ends_with_the_block():
    for before in (False, True):
        torch.set_flush_denormal(before)
        with denormals_as_zero():
            assert product() == 0 and product(2e-38) > 0
        assert (product() == 0) == before


def test_training_treats_denormals_as_zero(run, root, config, tmp_path):
    (tmp_path / 'smallest.py').write_text(HOOK)
    (tmp_path / 'own.py').write_text(
        f'_base_ = {config("tiny")!r}\n'
        "custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks', 'smallest'])\n"
        "custom_hooks = [dict(type='Smallest')]\n"
        'train_cfg = dict(max_epochs=1)\n'
    )
    command = root / 'tools/train.py', 'own.py', '--work-dir', 'out', '--no-validate'
    env = dict(PYTHONPATH=f'{tmp_path}:{root}/tests/configs', OMP_NUM_THREADS='2')
    done = run(*command, cwd=tmp_path, env=env, fresh=True)
    assert done.returncode == 0, done.stderr
    zero, normal = json.loads((tmp_path / 'out/smallest.json').read_text())
    assert zero == 0 and normal > 0
