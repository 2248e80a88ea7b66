"""``aft_mm publish`` and ``aft_mm release``: files are written and read again."""

import hashlib
import http.server
import io
import json
import pickle
import re
import sys
import threading
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.model import ExponentialMovingAverage
from mmengine.runner import CheckpointLoader
from safetensors.torch import load_file, save_file
from torch import nn

from aft_mm.checkpoint import load_from_http, load_from_hub, load_from_local, write_safetensors
from aft_mm.cli.commands import release_weights
from aft_mm.convert import data_licenses
from aft_mm.errors import UserError
from aft_mm.registry import register_safe_loading

from ..documents import WRITTEN
from ..errors import stops
from ..helpers import ROOT, command

# Text of a config that trains on the digits.
DIGITS = "train_dataloader = dict(dataset=dict(type='aft_mm.Digits'))"
publish, release = command('publish'), command('release')


@pytest.fixture
def trained(tmp_path):
    """Write a checkpoint of a training with EMAHook."""
    model = nn.Linear(3, 2)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hook = EMAHook()
    hook.ema_model = ExponentialMovingAverage(model, momentum=0.5)
    nn.init.zeros_(hook.ema_model.module.weight)
    average = {name: x.clone() for name, x in hook.ema_model.module.state_dict().items()}
    meta = dict(cfg='a = 1', seed=3, epoch=7, dataset_meta=dict(classes=('cat', 'dog'), roots=[1]))
    checkpoint = dict(meta=meta, state_dict=dict(model.state_dict()), optimizer={}, message_hub={})
    hook.before_save_checkpoint(None, checkpoint)
    torch.save(checkpoint, tmp_path / 'trained.pth')
    return weights, average


@pytest.mark.parametrize('options', [[], ['--ema']], ids=str)
def test_published_files_contain_only_weights(options, trained, tmp_path, capsys):
    (tmp_path / 'm.json').write_text('{"accuracy/top1": 42.5}')
    known = ['--metrics', str(tmp_path / 'm.json'), '--license', 'MIT', '--command', 'make a b']
    words = [str(tmp_path / 'trained.pth'), str(tmp_path / 'a/model.pth'), *options, *known]
    publish(words)
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    for path, suffix in zip(paths, ('.safetensors', '.pth'), strict=True):
        digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        assert path == tmp_path / f'a/model-{digits}{suffix}'
    assert set(paths[0].parent.iterdir()) == set(paths)
    meta = dict(
        cfg='a = 1', epoch=7, seed=3, dataset_meta=dict(classes=('cat', 'dog')), license='MIT'
    )
    meta |= dict(command='make a b', metrics={'accuracy/top1': 42.5})
    expected = trained[bool(options)]
    published = torch.load(paths[1], weights_only=True)
    assert published.keys() == {'meta', 'state_dict'} and published['meta'] == meta
    loaded = load_from_local(str(paths[0]))
    assert loaded['meta'] == {**meta, 'dataset_meta': dict(classes=['cat', 'dog'])}
    for state in (published['state_dict'], loaded['state_dict'], load_file(paths[0])):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor)
    for path in paths:  # the bytes are reproducible
        path.unlink()
    publish(words)
    assert all(path.exists() for path in paths)


def test_published_files_keep_the_versions_of_the_layers(tmp_path, capsys):
    model = nn.Sequential(nn.BatchNorm1d(3))
    meta = dict(experiment_name='bn_1xb8_x_20261122_080606', cfg=DIGITS)
    torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'trained.pth')
    publish([str(tmp_path / 'trained.pth'), str(tmp_path / 'model.safetensors')])
    for path in capsys.readouterr().out.split():
        published = load_from_local(path)
        assert published['state_dict']._metadata == model.state_dict()._metadata
        assert published['meta']['command'] == 'aft_mm train bn_1xb8_x'
        assert published['meta']['license'] == 'Apache-2.0'


def test_the_licence_of_weights_follows_from_the_training_data():
    code = ''.join(path.read_text() for path in sorted(ROOT.glob('configs/**/*.py')))
    found = set(re.findall(r'AFT_MM_DATA:data}}/([\w.]+)', code))
    classes = 'Digits CopyTask AssociativeRecall ListOps Pathfinder'.split()
    found |= {f'aft_mm.{name}' for name in classes}
    found -= {'images', 'my_boxes', 'my_images', 'my_masks', 'my_text.txt'}  # data of one's own
    assert found == data_licenses.DATA_SETS.keys()
    for name in found:
        kind = (data_licenses.DATA_SETS[name].types or name).split()[0]
        dataset = dict(type=kind, data_root=f'/mnt/{name}/train')
        text = Config(dict(train_dataloader=dict(dataset=dataset), load_from=None)).pretty_text
        if (expected := data_licenses.DATA_SETS[name].weights) is not None:
            assert data_licenses.weights_license(text) == expected
            continue
        with pytest.raises(UserError, match=r'--license must be given: the terms of .* do not'):
            data_licenses.weights_license(text)
    assert data_licenses.table() in WRITTEN['docs/tables/licences.md']


