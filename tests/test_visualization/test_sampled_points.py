"""Samples of point clouds."""

import numpy as np
import pytest

from aft_mm.errors import UserError
from aft_mm.tokenizers import encode_points
from aft_mm.visualization import check_points, check_settings, sample_points

from ..errors import refuses, refuses_input
from ..generation_models import points_model, super_resolution_model


@pytest.fixture(scope='module')
def model():
    return points_model()


def test_clouds_are_decoded_tokens(model):
    clouds = sample_points(model, 3, num_bits=5, seed=1)
    assert clouds.shape == (3, 5, 3) and clouds.dtype == np.float32
    assert np.abs(clouds).max() < 0.5
    tokens = model.generate(15, batch_size=3, seed=1).numpy()
    unit = ((0.0, 0.0, 0.0), 1.0)
    for cloud, generated in zip(clouds, tokens, strict=True):
        # Sorted, because the model has not learned to.
        points = generated.reshape(5, 3)
        expected = points[np.lexsort(points.T[::-1])].reshape(-1)
        np.testing.assert_array_equal(encode_points(cloud, 5, unit), expected)


def test_points_may_share_positions():
    shared = points_model(tokens_per_position=3)
    assert sample_points(shared, 1, num_bits=5).shape == (1, 5, 3)


def test_other_models_are_named(model):
    for other, bits in (
        (model, 8),
        (points_model(16), 5),
        (points_model(num_values=33), 5),
        (super_resolution_model(), 8),
    ):
        with pytest.raises(UserError, match=f'point clouds with num_bits={bits} needs {2**bits} '):
            check_points(other, bits)
    check_points(model, 5, num_points=5)
    refuses_input('num_points must be 5, .* got 4', check_points, model, 5, num_points=4)
    for num in (0, 2.5):
        refuses(f'num must be an int, 1 or larger, got {num}', sample_points, model, num, 5)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(num_points=8, up='y'), 'got one without num_bits$'),
        (dict(num_bits=8), 'got one without num_points, up$'),
        (8, 'got one without num_points, num_bits, up$'),
        (dict(num_points=8, num_bits='8', up='y'), "num_bits of point_cloud must be .*, got '8'"),
        (dict(num_points=8, num_bits=8, up=2), 'must be one of x, y, z, got 2'),
    ],
)
def test_bad_settings_of_a_config_are_rejected(settings, message):
    refuses(message, check_settings, settings)
