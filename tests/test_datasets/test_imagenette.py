"""Folders of images, read as the configs read them."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope

CONFIGS = Path(__file__).parents[2] / 'configs'


@pytest.fixture
def imagenette(monkeypatch):
    def build(root, split='train'):
        monkeypatch.setenv('AFT_MM_DATA', str(root))
        config = Config.fromfile(CONFIGS / '_base_/datasets/imagenette.py')
        init_default_scope('mmpretrain')
        return DATASETS.build(config[f'{split}_dataloader'].dataset)

    return build


@pytest.fixture
def written_root(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    for wnid in range(10):
        folder = tmp_path / 'imagenette' / 'train' / f'n0{wnid}'
        folder.mkdir(parents=True)
        cv2.imwrite(str(folder / 'image.JPEG'), image)
    return tmp_path


def test_variable_points_at_the_data(imagenette, written_root):
    dataset = imagenette(written_root)

    assert len(dataset) == 10
    sample = dataset[3]
    assert sample['inputs'].shape == (3, 64, 64)
    assert sample['data_samples'].gt_label.item() == 3


def test_missing_folder_is_named(imagenette, tmp_path):
    with pytest.raises(FileNotFoundError, match='imagenette/train'):
        imagenette(tmp_path)


@pytest.mark.parametrize('kept', [100, 2000])
def test_truncated_jpeg_is_named(imagenette, written_root, kept):
    path = written_root / 'imagenette' / 'train' / 'n04' / 'image.JPEG'
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(Exception, match=str(path)):
        imagenette(written_root)[4]


def test_data_pack(imagenette, pack):
    root = pack('imagenette').parent
    train, val = imagenette(root, 'train'), imagenette(root, 'val')

    assert train.metainfo['classes'][0] == 'tench' and len(train.metainfo['classes']) == 10
    for dataset in (train, val):
        labels = dataset.get_gt_labels()
        assert np.bincount(labels).min() == np.bincount(labels).max()
        # Greyscale files come out with three channels, too.
        assert all(dataset[i]['inputs'].shape == (3, 64, 64) for i in range(0, len(dataset), 29))