@pytest.mark.parametrize(
    ('config', 'reason'),
    [
        ("train_dataloader = dict(dataset=dict(data_root='data/photos'))", 'data .unknown.'),
        ("val_dataloader = dict(dataset=dict(data_root='data/bccd'))", 'data .unknown.'),
        ("train_dataloader = dict(type='CustomDataset', a='/home/x/mnist/dogs')", 'data .unknown.'),
        (
            "train_dataloader = dict(a=dict(type='VOCDataset', b='data/bccd'), "
            "c=dict(type='aft_mm.MNISTIdx', d='data/mnist'))",
            'data .MNIST, BCCD.',
        ),
        (f"{DIGITS}\nload_from = 'a.pth'", 'started from other weights'),
        (f"{DIGITS}\nmodel = dict(init_cfg=dict(type='Pretrained'))", 'started from other weights'),
        ('not Python', 'data .unknown.'),
    ],
)
def test_a_licence_that_does_not_follow_must_be_given(config, reason):
    with pytest.raises(UserError, match=f'^--license must be given: .*{reason}'):
        data_licenses.weights_license(config)


def test_existing_files_and_missing_averages_are_refused(trained, tmp_path):
    words = [str(tmp_path / 'trained.pth'), str(tmp_path / 'model.pth')]
    stops('--license must be given', publish, words)
    words += ['--license', 'MIT']
    publish(words)
    stops('exists already and was not changed', publish, words)
    (tmp_path / 'm.json').write_text('[1]')
    more = ['--metrics', str(tmp_path / 'm.json')]
    stops('m.json. must hold metrics or rows by name', publish, [*words, *more])
    torch.save(dict(state_dict=trained[0]), words[0])
    stops('--ema needs the averaged weights of EMAHook', publish, [*words, '--ema'])
    torch.save(trained[0], words[0])
    stops('must hold a state_dict', publish, words)
    words[1] = str(tmp_path / 'model.bin')
    stops('OUT.pth must end in .safetensors or .pth', publish, words)
    assert len(list(tmp_path.iterdir())) == 4


def test_runs_are_released_with_hashes_and_their_own_metrics(tmp_path):
    run = tmp_path / 'run'
    (run / '1/vis_data').mkdir(parents=True)
    records = [
        dict(iter=2, epoch=1, loss=1.0),
        dict(top1=30.0, step=1),
        dict(iter=4, epoch=2, loss=1.0),
        dict(top1=40.0, step=2),
    ]
    (run / '1/vis_data/scalars.json').write_text('\n'.join(map(json.dumps, records)))
    model = nn.Linear(3, 2)
    meta = dict(iter=4, epoch=2, experiment_name='a_20261122_080606')
    state = dict(state_dict=model.state_dict(), meta=meta, optimizer={})
    torch.save(state, run / 'epoch_2.pth')
    (run / 'last_checkpoint').write_text(str(run / 'epoch_2.pth'))
    out = ['--out', str(tmp_path / 'new')]
    stops('--license must be given', release, [str(run), *out])
    release([str(run), '--out', str(tmp_path / 'out'), '--license', 'MIT'])
    entries = json.loads((tmp_path / 'out/weights.json').read_text())
    sums = dict(line.split()[::-1] for line in (tmp_path / 'out/SHA256SUMS').open())
    assert len(entries) == len(sums) == 2
    for entry in entries:
        path = tmp_path / 'out' / entry['file']
        assert entry['name'] == 'a' and entry['metrics'] == dict(top1=40.0)
        assert entry['license'] == 'MIT'
        assert sums[path.name] == entry['sha256'] == hashlib.sha256(path.read_bytes()).hexdigest()
        loaded = load_from_local(str(path))
        assert torch.equal(loaded['state_dict']['weight'], model.weight)
    assert release_weights.metrics_at(str(run), 3) == {}  # a checkpoint that was not validated
    assert 'metrics of | metrics |' in (tmp_path / 'out/a.md').read_text()
    words = ['--license', 'MIT', '--address', 'hf://org/name']
    stops("no metafile of configs/ has an entry 'a'", release, [str(run), *out, *words])
    words = [str(run), '--out', str(tmp_path / 'c'), '--address', 'org']
    stops("--address must begin with hf:// or https://, got 'org'", release, words)
    stops(
        '--out must be a new or empty folder',
        release,
        [str(run), '--out', str(tmp_path / 'out')],
    )
    stops(
        'has no checkpoint of a run',
        release,
        [str(tmp_path / 'out'), '--out', str(tmp_path / 'c')],
    )


