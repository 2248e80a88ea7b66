"""Running sums along an axis, in blocks on a CPU.

Torch's own scan walks down one column after another; rows that lie side by side are added at once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Rows of a block; numbers in all and side by side in a row from which on blocks are faster.
BLOCK = 32
FEWEST_NUMBERS, FEWEST_COLUMNS = 2**15, 16


def blocks_pay(x: Tensor, dim: int) -> bool:
    """Whether blocks are faster, and no transform or compiler must see plain operations."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if x.device.type != 'cpu' or x.numel() < FEWEST_NUMBERS:
        return False
    rows, columns = x.shape[dim], x.shape[dim:].numel() // x.shape[dim]
    return (
        rows >= 2 * BLOCK
        and columns >= FEWEST_COLUMNS
        and torch.func.debug_unwrap(x) is x
        and forward_ad.unpack_dual(x).tangent is None
    )


def scan(x: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """``x.cumsum(dim)``, or the sums from the end on; what is not summed leaves no trace."""
    if not blocks_pay(x, dim):
        return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Scan.apply(x, dim, reverse)
    return scan_in_place(x.clone(memory_format=torch.contiguous_format), dim, reverse)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, reverse: bool) -> Tensor:
        ctx.options = (dim, reverse)
        return scan(x, dim, reverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dim, reverse = ctx.options
        return scan(grad, dim, not reverse), None, None


def scan_in_place(x: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """:func:`scan` over x, which nobody else holds and autograd does not see.

    Row after row of all blocks at once, the first of each on top of the blocks before it.
    """
    dim %= x.dim()
    length, rest = x.shape[dim], x.shape[dim] % BLOCK
    # Rows that fill no block are the last to be summed.
    blocks = x.narrow(dim, rest if reverse else 0, length - rest).unflatten(dim, (-1, BLOCK))
    totals = scan(blocks.sum(dim + 1), dim, reverse)
    rows, others = blocks.unbind(dim + 1), totals.shape[dim] - 1
    if reverse:
        rows = rows[::-1]
    rows[0].narrow(dim, 0 if reverse else 1, others).add_(
        totals.narrow(dim, 1 if reverse else 0, others)
    )
    for row, before in zip(rows[1:], rows[:-1], strict=True):
        row.add_(before)
    if rest:
        tail = x.narrow(dim, 0 if reverse else length - rest, rest)
        tail.copy_(scan(tail, dim, reverse)).add_(totals.narrow(dim, 0 if reverse else others, 1))
    return x
