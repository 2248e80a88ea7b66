"""Where w[t, t'] is, which pairs of tokens have one, and the kernel that makes W of it.

`bias` is the table that the caller has: a dense w [T, S], the free bias [T, 2s − 1] of AFT-local,
the product of its factors in tiles [n, tile, reach · tile], or the kernels [h, 2s − 1] of AFT-conv,
each for all tokens of one head. All are read, and their gradients written, through one form of
address (:class:`Bias`), so that no other copy of w is made.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .rows import LOWEST
from .support import interpreted


def _interpreted_span(first, last, step=1):
    """A range whose bounds are tensors, which the interpreter cannot take under numpy 2.4."""
    bounds = (first, last, step)
    return range(*(int(x.handle.data.item()) if hasattr(x, 'handle') else x for x in bounds))


# A loop over a span is pipelined by the compiler, unlike a while loop.
span = _interpreted_span if interpreted() else tl.range


class Tokens(NamedTuple):
    """A tensor [B, T, D] and its strides; tiles may stand for tokens, numbers for channels."""

    at: Any
    batch: Any
    token: Any
    channel: Any


class Bias(NamedTuple):
    """Where w is: ``at + origin + b · by_batch + (t // tile) · by_tile + t · by_target + …``."""

    at: Any
    by_batch: Any
    by_tile: Any
    by_target: Any
    by_source: Any
    origin: Any


class Shifts(NamedTuple):
    """What is taken off w: of a target, or of all of a sequence."""

    at: Any
    by_batch: Any
    by_target: Any


class Where(NamedTuple):
    """Sizes, the window, and how many tiles before and after its own a tile meets.

    rows, columns, width: the window on a 2-d grid and the width of that; radius: of a 1-d window.
    """

    batches: Any
    channels: Any
    targets: Any
    sources: Any
    before: Any
    after: Any
    radius: Any
    rows: Any
    columns: Any
    width: Any


class Inputs(NamedTuple):
    """What all kernels of a product read."""

    where: Any
    key: Any
    value: Any
    bias: Any
    shifts: Any
    query: Any
    key_mask: Any
    # Triton 3.6 loses the constants, strides of 1, in what follows the last None of a tuple, and
    # those of a tuple that numbers stand beside.
    end: None = None


class Form(NamedTuple):
    """What kernels are specialised for; near: 'dense', or the window lies on a 'line' or 'grid'.

    far: W = 1 for visible tokens that no tile of w covers; shared: a sequence has a W of its own,
    and the tiles of that are alike; tile: tokens along a side of a tile.
    """

    causal: bool
    near: str
    far: bool
    shared: bool
    tile: int


@triton.jit
def tokens_at(x, batch, rows, columns):
    """Pointers [rows, columns] into x [B, T, D]."""
    rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    return x.at + batch * x.batch + rows[:, None] * x.token + columns[None, :] * x.channel


@triton.jit
def terms_at(x, batch, token, number, TOKENS: tl.constexpr, NUMBERS: tl.constexpr):
    """Pointers into a block of terms, which lie so close together that an int32 counts them."""
    start = x.at + batch * x.batch + tl.cast(token, tl.int64) * x.token
    start += tl.cast(number, tl.int64) * x.channel
    tokens, numbers = tl.arange(0, TOKENS), tl.arange(0, NUMBERS)
    return start + (tokens[:, None] * x.token + numbers[None, :] * x.channel)


@triton.jit
def load_row(x, batch, row, columns, inside, other):
    """One token, or tile, of x [B, T, D]."""
    at = (
        x.at + batch * x.batch + tl.cast(row, tl.int64) * x.token + columns.to(tl.int64) * x.channel
    )
    return tl.load(at, mask=inside, other=other)


@triton.jit
def bias_pointer(bias, batch, target, source, rows, columns, FORM: tl.constexpr):
    """Where w of targets `target + rows`, all of one tile, and sources `source + columns` is."""
    target = tl.cast(target, tl.int64)
    start = target * bias.by_target + tl.cast(source, tl.int64) * bias.by_source + bias.origin
    start += tl.cast(batch, tl.int64) * bias.by_batch + target // FORM.tile * bias.by_tile
    return bias.at + start + (rows * bias.by_target + columns * bias.by_source)


@triton.jit
def load_shifts(shifts, batch, rows, real):
    """The shifts of these targets."""
    at = shifts.at + tl.cast(batch, tl.int64) * shifts.by_batch + rows * shifts.by_target
    return tl.load(at, mask=real, other=0.0)


@triton.jit
def visible(where, targets, sources, FORM: tl.constexpr):
    """Which of these pairs exist and are not hidden by causality, and which of them have a w."""
    # The first tile of a window, of sources or of targets, may begin before the sequence.
    seen = (targets >= 0) & (targets < where.targets)
    seen &= (sources >= 0) & (sources < where.sources)
    if FORM.causal:
        seen &= sources <= targets
    near = seen
    if FORM.near == 'line':
        near &= tl.abs(targets - sources) <= where.radius
    if FORM.near == 'grid':
        down = targets // where.width - sources // where.width
        right = targets % where.width - sources % where.width
        near &= (tl.abs(down) < where.rows) & (tl.abs(right) < where.columns)
    return seen, near


@triton.jit
def load_bias(bias, where, batch, target, source, rows, columns, FORM: tl.constexpr):
    """w of these pairs, 0 where a visible one has none; which are visible, and which have one."""
    seen, near = visible(where, target + rows, source + columns, FORM)
    at = bias_pointer(bias, batch, target, source, rows, columns, FORM)
    w = tl.load(at, mask=near, other=0.0).to(tl.float32)
    return w, seen & (w != float('-inf')), near


@triton.jit
def weigh(
    weights,
    shifts,
    bias,
    where,
    width,
    FORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """``W = exp(w − shift)`` in tiles, and of each target its shift, the largest visible w.

    weights [n, tile, width]: targets against the sources that their tile meets, from its first on;
    TRANSPOSED: sources against the targets, with `before` and `after` exchanged and shifts known.
    If shared one tile [tile, width] of each sequence, the middle one of as many as it meets.
    """
    start_of_row = tl.program_id(0) * ROWS
    row, batch = start_of_row, tl.program_id(1)
    if FORM.shared:
        row += where.before * FORM.tile
        weights += batch.to(tl.int64) * FORM.tile * width
    rows, columns = tl.arange(0, ROWS), tl.arange(0, STEP)
    first = 0
    if FORM.near != 'dense':
        first = (row // FORM.tile - where.before) * FORM.tile
    shift = tl.zeros([ROWS], tl.float32) + LOWEST
    if not TRANSPOSED:
        for start in span(0, width, STEP):
            w, seen, _ = load_bias(
                bias, where, batch, row, first + start, rows[:, None], columns[None, :], FORM
            )
            shift = tl.maximum(shift, tl.max(tl.where(seen, w, LOWEST), 1))
        if FORM.far:  # what no tile covers has w = 0
            shift = tl.maximum(shift, 0.0)
        if FORM.shared:  # every row of the middle tile sees all of a kernel, and a 0 beside it
            tl.store(shifts.at + batch * shifts.by_batch, tl.max(shift, 0))
        else:
            tl.store(shifts.at + row + rows, shift, mask=row + rows < where.targets)
    for start in span(0, width, STEP):
        column = first + start
        if TRANSPOSED:
            w, seen, _ = load_bias(
                bias, where, batch, column, row, columns[None, :], rows[:, None], FORM
            )
            others = column + columns
            real = (others >= 0) & (others < where.targets)
            w -= load_shifts(shifts, batch, others, real)[None, :]
        else:
            w, seen, _ = load_bias(
                bias, where, batch, row, column, rows[:, None], columns[None, :], FORM
            )
            w -= shift[:, None]
        at = weights + tl.cast(start_of_row, tl.int64) * width + start
        at += rows[:, None] * width + columns[None, :]
        tl.store(at, tl.where(seen, tl.exp(w), 0.0).to(weights.dtype.element_ty))
