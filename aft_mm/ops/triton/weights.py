"""Access to the position bias w[t, t'], the visibility of pairs, and the kernel that computes W.

The table of w is what the caller has: a dense w, the free bias of AFT-local, the product of its
factors in tiles, or the kernels of AFT-conv. All are addressed by :class:`BiasTable`, so w is never
copied.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .availability import interpreted
from .online_softmax import LOWEST, Bools, Floats, Ints, Pointers, Strided, load_entry, store_entry


def _interpreted_span(first: Any, last: Any, step: Any = 1) -> range:
    """``range`` for tensor bounds, which Triton's interpreter does not accept under numpy 2.4."""
    bounds = (first, last, step)
    return range(*(int(x.handle.data.item()) if hasattr(x, 'handle') else x for x in bounds))


# Unlike a while loop, it is pipelined by the compiler.
span = _interpreted_span if interpreted() else tl.range


class BiasTable(NamedTuple):
    """Address of w: ``at + origin + b · batch_stride + (t // tile) · tile_stride + t · target_stride + …``.

    heads: (h, stride of heads) if sequence b is head ``b % h`` of sample ``b // h``; mask: the mask
    of pairs [B, T, S] of samples.
    """

    at: Any
    batch_stride: Ints
    tile_stride: Ints
    target_stride: Ints
    source_stride: Ints
    origin: Ints
    heads: Any = None
    mask: Strided | None = None
    # Triton 3.6 drops constants (strides of 1) after the last None of a tuple.
    end: None = None


class Extents(NamedTuple):
    """Sizes, the window, and how many tiles before and after itself a tile meets.

    rows, columns, width: the window on a 2-d grid and the width of the grid; radius: the reach of a
    1-d window.
    """

    batches: Ints
    channels: Ints
    targets: Ints
    sources: Ints
    before: Ints
    after: Ints
    radius: Ints
    rows: Ints
    columns: Ints
    width: Ints


class MatmulInputs(NamedTuple):
    """Sizes and tensors [B, T, D]; shifts are [B or 1, 1, T]."""

    extents: Extents
    key: Strided
    value: Strided
    bias: BiasTable
    shifts: Strided
    centre: Strided
    query: Strided | None
    key_mask: Strided | None
    # Triton 3.6 drops constants (strides of 1) after the last None of a tuple.
    end: None = None


class MatmulSaved(NamedTuple):
    """Flags [B, tiles, blocks]; mean, λ, units of flagged rows, output and gradient or None."""

    flags: Strided
    mean: Strided | None = None
    log: Strided | None = None
    unit: Strided | None = None
    output: Strided | None = None
    gradient: Strided | None = None
    # Triton 3.6 drops constants (strides of 1) after the last None of a tuple.
    end: None = None


class MatmulForm(NamedTuple):
    """Constants for which kernels are specialised.

    near: 'dense', or where the window lies: on a 'line' or a 'grid'; has_outside: visible tokens
    that no tile of w covers have W = 1; shared: each sequence has its own W, with equal tiles; own:
    each has its own w, and products compute its W; tile: tokens along a side of a tile; width: channels of a program; step: tokens of a step;
    group: targets and sources that `recompute_flagged.py` processes at once.
    """

    causal: bool
    near: str
    has_outside: bool
    shared: bool
    own: bool
    tile: int
    width: int
    step: int
    precision: str
    group: int


@triton.jit
def load_tile(
    x: 'Strided',
    batch: 'Ints',
    rows: 'Ints',
    columns: 'Ints',
    real: 'Bools',
    other: tl.constexpr = 0.0,
) -> 'Floats':
    """Load x[batch, rows, columns] in float32, [rows, columns]."""
    return load_entry(x, batch, rows[:, None], columns[None, :], real, other)


@triton.jit
def store_tile(
    x: 'Strided | None',
    batch: 'Ints',
    rows: 'Ints',
    columns: 'Ints',
    real: 'Bools',
    numbers: 'Floats',
) -> None:
    store_entry(x, batch, rows[:, None], columns[None, :], real, numbers)


@triton.jit
def bias_pointer(
    bias: 'BiasTable',
    batch: 'Ints',
    target: 'Ints',
    source: 'Ints',
    rows: 'Ints',
    columns: 'Ints',
    FORM: tl.constexpr,
) -> 'Pointers':
    """Return pointers to w of targets `target + rows`, all in one tile, and `source + columns`."""
    target = tl.cast(target, tl.int64)
    start = (
        target * bias.target_stride + tl.cast(source, tl.int64) * bias.source_stride + bias.origin
    )
    batch = tl.cast(batch, tl.int64)
    if FORM.own:
        start += batch // bias.heads[0] * bias.batch_stride + batch % bias.heads[0] * bias.heads[1]
    else:
        start += batch * bias.batch_stride + target // FORM.tile * bias.tile_stride
    return bias.at + start + (rows * bias.target_stride + columns * bias.source_stride)


