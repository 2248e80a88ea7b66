"""Pairs of two sizes for super-resolution, cut out of images and packed."""

import numpy as np
import pytest
import torch
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from PIL import Image

from aft_mm.datasets import PackSequence, SuperResolutionPair, UnusableFile
from aft_mm.images import GREY


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
