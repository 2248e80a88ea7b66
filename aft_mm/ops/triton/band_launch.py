"""How the banded products of AFT-full and AFT-local 1-d are cut, and their launches."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..eager.banded_product import neighbours, split
from . import band_kernels as kernels
from .common import count_processors, in_parts, product_precision, strided, term_dtype

# Tokens along either side of a tile of W, and channels of a program. A number of W costs an
# exponential and serves 2 · 64 multiplications. The accumulators, 2 · 64 · 64, are 32 registers of
# a thread of eight warps; products of float32 hold operands in two parts and need smaller tiles.
BLOCK = 64
FLOAT32_BLOCK = 32
WIDTH = 64
WARPS = 8
FLOAT32_WARPS = 4
# Numbers of a row of terms are a multiple of this: what a program loads at once needs 16 bytes.
ALIGNED = 16
# Tiles on the way while one is multiplied: with more, the least of the devices served lacks the
# shared memory, 99 KiB.
STAGES = 2
# Of the gradient of w, which is one tile of w each: with fewer, the channels are shared out.
PROGRAMS_PER_PROCESSOR = 2


class Band(NamedTuple):
    """Where w is: a table [T, S] or [T, offsets], or the product of two factors, and its window.

    block: tokens along either side of a tile.
    """

    bias: Tensor
    other: Tensor | None
    window: int | None
    causal: bool
    tokens: int
    sources: int
    block: int

    @property
    def radius(self) -> int:
        """The largest distance that has a w; −1 if none has."""
        return max(self.tokens, self.sources) if self.window is None else self.window - 1

    @property
    def before(self) -> int:
        """Tiles before the own one that the window meets."""
        largest = max(self.tokens, self.sources)
        return triton.cdiv(min(max(self.radius, 0), largest), self.block)

    @property
    def after(self) -> int:
        """Tiles after the own one that the window meets."""
        return 0 if self.causal else self.before

    @property
    def reach(self) -> int:
        """Tiles of columns that a tile of rows can meet."""
        if self.window is None:
            return triton.cdiv(self.sources, self.block)
        return self.before + 1 + self.after

    @property
    def tiles(self) -> int:
        """Tiles of rows."""
        return triton.cdiv(self.tokens, self.block)

    @property
    def far(self) -> bool:
        """Whether some tile lies beyond the window of another."""
        return self.window is not None and self.before + 1 < self.tiles

    def places(self, row: int, column: int) -> tuple[int, int, int]:
        """Strides of target and source, and the origin, of a table with these strides."""
        if self.window is None:
            return row, column, 0
        # w[t, t'] of a window stands in column radius + t' − t.
        return row - column, column, self.radius * column

    def sides(self) -> tuple[tuple, tuple | None]:
        """`bias` and `other` as the kernels take them."""
        if self.other is None:
            return (self.bias, *self.places(*self.bias.stride())), None
        return strided(self.bias), strided(self.other)

    def transposed_sides(self) -> tuple[tuple, tuple | None]:
        """The same of Wᵀ."""
        bias, other = self.sides()
        return ((bias[0], bias[2], bias[1], bias[3]), None) if other is None else (other, bias)

    def settings(self) -> dict:
        """Sizes and options of every kernel that forms tiles of w."""
        return dict(
            tokens=self.tokens,
            sources=self.sources,
            radius=self.radius,
            RANK=0 if self.other is None else self.bias.shape[1],
            CAUSAL=self.causal,
            BLOCK=self.block,
            num_stages=STAGES,
        )


def make_band(
    bias: Tensor, other: Tensor | None, window: int | None, causal: bool, source: Tensor
) -> Band:
    """The band over the tokens of `source`, key or value, in tiles for products of that type."""
    if other is not None and bias.dtype != other.dtype:
        bias, other = bias.float(), other.float()
    multiplied = source.dtype, torch.bfloat16 if other is None else other.dtype
    block = FLOAT32_BLOCK if any(map(in_parts, multiplied)) else BLOCK
    return Band(bias, other, window, causal, len(bias), source.shape[1], block)


def _programs(tokens: int, value: Tensor, block: int) -> tuple[int]:
    """The grid of programs that own a tile of tokens and WIDTH channels of one sequence."""
    batch, _, channels = value.shape
    return (triton.cdiv(tokens, block) * batch * triton.cdiv(channels, WIDTH),)


def _sizes(value: Tensor) -> dict:
    channels = value.shape[2]
    room = triton.cdiv(channels, ALIGNED) * ALIGNED
    return dict(channels=channels, room=room, batches=len(value), WIDTH=WIDTH)


def _product_settings(value: Tensor) -> dict:
    """The options of the kernels that multiply by W."""
    warps = FLOAT32_WARPS if in_parts(value.dtype) else WARPS
    return dict(PRECISION=product_precision(value.dtype), num_warps=warps, **_sizes(value))


def ranges(key: Tensor, key_mask: Tensor | None, band: Band) -> tuple[Tensor, Tensor]:
    """Largest and smallest visible key of each channel [2, B, D], and w of each row [2, T]."""
    batch, sources, channels = key.shape
    tiles = triton.cdiv(sources, band.block)
    keys = key.new_empty(2, batch, tiles, channels, dtype=torch.float32)
    rows = key.new_empty(2, band.reach, band.tokens, dtype=torch.float32)
    with torch.cuda.device_of(key):
        if batch:
            kernels.key_ranges[_programs(sources, key, band.block)](
                *(strided(x) for x in (keys, key, key_mask)),
                tokens=sources,
                channels=channels,
                batches=batch,
                BLOCK=band.block,
                WIDTH=WIDTH,
            )
        kernels.bias_ranges[(band.tiles * band.reach,)](
            strided(rows),
            *band.sides(),
            before=band.before,
            reach=band.reach,
            DENSE=band.window is None,
            num_warps=8,
            **band.settings(),
        )
    return _outermost(keys, 1), _outermost(rows, 0)


def _outermost(parts: Tensor, dim: int) -> Tensor:
    """The largest of the largest and the smallest of the smallest."""
    return torch.stack((parts[0].amax(dim), parts[1].amin(dim)))


def _make_terms(
    tokens: int, value: Tensor, block: int, summed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Memory for two terms per token [2, B, T, room] and their sums by tile [2, B, tiles, D]."""
    batch, _, channels = value.shape
    terms = value.new_empty(2, batch, tokens, _sizes(value)['room'], dtype=dtype)
    if not summed:
        return terms, None
    tiles = triton.cdiv(tokens, block)
    return terms, value.new_empty(2, batch, tiles, channels, dtype=torch.float32)