def test_seeds_share_a_model_card_with_their_test_metrics(tmp_path):
    config = f"{DIGITS}\noptim_wrapper = dict(optimizer=dict(lr=0.5, type='AdamW'))"
    for seed, accuracy in enumerate((97.0, 98.0, 99.0)):
        run = tmp_path / f'run{seed}'
        run.mkdir()
        command = 'aft_mm train a --amp' + f' --cfg-options randomness.seed={seed}' * (seed > 0)
        meta = dict(iter=4, seed=seed, experiment_name='a_20261122_080606', cfg=config)
        hub = dict(runtime_info=dict(command=command))
        weights = nn.Linear(3, 2).state_dict()
        state = dict(state_dict=weights, meta=meta, message_hub=hub, optimizer={})
        torch.save(state, run / 'epoch_2.pth')
        (run / 'last_checkpoint').write_text(str(run / 'epoch_2.pth'))
        (run / 'metrics.json').write_text(json.dumps(dict(top1=accuracy, top5=100.0)))
    runs = [str(tmp_path / f'run{seed}') for seed in range(3)]
    release([*runs, '--out', str(tmp_path / 'out')])
    entries = json.loads((tmp_path / 'out/weights.json').read_text())
    assert [entry['seed'] for entry in entries] == [0, 0, 1, 1, 2, 2]
    assert {entry['split'] for entry in entries} == {'test'}
    card = (tmp_path / 'out/a.md').read_text()
    # 4.303, the 97.5 % quantile of Student's t for two degrees of freedom, over the root of 3
    assert (
        '- top1: 98 ± 2.5\n- top5: 100 ± 0\n' in card
        and "- optimizer: dict(lr=0.5, type='AdamW')" in card
    )
    assert (
        'handwritten digits' in card
        and '`aft_mm train a --amp --cfg-options randomness.seed=1`' in card
    )
    for entry in entries:
        assert f'{entry["sha256"]}  {entry["file"]}' in card
    # Another recipe is no further seed.
    hub['runtime_info']['command'] = 'aft_mm train a'
    torch.save(state, run / 'epoch_2.pth')
    release([*runs, '--out', str(tmp_path / 'other')])
    assert 'Mean of' not in (tmp_path / 'other/a.md').read_text()


def test_a_release_is_listed_in_the_metafile(tmp_path, monkeypatch):
    original = (ROOT / 'configs/image_classification/metafile.yml').read_text()
    copy = tmp_path / 'configs/image_classification/metafile.yml'
    copy.parent.mkdir(parents=True)
    copy.write_text(original)
    monkeypatch.setattr(release_weights, 'install_root', lambda: tmp_path)
    name = 'aft-conv-quickstart_1xb64-50e_digits'
    state = dict(
        state_dict=nn.Linear(3, 2).state_dict(),
        optimizer={},
        meta=dict(iter=4, epoch=2, experiment_name=f'{name}_20261122_080606', cfg=DIGITS),
    )
    torch.save(state, tmp_path / 'epoch_2.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_2.pth'))
    for address in ('hf://org/old', 'https://host/release/'):  # a later address replaces the first
        out = tmp_path / address[:2]
        release([str(tmp_path), '--out', str(out), '--address', address])
    (path,) = out.glob('*.safetensors')
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = yaml.safe_load(original)
    (model,) = (model for model in expected['Models'] if model['Name'] == name)
    model['Weights'] = f'https://host/release/{path.name}#sha256={digest}'
    assert yaml.safe_load(copy.read_text()) == expected
    # Comments and other entries do not change.
    rest = [line for line in copy.read_text().splitlines() if 'Weights: ' not in line]
    assert rest == [line for line in original.splitlines() if 'Weights: ' not in line]


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    state = nn.Linear(3, 2).state_dict()
    with open(tmp_path / 'a.safetensors', 'wb') as stream:
        write_safetensors(stream, dict(state_dict=state, meta=dict(cfg='a = 1', epoch=3)))
    return tmp_path / 'a.safetensors', state


def test_safetensors_load_through_mmengine_with_and_without_metadata(file, tmp_path):
    path, state = file
    register_safe_loading()
    loaded = CheckpointLoader.load_checkpoint(str(path), map_location='cpu')
    assert torch.equal(loaded['state_dict']['weight'], state['weight'])
    # The text of a config is a program, and mmengine's inferencers would run `cfg`.
    assert loaded['meta'] == dict(epoch=3, config_text='a = 1')
    save_file(dict(a=torch.ones(2, dtype=torch.bfloat16)), tmp_path / 'b.safetensors')
    other = load_from_local(str(tmp_path / 'b.safetensors'))
    assert other['meta'] == {} and other['state_dict']['a'].dtype == torch.bfloat16
    shared = torch.randn(4)
    with pytest.raises(RuntimeError, match='share memory'):
        write_safetensors(io.BytesIO(), dict(state_dict=dict(a=shared, b=shared)))


