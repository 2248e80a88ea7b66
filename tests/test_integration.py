"""Whole runs through the tools: one and two processes, testing, no use of the network."""

import json
import re
import sys

import numpy as np
import pytest
import torch

from aft_mm.analysis.run_logs import read_scalars

from .helpers import losses

# In the middle of the third epoch: the tiny configs train 3 epochs of 6 iterations.
KILL = {'KILL_AFTER': '15'}
# Imports all of aft_mm, runs scripts with their arguments, and prints what used the network, without
# and with a request.
WATCHED = """
import importlib, json, pkgutil, runpy, sys

met = []
EVENTS = ('socket.connect', 'socket.getaddrinfo', 'socket.gethostbyname', 'socket.sendto',
          'urllib.Request')
sys.addaudithook(lambda event, args: met.append(event) if event in EVENTS else None)

import aft_mm
for module in pkgutil.walk_packages(aft_mm.__path__, 'aft_mm.'):
    # Modules that wrap optional packages.
    if not {'triton', 'timm', 'transformers', '__main__'} & set(module.name.split('.')):
        importlib.import_module(module.name)
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name='__main__')
print(json.dumps(met))
import urllib.request
try:
    urllib.request.urlopen('http://127.0.0.1:9', timeout=1)
except OSError:
    print(json.dumps(met))
"""

pytestmark = pytest.mark.slow


def load(path):
    return torch.load(path, map_location='cpu', weights_only=True)


def assert_same(one, other, path='checkpoint'):
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f'{path}.{key}')
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f'{path}.{index}')
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other, path


def write_data(folder):
    rng = np.random.default_rng(0)
    text = rng.choice(np.frombuffer(b'etaoin shrdlu', np.uint8), 4000)
    (folder / 'text.txt').write_bytes(text.tobytes())
    for index, points in enumerate(rng.normal(size=(26, 9, 3))):
        path = folder / 'clouds/chair' / ('val', 'train')[index > 1] / f'{index}.npy'
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, points)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture(scope='module')
def one_process(run, root, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp('one')
    result = run(
        root / 'tools/train.py', config('tiny_without_chance'), '--work-dir', '.', cwd=folder
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope='module')
def two_processes(run, root, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp('two')
    name = config('tiny_without_chance')
    words = '--work-dir . --cfg-options train_dataloader.batch_size=8'.split()
    launch = root / 'tools/launch.py', 'train', name, 2  # what dist_train.sh calls
    result = run(*launch, *words, cwd=folder, env={**KILL, 'KILL_RANK': '1'})
    assert result.returncode == 1 and (folder / 'epoch_2.pth').exists(), result.stderr
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(r'Error: process 1 \(pid \d+\): it was killed by SIGKILL', last)
    assert not (folder / 'epoch_3.pth').exists()
    words = *'--launcher pytorch --resume epoch_2.pth'.split(), *words
    result = run(root / 'tools/train.py', name, *words, cwd=folder, ranks=2)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.nightly
def test_nothing_uses_the_network(run, root, config, tmp_path):
    write_data(tmp_path)
    (tmp_path / 'script.py').write_text(WATCHED)
    script = str(root / 'tools/train.py')
    digits = '--work-dir work --cfg-options train_cfg.max_epochs=1 param_scheduler=None'.split()
    words = [
        [script, config('tiny_text'), '--amp', '--work-dir', '.'],
        [script, config('tiny_without_chance'), *digits, 'train_dataloader.num_workers=0'],
    ]
    result = run(sys.executable, 'script.py', json.dumps(words), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / 'work/epoch_1.pth').exists()
    before, after = map(json.loads, result.stdout.splitlines()[-2:])
    assert before == [] and 'socket.connect' in after  # which shows that it would be seen


def test_training_moves_the_weights_and_the_average_follows(one_process):
    first, last = (load(one_process / f'epoch_{epoch}.pth') for epoch in (1, 3))
    for key, value in last['state_dict'].items():
        assert not torch.equal(value, first['state_dict'][key]), key
        assert not torch.equal(value, last['ema_state_dict'][f'module.{key}']), key


def test_two_processes_have_the_loss_and_the_weights_of_one(one_process, two_processes):
    one = losses(one_process)
    ranks = [losses(two_processes, rank) for rank in (0, 1)]
    assert one.keys() == ranks[0].keys() == ranks[1].keys()
    both = [np.mean([rank[iteration] for rank in ranks]) for iteration in one]
    np.testing.assert_allclose(both, list(one.values()), rtol=2e-5)
    assert ranks[0] != ranks[1]
    one, two = (load(path / 'epoch_3.pth')['state_dict'] for path in (one_process, two_processes))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_tested_in_one_process_in_two_and_on_a_cluster_alike(
    run, root, config, one_process, tmp_path
):
    test = root / 'tools/test.py', config('tiny_without_chance'), one_process / 'epoch_3.pth'
    slurm = dict(SLURM_PROCID='0', SLURM_NTASKS='1', SLURM_LOCALID='0', MASTER_ADDR='127.0.0.1')
    results = []
    for words, options in (
        ([], {}),
        (['--launcher', 'pytorch'], dict(ranks=2)),
        (['--launcher', 'slurm'], dict(env=slurm)),
    ):
        done = run(*test, *words, '--out', 'out.json', cwd=tmp_path, **options)
        assert done.returncode == 0, done.stderr
        results.append(json.loads((tmp_path / 'out.json').read_text()))
        (tmp_path / 'out.json').unlink()
    assert results[0] == results[1] == results[2]
    # The last validation in training had the same weights.
    last = read_scalars(one_process)[-1]
    assert results[0]['accuracy/top1'] == pytest.approx(last['accuracy/top1'])
