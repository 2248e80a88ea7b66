"""Pipeline steps of images: pairs of two sizes, and sequences."""

import numpy as np
import pytest
import torch
from mmengine.dataset import Compose
from mmengine.registry import TRANSFORMS, DefaultScope, init_default_scope
from PIL import Image

from aft_mm.datasets import (
    PackSequence,
    RandomValueShift,
    SuperResolutionPair,
    UnusableFile,
)
from aft_mm.images import GREY

from ..errors import refuses


@pytest.fixture
def noise():
    return np.random.default_rng(0).integers(0, 256, (41, 31, 4), dtype=np.uint8)


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
        (dict(size=32.0), 'size must be '),
        (dict(crop_size='a'), 'crop_size must be '),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    refuses(message, SuperResolutionPair, **options)


@pytest.mark.parametrize(
    ('tokens', 'shapes'), [('pixels', [(64, 3), (16, 3)]), ('subpixels', [(192,), (48,)])]
)
def test_source_and_remarks_are_packed(tmp_path, noise, tokens, shapes):
    init_default_scope('aft_mm')
    path = str(tmp_path / 'a.png')
    Image.fromarray(noise[..., 0]).save(path)
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


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def test_subpixels_run_along_the_rows_red_green_blue(image):
    packed = PackSequence(image_shape=(5, 7, 3))(dict(img=image))
    tokens = packed['inputs']
    assert tokens.dtype == torch.uint8 and tokens.shape == (105,)
    assert tokens[(2 * 7 + 4) * 3 + 1] == image[2, 4, 1]
    np.testing.assert_array_equal(tokens.view(5, 7, 3), image)
    sample = packed['data_samples']
    assert (sample.length, sample.num_context) == (105, 0)


def test_pixels_are_vectors(image):
    packed = PackSequence(image_shape=(5, 7, 3), tokens='pixels')(dict(img=image))
    assert packed['inputs'].shape == (35, 3) and packed['data_samples'].length == 35
    np.testing.assert_array_equal(packed['inputs'][2 * 7 + 4], image[2, 4])


@pytest.mark.parametrize('grey', [np.s_[..., 0], np.s_[..., :1]])
@pytest.mark.parametrize(('tokens', 'shape'), [('subpixels', (35,)), ('pixels', (35, 1))])
def test_grey_images(image, grey, tokens, shape):
    packed = PackSequence(image_shape=(5, 7, 1), tokens=tokens)(dict(img=image[grey]))
    assert packed['inputs'].shape == shape
    np.testing.assert_array_equal(packed['inputs'].flatten(), image[..., 0].ravel())


@pytest.mark.parametrize(
    'wrong',
    [np.zeros((7, 5, 3), np.uint8), np.zeros((5, 7), np.uint8), np.zeros((5, 7, 3), np.float32)],
)
def test_another_image_is_refused(wrong):
    with pytest.raises(ValueError, match=r'image must be uint8 of image_shape \(5, 7, 3\), got'):
        PackSequence(image_shape=[5, 7, 3])(dict(img=wrong))


def test_shift_is_one_value_per_image_clipped_and_of_every_size():
    image = np.arange(0, 255, dtype=np.uint8).reshape(5, 17, 3)
    shift = RandomValueShift(max_shift=3)
    seen = set()
    for _ in range(100):
        shifted = shift(dict(img=image.copy()))['img']
        assert shifted.dtype == np.uint8
        by = int(shifted[2, 2, 2]) - int(image[2, 2, 2])
        seen.add(by)
        np.testing.assert_array_equal(shifted, np.clip(image.astype(int) + by, 0, 255))
    assert seen == {-3, -2, -1, 0, 1, 2, 3}


def test_bad_arguments_are_named():
    for wrong in ('rgb', 5):
        message = f'^tokens must be one of subpixels, pixels, got {wrong!r}'
        refuses(message, PackSequence, image_shape=(5, 7, 3), tokens=wrong)
    for wrong in (8, (8, 8), '883', (8, 8, 3.0)):
        refuses('^image_shape .* must be 3 ints', PackSequence, wrong)
    for wrong in (-1, 256, 1.5):
        refuses(f'^max_shift must be an int, 0 to 255, got {wrong}', RandomValueShift, wrong)


@pytest.mark.parametrize('scope', ['aft_mm', 'mmpretrain'])
def test_pipeline_of_a_config_with_the_flip_of_mmcv(image, scope):
    init_default_scope(scope)
    pipeline = Compose(
        [
            dict(type='RandomFlip', prob=1.0, direction='horizontal'),
            dict(type='aft_mm.RandomValueShift', max_shift=0),
            dict(type='aft_mm.PackSequence', image_shape=(5, 7, 3)),
        ]
    )
    tokens = pipeline(dict(img=image))['inputs']
    np.testing.assert_array_equal(tokens.view(5, 7, 3), image[:, ::-1])
    assert DefaultScope.get_current_instance().scope_name == scope
    assert TRANSFORMS.get('aft_mm.PackSequence') is PackSequence
