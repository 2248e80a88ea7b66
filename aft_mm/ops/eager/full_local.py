"""AFT-full, AFT-local and AFT-local-learned: a dense or banded ``exp(w)`` times the keys.

Products run in blocks of tokens, in O(T·(D + s)) memory; outside the tiles W is 1 (`global_term`)
or 0.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Window, near_mask, near_radius, neighbours, split
from ..online_softmax import (
    FAST_BIAS_RANGE,
    FAST_RANGE,
    ShiftedSum,
    add,
    apply_gate,
    by_columns,
    column_ranges,
    column_shift,
    from_token,
    hide,
    key_range,
    mean,
    prefix_sum,
    reduce,
    shift,
    zero_if_finite,
)
from ..path_choice import choose
from ..tracing import may_read
from .banded_matmul import TileReach, banded_mean, banded_product, tile_weights
from .bf16_matmul import matmul_precision
from .full_batched import WIDE_RANGE, exact_mean

# Smaller blocks take longer to launch than to compute; of larger ones more lies outside the window.
SMALLEST_BLOCK = 32
BLOCKS_PER_WINDOW = 4
# At most this many tokens of the diagonal are summed term by term.
SMALLEST_HALF = 8


class BlockBandedBias(NamedTuple):
    """w [n, c, (before + 1 + after)·c] of each block against its neighbours, −inf where hidden.

    `precision` is that of the products; safe paths use 'fp32'.
    """

    tiles: Tensor
    before: int
    after: int
    global_term: bool
    causal: bool
    precision: str = 'fp32'

    @property
    def reach(self) -> TileReach:
        future = self.global_term and not self.causal
        return TileReach(self.before, self.after, self.global_term, future, self.precision)

    @property
    def block(self) -> int:
        return self.tiles.shape[2] // self.reach.blocks


def aft_full(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_full` in O(T·S·D)."""
    bias = position_bias.to(torch.promote_types(value.dtype, torch.float32))
    if causal:
        bias = bias.masked_fill(_future(len(bias), bias.device), -torch.inf)
    band = BlockBandedBias(bias[None], 0, 0, global_term=False, causal=causal)
    return _gated_mean(query, key, value, band, key_mask, gate)


