"""Kernels of AFTWindow: ``y_t = g(q_t) n_t / d_t``, n and d the sums of e^k v and e^k in a window.

A first kernel forms the two numbers per token and channel whose sums are needed, (e^k v, e^k) and
for the gradient

    a_t = dy_t g(q_t) / d_t    c_t = a_t o_t    where o_t = n_t / d_t,

the second sums this pair, for the gradient over the reflected window (A and C, of the targets that
see token t), and finishes:

    dv_t = e^{k_t} A_t    dk_t = e^{k_t} (v_t A_t − C_t)    dq_t = dy_t g'(q_t) o_t.

Keys are less one shift per sequence and channel; the caller checks that one will do. A window is a
box of a grid of lines, `top` to `bottom` and `left` to `right` away from the target, and, causal in
2-d, a second one. All lines of a box have the same columns, so they are added first, in float32;
the columns are then a product with a band of ones, tile by tile, on tensor cores. Where a single
line has a wide window, the tiles that all targets of a program see come as sums that the first
kernel left. Nothing is subtracted, so nothing cancels.
"""

import triton
import triton.language as tl

from .products import multiply
from .rows import gate_slope, gate_value

# One by one: the numbers of a tuple would be specialised on. The channels are: where 16 divides
# them, the compiler loads 16 bytes at a time.
UNSPECIALIZED = ['tokens', 'lines', 'width', 'top', 'bottom', 'left', 'right']
UNSPECIALIZED += ['second_top', 'second_bottom', 'second_left', 'second_right']


