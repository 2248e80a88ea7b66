from typing import Any

import numpy as np
import torch
from mmengine.device import get_device
from torch import Tensor

from aft_mm.checks import check_choice, check_flag
from aft_mm.openmmlab import warn
from aft_mm.registry import METRICS
from aft_mm.tokenizers import check_num_bits, decode_points

from .base import GenerationMetric
from .point_cloud import (
    chamfer_distances,
    coverage,
    earth_mover_distances,
    minimum_matching_distance,
    nearest_neighbor_accuracy,
    normalized,
)

# With fewer, a share is uncertain by more than 11 %.
FEW_CLOUDS = 20
MOST_GAPS = 2**25  # distances between points in memory, 128 MiB
#: Unit of length for each normalization.
UNITS = dict(box='edges', set='deviations')


@METRICS.register_module()
class PointCloudDistance(GenerationMetric):
    """Chamfer or earth mover's distance between N generated clouds and N of the test set.

    ``mmd_squared_edges``, ``coverage_percent`` and ``1nna_percent`` (docs/tasks/point_cloud.md), in
    squared longest edges of the bounding box. ``emd`` adds ``mmd_emd_edges``,
    ``coverage_emd_percent`` and ``1nna_emd_percent``.

    Args:
        num_bits: Bits per coordinate, as in ``PackPointCloud``.
        emd: Also compute the exact earth mover's distance.
        normalization: ``'box'``, or ``'set'`` to normalise by the test clouds, see
            :func:`.point_cloud.normalized`; the unit is then ``deviations``.

    Raises:
        ValueError: If an argument is not allowed, or a cloud has several samples.
    """

    def __init__(
        self, num_bits: int = 8, emd: bool = False, normalization: str = 'box', **kwargs: Any
    ) -> None:
        check_num_bits(num_bits)
        check_flag('emd', emd)
        check_choice('normalization', normalization, tuple(UNITS))
        self.num_bits, self.emd, self.normalization = num_bits, emd, normalization
        super().__init__(**kwargs)

    def _measure(self, tokens: Tensor, sample: dict) -> np.ndarray:
        generated = sample['generated']
        if len(generated) != 1:
            raise ValueError(
                'PointCloudDistance needs two sets of equal size, so num_samples of test_cfg must '
                f'be 1, got {len(generated)}'
            )
        # Bytes, as all are sent to the first rank.
        return np.stack([generated[0].cpu().numpy(), tokens.cpu().numpy()]).astype(np.uint8)

    def compute_metrics(self, results: list) -> dict:
        pairs = self._measured(results)
        if not pairs:
            return {}
        if len(pairs) < FEW_CLOUDS:
            warn(
                f'PointCloudDistance compares only {len(pairs)} generated cloud(s) with as many of the '
                f'test set; results are unreliable below {FEW_CLOUDS}'
            )
        generated, truth = zip(*pairs, strict=True)
        clouds = torch.from_numpy(decode_points(np.stack(generated + truth), self.num_bits)).float()
        if self.normalization == 'set':
            clouds = normalized(clouds, clouds[len(generated) :])
        unit = UNITS[self.normalization]
        block = max(1, MOST_GAPS // clouds.shape[1] ** 2)
        distances = chamfer_distances(clouds.to(get_device()), block, progress=True)
        metrics = _compared(distances, len(generated), f'squared_{unit}', '')
        if self.emd:
            distances = earth_mover_distances(clouds, progress=True)
            metrics |= _compared(distances, len(generated), f'emd_{unit}', 'emd_')
        return metrics


def _compared(distances: Tensor, num_generated: int, unit: str, kind: str) -> dict[str, float]:
    across = distances[:num_generated, num_generated:]
    return {
        f'mmd_{unit}': minimum_matching_distance(across),
        f'coverage_{kind}percent': 100 * coverage(across),
        f'1nna_{kind}percent': 100 * nearest_neighbor_accuracy(distances, num_generated),
    }
