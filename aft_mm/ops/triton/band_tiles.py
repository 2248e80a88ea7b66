"""What the banded kernels are made of: tiles of W = e^w, of the keys and of their products.

Tiles are BLOCK × BLOCK of W and BLOCK × WIDTH of tokens and channels. A tile of w is read from a
table, ``bias`` = (pointer, strides of target and source, origin), which a dense w [T, S] is and the
free bias [T, 2s − 1] of AFT-local as well: its entry ``s − 1 + (t' − t)`` of row t has strides too.
Or it is the product of the rows of the factors ``bias`` and ``other``. TRANSPOSED exchanges the
roles: rows are sources, columns are targets, and so are the strides and the factors.
"""

import torch
import triton
import triton.language as tl

from .products import multiply
from .support import interpreted

# A smaller denominator is that of a row that sees nothing.
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def _interpreted_span(first, last):
    """A range whose bounds are tensors, which the interpreter cannot take under numpy 2.4."""
    return range(*(int(bound.handle.data.item()) for bound in (first, last)))


# A loop over a span is pipelined by the compiler, unlike a while loop.
span = _interpreted_span if interpreted() else tl.range


@triton.jit
def locate(tokens, channels, batches, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Tile, sequence, tokens [BLOCK] and channels [WIDTH] of this program, and which exist.

    The sequences and channels of a tile run side by side and share its part of w.
    """
    parts = tl.cdiv(channels, WIDTH)
    columns = (tl.program_id(0) % parts) * WIDTH + tl.arange(0, WIDTH)
    index = tl.program_id(0) // parts
    tile = index // batches
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    real = (rows < tokens)[:, None] & (columns < channels)[None, :]
    return tile, (index % batches).to(tl.int64), rows, columns, real


@triton.jit
def tile_at(x, batch, rows, columns):
    """Pointers [BLOCK, WIDTH] into x [B, T, D]."""
    rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    return x[0] + batch * x[1] + rows[:, None] * x[2] + columns[None, :] * x[3]


@triton.jit
def pair_at(x, batch, rows, columns):
    """Pointers [BLOCK, WIDTH] into both halves of x [2, B, T, D]."""
    at = tile_at((x[0], x[2], x[3], x[4]), batch, rows, columns)
    return at, at + x[1]


@triton.jit
def load_pair(x, batch, rows, columns, row_count, column_count):
    """Both halves of x [2, B, T, D], 0 beyond its sizes."""
    real = (rows < row_count)[:, None] & (columns < column_count)[None, :]
    at, other_at = pair_at(x, batch, rows, columns)
    return tl.load(at, mask=real, other=0.0), tl.load(other_at, mask=real, other=0.0)


@triton.jit
def load_keys(key, key_mask, batch, rows, columns, real, tokens):
    """Keys in float32, and which of them are seen."""
    keys = tl.load(tile_at(key, batch, rows, columns), mask=real, other=0.0).to(tl.float32)
    seen = real & (keys != float('-inf'))
    if key_mask is not None:
        at = key_mask[0] + batch * key_mask[1] + rows.to(tl.int64) * key_mask[2]
        seen &= (tl.load(at, mask=rows < tokens, other=0) != 0)[:, None]
    return keys, seen


@triton.jit
def load_terms(key, value, key_mask, shift, batch, rows, columns, real, tokens, channels):
    """``E = e^{k − shift}`` and v, both 0 where the key is hidden."""
    keys, seen = load_keys(key, key_mask, batch, rows, columns, real, tokens)
    values = tl.load(tile_at(value, batch, rows, columns), mask=seen, other=0.0).to(tl.float32)
    at = shift[0] + batch * shift[1] + columns * shift[2]
    high = tl.load(at, mask=columns < channels, other=0.0)
    return tl.where(seen, tl.exp(keys - high[None, :]), 0.0), values


@triton.jit
def store_terms(terms, sums, first, second, tile, batch, rows, columns, tokens, channels, room):
    """Both terms in the type of the products, and their sums over the tile if these are wanted.

    Terms have `room` for some channels more, which are 0, so that their rows are aligned.
    """
    real = (rows < tokens)[:, None] & (columns < room)[None, :]
    at, other_at = pair_at(terms, batch, rows, columns)
    tl.store(at, first.to(terms[0].dtype.element_ty), mask=real)
    tl.store(other_at, second.to(terms[0].dtype.element_ty), mask=real)
    if sums is not None:
        inside = columns < channels
        at = sums[0] + batch * sums[2] + tile.to(tl.int64) * sums[3] + columns
        tl.store(at, tl.sum(first, 0), mask=inside)
        tl.store(at + sums[1], tl.sum(second, 0), mask=inside)


@triton.jit
def visible(
    rows,
    columns,
    row_count,
    column_count,
    radius,
    CAUSAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Which pairs exist and are not hidden by causality; and which of these have a w."""
    rows, columns = rows[:, None], columns[None, :]
    seen = (rows < row_count) & (columns >= 0) & (columns < column_count)
    if CAUSAL:
        seen &= rows <= columns if TRANSPOSED else columns <= rows
    return seen, seen & (tl.abs(rows - columns) <= radius)


@triton.jit
def bias_tile(
    bias,
    other,
    rows,
    columns,
    row_count,
    column_count,
    near,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """w [BLOCK, BLOCK] in float32, of which only `near` has a meaning."""
    row_real = (rows < row_count)[:, None]
    column_real = ((columns >= 0) & (columns < column_count))[None, :]
    rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    if other is None:
        at = bias[0] + bias[3] + rows[:, None] * bias[1] + columns[None, :] * bias[2]
        w = tl.load(at, mask=near, other=0.0).to(tl.float32)
    else:
        w = tl.zeros([BLOCK, BLOCK], tl.float32)
        # A loop, because unrolled all of u would be kept in registers from tile to tile.
        for start in tl.range(0, RANK, BLOCK // 2):
            ranks = start + tl.arange(0, BLOCK // 2)
            inside = ranks < RANK
            at = bias[0] + rows[:, None] * bias[1] + ranks[None, :] * bias[2]
            u = tl.load(at, mask=row_real & inside[None, :], other=0.0)
            at = other[0] + columns[None, :] * other[1] + ranks[:, None] * other[2]
            v = tl.load(at, mask=column_real & inside[:, None], other=0.0)
            # An exponent: its error is one of the result, whatever the type of that.
            w = multiply(u, v, w, 'tf32x3')
    return w


@triton.jit
def weight_tile(
    bias,
    other,
    shifts,
    rows,
    columns,
    row_count,
    column_count,
    radius,
    RANK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """W [BLOCK, BLOCK] and the pairs that have a w.

    With `shifts` every row of w is over its largest entry; without, W = 1 where there is no w.
    """
    seen, near = visible(rows, columns, row_count, column_count, radius, CAUSAL, TRANSPOSED)
    w = bias_tile(bias, other, rows, columns, row_count, column_count, near, RANK, BLOCK)
    if shifts is None:
        w = tl.where(near, w, 0.0)
    elif TRANSPOSED:
        w -= tl.load(shifts + columns, mask=columns < column_count, other=0.0)[None, :]
    else:
        w -= tl.load(shifts + rows, mask=rows < row_count, other=0.0)[:, None]
    return tl.where(seen, tl.exp(w), 0.0), near


@triton.jit
def add_far(first, second, sums, tile, tiles, batch, columns, inside):
    """The sums with those of `tile` of sums [2, B, tiles, D], if there is such a tile."""
    real = inside & (tile >= 0) & (tile < tiles)
    at = sums[0] + batch * sums[2] + tile.to(tl.int64) * sums[3] + columns
    first += tl.load(at, mask=real, other=0.0)[None, :]
    second += tl.load(at + sums[1], mask=real, other=0.0)[None, :]
    return first, second


@triton.jit
def band_sums(
    terms,
    past,
    future,
    bias,
    other,
    shifts,
    tile,
    batch,
    rows,
    columns,
    row_count,
    column_count,
    channels,
    room,
    before,
    after,
    radius,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """W times both halves of terms [2, B, T, room] for one tile of rows, two [BLOCK, WIDTH].

    The tiles from `before` before it to `after` after it meet the window; all that come earlier and
    later have W = 1 and are in `past` and `future`, running sums over tiles.
    """
    first = tl.zeros([BLOCK, WIDTH], tl.float32)
    second = tl.zeros([BLOCK, WIDTH], tl.float32)
    inside = columns < channels
    tiles = tl.cdiv(column_count, BLOCK)
    for step in span(tl.maximum(tile - before, 0), tl.minimum(tile + after + 1, tiles)):
        others = step * BLOCK + tl.arange(0, BLOCK)
        weights, _ = weight_tile(
            bias,
            other,
            shifts,
            rows,
            others,
            row_count,
            column_count,
            radius,
            RANK,
            CAUSAL,
            TRANSPOSED,
            BLOCK,
        )
        x, y = load_pair(terms, batch, others, columns, column_count, room)
        first = multiply(weights.to(x.dtype), x, first, PRECISION)
        second = multiply(weights.to(x.dtype), y, second, PRECISION)
    if past is not None:
        first, second = add_far(
            first, second, past, tile - before - 1, tiles, batch, columns, inside
        )
    if future is not None:
        first, second = add_far(
            first, second, future, tile + after + 1, tiles, batch, columns, inside
        )
    return first, second