@triton.jit
def place(lines, width, channels, TILE: tl.constexpr, CHANNELS: tl.constexpr):
    """The (sequence, line, tile) of this program, its tokens and channels, and which exist."""
    tiles = tl.cdiv(width, TILE)
    tile = tl.program_id(0) % tiles
    line = tl.program_id(0) // tiles % lines
    batch = (tl.program_id(0) // tiles // lines).to(tl.int64)
    columns = tile * TILE + tl.arange(0, TILE)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    real = (columns < width)[:, None] & (channel < channels)[None, :]
    return (batch, line, tile), line.to(tl.int64) * width + columns, channel, real


@triton.jit
def load_tile(x, batch, tokens, channel, real):
    """Tokens and channels of x [B, T, D] in float32, 0 where `real` says that there is none."""
    at = x[0] + batch * x[1] + tokens[:, None] * x[2] + channel[None, :] * x[3]
    return tl.load(at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, batch, tokens, channel, real, tile):
    """Write what :func:`load_tile` reads, in the type of x."""
    at = x[0] + batch * x[1] + tokens[:, None] * x[2] + channel[None, :] * x[3]
    tl.store(at, tile.to(x[0].dtype.element_ty), mask=real)


@triton.jit
def part(pair, INDEX: tl.constexpr):
    """pair[INDEX] of a pair [2, B, T, D]."""
    return (pair[0] + INDEX * pair[1], pair[2], pair[3], pair[4])


@triton.jit
def load_pair(pair, batch, tokens, channel, real):
    """Tokens and channels of both parts of pair [2, B, T, D], in float32."""
    first = load_tile(part(pair, 0), batch, tokens, channel, real)
    return first, load_tile(part(pair, 1), batch, tokens, channel, real)


@triton.jit
def store_pair(pair, batch, tokens, channel, real, first, second):
    """Write what :func:`load_pair` reads."""
    store_tile(part(pair, 0), batch, tokens, channel, real, first)
    store_tile(part(pair, 1), batch, tokens, channel, real, second)


@triton.jit
def store_sums(sums, batch, tile, channel, channels, first, second):
    """Write the sums of a tile into sums [2, B, tiles, D]."""
    at = sums[0] + batch * sums[2] + tile * sums[3] + channel
    tl.store(at, tl.sum(first, 0), mask=channel < channels)
    tl.store(at + sums[1], tl.sum(second, 0), mask=channel < channels)


@triton.jit
def load_weights(key, value, key_mask, shift, batch, tokens, channel, channels, real):
    """e^(k − shift) and v, both 0 where a token is hidden."""
    keys = load_tile(key, batch, tokens, channel, real)
    values = load_tile(value, batch, tokens, channel, real)
    at = shift[0] + batch * shift[1] + channel * shift[3]
    high = tl.load(at, mask=channel < channels, other=0.0)
    if key_mask is not None:
        at = key_mask[0] + batch * key_mask[1] + tokens[:, None] * key_mask[2]
        real &= tl.load(at + 0 * channel[None, :], mask=real, other=0) != 0
        values = tl.where(real, values, 0.0)
    return tl.where(real, tl.exp(keys - high[None, :]), 0.0), values


@triton.jit(do_not_specialize=UNSPECIALIZED)
def weigh(
    pair,
    sums,
    key,
    value,
    key_mask,
    shift,
    tokens,
    channels,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """(e^k v, e^k) of every token, and the sums of each tile unless `sums` is None."""
    here, steps, channel, real = place(1, tokens, channels, TILE, CHANNELS)
    batch, _, tile = here
    weight, values = load_weights(
        key, value, key_mask, shift, batch, steps, channel, channels, real
    )
    store_pair(pair, batch, steps, channel, real, weight * values, weight)
    if sums is not None:
        store_sums(sums, batch, tile, channel, channels, weight * values, weight)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def weigh_gradient(
    pair,
    sums,
    query_gradient,
    saved,
    gradient,
    query,
    tokens,
    channels,
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """(a, c) of every token, the sums of each tile unless `sums` is None, and dq."""
    here, steps, channel, real = place(1, tokens, channels, TILE, CHANNELS)
    batch, _, tile = here
    mean, denominator = load_pair(saved, batch, steps, channel, real)
    grad = load_tile(gradient, batch, steps, channel, real)
    if GATE != 'none':
        queries = load_tile(query, batch, steps, channel, real)
        by_query = grad * mean * gate_slope(queries, GATE)
        store_tile(query_gradient, batch, steps, channel, real, by_query)
        grad *= gate_value(queries, GATE)
    # Nothing seen: whatever is finite will do, all weights of this window are 0.
    by_numerator = grad / tl.where(denominator == 0, 1.0, denominator)
    by_weight = by_numerator * mean
    store_pair(pair, batch, steps, channel, real, by_numerator, by_weight)
    if sums is not None:
        store_sums(sums, batch, tile, channel, channels, by_numerator, by_weight)


@triton.jit
def add_lines(pair, batch, line, last, tile, grid, channel, TILE, CHANNELS):
    """The pair of a tile of columns, summed over the lines `line` … `last`."""
    _, width, channels = grid
    columns = tile * TILE + tl.arange(0, TILE)
    real = (columns < width)[:, None] & (channel < channels)[None, :]
    first = tl.zeros([TILE, CHANNELS], tl.float32)
    second = tl.zeros([TILE, CHANNELS], tl.float32)
    while line <= last:
        tokens = line.to(tl.int64) * width + columns
        one, two = load_pair(pair, batch, tokens, channel, real)
        first += one
        second += two
        line += 1
    return first, second


@triton.jit
def add_tiles(first, second, sums, batch, start, stop, channel, channels, TILE):
    """The sums of the tiles from `start` up to `stop`, added to every target."""
    while start < stop:
        tiles = start + tl.arange(0, TILE)
        real = (tiles < stop)[:, None] & (channel < channels)[None, :]
        one, two = load_pair(sums, batch, tiles, channel, real)
        first += tl.sum(one, 0)[None, :]
        second += tl.sum(two, 0)[None, :]
        start += TILE
    return first, second


@triton.jit
def add_box(first, second, pair, sums, here, box, grid, channel, PRECISION, TILE, CHANNELS):
    """The pair summed over the box of each target of a tile, added to first and second."""
    batch, own, own_tile = here
    lines, width, channels = grid
    top, bottom, left, right = box
    line, last = tl.maximum(own + top, 0), tl.minimum(own + bottom, lines - 1)
    start = own_tile * TILE
    tile = tl.maximum(start + left, 0) // TILE
    stop = tl.cdiv(tl.minimum(start + TILE + right, width), TILE)
    stop = tl.where(line <= last, stop, tile)
    # The tiles that every target sees whole: from `whole` up to `after`.
    whole, after = stop, stop
    if sums is not None:
        whole = tl.cdiv(tl.maximum(start + TILE - 1 + left, 0), TILE)
        after = tl.maximum(tl.minimum(start + right + 1, width) // TILE, whole)
        first, second = add_tiles(first, second, sums, batch, whole, after, channel, channels, TILE)
        tile = tl.where(tile == whole, after, tile)
    kind = pair[0].dtype.element_ty
    while tile < stop:
        one, two = add_lines(pair, batch, line, last, tile, grid, channel, TILE, CHANNELS)
        offsets = tl.arange(0, TILE)
        distance = (tile * TILE + offsets)[None, :] - (start + offsets)[:, None]
        band = tl.where((distance >= left) & (distance <= right), 1.0, 0.0).to(kind)
        first = multiply(band, one.to(kind), first, PRECISION)
        second = multiply(band, two.to(kind), second, PRECISION)
        tile += 1
        tile = tl.where(tile == whole, after, tile)
    return first, second


@triton.jit
def add_window(pair, sums, here, box, second_box, grid, channel, PRECISION, TILE, CHANNELS):
    """The pair summed over the window of each target of a tile, [TILE, CHANNELS] each."""
    first = tl.zeros([TILE, CHANNELS], tl.float32)
    second = tl.zeros([TILE, CHANNELS], tl.float32)
    first, second = add_box(
        first, second, pair, sums, here, box, grid, channel, PRECISION, TILE, CHANNELS
    )
    if second_box is not None:
        first, second = add_box(
            first, second, pair, None, here, second_box, grid, channel, PRECISION, TILE, CHANNELS
        )
    return first, second


@triton.jit(do_not_specialize=UNSPECIALIZED)
def window_mean(
    output,
    saved,
    pair,
    sums,
    query,
    channels,
    lines,
    width,
    top,
    bottom,
    left,
    right,
    second_top,
    second_bottom,
    second_left,
    second_right,
    SECOND_BOX: tl.constexpr,
    GATE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Output, and (o, d) into saved [2, B, T, D] unless that is None."""
    here, tokens, channel, real = place(lines, width, channels, TILE, CHANNELS)
    grid, box = (lines, width, channels), (top, bottom, left, right)
    second_box = (second_top, second_bottom, second_left, second_right) if SECOND_BOX else None
    numerator, denominator = add_window(
        pair, sums, here, box, second_box, grid, channel, PRECISION, TILE, CHANNELS
    )
    mean = numerator / tl.where(denominator == 0, 1.0, denominator)
    if saved is not None:
        store_pair(saved, here[0], tokens, channel, real, mean, denominator)
    if GATE != 'none':
        mean *= gate_value(load_tile(query, here[0], tokens, channel, real), GATE)
    store_tile(output, here[0], tokens, channel, real, mean)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def window_gradient(
    key_gradient,
    value_gradient,
    pair,
    sums,
    key,
    value,
    key_mask,
    shift,
    channels,
    lines,
    width,
    top,
    bottom,
    left,
    right,
    second_top,
    second_bottom,
    second_left,
    second_right,
    SECOND_BOX: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradients of key and value; the places are those of the reflected window."""
    here, tokens, channel, real = place(lines, width, channels, TILE, CHANNELS)
    grid, box = (lines, width, channels), (top, bottom, left, right)
    second_box = (second_top, second_bottom, second_left, second_right) if SECOND_BOX else None
    by_numerator, by_weight = add_window(
        pair, sums, here, box, second_box, grid, channel, PRECISION, TILE, CHANNELS
    )
    weight, values = load_weights(
        key, value, key_mask, shift, here[0], tokens, channel, channels, real
    )
    by_key = weight * (values * by_numerator - by_weight)
    store_tile(key_gradient, here[0], tokens, channel, real, by_key)
    store_tile(value_gradient, here[0], tokens, channel, real, weight * by_numerator)
