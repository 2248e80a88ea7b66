"""The feature pyramid: sizes, receptive fields, bad arguments."""

from math import ceil

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.registry import DefaultScope
from torch import nn

from aft_mm.models import SimpleFeaturePyramid
from aft_mm.registry import MODELS

from ..errors import refuses


@pytest.mark.parametrize('size', [(6, 8), (7, 5), (1, 1), (13, 2)])
@pytest.mark.parametrize('num_outs', [None, 4, 6])
def test_sizes_of_the_levels(size, num_outs):
    neck = SimpleFeaturePyramid(16, out_channels=10, num_outs=num_outs)
    levels = neck((torch.randn(2, 16, *size),))
    strides = [4, 8, 16, 32, 64, 128][: num_outs or 4]
    assert isinstance(levels, tuple) and [tuple(y.shape) for y in levels] == [
        (2, 10, *(ceil(n * 16 / stride) for n in size)) for stride in strides
    ]


@pytest.mark.parametrize('pixels', [224, 225, 300, 333])
def test_coarse_levels_cover_the_image_exactly(pixels):
    side = ceil(pixels / 16)
    neck = SimpleFeaturePyramid(8, out_channels=4, strides=(16, 32, 64, 128), num_outs=5)
    sides = [level.shape[2] for level in neck((torch.randn(1, 8, side, side),))]
    assert sides == [ceil(pixels / stride) for stride in (16, 32, 64, 128, 256)]


def test_coarser_levels_pool_the_maximum_and_extra_levels_subsample():
    neck = SimpleFeaturePyramid(6, out_channels=5, strides=(16, 32, 64), num_outs=4)
    x = torch.randn(2, 6, 7, 5) - 4  # a padding of 0 would be the maximum
    levels = neck((x,))
    for level, size in [(0, 1), (1, 2), (2, 4)]:
        pad = (0, -5 % size, 0, -7 % size)
        blocks = F.pad(x, pad, value=-torch.inf).unfold(2, size, size).unfold(3, size, size)
        _, *end = neck.levels[level] if size > 1 else (None, *neck.levels[level])
        torch.testing.assert_close(levels[level], nn.Sequential(*end)(blocks.amax((4, 5))))
    assert torch.equal(levels[3], levels[2][:, :, ::2, ::2])


def test_the_number_of_maps_is_an_int():
    for wrong in ('5', 5.5, 3):
        refuses(
            'num_outs must be an int, 4 or larger, got', SimpleFeaturePyramid, 8, num_outs=wrong
        )


def test_finer_levels_upsample_each_position():
    neck = SimpleFeaturePyramid(8, out_channels=4, strides=(4, 8)).double()
    up = [nn.Sequential(*level[:-2]) for level in neck.levels]  # without the 3 × 3 convolution
    x = torch.randn(1, 8, 5, 3, dtype=torch.float64)
    changed = x.clone()
    changed[:, :, 2, 1] += torch.randn(8)
    for scale, part in zip((4, 2), up, strict=True):
        moved = (part(x) - part(changed)).abs().sum(1)[0] > 1e-9
        expected = torch.zeros(5, 3, dtype=torch.bool)
        expected[2, 1] = True
        expected = expected.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        assert torch.equal(moved, expected)
        assert part(x)[0, 0, 2 * scale : 3 * scale, scale : 2 * scale].unique().numel() > 1


def test_levels_are_normalised_over_channels():
    neck = SimpleFeaturePyramid(8, out_channels=32)
    for level in neck((100 * torch.randn(2, 8, 4, 3) + 7,)):
        torch.testing.assert_close(level.mean(1), torch.zeros_like(level[:, 0]), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            level.var(1, correction=0), torch.ones_like(level[:, 0]), atol=1e-3, rtol=0
        )


def test_levels_are_contiguous():
    levels = SimpleFeaturePyramid(16, out_channels=10, num_outs=5)((torch.randn(2, 16, 7, 5),))
    assert all(level.is_contiguous() for level in levels)


@pytest.mark.parametrize('shape', [(2, 16), (2, 35, 16), (2, 12, 7, 5)])
def test_a_vector_and_another_width_are_refused(shape):
    with pytest.raises(ValueError, match=r"must be a map \[B, 16, H, W\].*out_type='featmap'"):
        SimpleFeaturePyramid(16)((torch.randn(shape),))


def test_every_parameter_gets_a_gradient_and_upsampling_has_norm_and_gelu():
    neck = SimpleFeaturePyramid(8, out_channels=4)
    assert [type(layer).__name__ for layer in neck.levels[0][:4]] == [
        'ConvTranspose2d',
        'ChannelNorm',
        'GELU',
        'ConvTranspose2d',
    ]
    sum((y * torch.randn_like(y)).sum() for y in neck((torch.randn(2, 8, 3, 5),))).backward()
    for name, parameter in neck.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize('scope', ['mmengine', 'mmpretrain'])
def test_a_host_library_builds_the_neck_by_name(scope):
    with DefaultScope.overwrite_default_scope(scope):
        neck = ROOT_MODELS.build(dict(type='aft_mm.SimpleFeaturePyramid', in_channels=16))
    assert isinstance(neck, SimpleFeaturePyramid)
    neck.init_weights()


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(strides=(4, 12)), r'strides must be in_stride=16, the patch size, times .* got 12'),
        (dict(in_stride=14), 'strides must be in_stride=14, the patch size, .* power of 2, got 4'),
        (dict(strides=(16, 48)), 'power of 2, got 48'),
        (dict(strides=(0,)), 'power of 2, got 0'),
        (dict(strides=(-8, 8)), 'power of 2, got -8'),
        (dict(strides=()), r'strides must be ascending ints, one or more, got \(\)'),
        (dict(strides=(8, 4)), r'strides must be ascending ints, one or more, got \(8, 4\)'),
        (dict(strides=(8, 8)), r'strides must be ascending ints, one or more, got \(8, 8\)'),
        (dict(strides=4), 'strides must be ascending ints, one or more, got 4'),
        (dict(out_channels=0), 'out_channels must be an int, 1 or larger, got 0'),
        (dict(in_channels=18), 'in_channels must be divisible by 4 for stride 4, got 18'),
        (dict(num_outs=3), 'num_outs must be an int, 4 or larger, got 3'),
    ],
    ids=str,
)
def test_bad_arguments_raise_a_one_line_error(options, message):
    options = {'in_channels': 16, **options}
    refuses(message, MODELS.build, dict(type='aft_mm.SimpleFeaturePyramid', **options))
