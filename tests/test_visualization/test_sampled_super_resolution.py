"""Samples of super-resolution: inputs and outputs of the model."""

import numpy as np
import pytest
import torch

from aft_mm.datasets import PackSequence
from aft_mm.errors import UserError
from aft_mm.visualization import check_super_resolution, super_resolve

from ..errors import refuses, refuses_input
from ..generation_models import IMAGE, SOURCE, points_model, super_resolution_model


@pytest.fixture(scope='module')
def model():
    return super_resolution_model()


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (3, *SOURCE), dtype=np.uint8)


def test_samples_are_the_tokens_of_each_source(model, images):
    options = dict(seed=1, temperature=0.8, top_k=2)
    samples = super_resolve(model, images, IMAGE, 2, **options)
    assert samples.shape == (3, 2, *IMAGE) and samples.dtype == np.uint8
    sources = [torch.from_numpy(image.astype(np.int64)).reshape(-1, 3) for image in images]
    tokens = model.generate(24, source=[x for x in sources for _ in range(2)], **options)
    pack = PackSequence(image_shape=IMAGE, tokens='pixels')
    assert (samples[:, 0] != samples[:, 1]).any()
    for sample, expected in zip(samples.reshape(-1, *IMAGE), tokens, strict=True):
        torch.testing.assert_close(pack(dict(img=sample))['inputs'].long(), expected)


def test_one_channel(images):
    grey = super_resolution_model(channels=1)
    samples = super_resolve(grey, images[..., :1], (6, 4, 1), 20, seed=0)
    assert samples.shape == (3, 20, 6, 4, 1)
    assert (samples != super_resolve(grey, 255 - images[..., :1], (6, 4, 1), 20, seed=0)).any()


@pytest.mark.parametrize(
    ('image_shape', 'source_shape', 'message'),
    [
        ((6, 5, 3), SOURCE, r'image_shape must be \(H, W, C\) with H·W·C = 72, .* \(6, 5, 3\)'),
        (
            (4, 6, 3),
            SOURCE,
            r'image_shape must be source_shape \(3, 2, 3\) with height and width times '
            r'a whole number, got \(4, 6, 3\)',
        ),
        (IMAGE, (3, 3, 3), r'source_shape must be \(h, w, C\) with h·w·C = 18, .* \(3, 3, 3\)'),
        (IMAGE, (3, 6), r'source_shape \(h, w, C\) must be 3 ints.* \(3, 6\)'),
        (IMAGE, (9, 2, 1), r'image_shape must be source_shape \(9, 2, 1\) with'),
    ],
)
def test_other_shapes_are_named(model, image_shape, source_shape, message):
    refuses(message, check_super_resolution, model, image_shape, source_shape)


def test_other_bad_input_is_named(model, images):
    with pytest.raises(UserError, match='needs a model with an encoder, but it has none'):
        check_super_resolution(points_model(), (5, 3, 1), (5, 3, 1))
    refuses_input('images must hold at least one image', super_resolve, model, images[:0], IMAGE)
    for num in (0, 1.5):
        with pytest.raises(ValueError, match=f'num must be an int, 1 or larger, got {num}'):
            super_resolve(model, images, IMAGE, num)
    refuses('temperature', super_resolve, model, images, IMAGE, temperature=-1)
