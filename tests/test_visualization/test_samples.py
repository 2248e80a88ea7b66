"""Grids of images."""

import numpy as np
import pytest

from aft_mm.visualization import draw_completions, draw_samples

from ..errors import refuses


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 200, (7, 5, 4, 3), dtype=np.uint8)


def cells(grid, height, width, scale):
    step_y, step_x = height * scale + 2, width * scale + 2
    return {
        (y // step_y, x // step_x): grid[
            y : y + height * scale : scale, x : x + width * scale : scale
        ]
        for y in range(2, grid.shape[0], step_y)
        for x in range(2, grid.shape[1], step_x)
    }


@pytest.mark.parametrize(('columns', 'scale'), [(None, 1), (None, 3), (2, 2)])
def test_images_are_arranged_row_by_row_on_white(images, columns, scale):
    grid = draw_samples(images, columns, scale)
    found = cells(grid, 5, 4, scale)
    width = columns or 3
    assert len(found) == width * -(-7 // width)
    for position, cell in found.items():
        index = position[0] * width + position[1]
        np.testing.assert_array_equal(cell, images[index] if index < 7 else 255)
    assert grid.dtype == np.uint8 and (grid[:2] == 255).all()


def test_every_pixel_becomes_a_square(images):
    grid = draw_samples(images[:2], scale=3)[2:17, 2:14]
    np.testing.assert_array_equal(grid, images[0].repeat(3, 0).repeat(3, 1))


def test_small_images_are_enlarged(images):
    assert draw_samples(images[:2]).shape == (2 * 2 + 5 * 24, 3 * 2 + 2 * 96, 3)
    wide = np.zeros((1, 4, 97, 1), np.uint8)
    large = draw_completions(wide, wide[None], num_given_rows=1)
    assert large.shape == (2 * 2 + 4, 4 * 2 + 3 * 97, 3)


def test_grey_images_have_three_equal_channels(images):
    grid = draw_samples(images[..., :1], scale=1)
    np.testing.assert_array_equal(cells(grid, 5, 4, 1)[0, 1], images[1, ..., :1].repeat(3, -1))


def test_a_row_of_completions_has_the_given_part_and_the_truth(images):
    completions = np.stack([images[::-1]] * 2, axis=1)
    found = cells(draw_completions(images, completions, num_given_rows=2, scale=1), 5, 4, 1)
    assert len(found) == 7 * 4
    for i in range(7):
        np.testing.assert_array_equal(found[i, 0][:2], images[i, :2])
        assert len(np.unique(found[i, 0][2:])) == 1
        np.testing.assert_array_equal(found[i, 1], images[6 - i])
        np.testing.assert_array_equal(found[i, 2], images[6 - i])
        np.testing.assert_array_equal(found[i, 3], images[i])


def test_other_arrays_are_named(images):
    for wrong in (images[0], images[..., :2], images.astype(np.float32)):
        refuses(r'images must be uint8 \[N, H, W, C\]', draw_samples, wrong)
    refuses('at least one image', draw_samples, images[:0])
    refuses('must have same number of dimensions', draw_completions, images, images, 2)
