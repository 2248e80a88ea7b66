"""Banded products in float32 with oneDNN, tile by tile, on AMD CPUs, where MKL uses no AVX-512."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..tracing import transformed

# With fewer multiplications per tile the call dominates.
FEWEST = 2**22
# A tile is too small for more threads.
MOST_THREADS = 8


@lru_cache
def onednn_is_faster() -> bool:
    """Return whether only oneDNN uses AVX-512 on this processor."""
    describe = getattr(torch.cpu, 'get_capabilities', None)  # since torch 2.11
    if describe is None or not torch.backends.mkl.is_available():
        return False
    cpu = describe()
    amd_avx512 = cpu.get('avx512_f', False) and cpu.get('cpu_name', '').startswith('AMD')
    return amd_avx512 and hasattr(torch.ops.mkldnn, '_linear_pointwise')


def is_applicable(weights: Tensor, x: Tensor) -> bool:
    """Return whether tiles W [n, c, s] times rows of x [S, C] are multiplied here.

    Not where autograd, torch.func or a compiler must see the operations.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if weights.dtype != torch.float32 or weights.device.type != 'cpu':
        return False
    if weights.shape[1:].numel() * x.shape[1] < FEWEST or not onednn_is_faster():
        return False
    if torch.get_num_threads() > MOST_THREADS or transformed():
        return False
    return not (torch.is_grad_enabled() and (weights.requires_grad or x.requires_grad))


def _multiply(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """Return ``a bᵀ + row``; oneDNN is very slow unless b or bᵀ is contiguous."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, row, 'none', [], '')
    return product


def _sources(tile: int, shape: Sequence[int], before: int, tokens: int) -> tuple[slice, slice]:
    first = (tile - before) * shape[0]
    start, stop = max(first, 0), min(first + shape[1], tokens)
    return slice(start, stop), slice(start - first, stop - first)


def products(
    weights: Tensor, x: Tensor, before: int, outside: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, W times x [S, C] plus the sums outside the tiles [n, C]) per tile."""
    block, tokens = weights.shape[1], len(x) if len(weights) > 1 else weights.shape[1]
    x = x.contiguous()
    for i, tile in enumerate(weights):
        source, columns = _sources(i, tile.shape, before, len(x))
        rows = slice(i * block, min((i + 1) * block, tokens))
        near = tile[: rows.stop - rows.start, columns]
        yield rows, _multiply(near, x[source].T, None if outside is None else outside[i])


def add_grad_tiles(grad_tiles: Tensor, grad: Tensor, x: Tensor, before: int) -> None:
    grad, x = grad.contiguous(), x.contiguous()
    for i, tile in enumerate(grad_tiles):
        source, columns = _sources(i, tile.shape, before, len(x))
        rows = grad[i * len(tile) : (i + 1) * len(tile)]
        tile[: len(rows), columns] += _multiply(rows, x[source])
