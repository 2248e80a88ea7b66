"""Receptive fields of networks with a known field."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from aft_mm.analysis.networks import as_map, grid_of
from aft_mm.analysis.plot_receptive_field import (
    draw_receptive_field,
    energy_within,
    radius_of_share,
    receptive_field,
)

from ..errors import refuses


def test_linear_convolutions_have_the_square_of_their_joint_kernel():
    first, second = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 5, padding=2)
    energy = receptive_field(lambda x: second(first(x)), torch.randn(3, 1, 21, 17), place=(9, 10))

    # A position reads the full convolution of the two flipped kernels.
    kernel = F.conv2d(second.weight, first.weight.flip(2, 3), padding=2)
    joint = kernel.detach().double().square()[0, 0]
    assert joint.shape == (7, 7)
    expected = torch.zeros(21, 17, dtype=torch.float64)
    expected[6:13, 7:14] = joint / joint.sum()
    torch.testing.assert_close(energy, expected, atol=1e-7, rtol=1e-4)


def test_several_channels_are_the_squared_jacobian():
    network = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 5, 3, 2, 1))
    images = torch.randn(1, 2, 8, 8)
    jacobian = torch.autograd.functional.jacobian(lambda x: network(x)[0, :, 2, 2], images)
    jacobian = jacobian.double().square().sum((0, 1, 2))
    noise = torch.Generator().manual_seed(1)
    many = images.repeat(4000, 1, 1, 1)  # each with its own projection
    energy = receptive_field(network, many, place=(2, 2), generator=noise)
    torch.testing.assert_close(energy, jacobian / jacobian.sum(), atol=2e-3, rtol=0.1)


def test_patches_and_windows_of_a_transformer_are_its_field():
    """A layer without global connectivity reads the patches under its kernel, two read one more."""
    init_default_scope('mmpretrain')
    torch.manual_seed(0)
    mixer = dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3, init_std=0.5)
    mixer.update(reparameterize=False, global_connectivity=False)
    config = dict(type='aft_mm.AFTViT', arch=dict(embed_dims=16, num_layers=2), token_mixer=mixer)
    config.update(img_size=28, patch_size=4, out_type='featmap', out_indices=(0, 1))
    network = MODELS.build(config).eval()
    for layer, reach in ((0, 1), (1, 2)):
        energy = receptive_field(lambda x, i=layer: network(x)[i], torch.randn(2, 3, 28, 28))
        seen = (energy.view(7, 4, 7, 4).sum((1, 3)) > 0).nonzero()
        rows = range(3 - reach, 4 + reach)
        expected = [[row, column] for row in rows for column in rows]
        assert seen.tolist() == expected


def test_the_mean_of_a_layer_norm_is_constant_but_its_field_is_not_empty():
    """Without random projections, the sum over the channels would have no gradient."""
    conv, norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
    energy = receptive_field(
        lambda x: norm(conv(x).movedim(1, -1)).movedim(-1, 1), torch.randn(1, 3, 12, 12)
    )
    assert energy[4:8, 4:8].sum() == pytest.approx(1)


def test_share_within_a_radius():
    energy = torch.zeros(9, 9, dtype=torch.float64)
    energy[4, 4], energy[4, 2], energy[4, 6], energy[1, 4], energy[7, 4] = 0.4, 0.2, 0.2, 0.1, 0.1
    shares = energy_within(energy, [0, 1.9, 2, 2.9, 3])
    assert shares.tolist() == pytest.approx([0.4, 0.4, 0.8, 0.8, 1])
    assert [radius_of_share(energy, share) for share in (0.4, 0.5, 0.9, 1)] == [0, 2, 3, 3]
    # Off-centre, since radii are measured from the centre of mass.
    moved = F.pad(energy, (5, 0, 0, 3))
    assert radius_of_share(moved, 0.9) == pytest.approx(3)


def test_a_place_out_of_range_and_a_network_without_gradient():
    images = torch.randn(1, 1, 8, 8)
    place, output = (
        'place must be a row of 0 to 7',
        'features must be a function .* got torch.float32',
    )
    refuses(place, receptive_field, nn.Identity(), images, place=(8, 0))
    refuses('the gradient is 0', receptive_field, lambda x: x * 0, images)
    refuses(rf'{output} \[8', receptive_field, lambda x: x[0, 0], images)


@pytest.mark.parametrize(
    'count, image, grid',
    [
        (196, (224, 224), (14, 14)),
        (32, (64, 32), (8, 4)),
        (15 * 20, (120, 158), (15, 20)),  # the last patch of a row is cut off
        (3, (8, 8), None),
    ],
)
def test_the_grid_of_tokens(count, image, grid):
    assert grid_of(count, image) == grid


def test_outputs_of_all_kinds_are_maps():
    expected = torch.randn(2, 5, 4, 2)
    tokens = expected.flatten(2).transpose(1, 2)
    for output, prefix in (
        (expected, 0),
        (expected.movedim(1, -1), 0),
        (tokens, 0),
        ((tokens, (4, 2)), 0),
        (torch.cat([tokens[:, :1], tokens], 1), 1),
    ):
        torch.testing.assert_close(as_map(output, (32, 16), prefix), expected)
    refuses('the output of the layer must be a map', as_map, tokens, (32, 16), 1)


def test_the_picture_shows_the_energy_and_the_shares():
    energy = torch.zeros(9, 9, dtype=torch.float64)
    energy[4, 4], energy[4, 2], energy[4, 6] = 0.5, 0.25, 0.25
    figure = draw_receptive_field({'layers.0': energy, 'layers.1': energy.T})
    curve, first, second, _ = figure.axes
    np.testing.assert_allclose(second.images[0].get_array(), (energy.T / 0.5).clamp(min=1e-6))
    assert first.get_title() == 'layers.0\nhalf within 0 px, 90 % within 2 px'
    radius, share = curve.lines[0].get_data()
    assert share[0] == 50 and share[-1] == 100 and share[radius < 2].max() == 50
