"""The weighted product of AFT-full and AFT-local, ``y_t = g(q_t) n_t / d_t``, and its gradients.

A program multiplies the W of a tile of targets, step by step, with the terms of the sources and a
block of channels (`terms.py`): (n, d) = W (E v, E), one product per step. Where units differ, from
tile to tile of a causal op, the sums are rescaled on the way as in flash attention, here a channel
at a time: with the unit they go up, and down again in the products with Wᵀ, which walk backwards.

Exactness is seen afterwards. All of W and E is at most 1, so that what float32 cannot hold of them
is below e^−87 for each token; where d ≥ e^−40, that is nothing. Where it is not, and the row sees a
key, or where n/d is not finite, the program writes a flag, and `fix_up.py` does the tile once more,
term by term.

What is kept for the gradient: the mean o = n/d and ``λ = log d``, over a unit and the shift of w.
With α = dy g(q) and the gradient β of λ,

    a = α e^−λ    c = (β − α o) e^−λ    (A, C) = Wᵀ (a, c)
    dv = E A      dk = E (v A + C)      dw = W ⊙ Σ (a, c) (E v, E)ᵀ

where Σ runs over sequences and channels. Nothing is added atomically: results do not vary.

Operands are bfloat16 for bfloat16 values without a gradient. Gradients are differences, v − o for
the keys: with both rounded to 8 bits they miss the tolerance of the tests where v has a mean of 10,
so that training takes float32 operands, of which tf32 keeps 10 bits at the cost of two products of
bfloat16; taken in two parts they would cost three. float32 and float16 values take three products
of tf32.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .bias import bias_pointer, load_bias, load_row, load_shifts, span, terms_at, tokens_at
from .rows import LOWEST, gate_value
from .support import interpreted
from .terms import UNSEEN, load_source, load_unit, place

INTERPRETED = tl.constexpr(interpreted())
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# e^−40, below which a denominator may have lost what counts.
SMALLEST = tl.constexpr(4.248354255291589e-18)


class Operand(NamedTuple):
    """W in tiles, terms, units, sums of the tiles before and after.

    weights: (W [n, tile, width], width, from sequence to sequence, from tile to tile).
    """

    weights: Any
    terms: Any
    units: Any
    past: Any
    future: Any


class Result(NamedTuple):
    """Output [B, T, D]; flags [B, tiles, blocks]; mean, λ and its unit [B, T, D] if kept."""

    output: Any
    flags: Any
    mean: Any
    log: Any
    unit: Any


class Saved(NamedTuple):
    """What is kept, and the gradients of output and λ."""

    flags: Any
    mean: Any
    log: Any
    unit: Any
    gradient: Any
    by_log: Any


class Blocks(NamedTuple):
    """How a product is cut: channels of a program, tokens of a step, and how it is multiplied."""

    width: int
    step: int
    precision: str
    stages: int


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """``total + a b`` on tensor cores, summed in float32."""
    if INTERPRETED:  # which multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def add_far(total, sums, tile, tiles, batch, numbers, weight):
    """The sums with those of `tile`, if there is such a tile."""
    real = (tile >= 0) & (tile < tiles)
    return total + weight * load_row(sums, batch, tile, numbers, real, 0.0)[None, :]


@triton.jit
def weighted_sums(
    operand,
    where,
    tile,
    batch,
    part,
    far_weight,
    FORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """W times the terms of all tokens, for one tile of rows: [tile, 2 · width]."""
    TILE: tl.constexpr = FORM.tile
    STEP: tl.constexpr = BLOCKS.step
    PRECISION: tl.constexpr = BLOCKS.precision
    NUMBERS: tl.constexpr = 2 * BLOCKS.width
    numbers = part * NUMBERS + tl.arange(0, NUMBERS)
    total = tl.zeros([TILE, NUMBERS], tl.float32)
    size = where.targets if TRANSPOSED else where.sources
    tiles = tl.cdiv(size, TILE)
    lowest = tl.maximum(tile - where.before, 0)
    highest = tl.minimum(tile + 1 + where.after, tiles)
    if operand.past is not None:
        total = add_far(total, operand.past, lowest - 1, tiles, batch, numbers, far_weight)
    if operand.future is not None:
        total = add_far(total, operand.future, highest, tiles, batch, numbers, far_weight)
    origin = 0
    if FORM.near != 'dense':
        origin = (tile - where.before) * TILE
    first = lowest * TILE
    last = tl.minimum(highest * TILE, tl.cdiv(size, STEP) * STEP)
    weights = operand.weights[0] + batch * operand.weights[2]
    weights += tile.to(tl.int64) * operand.weights[3] - origin
    weights += tl.arange(0, TILE)[:, None] * operand.weights[1]
    for done in span(first, last, STEP):
        start = done
        if FORM.causal:
            start = first + last - STEP - done if TRANSPOSED else done
            before = start + STEP if TRANSPOSED else start - STEP
            neighbour = tl.minimum(tl.maximum(before, 0) // TILE, tiles - 1)
            there = load_unit(operand.units, batch, neighbour, numbers, where.channels)
            here = load_unit(operand.units, batch, start // TILE, numbers, where.channels)
            total *= tl.exp(here - there if TRANSPOSED else there - here)[None, :]
        start = tl.multiple_of(start, STEP)
        w = tl.load(weights + start + tl.arange(0, STEP)[None, :])
        x = tl.load(terms_at(operand.terms, batch, start, part * NUMBERS, STEP, NUMBERS))
        total = multiply(w, x, total, PRECISION)
    return total


@triton.jit
def halves(total):
    """The sums of both terms of each channel."""
    ROWS: tl.constexpr = total.shape[0]
    WIDTH: tl.constexpr = total.shape[1] // 2
    return tl.split(tl.reshape(total, [ROWS, WIDTH, 2]))


@triton.jit
def forward(
    result,
    inputs,
    operand,
    firsts,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The output, what is kept for the gradient, and whether a tile must be done once more."""
    where = inputs.where
    tile, batch, part, rows, columns = place(where, FORM.tile, BLOCKS.width, FORM.shared)
    inside = columns < where.channels
    real = (rows < where.targets)[:, None] & inside[None, :]
    shift = load_shifts(inputs.shifts, batch, rows, rows < where.targets)
    far_weight = tl.exp(-shift)[:, None]
    total = weighted_sums(operand, where, tile, batch, part, far_weight, FORM, False, BLOCKS)
    numerator, denominator = halves(total)
    first = tl.load(firsts + batch * where.channels + columns, mask=inside, other=0)[None, :]
    sees = real & (shift != LOWEST)[:, None]
    if FORM.causal:
        sees &= rows[:, None] >= first
    else:
        sees &= first < where.sources
    mean = numerator / tl.maximum(denominator, TINY)
    exact = (denominator >= SMALLEST) & (tl.abs(mean) < float('inf'))
    flag = tl.max(tl.max((sees & ~exact).to(tl.int32), 1), 0)
    at = result.flags.at + batch * result.flags.batch + tile * result.flags.token + part
    tl.store(at, flag.to(result.flags.at.dtype.element_ty))
    if result.mean is not None:
        log = tl.where(denominator > 0, tl.log(tl.maximum(denominator, TINY)), UNSEEN)
        unit = load_row(operand.units, batch, tile, columns, inside, 0.0)[None, :]
        tl.store(tokens_at(result.mean, batch, rows, columns), mean, mask=real)
        tl.store(tokens_at(result.log, batch, rows, columns), log, mask=real)
        tl.store(tokens_at(result.unit, batch, rows, columns), unit + 0.0 * mean, mask=real)
    store_output(result, inputs.query, mean, batch, rows, columns, real, GATE)


