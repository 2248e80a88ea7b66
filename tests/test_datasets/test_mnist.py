"""MNIST in its original files."""

import gzip

import numpy as np
import pytest
from mmengine.registry import DATASETS, init_default_scope

from aft_mm.datasets import MNISTIdx, small_images

from ..errors import refuses


def idx(array, code=8):
    header = bytes([0, 0, code, array.ndim]) + np.array(array.shape, '>i4').tobytes()
    return header + array.tobytes()


@pytest.fixture
def written(tmp_path):
    rng = np.random.default_rng(0)
    for folder in ('plain', 'packed'):
        (tmp_path / folder).mkdir()
    for prefix, count in dict(train=7, t10k=5).items():
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        for name, array in {'images-idx3': images, 'labels-idx1': labels}.items():
            name = f'{prefix}-{name}-ubyte'
            (tmp_path / 'plain' / name).write_bytes(idx(array))
            (tmp_path / 'packed' / f'{name}.gz').write_bytes(gzip.compress(idx(array)))


@pytest.mark.parametrize('folder', ['plain', 'packed'])
@pytest.mark.parametrize('split, count, official', [('train', 7, '60,000'), ('test', 5, '10,000')])
def test_samples_are_those_of_mmpretrain(
    tmp_path, written, folder, split, count, official, monkeypatch
):
    init_default_scope('mmpretrain')
    settings = dict(split=split, test_mode=split == 'test', download=False)
    other = DATASETS.build(dict(settings, type='MNIST', data_root=str(tmp_path / 'plain')))
    said = []
    monkeypatch.setattr(small_images, 'warn', said.append)
    own = MNISTIdx(str(tmp_path / folder), split)
    place = f'{tmp_path / folder} has {count} images in its {split} split'
    assert said == [f'{place}, not the {official} of MNIST']
    assert len(own) == len(other) == count
    for one, two in zip(own, other, strict=True):
        np.testing.assert_array_equal(one['img'], two['img'])
        assert one['gt_label'] == two['gt_label']


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('images-idx3', lambda data: data[:-1], 'must have 5504 bytes .* got 5503'),
        ('images-idx3', lambda data: data[:9], 'not an idx file of bytes with 3 axes'),
        ('labels-idx1', lambda data: b'\0\0\x0d\1' + data[4:], 'not an idx file .* with 1 axes'),
        ('labels-idx1', lambda data: idx(np.zeros(6, np.uint8)), '7 images and 6 labels'),
        ('labels-idx1', lambda data: idx(np.full(7, 26, np.uint8)), 'must be 0 to 9, got 26'),
    ],
)
@pytest.mark.parametrize('folder', ['plain', 'packed'])
def test_damaged_files_are_named(tmp_path, written, folder, name, change, message):
    path = tmp_path / folder / f'train-{name}-ubyte{".gz" * (folder == "packed")}'
    if folder == 'plain':
        path.write_bytes(change(path.read_bytes()))
    else:
        path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
    with pytest.raises(ValueError, match=message):
        MNISTIdx(str(tmp_path / folder))


def test_missing_folder_and_unknown_split_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='train-images-idx3-ubyte.gz of MNIST does not'):
        MNISTIdx(str(tmp_path))
    for split in ('val', ['train']):
        refuses('^split must be one of train, test, got ', MNISTIdx, str(tmp_path), split)
    for folder in (None, '', 5):
        refuses('^data_root must be ', MNISTIdx, folder)


def test_files_without_an_image_are_refused(tmp_path):
    for name, shape in (('images-idx3', (0, 28, 28)), ('labels-idx1', (0,))):
        (tmp_path / f'train-{name}-ubyte').write_bytes(idx(np.zeros(shape, np.uint8)))
    refuses('has no image in its train split', MNISTIdx, str(tmp_path))


def test_data_pack(pack):
    train, test = (MNISTIdx(str(pack('mnist')), split) for split in ('train', 'test'))
    assert [train[i]['gt_label'] for i in range(3)] == [5, 0, 4]  # as MNIST begins
    assert test[0]['gt_label'] == 7
    assert train[0]['img'].shape == (28, 28) and train[0]['img'].max() == 255