def aft_local(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None,
    *,
    window: Window,
    grid: Sequence[int] | None,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_local` in O(T·s·D): block products and sums outside."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    band = local_bias(pos_u, pos_v, window, grid, causal, dtype)
    return _gated_mean(query, key, value, band, key_mask, gate)


def aft_local_learned(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None,
    *,
    window: Window,
    grid: Sequence[int] | None,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_local_learned` in O(T·s·D)."""
    dtype, batch, precision = value.dtype, value.shape[0], matmul_precision(value)
    key, value = hide(key, value, key_mask)
    band = local_bias(pos_u, pos_v, window, grid, causal, key.dtype)
    visible = torch.ones_like(key[..., 0]) if key_mask is None else key_mask.to(key.dtype)
    mixed = normalized_mean(
        _columns(key), _columns(value), visible.T, band._replace(precision=precision)
    )
    return apply_gate(query, mixed.unflatten(1, (batch, -1)).transpose(0, 1), gate, dtype)


def _columns(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1)


def _gated_mean(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    band: BlockBandedBias,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    dtype, batch = value.dtype, value.shape[0]
    band = band._replace(precision=matmul_precision(value))
    key, value = hide(key, value, key_mask)
    mixed = weighted_mean(_columns(key), _columns(value), band)
    return apply_gate(query, mixed.unflatten(1, (batch, -1)).transpose(0, 1), gate, dtype)


def local_bias(
    pos_u: Tensor,
    pos_v: Tensor | None,
    window: Window,
    grid: Sequence[int] | None,
    causal: bool,
    dtype: torch.dtype,
) -> BlockBandedBias:
    """Return w in the window and 0 elsewhere; without v, u has one column per visible offset."""
    pos_u, pos_v = pos_u.to(dtype), None if pos_v is None else pos_v.to(dtype)
    tokens, radius = len(pos_u), near_radius(window, grid)
    block = max(-(-radius // BLOCKS_PER_WINDOW), SMALLEST_BLOCK)
    before = -(-max(radius, 0) // block)
    after = 0 if causal else before
    if tokens <= block * (before + 1 + after):
        block, before, after = tokens, 0, 0
    rows = split(pos_u, block)
    target = torch.arange(len(rows) * block, device=pos_u.device).view(-1, block, 1)
    if grid is None or len(grid) == 1:
        target = target[:1]
    reach = torch.arange(-before * block, (after + 1) * block, device=pos_u.device)
    source = target[:, :1] + reach
    if pos_v is None:
        tiles = _skew(rows, before * block - radius, len(reach))
    else:
        tiles = torch.bmm(rows, neighbours(pos_v, block, before, after).transpose(1, 2))
    # A product: masked_fill is several times slower.
    tiles = tiles * near_mask(target, source, window, grid)
    if causal:
        tiles = tiles + torch.where(source[:1] > target[:1], -torch.inf, 0.0).to(dtype)
    return BlockBandedBias(tiles, before, after, global_term=True, causal=causal)


def weighted_mean(key: Tensor, value: Tensor, band: BlockBandedBias) -> Tensor:
    """Return ``Σ W e^k v / Σ W e^k`` [T, C] of key and value [S, C], hidden keys at −inf."""

    def fast(key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        return banded_mean(key, value, tiles, band.reach)

    def safe(key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        wide = band._replace(tiles=tiles.double(), precision='fp32')
        if band.causal:
            sums = _causal_sums(key.double(), value.double(), wide)
            return mean(sums.numerator, sums.denominator).to(key.dtype)
        return banded_mean(key.double(), value.double(), wide.tiles, wide.reach).to(key.dtype)

    def exact(key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        bias = _dense(tiles, band, len(key)) if band.global_term else tiles[0]
        wide = (x.double()[None, None] for x in (key, value, bias))
        return exact_mean(*wide)[0, 0].to(key.dtype)

    def wide_path(key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        if not may_read(tiles):  # a graph makes one choice, for |w| up to 80
            return safe(key, value, tiles)
        if band.global_term:
            # The largest key that a shift covers may be one that w hides from the row.
            exponents = key_range(key, 0) + _bias_range(band)
            is_exact = ~_hides_pairs(tiles, band) | (exponents <= WIDE_RANGE)
        else:
            is_exact = _row_range(tiles, tiles) <= WIDE_RANGE
        return choose(is_exact, safe, exact, key, value, tiles)

    def by_range(key: Tensor, value: Tensor, tiles: Tensor) -> Tensor:
        is_exact = _exact_columns(key, value, band)
        paths = partial(fast, tiles=tiles), partial(wide_path, tiles=tiles)
        return by_columns(is_exact, *paths, key, value)

    otherwise = by_range if _may_split(key, value, band) else wide_path
    return choose(_is_one_shift_exact(key, value, band), fast, otherwise, key, value, band.tiles)


def normalized_mean(key: Tensor, value: Tensor, visible: Tensor, band: BlockBandedBias) -> Tensor:
    """Return ``Σ softmax(w) softmax(k) v`` [T, C]; visible [S, B] is 1 for visible keys, else 0."""

    def fast(key: Tensor, value: Tensor, visible: Tensor, tiles: Tensor) -> Tensor:
        return _plain_normalized(key, value, visible, band._replace(tiles=tiles))

    def safe(key: Tensor, value: Tensor, visible: Tensor, tiles: Tensor) -> Tensor:
        wide = band._replace(tiles=tiles.double(), precision='fp32')
        mix = _causal_normalized if band.causal else _plain_normalized
        return mix(key.double(), value.double(), visible.double(), wide).to(key.dtype)

    def by_range(key: Tensor, value: Tensor, visible: Tensor, tiles: Tensor) -> Tensor:
        is_exact = _exact_columns(key, value, band)
        each = visible.repeat_interleave(key.shape[1] // visible.shape[1], 1)

        def fast_columns(key: Tensor, value: Tensor, _: Tensor) -> Tensor:
            return fast(key, value, visible, tiles)  # with one normalizer per sample

        return by_columns(is_exact, fast_columns, partial(safe, tiles=tiles), key, value, each)

    is_exact = _is_one_shift_exact(key, value, band)
    otherwise = by_range if _may_split(key, value, band) else safe
    return choose(is_exact, fast, otherwise, key, value, visible, band.tiles)


def _is_one_shift_exact(key: Tensor, value: Tensor, band: BlockBandedBias) -> Tensor | bool:
    if band.causal:
        # NaN also reaches earlier rows by 0 · NaN.
        return key_range(key, 0) + _bias_range(band) + zero_if_finite(value) <= FAST_RANGE
    # Whatever the keys are, if every row sees the largest.
    tiles = band.tiles.detach()
    if band.global_term:
        whole_range = _range_with_zero(tiles, tiles)
    else:
        whole_range = _row_range(tiles, tiles)
    any_keys = whole_range <= FAST_BIAS_RANGE
    if may_read(any_keys) and any_keys:
        return True
    return (key_range(key, 0) + _bias_range(band) <= FAST_RANGE) | any_keys


def _may_split(key: Tensor, value: Tensor, band: BlockBandedBias) -> bool:
    return band.causal and all(map(may_read, (key, value, band.tiles)))


def _exact_columns(key: Tensor, value: Tensor, band: BlockBandedBias) -> Tensor:
    """Return the causal :func:`_is_one_shift_exact` of each column, bool [C]."""
    exponents = column_ranges(key, 0) + _bias_range(band)
    return exponents + zero_if_finite(value, 0) <= FAST_RANGE


def _bias_range(band: BlockBandedBias) -> Tensor:
    """Return the range of w without hidden pairs."""
    tiles = band.tiles.detach()
    measure = _range_with_zero if band.global_term else _row_range
    return measure(tiles, _visible(tiles))


def _visible(tiles: Tensor) -> Tensor:
    return tiles.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


def _range_with_zero(largest: Tensor, smallest: Tensor) -> Tensor:
    # tokens outside the tiles have w = 0 in every row
    return largest.amax().clamp_min(0) - smallest.amin().clamp_max(0)


def _row_range(largest: Tensor, smallest: Tensor) -> Tensor:
    return (largest.detach().amax(2) - smallest.detach().amin(2)).amax()


def _future(tokens: int, device: torch.device) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def _hides_pairs(tiles: Tensor, band: BlockBandedBias) -> Tensor:
    """Return whether w is −∞ for a pair, not counting later tokens."""
    hidden = tiles == -torch.inf
    if band.causal:
        hidden = hidden & ~F.pad(_future(band.block, tiles.device), (band.before * band.block, 0))
    return hidden.any()


def _dense(tiles: Tensor, band: BlockBandedBias, tokens: int) -> Tensor:
    """Return w [T, T] of the tiles, 0 elsewhere."""
    block, last = band.block, len(tiles) - 1
    rows = [F.pad(x, (i * block, (last - i) * block)) for i, x in enumerate(tiles)]
    first = band.before * block
    dense = torch.cat(rows)[:tokens, first : first + tokens]
    return dense.masked_fill(_future(tokens, dense.device), -torch.inf) if band.causal else dense


def _skew(rows: Tensor, first: int, columns: int) -> Tensor:
    """Move row i of each block [n, c, K] to column first + i, by rows shorter by one."""
    count, block, offsets = rows.shape
    width = offsets + block - 1
    skewed = F.pad(rows, (0, block)).flatten(1)[:, : block * width].view(count, block, width)
    return F.pad(skewed, (first, columns - first - width))


def _tile_product(key: Tensor, value: Tensor, weights: Tensor) -> ShiftedSum:
    """Return the sums of ``W e^k`` for weights [n, c, s], key and value [n, s, C]."""
    key_shift = column_shift(key, 1)
    exp_key = torch.exp(key - key_shift)
    numerator, denominator = torch.bmm(weights, exp_key * value), torch.bmm(weights, exp_key)
    return ShiftedSum(key_shift.expand_as(numerator), numerator, denominator)


def _diagonal_sums(key: Tensor, value: Tensor, weights: Tensor) -> ShiftedSum:
    """Return the causal sums inside each block: key, value [n, c, C], weights [n, c, c]."""
    count, length, columns = key.shape
    levels = 0
    while length > SMALLEST_HALF << levels:
        levels += 1
    size = -(-length // 2**levels)
    padded = size * 2**levels - length
    key = F.pad(key, (0, 0, 0, padded), value=-torch.inf)
    value = F.pad(value, (0, 0, 0, padded))
    weights = F.pad(weights, (0, padded, 0, padded))
    result = _term_by_term(key, value, weights, size)
    while size < key.shape[1]:
        halves = [part.view(-1, 2, size, columns) for part in (key, value)]
        squares = _diagonal_squares(weights, 2 * size)[:, size:, :size]
        below = _tile_product(halves[0][:, 0], halves[1][:, 0], squares)
        result = ShiftedSum(*(part.view(-1, 2, size, columns) for part in result))
        late = add(ShiftedSum(*(part[:, 1] for part in result)), below)
        pairs = zip(result, late, strict=True)
        result = ShiftedSum(*(torch.stack((a[:, 0], b), 1) for a, b in pairs))
        size *= 2
    return ShiftedSum(*(part.reshape(count, -1, columns)[:, :length] for part in result))


def _diagonal_squares(x: Tensor, size: int) -> Tensor:
    """Return the squares on the diagonal of x [n, c, c]: [n·c/size, size, size]."""
    count, length = x.shape[0], x.shape[1]
    grid = x.view(count, length // size, size, length // size, size)
    return grid.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)


def _term_by_term(key: Tensor, value: Tensor, weights: Tensor, size: int) -> ShiftedSum:
    key, value = (part.reshape(-1, 1, size, part.shape[-1]) for part in (key, value))
    squares = _diagonal_squares(weights, size).unsqueeze(-1)
    # A value that is not finite stays so after a product with 0.
    hidden = _future(size, key.device).unsqueeze(-1)
    rows = key.expand(-1, size, -1, -1)
    keys, values = (
        rows.masked_fill(hidden, -torch.inf),
        value.expand_as(rows).masked_fill(hidden, 0),
    )
    row_shift = column_shift(keys, 2)
    terms = torch.exp(keys - row_shift) * squares
    return ShiftedSum(row_shift.squeeze(2), (terms * values).sum(2), terms.sum(2))


def _causal_sums(key: Tensor, value: Tensor, band: BlockBandedBias) -> ShiftedSum:
    """Return the causal sums [T, C] for any keys: each part has a shift that its rows see."""
    weights = tile_weights(band.tiles, band.global_term)
    tokens, block, earlier = len(key), band.block, band.before * band.block
    blocks = split(key, block, -torch.inf), split(value, block)
    result = _diagonal_sums(*blocks, weights[:, :, earlier:])
    if earlier:
        keys = neighbours(key, block, band.before, 0, -torch.inf)[:, :earlier]
        values = neighbours(value, block, band.before, 0)[:, :earlier]
        result = add(result, _tile_product(keys, values, weights[:, :, :earlier]))
    if band.global_term:
        outside = shift(prefix_sum(reduce(*blocks, 1), 0), band.before + 1, 0)
        result = add(result, outside)
    return ShiftedSum(*(part.flatten(0, 1)[:tokens] for part in result))


def _quotient(numerator: Tensor, normalizer: Tensor, denominator: Tensor) -> Tensor:
    batch = normalizer.shape[1]
    divisor = normalizer.unsqueeze(-1) * denominator.unflatten(1, (batch, -1))
    return mean(numerator.unflatten(1, (batch, -1)), divisor).flatten(1)


def _plain_normalized(key: Tensor, value: Tensor, visible: Tensor, band: BlockBandedBias) -> Tensor:
    weights = tile_weights(band.tiles, band.global_term)
    exp_key = torch.exp(key - column_shift(key, 0))
    numerator = banded_product(exp_key * value, weights, band.reach)
    everywhere = prefix_sum(exp_key, 0) if band.causal else exp_key.sum(0, True)
    normalizer = banded_product(visible, weights, band.reach)
    return _quotient(numerator, normalizer, everywhere.expand_as(numerator))


def _causal_normalized(
    key: Tensor, value: Tensor, visible: Tensor, band: BlockBandedBias
) -> Tensor:
    sums, everywhere = _causal_sums(key, value, band), prefix_sum(from_token(key, value), 0)
    numerator = sums.numerator * torch.exp(sums.shift - everywhere.shift)
    weights = tile_weights(band.tiles, band.global_term)
    normalizer = banded_product(visible, weights, band.reach)
    return _quotient(numerator, normalizer, everywhere.denominator)
