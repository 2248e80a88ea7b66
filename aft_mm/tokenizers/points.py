from __future__ import annotations

from typing import TYPE_CHECKING

from aft_mm.checks import check_choice, check_int

if TYPE_CHECKING:
    import numpy as np

Box = tuple[tuple[float, float, float], float]  # centre, side

UNIT_CUBE: Box = ((0.0, 0.0, 0.0), 1.0)
# Largest rounding error outside the box, in sides.
SLACK = 2**-11
ORDERS = ('raw', 'quantized')


def bounding_cube(points: np.ndarray) -> Box:
    """Return the cube around a cloud [P, 3]: the centre and longest edge of its bounding box.

    Raises:
        ValueError: If there is no point, a coordinate is not finite, or the points are equal.
    """
    import numpy as np

    points = _checked(points)
    low, high = points.min(0), points.max(0)
    centre = low / 2 + high / 2
    with np.errstate(over='ignore'):
        side = float((high - low).max())
        reach = float(np.abs(points - centre).max())
    if not side > 0:
        raise ValueError(f'points must differ, but all {len(points)} are {low.tolist()}')
    if not (side < np.inf and reach / side <= 0.5 + SLACK):
        raise ValueError(
            'points must have an extent that float64 can divide, but go from '
            f'{low.tolist()} to {high.tolist()}'
        )
    x, y, z = centre.tolist()
    return (x, y, z), side


def check_order(order: str) -> None:
    check_choice('order', order, ORDERS)


def encode_points(
    points: np.ndarray, num_bits: int = 8, box: Box | None = None, order: str = 'raw'
) -> np.ndarray:
    """Quantise a cloud to b = ``num_bits`` per coordinate and flatten it to a sequence.

    ``q = min(⌊(p − centre) / side · 2^b + 2^(b−1)⌋, 2^b − 1)`` for each coordinate. Points are
    sorted
    by z, then y, then x, and each gives the tokens z, y, x.

    Args:
        points: [P, 3], columns x, y, z.
        num_bits: b, 1 to 8.
        box: ``(centre, side)`` of the cube of 2^b bins per axis; by default the
            :func:`bounding_cube`.
        order: ``'raw'`` sorts the coordinates, as in the ICLR submission, ``'quantized'`` the
            tokens.

    Returns:
        uint8 [3·P].
    """
    import numpy as np

    check_order(order)
    bins = _num_bins(num_bits)
    points = _checked(points)
    centre, side = bounding_cube(points) if box is None else box
    if not side > 0:
        raise ValueError(f'the side of box must be above 0, got {side}')
    unit = (points - np.asarray(centre)) / side
    if np.abs(unit).max() > 0.5 + SLACK:
        raise ValueError(
            f'points must lie in the box, a cube of side {side} around '
            f'{tuple(centre)}, but reach {np.abs(unit).max():.4g} sides from it'
        )
    tokens = np.floor(unit * bins + bins // 2).clip(0, bins - 1).astype(np.uint8)
    keys = points if order == 'raw' else tokens
    # The last column is lexsort's major key.
    return tokens[np.lexsort(keys.T), ::-1].reshape(-1)


def decode_points(tokens: np.ndarray, num_bits: int = 8, box: Box | None = None) -> np.ndarray:
    """Return the points of tokens, ``p = ((q + 1/2) / 2^b − 1/2) · side + centre``.

    A point becomes the centre of its bin.

    Args:
        tokens: [..., 3·P] of 0 to 2^b − 1, the coordinates of a point as z, y, x.
        num_bits: b, 1 to 8.
        box: ``(centre, side)``; by default the cube of side 1 around 0.

    Returns:
        float64 [..., P, 3], columns x, y, z, in the unit of the box.
    """
    import numpy as np

    bins = _num_bins(num_bits)
    tokens = np.asarray(tokens)
    if tokens.ndim < 1 or tokens.shape[-1] % 3:
        raise ValueError(f'tokens must be three per point, but have the shape {tokens.shape}')
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < bins:
        raise ValueError(
            f'tokens must be 0 to {bins - 1} with num_bits={num_bits}, but are '
            f'{tokens.min()} to {tokens.max()}'
        )
    centre, side = UNIT_CUBE if box is None else box
    coordinates = tokens.reshape(*tokens.shape[:-1], -1, 3)[..., ::-1]
    return ((coordinates + 0.5) / bins - 0.5) * side + np.asarray(centre)


def check_num_bits(num_bits: int) -> None:
    check_int('num_bits', num_bits, 1, 8)


def _num_bins(num_bits: int) -> int:
    check_num_bits(num_bits)
    return 2**num_bits


def _checked(points: np.ndarray) -> np.ndarray:
    import numpy as np

    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 3 or not len(points):
        raise ValueError(
            f'points must be [P, 3] with P at least 1, but have the shape {points.shape}'
        )
    if not np.isfinite(points).all():
        bad = int((~np.isfinite(points)).any(1).sum())
        raise ValueError(f'points must be finite, but {bad} of {len(points)} are not')
    return points
