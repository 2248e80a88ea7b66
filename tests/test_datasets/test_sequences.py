"""Images as sequences of tokens."""

import numpy as np
import pytest
import torch
from mmengine.dataset import Compose
from mmengine.registry import TRANSFORMS, DefaultScope, init_default_scope

from aft_mm.datasets import PackSequence, RandomValueShift


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
    with pytest.raises(ValueError, match="tokens must be one of subpixels, pixels, got 'rgb'"):
        PackSequence(image_shape=(5, 7, 3), tokens='rgb')
    for wrong in (-1, 256):
        with pytest.raises(ValueError, match=f'max_shift must be an int, 0 to 255, got {wrong}'):
            RandomValueShift(wrong)


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
