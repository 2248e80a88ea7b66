"""Pictures of position biases."""

import matplotlib
import numpy as np
import pytest
import torch

from aft_mm.visualization import draw_position_bias


def images(figure):
    """The panels that show an image, layer by layer, colour bars left out."""
    return [axis.images[0] for axis in figure.axes if axis.images and axis.get_title()]


def test_heads_show_exp_of_w_minus_one():
    torch.manual_seed(0)
    biases = {'layer 0': torch.randn(4, 5, 7), 'layer 1': 3 * torch.randn(4, 5, 7)}
    panels = images(draw_position_bias(biases))

    assert len(panels) == 8
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
    assert panel.get_extent() == [-3.5, 3.5, 2.5, -2.5]  # the first row lies above the query
    assert panel.axes.get_xlabel() == 'column offset'


def test_dense_bias_is_folded_onto_the_grid():
    torch.manual_seed(0)
    grid, prefix = (3, 4), 1
    w = torch.randn(1, 13, 13)
    panels = images(draw_position_bias({'layer 0': w}, grid, prefix, max_columns=12))

    assert len(panels) == 12
    for query, panel in enumerate(panels):
        expected = w[0, prefix + query, prefix:].exp().sub(1).view(grid)
        np.testing.assert_allclose(panel.get_array(), expected, rtol=1e-5, atol=1e-6)
        assert panel.axes.get_title() == f'query {divmod(query, 4)}'


def test_sequences_show_targets_by_sources():
    w = torch.randn(1, 6, 6)
    (panel, ) = images(draw_position_bias({'layer 0': w}, grid=(6, )))
    np.testing.assert_allclose(panel.get_array(), w[0].exp() - 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('first', 'last'), [(-3, 0), (-1, 2)])
def test_a_narrow_window_is_shown_by_offset(first, last):
    target, source = np.indices((20, 20))
    w = torch.randn(1, 20, 20)
    w[0, (source - target < first) | (source - target > last)] = 0
    (panel, ) = images(draw_position_bias({'layer 0': w}, grid=(20, )))
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


def test_kernels_of_one_and_three_dimensions():
    (panel, ) = images(draw_position_bias({'layer 0': torch.randn(4, 9)}))
    assert panel.get_array().shape == (4, 9)

    w = torch.randn(2, 3, 5, 7)
    panels = images(draw_position_bias({'layer 0': w}))
    np.testing.assert_allclose(panels[1].get_array(), w[1, 1].exp() - 1, rtol=1e-5, atol=1e-6)


def test_at_most_max_columns_heads_evenly_spread():
    panels = images(draw_position_bias({'layer 0': torch.zeros(192, 3, 3)}, max_columns=3))
    assert [panel.axes.get_title() for panel in panels] == ['head 0', 'head 96', 'head 191']


def test_layers_may_have_different_numbers_of_heads():
    biases = {'layer 0': torch.zeros(2, 3, 3), 'layer 1': torch.zeros(5, 3, 3)}
    assert len(images(draw_position_bias(biases))) == 7


def test_file_is_written_without_touching_the_backend(tmp_path):
    backend = matplotlib.get_backend()
    draw_position_bias({'layer 0': torch.randn(2, 3, 3)}).savefig(tmp_path / 'bias.png')

    assert matplotlib.get_backend() == backend
    assert matplotlib.image.imread(tmp_path / 'bias.png').std() > 0.01


def test_no_layer_is_named():
    with pytest.raises(ValueError, match='at least one layer'):
        draw_position_bias({})


def test_dense_bias_of_another_grid_is_named():
    with pytest.raises(ValueError, match=r'position bias of layer 0 .* got \[5\]'):
        draw_position_bias({'layer 0': torch.zeros(5)})
