"""Kernels of AFT-conv, not causal: ``W = e^w`` inside of the kernel, 1 outside.

With E = e^{k − M}, M the largest visible key of the sequence and head,

    n_t = Σ_inside e^w E v + Σ_outside E v    d_t = Σ_inside e^w E + Σ_outside E    o_t = n_t / d_t

in the additive form: no sum is a difference. Every row sees the key M, so that d ≥ e^{min(w, 0)};
what float32 flushes is at most ``e^{max(w, 0) − 87}`` a term. While w and 0 spread over at most 60
(``FAST_BIAS_SPREAD``) that is below e^−27 of the sum, for keys of any size: the condition under
which a call comes here. The gradient is the same sum with the kernel reflected,

    A_s = Σ_t W[t, s] a_t    C_s = Σ_t W[t, s] c_t    a = dy g(q) / d    c = a o
    dv = E A    dk = E (v A − C)    dw_j = e^{w_j} Σ_t E_{t+j} (a_t v_{t+j} − c_t).

So both ways one pass writes a pair per token (`terms`, `output_gradients`), `side_sums` adds up
what lies outside of a tile's columns, and `forward` or `backward` walks over the rows that a tile
sees (`conv_sums.py`): exponentials, masks, heads, types and strides are met once per token.
"""

import triton
import triton.language as tl

from .conv_sums import load_pair, place_columns, place_tiles, sums_around, zeros
from .rows import gate_slope, gate_value

SIZES = ['height', 'width', 'tiles', 'kernel_rows', 'reach']


