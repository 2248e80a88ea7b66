"""``Σ W e^k v / Σ W e^k`` with W in tiles and one shift per column, and its backward pass.

The backward pass is written out: what autograd would keep between the passes is several copies of
the keys and values, and the gradient of overlapping blocks would be added up block by block. Both
passes are the same banded product, with W forward and Wᵀ backward.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tile_by_tile
from .products import in_parts, multiply, refuse_second, weight_gradient
from .sums import column_shift, mean, move, prefix, suffix, transformed

# Elements of key that are worked on at once: the intermediate results take the memory of a part of
# the columns. Wider products are faster.
CHUNK = 2**21
SMALLEST_WIDTH = 64


def split(x: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """[T, C] as blocks [n, c, C]."""
    count = -(-x.shape[0] // block)
    missing = count * block - x.shape[0]
    if torch.compiler.is_compiling() or missing:
        x = F.pad(x, (0, 0, 0, missing), value=fill)
    return x.view(count, block, -1)


def neighbours(x: Tensor, block: int, before: int, after: int, fill: float = 0.0) -> Tensor:
    """[T, C] as the tokens around each block, [n, (before + 1 + after)·c, C], overlapping views."""
    if before == after == 0 and block == x.shape[0]:
        return x.unsqueeze(0)  # unfold takes no size that an exported graph leaves open
    tail = -x.shape[0] % block + after * block
    if before or tail:
        x = F.pad(x, (0, 0, before * block, tail), value=fill)
    return x.unfold(0, (before + 1 + after) * block, block).transpose(1, 2)


def banded_mean(
    key: Tensor,
    value: Tensor,
    tiles: Tensor,
    before: int,
    after: int,
    far: bool,
    causal: bool,
    parts: int,
) -> Tensor:
    """key, value [S, C] and w in tiles [n, c, (before + 1 + after)·c] give [T, C].

    `far`: W = 1 where no tile is, for past tokens if causal, else for all; otherwise W = 0 there.
    `parts`: the precision of the products (`products.py`).
    """
    options = (before, after, far, causal, parts)
    # The compiler keeps and recomputes as it sees fit, and needs plain operations for that.
    if torch.compiler.is_compiling():
        return _composed_mean(key, value, tiles, *options)
    if transformed(key, value, tiles):
        return _composed_mean(key, value, tiles, *options[:-1], 0)
    if torch.is_grad_enabled():
        return _BandedMean.apply(key, value, tiles, *options)
    return _mean_and_denominator(key, value, tile_weights(tiles, far), *options)[0]


def _composed_mean(
    key: Tensor, value: Tensor, tiles: Tensor, before: int, after: int, far: bool, *others: Any
) -> Tensor:
    """:func:`banded_mean` of plain operations, whose gradient is autograd's."""
    exp_key = torch.exp(key - column_shift(key, 0))
    terms = torch.cat([exp_key * value, exp_key], 1)
    sums = banded_product(terms, tile_weights(tiles, far), before, after, far, *others)
    columns = value.shape[1]  # chunk would ask how many there are, which an exported graph cannot
    return mean(sums[:, :columns], sums[:, columns:])


def tile_weights(tiles: Tensor, far: bool) -> Tensor:
    """W of tiles of w, each row over its maximum unless `far`."""
    # Far tokens have W = 1, so only without them may the rows of w be shifted.
    return torch.exp(tiles if far else tiles - column_shift(tiles, 2))


