"""``Σ W e^k v / Σ W e^k`` with W in tiles and one shift per column, and its backward pass.

Key and value are [T, C] with C = B·D. The tiles [n, c, (before + 1 + after)·c] hold each block of c
tokens against those around it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..geometry import neighbours, split
from ..online_softmax import (
    column_shift,
    composed_gradients,
    mean,
    needs_torch,
    prefix_sum,
    shift,
    suffix_sum,
)
from ..tracing import no_autocast, transformed
from . import onednn_matmul
from .bf16_matmul import grad_weights, multiply, refuse_second_derivative, split_terms

# Elements of key at once: on a CPU they should fit into its caches, a GPU needs large products.
CHUNK, CUDA_CHUNK = 2**21, 2**25
SMALLEST_WIDTH = 64


class TileReach(NamedTuple):
    """Blocks that a tile of W covers before and after its own.

    past, future: whether W is 1 before and after the tiles, else 0.
    """

    before: int
    after: int
    past: bool
    future: bool
    precision: str

    @property
    def blocks(self) -> int:
        return self.before + 1 + self.after

    @property
    def transposed(self) -> 'TileReach':
        return TileReach(self.after, self.before, self.future, self.past, self.precision)


def banded_mean(key: Tensor, value: Tensor, tiles: Tensor, reach: TileReach) -> Tensor:
    """Return ``Σ W e^k v / Σ W e^k`` [T, C] of key [S, C] and tiles of w, −inf where hidden."""
    if torch.compiler.is_compiling():
        return _composed_mean(key, value, tiles, reach)
    if transformed():
        return _composed_mean(key, value, tiles, reach._replace(precision='fp32'))
    if torch.is_grad_enabled():
        return _BandedMean.apply(key, value, tiles, reach)
    return _mean_and_denominator(key, value, tile_weights(tiles, reach.past), reach)[0]


def _composed_mean(key: Tensor, value: Tensor, tiles: Tensor, reach: TileReach) -> Tensor:
    exp_key = torch.exp(key - column_shift(key, 0))
    terms = torch.cat([exp_key * value, exp_key], 1)
    sums = banded_product(terms, tile_weights(tiles, reach.past), reach)
    columns = value.shape[1]  # chunk needs a number, which an exported graph lacks
    return mean(sums[:, :columns], sums[:, columns:])


def tile_weights(tiles: Tensor, global_term: bool) -> Tensor:
    """Return W of the tiles of w; without a global term each row over its maximum."""
    return torch.exp(tiles if global_term else tiles - column_shift(tiles, 2))


def banded_product(x: Tensor, weights: Tensor, reach: TileReach) -> Tensor:
    pieces = [piece for _, piece in _products(x, weights, reach)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _terms(key: Tensor, value: Tensor) -> Tensor:
    """Return ``e^k v`` and ``e^k`` side by side, [S, 2·C], without autograd."""
    columns = key.shape[1]
    terms = key.new_empty(len(key), 2 * columns)
    exp_key = torch.sub(key, column_shift(key, 0), out=terms[:, columns:]).exp_()
    torch.mul(exp_key, value, out=terms[:, :columns])
    return terms


def _column_chunks(*tensors: Any) -> Iterable[Sequence[Any]]:
    """Yield the tensors [T, C], or None, a chunk of columns at a time."""
    tokens, columns = tensors[0].shape
    count = -(-tokens * columns // (CUDA_CHUNK if tensors[0].is_cuda else CHUNK))
    width = max(SMALLEST_WIDTH, -(-columns // max(count, 1)))
    if columns <= width:
        return [tensors]
    chunks = (slice(first, first + width) for first in range(0, columns, width))
    return ([x if x is None else x[:, chunk] for x in tensors] for chunk in chunks)


def _mean_and_denominator(
    key: Tensor, value: Tensor, weights: Tensor, reach: TileReach, save: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the mean, and with `save` the denominator [T, C], ∞ where nothing is visible."""
    tokens = len(key) if len(weights) > 1 else weights.shape[1]
    result = value.new_empty(tokens, value.shape[1])
    saved = torch.empty_like(result) if save else None
    tiny = torch.finfo(value.dtype).tiny
    for key_chunk, value_chunk, means, saved_chunk in _column_chunks(key, value, result, saved):
        for rows, sums in _products(_terms(key_chunk, value_chunk), weights, reach):
            numerator, denominator = sums.chunk(2, 1)
            divisor = denominator if saved_chunk is None else saved_chunk[rows]
            torch.threshold(denominator, tiny, torch.inf, out=divisor)
            torch.div(numerator, divisor, out=means[rows])
    return result, saved


