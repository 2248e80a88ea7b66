"""Pictures of point clouds."""

import itertools

import numpy as np
import pytest

from aft_mm.visualization import draw_point_clouds

from ..errors import refuses

CORNERS = np.array(list(itertools.product((0.0, 1.0), repeat=3)))


def inked(picture):
    rows, columns = (picture < 255).any(-1).nonzero()
    return rows.min(), rows.max(), columns.min(), columns.max()


def line(axis, num=400):
    points = np.zeros((num, 3))
    points[:, axis] = np.linspace(0, 5, num)
    return points


@pytest.mark.parametrize(
    ('num', 'columns', 'rows_columns'),
    [(1, None, (1, 1)), (5, None, (2, 3)), (3, 3, (1, 3)), (3, 2, (2, 2))],
)
def test_every_cloud_has_its_panel(num, columns, rows_columns):
    clouds = list(np.random.default_rng(0).normal(size=(num, 50, 3)))
    picture = draw_point_clouds(clouds, columns=columns)
    rows, columns = rows_columns
    assert picture.dtype == np.uint8 and picture.shape == (240 * rows, 240 * columns, 3)
    panels = picture.reshape(rows, 240, columns, 240, 3).swapaxes(1, 2).reshape(-1, 240, 240, 3)
    nonempty = [(panel < 255).any() for panel in panels]
    assert nonempty == [i < num for i in range(len(panels))]


@pytest.mark.parametrize('scale', [1e-4, 1.0, 300.0])
def test_a_cloud_fills_its_panel_whatever_its_size_and_place(scale):
    top, bottom, left, right = inked(draw_point_clouds([scale * (CORNERS + 7)]))
    assert min(top, left, 239 - bottom, 239 - right) > 1
    assert bottom - top > 160 and right - left > 160


def test_axes_are_equally_long():
    heights, widths = [], []
    for edge in (1, 0.1):
        top, bottom, left, right = inked(draw_point_clouds([CORNERS * (1, 1, edge)]))
        heights.append(bottom - top)
        widths.append(right - left)
    elevation, azimuth = np.deg2rad((22, 60))
    depth = np.sin(elevation) * (np.sin(azimuth) + np.cos(azimuth))
    expected = (0.1 * np.cos(elevation) + depth) / (np.cos(elevation) + depth)
    assert widths[0] == widths[1]
    np.testing.assert_allclose(heights[1] / heights[0], expected, atol=0.03)


@pytest.mark.parametrize(('up', 'axis'), [('x', 0), ('y', 1), ('z', 2)])
def test_the_up_axis_is_vertical(up, axis):
    top, bottom, left, right = inked(draw_point_clouds([line(axis)], up))
    assert bottom - top > 130 and right - left < 10
    for other in {0, 1, 2} - {axis}:
        top, bottom, left, right = inked(draw_point_clouds([line(other)], up))
        assert right - left > 50


@pytest.mark.parametrize('up', ['x', 'y', 'z'])
def test_nothing_is_mirrored(up):
    """Permuting the axes of cloud and picture in the same way changes nothing."""
    cloud = np.random.default_rng(0).normal(size=(200, 3))
    turned = np.roll(cloud, {'x': 1, 'y': 2, 'z': 0}[up], axis=1)
    expected = draw_point_clouds([cloud])
    np.testing.assert_array_equal(draw_point_clouds([turned], up), expected)


def test_colour_is_the_height():
    picture = draw_point_clouds([line(2)]).astype(int)
    top, bottom, *_ = inked(picture)
    low, high = picture[bottom - 4 : bottom], picture[top : top + 4]
    violet, green = (part[(part < 255).any(-1)].mean(0) for part in (low, high))
    assert violet[2] > violet[1] and green[1] > green[2] + 50


def test_fewer_points_are_larger():
    one, many = (np.zeros((number, 3)) for number in (1, 2000))
    areas = [(draw_point_clouds([cloud]) < 255).any(-1).sum() for cloud in (one, many)]
    assert areas[0] > 2 * areas[1] > 0


def test_bad_input_is_named():
    refuses("up must be one of x, y, z, got 'w'", draw_point_clouds, [CORNERS], 'w')
    refuses('at least one cloud', draw_point_clouds, [])
    for wrong in (np.zeros((4, 2)), np.zeros((0, 3)), np.full((4, 3), np.nan)):
        with pytest.raises(ValueError, match=r'clouds\[1\] must be \[P, 3\] of finite numbers'):
            draw_point_clouds([CORNERS, wrong])
