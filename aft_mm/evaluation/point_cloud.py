"""Distances between point clouds and between sets of them."""

import torch
from rich.console import Console
from rich.progress import track
from scipy.optimize import linear_sum_assignment
from torch import Tensor

__all__ = [
    'chamfer_distances',
    'coverage',
    'earth_mover_distances',
    'minimum_matching_distance',
    'nearest_neighbor_accuracy',
    'normalized',
]


def chamfer_distances(clouds: Tensor, block: int, progress: bool = False) -> Tensor:
    """Chamfer distance between every two of M clouds, [M, P, 3] -> [M, M].

    ``d(a, b) = mean_i min_j |a_i − b_j|² + mean_j min_i |a_i − b_j|²``, in the squared unit of the
    coordinates. O(M²·P²) time; O(block·P²) memory beside the result.

    Args:
        clouds: [M, P, 3] of a floating type.
        block: How many pairs to compare at once.
        progress: Show a progress bar on stderr.
    """
    squares = clouds.square().sum(-1)
    distances = clouds.new_zeros(len(clouds), len(clouds))
    bar = dict(console=Console(stderr=True), disable=not progress)
    for i in track(range(len(clouds)), 'Chamfer distances', **bar):
        for first in range(i + 1, len(clouds), block):
            others = slice(first, first + block)
            # |a|² + |b|² − 2ab: next to coordinates of about 1 it loses 1e-7 in float32, and
            # nothing where these are quantised to 8 bits.
            gaps = squares[i] + squares[others, :, None] - 2 * clouds[others] @ clouds[i].T
            distances[i, others] = gaps.amin(1).mean(1) + gaps.amin(2).mean(1)
    return (distances + distances.T).clamp_min(0)


def earth_mover_distances(clouds: Tensor, progress: bool = False) -> Tensor:
    """Earth mover's distance between every two of M clouds, [M, P, 3] -> [M, M].

    ``d(a, b) = min_φ mean_i |a_i − b_φ(i)|`` over the permutations φ, in the unit of the
    coordinates; exact, by scipy's assignment, on the CPU. O(M²·P³) time at worst, O(P²) memory.

    Args:
        clouds: [M, P, 3] of a floating type.
        progress: Show a progress bar on stderr.
    """
    distances = clouds.new_zeros(len(clouds), len(clouds), device='cpu')
    bar = dict(console=Console(stderr=True), disable=not progress)
    for i in track(range(len(clouds)), "Earth mover's distances", **bar):
        for j in range(i + 1, len(clouds)):
            # Exact differences: of near points |a|² + |b|² − 2ab loses what counts here.
            gaps = torch.cdist(clouds[i], clouds[j], compute_mode='donot_use_mm_for_euclid_dist')
            gaps = gaps.double().cpu()
            distances[i, j] = gaps[linear_sum_assignment(gaps)].mean()
    return distances + distances.T


def normalized(clouds: Tensor, references: Tensor) -> Tensor:
    """Clouds [M, P, 3] less the mean point of all references [R, P, 3], over their deviation.

    The mean is per axis, the standard deviation one number over all points and axes, as the
    ShapeNet data of PointFlow and PVD are normalised.

    Raises:
        ValueError: all points of the references are one, which gives no unit of length.
    """
    first = references[0, 0]
    # Compared, for the mean of equal numbers is rounded and their deviation not quite 0.
    if (references == first).all():
        raise ValueError(f'references must hold points that differ, but all are {first.tolist()}')
    centre = references.mean((0, 1))
    return (clouds - centre) / (references - centre).square().mean().sqrt()


def minimum_matching_distance(distances: Tensor) -> float:
    """The mean distance of a reference to the nearest generated cloud; distances [G, R]."""
    return distances.amin(0).mean().item()


def coverage(distances: Tensor) -> float:
    """The share of references that are the nearest one of a generated cloud; distances [G, R]."""
    return len(distances.argmin(1).unique()) / distances.shape[1]


def nearest_neighbor_accuracy(distances: Tensor, num_generated: int) -> float:
    """How often the nearest other cloud is of the same set (1-NNA), leave-one-out.

    0.5 where the two sets cannot be told apart, 1 where they can, 0 where each generated cloud is
    one of the references.

    Args:
        distances: [M, M] between all clouds, the generated ones first.
        num_generated: How many these are.
    """
    itself = torch.eye(len(distances), dtype=torch.bool, device=distances.device)
    nearest = distances.masked_fill(itself, torch.inf).argmin(1)
    generated = torch.arange(len(distances), device=distances.device) < num_generated
    return (generated[nearest] == generated).double().mean().item()