@triton.jit
def store_output(result, query, mean, batch, rows, columns, real, GATE: tl.constexpr):
    """g(q) times the mean."""
    if GATE != 'none':
        queries = tl.load(tokens_at(query, batch, rows, columns), mask=real, other=0.0)
        mean *= gate_value(queries, GATE)
    at = tokens_at(result.output, batch, rows, columns)
    tl.store(at, mean.to(result.output.at.dtype.element_ty), mask=real)


@triton.jit
def backward(by_key, by_value, inputs, operand, met, FORM: tl.constexpr, BLOCKS: tl.constexpr):
    """The gradients of key and value, but for what flagged tiles add.

    Rows are sources; `met` says how many tiles of targets before and after its own a tile meets.
    """
    where = inputs.where
    tile, batch, part, rows, columns = place(where, FORM.tile, BLOCKS.width, FORM.shared)
    real = (rows < where.sources)[:, None] & (columns < where.channels)[None, :]
    total = weighted_sums(operand, met, tile, batch, part, 1.0, FORM, True, BLOCKS)
    by_term, by_weight = halves(total)
    weight, values = load_source(inputs, operand.units, batch, tile, rows, columns)
    grad = weight * (values * by_term + by_weight)
    at = tokens_at(by_key, batch, rows, columns)
    tl.store(at, grad.to(by_key.at.dtype.element_ty), mask=real)
    at = tokens_at(by_value, batch, rows, columns)
    tl.store(at, (weight * by_term).to(by_value.at.dtype.element_ty), mask=real)


