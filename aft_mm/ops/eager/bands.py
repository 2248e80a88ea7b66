"""Products of a dense or banded ``exp(w)`` with the keys, in blocks, O(T·(D + s)) memory.

Tokens come as columns: key and value are [T, C] with C = B·D, so that a block product is one matrix
product for the whole batch. A :class:`Band` holds w in tiles: the rows of a block of c tokens
against the blocks around it; what no tile covers has W = 1 (`far`) or W = 0.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Window, near_mask, near_radius
from .banded_product import banded_mean, banded_product, neighbours, split, tile_weights
from .sums import (
    FAST_BIAS_SPREAD,
    FAST_SPREAD,
    Sums,
    choose,
    column_shift,
    leaf,
    mean,
    merge,
    move,
    prefix,
    reduce,
    spread,
    zero_if_finite,
)

# Smaller tiles are more launches than work; of tiles as large as the window half is outside of it,
# of these a fifth.
SMALLEST_BLOCK = 32
BLOCKS_PER_WINDOW = 4
# Below this length the diagonal is summed term by term instead of being halved again.
SMALLEST_HALF = 8


class Band(NamedTuple):
    """w [n, c, (before + 1 + after)·c] of each block against its neighbours, −inf where hidden.

    `parts` is the precision of its products (`products.py`); the safe forms take 0.
    """

    tiles: Tensor
    before: int
    after: int
    far: bool
    causal: bool
    parts: int = 0

    @property
    def block(self) -> int:
        """Tokens c per block; the columns of a lone tile may be of another length."""
        return self.tiles.shape[2] // (self.before + 1 + self.after)


def dense_band(bias: Tensor, causal: bool) -> Band:
    """The bias [T, S] as one tile."""
    if causal:
        bias = bias.masked_fill(_future(len(bias), bias.device), -torch.inf)
    return Band(bias[None], 0, 0, far=False, causal=causal)


def local_band(pos_u: Tensor, pos_v: Tensor | None, window: Window, grid, causal: bool) -> Band:
    """w inside the window and 0 elsewhere.

    ``w = u vᵀ``; without v, u is the bias itself, one column per visible offset.
    """
    tokens, radius = len(pos_u), near_radius(window, grid)
    block = max(-(-radius // BLOCKS_PER_WINDOW), SMALLEST_BLOCK)
    before = -(-max(radius, 0) // block)
    after = 0 if causal else before
    if tokens <= block * (before + 1 + after):
        block, before, after = tokens, 0, 0
    rows = split(pos_u, block)
    target = torch.arange(len(rows) * block, device=pos_u.device).view(-1, block, 1)
    if grid is None or len(grid) == 1:
        target = target[:1]  # the mask of a 1-d window is the same in every block
    reach = torch.arange(-before * block, (after + 1) * block, device=pos_u.device)
    source = target[:, :1] + reach
    if pos_v is None:
        tiles = _skew(rows, before * block - radius, len(reach))
    else:
        tiles = torch.bmm(rows, neighbours(pos_v, block, before, after).transpose(1, 2))
    # A product and a sum: torch fills under a mask several times slower.
    tiles = tiles * near_mask(target, source, window, grid)
    if causal:
        tiles = tiles + torch.where(source[:1] > target[:1], -torch.inf, 0.0)
    return Band(tiles, before, after, far=True, causal=causal)


def weighted_mean(key: Tensor, value: Tensor, band: Band) -> Tensor:
    """``Σ W e^k v / Σ W e^k`` [T, C] of key and value [S, C], hidden keys being −inf."""

    def fast(key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        return _plain_mean(key, value, band._replace(tiles=tiles))

    def safe(key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        wide = band._replace(tiles=tiles.double(), parts=0)
        if band.causal:
            sums = _causal_sums(key.double(), value.double(), wide)
            return mean(sums.numerator, sums.denominator).to(key.dtype)
        return _plain_mean(key.double(), value.double(), wide).to(key.dtype)

    return choose(_fits(key, value, band), fast, safe, key, value, band.tiles)


def normalized_mean(key: Tensor, value: Tensor, seen: Tensor, band: Band) -> Tensor:
    """``Σ softmax(w) softmax(k) v`` [T, C]; seen [S, B] is 1 for visible keys, else 0."""

    def fast(key: Tensor, value: Tensor, seen: Tensor, tiles: Tensor) -> Tensor:
        return _plain_normalized(key, value, seen, band._replace(tiles=tiles))

    def safe(key: Tensor, value: Tensor, seen: Tensor, tiles: Tensor) -> Tensor:
        wide = band._replace(tiles=tiles.double(), parts=0)
        mix = _causal_normalized if band.causal else _plain_normalized
        return mix(key.double(), value.double(), seen.double(), wide).to(key.dtype)

    return choose(_fits(key, value, band), fast, safe, key, value, seen, band.tiles)


def _fits(key: Tensor, value: Tensor, band: Band) -> Tensor:
    """Whether one common shift and float32 are exact to tolerance (`sums.py`)."""
    tiles = band.tiles.detach()
    # The smallest of those that are seen.
    seen = tiles.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)
    if band.far:  # far tokens have w = 0 in every row
        bias_spread = tiles.amax().clamp_min(0) - seen.amin().clamp_max(0)
    else:
        bias_spread = (tiles.amax(2) - seen.amin(2)).amax()
    exponents = spread(key, 0) + bias_spread
    if not band.causal:
        return (exponents <= FAST_SPREAD) | (bias_spread <= FAST_BIAS_SPREAD)
    # A product multiplies the rows before a NaN by 0, which is NaN.
    return exponents + zero_if_finite(value) <= FAST_SPREAD


def _future(tokens: int, device: torch.device) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def _skew(rows: Tensor, first: int, columns: int) -> Tensor:
    """Row i of each block [n, c, K] from column first + i on: [n, c, columns], 0 elsewhere.

    Read with rows one shorter than they lie in memory, each row starts one further to the right.
    """
    count, block, offsets = rows.shape
    width = offsets + block - 1
    skewed = F.pad(rows, (0, block)).flatten(1)[:, : block * width].view(count, block, width)
    return F.pad(skewed, (first, columns - first - width))


def _plain_mean(key: Tensor, value: Tensor, band: Band) -> Tensor:
    return banded_mean(key, value, *band)


def _tile_product(key: Tensor, value: Tensor, tile: Tensor) -> Sums:
    """``exp(w + k)`` sums of tile [n, c, s] with key and value [n, s, C], all keys visible."""
    key_shift, row_shift = column_shift(key, 1), column_shift(tile, 2)
    weight, exp_key = torch.exp(tile - row_shift), torch.exp(key - key_shift)
    numerator = torch.bmm(weight, exp_key * value)
    return Sums(key_shift + row_shift, numerator, torch.bmm(weight, exp_key))


def _diagonal_sums(key: Tensor, value: Tensor, tile: Tensor) -> Sums:
    """Causal sums inside each block: key, value [n, c, C], tile [n, c, c].

    The block is halved again and again. A square below the diagonal holds only keys that all of its
    rows see, so its own maximum starves none of them.
    """
    count, length, columns = key.shape
    levels = 0
    while length > SMALLEST_HALF << levels:
        levels += 1
    size = -(-length // 2**levels)
    padded = size * 2**levels - length
    key = F.pad(key, (0, 0, 0, padded), value=-torch.inf)
    value = F.pad(value, (0, 0, 0, padded))
    tile = F.pad(tile, (0, padded, 0, padded))
    result = _term_by_term(key, value, tile, size)
    while size < key.shape[1]:
        halves = [part.view(-1, 2, size, columns) for part in (key, value)]
        squares = _diagonal_squares(tile, 2 * size)[:, size:, :size]
        below = _tile_product(halves[0][:, 0], halves[1][:, 0], squares)
        result = Sums(*(part.view(-1, 2, size, columns) for part in result))
        late = merge(Sums(*(part[:, 1] for part in result)), below)
        result = Sums(*(torch.stack((a[:, 0], b), 1) for a, b in zip(result, late, strict=True)))
        size *= 2
    return Sums(*(part.reshape(count, -1, columns)[:, :length] for part in result))


def _diagonal_squares(tile: Tensor, size: int) -> Tensor:
    """The size × size squares on the diagonal of tile [n, c, c]: [n·c/size, size, size]."""
    count, length = tile.shape[0], tile.shape[1]
    grid = tile.view(count, length // size, size, length // size, size)
    return grid.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)


def _term_by_term(key: Tensor, value: Tensor, tile: Tensor, size: int) -> Sums:
    """Causal sums inside squares of `size`, with the joint maximum of k + w per row and column."""
    key, value = (part.reshape(-1, 1, size, part.shape[-1]) for part in (key, value))
    squares = _diagonal_squares(tile, size)
    squares = squares.masked_fill(_future(size, tile.device), -torch.inf)
    # Masked once more: what is not finite stays so where −inf or 0 meets it.
    hidden = _future(size, tile.device).unsqueeze(-1)
    logits = (key + squares.unsqueeze(-1)).masked_fill(hidden, -torch.inf)
    values = value.expand_as(logits).masked_fill(hidden, 0)
    return Sums(*(part.squeeze(2) for part in reduce(logits, values, 2)))


def _causal_sums(key: Tensor, value: Tensor, band: Band) -> Sums:
    """The causal sums [T, C] for any keys: each part with a shift that its own rows see."""
    tokens, block, own = len(key), band.block, band.before * band.block
    blocks = split(key, block, -torch.inf), split(value, block)
    result = _diagonal_sums(*blocks, band.tiles[:, :, own:])
    if own:
        keys = neighbours(key, block, band.before, 0, -torch.inf)[:, :own]
        values = neighbours(value, block, band.before, 0)[:, :own]
        result = merge(result, _tile_product(keys, values, band.tiles[:, :, :own]))
    if band.far:
        far = move(prefix(reduce(*blocks, 1), 0), band.before + 1, 0)
        result = merge(result, far)
    return Sums(*(part.flatten(0, 1)[:tokens] for part in result))


def _product(weights: Tensor, x: Tensor, band: Band) -> Tensor:
    """W times x [T, C]."""
    return banded_product(x, weights, *band[1:])


def _quotient(numerator: Tensor, normalizer: Tensor, denominator: Tensor) -> Tensor:
    """``N / (Z·D)`` of N and D [T, B·D] and the sums of each row's weights, Z [T, B]."""
    batch = normalizer.shape[1]
    divisor = normalizer.unsqueeze(-1) * denominator.unflatten(1, (batch, -1))
    return mean(numerator.unflatten(1, (batch, -1)), divisor).flatten(1)


def _plain_normalized(key: Tensor, value: Tensor, seen: Tensor, band: Band) -> Tensor:
    weights, exp_key = tile_weights(band.tiles, band.far), torch.exp(key - column_shift(key, 0))
    numerator = _product(weights, exp_key * value, band)
    everywhere = prefix(exp_key, 0) if band.causal else exp_key.sum(0, True)
    return _quotient(numerator, _product(weights, seen, band), everywhere.expand_as(numerator))


def _causal_normalized(key: Tensor, value: Tensor, seen: Tensor, band: Band) -> Tensor:
    sums, everywhere = _causal_sums(key, value, band), prefix(leaf(key, value), 0)
    # Both see the same keys, so this exponent is at most about the largest w.
    numerator = sums.numerator * torch.exp(sums.shift - everywhere.shift)
    normalizer = _product(tile_weights(band.tiles, band.far), seen, band)
    return _quotient(numerator, normalizer, everywhere.denominator)
