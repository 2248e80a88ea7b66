"""The oracle: every op as the papers write it, in float64, with all ``[B, T, S, D]`` in memory.

``log W`` is a dense ``[h, T, S]`` or ``[B, h, T, S]`` tensor, −inf where W = 0. The other backends
are tested against it. `shared` are causal, key_mask and gate.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .geometry import Window, hard_mask, kernel_index, near_mask, near_radius
from .linear_terms import Maps

GATES = {'sigmoid': torch.sigmoid, 'relu': torch.relu}


def _apply_gate(query: Tensor | None, mixed: Tensor, gate: str, dtype: torch.dtype) -> Tensor:
    return (mixed if gate == 'none' else GATES[gate](query.double()) * mixed).to(dtype)


def _hide(
    key: Tensor, value: Tensor, key_mask: Tensor | None, fill: float = -torch.inf
) -> tuple[Tensor, Tensor]:
    key, value = key.double(), value.double()
    if key_mask is None:
        return key, value
    keep = key_mask.unsqueeze(-1)
    return key.masked_fill(~keep, fill), value.masked_fill(~keep, 0)


def _indices(num_targets: int, num_sources: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.arange(num_targets, device=device)[:, None],
        torch.arange(num_sources, device=device)[None, :],
    )


def _weights(key: Tensor, log_weight: Tensor) -> Tensor:
    """Return ``exp(w + k)`` [B, T, S, D] divided by its sum over S; 0 for rows that see nothing."""
    channels = key.shape[-1]
    heads = log_weight.shape[-3]
    per_channel = log_weight.repeat_interleave(channels // heads, -3).movedim(-3, -1)
    visible = key.detach()[:, None].masked_fill(per_channel == -torch.inf, -torch.inf)
    largest = visible.amax(2, keepdim=True)
    logits = key[:, None] - largest.masked_fill(largest == -torch.inf, 0) + per_channel
    shift = logits.detach().amax(2, keepdim=True)
    weights = torch.exp(logits - shift.masked_fill(shift == -torch.inf, 0))
    total = weights.sum(2, keepdim=True)
    return weights / total.masked_fill(total == 0, 1)


def _mix(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    dtype = value.dtype
    key, value = _hide(key, value, key_mask)
    if causal:
        targets, sources = log_weight.shape[-2:]
        target, source = _indices(targets, sources, key.device)
        log_weight = log_weight.masked_fill(source > target, -torch.inf)
    key = key.repeat_interleave(value.shape[-1] // key.shape[-1], -1)
    mixed = (_weights(key, log_weight) * value[:, None]).sum(2)
    return _apply_gate(query, mixed, gate, dtype)


def _near_bias(
    pos_u: Tensor, pos_v: Tensor | None, window: Window, grid: Sequence[int] | None
) -> Tensor:
    """``u vᵀ``, or without v the entry of the offset t' − t in row t of u; 0 outside the window."""
    target, source = _indices(len(pos_u), len(pos_u), pos_u.device)
    if pos_v is None:
        column = near_radius(window, grid) + source - target
        bias = pos_u.double().gather(1, column.clamp(0, pos_u.shape[1] - 1))
    else:
        bias = pos_u.double() @ pos_v.double().T
    return bias.masked_fill(~near_mask(target, source, window, grid), 0)


