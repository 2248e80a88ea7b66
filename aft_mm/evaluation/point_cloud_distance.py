"""A set of point clouds that a model drew against the test set."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmengine.device import get_device
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from torch import Tensor

from aft_mm.checks import check_choice, check_flag
from aft_mm.registry import METRICS
from aft_mm.tokenizers import check_num_bits, decode_points

from .point_cloud import (
    chamfer_distances,
    coverage,
    earth_mover_distances,
    minimum_matching_distance,
    nearest_neighbor_accuracy,
    normalized,
)

# Of fewer, a share is known to ± 11 % at best; of one, coverage is always 100 % and 1-NNA 0 %.
FEW_CLOUDS = 20
MOST_GAPS = 2**25  # distances between points that are held at once, 128 MiB of them
#: The unit of lengths, by normalization.
UNITS = dict(box='edges', set='deviations')


@METRICS.register_module()
class PointCloudDistance(BaseMetric):
    """Drawn clouds against as many of the test set, by their Chamfer or earth mover's distance.

    - ``mmd_squared_edges``: minimum matching distance, of a cloud of the test set to the nearest
      drawn one, the mean over the test set; smaller is better;
    - ``coverage_percent``: share of the test set that is the nearest one of a drawn cloud; larger
      is better;
    - ``1nna_percent``: how often the nearest neighbour of a cloud, of all the others together, is
      of the same set; 50 is best.

    All clouds are taken as their tokens stand, in the cube of side 1 around 0, so the unit of the
    Chamfer distance is the squared longest edge of the bounding box. It is the mean squared
    distance to the nearest point, from one to the other and back, summed.

    With ``emd`` there are ``mmd_emd_edges``, ``coverage_emd_percent`` and ``1nna_emd_percent``:
    the same by the earth mover's distance, the mean distance of points that are assigned to each
    other. It is exact; PVD's kernel sums squares over an approximate assignment, so its numbers are
    others. A pair of 1024 points takes some 0.4 s on a CPU, one of 2048 2 s.

    The test set's part are the clouds with ``drawn``, one draw each, so that the two sets are of
    one size; a warning says that numbers of fewer than 20 mean little. O(N²) in the number of
    clouds: 2·N² pairs, on the GPU where there is one.

    Args:
        num_bits: Bits per coordinate, as in ``PackPointCloud``.
        emd: Whether to compare by the earth mover's distance, too.
        normalization: ``'box'``, or ``'set'`` for coordinates less the mean and over the standard
            deviation of the test set's part, see :func:`.point_cloud.normalized`; lengths are
            named ``deviations`` then.
        collect_device: See :class:`aft_mm.evaluation.Likelihood`.
        **kwargs: Those of :class:`mmengine.evaluator.BaseMetric`, such as ``prefix``.

    Raises:
        ValueError: An argument is none of these, there are several draws for one cloud, or none
            at all.
    """

    default_prefix = ''  # without one mmengine warns in every run

    def __init__(
        self,
        num_bits: int = 8,
        emd: bool = False,
        normalization: str = 'box',
        collect_device: str = 'gpu',
        **kwargs,
    ) -> None:
        check_num_bits(num_bits)
        check_flag('emd', emd)
        check_choice('normalization', normalization, tuple(UNITS))
        self.num_bits, self.emd, self.normalization = num_bits, emd, normalization
        super().__init__(collect_device=collect_device, **kwargs)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep the tokens [T] of a cloud and those of its sample, ``drawn`` [1, T].

        One result per sample, drawn or not: mmengine finds repeated samples by their number.
        """
        for tokens, sample in zip(data_batch['inputs'], data_samples, strict=True):
            drawn = sample.get('drawn')
            if drawn is None:
                self.results.append(None)
                continue
            if len(drawn) != 1:
                raise ValueError(
                    'PointCloudDistance compares two sets of one size: num_samples of '
                    f'test_cfg must be 1, got {len(drawn)}'
                )
            # A byte each: all of them travel to the first rank.
            both = np.stack([drawn[0].cpu().numpy(), tokens.cpu().numpy()])
            self.results.append(both.astype(np.uint8))

    def compute_metrics(self, results: list) -> dict:
        """``{'mmd_squared_edges': ..., 'coverage_percent': ..., '1nna_percent': ..., ...}``."""
        pairs = [result for result in results if result is not None]
        if not pairs:
            raise ValueError(
                'PointCloudDistance needs clouds that were drawn, but there is none '
                f'in {len(results)} samples: test_cfg must be a GenerationTestLoop'
            )
        if len(pairs) < FEW_CLOUDS:
            print_log(
                f'PointCloudDistance compares {len(pairs)} drawn cloud(s) with as many of the test '
                f'set: its numbers mean little below {FEW_CLOUDS}',
                'current',
                logging.WARNING,
            )
        drawn, truth = zip(*pairs, strict=True)
        clouds = torch.from_numpy(decode_points(np.stack(drawn + truth), self.num_bits)).float()
        if self.normalization == 'set':
            clouds = normalized(clouds, clouds[len(drawn) :])
        unit = UNITS[self.normalization]
        block = max(1, MOST_GAPS // clouds.shape[1] ** 2)
        distances = chamfer_distances(clouds.to(get_device()), block, progress=True)
        metrics = _compared(distances, len(drawn), f'squared_{unit}', '')
        if self.emd:
            distances = earth_mover_distances(clouds, progress=True)
            metrics |= _compared(distances, len(drawn), f'emd_{unit}', 'emd_')
        return metrics


def _compared(distances: Tensor, num_drawn: int, unit: str, kind: str) -> dict[str, float]:
    """The three numbers of distances [M, M], those between drawn clouds first."""
    across = distances[:num_drawn, num_drawn:]
    return {
        f'mmd_{unit}': minimum_matching_distance(across),
        f'coverage_{kind}percent': 100 * coverage(across),
        f'1nna_{kind}percent': 100 * nearest_neighbor_accuracy(distances, num_drawn),
    }
