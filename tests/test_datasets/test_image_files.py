"""Image files of any kind as RGB, and as pairs of two sizes."""

import numpy as np
import pytest
import torch
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from PIL import Image

from aft_mm.datasets import (
    LoadRGBImage,
    PackSequence,
    SuperResolutionPair,
    UnusableFile,
    read_rgb,
)

GREY = 'a grey image is read as three equal channels'
ALPHA = 'a transparent image is laid on white'


@pytest.fixture
def noise():
    return np.random.default_rng(0).integers(0, 256, (41, 31, 4), dtype=np.uint8)


def save(folder, array, name='a.png', **options):
    path = folder / name
    Image.fromarray(array).save(path, **options)
    return str(path)


def load(path):
    return LoadRGBImage()(dict(img_path=path))


def test_rgb_is_rgb_without_a_remark(tmp_path, noise):
    results = load(save(tmp_path, noise[..., :3]))
    assert results['img'].dtype == np.uint8 and 'warnings' not in results
    np.testing.assert_array_equal(results['img'], noise[..., :3])


def test_grey_black_and_white_and_sixteen_bits_become_three_equal_channels(tmp_path, noise):
    grey = noise[..., 0]
    deep = grey.astype(np.uint16) << 8 | noise[..., 1]
    for saved, expected in ((grey, grey), (grey > 100, np.where(grey > 100, 255, 0)), (deep, grey)):
        path = save(tmp_path, saved)
        results = load(path)
        np.testing.assert_array_equal(results['img'], np.dstack([expected] * 3))
        assert results['warnings'] == {GREY: path}


def on_white(colour, alpha):
    share = alpha[..., None] / 255
    return colour * share + 255 * (1 - share)


@pytest.mark.parametrize(
    ('channels', 'remarks'), [([0, 1, 2, 3], {ALPHA}), ([2, 3], {GREY, ALPHA})]
)
def test_transparency_lies_on_white(tmp_path, noise, channels, remarks):
    path = save(tmp_path, noise[..., channels])
    results = load(path)
    expected = on_white(noise[..., channels[:-1]], noise[..., 3])
    np.testing.assert_allclose(results['img'], np.broadcast_to(expected, (41, 31, 3)), atol=1)
    assert results['warnings'] == dict.fromkeys(remarks, path)


@pytest.mark.parametrize('channels', [[0, 1, 2], [1]])
def test_an_alpha_channel_that_hides_nothing_is_no_remark(tmp_path, noise, channels):
    opaque = np.dstack([noise[..., channels], np.full((41, 31), 255, np.uint8)])
    image, warnings = read_rgb(save(tmp_path, opaque))
    np.testing.assert_array_equal(image, np.broadcast_to(noise[..., channels], (41, 31, 3)))
    assert warnings == ([GREY] if len(channels) == 1 else [])


def test_a_palette_with_a_transparent_colour(tmp_path, noise):
    image = Image.fromarray(noise[..., :3]).quantize(16)
    image.save(tmp_path / 'a.gif', transparency=3)
    found, warnings = read_rgb(tmp_path / 'a.gif')
    transparent = np.asarray(image) == 3
    assert transparent.any() and (found[transparent] == 255).all() and warnings == [ALPHA]
    np.testing.assert_array_equal(
        found[~transparent], np.asarray(image.convert('RGB'))[~transparent]
    )


def test_orientation_is_applied(tmp_path, noise):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees
    image, _ = read_rgb(save(tmp_path, noise[..., :3], exif=exif))
    np.testing.assert_array_equal(image, np.rot90(noise[..., :3], -1))


@pytest.mark.parametrize('name', ['a.jpg', 'a.png', 'a.webp', 'a.tiff', 'a.bmp'])
@pytest.mark.parametrize(
    'damage',
    [
        lambda data: b'',
        lambda data: data[:9],
        lambda data: data[: len(data) // 2],
        lambda data: b'\0' * 20 + data[20:],
    ],
    ids=['empty', 'beginning', 'half', 'header'],
)
def test_a_damaged_image_is_named_in_one_sentence(tmp_path, noise, name, damage):
    path = tmp_path / name
    save(tmp_path, noise[..., :3], name)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnusableFile, match=f"^image '{path}' cannot be read: ") as error:
        load(str(path))
    assert str(error.value).endswith('read: it is damaged or of another kind than its name says')


