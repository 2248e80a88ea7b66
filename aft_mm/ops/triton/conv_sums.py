"""What the kernels of AFT-conv are made of: places, pairs of numbers, and the sums around a tile.

A pair is a contiguous float32 tensor [B, H, 2, W, D], two numbers per token and channel: (E v, E)
on the way forward, (a, c) on the way back; 0 where nothing is seen.

A program is SLOTS warps. Each owns one tile, WIDTH tokens of a row of the map, and all of them own
the same COLUMNS channels, so tensors are [SLOTS, COLUMNS] and nothing passes between threads. The
slots lie next to each other, first down two rows of the map and then along them: a row that one of
them reads the others find in the first-level cache.
"""

import triton
import triton.language as tl


@triton.jit
def place_columns(block, channels, COLUMNS: tl.constexpr):
    """The channels [1, COLUMNS] of a block, and which of them exist."""
    columns = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return columns, columns < channels


@triton.jit
def place_tiles(channels, height, tiles, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sequence; row and tile [SLOTS, 1]; channels; which exist; the first and the last row."""
    blocks = tl.cdiv(channels, COLUMNS)
    strip = tl.minimum(height, 2)
    groups = tl.cdiv(tl.cdiv(height, strip) * strip * tiles, SLOTS)
    first = tl.program_id(0) % groups * SLOTS
    index = tl.program_id(0) // groups
    columns, inside = place_columns(index % blocks, channels, COLUMNS)
    item = first + tl.arange(0, SLOTS)[:, None]
    row = item // (strip * tiles) * strip + item % strip
    upper = first // (strip * tiles) * strip
    lower = tl.minimum((first + SLOTS - 1) // (strip * tiles) * strip + strip, height) - 1
    real = inside & (row < height)
    batch, tile = (index // blocks).to(tl.int64), item // strip % tiles
    return batch, row, tile, columns, real, upper, lower


@triton.jit
def load_pair(at, far, real):
    """The numbers at `at` and `far` from there, 0 where `real` says that there are none."""
    return tl.load(at, mask=real, other=0.0), tl.load(at + far, mask=real, other=0.0)


@triton.jit
def zeros(COUNT: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tuple of COUNT sums."""
    result = ()
    for _ in tl.static_range(COUNT):
        result = result + (tl.zeros([SLOTS, COLUMNS], tl.float32),)
    return result


@triton.jit
def only(x, there, SPANS: tl.constexpr):
    """x if this is the span at the edge of the kernel, else 0."""
    if SPANS > 1:
        x = tl.where(there, x, 0.0)
    return x


@triton.jit
def sums_around(
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
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Two tuples, Σ W x and Σ W y of the pair (x, y), of the WIDTH tokens of each tile.

    A step is a row that a token of the tile sees and a span of SPAN columns of the kernel. It reads
    WIDTH + SPAN − 1 columns of the map, each once; which token takes which of them with which
    weight is settled when the kernel is compiled. Columns that only some tokens see count with
    W = 1 for the others: `early` those left of what a token sees, `late` those right of it.
    """
    firsts, seconds = zeros(WIDTH, SLOTS, COLUMNS), zeros(WIDTH, SLOTS, COLUMNS)
    # Added at the end.
    late_firsts = zeros(WIDTH - 1, SLOTS, COLUMNS)
    late_seconds = zeros(WIDTH - 1, SLOTS, COLUMNS)
    half = kernel_rows // 2
    far = width.to(tl.int64) * channels
    at = beyond + (batch * height + row) * 2 * channels + columns
    base_first, base_second = load_pair(at, channels, real)
    step = tl.maximum(half - lower, 0) * SPANS
    last = tl.minimum(half - upper + height, kernel_rows) * SPANS
    while step < last:
        kernel_row, span = step // SPANS, step % SPANS
        other = row + kernel_row - half
        seen = real & (other >= 0) & (other < height)
        line = (batch * height + other) * 2
        at = beside + (line * tiles + tile) * channels + columns
        x, y = load_pair(at, tiles * channels, seen & (span == 0))
        base_first += x
        base_second += y
        weights = ()
        there = exp_weight + step * SPAN * channels + columns
        early_first = tl.zeros([SLOTS, COLUMNS], tl.float32)
        early_second = tl.zeros([SLOTS, COLUMNS], tl.float32)
        column = tile * WIDTH - reach + span * SPAN
        at = pair + (line * width + column) * channels + columns
        for p in tl.static_range(WIDTH + SPAN - 1):
            x, y = load_pair(at, far, seen & (column >= 0) & (column < width))
            if p < SPAN:
                weights = weights + (tl.load(there, mask=real, other=0.0),)
                there += channels
            sums_x, sums_y = (), ()
            for c in tl.static_range(WIDTH):
                sum_x, sum_y = firsts[c], seconds[c]
                if c > 0 and c == p:
                    sum_x += early_first
                    sum_y += early_second
                if p >= c and p - c < SPAN:
                    sum_x += weights[p - c] * x
                    sum_y += weights[p - c] * y
                sums_x = sums_x + (sum_x,)
                sums_y = sums_y + (sum_y,)
            firsts, seconds = sums_x, sums_y
            if p < WIDTH - 1:
                early_first += only(x, span == 0, SPANS)
                early_second += only(y, span == 0, SPANS)
            if p >= SPAN:
                sums_x, sums_y = (), ()
                for c in tl.static_range(WIDTH - 1):
                    sum_x, sum_y = late_firsts[c], late_seconds[c]
                    if c == p - SPAN:
                        sum_x += only(x, span == SPANS - 1, SPANS)
                        sum_y += only(y, span == SPANS - 1, SPANS)
                    sums_x = sums_x + (sum_x,)
                    sums_y = sums_y + (sum_y,)
                late_firsts, late_seconds = sums_x, sums_y
            column += 1
            at += channels
        step += 1
    sums_x, sums_y = (), ()
    for i in tl.static_range(WIDTH):
        if i > 0:
            base_first += late_firsts[WIDTH - 1 - i]
            base_second += late_seconds[WIDTH - 1 - i]
        sums_x = (firsts[WIDTH - 1 - i] + base_first,) + sums_x
        sums_y = (seconds[WIDTH - 1 - i] + base_second,) + sums_y
    return sums_x, sums_y
