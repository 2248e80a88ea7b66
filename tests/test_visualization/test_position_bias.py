"""Pictures of position biases."""

import io
import pickle

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from aft_mm.layers import AFTFull
from aft_mm.visualization import draw_position_bias, mixers_with_bias

from ..errors import refuses


def images(figure):
    return [axis.images[0] for axis in figure.axes if axis.images and axis.get_title()]


def test_heads_show_exp_of_w_minus_one():
    biases = {'layer 0': torch.randn(2, 5, 7), 'layer 1': 3 * torch.randn(5, 5, 7)}
    panels = images(draw_position_bias(biases))
    for panel, w in zip(panels, torch.cat(list(biases.values())), strict=True):
        np.testing.assert_allclose(panel.get_array(), w.exp() - 1, rtol=1e-5, atol=1e-6)


def test_colours_are_symmetric_around_zero_in_every_layer():
    biases = {'small': torch.full((2, 3, 3), -0.1), 'large': torch.full((2, 3, 3), 2.0)}
    for panel in images(draw_position_bias(biases)):
        low, high = panel.get_clim()
        assert low == -high
        assert abs(panel.get_array()).max() == pytest.approx(high)
        assert panel.get_cmap()(0.5)[:3] == pytest.approx((1, 1, 1), abs=0.05)


def test_offsets_are_on_the_axes():
    panel = images(draw_position_bias({'layer 0': torch.zeros(1, 5, 7)}))[0]
    assert panel.get_extent() == [-3.5, 3.5, 2.5, -2.5]  # the first row is above the query
    assert panel.axes.get_xlabel() == 'column offset'


def test_dense_bias_is_folded_onto_the_grid():
    grid, prefix = (3, 4), 1
    w = torch.randn(1, 13, 13)
    panels = images(draw_position_bias({'layer 0': w}, grid, prefix, queries='all'))

    assert len(panels) == 12
    for query, panel in enumerate(panels):
        expected = w[0, prefix + query, prefix:].exp().sub(1).view(grid)
        np.testing.assert_allclose(panel.get_array(), expected, rtol=1e-5, atol=1e-6)
        assert panel.axes.get_title() == f'query {divmod(query, 4)}'


def test_sequences_show_targets_by_sources():
    w = torch.randn(1, 6, 6)
    (panel,) = images(draw_position_bias({'layer 0': w}, grid=(6,)))
    np.testing.assert_allclose(panel.get_array(), w[0].exp() - 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('first', 'last'), [(-3, 0), (-1, 2)])
def test_a_narrow_window_is_shown_by_offset(first, last):
    target, source = np.indices((20, 20))
    w = torch.randn(1, 20, 20)
    w[0, (source - target < first) | (source - target > last)] = 0
    (panel,) = images(draw_position_bias({'layer 0': w}, grid=(20,)))
    shown = np.ma.filled(panel.get_array().astype(float), np.nan)
    assert shown.shape == (20, 4) and panel.get_extent() == [first - 0.5, last + 0.5, 19.5, -0.5]
    for t in range(20):
        for column, s in enumerate(range(t + first, t + last + 1)):
            if 0 <= s < 20:
                assert shown[t, column] == pytest.approx(float(w[0, t, s].expm1()), rel=1e-5)
            else:
                assert np.isnan(shown[t, column])
    assert panel.axes.get_xlabel() == 'offset, source − target [tokens]'
    low, high = panel.get_clim()
    assert low == -high and high == pytest.approx(float(w.expm1().abs().max()))


@pytest.mark.parametrize(('sides', 'grid'), [(16, None), (16, (5, 5)), (17, (4, 4)), (17, (16,))])
def test_a_matrix_that_does_not_fit_the_grid_is_no_kernel(sides, grid):
    w = {'layer 0': torch.randn(1, sides, sides)}
    if grid == (4, 4):  # which may be the kernel of one head
        assert len(images(draw_position_bias(w, grid))) == 1
        assert len(images(draw_position_bias(w, grid, 1, queries='all'))) == 16
    else:
        refuses(rf'grid must .* layer 0 \[1, {sides}, {sides}\]', draw_position_bias, w, grid)


def test_mixers_of_another_model_are_found():
    class Foreign(torch.nn.Module):
        def position_bias(self):
            raise AssertionError

    mixer = AFTFull(12, rank=4, grid=(4, 4))
    parts = dict(encoder=mixer, decoder=torch.nn.Linear(12, 3), other=Foreign())
    assert mixers_with_bias(torch.nn.ModuleDict(parts)) == {'encoder': mixer}
    parts = dict(decoder=torch.nn.ModuleList([mixer]))
    assert mixers_with_bias(torch.nn.ModuleDict(parts)) == {'0': mixer}


def test_a_notebook_displays_the_figure():
    figure = draw_position_bias({'layer 0': torch.randn(2, 3, 3)})
    png = Image.open(io.BytesIO(figure._repr_png_()))
    assert png.size == tuple(int(side * figure.dpi) for side in figure.get_size_inches())
    assert type(pickle.loads(pickle.dumps(figure))) is Figure


