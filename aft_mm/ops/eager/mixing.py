"""The ops of the default backend; the numerics policy stands in `__init__.py`."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..geometry import Window, as_pair
from . import decisions, inference_convolution
from .bands import Band, dense_band, local_band, normalized_mean, weighted_mean
from .convolution import (
    crop_kernel,
    difference_fits,
    difference_mean,
    one_shift_fits,
    safe_mean,
    weights_decide,
)
from .dense_convolution import dense_mean, serves
from .library import opaque_safe_mean
from .products import term_parts
from .running_mean import running_mean
from .sums import (
    FAST_SPREAD,
    Summable,
    choose,
    column_shift,
    leaf,
    mean,
    merge,
    move,
    pad,
    prefix,
    running_sum,
    sliding,
    spread,
)
from .tokens import accumulation_type, apply_gate, hide


def relu_terms(key: Tensor, value: Tensor, key_function: str) -> Tensor:
    """``relu(k) ⊙ v`` [..., D]; for relu2 followed by ``relu(−k) ⊙ v``, [..., 2·D]."""
    if key_function == 'relu2':
        key, value = torch.cat((key, -key), -1), torch.cat((value, value), -1)
    return torch.relu(key) * value


def apply_relu2_gates(query: Tensor, mixed: Tensor, dtype: torch.dtype) -> Tensor:
    """``relu(q) ⊙ a + relu(−q) ⊙ b`` in the output type, of the sums (a, b) = mixed [..., 2·D]."""
    query = query.to(mixed.dtype)
    positive, negative = mixed.chunk(2, -1)
    return (torch.relu(query) * positive + torch.relu(-query) * negative).to(dtype)


def _columns(x: Tensor) -> Tensor:
    """[B, T, D] as [T, B·D]: one matrix product serves the batch."""
    return x.transpose(0, 1).flatten(1)


def _banded(query, key, value, band: Band, key_mask, gate) -> Tensor:
    dtype, batch = value.dtype, value.shape[0]
    band = band._replace(parts=term_parts(value))
    key, value = hide(key, value, key_mask)
    mixed = weighted_mean(_columns(key), _columns(value), band)
    return apply_gate(query, mixed.unflatten(1, (batch, -1)).transpose(0, 1), gate, dtype)


def aft_simple(query, key, value, *, key_function, causal, key_mask, gate) -> Tensor:
    """O(T·D): a softmax over tokens, or running sums when causal."""
    dtype = value.dtype
    if key_function != 'softmax':
        key, value = hide(key, value, key_mask, fill=0)
        terms = relu_terms(key, value, key_function)
        mixed = running_sum(terms, 1) if causal else terms.sum(1, keepdim=True)
        if key_function == 'relu2':
            return apply_relu2_gates(query, mixed, dtype)
    else:
        key, value = hide(key, value, key_mask)
        if causal:
            fits = spread(key, 1) <= FAST_SPREAD
            mixed = choose(fits, running_mean, _safe_running_mean, key, value)
        else:
            weight = torch.exp(key - column_shift(key, 1))
            mixed = mean((weight * value).sum(1, True), weight.sum(1, True))
    if query is None and not causal:
        mixed = mixed.expand(-1, key.shape[1], -1)
    return apply_gate(query, mixed, gate, dtype)


def _safe_running_mean(key: Tensor, value: Tensor) -> Tensor:
    sums = prefix(leaf(key.double(), value.double()), 1)
    return mean(sums.numerator, sums.denominator).to(key.dtype)


def aft_full(query, key, value, position_bias, *, causal, key_mask, gate) -> Tensor:
    """O(T·S·D) time: the products of exp(w) with e^k v and e^k."""
    bias = position_bias.to(accumulation_type(value))
    return _banded(query, key, value, dense_band(bias, causal), key_mask, gate)


def _factors(
    pos_u: Tensor, pos_v: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    return pos_u.to(dtype), None if pos_v is None else pos_v.to(dtype)


def aft_local(query, key, value, pos_u, pos_v, *, window, grid, causal, key_mask, gate) -> Tensor:
    """O(T·s·D) time: products in blocks of the window and running sums of the blocks beyond."""
    factors = _factors(pos_u, pos_v, accumulation_type(value))
    band = local_band(*factors, window, grid, causal)
    return _banded(query, key, value, band, key_mask, gate)


def aft_conv(
    query, key, value, weight, *, grid: Sequence[int], global_connectivity, causal, key_mask, gate
) -> Tensor:
    """O(T·K·D) time by convolutions, O(T²·D) by a dense product (`convolution.py`)."""
    dtype, given, parts = value.dtype, weight, term_parts(value)
    weight = crop_kernel(weight.to(accumulation_type(value)), grid)
    seen, dense = (global_connectivity, causal), serves(value, weight, grid, parts)

    def look(check: Callable[..., Tensor]) -> Tensor | bool:
        found = partial(check, key, value, weight, *seen)
        if weights_decide(*seen):
            return decisions.remembered(given, (check, *grid), found)
        return found()

    lean = weights_decide(*seen) and inference_convolution.serves(query, key, value, given)
    if lean and look(difference_fits):
        kernel = inference_convolution.difference_kernel(given, weight, value)
        return inference_convolution.gated_mean(query, key, value, kernel, grid, key_mask, gate)
    key, value = hide(key, value, key_mask)

    def fast(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        if dense:
            return dense_mean(key, value, weight, grid, *seen, parts)
        return difference_mean(key, value, weight, grid, *seen)

    def safe(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return safe_conv_mean(key, value, weight, grid, *seen)
        return safe_mean(key, value, weight, grid, *seen, fits=look(one_shift_fits))

    fits = look(one_shift_fits if dense else difference_fits)
    return apply_gate(query, choose(fits, fast, safe, key, value, weight), gate, dtype)


def safe_conv_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> Tensor:
    """:func:`safe_mean`, one node of a compiled graph, but not of an exported one."""
    opaque = torch.compiler.is_compiling() and not decisions.repeating()
    mix = opaque_safe_mean if opaque else safe_mean
    return mix(key, value, weight, grid, global_connectivity, causal)


def aft_local_hard(query, key, value, *, window, grid, causal, key_mask, gate) -> Tensor:
    """O(T·log(s)·D) time: sliding sums that double their length."""
    dtype, tokens = value.dtype, value.shape[1]
    key, value = hide(key, value, key_mask)
    grid = (tokens,) if grid is None else tuple(grid)
    key, value = key.unflatten(1, grid), value.unflatten(1, grid)
    places = tuple(range(1, 1 + len(grid)))

    def fast(key: Tensor, value: Tensor) -> Tensor:
        weight = torch.exp(key - column_shift(key, places))
        return mean(*(_window_sums(x, window, grid, causal) for x in (weight * value, weight)))

    def safe(key: Tensor, value: Tensor) -> Tensor:
        return safe_window_mean(key, value, window, grid, causal)

    mixed = choose(spread(key, places) <= FAST_SPREAD, fast, safe, key, value)
    return apply_gate(query, mixed.flatten(1, len(grid)), gate, dtype)


def safe_window_mean(
    key: Tensor, value: Tensor, window: Window, grid: tuple[int, ...], causal: bool
) -> Tensor:
    """The mean over the hard window of key and value [B, *grid, D], for any finite key."""
    sums = _window_sums(leaf(key.double(), value.double()), window, grid, causal)
    return mean(sums.numerator, sums.denominator).to(key.dtype)


def _window_sums(x: Summable, window: Window, grid: tuple[int, ...], causal: bool) -> Summable:
    """Sums over the hard window of x [B, *grid, D]."""
    if len(grid) == 1:
        size = window if isinstance(window, int) else window[0]
        return sliding(x, size - 1, 0 if causal else size - 1, 1)
    rows, columns = (size // 2 for size in as_pair(window))
    if not causal:
        return sliding(sliding(x, columns - 1, columns, 2), rows - 1, rows, 1)
    if not decisions.repeating():  # as in `sliding`
        columns = min(columns, grid[1])
    # The right block is the left one of the row above and a column that may lie beyond the grid.
    left = sliding(sliding(pad(x, 0, columns, 2), columns - 1, 0, 2), rows - 1, 0, 1)
    right = move(pad(left, -columns, 0, 2), 1, 1)
    return merge(pad(left, 0, -columns, 2), right)


def aft_local_learned(
    query, key, value, pos_u, pos_v, *, window, grid, causal, key_mask, gate
) -> Tensor:
    """O(T·s·D) time: the numerator of aft_local over the sums of the weights and of the keys."""
    dtype, batch, parts = value.dtype, value.shape[0], term_parts(value)
    key, value = hide(key, value, key_mask)
    factors = _factors(pos_u, pos_v, key.dtype)
    band = local_band(*factors, window, grid, causal)._replace(parts=parts)
    seen = torch.ones_like(key[..., 0]) if key_mask is None else key_mask.to(key.dtype)
    mixed = normalized_mean(_columns(key), _columns(value), seen.T, band)
    return apply_gate(query, mixed.unflatten(1, (batch, -1)).transpose(0, 1), gate, dtype)
