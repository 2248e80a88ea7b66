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

from .bias import bias_pointer, load_bias, load_row, span, terms_at, tokens_at
from .rows import LOWEST, gate_value
from .support import interpreted
from .terms import UNSEEN, load_source, load_unit, place

INTERPRETED = tl.constexpr(interpreted())
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# e^−40, below which a denominator may have lost what counts.
SMALLEST = tl.constexpr(4.248354255291589e-18)


class Operand(NamedTuple):
    """(W in tiles [n, tile, width], width), terms, units, sums of the tiles before and after."""

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
    channels,
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
    rows = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
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
    weights = operand.weights[0] + rows[:, None] * operand.weights[1] - origin
    for done in span(first, last, STEP):
        start = done
        if FORM.causal:
            start = first + last - STEP - done if TRANSPOSED else done
            before = start + STEP if TRANSPOSED else start - STEP
            neighbour = tl.minimum(tl.maximum(before, 0) // TILE, tiles - 1)
            there = load_unit(operand.units, batch, neighbour, numbers, channels)
            here = load_unit(operand.units, batch, start // TILE, numbers, channels)
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
    query,
    operand,
    shifts,
    firsts,
    where,
    channels,
    batches,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The output, what is kept for the gradient, and whether a tile must be done once more."""
    tile, batch, part, rows, columns = place(batches, channels, FORM.tile, BLOCKS.width)
    inside = columns < channels
    real = (rows < where.targets)[:, None] & inside[None, :]
    shift = tl.load(shifts + rows, mask=rows < where.targets, other=0.0)
    far_weight = tl.exp(-shift)[:, None]
    total = weighted_sums(
        operand, where, tile, batch, part, channels, far_weight, FORM, False, BLOCKS
    )
    numerator, denominator = halves(total)
    first = tl.load(firsts + batch * channels + columns, mask=inside, other=0)[None, :]
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
    store_output(result, query, mean, batch, rows, columns, real, GATE)


@triton.jit
def store_output(result, query, mean, batch, rows, columns, real, GATE: tl.constexpr):
    """g(q) times the mean."""
    if GATE != 'none':
        queries = tl.load(tokens_at(query, batch, rows, columns), mask=real, other=0.0)
        mean *= gate_value(queries, GATE)
    at = tokens_at(result.output, batch, rows, columns)
    tl.store(at, mean.to(result.output.at.dtype.element_ty), mask=real)


@triton.jit
def backward(
    by_key,
    by_value,
    source,
    operand,
    where,
    channels,
    batches,
    FORM: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The gradients of key and value, but for what flagged tiles add; rows are sources."""
    tile, batch, part, rows, columns = place(batches, channels, FORM.tile, BLOCKS.width)
    real = (rows < where.sources)[:, None] & (columns < channels)[None, :]
    total = weighted_sums(operand, where, tile, batch, part, channels, 1.0, FORM, True, BLOCKS)
    by_term, by_weight = halves(total)
    weight, values = load_source(
        source, operand.units, batch, tile, rows, columns, where.sources, channels
    )
    grad = weight * (values * by_term + by_weight)
    at = tokens_at(by_key, batch, rows, columns)
    tl.store(at, grad.to(by_key.at.dtype.element_ty), mask=real)
    at = tokens_at(by_value, batch, rows, columns)
    tl.store(at, (weight * by_term).to(by_value.at.dtype.element_ty), mask=real)


@triton.jit
def pair_of_tiles(where, index, FORM: tl.constexpr):
    """A tile of targets and one that it meets, and whether that holds sources that it sees.

    In a dense W they are counted from its first tile on, else from the first in the window.
    """
    tiles = tl.cdiv(where.targets, FORM.tile)
    tile = index % tiles
    other = index // tiles
    if FORM.near != 'dense':
        other += tile - where.before
    exists = (other >= 0) & (other * FORM.tile < where.sources)
    if FORM.causal:
        exists &= other <= tile
    return tile, other, exists


@triton.jit
def bias_gradient(
    by_bias,
    by_part,
    bias,
    target_terms,
    source_terms,
    units,
    shifts,
    where,
    share,
    FORM: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The gradient of w [tile, SIDE], summed over ``share = (steps, all steps, channels)``.

    A step is a block of numbers of one sequence; by_part is the stride between shares of a tile.
    """
    TILE: tl.constexpr = FORM.tile
    STEP: tl.constexpr = BLOCKS.step
    PRECISION: tl.constexpr = BLOCKS.precision
    pairs = tl.num_programs(0) // tl.cdiv(share[1], share[0])
    part = tl.program_id(0) // pairs
    index = tl.program_id(0) % pairs
    tile, other, exists = pair_of_tiles(where, index // (TILE // SIDE), FORM)
    row, column = tile * TILE, other * TILE + index % (TILE // SIDE) * SIDE
    blocks = tl.cdiv(2 * share[2], STEP)
    first = part * share[0]
    last = tl.where(exists, tl.minimum(first + share[0], share[1]), first)
    total = tl.zeros([TILE, SIDE], tl.float32)
    for step in span(first, last):
        batch = (step // blocks).to(tl.int64)
        number = step % blocks * STEP
        by_target = tl.load(terms_at(target_terms, batch, row, number, TILE, STEP))
        by_source = tl.load(terms_at(source_terms, batch, column, number, SIDE, STEP))
        if FORM.causal:
            numbers = number + tl.arange(0, STEP)
            own = load_unit(units, batch, other, numbers, share[2])
            by_target *= tl.exp(own - load_unit(units, batch, tile, numbers, share[2]))[None, :]
        total = multiply(by_target, tl.trans(by_source), total, PRECISION)
    rows, columns = tl.arange(0, TILE), tl.arange(0, SIDE)
    targets, sources = rows[:, None], columns[None, :]
    w, _, near = load_bias(bias, where, row, column, targets, sources, FORM)
    w -= tl.load(shifts + row + rows, mask=row + rows < where.targets, other=0.0)[:, None]
    at = bias_pointer(by_bias, row, column, targets, sources, FORM) + part.to(tl.int64) * by_part
    tl.store(at, tl.where(near, tl.exp(w), 0.0) * total, mask=near)
