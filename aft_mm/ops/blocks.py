"""Products of a dense or banded ``exp(w)`` with the keys, in blocks, O(T·(D + s)) memory.

Tokens come as columns: key and value are [T, C] with C = B·D, so that a block product is one matrix
product for the whole batch. A :class:`Band` holds w in blocks: block (i, i + offset) is
``tiles[offset][i]``, [n, c, c]; what no tile covers has W = 1 (`far`) or W = 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .geometry import Window, near_mask, near_radius
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
)

# Smaller tiles are more launches than work.
SMALLEST_BLOCK = 32
# Below this length the diagonal is summed term by term instead of being halved again.
SMALLEST_HALF = 8


class Band(NamedTuple):
    """w in tiles [n, c, c] by block offset, −inf where hidden; `far`: W = 1 outside the tiles."""

    tiles: dict[int, Tensor]
    far: bool
    causal: bool

    def with_tiles(self, tiles: Sequence[Tensor]) -> 'Band':
        """The same band with other values in its tiles."""
        return self._replace(tiles=dict(zip(self.tiles, tiles, strict=True)))


def dense_band(bias: Tensor, causal: bool) -> Band:
    """The bias [T, S] as one tile."""
    if causal:
        bias = bias.masked_fill(_future(len(bias), bias.device), -torch.inf)
    return Band({0: bias[None]}, far=False, causal=causal)


def local_band(
    pos_u: Tensor, pos_v: Tensor, window: Window, grid, causal: bool, outside: float
) -> Band:
    """``w = u vᵀ`` inside the window and `outside` elsewhere: 0, or −inf for a window alone."""
    tokens = len(pos_u)
    block = max(near_radius(window, grid), SMALLEST_BLOCK)
    offsets = (0, -1) if causal else (0, -1, 1)
    if tokens <= block * len(offsets):
        block, offsets = tokens, (0,)
    count = -(-tokens // block)
    extra = count * block - tokens
    pos_u, pos_v = (F.pad(p, (0, 0, 0, extra)).view(count, block, -1) for p in (pos_u, pos_v))
    target = torch.arange(count * block, device=pos_u.device).view(count, block, 1)
    if grid is None or len(grid) == 1:
        target = target[:1]  # the mask of a 1-d window is the same in every block
    tiles = {}
    for offset in offsets:
        source = target.transpose(1, 2) + offset * block
        tile = torch.bmm(pos_u, pos_v.roll(-offset, 0).transpose(1, 2))
        tile = tile.masked_fill(~near_mask(target, source, window, grid), outside)
        if causal and offset == 0:
            tile = tile.masked_fill(_future(block, tile.device), -torch.inf)
        tiles[offset] = tile
    return Band(tiles, far=outside == 0, causal=causal)


def weighted_mean(key: Tensor, value: Tensor, band: Band) -> Tensor:
    """``Σ W e^k v / Σ W e^k`` [T, C] of key and value [S, C], hidden keys being −inf."""

    def fast(key: Tensor, value: Tensor, *tiles: Tensor) -> Tensor:
        return _plain_mean(key, value, band.with_tiles(tiles))

    def safe(key: Tensor, value: Tensor, *tiles: Tensor) -> Tensor:
        wide = band.with_tiles([tile.double() for tile in tiles])
        if band.causal:
            sums = _causal_sums(key.double(), value.double(), wide)
            return mean(sums.numerator, sums.denominator).to(key.dtype)
        return _plain_mean(key.double(), value.double(), wide).to(key.dtype)

    return choose(_fits(key, band), fast, safe, key, value, *band.tiles.values())


def normalized_mean(key: Tensor, value: Tensor, seen: Tensor, band: Band) -> Tensor:
    """``Σ softmax(w) softmax(k) v`` [T, C]; seen [S, B] is 1 for visible keys, else 0."""

    def fast(key: Tensor, value: Tensor, seen: Tensor, *tiles: Tensor) -> Tensor:
        return _plain_normalized(key, value, seen, band.with_tiles(tiles))

    def safe(key: Tensor, value: Tensor, seen: Tensor, *tiles: Tensor) -> Tensor:
        wide = band.with_tiles([tile.double() for tile in tiles])
        mix = _causal_normalized if band.causal else _plain_normalized
        return mix(key.double(), value.double(), seen.double(), wide).to(key.dtype)

    return choose(_fits(key, band), fast, safe, key, value, seen, *band.tiles.values())


def _fits(key: Tensor, band: Band) -> Tensor:
    """Whether one common shift and float32 are exact to tolerance (`sums.py`)."""
    bias_spread = _bias_spread(band)
    fits = spread(key, 0) + bias_spread <= FAST_SPREAD
    return fits if band.causal else fits | (bias_spread <= FAST_BIAS_SPREAD)


def _future(tokens: int, device: torch.device) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def _bias_spread(band: Band) -> Tensor:
    """The range of w that one common shift must bridge: per row, with 0 where far tokens count."""
    tiles = [tile.detach() for tile in band.tiles.values()]
    high = [tile.amax(2) for tile in tiles]
    low = [tile.masked_fill(tile == -torch.inf, torch.inf).amin(2) for tile in tiles]
    if band.far:
        return torch.stack([h.amax() for h in high]).amax().clamp_min(0) - torch.stack(
            [part.amin() for part in low]
        ).amin().clamp_max(0)
    return (torch.stack(high).amax(0) - torch.stack(low).amin(0)).amax()


def _split(x: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """[T, C] as blocks [n, c, C]."""
    count = -(-len(x) // block)
    return F.pad(x, (0, 0, 0, count * block - len(x)), value=fill).view(count, block, -1)


def _apply_tiles(weights: dict[int, Tensor], x: Tensor) -> Tensor:
    """The banded product of the tiles [n, c, s] with the blocks x [n, s, C]: [n, c, C]."""
    result = torch.bmm(weights[0], x)
    if -1 in weights:
        result[1:] += torch.bmm(weights[-1][1:], x[:-1])
    if 1 in weights:
        result[:-1] += torch.bmm(weights[1][:-1], x[1:])
    return result


def _far_sums(totals, causal: bool):
    """From the block totals [n, 1, C], what lies beyond the neighbouring blocks of each block."""
    far = move(prefix(totals, 0), 2, 0)
    if causal:
        return far
    after = prefix(totals.flip(0), 0)
    return merge(far, move(after, 2, 0).flip(0))


def _plain_mean(key: Tensor, value: Tensor, band: Band) -> Tensor:
    tiles, block = band.tiles, band.tiles[0].shape[2]
    # Far tokens have W = 1, so only without them may the rows of w be shifted.
    row_shift = 0 if band.far else _row_maximum(tiles)
    weights = {offset: torch.exp(tile - row_shift) for offset, tile in tiles.items()}
    exp_key = torch.exp(key - column_shift(key, 0))
    sums = []
    for x in (exp_key * value, exp_key):
        x = _split(x, block)
        result = _apply_tiles(weights, x)
        if band.far and len(tiles) > 1:
            result = result + _far_sums(x.sum(1, True), band.causal)
        sums.append(result.flatten(0, 1))
    result = mean(*sums)
    return result[: len(key)] if len(tiles) > 1 else result


def _row_maximum(tiles: dict[int, Tensor]) -> Tensor:
    """Detached row maximum [n, c, 1] over all tiles, finite also where a row is hidden."""
    high = torch.stack([column_shift(tile, 2) for tile in tiles.values()])
    return high.amax(0)


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
    logits = key + squares.unsqueeze(-1)
    return Sums(*(part.squeeze(2) for part in reduce(logits, value, 2)))


def _causal_sums(key: Tensor, value: Tensor, band: Band) -> Sums:
    """The causal sums [T, C] for any keys: each part with a shift that its own rows see."""
    tokens, tiles = len(key), band.tiles
    block = tiles[0].shape[2]
    key, value = _split(key, block, -torch.inf), _split(value, block)
    result = _diagonal_sums(key, value, tiles[0])
    if -1 in tiles:
        # Key block i seen from row block i + 1; the last one wraps round and is moved out.
        before = _tile_product(key, value, tiles[-1].roll(-1, 0))
        result = merge(result, move(before, 1, 0))
        if band.far:
            result = merge(result, _far_sums(reduce(key, value, 1), causal=True))
    return Sums(*(part.flatten(0, 1)[:tokens] for part in result))


def _row_normalizer(seen: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """Maximum of w per row [T, 1] and ``Σ exp(w − maximum)`` over visible keys [T, B, 1]."""
    row_shift = _row_maximum(band.tiles)
    weights = {offset: torch.exp(tile - row_shift) for offset, tile in band.tiles.items()}
    normalizer = _apply_tiles(weights, _split(seen, row_shift.shape[1]))
    return row_shift.flatten(0, 1)[: len(seen)], normalizer.flatten(0, 1)[: len(seen), :, None]


def _quotient(numerator: Tensor, normalizer: Tensor, denominator: Tensor) -> Tensor:
    batch = normalizer.shape[1]
    divisor = normalizer * denominator.unflatten(1, (batch, -1))
    return mean(numerator.unflatten(1, (batch, -1)), divisor).flatten(1)


def _plain_normalized(key: Tensor, value: Tensor, seen: Tensor, band: Band) -> Tensor:
    row_shift, normalizer = _row_normalizer(seen, band)
    block = band.tiles[0].shape[1]
    row_shift = _split(row_shift, block)
    weights = {offset: torch.exp(tile - row_shift) for offset, tile in band.tiles.items()}
    exp_key = torch.exp(key - column_shift(key, 0))
    near = _apply_tiles(weights, _split(exp_key * value, block)).flatten(0, 1)[: len(key)]
    everywhere = exp_key.cumsum(0) if band.causal else exp_key.sum(0, True)
    return _quotient(near, normalizer, everywhere.expand_as(near))


def _causal_normalized(key: Tensor, value: Tensor, seen: Tensor, band: Band) -> Tensor:
    row_shift, normalizer = _row_normalizer(seen, band)
    near, everywhere = _causal_sums(key, value, band), prefix(leaf(key, value), 0)
    # The visible keys include the near ones, so this exponent is at most about the spread of w.
    scale = torch.exp(near.shift - row_shift - everywhere.shift)
    return _quotient(near.numerator * scale, normalizer, everywhere.denominator)
