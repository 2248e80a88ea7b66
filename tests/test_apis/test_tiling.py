"""Tiles cover an image and leave no seams."""

import numpy as np
import pytest

from aft_mm.apis.super_resolver import cross_fade_weights, cut_tiles, join_tiles, tile_starts

LENGTHS = [(length, 8, 2) for length in (8, 9, 14, 15, 63)]
LENGTHS += [(20, 8, 7), (17, 8, 0), (7, 1, 0), (20, 4, 1)]


@pytest.mark.parametrize('length, size, overlap', LENGTHS)
def test_tiles_cover_everything_and_weights_sum_to_one_in_their_tile(length, size, overlap):
    starts = tile_starts(length, size, overlap)
    assert starts[0] == 0 and starts[-1] == length - size
    steps = np.diff(starts)
    assert (steps > 0).all() and (steps <= size - overlap).all()
    # One tile less would not cover it.
    assert (len(starts) - 2) * (size - overlap) + size < length or len(starts) == 1
    weights = cross_fade_weights(starts, size, overlap)
    assert weights.shape == (len(starts), length) and (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(0), 1, rtol=1e-12)
    for row, start in zip(weights, starts, strict=True):
        assert (row[start : start + size] > 0).all()
        assert not row[:start].any() and not row[start + size :].any()


def test_two_tiles_fade_linearly_into_each_other():
    left, right = cross_fade_weights([0, 6], 8, 2)
    np.testing.assert_allclose(right, [0, 0, 0, 0, 0, 0, 1 / 4, 3 / 4, 1, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(left, 1 - right)


@pytest.mark.parametrize('length', [14, 15, 17, 63])
def test_no_tile_begins_with_a_jump(length):
    """Scaled by 4 like the sampled tiles, with 8 pixels of overlap."""
    starts = [4 * start for start in tile_starts(length, 8, 2)]
    weights = cross_fade_weights(starts, 32, 8)
    assert np.abs(np.diff(weights, axis=1)).max() <= 1 / 8 + 1e-9
    hard = cross_fade_weights([4 * start for start in tile_starts(16, 8, 0)], 32, 0)
    assert set(np.unique(hard)) == {0, 1}


@pytest.mark.parametrize(('shape', 'overlap'), [((8, 8), 2), ((13, 22), 2), ((30, 9), 0)])
def test_cutting_and_joining_restores_an_image(shape, overlap):
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    rows, columns = (tile_starts(length, 8, overlap) for length in shape)
    tiles = cut_tiles(image, rows, columns, (8, 8))
    assert tiles.shape == (len(rows) * len(columns), 8, 8, 3)
    versions = np.stack([tiles, 255 - tiles], axis=1)
    joined = join_tiles(versions, rows, columns, overlap)
    np.testing.assert_array_equal(joined, [image, 255 - image])
    assert joined.dtype == np.uint8


def test_different_tiles_meet_without_a_seam():
    tiles = np.stack([np.full((1, 32, 32, 1), value, np.uint8) for value in (0, 255, 255, 0)])
    joined = join_tiles(tiles, [0, 24], [0, 24], 8)[0, ..., 0].astype(int)
    assert joined.shape == (56, 56)
    assert max(np.abs(np.diff(joined, axis=axis)).max() for axis in (0, 1)) <= 255 / 8 + 1
    assert joined[0, 0] == 0 and joined[0, -1] == joined[-1, 0] == 255


@pytest.mark.parametrize('overlap', [-1, 8, 1.5])
def test_bad_overlap_is_named(overlap):
    with pytest.raises(ValueError, match=rf'overlap \(--tile\) must be .* 0 to 7, got {overlap}'):
        tile_starts(20, 8, overlap)