def test_kernels_of_one_and_three_dimensions():
    (panel,) = images(draw_position_bias({'layer 0': torch.randn(4, 9)}))
    assert panel.get_array().shape == (4, 9)

    w = torch.randn(2, 3, 5, 7)
    panels = images(draw_position_bias({'layer 0': w}))
    np.testing.assert_allclose(panels[1].get_array(), w[1, 1].exp() - 1, rtol=1e-5, atol=1e-6)


def test_causal_kernels_have_no_later_offsets():
    (panel,) = images(draw_position_bias({'layer 0': torch.randn(4, 9)}, causal=True))
    assert panel.get_array().shape == (4, 5) and panel.get_extent()[:2] == [-4.5, 0.5]

    for kernel in ((5, 7), (3, 5, 7)):
        w = torch.randn(1, *kernel)
        (panel,) = images(draw_position_bias({'layer 0': w}, causal=True))
        shown = np.ma.filled(panel.get_array().astype(float), np.nan)
        row, column = np.indices((5, 7))
        later = (row > 2) | ((row == 2) & (column > 3))
        plane = w[0].reshape(-1, 5, 7)[kernel[0] // 2 if len(kernel) == 3 else 0]
        np.testing.assert_allclose(shown, np.where(later, np.nan, plane.expm1()), rtol=1e-5)


@pytest.mark.parametrize(
    'heads, expected',
    [('even:3', [0, 96, 191]), ('first:2', [0, 1]), ('0,7,3', [0, 7, 3]), ([5], [5])],
)
def test_the_chosen_heads_are_drawn(heads, expected):
    w = torch.randn(192, 3, 3)
    panels = images(draw_position_bias({'layer 0': w}, heads=heads))
    assert [panel.axes.get_title() for panel in panels] == [f'head {head}' for head in expected]
    for panel, head in zip(panels, expected, strict=True):
        np.testing.assert_allclose(panel.get_array(), w[head].expm1(), rtol=1e-5, atol=1e-6)


def test_many_heads_are_tiles_of_one_picture():
    w = torch.randn(30, 3, 5)
    (panel,) = images(draw_position_bias({'layer 0': w}, heads='all'))
    sheet, columns = np.ma.filled(panel.get_array().astype(float), np.nan), 14  # √(6 · 30) rounded
    assert sheet.shape == (3 * 4 - 1, columns * 6 - 1)
    for head in range(30):
        row, column = divmod(head, columns)
        found = sheet[4 * row : 4 * row + 3, 6 * column : 6 * column + 5]
        np.testing.assert_allclose(found, w[head].expm1(), rtol=1e-5, atol=1e-6)
    assert np.isnan(sheet[3]).all() and np.isnan(sheet[:, 5]).all()
    assert [text.get_text() for text in panel.axes.get_yticklabels()] == ['0', '14', '28']


def test_a_matrix_has_the_class_token_and_exp_of_w():
    w = torch.randn(1, 13, 13)
    figure = draw_position_bias(
        {'layer 0': w, 'layer 1': w / 9}, (3, 4), 1, view='matrix', quantity='exp'
    )
    first, second = images(figure)
    np.testing.assert_allclose(first.get_array(), w[0].exp(), rtol=1e-5)
    assert 'class token' in first.axes.get_xlabel()
    assert first.get_clim() != second.get_clim()  # a scale per layer
    (panel, *_), (again, *_) = (
        images(
            draw_position_bias(
                {'layer 0': w, 'layer 1': w / 9}, (3, 4), 1, scale=scale, queries='prefix'
            )
        )
        for scale in ('all', 'layer')
    )
    np.testing.assert_allclose(panel.get_array(), w[0, 0, 1:].expm1().view(3, 4), rtol=1e-5)
    assert panel.axes.get_title() == 'class token'
    assert panel.get_clim() == again.get_clim()  # the first layer has the larger values


def test_one_scale_for_all_layers_is_in_the_title():
    biases = {'small': torch.full((2, 3, 3), -0.1), 'large': torch.full((2, 3, 3), 2.0)}
    figure = draw_position_bias(biases, scale='all', footer='a.py · b.pth')
    assert len({panel.get_clim() for panel in images(figure)}) == 1
    assert 'one colour scale' in figure.get_suptitle()
    assert figure.get_supxlabel() == 'a.py · b.pth'


ZERO = {'layer 0': torch.zeros(4, 3, 3)}


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(biases={}), 'at least one layer'),
        (dict(biases={'layer 0': torch.zeros(5)}), r'position bias of layer 0 .* got \[5\]'),
        (dict(heads='0,4'), "heads must be 'all', .* 0 to 3 .* got '0,4'"),
        (dict(heads='some'), "got 'some'"),
        (dict(heads='even:0'), "got 'even:0'"),
        (dict(quantity='log'), 'quantity must be one of'),
        (dict(view='all'), 'view must be one of'),
        (dict(scale='head'), 'scale must be one of'),
    ],
)
def test_bad_arguments_are_rejected(options, message):
    refuses(message, draw_position_bias, **{'biases': ZERO, **options})


def test_file_is_written_without_touching_the_backend(tmp_path):
    backend = matplotlib.get_backend()
    draw_position_bias({'layer 0': torch.randn(2, 3, 3)}).savefig(tmp_path / 'bias.png')

    assert matplotlib.get_backend() == backend
    assert matplotlib.image.imread(tmp_path / 'bias.png').std() > 0.01
