"""Pictures of inputs, samples and originals."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from aft_mm.visualization import draw_super_resolution

HEADER = 20


@pytest.fixture(params=[1, 3])
def pictures(request):
    random, channels = np.random.default_rng(0), request.param
    return (
        random.integers(0, 256, (2, 4, 3, channels), dtype=np.uint8),
        random.integers(0, 256, (2, 3, 12, 9, channels), dtype=np.uint8),
        random.integers(0, 256, (2, 12, 9, channels), dtype=np.uint8),
    )


def cells(picture, num_columns):
    scale = 11  # of 9 pixels to at least 96
    grid = picture[HEADER + 2 :, 2:].reshape(2, 12 * scale + 2, num_columns, 9 * scale + 2, 3)
    return grid.swapaxes(1, 2)[:, :, :-2:scale, :-2:scale]


def test_columns_are_input_bicubic_samples_and_original(pictures):
    inputs, samples, targets = pictures
    found = cells(draw_super_resolution(*pictures), 6)
    np.testing.assert_array_equal(found[:, 0, ::3, ::3], np.broadcast_to(inputs, (2, 4, 3, 3)))
    np.testing.assert_array_equal(found[:, 0], found[:, 0, ::3, ::3].repeat(3, 1).repeat(3, 2))
    np.testing.assert_array_equal(found[:, 2:5], np.broadcast_to(samples, (2, 3, 12, 9, 3)))
    np.testing.assert_array_equal(found[:, 5], np.broadcast_to(targets, (2, 12, 9, 3)))


def test_bicubic_equals_another_library():
    """Equals torch's antialiased resize, except at borders and clipped values."""
    image = np.random.default_rng(1).integers(60, 190, (1, 9, 9, 1), dtype=np.uint8)
    picture = draw_super_resolution(image, np.zeros((1, 1, 18, 18, 1), np.uint8))
    scale = -(-96 // 18)
    found = picture[HEADER + 2 : -2 : scale, 2 + 18 * scale + 2 :][:, : 18 * scale : scale, 0]
    expected = F.interpolate(
        torch.from_numpy(image).permute(0, 3, 1, 2).double(),
        scale_factor=2,
        mode='bicubic',
        antialias=True,
    )[0, 0].numpy()
    np.testing.assert_allclose(found, expected, atol=1.01)


def test_every_column_has_its_own_name(pictures):
    picture = draw_super_resolution(*pictures)
    header = picture[:HEADER, : picture.shape[1] // 6 * 6]
    names = header.reshape(HEADER, 6, -1, 3).swapaxes(0, 1)
    assert all((name < 128).any() for name in names)
    assert not any((names[i] == names[j]).all() for i in range(6) for j in range(i))


def test_the_size_of_the_input_is_height_by_width(pictures):
    header = draw_super_resolution(*pictures)[:HEADER]
    width = header.shape[1]
    expected, font = Image.new('RGB', (width, HEADER), 'white'), ImageFont.load_default(size=13)
    ImageDraw.Draw(expected).text((width / 12, HEADER / 2), 'input 4x3', 'black', font, anchor='mm')
    np.testing.assert_array_equal(header[:, : width // 6], np.asarray(expected)[:, : width // 6])


def test_originals_may_be_missing_and_one_sample_has_no_number(pictures):
    inputs, samples, _ = pictures
    without, one = (draw_super_resolution(inputs, part) for part in (samples, samples[:, :1]))
    every = cells(draw_super_resolution(*pictures), 6)
    np.testing.assert_array_equal(cells(without, 5), every[:, :5])
    assert one.shape[1] == 3 * 101 + 2 and without.shape[1] == 5 * 101 + 2
    name = one[:HEADER, 2 * 101 + 2 :]
    assert (name < 128).sum() < (without[:HEADER, 2 * 101 + 2 : 3 * 101] < 128).sum()


def test_large_pictures_stay_as_they_are():
    samples = np.random.default_rng(0).integers(0, 256, (1, 1, 100, 100, 3), dtype=np.uint8)
    picture = draw_super_resolution(np.zeros((1, 50, 50, 3), np.uint8), samples)
    np.testing.assert_array_equal(picture[HEADER + 2 : -2, -102:-2], samples[0, 0])


def test_other_shapes_are_named(pictures):
    inputs, samples, targets = pictures
    for wrong in (samples[:1], samples[:, 0], samples[:, :, :, :8], samples[..., :0]):
        with pytest.raises(ValueError, match=r'samples must be \[N, K, H, W, C\] .* of inputs \[2'):
            draw_super_resolution(inputs, wrong)
    for wrong in (targets[:1], targets[:, :4]):
        with pytest.raises(ValueError, match='dimensions except for the concatenation axis'):
            draw_super_resolution(inputs, samples, wrong)
