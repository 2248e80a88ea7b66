"""Files as sequences of bytes."""

import bz2
import gzip
import lzma

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS

from aft_mm.datasets import TextFile
from aft_mm.datasets.texts import SPLITS, PlainFile, take_split

from ..errors import refuses, refuses_input

SIZE = 1009


@pytest.fixture(scope='module')
def content():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def path(tmp_path, content):
    (tmp_path / 'text').write_bytes(content.tobytes())
    return str(tmp_path / 'text')


def counted(dataset):
    samples = [dataset[i] for i in range(len(dataset))]
    assert all(len(s['inputs']) == s['data_samples'].length for s in samples)
    return np.concatenate([s['inputs'][s['data_samples'].num_context :] for s in samples])


def test_splits_follow_each_other_without_gap(path, content):
    sets = [TextFile(path, split, 7, split_ratio=(0.5, 0.3, 0.2)) for split in SPLITS]
    train, *parts = sets[0].data[:], *map(counted, sets[1:])
    np.testing.assert_array_equal(np.concatenate([train, *parts]), content)
    assert [len(train), *map(len, parts)] == pytest.approx([504.5, 302.7, 201.8], abs=1)


def test_enwik8_is_split_90_5_5_million():
    data = np.broadcast_to(np.zeros(1, np.uint8), 10**8)  # as long as enwik8, one byte of memory
    sizes = [len(take_split(data, split, (0.9, 0.05, 0.05))) for split in SPLITS]
    assert sizes == [90_000_000, 5_000_000, 5_000_000]


@pytest.mark.parametrize(
    ('context', 'stride'),
    [(1, None), (7, None), (101, None), (1, 1), (7, 5), (63, 5), (63, 63), (101, 1), (101, 101)],
)
def test_every_byte_is_predicted_once_and_in_order(path, content, context, stride):
    evaluation = 'blocks' if stride is None else 'strided'
    dataset = TextFile(path, 'test', context, evaluation, stride, split_ratio=(0.5, 0.4, 0.1))
    np.testing.assert_array_equal(counted(dataset), dataset.data[:])
    np.testing.assert_array_equal(dataset.data[:], content[908:])
    lengths = [dataset[i]['data_samples'].length for i in range(len(dataset))]
    assert set(lengths[:-1]) <= {context} and 1 <= lengths[-1] <= context


def test_strided_contexts_give_what_lies_before(path):
    dataset = TextFile(path, 'val', 63, 'strided', 5, split_ratio=(0.2, 0.7, 0.1))
    for index in (1, 2, 17, len(dataset) - 1):
        sample = dataset[index]
        assert sample['data_samples'].num_context == 58
        start = 5 * index
        np.testing.assert_array_equal(sample['inputs'], dataset.data[start : start + 63])


def test_training_crops_are_random_reach_both_ends_and_follow_the_seed(path):
    dataset = TextFile(path, 'train', 63, split_ratio=(0.1, 0.45, 0.45), samples_per_epoch=700)
    text = dataset.data[:].tobytes()
    assert len(text) == 101 and len(dataset) == 700

    def starts():
        np.random.seed(3)
        crops = [dataset[i] for i in range(len(dataset))]
        assert {crop['data_samples'].num_context for crop in crops} == {0}
        return [text.index(crop['inputs'].numpy().tobytes()) for crop in crops]

    assert set(starts()) == set(range(101 - 63 + 1))
    assert starts() == starts()


def test_an_epoch_has_as_many_crops_as_contexts_fit(path):
    assert len(TextFile(path, 'train', 100)) == round(0.9 * SIZE) // 100


def test_gzip_holds_the_same_and_serves_where_the_file_is_missing(path, tmp_path, content):
    (tmp_path / 'packed.gz').write_bytes(gzip.compress(content.tobytes()))
    plain = TextFile(path, 'val', 9)
    for name in ('packed.gz', 'packed'):
        packed = TextFile(str(tmp_path / name), 'val', 9)
        np.testing.assert_array_equal(packed.data, plain.data[:])
    assert isinstance(plain.data, PlainFile) and isinstance(packed.data, np.ndarray)


@pytest.mark.parametrize('pack', [gzip.compress, lzma.compress])
@pytest.mark.parametrize('name', ['a', 'a.txt', 'a.gz', 'a.xz'])
def test_what_is_packed_is_seen_by_its_first_bytes(path, tmp_path, content, pack, name):
    (tmp_path / name).write_bytes(pack(content.tobytes()))
    packed = TextFile(str(tmp_path / name), 'val', 9)
    np.testing.assert_array_equal(packed.data, TextFile(path, 'val', 9).data[:])