@triton.jit
def place_tokens(tokens, channels, width, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sequence, tokens [TOKENS, 1], channels, which exist, where in a pair, and how far apart."""
    blocks = tl.cdiv(channels, COLUMNS)
    steps = tl.cdiv(tokens, TOKENS)
    columns, inside = place_columns(tl.program_id(0) % blocks, channels, COLUMNS)
    index = tl.program_id(0) // blocks
    batch = (index // steps).to(tl.int64)
    token = index % steps * TOKENS + tl.arange(0, TOKENS)[:, None]
    at = (batch * tokens * 2 + token // width * width + token) * channels + columns
    real = inside & (token < tokens)
    far = width.to(tl.int64) * channels
    return batch, token.to(tl.int64), columns.to(tl.int64), real, at, far


@triton.jit(do_not_specialize=['tokens', 'width'])
def terms(
    pair,
    value,
    key,
    high,
    key_mask,
    tokens,
    channels,
    width,
    group,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(E v, E) of each token; `high` is M [B, h]."""
    batch, token, columns, real, at, far = place_tokens(tokens, channels, width, TOKENS, COLUMNS)
    seen = real
    if key_mask is not None:
        there = key_mask[0] + batch * key_mask[1] + token * key_mask[2]
        seen = real & (tl.load(there, mask=token < tokens, other=0) != 0)
    heads = columns // group
    there = key[0] + batch * key[1] + token * key[2] + heads * key[3]
    k = tl.load(there, mask=seen, other=0.0).to(tl.float32)
    top = tl.load(high[0] + batch * high[1] + heads * high[2], mask=real, other=0.0)
    weight = tl.where(seen, tl.exp(k - top), 0.0)
    there = value[0] + batch * value[1] + token * value[2] + columns * value[3]
    v = tl.load(there, mask=seen, other=0.0).to(tl.float32)
    tl.store(pair + at, weight * v, mask=real)
    tl.store(pair + at + far, weight, mask=real)


@triton.jit(do_not_specialize=['tokens', 'width'])
def output_gradients(
    by_query,
    pair,
    gradient,
    sums,
    query,
    tokens,
    channels,
    width,
    GATE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of query [B, T, D], and (a, c) of each token from the pair `sums` (n, d)."""
    batch, token, columns, real, at, far = place_tokens(tokens, channels, width, TOKENS, COLUMNS)
    total, divisor = load_pair(sums + at, far, real)
    empty = divisor == 0
    divisor = tl.where(empty, 1.0, divisor)
    mean = total / divisor
    there = gradient[0] + batch * gradient[1] + token * gradient[2] + columns * gradient[3]
    grad = tl.load(there, mask=real, other=0.0).to(tl.float32)
    if GATE != 'none':
        there = query[0] + batch * query[1] + token * query[2] + columns * query[3]
        gate = tl.load(there, mask=real, other=0.0)
        slope = grad * mean * gate_slope(gate, GATE)
        there = by_query + (batch * tokens + token) * channels + columns
        tl.store(there, slope.to(by_query.dtype.element_ty), mask=real)
        grad *= gate_value(gate, GATE)
    grad = tl.where(empty, 0.0, grad / divisor)
    tl.store(pair + at, grad, mask=real)
    tl.store(pair + at + far, grad * mean, mask=real)


@triton.jit(do_not_specialize=['rows', 'width', 'tiles', 'steps', 'reach', 'right_reach'])
def side_sums(
    sides,
    pair,
    rows,
    channels,
    width,
    tiles,
    steps,
    reach,
    right_reach,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What a row holds on either side of the columns that a tile sees, [2, B, H, 2, steps, D].

    Left of tile j are the columns before ``j · WIDTH − reach``, and the last step is the sum of the
    row; right is left in the mirror, for the `tiles` only.
    """
    blocks = tl.cdiv(channels, COLUMNS)
    columns, inside = place_columns(tl.program_id(0) % blocks, channels, COLUMNS)
    row = tl.program_id(0) // blocks * SLOTS + tl.arange(0, SLOTS)[:, None].to(tl.int64)
    real = inside & (row < rows)
    right = tl.program_id(1)
    first, second = tl.zeros([SLOTS, COLUMNS], tl.float32), tl.zeros([SLOTS, COLUMNS], tl.float32)
    far = width.to(tl.int64) * channels
    line = pair + row * 2 * far + columns
    start = tl.where(right != 0, width - tiles * WIDTH - right_reach, -reach)
    step = 0
    last = tl.where(right != 0, tiles, steps)
    while step < last:
        at = sides + ((right * rows + row) * 2 * steps + step) * channels + columns
        tl.store(at, first, mask=real)
        tl.store(at + steps * channels, second, mask=real)
        for p in tl.static_range(WIDTH):
            column = start + p
            seen = real & (column >= 0) & (column < width)
            place = tl.where(right != 0, width - 1 - column, column).to(tl.int64)
            x, y = load_pair(line + place * channels, far, seen)
            first += x
            second += y
        start += WIDTH
        step += 1


@triton.jit(do_not_specialize=SIZES)
def forward(
    output,
    sums,
    query,
    pair,
    beyond,
    beside,
    exp_weight,
    channels,
    height,
    width,
    tiles,
    kernel_rows,
    reach,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE: tl.constexpr,
):
    """Output [B, T, D], and unless it is None the pair `sums` (n, d)."""
    batch, row, tile, columns, real, upper, lower = place_tiles(
        channels, height, tiles, SLOTS, COLUMNS
    )
    firsts, seconds = sums_around(
        pair,
        beyond,
        beside,
        exp_weight,
        batch,
        row,
        tile,
        columns,
        real,
        upper,
        lower,
        channels,
        height,
        width,
        tiles,
        kernel_rows,
        reach,
        SPANS,
        SPAN,
        WIDTH,
        SLOTS,
        COLUMNS,
    )
    line = batch * height + row
    far = width.to(tl.int64) * channels
    for c in tl.static_range(WIDTH):
        column = tile * WIDTH + c
        there = real & (column < width)
        # A row that sees nothing gives 0.
        result = firsts[c] / tl.where(seconds[c] == 0, 1.0, seconds[c])
        if sums is not None:
            at = (line * 2 * width + column) * channels + columns
            tl.store(sums + at, firsts[c], mask=there)
            tl.store(sums + at + far, seconds[c], mask=there)
        if GATE != 'none':
            at = query[0] + batch * query[1] + (row * width + column).to(tl.int64) * query[2]
            gate = tl.load(at + columns.to(tl.int64) * query[3], mask=there, other=0.0)
            result *= gate_value(gate, GATE)
        at = output + (line * width + column) * channels + columns
        tl.store(at, result.to(output.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=SIZES)
def backward(
    by_key,
    by_value,
    source,
    pair,
    beyond,
    beside,
    exp_weight,
    channels,
    height,
    width,
    tiles,
    kernel_rows,
    reach,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of value and, for each channel apart, of key [B, T, D].

    `pair` is (a, c), `source` (E v, E), exp_weight reflected.
    """
    batch, row, tile, columns, real, upper, lower = place_tiles(
        channels, height, tiles, SLOTS, COLUMNS
    )
    firsts, seconds = sums_around(
        pair,
        beyond,
        beside,
        exp_weight,
        batch,
        row,
        tile,
        columns,
        real,
        upper,
        lower,
        channels,
        height,
        width,
        tiles,
        kernel_rows,
        reach,
        SPANS,
        SPAN,
        WIDTH,
        SLOTS,
        COLUMNS,
    )
    line = batch * height + row
    far = width.to(tl.int64) * channels
    for c in tl.static_range(WIDTH):
        column = tile * WIDTH + c
        there = real & (column < width)
        at = (line * 2 * width + column) * channels + columns
        x, weight = load_pair(source + at, far, there)
        at = (line * width + column) * channels + columns
        result = weight * firsts[c]
        tl.store(by_value + at, result.to(by_value.dtype.element_ty), mask=there)
        result = x * firsts[c] - weight * seconds[c]
        tl.store(by_key + at, result.to(by_key.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=[*SIZES, 'count', 'share'])
def weight_gradient(
    by_weight,
    source,
    pair,
    channels,
    height,
    width,
    tiles,
    kernel_rows,
    reach,
    count,
    share,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``Σ_t E_{t+j} (a_t v_{t+j} − c_t)`` of each channel, by_weight [parts, *kernel, D].

    A program sums SLOTS spans of rows of the kernel over `share` of the `count` tiles of all maps,
    down a map before along it: the next tile finds most rows in the first-level cache.
    """
    blocks, bands = tl.cdiv(channels, COLUMNS), tl.cdiv(kernel_rows * SPANS, SLOTS)
    index = tl.program_id(0)
    span = index % bands * SLOTS + tl.arange(0, SLOTS)[:, None]
    kernel_row = span // SPANS
    index = index // bands
    columns, inside = place_columns(index % blocks, channels, COLUMNS)
    part = index // blocks
    real = inside & (kernel_row < kernel_rows)
    far = width.to(tl.int64) * channels
    totals = zeros(SPAN, SLOTS, COLUMNS)
    item = part * share
    last = tl.minimum(item + share, count)
    while item < last:
        row, column = item % height, item // height % tiles * WIDTH
        line = (item // height // tiles).to(tl.int64) * height + row
        at = pair + (line * 2 * width + column) * channels + columns
        grads, shares = (), ()
        for c in tl.static_range(WIDTH):
            a, b = load_pair(at, far, real & (column + c < width))
            grads = grads + (a,)
            shares = shares + (b,)
            at += channels
        line += kernel_row - kernel_rows // 2
        other = row + kernel_row - kernel_rows // 2
        seen = real & (other >= 0) & (other < height)
        column += span % SPANS * SPAN - reach
        at = source + (line * 2 * width + column) * channels + columns
        for p in tl.static_range(WIDTH + SPAN - 1):
            there = seen & (column >= 0) & (column < width)
            x, weight = load_pair(at, far, there)
            column += 1
            at += channels
            sums = ()
            for j in tl.static_range(SPAN):
                total = totals[j]
                if p >= j and p - j < WIDTH:
                    total += grads[p - j] * x
                    total -= shares[p - j] * weight
                sums = sums + (total,)
            totals = sums
        item += 1
    line = part.to(tl.int64) * kernel_rows * SPANS + span
    at = by_weight + line * SPAN * channels + columns
    for j in tl.static_range(SPAN):
        tl.store(at, totals[j], mask=real)
        at += channels
