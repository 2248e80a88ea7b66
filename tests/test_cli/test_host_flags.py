"""The flags of the hosts' tools in `aft_mm train` and `aft_mm test`, for a classifier."""

import pickle

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.visualization import Visualizer
from PIL import Image

from aft_mm.apis.loading import build_model

from ..errors import stops


@pytest.fixture
def untested(config, tmp_path, monkeypatch):
    """Config without test-time augmentation, and random weights."""
    monkeypatch.chdir(tmp_path)
    cfg = Config.fromfile(config('tiny'), import_custom_modules=False)
    cfg.custom_imports.imports = ['aft_mm.registry']
    for key in ('tta_model', 'tta_pipeline', 'custom_hooks', 'default_hooks'):
        cfg.pop(key)
    cfg.dump('digits.py')
    torch.manual_seed(0)
    model = build_model(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save(dict(state_dict=model.state_dict(), meta={}), 'digits.pth')
    return 'digits.py', 'digits.pth'


@pytest.fixture
def scores(untested, tool, tmp_path):
    def test(name, *words, config=untested[0]):
        path, unique = f'{name}.pkl', f'{tmp_path.name}-{name}'
        options = [f'experiment_name={unique}', f'visualizer.name={unique}']
        files = config, untested[1], '--dump', path
        tool('test').main([*files, *words, '--cfg-options', *options])
        samples = pickle.loads(open(path, 'rb').read())
        return torch.stack([sample['pred_score'] for sample in samples])

    return test


def test_tta_averages_over_the_mirror_image_by_default(scores, untested):
    mirrored = Config.fromfile(untested[0])
    steps = [dict(type='RandomFlip', prob=1.0), dict(type='PackInputs')]
    mirrored.test_dataloader.dataset.pipeline = steps
    mirrored.dump('mirrored.py')
    plain, flipped = scores('plain'), scores('flipped', config='mirrored.py')
    torch.testing.assert_close(scores('tta', '--tta'), (plain + flipped) / 2)
    assert not torch.equal(plain, flipped)


def test_a_picture_of_each_image_is_written(scores, untested, tool, capsys):
    scores('shown', '--show-dir', 'pictures')
    assert 'pictures   65 of 65 images in pictures\n' in capsys.readouterr().out
    assert all(np.asarray(Image.open(f'pictures/{index}_0.png')).std() > 0 for index in range(65))
    words = [*untested, '--show-dir', 'pictures']
    stops("--show-dir must be a new or empty folder, got 'pictures'", tool('test').main, words)


def test_a_window_stays_as_long_as_asked(scores, untested, tool, monkeypatch):
    times = []
    monkeypatch.setattr('matplotlib.get_backend', lambda: 'TkAgg')
    monkeypatch.setattr(
        Visualizer, 'show', lambda self, image, win_name='', wait_time=0.0: times.append(wait_time)
    )
    scores('window', '--show', '--wait-time', '0.5')
    scores('default', '--show')
    assert times == [0.5] * 65 + [2.0] * 65
    stops(
        '--wait-time must be a finite number, 0 or',
        tool('test').main,
        [*untested, '--show', '--wait-time', '-1'],
    )


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--wait-time', '1'], '--wait-time has no effect without --show'),
        (['--show-dir', 'a', '--wait-time', '1'], '--wait-time has no effect without --show'),
        (['--show'], '--show needs a display; --show-dir writes'),
        (['--show-dir', 'a', '--tta'], '--tta and pictures cannot be combined for a classifier'),
        (['--show-dir', 'digits.py'], '--show-dir must be a new or empty folder'),
    ],
)
def test_flags_without_an_effect_are_refused(words, message, untested, tool, monkeypatch):
    monkeypatch.setattr('matplotlib.get_backend', lambda: 'agg')
    stops(message, tool('test').main, [*untested, *words])


def test_other_tasks_have_no_such_flags(untrained, tool):
    for words in (['--show-dir', 'a'], ['--tta']):
        stops(
            f'{words[0]}.* is for classifiers, detectors and segmentors, got .*text.py',
            tool('test').main,
            [*untrained['tiny_text'], *words],
        )


@pytest.mark.parametrize('command', ['train', 'test'])
def test_data_loaders_follow_the_flags(command, untested, tool):
    module, files = tool(command), untested if command == 'test' else untested[:1]
    options = [
        f'{part}_dataloader.{key}'
        for part in ('train', 'val', 'test')
        for key in ('pin_memory=True', 'persistent_workers=True', 'num_workers=1')
    ]

    def loaders(*words):
        args = module.parse_args([*files, *words, '--cfg-options', *options])
        cfg = module.load_run_config(args)
        parts = [cfg[f'{part}_dataloader'] for part in ('train', 'val', 'test')]
        return {(part.pin_memory, part.persistent_workers) for part in parts}

    assert loaders() == {(True, True)}
    assert loaders('--no-pin-memory') == {(False, True)}
    assert loaders('--no-persistent-workers') == {(True, False)}
