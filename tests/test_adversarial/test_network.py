"""Imports and training do not use the network."""

import json
import sys

import pytest

pytestmark = pytest.mark.adversarial
SCRIPT = """
import importlib, json, pkgutil, runpy, sys

met = []
WATCHED = ('socket.connect', 'socket.getaddrinfo', 'socket.gethostbyname', 'socket.sendto',
           'urllib.Request')
sys.addaudithook(lambda event, args: met.append(event) if event in WATCHED else None)

import aft_mm
for module in pkgutil.walk_packages(aft_mm.__path__, 'aft_mm.'):
    # Modules that wrap optional packages.
    if not {'triton', 'timm', 'transformers', '__main__'} & set(module.name.split('.')):
        importlib.import_module(module.name)
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
print(json.dumps(met))
import urllib.request
try:
    urllib.request.urlopen('http://127.0.0.1:9', timeout=1)
except OSError:
    print(json.dumps(met))
"""


def test_imports_and_a_training_speak_to_nobody(run, root, config, tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT)
    result = run(
        sys.executable,
        'script.py',
        root / 'tools/train.py',
        config('tiny_without_chance'),
        '--work-dir',
        'work',
        '--cfg-options',
        'train_cfg.max_epochs=1',
        'train_dataloader.num_workers=0',
        'param_scheduler=None',
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / 'work/epoch_1.pth').exists()
    before, after = map(json.loads, result.stdout.splitlines()[-2:])
    assert before == [] and 'socket.connect' in after  # which shows that it would be seen