def aft_simple(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """``W = 1`` (eq. 5); relu keys: ``g(q) ⊙ Σ relu(k) v`` (ICLR submission eq. 3), relu2 eq. 6."""
    targets = key.shape[1] if query is None else query.shape[1]
    zeros = key.new_zeros(1, targets, key.shape[1], dtype=torch.float64)
    if key_function == 'softmax':
        return _mix(query, key, value, zeros, causal=causal, key_mask=key_mask, gate=gate)
    dtype = value.dtype
    key, value = _hide(key, value, key_mask, fill=0)
    if key_function == 'relu2':
        terms = torch.relu(query.double()[:, :, None] * key[:, None]) * value[:, None]
        if causal:
            target, source = _indices(targets, targets, key.device)
            terms = terms.masked_fill((source > target)[..., None], 0)
        return terms.sum(2).to(dtype)
    terms = torch.relu(key) * value
    mixed = terms.cumsum(1) if causal else terms.sum(1, keepdim=True).expand(-1, targets, -1)
    return _apply_gate(query, mixed, gate, dtype)


def aft_decay(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, **shared: Any
) -> Tensor:
    """``w = −λ |t − t'|`` with λ per channel."""
    target, source = _indices(key.shape[1], key.shape[1], key.device)
    log_weight = -decay.double()[:, None, None] * (target - source).abs()
    return _mix(query, key, value, log_weight, **shared)


def aft_full(
    query: Tensor | None, key: Tensor, value: Tensor, position_bias: Tensor, **shared: Any
) -> Tensor:
    """``W = exp(w)``, w dense (eq. 2)."""
    return _mix(query, key, value, position_bias.double()[None], **shared)


def aft_full_batched(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    num_heads: int | None,
    pair_mask: Tensor | None,
    **shared: Any,
) -> Tensor:
    """``W = exp(w)`` with a w per sample or per head, and 0 where `pair_mask` hides the pair."""
    bias = position_bias.double()
    if num_heads is None:
        bias = bias.unsqueeze(-3)
    if pair_mask is not None:
        bias = bias.masked_fill(~pair_mask.unsqueeze(1), -torch.inf)
    return _mix(query, key, value, bias, **shared)


def aft_local(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None,
    *,
    window: Window,
    grid: Sequence[int] | None,
    **shared: Any,
) -> Tensor:
    """``W = exp(w)`` inside the window, 1 outside (eq. 4); ``w = u vᵀ`` (eq. 7) or free."""
    bias = _near_bias(pos_u, pos_v, window, grid)
    return _mix(query, key, value, bias[None], **shared)


def aft_conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    **shared: Any,
) -> Tensor:
    """``W = exp(w[t' − t])`` per head inside the kernel, 1 (or 0) outside (eq. 6, 8)."""
    tokens = key.shape[1]
    index = kernel_index(*_indices(tokens, tokens, key.device), weight.shape[1:], grid)
    bias = weight.double().flatten(1)[:, index.clamp_min(0)]
    bias = bias.masked_fill(index < 0, 0 if global_connectivity else -torch.inf)
    return _mix(query, key, value, bias, **shared)


def aft_local_hard(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    grid: Sequence[int] | None,
    causal: bool,
    **shared: Any,
) -> Tensor:
    """``W = 1`` inside the hard window, 0 outside (ICLR submission, algorithms 1 and 2)."""
    tokens = key.shape[1]
    inside = hard_mask(*_indices(tokens, tokens, key.device), window, grid, causal)
    zeros = key.new_zeros(1, tokens, tokens, dtype=torch.float64)
    bias = zeros.masked_fill(~inside, -torch.inf)
    return _mix(query, key, value, bias, causal=False, **shared)


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
    """``y_t = g(q_t) ⊙ Σ_t' softmax(w_t)[t'] softmax(k)[t'] v_t'``, w = 0 outside (ICLR eq. 8)."""
    dtype, tokens = value.dtype, key.shape[1]
    key, value = _hide(key, value, key_mask)
    target, source = _indices(tokens, tokens, key.device)
    hidden = (source > target) if causal else torch.zeros_like(source > target)
    bias = _near_bias(pos_u, pos_v, window, grid).masked_fill(hidden, -torch.inf)
    equal_keys = key.new_zeros(key.shape[0], tokens, 1)
    if key_mask is not None:
        equal_keys = equal_keys.masked_fill(~key_mask.unsqueeze(-1), -torch.inf)
    local = _weights(equal_keys, bias[None])
    everywhere = key.new_zeros(1, tokens, tokens).masked_fill(hidden, -torch.inf)
    mixed = (local * _weights(key, everywhere) * value[:, None]).sum(2)
    return _apply_gate(query, mixed, gate, dtype)


LINEAR_FEATURES = {
    'elu': lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp_max(0))),
    'relu': torch.relu,
    'square': torch.square,
}


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: Maps,
    causal: bool,
    key_mask: Tensor | None,
    eps: float,
) -> Tensor:
    """``y_t = Σ φ(q_t)·φ(k_t') v_t' / (Σ φ(q_t)·φ(k_t') + eps)`` (arXiv 2006.16236, eq. 5)."""
    if isinstance(feature_map, str):
        feature_map = LINEAR_FEATURES[feature_map]
    maps = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    key, value, dtype = *_hide(key.flatten(2), value.flatten(2), key_mask, 0), value.dtype
    key, value = key.unflatten(2, (query.shape[2], -1)), value.unflatten(2, (query.shape[2], -1))
    weights = torch.einsum('bthd,bshd->bhts', maps[0](query.double()), maps[1](key))
    if key_mask is not None:
        weights = weights * key_mask[:, None, None]
    if causal:
        weights = weights.tril()
    total = weights.sum(-1, keepdim=True) + eps
    weights = weights / total.masked_fill(total == 0, torch.inf)
    return torch.einsum('bhts,bshm->bthm', weights, value).to(dtype)