@triton.jit
def visible_pairs(
    extents: 'Extents', targets: 'Ints', sources: 'Ints', FORM: tl.constexpr
) -> 'tuple[Bools, Bools]':
    # The first tile of a window may begin before the sequence.
    visible = (targets >= 0) & (targets < extents.targets)
    visible &= (sources >= 0) & (sources < extents.sources)
    if FORM.causal:
        visible &= sources <= targets
    near = visible
    if FORM.near == 'line':
        near &= tl.abs(targets - sources) <= extents.radius
    if FORM.near == 'grid':
        down = targets // extents.width - sources // extents.width
        right = targets % extents.width - sources % extents.width
        near &= (tl.abs(down) < extents.rows) & (tl.abs(right) < extents.columns)
    return visible, near


@triton.jit
def load_bias(
    bias: 'BiasTable',
    extents: 'Extents',
    batch: 'Ints',
    target: 'Ints',
    source: 'Ints',
    rows: 'Ints',
    columns: 'Ints',
    FORM: tl.constexpr,
) -> 'tuple[Floats, Bools, Bools]':
    """Load w of these pairs, 0 outside the window; which are visible, and which have a w."""
    visible, near = visible_pairs(extents, target + rows, source + columns, FORM)
    if bias.mask is not None:
        mask, sample = bias.mask, tl.cast(batch, tl.int64) // bias.heads[0]
        shown = mask[0] + sample * mask[1] + (target + rows).to(tl.int64) * mask[2]
        shown += (source + columns).to(tl.int64) * mask[3]
        visible &= tl.load(shown, mask=visible, other=0) != 0  # [rows, columns]
        near = visible
    at = bias_pointer(bias, batch, target, source, rows, columns, FORM)
    w = tl.load(at, mask=near, other=0.0).to(tl.float32)  # [rows, columns]
    return w, visible & (w != float('-inf')), near


@triton.jit
def product_weights_kernel(
    weights: 'Pointers',
    shifts: 'Strided',
    bias: 'BiasTable',
    extents: 'Extents',
    width: 'Ints',
    FORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Compute ``W = exp(w − shift)`` in tiles, and the shift of each target, its largest visible w.

    weights [n, tile, width]: targets against the sources that their tile meets; with TRANSPOSED,
    sources against targets, with the shifts given. If shared, one tile [tile, width] per sequence:
    the middle one.
    """
    start_of_row = tl.program_id(0) * ROWS
    row, batch = start_of_row, tl.program_id(1)
    if FORM.shared:
        row += extents.before * FORM.tile
        weights += batch.to(tl.int64) * FORM.tile * width
    rows, columns = tl.arange(0, ROWS), tl.arange(0, STEP)
    first = 0
    if FORM.near != 'dense':
        first = (row // FORM.tile - extents.before) * FORM.tile
    shift = tl.zeros([ROWS], tl.float32) + LOWEST
    if not TRANSPOSED:
        for start in span(0, width, STEP):
            w, visible, _ = load_bias(
                bias, extents, batch, row, first + start, rows[:, None], columns[None, :], FORM
            )  # [ROWS, STEP]
            shift = tl.maximum(shift, tl.max(tl.where(visible, w, LOWEST), 1))
        if FORM.has_outside:  # outside all tiles w = 0
            shift = tl.maximum(shift, 0.0)
        if FORM.shared:  # every row of the middle tile sees the whole kernel and a 0
            tl.store(shifts[0] + batch * shifts[1], tl.max(shift, 0))
        else:
            tl.store(shifts[0] + row + rows, shift, mask=row + rows < extents.targets)
    for start in span(0, width, STEP):
        column = first + start
        if TRANSPOSED:
            w, visible, _ = load_bias(
                bias, extents, batch, column, row, columns[None, :], rows[:, None], FORM
            )  # [ROWS, STEP]
            others = column + columns
            real = (others >= 0) & (others < extents.targets)
            shift_of_others = load_entry(shifts, batch, 0, others, real)  # [STEP]
            w -= shift_of_others[None, :]
        else:
            w, visible, _ = load_bias(
                bias, extents, batch, row, column, rows[:, None], columns[None, :], FORM
            )  # [ROWS, STEP]
            w -= shift[:, None]
        at = weights + tl.cast(start_of_row, tl.int64) * width + start
        at += rows[:, None] * width + columns[None, :]
        tl.store(at, tl.where(visible, tl.exp(w), 0.0).to(weights.dtype.element_ty))
