"""Bytes and operations of the AFT ops, counted from their formulas.

Operations are counted as in the paper: pairs inside a window one by one, everything outside as one
running sum. A multiply-add is two operations, an exponential or a sigmoid one.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from aft_mm.ops.geometry import as_pair


def compulsory_bytes(inputs: Sequence[Tensor], output: Tensor, training: bool) -> int:
    """Return the bytes of inputs and output, in training also of the gradients."""
    read, written = sum(x.nbytes for x in inputs), output.nbytes
    return 3 * read + 2 * written if training else read + written


def _reached(length: int, before: int, after: int) -> int:
    return sum(min(i + after, length - 1) - max(i - before, 0) + 1 for i in range(length))


def near_pairs(grid: Sequence[int], reaches: Sequence[int], causal: bool) -> int:
    pairs = math.prod(_reached(n, r, r) for n, r in zip(grid, reaches, strict=True))
    return (pairs + math.prod(grid)) // 2 if causal else pairs


def hard_pairs(grid: Sequence[int], window: int | Sequence[int]) -> int:
    if len(grid) == 1:
        size = window if isinstance(window, int) else window[0]
        return _reached(grid[0], size - 1, 0)
    half_rows, half_columns = (size // 2 for size in as_pair(window))
    left = _reached(grid[0], half_rows - 1, 0) * _reached(grid[1], half_columns - 1, 0)
    above = _reached(grid[0], half_rows, 0) - grid[0]
    return left + above * (_reached(grid[1], 0, half_columns) - grid[1])


def weighted_pairs(op: str, shapes: Sequence[Sequence[int]], options: dict) -> int:
    tokens, sources = shapes[0][1], shapes[1][1]
    causal, grid = options.get('causal', False), options.get('grid') or (tokens,)
    if op == 'aft_full':
        return tokens * (tokens + 1) // 2 if causal else tokens * sources
    if op == 'aft_conv':
        return near_pairs(grid, [size // 2 for size in shapes[3][1:]], causal)
    if op == 'aft_local_hard':
        return hard_pairs(grid, options['window'])
    if op in ('aft_local', 'aft_local_learned'):
        window = options['window']
        sizes = as_pair(window) if len(grid) == 2 else (window,)
        return near_pairs(grid, [size - 1 for size in sizes], causal)
    return 0


def operations(
    op: str, shapes: Sequence[Sequence[int]], options: dict, training: bool = False
) -> int:
    """Count operations of `op` on [B, T, D] (key [B, S, h], value [B, S, D]) and its parameters."""
    (batch, tokens, channels), (_, sources, heads) = shapes[0], shapes[1]
    both = channels + heads  # of numerator and denominator
    pairs = weighted_pairs(op, shapes, options)
    # exp(k) and its product with v; quotient, sigmoid and gate.
    count = batch * sources * both + 3 * batch * tokens * channels
    if op == 'aft_simple':
        count += batch * sources * both
    elif op == 'aft_decay':
        count += (1 if options['causal'] else 2) * batch * sources * both
    elif op == 'aft_full':
        count += pairs + 2 * batch * pairs * both
    elif op == 'aft_local':
        # u·v and exp per pair; the sum outside the window, and its addition.
        count += pairs * (2 * shapes[3][1] + 1) + 2 * batch * (pairs + tokens) * both
    elif op == 'aft_conv':
        count += math.prod(shapes[3]) + 2 * batch * pairs * both
        if options.get('global_connectivity', True):
            count += 2 * batch * tokens * both
    elif op == 'aft_local_hard':
        count += batch * pairs * both
    else:
        # As for aft_local; the sums of weights and keys, and their product.
        count += pairs * (2 * shapes[3][1] + 1) + 2 * batch * (pairs + tokens) * (channels + 1)
        count += 2 * batch * tokens * channels
    return 3 * count if training else count
