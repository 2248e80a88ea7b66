"""``Σ W e^k v / Σ W e^k`` with W in tiles and one shift per column, and its backward pass.

The backward pass is written out: what autograd would keep between the passes is several copies of
the keys and values, and the gradient of overlapping blocks would be added up block by block. Both
passes are the same banded product, with W forward and Wᵀ backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import in_parts, multiply, refuse_second, weight_gradient
from .sums import column_shift, mean, move, prefix, suffix, transformed

# Elements of key that are worked on at once: what lies between the steps stays in the cache, and
# the intermediate results take the memory of a part of the columns.
CHUNK = 2**19
SMALLEST_WIDTH = 64


def split(x: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """[T, C] as blocks [n, c, C]."""
    count = -(-x.shape[0] // block)
    return F.pad(x, (0, 0, 0, count * block - x.shape[0]), value=fill).view(count, block, -1)


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
    weights = tile_weights(tiles, far)
    return mean(*_sums(key, value, weights, before, after, far, *others))


def tile_weights(tiles: Tensor, far: bool) -> Tensor:
    """W of tiles of w, each row over its maximum unless `far`."""
    # Far tokens have W = 1, so only without them may the rows of w be shifted.
    return torch.exp(tiles if far else tiles - column_shift(tiles, 2))


def banded_product(
    x: Tensor, weights: Tensor, before: int, after: int, far: bool, causal: bool, parts: int
) -> Tensor:
    """W times x [S, C], [T, C]; the options are those of :func:`banded_mean`."""
    # A lone tile holds everything, and its rows are not padded.
    far = far and len(weights) > 1
    return _product(x, weights, before, after, far, far and not causal, parts)


def _terms(key: Tensor, value: Tensor) -> Tensor:
    """``e^k v`` and ``e^k`` side by side, [S, 2·C]: one product serves both."""
    exp_key = torch.exp(key - column_shift(key, 0))
    return torch.cat([exp_key * value, exp_key], 1)


def _sums(key: Tensor, value: Tensor, weights: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Numerator and denominator [T, C]."""
    product = banded_product(_terms(key, value), weights, *options)
    columns = value.shape[1]  # chunk would ask how many there are, which an exported graph cannot
    return product[:, :columns], product[:, columns:]


def _column_chunks(x: Tensor) -> list[slice]:
    width = max(SMALLEST_WIDTH, CHUNK // len(x))
    return [slice(first, first + width) for first in range(0, x.shape[1], width)]


def _mean_and_denominator(
    key: Tensor, value: Tensor, weights: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    chunks = _column_chunks(key)
    if len(chunks) == 1:
        numerator, denominator = _sums(key, value, weights, *options)
        return mean(numerator, denominator), denominator
    rows = len(key) if len(weights) > 1 else weights.shape[1]
    result, total = (value.new_empty(rows, value.shape[1]) for _ in range(2))
    for columns in chunks:
        numerator, denominator = _sums(key[:, columns], value[:, columns], weights, *options)
        result[:, columns], total[:, columns] = mean(numerator, denominator), denominator
    return result, total


def _product(
    x: Tensor, weights: Tensor, before: int, after: int, past: bool, future: bool, parts: int
) -> Tensor:
    block = weights.shape[2] // (before + 1 + after)
    if parts and torch.is_grad_enabled():
        result = _NearProduct.apply(weights, x, before, after, parts)
    else:
        result = _near_product(weights, x, before, after, parts)
    totals = split(x, block).sum(1, True) if past or future else x
    if past:
        result += move(prefix(totals, 0), before + 1, 0)
    if future:
        result += move(suffix(totals, 0), -after - 1, 0)
    result = result.flatten(0, 1)
    return result[: x.shape[0]] if len(weights) > 1 else result


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
    result = weights.new_zeros(count, block, reach, block)
    for slot in range(reach):
        shift = slot - after  # from the block of the source to that of the target
        blocks = slice(max(0, -shift), count - max(0, shift))
        targets = slice(max(0, shift), count - max(0, -shift))
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
        result, denominator = _mean_and_denominator(key, value, weights, *options)
        ctx.save_for_backward(key, value, tiles, result, denominator)
        ctx.options = options
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, value, tiles, result, denominator = ctx.saved_tensors
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
            for columns in _column_chunks(key):
                some_key, some_value, total = (x[:, columns] for x in (key, value, denominator))
                # A row that sees nothing is 0 whatever the keys are.
                nothing = total < torch.finfo(total.dtype).tiny
                by_numerator = grad[:, columns] / total.masked_fill(nothing, torch.inf)
                grads = by_numerator, -by_numerator * result[:, columns]
                terms = _terms(some_key, some_value).chunk(2, 1)
                if grad_tiles is not None:
                    # Two products: where the two cancel, they do so term by term.
                    grad_tiles += sum(
                        _tile_gradient(g, x, weights, before, after, parts)
                        for g, x in zip(grads, terms, strict=True)
                    )
                by_term, by_weight = _product(
                    torch.cat(grads, 1),
                    transposed,
                    after,
                    before,
                    past=far and not causal,
                    future=far,
                    parts=parts,
                ).chunk(2, 1)
                grad_key[:, columns] = (by_term * some_value).add_(by_weight).mul_(terms[1])
                grad_value[:, columns] = by_term * terms[1]
        if grad_tiles is not None:
            grad_tiles *= weights
        return grad_key, grad_value, grad_tiles, None, None, None, None, None
