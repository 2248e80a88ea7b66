"""From a file of points to a sequence of tokens."""

import numpy as np
import torch
from mmcv.transforms import BaseTransform

from aft_mm.checks import check_int
from aft_mm.registry import TRANSFORMS
from aft_mm.structures import SequenceSample
from aft_mm.tokenizers import bounding_cube, check_num_bits, check_order, encode_points

from ..point_files import read_points


@TRANSFORMS.register_module()
class LoadPoints(BaseTransform):
    """Read ``results['points_path']`` to ``results['points']``, float64 [N, 3], columns x, y, z.

    :func:`aft_mm.datasets.point_files.read_points` names the formats, and raises UnusableFile for
    what cannot be used.
    """

    def transform(self, results: dict) -> dict:
        """Add ``points``."""
        results['points'] = read_points(results['points_path'])
        return results


@TRANSFORMS.register_module()
class PackPointCloud(BaseTransform):
    """Draw points of a cloud and lay them out as a sequence; the last step of a pipeline.

    Gives ``dict(inputs=uint8 [3·num_points], data_samples=SequenceSample(length, num_context=0,
    box))``, tokens as :func:`aft_mm.structures.encode_points` lays them out. The box is the
    bounding cube of the whole cloud, so that a shape stays in its place from draw to draw. Points
    are drawn without replacement, or with it from a cloud that has fewer, which ``remarks`` says
    then.

    Args:
        num_points: How many points to draw.
        num_bits: Bits of a coordinate, 1 to 8.
        order: ``'raw'`` sorts the points and then quantises them, as the ICLR submission does;
            ``'quantized'`` quantises them and then sorts.
        seed: None draws anew each time from numpy's global state; a number gives a sample the same
            points every time, as a test needs.

    Raises:
        ValueError: ``num_points`` or ``num_bits`` is out of range, or ``order`` unknown.
    """

    def __init__(
        self,
        num_points: int = 2048,
        num_bits: int = 8,
        order: str = 'raw',
        seed: int | None = None,
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
        """Pack ``results['points']``, [N, 3]."""
        points = results['points']
        short = len(points) < self.num_points
        # Both have the method choice; numpy's global one is seeded in every worker.
        source = (
            np.random
            if self.seed is None
            else np.random.default_rng((self.seed, results['sample_idx']))
        )
        drawn = points[source.choice(len(points), self.num_points, replace=short)]
        box = bounding_cube(points)
        tokens = torch.from_numpy(encode_points(drawn, self.num_bits, box, self.order))
        metainfo = dict(length=len(tokens), num_context=0, box=box)
        if short:
            sentence = (
                f'a cloud of fewer than {self.num_points} points is drawn from with replacement'
            )
            metainfo['remarks'] = {sentence: results.get('points_path')}
        return dict(inputs=tokens, data_samples=SequenceSample(metainfo=metainfo))
