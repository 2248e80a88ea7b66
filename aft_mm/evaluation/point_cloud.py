"""Distances between point clouds, and between sets of point clouds."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from aft_mm.progress import progress as with_bar


def chamfer_distances(clouds: Tensor, block: int, progress: bool = False) -> Tensor:
    """Compute the Chamfer distances between all pairs of M clouds, [M, P, 3] -> [M, M].

    ``d(a, b) = mean_i min_j |a_i − b_j|² + mean_j min_i |a_i − b_j|²``, in the squared unit of the
    coordinates.

    Args:
        clouds: [M, P, 3] of a floating type.
        block: Number of pairs that are compared at once.
    """
    squares = clouds.square().sum(-1)
    distances = clouds.new_zeros(len(clouds), len(clouds))
    for i in with_bar(range(len(clouds)), 'Chamfer distances', shown=progress):
        for first in range(i + 1, len(clouds), block):
            others = slice(first, first + block)
            # Its error is 1e-7 in float32 for coordinates of about 1, and 0 at 8 bits.
            gaps = squares[i] + squares[others, :, None] - 2 * clouds[others] @ clouds[i].T
            distances[i, others] = gaps.amin(1).mean(1) + gaps.amin(2).mean(1)
    return (distances + distances.T).clamp_min(0)


def earth_mover_distances(clouds: Tensor, progress: bool = False) -> Tensor:
    """Compute the earth mover's distances between all pairs of M clouds, [M, P, 3] -> [M, M].

    ``d(a, b) = min_φ mean_i |a_i − b_φ(i)|`` over the permutations φ, in the unit of the
    coordinates.

    Args:
        clouds: [M, P, 3] of a floating type.
    """
    distances = clouds.new_zeros(len(clouds), len(clouds), device='cpu')
    for i in with_bar(range(len(clouds)), "Earth mover's distances", shown=progress):
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
