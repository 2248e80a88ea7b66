"""Products of AFT-full, AFT-local and AFT-conv, ``y_t = g(q_t) n_t / d_t``, and their gradients.

A program multiplies the W of a tile of targets, step by step, with the terms of the sources for a
block of channels (`operands.py`): (n, d) = W (E (v − m), E), one product per step. In causal ops
the unit rises from tile to tile, so the sums are rescaled at tile borders, per channel, as in flash
attention; products with Wᵀ walk backwards.

All entries of W and E are at most 1, so terms below e^−87 are lost, which is negligible if d ≥
e^−40. If d is smaller although the row sees a key, or n/d is not finite, the program sets a flag
and `recompute_flagged.py` recomputes the tile.

If each sequence has its own w, the program computes W step by step, with the largest w of a row so
far as its shift.

Saved for the gradient: the mean o = m + n/d, and ``λ = log d`` relative to the unit of the tile and
the shift of w. With α = dy g(q),

    a = α e^−λ    c = −α (o − m) e^−λ    (A, C) = Wᵀ (a, c)
    dv = E A      dk = E ((v − m) A + C)      dw = W ⊙ Σ (a, c) (E (v − m), E)ᵀ

where Σ runs over sequences and channels. Without atomic additions results are deterministic.

Operands are bfloat16 for bfloat16 values without a gradient, and with one float32 multiplied as
tf32, since gradients are differences (v − o for the keys). float32 and float16 values use tf32x3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .availability import interpreted
from .online_softmax import (
    LOWEST,
    Bools,
    Floats,
    Ints,
    Pointers,
    Strided,
    gate_value,
    load_entry,
    store_entry,
)
from .operands import UNSEEN, load_source, load_unit, locate_program, store_terms, terms_at
from .weights import (
    BiasTable,
    Extents,
    MatmulInputs,
    MatmulSaved,
    bias_pointer,
    load_bias,
    load_tile,
    span,
    store_tile,
)

INTERPRETED = tl.constexpr(interpreted())
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# e^−40, below which a denominator may have lost significant terms.
SMALLEST = tl.constexpr(4.248354255291589e-18)


class MatmulOperand(NamedTuple):
    """W in tiles, terms, units, and sums of the tiles before and after the window.

    weights: (W [n, tile, width], width, stride of sequences, stride of tiles), None if the product
    computes W.
    """

    weights: Strided | None
    terms: Strided
    units: Strided
    past: Strided | None
    future: Strided | None


@triton.jit
def multiply(a: 'Floats', b: 'Floats', total: 'Floats', PRECISION: tl.constexpr) -> 'Floats':
    """``total + a b`` on tensor cores, summed in float32."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def add_outside(
    total: 'Floats',
    sums: 'Strided',
    tile: 'Ints',
    tiles: 'Ints',
    batch: 'Ints',
    numbers: 'Ints',
    weight: 'Floats',
) -> 'Floats':
    real = (tile >= 0) & (tile < tiles)
    sum_of_tile = load_entry(sums, batch, tile, numbers, real)  # [NUMBERS]
    return total + weight * sum_of_tile[None, :]