def banded_product(x: Tensor, weights: Tensor, *options: Any) -> Tensor:
    """W times x [S, C], [T, C]; the options are those of :func:`banded_mean`."""
    pieces = [piece for _, piece in _products(x, weights, *options)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _products(
    x: Tensor, weights: Tensor, before: int, after: int, far: bool, causal: bool, parts: int
) -> Iterable[tuple[slice, Tensor]]:
    """:func:`banded_product` in pieces: which rows, and these."""
    # A lone tile holds everything, and its rows are not padded.
    far = far and len(weights) > 1
    return _rows(x, weights, before, after, far, far and not causal, parts)


def _terms(key: Tensor, value: Tensor) -> Tensor:
    """``e^k v`` and ``e^k`` side by side, [S, 2·C], without autograd: one product serves both."""
    columns = key.shape[1]
    terms = key.new_empty(len(key), 2 * columns)
    exp_key = torch.sub(key, column_shift(key, 0), out=terms[:, columns:]).exp_()
    torch.mul(exp_key, value, out=terms[:, :columns])
    return terms


def _column_chunks(*tensors: Any) -> Iterable[Sequence[Any]]:
    """The tensors [T, C], or None, some columns at a time."""
    tokens, columns = tensors[0].shape
    count = -(-tokens * columns // CHUNK)
    width = max(SMALLEST_WIDTH, -(-columns // max(count, 1)))
    if columns <= width:
        return [tensors]
    chunks = (slice(first, first + width) for first in range(0, columns, width))
    return ([x if x is None else x[:, chunk] for x in tensors] for chunk in chunks)


def _mean_and_denominator(
    key: Tensor, value: Tensor, weights: Tensor, *options: Any, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The mean, and if asked for the denominator [T, C], infinite where nothing was seen."""
    tokens = len(key) if len(weights) > 1 else weights.shape[1]
    result = value.new_empty(tokens, value.shape[1])
    kept = torch.empty_like(result) if keep else None
    tiny = torch.finfo(value.dtype).tiny
    for some_key, some_value, means, totals in _column_chunks(key, value, result, kept):
        for rows, sums in _products(_terms(some_key, some_value), weights, *options):
            numerator, denominator = sums.chunk(2, 1)
            total = denominator if totals is None else totals[rows]
            torch.threshold(denominator, tiny, torch.inf, out=total)
            torch.div(numerator, total, out=means[rows])
    return result, kept


def _rows(
    x: Tensor, weights: Tensor, before: int, after: int, past: bool, future: bool, parts: int
) -> Iterable[tuple[slice, Tensor]]:
    """W times x [S, C], with W = 1 for what lies before the tiles of a row, or behind, if asked."""
    block = weights.shape[2] // (before + 1 + after)
    far = _far_sums(x, block, before, after, past, future)
    if not parts and tile_by_tile.serves(weights, x):
        return tile_by_tile.products(weights, x, before, far)
    if parts and torch.is_grad_enabled():
        result = _NearProduct.apply(weights, x, before, after, parts)
    else:
        result = _near_product(weights, x, before, after, parts)
    if far is not None:
        result += far.unsqueeze(1)
    result = result.flatten(0, 1)
    return [(slice(None), result[: x.shape[0]] if len(weights) > 1 else result)]


def _far_sums(
    x: Tensor, block: int, before: int, after: int, past: bool, future: bool
) -> Tensor | None:
    """The sums of x [S, C] over what lies before the tiles of each block, and behind, [n, C]."""
    if not (past or future):
        return None
    totals = split(x, block).sum(1)
    earlier = move(prefix(totals, 0), before + 1, 0) if past else 0
    return earlier + move(suffix(totals, 0), -after - 1, 0) if future else earlier


def _near_product(weights: Tensor, x: Tensor, before: int, after: int, parts: int) -> Tensor:
    """What the tiles see of x [S, C], [n, c, C]."""
    # The parts are made before the blocks overlap.
    block = weights.shape[2] // (before + 1 + after)
    terms = [neighbours(part, block, before, after) for part in in_parts(x, parts)]
    return multiply(weights, terms)


def _transposed(weights: Tensor, before: int, after: int) -> Tensor:
    """The tiles of Wᵀ, whose rows are the sources and whose blocks reach `after` before them."""
    count, block, columns = weights.shape
    reach = before + 1 + after
    if reach == 1:
        return weights.transpose(1, 2)
    squares = weights.view(count, block, reach, block)
    result = weights.new_empty(count, block, reach, block)
    for slot in range(reach):
        shift = slot - after  # from the block of the source to that of the target
        blocks = slice(max(0, -shift), count - max(0, shift))
        targets = slice(max(0, shift), count - max(0, -shift))
        for edge in (slice(blocks.start), slice(blocks.stop, None)):
            result[edge, :, slot].zero_()
        result[blocks, :, slot] = squares[targets, :, reach - 1 - slot].transpose(1, 2)
    return result.flatten(2)


def _tile_gradient(
    grad: Tensor, x: Tensor, weights: Tensor, before: int, after: int, parts: int
) -> Tensor:
    """From the gradient [T, C] of W times x [S, C], that of the tiles of W."""
    rows, block = weights.shape[1], weights.shape[2] // (before + 1 + after)
    grads = [split(part, rows) for part in in_parts(grad, parts)]
    terms = [neighbours(part, block, before, after) for part in in_parts(x, parts)]
    return weight_gradient(grads, terms)


def _add_tile_gradient(
    result: Tensor, grads: Tensor, terms: Tensor, before: int, after: int, parts: int
) -> None:
    """Add the gradient of W, from those of numerator and denominator and both terms."""
    if not parts and tile_by_tile.serves(result, grads):
        tile_by_tile.add_tile_gradient(result, grads, terms, before)
        return
    # Two products: where the two cancel, they do so term by term.
    pairs = zip(grads.chunk(2, 1), terms.chunk(2, 1), strict=True)
    result += sum(_tile_gradient(g, x, result, before, after, parts) for g, x in pairs)


class _NearProduct(torch.autograd.Function):
    """:func:`_near_product` for the compiler, whose gradient takes the same rounded W."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, x: Tensor, before: int, after: int, parts: int
    ) -> Tensor:
        weights = weights.bfloat16()
        ctx.save_for_backward(weights, x)
        ctx.options = (before, after, parts)
        return _near_product(weights, x, before, after, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        weights, x = ctx.saved_tensors
        before, after, parts = ctx.options
        grad = grad.flatten(0, 1)
        by_weights = None
        if ctx.needs_input_grad[0]:
            by_weights = _tile_gradient(grad, x, weights, before, after, parts)
        transposed = _transposed(weights, before, after)
        by_x = _near_product(transposed, grad, after, before, parts).flatten(0, 1)
        return by_weights, by_x[: len(x)], None, None, None


class _BandedMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        value: Tensor,
        tiles: Tensor,
        before: int,
        after: int,
        far: bool,
        causal: bool,
        parts: int,
    ) -> Tensor:
        options = (before, after, far, causal, parts)
        weights = tile_weights(tiles, far)
        result, total = _mean_and_denominator(key, value, weights, *options, keep=True)
        ctx.save_for_backward(key, value, tiles, result, total)
        ctx.options = options
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, value, tiles, result, total = ctx.saved_tensors
        before, after, far, causal, parts = ctx.options
        if torch.is_grad_enabled():  # of a gradient that is to be differentiated
            inputs = key, value, tiles
            needed = [x for x, need in zip(inputs, ctx.needs_input_grad, strict=False) if need]
            composed = _composed_mean(*inputs, *ctx.options[:-1], 0)
            found = iter(torch.autograd.grad(composed, needed, grad, create_graph=True))
            return tuple(next(found) if need else None for need in ctx.needs_input_grad)
        weights = tile_weights(tiles, far)
        far = far and len(weights) > 1
        transposed = _transposed(weights, before, after)
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        grad_tiles = torch.zeros_like(weights) if ctx.needs_input_grad[2] else None
        with torch.autocast(grad.device.type, enabled=False):
            given = (key, value, grad, result, total, grad_key, grad_value)
            for k, v, g, y, d, by_key, by_value in _column_chunks(*given):
                terms = _terms(k, v)
                grads = g.new_empty(len(g), terms.shape[1])
                by_numerator, by_denominator = grads.chunk(2, 1)
                torch.div(g, d, out=by_numerator)
                torch.mul(by_numerator, y, out=by_denominator).neg_()
                if grad_tiles is not None:
                    _add_tile_gradient(grad_tiles, grads, terms, before, after, parts)
                exp_key = terms.chunk(2, 1)[1]
                past = far and not causal
                for rows, sums in _rows(grads, transposed, after, before, past, far, parts):
                    by_term, by_weight = sums.chunk(2, 1)
                    torch.mul(by_term, exp_key[rows], out=by_value[rows])
                    # Rounded as the other product is: the difference of equal ones is 0.
                    by_weight.add_(by_term.mul_(v[rows]))
                    torch.mul(by_weight, exp_key[rows], out=by_key[rows])
        if grad_tiles is not None:
            grad_tiles *= weights
        return grad_key, grad_value, grad_tiles, None, None, None, None, None
