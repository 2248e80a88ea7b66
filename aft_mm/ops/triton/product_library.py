"""AFT-full and AFT-local of the Triton backend: which products they are, and those as ops."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..eager.banded_matmul import neighbours, split
from ..geometry import as_pair
from . import product_launch as launch
from .product_cut import Band, choose_cut, make_band, new_saved
from .register import differentiated, register


def aft_full(query, key, value, position_bias, *, causal, key_mask, gate) -> Tensor:
    """O(T·S·D) time: tiles of exp(w) times e^k v and e^k, for any finite key."""
    save = differentiated(query, key, value, position_bias)
    tensors = query, key, value, position_bias, key_mask
    return product(*tensors, None, None, causal, gate, save)[0]


def aft_local(query, key, value, pos_u, pos_v, *, window, grid, causal, key_mask, gate) -> Tensor:
    """O(T·s·D) time: the same around the window, and sums of the tiles beyond."""
    save = differentiated(query, key, value, pos_u, pos_v)
    window, grid = window_on(window, grid)
    table = local_table(pos_u, pos_v, value, window, grid, causal, save)
    return product(query, key, value, table, key_mask, window, grid, causal, gate, save)[0]


def window_on(window, grid) -> tuple[list[int], list[int] | None]:
    """One size, or two on a 2-d grid."""
    if grid is None or len(grid) == 1:
        return [window if isinstance(window, int) else window[0]], None
    return list(as_pair(window)), list(grid)


def local_table(
    pos_u: Tensor,
    pos_v: Tensor | None,
    value: Tensor,
    window: Sequence[int],
    grid: Sequence[int] | None,
    causal: bool,
    save: bool,
) -> Tensor:
    """The free bias, or the product of the factors of each tile with those that it meets."""
    if pos_v is None:
        return pos_u
    tile = choose_cut(value, save).tile
    band = make_band(pos_u, value, window, grid, causal, tile)
    return _FactorTable.apply(pos_u.float(), pos_v.float(), band)


class _FactorTable(torch.autograd.Function):
    """Written out because a backward pass under autocast would multiply in bfloat16."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor, band: Band) -> Tensor:
        ctx.save_for_backward(u, v)
        ctx.band = band
        around = neighbours(v, band.tile, band.before, band.after)
        return torch.bmm(split(u, band.tile), around.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        u, v = ctx.saved_tensors
        band = ctx.band
        with torch.autocast(gradient.device.type, enabled=False):
            around = neighbours(v, band.tile, band.before, band.after)
            by_u = torch.bmm(gradient, around).flatten(0, 1)[: len(u)]
            parts = torch.bmm(gradient.transpose(1, 2), split(u, band.tile))
        parts = parts.unflatten(1, (band.reach, band.tile))
        by_v = parts.new_zeros(band.tiles + band.reach - 1, *parts.shape[2:])
        for slot in range(band.reach):
            by_v[slot : slot + band.tiles] += parts[:, slot]
        return by_u, by_v[band.before :].flatten(0, 1)[: len(v)], None


def product(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    window: Sequence[int] | None,
    grid: Sequence[int] | None,
    causal: bool,
    gate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """AFT-full, or AFT-local with a window: [B, T, D], and with `save` what its gradient needs."""
    cut = choose_cut(value, save)
    band = make_band(table, value, window, grid, causal, cut.tile)
    call = launch.Call(query, key, value, table, key_mask, gate, band, cut)
    kept = new_saved(value, band, cut.width) if save else None
    output = launch.product_forward(call, kept)
    return output, value.new_empty(0, dtype=torch.float32) if kept is None else kept


def product_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    window: Sequence[int] | None,
    grid: Sequence[int] | None,
    causal: bool,
    gate: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those of query, key, value and table that are wanted."""
    cut = choose_cut(value, True)
    band = make_band(table, value, window, grid, causal, cut.tile)
    call = launch.Call(query, key, value, table, key_mask, gate, band, cut)
    results = launch.product_backward(gradient, None, saved, call, wanted[3])
    return [x for x, needed in zip(results, wanted, strict=False) if needed and x is not None]


def _empty(query, key, value, table, key_mask, window, grid, causal, gate, save):
    cut = choose_cut(value, save)
    band = make_band(table, value, window, grid, causal, cut.tile)
    output = value.new_empty(value.shape[0], band.targets, value.shape[2])
    if not save:
        return output, value.new_empty(0, dtype=torch.float32)
    return output, new_saved(value, band, cut.width)


product = register(product, product_backward, fake=_empty, name='aft_full and aft_local')
