"""AFTWindow of the Triton backend: the op, its shapes and its gradient as opaque nodes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..eager.mixing import apply_gate, hide, safe_window_mean
from ..eager.sums import FAST_SPREAD, choose, column_shift, spread
from ..geometry import as_pair
from . import window_launch as launch
from .common import once
from .register import differentiated


def aft_window(query, key, value, *, window, grid, causal, key_mask, gate) -> Tensor:
    """O(T·D) products with a band in tiles of 64, and s / 64 sums per tile; in 2-d O(T·s_h·D)."""
    grid = [value.shape[1]] if grid is None else list(grid)
    sizes = list(as_pair(window))[: len(grid)] if isinstance(window, int) else list(window)
    save = differentiated(query, key, value)
    seen = key.detach()
    if key_mask is not None:
        seen = seen.masked_fill(~key_mask.unsqueeze(-1), -torch.inf)
    shift = column_shift(seen, 1).float()

    def fast(key: Tensor, value: Tensor, query: Tensor | None = None) -> Tensor:
        options = key_mask, shift, gate, sizes, grid, causal, save
        return hard_window(query, key, value, *options)[0]

    def safe(key: Tensor, value: Tensor, query: Tensor | None = None) -> Tensor:
        dtype = value.dtype
        key, value = (part.unflatten(1, grid) for part in hide(key, value, key_mask))
        mixed = safe_window_mean(key, value, sizes, tuple(grid), causal)
        return apply_gate(query, mixed.flatten(1, len(grid)), gate, dtype)

    operands = (key, value) if query is None else (key, value, query)
    return choose(spread(seen, 1) <= FAST_SPREAD, fast, safe, *operands)


@torch.library.custom_op('aft_mm::hard_window', mutates_args=())
def hard_window(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    shift: Tensor,
    gate: str,
    window: Sequence[int],
    grid: Sequence[int],
    causal: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """AFTWindow [B, T, D] of keys less shift [B, 1, D], and with `save` what its gradient needs."""
    places = launch.find_places(window, grid, causal)
    return launch.window_forward(query, key, value, key_mask, shift, gate, places, save)


@torch.library.custom_op('aft_mm::hard_window_backward', mutates_args=())
def hard_window_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    shift: Tensor,
    gate: str,
    window: Sequence[int],
    grid: Sequence[int],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query (nothing without one), key and value."""
    places = launch.find_places(window, grid, causal)
    by_query, by_key, by_value = launch.window_backward(
        gradient, saved, query, key, value, key_mask, shift, gate, places
    )
    return key.new_empty(0) if by_query is None else by_query, by_key, by_value


@hard_window.register_fake
def _(query, key, value, key_mask, shift, gate, window, grid, causal, save):
    return value.new_empty(value.shape), launch.make_saved(value, save)


@hard_window_backward.register_fake
def _(gradient, saved, query, key, value, key_mask, shift, gate, window, grid, causal):
    by_query = key.new_empty(0) if query is None else query.new_empty(query.shape)
    return by_query, key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx, inputs, output) -> None:
    query, key, value, key_mask, shift, *ctx.options, ctx.save = inputs
    ctx.save_for_backward(output[1], query, key, value, key_mask, shift)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient: Tensor | None, _):
    if gradient is None:
        return (None,) * 10
    if not ctx.save:
        raise RuntimeError('aft_mm::hard_window must be called with save=True for its gradient')
    by_query, by_key, by_value = hard_window_backward(gradient, *ctx.saved_tensors, *ctx.options)
    by_query = None if ctx.saved_tensors[1] is None else by_query
    return by_query, by_key, by_value, *(None,) * 7


hard_window.register_autograd(_backward, setup_context=_setup_context)
hard_window_backward.register_autograd(once('aft_window'))