def _products(x: Tensor, weights: Tensor, reach: TileReach) -> Iterable[tuple[slice, Tensor]]:
    before, after, past, future, precision = reach
    outside = None
    if (past or future) and len(weights) > 1:
        outside = _outside_sums(x, weights.shape[2] // reach.blocks, reach)
    if precision == 'fp32' and onednn_matmul.is_applicable(weights, x):
        return onednn_matmul.products(weights, x, before, outside)
    if precision != 'fp32' and torch.is_grad_enabled():
        result = _NearProduct.apply(weights, x, before, after, precision)
    else:
        result = _near_product(weights, x, before, after, precision)
    if outside is not None:
        result += outside.unsqueeze(1)
    result = result.flatten(0, 1)
    return [(slice(None), result[: x.shape[0]] if len(weights) > 1 else result)]


def _outside_sums(x: Tensor, block: int, reach: TileReach) -> Tensor | None:
    """Return the sums [n, C] of x [S, C] before and after the tiles of each block."""
    totals = split(x, block).sum(1)
    earlier = shift(prefix_sum(totals, 0), reach.before + 1, 0) if reach.past else None
    if not reach.future:
        return earlier
    later = shift(suffix_sum(totals, 0), -reach.after - 1, 0)
    return later if earlier is None else earlier + later


def _near_product(weights: Tensor, x: Tensor, before: int, after: int, precision: str) -> Tensor:
    """Return the product [n, c, C] of the tiles with x [S, C]."""
    # Split before the blocks overlap.
    block = weights.shape[2] // (before + 1 + after)
    terms = [neighbours(term, block, before, after) for term in split_terms(x, precision)]
    return multiply(weights, terms)


def _transposed(weights: Tensor, before: int, after: int) -> Tensor:
    count, block, columns = weights.shape
    reach = before + 1 + after
    if reach == 1:
        return weights.transpose(1, 2)
    squares = weights.view(count, block, reach, block)
    result = weights.new_empty(count, block, reach, block)
    for slot in range(reach):
        distance = slot - after  # from the source's block to the target's
        blocks = slice(max(0, -distance), count - max(0, distance))
        targets = slice(max(0, distance), count - max(0, -distance))
        for edge in (slice(blocks.start), slice(blocks.stop, None)):
            result[edge, :, slot].zero_()
        result[blocks, :, slot] = squares[targets, :, reach - 1 - slot].transpose(1, 2)
    return result.flatten(2)


def _grad_tiles(
    grad: Tensor, x: Tensor, weights: Tensor, before: int, after: int, precision: str
) -> Tensor:
    """Return the gradient of the tiles of W from that [T, C] of W times x [S, C]."""
    rows, block = weights.shape[1], weights.shape[2] // (before + 1 + after)
    grads = [split(term, rows) for term in split_terms(grad, precision)]
    terms = [neighbours(term, block, before, after) for term in split_terms(x, precision)]
    return grad_weights(grads, terms)


def _add_grad_tiles(
    grad_tiles: Tensor, grads: Tensor, terms: Tensor, before: int, after: int, precision: str
) -> None:
    if precision == 'fp32' and onednn_matmul.is_applicable(grad_tiles, grads):
        onednn_matmul.add_grad_tiles(grad_tiles, grads, terms, before)
        return
    # Two products, so that they cancel term by term.
    pairs = zip(grads.chunk(2, 1), terms.chunk(2, 1), strict=True)
    grad_tiles += sum(_grad_tiles(g, x, grad_tiles, before, after, precision) for g, x in pairs)


class _NearProduct(torch.autograd.Function):
    """:func:`_near_product` for the compiler, with the same rounded W backward."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, x: Tensor, before: int, after: int, precision: str
    ) -> Tensor:
        weights = weights.bfloat16()
        ctx.save_for_backward(weights, x)
        ctx.options = (before, after, precision)
        return _near_product(weights, x, before, after, precision)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        weights, x = ctx.saved_tensors
        before, after, precision = ctx.options
        grad = grad.flatten(0, 1)
        grad_w = None
        if ctx.needs_input_grad[0]:
            grad_w = _grad_tiles(grad, x, weights, before, after, precision)
        transposed = _transposed(weights, before, after)
        grad_x = _near_product(transposed, grad, after, before, precision).flatten(0, 1)
        return grad_w, grad_x[: len(x)], None, None, None


class _BandedMean(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, tiles: Tensor, reach: TileReach) -> Tensor:
        weights = tile_weights(tiles, reach.past)
        result, denominator = _mean_and_denominator(key, value, weights, reach, save=True)
        ctx.save_for_backward(key, value, tiles, result, denominator)
        ctx.reach = reach
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, value, tiles, result, denominator = ctx.saved_tensors
        reach = ctx.reach
        before, after, *_, precision = reach
        if needs_torch(grad):
            composed = partial(_composed_mean, reach=reach._replace(precision='fp32'))
            return composed_gradients(ctx.needs_input_grad, composed, (key, value, tiles), grad)
        weights = tile_weights(tiles, reach.past)
        transposed = _transposed(weights, before, after)
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        grad_tiles = torch.zeros_like(weights) if ctx.needs_input_grad[2] else None
        with no_autocast(grad):
            tensors = (key, value, grad, result, denominator, grad_key, grad_value)
            for k, v, g, y, d, grad_k, grad_v in _column_chunks(*tensors):
                terms = _terms(k, v)
                grads = g.new_empty(len(g), terms.shape[1])
                grad_numerator, grad_denominator = grads.chunk(2, 1)
                torch.div(g, d, out=grad_numerator)
                torch.mul(grad_numerator, y, out=grad_denominator).neg_()
                if grad_tiles is not None:
                    _add_grad_tiles(grad_tiles, grads, terms, before, after, precision)
                exp_key = terms.chunk(2, 1)[1]
                for rows, sums in _products(grads, transposed, reach.transposed):
                    grad_term, grad_weight = sums.chunk(2, 1)
                    torch.mul(grad_term, exp_key[rows], out=grad_v[rows])
                    grad_weight.add_(grad_term.mul_(v[rows]))
                    torch.mul(grad_weight, exp_key[rows], out=grad_k[rows])
        if grad_tiles is not None:
            grad_tiles *= weights
        return grad_key, grad_value, grad_tiles, None