@triton.jit
def compute_weights(
    inputs: 'MatmulInputs',
    batch: 'Ints',
    row: 'Ints',
    other: 'Ints',
    shift: 'Floats',
    FORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> 'tuple[Floats, Floats]':
    """Return W [tile, STEP], and the shift of each row, which rises to its largest w.

    With TRANSPOSED, rows are sources, and the shifts of targets are those of the forward pass.
    """
    rows, others = tl.arange(0, FORM.tile)[:, None], tl.arange(0, FORM.step)[None, :]
    if TRANSPOSED:
        w, visible, _ = load_bias(
            inputs.bias, inputs.extents, batch, other, row, others, rows, FORM
        )  # [tile, STEP]
        targets = other + others
        w -= load_entry(inputs.shifts, batch, 0, targets, targets < inputs.extents.targets)
    else:
        w, visible, _ = load_bias(
            inputs.bias, inputs.extents, batch, row, other, rows, others, FORM
        )  # [tile, STEP]
        shift = tl.maximum(shift, tl.max(tl.where(visible, w, LOWEST), 1))
        w -= shift[:, None]
    return tl.where(visible, tl.exp(w), 0.0), shift


@triton.jit
def weighted_sums(
    operand: 'MatmulOperand',
    inputs: 'MatmulInputs',
    extents: 'Extents',
    tile: 'Ints',
    batch: 'Ints',
    part: 'Ints',
    outside: 'Floats',
    FORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> 'tuple[Floats, Floats]':
    """Return W times the terms of all tokens for one tile of rows, [tile, 2 · width].

    outside: the weight of the tokens outside the window. The second result are the shifts of the
    rows, if W is computed here.
    """
    TILE: tl.constexpr = FORM.tile
    STEP: tl.constexpr = FORM.step
    PRECISION: tl.constexpr = FORM.precision
    NUMBERS: tl.constexpr = 2 * FORM.width
    numbers = part * NUMBERS + tl.arange(0, NUMBERS)
    total = tl.zeros([TILE, NUMBERS], tl.float32)
    shift = tl.zeros([TILE], tl.float32) + LOWEST
    size = extents.targets if TRANSPOSED else extents.sources
    tiles = tl.cdiv(size, TILE)
    lowest = tl.maximum(tile - extents.before, 0)
    highest = tl.minimum(tile + 1 + extents.after, tiles)
    if operand.past is not None:
        total = add_outside(total, operand.past, lowest - 1, tiles, batch, numbers, outside)
    if operand.future is not None:
        total = add_outside(total, operand.future, highest, tiles, batch, numbers, outside)
    origin = 0
    if FORM.near != 'dense':
        origin = (tile - extents.before) * TILE
    first = lowest * TILE
    last = tl.minimum(highest * TILE, tl.cdiv(size, STEP) * STEP)
    if operand.weights is not None:
        weights = operand.weights[0] + batch * operand.weights[2]
        weights += tile.to(tl.int64) * operand.weights[3] - origin
        weights += tl.arange(0, TILE)[:, None] * operand.weights[1]
    for done in span(first, last, STEP):
        start = done
        if FORM.causal:
            start = first + last - STEP - done if TRANSPOSED else done
            border = start + STEP if TRANSPOSED else start
            if border % TILE == 0:  # all tokens of a tile have the same unit
                before = start + STEP if TRANSPOSED else start - STEP
                neighbour = tl.minimum(tl.maximum(before, 0) // TILE, tiles - 1)
                # [NUMBERS]
                there = load_unit(operand.units, batch, neighbour, numbers, extents.channels)
                # [NUMBERS]
                here = load_unit(operand.units, batch, start // TILE, numbers, extents.channels)
                total *= tl.exp(here - there if TRANSPOSED else there - here)[None, :]
        start = tl.multiple_of(start, STEP)
        if FORM.own:
            previous = shift
            w, shift = compute_weights(inputs, batch, tile * TILE, start, shift, FORM, TRANSPOSED)
            w = w.to(operand.terms[0].dtype.element_ty)
            if not TRANSPOSED:
                total *= tl.exp(previous - shift)[:, None]
        else:
            w = tl.load(weights + start + tl.arange(0, STEP)[None, :])  # [TILE, STEP]
        # [STEP, NUMBERS]
        x = tl.load(terms_at(operand.terms, batch, start, part * NUMBERS, STEP, NUMBERS))
        total = multiply(w, x, total, PRECISION)
    return total, shift


@triton.jit
def split_pair(total: 'Floats') -> 'tuple[Floats, Floats]':
    """Split [tile, 2 · width] into the two terms of each channel."""
    return tl.split(tl.reshape(total, [total.shape[0], total.shape[1] // 2, 2]))


@triton.jit
def product_forward_kernel(
    saved: 'MatmulSaved',
    inputs: 'MatmulInputs',
    operand: 'MatmulOperand',
    firsts: 'Pointers',
    FORM: tl.constexpr,
    GATE: tl.constexpr,
) -> None:
    """Compute the output, what is saved for the gradient, and the flag of each tile."""
    extents = inputs.extents
    tile, batch, part, rows, columns = locate_program(extents, FORM.tile, FORM.width, FORM.shared)
    inside = columns < extents.channels
    real = (rows < extents.targets)[:, None] & inside[None, :]
    outside = 1.0
    if not FORM.own:
        shift = load_entry(inputs.shifts, batch, 0, rows, rows < extents.targets)  # [TILE]
        outside = tl.exp(-shift)[:, None]
    total, highest = weighted_sums(
        operand, inputs, extents, tile, batch, part, outside, FORM, False
    )
    if FORM.own:
        shift = highest
        store_entry(inputs.shifts, batch, 0, rows, (rows < extents.targets) & (part == 0), shift)
    numerator, denominator = split_pair(total)
    first = tl.load(firsts + batch * extents.channels + columns, mask=inside, other=0)  # [WIDTH]
    first = first[None, :]
    sees = real & (shift != LOWEST)[:, None]
    if FORM.causal:
        sees &= rows[:, None] >= first
    else:
        sees &= first < extents.sources
    centre = load_entry(inputs.centre, batch, 0, columns, inside)[None, :]  # [1, WIDTH]
    mean = numerator / tl.maximum(denominator, TINY) + tl.where(denominator > 0, centre, 0.0)
    exact = (denominator >= SMALLEST) & (tl.abs(mean) < float('inf'))
    flag = tl.max(tl.max((sees & ~exact).to(tl.int32), 1), 0)
    store_entry(saved.flags, batch, tile, part, True, flag)
    log = tl.where(denominator > 0, tl.log(tl.maximum(denominator, TINY)), UNSEEN)
    store_rows(saved, inputs.query, mean, log, batch, rows, columns, real, GATE)


@triton.jit
def store_rows(
    saved: 'MatmulSaved',
    query: 'Strided | None',
    mean: 'Floats',
    log: 'Floats',
    batch: 'Ints',
    rows: 'Ints',
    columns: 'Ints',
    real: 'Bools',
    GATE: tl.constexpr,
) -> None:
    store_tile(saved.mean, batch, rows, columns, real, mean)
    store_tile(saved.log, batch, rows, columns, real, log)
    if GATE != 'none':
        mean *= gate_value(load_tile(query, batch, rows, columns, real), GATE)  # [rows, columns]
    store_tile(saved.output, batch, rows, columns, real, mean)


@triton.jit
def product_backward_kernel(
    grad_key: 'Strided',
    grad_value: 'Strided',
    terms: 'Strided | None',
    inputs: 'MatmulInputs',
    operand: 'MatmulOperand',
    met: 'Extents',
    FORM: tl.constexpr,
) -> None:
    """Compute the gradients of key and value without the part of flagged tiles.

    Rows are sources; `met`: the extents of transposed tiles. Unless `terms` is None, (E (v − m), E)
    is stored into it for :func:`product_bias_backward_kernel`.
    """
    extents = inputs.extents
    tile, batch, part, rows, columns = locate_program(extents, FORM.tile, FORM.width, FORM.shared)
    real = (rows < extents.sources)[:, None] & (columns < extents.channels)[None, :]
    total, _ = weighted_sums(operand, inputs, met, tile, batch, part, 1.0, FORM, True)
    grad_term, grad_weight = split_pair(total)
    weight, values = load_source(inputs, operand.units, batch, tile, rows, columns)  # [TILE, WIDTH]
    store_tile(grad_key, batch, rows, columns, real, weight * (values * grad_term + grad_weight))
    store_tile(grad_value, batch, rows, columns, real, weight * grad_term)
    if terms is not None:
        pair = tl.interleave(weight * values, weight)
        store_terms(terms, None, pair, weight, tile, batch, part, 2 * FORM.width)


@triton.jit
def tiles_of_gradient(
    extents: 'Extents', index: 'Ints', FORM: tl.constexpr
) -> 'tuple[Ints, Ints, Ints, Ints]':
    """Return the first and last item of a tile of the gradient of w, and :func:`item_at`'s keys.

    The items of a tile of targets and sources are the sequences, none if the sources are hidden, or
    only the own one. If shared, a tile belongs to a sequence and a distance of tiles, and its items
    are the tiles of targets.
    """
    tiles = tl.cdiv(extents.targets, FORM.tile)
    if FORM.shared:
        reach = extents.before + 1 + extents.after
        owner, other = index // reach, index % reach - extents.before
        first, last = tl.maximum(-other, 0), tl.minimum(tiles - other, tiles)
    elif FORM.own:
        each = tiles * tl.cdiv(extents.sources, FORM.tile)
        first, owner, other = index // each, index % tiles, index % each // tiles
        last = first + 1
        if FORM.causal:
            last = tl.where(other <= owner, last, first)
    else:
        owner, other = index % tiles, index // tiles
        if FORM.near != 'dense':
            other += owner - extents.before
        exists = (other >= 0) & (other * FORM.tile < extents.sources)
        if FORM.causal:
            exists &= other <= owner
        first, last = 0, tl.where(exists, extents.batches, 0)
    return first, last, owner, other


@triton.jit
def item_at(
    owner: 'Ints', other: 'Ints', item: 'Ints', FORM: tl.constexpr
) -> 'tuple[Ints, Ints, Ints]':
    if FORM.shared:
        batch, tile, met = owner, item, item + other
    else:
        batch, tile, met = item, owner, other
    return tl.cast(batch, tl.int64), tile, met


@triton.jit
def product_bias_backward_kernel(
    grad_bias: 'BiasTable',
    part_stride: 'Ints',
    inputs: 'MatmulInputs',
    whole: 'Extents',
    terms: 'tuple[Strided, Strided]',
    units: 'Strided',
    share: 'tuple[Ints, Ints]',
    FORM: tl.constexpr,
    SIDE: tl.constexpr,
) -> None:
    """Compute the gradient of w [tile, SIDE], summed over ``share = (steps, all steps)``.

    A step is a block of numbers of one item; part_stride is the stride between the shares of a
    tile. `terms` are those of targets and of sources; `whole` are extents in which all that a tile
    meets exists.
    """
    TILE: tl.constexpr = FORM.tile
    STEP: tl.constexpr = FORM.step
    PRECISION: tl.constexpr = FORM.precision
    extents = inputs.extents
    pairs = tl.num_programs(0) // tl.cdiv(share[1], share[0])
    part = tl.program_id(0) // pairs
    index = tl.program_id(0) % pairs
    side = index % (TILE // SIDE) * SIDE
    first, last, owner, other = tiles_of_gradient(extents, index // (TILE // SIDE), FORM)
    blocks = tl.cdiv(2 * extents.channels, STEP)
    batch = first
    first = tl.maximum(part * share[0], first * blocks)
    last = tl.minimum(tl.minimum(part * share[0] + share[0], share[1]), last * blocks)
    total = tl.zeros([TILE, SIDE], tl.float32)
    for step in span(first, last):
        sequence, tile, met = item_at(owner, other, step // blocks, FORM)
        number = step % blocks * STEP
        # [TILE, STEP]
        target_block = tl.load(terms_at(terms[0], sequence, tile * TILE, number, TILE, STEP))
        # [SIDE, STEP]
        source_block = tl.load(terms_at(terms[1], sequence, met * TILE + side, number, SIDE, STEP))
        if FORM.causal:
            numbers = number + tl.arange(0, STEP)
            there = load_unit(units, sequence, met, numbers, extents.channels)  # [STEP]
            here = load_unit(units, sequence, tile, numbers, extents.channels)  # [STEP]
            target_block *= tl.exp(there - here)[None, :]
        total = multiply(target_block, tl.trans(source_block), total, PRECISION)
    row, column = owner * TILE, other * TILE + side
    if not (FORM.shared or FORM.own):
        batch = 0
    if FORM.shared:
        batch, row, column = owner, extents.before * TILE, (extents.before + other) * TILE + side
    rows, columns = tl.arange(0, TILE), tl.arange(0, SIDE)
    targets, sources = rows[:, None], columns[None, :]
    # [TILE, SIDE]
    w, _, near = load_bias(inputs.bias, whole, batch, row, column, targets, sources, FORM)
    shift = load_entry(inputs.shifts, batch, 0, row + rows, row + rows < whole.targets)  # [TILE]
    w -= shift[:, None]
    at = bias_pointer(grad_bias, batch, row, column, targets, sources, FORM)
    at += part.to(tl.int64) * part_stride
    tl.store(at, tl.where(near, tl.exp(w), 0.0) * total, mask=near)
