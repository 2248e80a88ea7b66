"""Safe loading: training state loads, code is refused, for files and downloads."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner.checkpoint import CheckpointLoader

import aft_mm.registry  # noqa: F401  registers what is tested here
from aft_mm.checkpoint import load_from_http, load_from_local
from aft_mm.errors import UserError

from .test_adversarial.hostile import Call

OPTIMIZER = OptimWrapper(
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
)


def training_state(**extra):
    """Return what mmengine stores with the weights: log history and numpy scalars."""
    hub = MessageHub(f'test-{len(extra)}')
    for step in range(3):
        hub.update_scalar('train/loss', 1.0 / (step + 1))
    hub.update_info('eta', np.float64(3.5))
    hub.update_info('iter', np.int64(7))
    return dict(
        meta=dict(epoch=1, seed=0),
        state_dict=dict(weight=torch.randn(3, 5)),
        message_hub=hub.state_dict(),
        **extra,
    )


def one_cycle():
    scheduler = PARAM_SCHEDULERS.build(
        dict(type='OneCycleLR', optimizer=OPTIMIZER, eta_max=1.0, total_steps=10, by_epoch=False)
    )
    return dict(param_schedulers=[scheduler.state_dict()])


CASES = {
    'log history': dict,
    'best score of a float32 metric': lambda: dict(best=np.float32(0.25)),
    'one cycle schedule': one_cycle,
    'numpy meta of a data set': lambda: dict(
        palette=np.arange(6, dtype=np.uint8).reshape(2, 3),
        flags=np.array([True, False]),
        mean=np.array([0.5, 0.25], dtype=np.float32),
        classes=np.array(['cat', 'dog']),
    ),
    'optimizer': lambda: dict(optimizer=OPTIMIZER.state_dict()),
}


@pytest.mark.parametrize('name', CASES)
def test_training_state_loads(name, tmp_path):
    state = training_state(**CASES[name]())
    torch.save(state, tmp_path / 'a.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'), map_location='cpu')
    history = loaded['message_hub']['log_scalars']['train/loss']
    assert history.min() == pytest.approx(1 / 3) and history.mean(2) == pytest.approx(5 / 12)
    for key, value in CASES[name]().items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(loaded[key], value)
            assert loaded[key].dtype == value.dtype
        else:
            assert str(loaded[key]) == str(value)


def test_files_written_under_numpy_1_load(tmp_path, monkeypatch):
    state = training_state()
    torch.save(state, tmp_path / 'numpy2.pth', _use_new_zipfile_serialization=False)
    text = (tmp_path / 'numpy2.pth').read_bytes()
    assert b'numpy._core.multiarray' in text
    (tmp_path / 'numpy1.pth').write_bytes(
        text.replace(b'numpy._core.multiarray', b'numpy.core.multiarray')
    )
    loaded = load_from_local(str(tmp_path / 'numpy1.pth'))
    assert torch.equal(loaded['state_dict']['weight'], state['state_dict']['weight'])
    assert loaded['message_hub']['runtime_info']['eta'] == 3.5


def test_the_legacy_config_entry_is_dropped(tmp_path):
    # mmengine's Runner.resume would execute it.
    torch.save(dict(meta=dict(config='import os', cfg='a = 1'), state_dict={}), tmp_path / 'a.pth')
    assert load_from_local(str(tmp_path / 'a.pth'))['meta'] == dict(cfg='a = 1')


def test_a_file_without_a_dict_is_refused(tmp_path):
    torch.save([torch.randn(3)], tmp_path / 'list.pth')
    with pytest.raises(pickle.UnpicklingError, match=r'list\.pth. holds a list instead of a dict'):
        load_from_local(str(tmp_path / 'list.pth'))


@pytest.mark.parametrize('local_rank', ['0', '1'])
def test_a_failed_download_keeps_no_process_waiting(local_rank, monkeypatch, tmp_path):
    calls = []

    def fail(*args, **kwargs):
        calls.append('download')
        raise OSError('no network')

    monkeypatch.setenv('LOCAL_RANK', local_rank)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    monkeypatch.setattr('aft_mm.checkpoint.loading.is_distributed', lambda: True)
    monkeypatch.setattr('aft_mm.checkpoint.loading.barrier', lambda: calls.append('barrier'))
    monkeypatch.setattr('urllib.request.OpenerDirector.open', fail)
    with pytest.raises(UserError, match="'http://localhost/a.pth' cannot be downloaded: no netw"):
        load_from_http('http://localhost/a.pth')
    order = ['download', 'barrier'] if local_rank == '0' else ['barrier', 'download']
    assert calls == order


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"'{tmp_path}/no.pth' does not exist")):
        load_from_local(f'{tmp_path}/no.pth')


def test_the_file_that_names_the_last_checkpoint_is_followed(here):
    torch.save(dict(state_dict={}, meta=dict(iter=3)), 'iter_3.pth')
    Path('run').mkdir()
    for named in ('iter_3.pth', 'run/iter_3.pth', f'{here}/moved/iter_3.pth'):
        Path('run/last_checkpoint').write_text(f'{named}\n')
        assert load_from_local('run/last_checkpoint')['meta']['iter'] == 3
        torch.save(dict(state_dict={}, meta=dict(iter=3)), 'run/iter_3.pth')
    Path('run/last_checkpoint').write_text('iter_9.pth')
    message = "checkpoint 'iter_9.pth', named by 'run/last_checkpoint', does not exist"
    with pytest.raises(FileNotFoundError, match=message):
        load_from_local('run/last_checkpoint')


def test_importing_the_package_does_nothing():
    code = (
        'import sys, warnings; warnings.simplefilter("error"); before = set(sys.modules);'
        'import aft_mm; print(sorted(set(sys.modules) - before))'
    )
    result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert result.stdout.strip() == "['aft_mm']" and result.stderr == ''


LAZY = """
import sys
from mmengine.registry import MODELS
MODELS.get('aft_mm.AFTViT')
assert not [name for name in sys.modules if name.startswith('aft_mm.checkpoint')]
from mmengine.runner.checkpoint import CheckpointLoader, load_checkpoint
for path in ('a.pth', 'https://a/b.pth', 'torchvision://resnet18', 'open-mmlab://a'):
    assert CheckpointLoader._get_checkpoint_loader(path).__module__ == 'aft_mm.registry', path
assert CheckpointLoader._get_checkpoint_loader('mmcls://a').__name__ == 'load_from_mmcls'
schemes = dict(CheckpointLoader._schemes)
import aft_mm.registry
aft_mm.registry.register_safe_loading()
assert CheckpointLoader._schemes == schemes
loaded = CheckpointLoader.load_checkpoint('stock.pth', map_location='cpu')
assert loaded['message_hub']['log_scalars']['train/loss'].current() == 1 / 3
import torch
load_checkpoint(torch.nn.Linear(5, 3, bias=False), 'stock.pth', strict=True)
try:
    CheckpointLoader.load_checkpoint('bad.pth', map_location='cpu')
except Exception as error:
    print(error)
"""


def test_the_prefix_alone_loads_checkpoint_code_with_the_first_file(tmp_path):
    torch.save(training_state(), tmp_path / 'stock.pth')
    torch.save(dict(state_dict=Call(eval, '1')), tmp_path / 'bad.pth')
    result = subprocess.run(
        [sys.executable, '-c', LAZY], capture_output=True, text=True, cwd=tmp_path
    )
    refused = "checkpoint 'bad.pth' is refused because it asks for eval"
    assert refused in result.stdout, result.stderr
