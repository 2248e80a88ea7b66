"""Pipeline steps for point clouds."""

import numpy as np
import torch

from aft_mm.checks import check_int
from aft_mm.registry import TRANSFORMS
from aft_mm.structures import SequenceSample
from aft_mm.tokenizers import bounding_cube, check_num_bits, check_order, encode_points

from ..point_clouds import read_points
from .base import Transform


@TRANSFORMS.register_module()
class LoadPoints(Transform):
    """Read ``results['points_path']`` into ``results['points']``, see :func:`aft_mm.datasets.read_points`."""

    def transform(self, results: dict) -> dict:
        results['points'] = read_points(results['points_path'])
        return results


@TRANSFORMS.register_module()
class PackPointCloud(Transform):
    """Sample points of a cloud and encode them as a sequence; the last step of a pipeline.

    Returns ``dict(inputs=uint8 [3·num_points], data_samples=SequenceSample(length, num_context=0,
    box))`` with the tokens of :func:`aft_mm.tokenizers.encode_points` in the cloud's bounding cube.

    Args:
        num_points: Number of points; smaller clouds are sampled with replacement and a warning.
        num_bits: Bits per coordinate, 1 to 8.
        order: See :func:`aft_mm.tokenizers.encode_points`.
        seed: An int gives a cloud the same points in every epoch; None uses numpy's global
            generator.
    """

    def __init__(
        self, num_points: int = 2048, num_bits: int = 8, order: str = 'raw', seed: int | None = None
    ) -> None:
        check_int('num_points', num_points, 1)
        check_num_bits(num_bits)
        check_order(order)
        if seed is not None:
            check_int('seed', seed, 0)
        self.num_points = num_points
        self.num_bits = num_bits
        self.order = order
        self.seed = seed

    def transform(self, results: dict) -> dict:
        points = results['points']
        short = len(points) < self.num_points
        generator = (
            np.random
            if self.seed is None
            else np.random.default_rng((self.seed, results['sample_idx']))
        )
        sampled = points[generator.choice(len(points), self.num_points, replace=short)]
        box = bounding_cube(points)
        tokens = torch.from_numpy(encode_points(sampled, self.num_bits, box, self.order))
        metainfo = dict(length=len(tokens), num_context=0, box=box)
        if short:
            message = f'a cloud of fewer than {self.num_points} points is sampled with replacement'
            metainfo['warnings'] = {message: results.get('points_path')}
        return dict(inputs=tokens, data_samples=SequenceSample(metainfo=metainfo))
