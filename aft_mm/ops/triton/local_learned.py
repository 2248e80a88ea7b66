"""AFT-local-learned as three products, two of which compute denominators only.

``y = g(q) N / (Z D)`` (ICLR submission, eq. 8) is the output o of AFT-local times the ratio ``r = W
E / (Z D)`` ≤ 1. W E and o are those of AFT-local; D is its denominator for W = 1, Z that for keys
of 0, in one channel. The units of their logarithms cancel, so r is exact for all keys. The gradient
of r is that of the three λ.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .full_local import (
    INPUTS,
    MatmulCall,
    launch_backward,
    launch_forward,
    local_table,
    window_on,
)
from .tiling import choose_block, count_saved, make_band, split_saved
from .torch_ops import differentiated, register


def aft_local_learned(
    query, key, value, pos_u, pos_v, *, window, grid, causal, key_mask, gate
) -> Tensor:
    """Compute AFT-local-learned in O(T·s·D): products of AFT-local, and running sums of the keys."""
    save = differentiated(query, key, value, pos_u, pos_v)
    window, grid = window_on(window, grid)
    table = local_table(pos_u, pos_v, value, window, grid, causal, True)
    return local_learned(query, key, value, table, key_mask, window, grid, causal, gate, save)[0]


def _calls(key, value, table, key_mask, window, grid, causal) -> tuple[list[MatmulCall], list[int]]:
    """Return the products of W with (E v, E), of 1 with E and of W with 1, and what each saves."""
    block = choose_block(value, True)
    ones = (len(value) if key_mask is not None else min(len(value), 1)), value.shape[1], 1
    # Gradients of a key from two products are added before they are rounded.
    wide, zero = key.float(), value.new_zeros(ones)
    sources = [
        (wide, value, table, window, grid),
        (wide, value, table.new_zeros(1, 1), [0], None),
        (zero, zero, table, window, grid),
    ]
    calls, counts = [], []
    for keys, values, bias, near, places in sources:
        band = make_band(bias, values, near, places, causal, block.tile)
        calls.append(MatmulCall(None, keys, values, bias, key_mask, 'none', band, block))
        counts.append(count_saved(values, band, block.width))
    return calls, counts


def _mean_and_ratio(calls: list[MatmulCall], kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return o and r [B, T, D]."""
    weighted, plain, bias = (
        split_saved(x, call.value, call.band, call.block.width)
        for x, call in zip(kept, calls, strict=True)
    )
    log = (weighted.unit - plain.unit) + (weighted.log - plain.log) - bias.log
    return weighted.mean, log.exp_()


def _gate(query: Tensor | None, gate: str) -> Tensor | float:
    if gate == 'none':
        return 1.0
    return query.float().sigmoid() if gate == 'sigmoid' else query.float().relu()


def local_learned(query, key, value, table, key_mask, window, grid, causal, gate, save):
    """Return AFT-local-learned [B, T, D], and with `save` what its gradient needs."""
    calls, counts = _calls(key, value, table, key_mask, window, grid, causal)
    saved = value.new_empty(sum(counts), dtype=torch.float32)
    kept = saved.split(counts)
    for call, part in zip(calls, kept, strict=True):
        launch_forward(call, part)
    mean, ratio = _mean_and_ratio(calls, kept)
    output = (_gate(query, gate) * (mean * ratio)).to(value.dtype)
    return output, saved if save else saved.new_empty(0)


def local_learned_backward(
    gradient, saved, query, key, value, table, key_mask, window, grid, causal, gate, wanted
) -> list[Tensor | None]:
    calls, counts = _calls(key, value, table, key_mask, window, grid, causal)
    kept = saved.split(counts)
    mean, ratio = _mean_and_ratio(calls, kept)
    gradient, gates = gradient.float(), _gate(query, gate)
    grad_query = None
    if gate != 'none':
        slope = gates * (1 - gates) if gate == 'sigmoid' else (query > 0).float()
        grad_query = (gradient * mean * ratio * slope).to(query.dtype)
    grad_mean = gradient * gates * ratio
    grad_log = grad_mean * mean
    grad_bias = grad_log.sum(2, keepdim=True)
    if key_mask is None:
        grad_bias = grad_bias.sum(0, keepdim=True)
    zero = grad_log.new_zeros(())
    weighted = launch_backward(grad_mean, grad_log, kept[0], calls[0], wanted[3])
    plain = launch_backward(zero.expand_as(grad_log), -grad_log, kept[1], calls[1], False)
    bias = launch_backward(zero.expand_as(grad_bias), -grad_bias, kept[2], calls[2], wanted[3])
    grad_key = (weighted[1] + plain[1]).to(key.dtype)
    grad_table = weighted[3] + bias[3] if wanted[3] else None
    return [grad_query, grad_key, weighted[2], grad_table]


def _empty(query, key, value, table, key_mask, window, grid, causal, gate, save):
    counts = _calls(key, value, table, key_mask, window, grid, causal)[1]
    saved = value.new_empty(sum(counts) if save else 0, dtype=torch.float32)
    return value.new_empty(value.shape), saved


local_learned = register(
    local_learned, INPUTS, local_learned_backward, fake=_empty, public_name='aft_local_learned'
)
