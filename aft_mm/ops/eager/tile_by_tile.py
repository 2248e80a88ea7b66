"""Banded products in float32, a tile at a time, on a CPU where oneDNN is faster than torch's BLAS.

Torch hands float32 products to MKL, which keeps AVX-512 to Intel's processors; oneDNN uses it on
all that have it. What lies beyond both ends of the sequence is not multiplied, and a caller works
on the rows of a tile while they are in the cache.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .sums import transformed

# Multiplications of a tile below which a call for each takes longer than the product.
FEWEST = 2**22
# A tile is too little for more threads, which share a product of all tiles instead.
MOST_THREADS = 8


@lru_cache
def onednn_is_faster() -> bool:
    """Whether MKL has no AVX-512 for this processor, and oneDNN has."""
    describe = getattr(torch.cpu, 'get_capabilities', None)  # since torch 2.11
    if describe is None or not torch.backends.mkl.is_available():
        return False
    found = describe()
    here = found.get('avx512_f', False) and found.get('cpu_name', '').startswith('AMD')
    return here and hasattr(torch.ops.mkldnn, '_linear_pointwise')


def serves(weights: Tensor, x: Tensor) -> bool:
    """Whether tiles W [n, c, s] times rows of x [S, C] are multiplied here, and nobody looks on."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if weights.dtype != torch.float32 or weights.device.type != 'cpu':
        return False
    if weights.shape[1:].numel() * x.shape[1] < FEWEST or not onednn_is_faster():
        return False
    if torch.get_num_threads() > MOST_THREADS or transformed(weights, x):
        return False
    if torch.is_grad_enabled() and (weights.requires_grad or x.requires_grad):
        return False
    return all(forward_ad.unpack_dual(part).tangent is None for part in (weights, x))


def _multiply(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """``a bᵀ`` plus the row, of a [n, k] and b [m, k]; b or bᵀ must be contiguous.

    oneDNN has kernels for these alone, and takes a thousand times as long for others.
    """
    return torch.ops.mkldnn._linear_pointwise(a, b, row, 'none', [], '')


def _seen(tile: int, shape: Sequence[int], before: int, tokens: int) -> tuple[slice, slice]:
    """What there is of the tokens that a tile sees, and the columns of the tile that see them."""
    first = (tile - before) * shape[0]
    start, stop = max(first, 0), min(first + shape[1], tokens)
    return slice(start, stop), slice(start - first, stop - first)


def products(
    weights: Tensor, x: Tensor, before: int, far: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """W times x [S, C] plus the sums of far tokens [n, C]: which rows, and these, tile by tile."""
    block, tokens = weights.shape[1], len(x) if len(weights) > 1 else weights.shape[1]
    x = x.contiguous()
    for i, tile in enumerate(weights):
        source, columns = _seen(i, tile.shape, before, len(x))
        rows = slice(i * block, min((i + 1) * block, tokens))
        near = tile[: rows.stop - rows.start, columns]
        yield rows, _multiply(near, x[source].T, None if far is None else far[i])


def add_tile_gradient(result: Tensor, grad: Tensor, x: Tensor, before: int) -> None:
    """Add to the gradient of the tiles of W what the gradient [T, C] of W times x makes of it."""
    grad, x = grad.contiguous(), x.contiguous()
    for i, tile in enumerate(result):
        source, columns = _seen(i, tile.shape, before, len(x))
        rows = grad[i * len(tile) : (i + 1) * len(tile)]
        tile[: len(rows), columns] += _multiply(rows, x[source])