def test_missing_images_floats_and_too_many_pixels_are_named(tmp_path, noise, monkeypatch):
    with pytest.raises(UnusableFile, match="no.jpg' cannot be read: it does not exist$"):
        load(str(tmp_path / 'no.jpg'))
    path = save(tmp_path, noise[..., 0].astype(np.float32), 'a.tiff')
    with pytest.raises(UnusableFile, match="a.tiff' must have 8 or 16 bits .*, got mode 'F'"):
        load(path)
    path = save(tmp_path, noise)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 500)
    with pytest.raises(UnusableFile, match="a.png' has more pixels than Pillow reads"):
        load(path)


def area_mean(image, size):
    edges = np.linspace(0, len(image), size + 1)
    pixel = np.arange(len(image))
    cover = (np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)).clip(0)
    cover /= cover.sum(1, keepdims=True)
    return np.einsum('ij,jkc,lk->ilc', cover, image.astype(float), cover)


@pytest.mark.parametrize(
    ('size', 'scale_factor', 'crop_size', 'edge'),
    [(8, 4, None, 31), (8, 2, 24, 24), (6, 3, 29, 29), (12, 1, 12, 12)],
)
def test_the_pair_is_the_mean_over_areas_of_the_centre(noise, size, scale_factor, crop_size, edge):
    image = noise[..., :3]
    results = SuperResolutionPair(size, scale_factor, crop_size)(dict(img=image))
    top, left = (41 - edge) // 2, (31 - edge) // 2
    expected = area_mean(image[top : top + edge, left : left + edge], size)
    assert results['img'].dtype == results['source'].dtype == np.uint8
    np.testing.assert_allclose(results['img'], expected, atol=0.51)
    small = area_mean(results['img'], size // scale_factor)
    np.testing.assert_allclose(results['source'], small, atol=0.51)


@pytest.mark.parametrize('crop_size', [32, None])
def test_an_image_smaller_than_the_crop_is_named(noise, crop_size):
    message = "^image 'a/b.png' of 41 x 31 px is smaller than the crop of 32 px"
    with pytest.raises(UnusableFile, match=message):
        SuperResolutionPair(32, 4, crop_size)(dict(img=noise[..., :3], img_path='a/b.png'))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(size=30), 'size must be a multiple of scale_factor=4, got 30'),
        (dict(size=0), 'size must be an int, 1 or larger, got 0'),
        (dict(scale_factor=0), 'scale_factor must be an int, 1 or larger, got 0'),
        (dict(crop_size=31), 'crop_size must be an int, 32 or larger, got 31'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SuperResolutionPair(**options)


@pytest.mark.parametrize(
    ('tokens', 'shapes'), [('pixels', [(64, 3), (16, 3)]), ('subpixels', [(192,), (48,)])]
)
def test_source_and_remarks_are_packed(tmp_path, noise, tokens, shapes):
    init_default_scope('aft_mm')
    path = save(tmp_path, noise[..., 0])
    pipeline = Compose(
        [
            dict(type='LoadRGBImage'),
            dict(type='mmpretrain.RandomFlip', prob=1.0, direction='horizontal'),
            dict(type='SuperResolutionPair', size=8, scale_factor=2),
            dict(type='PackSequence', image_shape=(8, 8, 3), tokens=tokens),
        ]
    )
    packed = pipeline(dict(img_path=path))
    sample = packed['data_samples']
    assert [tuple(packed['inputs'].shape), tuple(sample.source.shape)] == shapes
    assert sample.source.dtype == torch.uint8 and sample.warnings == {GREY: path}
    pair = SuperResolutionPair(8, 2)(dict(img=noise[:, ::-1, [0, 0, 0]]))
    np.testing.assert_array_equal(packed['inputs'].view(8, 8, 3), pair['img'])
    np.testing.assert_array_equal(sample.source.view(4, 4, 3), pair['source'])


@pytest.mark.parametrize('grey', [lambda x: x[..., 0], lambda x: x[..., :1]])
@pytest.mark.parametrize('tokens, shape', [('pixels', (16, 1)), ('subpixels', (16,))])
def test_grey_sources_are_packed_as_their_images(noise, grey, tokens, shape):
    pair = SuperResolutionPair(8, 2)(dict(img=grey(noise)))
    packed = PackSequence((8, 8, 1), tokens)(pair)
    assert tuple(packed['data_samples'].source.shape) == shape
    assert len(packed['inputs']) == 64


def test_without_a_source_there_is_none(noise):
    sample = PackSequence((41, 31, 4))(dict(img=noise))['data_samples']
    assert 'source' not in sample and 'warnings' not in sample