def _key_terms(
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    shift: Tensor,
    block: int,
    summed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    tokens = key.shape[1]
    terms, sums = _make_terms(tokens, value, block, summed, dtype)
    kernels.key_terms[_programs(tokens, value, block)](
        *(strided(x) for x in (terms, sums, key, value, key_mask, shift)),
        tokens=tokens,
        BLOCK=block,
        **_sizes(value),
    )
    return terms, sums


def _running(sums: Tensor | None, past: bool, future: bool) -> list[tuple | None]:
    """Sums over all tiles up to each one, and over all from each one on, where they are wanted."""
    if sums is None:
        return [None, None]
    return [
        strided(sums.cumsum(2)) if past else None,
        strided(sums.flip(2).cumsum(2).flip(2)) if future else None,
    ]


def banded_forward(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    shift: Tensor,
    row_shift: Tensor | None,
    band: Band,
    gate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, D] and, to `save` for the gradient, mean and denominator [2, B, T, D]."""
    batch, _, channels = value.shape
    output = value.new_empty(batch, band.tokens, channels)
    saved = value.new_empty(2, batch if save else 0, band.tokens, channels, dtype=torch.float32)
    if batch == 0:
        return output, saved
    dtype = term_dtype(value.dtype, save)
    with torch.cuda.device_of(value):
        terms, sums = _key_terms(key, value, key_mask, shift, band.block, band.far, dtype)
        kernels.forward[_programs(band.tokens, value, band.block)](
            *(strided(x) for x in (output, saved if save else None, query, terms)),
            *_running(sums, past=True, future=not band.causal),
            *band.sides(),
            row_shift,
            before=band.before,
            after=band.after,
            GATE=gate,
            **_product_settings(value),
            **band.settings(),
        )
    return output, saved


def banded_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    shift: Tensor,
    row_shift: Tensor | None,
    band: Band,
    gate: str,
    biased: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value and, if `biased`, of the table or of both factors."""
    results = [
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (query, key, value)
    ]
    if not len(value):
        return *results, *(None if x is None else torch.zeros_like(x) for x in band[:2])
    inputs = key, value, key_mask, shift
    settings = dict(summed=band.far, dtype=torch.float32)
    with torch.cuda.device_of(value):
        terms, sums = _make_terms(band.tokens, value, band.block, **settings)
        kernels.mean_terms[_programs(band.tokens, value, band.block)](
            *(strided(x) for x in (results[0], terms, sums, saved, gradient, query)),
            tokens=band.tokens,
            GATE=gate,
            BLOCK=band.block,
            **_sizes(value),
        )
        kernels.backward[_programs(band.sources, value, band.block)](
            *(strided(x) for x in (*results[1:], *inputs, terms)),
            *_running(sums, past=not band.causal, future=True),
            *band.transposed_sides(),
            row_shift,
            before=band.after,
            after=band.before,
            **_product_settings(value),
            **band.settings(),
        )
        if not biased:
            return *results, None, None
        source_terms, _ = _key_terms(*inputs, band.block, summed=False, dtype=torch.float32)
        tiles = _bias_gradient(source_terms, terms, row_shift, value, band)
    if band.other is None:
        return *results, tiles, None
    return *results, *_factor_gradients(tiles, band)


def _share_out(value: Tensor, pairs: int, width: int) -> tuple[int, int]:
    """Programs per tile of w, and steps of `width` channels of each."""
    steps = len(value) * triton.cdiv(value.shape[2], width)
    wanted = PROGRAMS_PER_PROCESSOR * count_processors(value.device)
    steps_each = triton.cdiv(steps, triton.cdiv(wanted, pairs))
    return triton.cdiv(steps, steps_each), steps_each


def _bias_gradient(
    source_terms: Tensor, target_terms: Tensor, row_shift: Tensor | None, value: Tensor, band: Band
) -> Tensor:
    """The gradient of w in the shape of the table; for factors [tiles, block, reach · block]."""
    if band.other is None:
        shape = band.bias.shape
        places = 0, *band.places(shape[1], 1)
    else:  # tiles of rows against all columns that they meet
        shape = band.tiles, band.block, band.reach * band.block
        places = -band.block, shape[2], 1, band.before * band.block
    pairs = band.tiles * band.reach
    parts, steps = _share_out(value, pairs, band.block)
    # Zeros: what a table or a tile holds beyond the sequence, no program writes.
    gradient = value.new_zeros(parts, *shape, dtype=torch.float32)
    kernels.bias_gradient[(pairs * parts,)](
        (gradient, gradient.stride(0), *places),
        *(strided(x) for x in (source_terms, target_terms)),
        *band.sides(),
        row_shift,
        before=band.before,
        reach=band.reach,
        steps=steps,
        PRECISION=product_precision(value.dtype),
        **{**_sizes(value), 'WIDTH': band.block},
        **band.settings(),
    )
    return gradient.sum(0)


def _factor_gradients(tiles: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """From the gradient of ``w = u vᵀ`` in tiles those of u and v, as plain products."""
    u, v = band.bias.float(), band.other.float()
    with torch.autocast(u.device.type, enabled=False):
        around = neighbours(v, band.block, band.before, band.after)
        by_u = torch.bmm(tiles, around).flatten(0, 1)[: band.tokens]
        parts = torch.bmm(tiles.transpose(1, 2), split(u, band.block))
    parts = parts.unflatten(1, (band.reach, band.block))
    by_v = parts.new_zeros(band.tiles + band.before + band.after, *parts.shape[2:])
    for slot in range(band.reach):
        by_v[slot : slot + band.tiles] += parts[:, slot]
    return by_u, by_v[band.before :].flatten(0, 1)[: band.tokens]