@pytest.mark.parametrize(
    ('data', 'kind'),
    [
        (b'PK\3\4' + bytes(900), 'zip'),
        (bz2.compress(b'text', 1), 'bzip2'),
        (b"7z\xbc\xaf'\x1c" + bytes(900), '7z'),
        (('𝄞 ' * 500).encode('utf-16'), 'UTF-16'),
        (b'\xfe\xff' + 'Größe'.encode('utf-16-be'), 'UTF-16'),
    ],
)
def test_what_is_packed_otherwise_is_refused(tmp_path, data, kind):
    for content, found in ((data, kind), (gzip.compress(data), f'{kind} in gzip')):
        (tmp_path / 'a').write_bytes(content)
        message = f"^data_file '.*/a' must be plain bytes .* gzip or xz, got {found}$"
        refuses_input(message, TextFile, str(tmp_path / 'a'), context_length=9)


@pytest.mark.parametrize('first', [b'\xff\xfe', b'\xfe\xff', b'PK', b'BZh9', b'\x1f\x8b', b'7z'])
def test_any_other_bytes_are_read_as_they_are(tmp_path, content, first):
    (tmp_path / 'a').write_bytes(first + content.tobytes())
    data = TextFile(str(tmp_path / 'a'), context_length=9, split_ratio=(1, 0, 0)).data
    assert data[:].tobytes() == first + content.tobytes()


def test_a_sample_is_a_tensor_of_its_own(path):
    dataset = TextFile(path, 'val', 9)
    sample = dataset[0]['inputs']
    assert sample.dtype == torch.uint8
    sample += 1  # writes nothing into the file
    assert not torch.equal(sample, TextFile(path, 'val', 9)[0]['inputs'])
    assert len(list(dataset)) == len(dataset)  # iteration ends


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(split='dev'), "split must be one of .* got 'dev'"),
        (dict(evaluation='all'), "evaluation must be one of blocks, strided, got 'all'"),
        (dict(evaluation='strided'), 'stride must be 1 to context_length .* got None'),
        (dict(evaluation='strided', stride=10), 'stride must be 1 to context_length .* got 10'),
        (dict(evaluation='strided', stride=0), 'stride must be an int, 1 or larger, got 0'),
        (dict(stride=5), "stride must be .* None with 'blocks', got 5"),
        (dict(split_ratio=(0.9, 0.1)), 'split_ratio must be '),
        (dict(split_ratio=(0.9, 0.1, 0.1)), 'split_ratio must be '),
        (dict(split_ratio=(1.2, -0.1, -0.1)), 'split_ratio must be '),
        (dict(split_ratio=0.5), 'split_ratio must be '),
        (dict(split_ratio=('a', 1, 0)), 'split_ratio must be '),
        (dict(data_file=5), 'data_file must be '),
        (dict(context_length='9'), 'context_length must be '),
        (dict(context_length=0), 'context_length must be an int, 1 or larger, got 0'),
        (dict(samples_per_epoch=0), 'samples_per_epoch must be an int, 1 or larger, got 0'),
        (
            dict(split='val', context_length=52),
            'the val split of .* has 51 bytes, which is shorter than one context of 52 bytes',
        ),
    ],
)
def test_bad_arguments_are_named(path, arguments, message):
    refuses(message, TextFile, **{'data_file': path, 'context_length': 9, **arguments})


def test_missing_empty_and_damaged_files_are_named(path, tmp_path, content):
    with pytest.raises(FileNotFoundError, match="data_file 'no/file' does not exist"):
        TextFile('no/file')
    (tmp_path / 'empty').touch()
    with pytest.raises(ValueError, match="data_file '.*empty' is empty"):
        TextFile(str(tmp_path / 'empty'))
    packed = gzip.compress(content.tobytes())
    for damaged in (packed[:-50], b'text', packed[:30] + b'\xff' * 60 + packed[90:]):
        (tmp_path / 'half.gz').write_bytes(damaged)
        with pytest.raises(ValueError, match="data_file '.*half.gz' is not a whole gzip file"):
            TextFile(str(tmp_path / 'half.gz'))


def test_data_pack(pack):
    settings = dict(data_file=str(pack('enwik8') / 'enwik8'), context_length=1024)
    splits = [
        DATASETS.build(dict(type='aft_mm.TextFile', split=split, **settings)) for split in SPLITS
    ]
    sizes = np.array([len(split.data) for split in splits])
    assert sizes / sizes.sum() == pytest.approx([0.9, 0.05, 0.05], abs=1e-6)
    assert splits[0].data[:10].tobytes() == b'<mediawiki'
    text = counted(splits[2]).tobytes()
    assert len(text) == sizes[2] and b'the' in text
