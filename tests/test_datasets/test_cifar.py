"""CIFAR-10 in both distributed formats."""

import hashlib
import lzma
import pickle

import numpy as np
import pytest
from mmengine.registry import DATASETS, init_default_scope

from aft_mm.datasets import CIFAR10Binary, small_images

RECORDS = 7
NAMES = [*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch']


@pytest.fixture
def batches():
    """Random labels [7] and pixels [7, 3072] (planes R, G, B) for each of the six files."""
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.integers(0, 10, RECORDS, dtype=np.uint8),
            rng.integers(0, 256, (RECORDS, 3072), dtype=np.uint8),
        )
        for name in NAMES
    }


@pytest.fixture
def binary_root(tmp_path, batches):
    folder = tmp_path / 'cifar-10-batches-bin'
    folder.mkdir()
    for name, (labels, pixels) in batches.items():
        np.concatenate([labels[:, None], pixels], axis=1).tofile(folder / f'{name}.bin')
    return tmp_path


@pytest.fixture
def pickle_root(tmp_path, batches, monkeypatch):
    """The python distribution; its MD5 list is that of the files written here."""
    init_default_scope('mmpretrain')
    folder = tmp_path / 'cifar-10-batches-py'
    folder.mkdir()
    sums = {}
    for name, (labels, pixels) in batches.items():
        content = pickle.dumps(dict(data=pixels, labels=labels.tolist()))
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    dataset = DATASETS.get('mmpretrain.CIFAR10')
    monkeypatch.setattr(dataset, 'train_list', [[name, sums[name]] for name in NAMES[:5]])
    monkeypatch.setattr(dataset, 'test_list', [[NAMES[5], sums[NAMES[5]]]])
    return tmp_path


def build_pickle(root, split):
    return DATASETS.build(dict(type='CIFAR10', data_root=str(root), split=split, download=False))


@pytest.mark.parametrize('split, files', [('train', NAMES[:5]), ('test', NAMES[5:])])
def test_both_formats_give_the_same_samples(binary_root, pickle_root, split, files, monkeypatch):
    said = []
    monkeypatch.setattr(small_images, 'warn', said.append)
    binary, pickled = CIFAR10Binary(str(binary_root), split), build_pickle(pickle_root, split)
    assert [line.rpartition('/')[2] for line in said] == [
        f'{name}.bin has {RECORDS} images, not the 10,000 of CIFAR-10' for name in files
    ]

    assert len(binary) == len(pickled) == RECORDS * len(files)
    for one, other in zip(binary, pickled, strict=True):
        np.testing.assert_array_equal(one['img'], other['img'])
        assert one['gt_label'] == other['gt_label']
    assert binary.metainfo['classes'] == tuple(pickled.metainfo['classes'])


@pytest.mark.parametrize(
    'data, message',
    [
        (bytes(7 * 3073 - 10), 'test_batch.bin must be .*3073.*got 21501 bytes.*truncated'),
        (b'', 'test_batch.bin must be .* got 0 bytes'),
        (b'\x0a' * 2 * 3073, 'must be 0 to 9, got 10'),
    ],
    ids=['truncated', 'empty', 'label'],
)
def test_damaged_file_is_refused(binary_root, data, message):
    (binary_root / 'cifar-10-batches-bin' / 'test_batch.bin').write_bytes(data)

    with pytest.raises(ValueError, match=message):
        CIFAR10Binary(str(binary_root), 'test')


@pytest.fixture
def packed_root(binary_root):
    (binary_root / 'packed').mkdir()
    filters = [dict(id=lzma.FILTER_DELTA, dist=1), dict(id=lzma.FILTER_LZMA2, preset=0)]
    for path in (binary_root / 'cifar-10-batches-bin').iterdir():
        if path.name != 'data_batch_5.bin':
            packed = lzma.compress(path.read_bytes(), filters=filters)
            (binary_root / 'packed' / f'{path.name}.xz').write_bytes(packed)
    return binary_root / 'packed'


def test_part_of_the_files_compressed(binary_root, packed_root):
    plain, part = CIFAR10Binary(str(binary_root)), CIFAR10Binary(str(packed_root), num_batches=4)

    assert len(part) == 4 * RECORDS
    for i, sample in enumerate(part):
        np.testing.assert_array_equal(sample['img'], plain[i]['img'])
        assert sample['gt_label'] == plain[i]['gt_label']
    assert len(CIFAR10Binary(str(packed_root), 'test')) == RECORDS
    with pytest.raises(FileNotFoundError, match='data_batch_5.bin .*not exist.*set num_batches'):
        CIFAR10Binary(str(packed_root))
    with pytest.raises(ValueError, match='num_batches must be an int, 1 to 5, got 6'):
        CIFAR10Binary(str(packed_root), num_batches=6)


@pytest.mark.parametrize(
    'damage, message',
    [
        (lambda packed: packed[:-9], 'is not a whole xz file: '),
        (lambda packed: b'\xfd7zXZ\x00' + packed[7:], 'is not a whole xz file: '),
        (lambda packed: b'', 'is not a whole xz file: '),
        (
            lambda packed: lzma.compress(lzma.decompress(packed)[:-10]),
            'got 21501 bytes: it is trun',
        ),
        (lambda packed: lzma.compress(bytes(10_001 * 3073)), 'at most 30,730,000 bytes when decom'),
    ],
    ids=['truncated', 'damaged', 'empty', 'of another size', 'too large'],
)
def test_damaged_compressed_file_is_refused(packed_root, damage, message):
    path = packed_root / 'test_batch.bin.xz'
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ValueError, match=message) as caught:
        CIFAR10Binary(str(packed_root), 'test')
    assert 'test_batch.bin.xz' in str(caught.value) and '\n' not in str(caught.value)


def test_missing_folder_and_unknown_split_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='data_batch_1.bin.*AFT_MM_DATA'):
        CIFAR10Binary(str(tmp_path))
    with pytest.raises(ValueError, match="split must be one of train, test, got 'val'"):
        CIFAR10Binary(str(tmp_path), 'val')


def test_tampered_pickle_is_refused_before_it_is_unpickled(pickle_root):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ('the file was unpickled',))

    (pickle_root / 'cifar-10-batches-py' / 'data_batch_1').write_bytes(pickle.dumps(Bomb()))

    with pytest.raises(RuntimeError, match='Cannot find CIFAR10 dataset'):
        build_pickle(pickle_root, 'train')


def test_data_pack(pack):
    root = str(pack('cifar10'))
    train, test = CIFAR10Binary(root), CIFAR10Binary(root, 'test')

    # The first training image of CIFAR-10 is a frog, the first test image a cat.
    assert train.metainfo['classes'][train[0]['gt_label']] == 'frog'
    assert test.metainfo['classes'][test[0]['gt_label']] == 'cat'
    assert {sample['gt_label'] for sample in train} == set(range(10))


def test_full_data_pack(pack):
    test = CIFAR10Binary(str(pack('cifar10_full')), 'test')

    assert len(test) == 5000
    assert {sample['gt_label'] for sample in test} == set(range(10))
