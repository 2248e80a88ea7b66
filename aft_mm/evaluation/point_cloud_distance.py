"""Distances between point clouds, and between sets of point clouds."""

from typing import Any

import numpy as np
import torch
from mmengine.device import get_device
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from aft_mm.checks import check_choice, check_flag
from aft_mm.openmmlab import warn
from aft_mm.progress import progress
from aft_mm.registry import METRICS
from aft_mm.tokenizers import check_num_bits, decode_points

from .base import GenerationMetric


def chamfer_distances(clouds: Tensor, block: int) -> Tensor:
    """Compute the Chamfer distances between all pairs of M clouds, [M, P, 3] -> [M, M].

    ``d(a, b) = mean_i min_j |a_i − b_j|² + mean_j min_i |a_i − b_j|²``, in the squared unit of the
    coordinates.

    Args:
        clouds: [M, P, 3] of a floating type.
        block: Number of pairs that are compared at once.
    """
    squares = clouds.square().sum(-1)
    distances = clouds.new_zeros(len(clouds), len(clouds))
    for i in progress(range(len(clouds)), 'Chamfer distances'):
        for first in range(i + 1, len(clouds), block):
            others = slice(first, first + block)
            # Its error is 1e-7 in float32 for coordinates of about 1, and 0 at 8 bits.
            gaps = squares[i] + squares[others, :, None] - 2 * clouds[others] @ clouds[i].T
            distances[i, others] = gaps.amin(1).mean(1) + gaps.amin(2).mean(1)
    return (distances + distances.T).clamp_min(0)


def earth_mover_distances(clouds: Tensor) -> Tensor:
    """Compute the earth mover's distances between all pairs of M clouds, [M, P, 3] -> [M, M].

    ``d(a, b) = min_φ mean_i |a_i − b_φ(i)|`` over the permutations φ, in the unit of the
    coordinates.

    Args:
        clouds: [M, P, 3] of a floating type.
    """
    distances = clouds.new_zeros(len(clouds), len(clouds), device='cpu')
    for i in progress(range(len(clouds)), "Earth mover's distances"):
        for j in range(i + 1, len(clouds)):
            # |a|² + |b|² − 2ab would cancel for near points, which matter here.
            gaps = torch.cdist(clouds[i], clouds[j], compute_mode='donot_use_mm_for_euclid_dist')
            gaps = gaps.double().cpu()
            distances[i, j] = gaps[linear_sum_assignment(gaps)].mean()
    return distances + distances.T


def normalized(clouds: Tensor, references: Tensor) -> Tensor:
    """Normalise clouds [M, P, 3] by mean and standard deviation of all references [R, P, 3].

    The mean is per axis, the deviation over all points and axes, as in PVD.

    Raises:
        ValueError: If all points of the references are equal.
    """
    first = references[0, 0]
    # Rounding may give equal numbers a deviation.
    if (references == first).all():
        raise ValueError(f'references must hold points that differ, but all are {first.tolist()}')
    centre = references.mean((0, 1))
    return (clouds - centre) / (references - centre).square().mean().sqrt()


def minimum_matching_distance(distances: Tensor) -> float:
    """Return the mean distance of references to the nearest generated cloud, of distances [G, R]."""
    return distances.amin(0).mean().item()


def coverage(distances: Tensor) -> float:
    """Return the share of references that are nearest to a generated cloud, of distances [G, R]."""
    return len(distances.argmin(1).unique()) / distances.shape[1]


def nearest_neighbor_accuracy(distances: Tensor, num_generated: int) -> float:
    """Return how often the nearest other cloud is from the same set (1-NNA, leave-one-out).

    0.5 if the sets cannot be distinguished, 1 if they can, 0 for copies.

    Args:
        distances: [M, M] between all clouds, the generated ones first.
    """
    itself = torch.eye(len(distances), dtype=torch.bool, device=distances.device)
    nearest = distances.masked_fill(itself, torch.inf).argmin(1)
    generated = torch.arange(len(distances), device=distances.device) < num_generated
    return (generated[nearest] == generated).double().mean().item()


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
            :func:`normalized`; the unit is then ``deviations``.

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
        distances = chamfer_distances(clouds.to(get_device()), block)
        metrics = _compared(distances, len(generated), f'squared_{unit}', '')
        if self.emd:
            distances = earth_mover_distances(clouds)
            metrics |= _compared(distances, len(generated), f'emd_{unit}', 'emd_')
        return metrics


def _compared(distances: Tensor, num_generated: int, unit: str, kind: str) -> dict[str, float]:
    across = distances[:num_generated, num_generated:]
    return {
        f'mmd_{unit}': minimum_matching_distance(across),
        f'coverage_{kind}percent': 100 * coverage(across),
        f'1nna_{kind}percent': 100 * nearest_neighbor_accuracy(distances, num_generated),
    }
