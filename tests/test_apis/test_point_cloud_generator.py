"""PointCloudGenerator and PLY files."""

import copy
import re

import numpy as np
import pytest
import trimesh
from mmengine.config import Config

from aft_mm.apis import PointCloudGenerator, write_ply
from aft_mm.visualization import sample_points

from ..errors import refuses, refuses_input


@pytest.fixture(scope='module')
def generator(untrained):
    return PointCloudGenerator(*untrained['tiny_clouds'], device='cpu')


def test_clouds_equal_those_of_the_model(generator, capsys):
    clouds = generator.sample(3, seed=0)
    assert '100%' in capsys.readouterr().err
    assert clouds.shape == (3, 8, 3) and clouds.dtype == np.float32
    np.testing.assert_array_equal(clouds, sample_points(generator.model, 3, 8, seed=0))
    for options in (dict(seed=1), dict(seed=0, temperature=0.1), dict(seed=0, top_k=1)):
        assert (generator.sample(3, **options) != clouds).any()
    assert generator.sample(progress=False).shape == (1, 8, 3)


def test_bad_input_is_named(generator, untrained):
    refuses('num must be an int, 1 or larger, got 0', generator.sample, 0)
    refuses('top_p', generator.sample, 1, top_p=2)
    refuses_input('options must be among .* got batch_size=3', generator.sample, batch_size=3)
    config = Config.fromfile(untrained['tiny_clouds'][0])
    for name, value, message in (
        ('num_bits', 7, 'num_bits=7 needs 128 values per token'),
        ('num_points', 9, 'num_points must be 8, .* position table, got 9'),
        ('up', 'w', "must be one of x, y, z, got 'w'"),
        ('up', None, 'got one without up'),
    ):
        other = copy.deepcopy(config)
        other.point_cloud[name] = value
        if value is None:
            other.point_cloud.pop(name)
        refuses(message, PointCloudGenerator, other, untrained['tiny_clouds'][1])


def test_a_ply_file_holds_the_points(tmp_path):
    points = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
    write_ply(tmp_path / 'a.ply', points)
    found = trimesh.load(tmp_path / 'a.ply')
    np.testing.assert_array_equal(found.vertices, points)


def test_bad_points_for_a_ply_file_are_rejected(tmp_path):
    for shape in ((2, 7, 3), (7, 2), (0, 3), (3,)):
        message = re.escape(f'one cloud [P, 3], got {list(shape)}')
        refuses_input(message, write_ply, tmp_path / 'a.ply', np.zeros(shape))
    for value in (np.nan, np.inf, 1e39):
        refuses_input('points must be finite', write_ply, tmp_path / 'a.ply', [[0, 1, value]])
    refuses('path must be the path of a file', write_ply, 3, np.zeros((7, 3)))
    for name in ('a.pcd', 'a'):
        message = f"must end in .ply, got '.*/{name}'"
        refuses_input(message, write_ply, tmp_path / name, np.zeros((7, 3)))
    assert not list(tmp_path.iterdir())
