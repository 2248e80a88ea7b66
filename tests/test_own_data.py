"""The configs for own data, each trained briefly on files in the layout that it describes."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS
from PIL import Image
from torch.utils.data import DataLoader

from aft_mm.cli.commands import train as train_command
from aft_mm.datasets import ImageFolder
from aft_mm.engine import CheckpointCompatibilityHook
from aft_mm.engine.preflight import check_overlap, check_same_classes
from aft_mm.errors import UserError
from aft_mm.images import IMAGE_SUFFIXES

from .errors import refuses_input, stops
from .helpers import ROOT, command

FOLDER = ROOT / 'configs/own_data'
split_folder = command('split')


def save(path, mode, rng):
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == 'I;16':
        image = Image.fromarray(rng.integers(0, 2**16, (43, 61), dtype=np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 256, (43, 61, 3), dtype=np.uint8)).convert(mode)
    image.save(path)


@pytest.fixture
def train(tool, here):

    def call(pattern, *options, edit=lambda text: text, more=('--work-dir', 'work')):
        (path,) = FOLDER.glob(f'*{pattern}*.py')
        text = edit(path.read_text()).replace("'../_base_", f"'{ROOT}/configs/_base_")
        (here / 'my.py').write_text(text)
        tool('train').main(['my.py', *more, '--cfg-options', *options])

    return call


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    kinds = [('jpg', 'RGB'), ('jpeg', 'CMYK'), ('webp', 'RGB'), ('tiff', 'RGB')]
    kinds += [('png', mode) for mode in ('L', 'I;16', 'RGBA', 'P')]
    for name in ('cat', 'dog', 'wombat'):
        for number, (ending, mode) in enumerate(kinds):
            save(tmp_path / f'photos/{name}/sub/{number}.{ending}', mode, rng)
    return tmp_path


def test_every_config_is_listed():
    readme = (FOLDER / 'README.md').read_text()
    for path in FOLDER.glob('*.py'):
        assert f'({path.name})' in readme


def test_a_folder_without_parts_is_split_trained_on_and_tuned_further(
    photos, train, capfd, monkeypatch, with_plots
):
    split_folder(['photos', 'data/my_images', '--val', '0.3'])

    def files(folder):
        paths = (photos / folder).glob('*/**/*.*')
        return sorted(path.relative_to(photos / folder) for path in paths)

    train_part, val_part = (files(f'data/my_images/{part}') for part in ('train', 'val'))
    assert sorted(train_part + val_part) == files('photos')
    assert [path.parts[0] for path in val_part] == 'cat cat dog dog wombat wombat'.split()

    short = (
        'train_cfg.max_epochs=1 train_cfg.val_interval=1 train_dataloader.batch_size=6 '
        'train_dataloader.num_workers=0 val_dataloader.num_workers=0 '
        'val_dataloader.persistent_workers=False default_hooks.logger.interval=1'
    ).split()
    train('image-folder', *short)
    shown = capfd.readouterr().out
    assert re.search(
        'best       accuracy/top1 .* at epoch 1\ncheckpoint work/best_.*_epoch_1.pth', shown
    )
    assert 'curves     work/curves.png\nconfusion  work/confusion.png\n' in shown
    assert re.search('next       aft_mm predict my.py work/best_.* PATH --out predictions\n', shown)
    assert Path('work/curves.png').stat().st_size and Path('work/confusion.png').stat().st_size
    plots = []
    monkeypatch.setattr(train_command, 'plot', lambda *words, out: plots.append(words) or out)
    train('image-folder', *short, more=['--work-dir', 'work', '--resume'])
    shown = capfd.readouterr().out
    assert re.search('trained .* in all ─+\nbest       accuracy_top1 .* at epoch 1', shown)
    curves = 'curves', '--group', f'{photos.name}/work', f'{photos}/work'
    assert plots[0] == curves
    checkpoint = torch.load('work/epoch_1.pth', weights_only=True)
    assert checkpoint['meta']['dataset_meta']['classes'] == ('cat', 'dog', 'wombat')

    (photos / 'data/my_images/train/wombat').rename(photos / 'moved')
    match = "training set has 2 classes and the validation set 3.*: 'wombat' is in one only"
    stops(match, train, 'image-folder', *short)
    (photos / 'data/my_images/val/wombat').rename(photos / 'moved too')
    capfd.readouterr()
    train(
        'image-folder',
        *short,
        'load_from=work/epoch_1.pth',
        # mmengine keeps those of a process by name, and names runs by the second.
        'visualizer.name=tuned',
        'experiment_name=tuned',
        edit=lambda text: text.replace('classes = 3', 'classes = 2'),
        more=['--work-dir', 'tuned'],
    )
    assert plots[-2][-4:] == ('--metric', 'accuracy/top1', '--metric', 'loss')
    changed = 'head.fc.weight [3, 96] -> [2, 96], head.fc.bias [3] -> [2]'
    assert f'keep their initialisation: {changed}' in ''.join(capfd.readouterr())


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['nothing', 'out'], "folder 'nothing' does not exist"),
        (['photos/cat/sub', 'out'], 'must hold a folder of images for each class'),
        (['photos', 'out', '--val', '1.5'], '--val must be a finite number above 0 and at most'),
        (['photos', '.'], "'train' exists already"),
    ],
)
def test_folders_that_cannot_be_split(photos, monkeypatch, words, message):
    monkeypatch.chdir(photos)
    (photos / 'train').mkdir()
    stops(message, split_folder, words)
    assert not (photos / 'out').exists()


def test_folders_without_an_image_are_refused(train, tmp_path):
    for part in ('train', 'val'):
        (tmp_path / f'data/my_images/{part}/cat').mkdir(parents=True)
        (tmp_path / f'data/my_images/{part}/cat/1.txt').touch()
    match = r"train_dataloader.dataset reads '.*my_images/train', which holds no image in a folder "
    match += r'of its class; .* end in \.jpg'
    stops(match, train, 'image-folder', 'train_cfg.max_epochs=1')


def test_classes_in_another_order_are_refused():
    class Set:
        def __init__(self, *classes):
            self.metainfo = dict(classes=classes)

    check_same_classes(Set('a', 'b'), Set('a', 'b'))
    check_same_classes(Set(), Set('a'))  # a set that names none
    with pytest.raises(UserError, match='2 classes and the validation set 2.*their order differs'):
        check_same_classes(Set('a', 'b'), Set('b', 'a'))


@pytest.mark.parametrize('resume', [False, True])
@pytest.mark.parametrize('kind', ['classes', 'units'])
def test_a_checkpoint_of_other_classes_is_refused(resume, kind):
    def load(saved, given):
        loop = SimpleNamespace(dataloader=DataLoader(Named({kind: given})))
        model = torch.nn.Linear(2, 2)
        loops = dict(train_loop=loop) if resume else dict(test_loop=loop)
        runner = SimpleNamespace(model=model, experiment_name='', hooks=[], **loops)
        checkpoint = dict(meta=dict(dataset_meta=saved), state_dict=model.state_dict())
        CheckpointCompatibilityHook(resume=resume).after_load_checkpoint(runner, checkpoint)

    class Named(list):
        def __init__(self, metainfo):
            super().__init__([0])
            self.metainfo = metainfo

    load({kind: ['a', 'b']}, ('a', 'b'))
    load({}, ('a', 'b'))
    load({kind: ['a', 'b']}, None)  # data that name none
    load({kind: ('Ba\u0308r',)}, ['B\u00e4r'])  # of macOS, and composed
    for odd in (5, True, np.ones(3), 'ab'):  # of another program
        load({kind: odd}, ('a', 'b'))
    for given, end in [
        (('b', 'a'), 'order differs'),
        (('a', 'c\x1b'), r"'b', 'c\\x1b' are"),
        (('a',), "'b' is"),
    ]:
        message = f'trained with 2 {kind} and the data have {len(given)}.*{end}'
        refuses_input(message, load, {kind: ['a', 'b']}, given)


def test_validation_files_that_are_trained_on_are_announced(photos):
    kinds = [ImageFolder(str(photos / 'photos' / kind)) for kind in ('cat', 'dog')]
    both = ImageFolder(str(photos / 'photos'))

    def said(trained, validated):
        logger, loops = MagicMock(), {}
        for name, dataset in dict(train_loop=trained, val_loop=validated).items():
            loops[name] = dataset and SimpleNamespace(dataloader=SimpleNamespace(dataset=dataset))
        check_overlap(Config(), SimpleNamespace(logger=logger, **loops))
        return [call.args[0] for call in logger.warning.call_args_list]

    assert said(*kinds) == said(both, None) == said([1], [1]) == []
    (line,) = said(kinds[0], both)
    assert line.startswith('8 of the 24 files of the validation set are also in the training set')
    assert 'cat/sub/0.jpg' in line


def test_a_text_file(train, tmp_path):
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data/my_text.txt').write_text('All happy families are alike. ' * 300, 'utf-8')
    train('text-file', 'train_dataloader.dataset.samples_per_epoch=16', 'train_cfg.max_epochs=1')
    assert Config.fromfile('work/my.py').data_file == 'data/my_text.txt'
    assert (tmp_path / 'work/epoch_1.pth').exists()


def test_the_dataset_reads_every_image_format():
    config = Config.fromfile(ROOT / 'configs/_base_/datasets/image_folder.py')
    assert set(config.extensions) == set(IMAGE_SUFFIXES)


def test_names_of_the_classes_from_a_file(photos, monkeypatch):
    monkeypatch.chdir(photos)
    split_folder(['photos', 'here'])
    Path('classes.txt').write_text('Katze\nHund\nNacktnasenwombat\n', 'utf-8')
    folder = dict(data_root='here', data_prefix='val', pipeline=[], classes='classes.txt')
    dataset = DATASETS.build(dict(folder, type='mmpretrain.CustomDataset'))
    assert tuple(dataset.metainfo['classes']) == ('Katze', 'Hund', 'Nacktnasenwombat')
