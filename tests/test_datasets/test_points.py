"""Points sampled from a cloud as a sequence."""

import numpy as np
import pytest
import torch

from aft_mm.datasets import PackPointCloud, PointClouds
from aft_mm.tokenizers import bounding_cube, encode_points


@pytest.fixture
def points():
    return np.random.default_rng(0).standard_normal((63, 3)).astype(np.float32)


def rows(tokens):
    return [tuple(row) for row in np.asarray(tokens).reshape(-1, 3).tolist()]


def test_all_points_of_a_cloud(points):
    packed = PackPointCloud(num_points=63)(dict(points=points))
    tokens, sample = packed['inputs'], packed['data_samples']
    assert tokens.dtype == torch.uint8
    np.testing.assert_array_equal(tokens, encode_points(points))
    assert (sample.length, sample.num_context, sample.box) == (189, 0, bounding_cube(points))
    assert 'warnings' not in sample


def test_the_order_is_that_of_the_points_or_of_their_tokens(points):
    def pack(**options):
        return PackPointCloud(num_points=63, num_bits=3, **options)(dict(points=points))['inputs']

    raw, quantized = pack(order='raw'), pack(order='quantized')
    np.testing.assert_array_equal(raw, encode_points(points, num_bits=3, order='raw'))
    np.testing.assert_array_equal(quantized, encode_points(points, num_bits=3, order='quantized'))
    assert rows(raw) != rows(quantized) == sorted(rows(raw)) and torch.equal(pack(), raw)


def test_fewer_points_are_drawn_without_replacement_in_the_box_of_all(points):
    pack = PackPointCloud(num_points=20, num_bits=8, order='quantized')
    everyone = rows(encode_points(points))
    assert len(set(everyone)) == 63
    samples = [pack(dict(points=points)) for _ in range(30)]
    for packed in samples:
        drawn = rows(packed['inputs'])
        assert len(set(drawn)) == 20 and set(drawn) <= set(everyone) and drawn == sorted(drawn)
        assert packed['data_samples'].box == bounding_cube(points)
    assert set().union(*(rows(packed['inputs']) for packed in samples)) == set(everyone)


def test_more_points_than_there_are_come_with_replacement_and_a_remark(points):
    results = dict(points=points, points_path='a/b.npy')
    packed = PackPointCloud(num_points=200)(results)
    assert set(rows(packed['inputs'])) <= set(rows(encode_points(points)))
    assert packed['data_samples'].warnings == {
        'a cloud of fewer than 200 points is sampled with replacement': 'a/b.npy'
    }


def test_a_seed_gives_a_sample_its_points_and_no_seed_new_ones(points):
    def draw(seed, index=0):
        return rows(PackPointCloud(20, seed=seed)(dict(points=points, sample_idx=index))['inputs'])

    assert draw(5) == draw(5) != draw(6)
    assert draw(5) != draw(5, index=1)
    np.random.seed(0)
    first = draw(None)
    assert first != draw(None)
    np.random.seed(0)
    assert draw(None) == first


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(num_points=0), 'num_points must be an int, 1 or larger, got 0'),
        (dict(num_bits=9), 'num_bits must be an int, 1 to 8, got 9'),
        (dict(order='z'), "order must be one of raw, quantized, got 'z'"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PackPointCloud(**options)


def test_modelnet_chairs(pack):
    root, step = str(pack('modelnet10_pcd')), dict(type='aft_mm.PackPointCloud', num_points=1024)
    pipeline = [dict(type='aft_mm.LoadPoints'), dict(step, seed=0)]
    chairs = PointClouds(root, ('chair',), 'test', pipeline=pipeline)
    assert len(PointClouds(root, 'chair')) == 200 and len(chairs) == 40
    for sample in (chairs[0], chairs[-1]):
        assert sample['inputs'].shape == (3072,) and 'warnings' not in sample['data_samples']
        # The longest edge fills its axis.
        assert (sample['inputs'].view(-1, 3).amin(0) == 0).any() and sample['inputs'].max() == 255