META = rb'{\"cfg\": \"a = 1\", \"epoch\": 3}'


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda data: data[:-1], 'is damaged'),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), 'do not match the sha256'),
        (lambda data: data.replace(b'{\\"meta', b'[\\"meta'), 'is damaged'),
        (lambda data: data.replace(META, b'3'.ljust(len(META))), 'holds a int as meta'),
        (lambda data: b'PK' + data, 'is damaged'),
    ],
)
def test_a_damaged_safetensors_file_has_a_one_line_message(file, change, message):
    path, _ = file
    data = path.read_bytes()
    path.write_bytes(change(data))
    assert path.read_bytes() != data
    with pytest.raises(pickle.UnpicklingError, match=message):
        load_from_local(str(path))


class Hub:
    def __init__(self, folder):
        self.folder, self.asked = folder, []

    def hf_hub_download(self, repo, filename, revision=None):
        self.asked.append((repo, filename, revision))
        if repo == 'org/away':
            raise LocalEntryNotFoundError('An error happened.\nCheck your internet connection.')
        if not (self.folder / filename).exists():
            raise HfHubHTTPError('404 Client Error: Entry Not Found', response=MagicMock())
        return str(self.folder / filename)


def test_checkpoints_from_a_hub(file, monkeypatch):
    path, state = file
    hub = Hub(path.parent)
    monkeypatch.setattr('huggingface_hub.hf_hub_download', hub.hf_hub_download)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for address, asked in (
        ('hf://org/name/a.safetensors', ('org/name', 'a.safetensors', None)),
        (f'hf://org/name@v1/a.safetensors#sha256={digest}', ('org/name', 'a.safetensors', 'v1')),
    ):
        loaded = CheckpointLoader.load_checkpoint(address, map_location='cpu')
        assert torch.equal(loaded['state_dict']['bias'], state['bias']) and hub.asked[-1] == asked
    # In a subfolder of the repository; and a pickle, which is loaded safely.
    (path.parent / 'deep').mkdir()
    torch.save(dict(state_dict=state, call=print), path.parent / 'deep/b.pth')
    with pytest.raises(pickle.UnpicklingError, match='b.pth. is refused because it asks for print'):
        load_from_hub('hf://org/name/deep/b.pth')


@pytest.mark.parametrize(
    ('address', 'message'),
    [
        ('hf://org/name', 'must be hf://ORG/NAME/FILE'),
        ('hf://org/away/a.safetensors', 'cannot be downloaded: An error happened.$'),
        ('hf://org/name/no.pth', 'cannot be downloaded: 404 Client Error: Entry Not Found'),
        ('hf://org/name/a.safetensors#sha256=' + 64 * '0', 'is refused: its sha256 begins with'),
        ('hf://org/name/a.safetensors#main', 'must end in #sha256= and 64 digits'),
    ],
)
def test_a_failed_hub_download_has_a_one_line_message(file, address, message, monkeypatch):
    monkeypatch.setattr('huggingface_hub.hf_hub_download', Hub(file[0].parent).hf_hub_download)
    with pytest.raises(UserError, match=message) as error:
        load_from_hub(address)
    assert '\n' not in str(error.value)


def test_a_hub_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(UserError, match=r'needs huggingface_hub: pip install aft_mm\[hub\]'):
        load_from_hub('hf://org/name/a.safetensors')


def test_files_of_an_http_server_are_as_safe_as_others(file, tmp_path, monkeypatch):
    path, state = file
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'hub'))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    torch.save(dict(state_dict=state, call=print), tmp_path / 'bad.pth')
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f'http://127.0.0.1:{server.server_port}'
        address = f'{host}/a.safetensors#sha256='
        loaded = CheckpointLoader.load_checkpoint(address + digest, map_location='cpu')
        with pytest.raises(UserError, match=f'is refused: its sha256 begins with {digest[:8]}'):
            load_from_http(address + digest[::-1])
        with pytest.raises(pickle.UnpicklingError, match='bad.pth.* asks for print'):
            CheckpointLoader.load_checkpoint(f'{host}/bad.pth', map_location='cpu')
        server.shutdown()
    assert torch.equal(loaded['state_dict']['weight'], state['weight'])
    assert len(list((tmp_path / 'hub').rglob('*.safetensors'))) == 1
