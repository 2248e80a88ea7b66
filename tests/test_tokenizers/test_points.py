"""Encoding point clouds as integers and decoding them."""

import numpy as np
import pytest
from scipy.spatial import cKDTree

from aft_mm.tokenizers import bounding_cube, decode_points, encode_points


@pytest.fixture
def points():
    """Return 63 points away from the origin, longest along y."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((63, 3)) * (1, 9, 3) + (100, -5, 2)).astype(np.float32)


def test_the_cube_is_around_the_box_and_as_wide_as_its_longest_edge():
    centre, side = bounding_cube([[1, 0, 5], [3, 10, 5], [2, 4, 4]])
    assert (centre, side) == ((2.0, 5.0, 4.5), 10.0)


@pytest.mark.parametrize('num_bits', [1, 3, 8])
@pytest.mark.parametrize('number', [2, 7, 63])
def test_no_coordinate_moves_by_more_than_half_a_step(points, num_bits, number):
    cloud = points[:number]
    box = bounding_cube(cloud)
    singles = [encode_points(point[None], num_bits, box) for point in cloud]
    back = np.concatenate([decode_points(single, num_bits, box) for single in singles])
    assert back.shape == cloud.shape and back.dtype == np.float64
    assert np.abs(back - cloud).max() <= box[1] / 2 ** (num_bits + 1) * 1.000001
    # Sorted like Python tuples, of coordinates or of tokens.
    quantized = sorted(tuple(single.tolist()) for single in singles)
    places = sorted(range(number), key=lambda i: tuple(cloud[i, ::-1].tolist()))
    raw = [tuple(singles[i].tolist()) for i in places]
    for order, triples in dict(raw=raw, quantized=quantized).items():
        tokens = encode_points(cloud, num_bits, order=order)
        np.testing.assert_array_equal(tokens.reshape(-1, 3), triples)
    np.testing.assert_array_equal(encode_points(cloud, num_bits).reshape(-1, 3), raw)


def test_ties_within_a_bin_are_sorted_by_real_coordinates():
    """Four points in one bin of z and y, with different x."""
    cloud = [[0.1, 0, 0.02], [0.2, 0.01, 0.01], [0.3, 0, 0.01], [0.4, 0, 0.01], [-0.5, -0.5, -0.5]]
    box = ((0.0, 0.0, 0.0), 1.0)
    sequences = {
        order: encode_points(cloud, 2, box, order).reshape(-1, 3).tolist()
        for order in ('raw', 'quantized')
    }
    bins = {0.1: [2, 2, 2], 0.2: [2, 2, 2], 0.3: [2, 2, 3], 0.4: [2, 2, 3]}
    assert sequences['raw'] == [[0, 0, 0], *(bins[x] for x in (0.3, 0.4, 0.2, 0.1))]
    assert sequences['quantized'] == [[0, 0, 0], *(bins[x] for x in (0.1, 0.2, 0.3, 0.4))]


def test_every_bin_is_reached_and_the_upper_face_belongs_to_the_last():
    grid = np.stack([np.linspace(-1, 1, 257)] * 3, axis=1)
    tokens = encode_points(grid).reshape(-1, 3)
    assert tokens.dtype == np.uint8
    np.testing.assert_array_equal(tokens[:, 0], [*range(256), 255])


@pytest.mark.parametrize('order', ['raw', 'quantized'])
@pytest.mark.parametrize('number', [2, 7, 63])
def test_sorted_order_is_total(points, number, order):
    cloud = np.concatenate([points[:number], points[:number].round(), points[:1]])
    expected = encode_points(cloud, num_bits=3, order=order)
    rng = np.random.default_rng(1)
    for _ in range(20):
        tokens = encode_points(rng.permutation(cloud), num_bits=3, order=order)
        np.testing.assert_array_equal(tokens, expected)


def test_tokens_of_a_point_are_z_y_x():
    cloud = [[0.1, 0.3, 0.49], [-0.5, -0.5, -0.5], [0.5, -0.2, -0.5]]
    tokens = encode_points(cloud, box=((0.0, 0.0, 0.0), 1.0))
    assert tokens.tolist() == [0, 0, 0, 0, 76, 255, 253, 204, 153]
    expected = [[-0.5] * 3, [0.5, -0.2, -0.5], [0.1, 0.3, 0.49]]
    np.testing.assert_allclose(decode_points(tokens), expected, atol=1 / 512 + 1e-7)


def test_a_batch_of_samples_is_decoded_at_once(points):
    tokens = np.stack([encode_points(points), encode_points(points[::-1] * 2)])
    back = decode_points(tokens[None])
    assert back.shape == (1, 2, 63, 3)
    np.testing.assert_array_equal(back[0, 1], decode_points(tokens[1]))
    assert np.abs(back).max() < 0.5


def test_a_given_box_is_kept(points):
    box = ((0.0, 0.0, 0.0), 500.0)
    back = decode_points(encode_points(points, box=box), box=box)
    assert cKDTree(points).query(back, p=np.inf)[0].max() <= 500 / 512 + 1e-4
    with pytest.raises(ValueError, match='points must lie in the box, a cube of side 100.0 around'):
        encode_points(points, box=((0.0, 0.0, 0.0), 100.0))
    for side in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=f'the side of box must be above 0, got {side}'):
            encode_points(points, box=((0.0, 0.0, 0.0), side))


def test_huge_and_tiny_clouds_survive(points):
    for scale in (1e-30, 1e30, 3e36):
        scaled = points * np.float32(scale)
        tokens = encode_points(scaled)
        box = bounding_cube(scaled)
        distance, _ = cKDTree(decode_points(tokens, box=box) / scale).query(points, p=np.inf)
        assert distance.max() <= box[1] / scale / 512 * 1.001


@pytest.mark.parametrize('offset', [1e6, -1e9, 1e12])
def test_a_cloud_far_from_the_origin_keeps_its_shape(points, offset):
    near = points.astype(np.float64)
    far = near + offset
    np.testing.assert_array_equal(encode_points(far), encode_points(near))
    box = bounding_cube(far)
    back = decode_points(encode_points(far), box=box)
    distance, _ = cKDTree(back - offset).query(near, p=np.inf)
    assert distance.max() <= box[1] / 512 * 1.001


@pytest.mark.parametrize(
    ('points', 'message'),
    [
        (np.zeros((4, 3)), 'points must differ, but all 4 are'),
        (np.ones((1, 3)), 'points must differ, but all 1 are'),
        (
            np.zeros((0, 3)),
            r'points must be \[P, 3\] with P at least 1, but have the shape \(0, 3\)',
        ),
        (np.zeros((4, 2)), r'but have the shape \(4, 2\)'),
        ([[0, 0, 0], [1, np.nan, 0]], 'points must be finite, but 1 of 2 are not'),
        ([[0, 0, 0], [1, np.inf, 0]], 'points must be finite, but 1 of 2 are not'),
        ([[1e200] * 3, [1e200 + 1] * 3], 'points must differ, but all 2 are'),
        # Adjacent float64 numbers, a range that overflows float64, and the smallest numbers.
        (
            [[0, 0, 1e17], [0, 0, 1e17 + 16]],
            'an extent that float64 can divide, but go from .*1e.17',
        ),
        ([[-1.7e308, 0, 0], [1.7e308, 0, 0]], 'an extent that float64 can divide, but go .*-1.7e'),
        ([[0, 0, 0], [0, 5e-324, 0]], 'an extent that float64 can divide'),
    ],
)
def test_a_cloud_without_extent_is_refused(points, message):
    for function in (bounding_cube, encode_points):
        with pytest.raises(ValueError, match=message):
            function(points)


@pytest.mark.parametrize('num_bits', [0, 9, 2.5])
def test_bits_out_of_range_are_refused(points, num_bits):
    for call in (lambda: encode_points(points, num_bits), lambda: decode_points([0] * 3, num_bits)):
        with pytest.raises(ValueError, match=f'num_bits must be an int, 1 to 8, got {num_bits}'):
            call()


def test_an_unknown_order_is_refused(points):
    with pytest.raises(ValueError, match="order must be one of raw, quantized, got 'sorted'"):
        encode_points(points, order='sorted')


@pytest.mark.parametrize(
    ('tokens', 'message'),
    [
        ([0, 1, 8], 'tokens must be 0 to 7 with num_bits=3, but are 0 to 8'),
        ([0, -1, 7], 'tokens must be 0 to 7 with num_bits=3, but are -1 to 7'),
        ([0, 1], r'tokens must be three per point, but have the shape \(2,\)'),
        (3, r'tokens must be three per point, but have the shape \(\)'),
    ],
)
def test_tokens_that_are_no_points_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        decode_points(tokens, num_bits=3)