@triton.jit
def tiles_of_gradient(where, index, FORM: tl.constexpr):
    """What a tile of the gradient of w sums: (first, last) of its items, and :func:`item_at`.

    That of a tile of targets and one that it meets: all sequences, if it holds sources that it
    sees. In a dense W the tiles that it meets are counted from the first on, else from the first in
    the window. If shared that of a sequence and a distance of tiles: all tiles of targets.
    """
    tiles = tl.cdiv(where.targets, FORM.tile)
    if FORM.shared:
        reach = where.before + 1 + where.after
        own, other = index // reach, index % reach - where.before
        first, last = tl.maximum(-other, 0), tl.minimum(tiles - other, tiles)
    else:
        own, other = index % tiles, index // tiles
        if FORM.near != 'dense':
            other += own - where.before
        exists = (other >= 0) & (other * FORM.tile < where.sources)
        if FORM.causal:
            exists &= other <= own
        first, last = 0, tl.where(exists, where.batches, 0)
    return first, last, own, other


@triton.jit
def item_at(own, other, item, FORM: tl.constexpr):
    """Sequence, tile of targets and tile of sources of an item."""
    if FORM.shared:
        batch, tile, met = own, item, item + other
    else:
        batch, tile, met = item, own, other
    return tl.cast(batch, tl.int64), tile, met


@triton.jit
def bias_gradient(
    by_bias,
    by_part,
    inputs,
    whole,
    terms,
    units,
    share,
    FORM: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The gradient of w [tile, SIDE], summed over ``share = (steps, all steps)``.

    A step is a block of numbers of one item; by_part is the stride between shares of a tile.
    `terms` are those of targets and of sources; `whole` is where all that one tile meets exists.
    """
    TILE: tl.constexpr = FORM.tile
    STEP: tl.constexpr = BLOCKS.step
    PRECISION: tl.constexpr = BLOCKS.precision
    where = inputs.where
    pairs = tl.num_programs(0) // tl.cdiv(share[1], share[0])
    part = tl.program_id(0) // pairs
    index = tl.program_id(0) % pairs
    side = index % (TILE // SIDE) * SIDE
    first, last, own, other = tiles_of_gradient(where, index // (TILE // SIDE), FORM)
    blocks = tl.cdiv(2 * where.channels, STEP)
    first = tl.maximum(part * share[0], first * blocks)
    last = tl.minimum(tl.minimum(part * share[0] + share[0], share[1]), last * blocks)
    total = tl.zeros([TILE, SIDE], tl.float32)
    for step in span(first, last):
        batch, tile, met = item_at(own, other, step // blocks, FORM)
        number = step % blocks * STEP
        by_target = tl.load(terms_at(terms[0], batch, tile * TILE, number, TILE, STEP))
        by_source = tl.load(terms_at(terms[1], batch, met * TILE + side, number, SIDE, STEP))
        if FORM.causal:
            numbers = number + tl.arange(0, STEP)
            there = load_unit(units, batch, met, numbers, where.channels)
            by_target *= tl.exp(there - load_unit(units, batch, tile, numbers, where.channels))[
                None, :
            ]
        total = multiply(by_target, tl.trans(by_source), total, PRECISION)
    batch, row, column = 0, own * TILE, other * TILE + side
    if FORM.shared:
        batch, row, column = own, where.before * TILE, (where.before + other) * TILE + side
    rows, columns = tl.arange(0, TILE), tl.arange(0, SIDE)
    targets, sources = rows[:, None], columns[None, :]
    w, _, near = load_bias(inputs.bias, whole, batch, row, column, targets, sources, FORM)
    w -= load_shifts(inputs.shifts, batch, row + rows, row + rows < whole.targets)[:, None]
    at = bias_pointer(by_bias, batch, row, column, targets, sources, FORM)
    at += part.to(tl.int64) * by_part
    tl.store(at, tl.where(near, tl.exp(w), 0.0) * total, mask=near)
