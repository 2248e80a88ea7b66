from collections.abc import Sequence

import torch
from torch import Tensor

from aft_mm.checks import check_flag, check_int, check_number, refuse

from .checks import FLOATS, check_lengths, check_mask, check_tensor
from .dispatch import implementation
from .eager.linear import linear_attention_sums
from .linear_terms import LinearState, Maps, resolve
from .state import check_position, use_up
from .tracing import no_autocast


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: Maps = 'elu',
    causal: bool = False,
    key_mask: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute attention whose weights are products of features (arXiv 2006.16236, eq. 5 and 9).

    ``y_t = φ(q_t)ᵀ s_t / (φ(q_t)ᵀ z_t + eps)``, ``s_t = Σ φ(k_t') v_t'ᵀ``, ``z_t = Σ φ(k_t')``, in
    float32 or float64.

    Args:
        query: [B, T, h, d].
        key: [B, S, h, d], S = T if causal.
        value: [B, S, h, m].
        feature_map: φ: 'elu' for ``elu(x) + 1``, 'relu', 'square' for ``x²``, or a function without
            parameters from ``[..., d]`` to non-negative ``[..., d']``; a pair for queries and keys.
        causal: Whether sums run over t' ≤ t.
        key_mask: bool [B, S], True for keys to keep. Hidden ones may hold NaN or inf and get a
            gradient of 0.
        eps: Added to the denominator, 0 or larger.

    Returns:
        [B, T, h, m] in the dtype of value; 0 for a row whose weights are all 0.

    Raises:
        ValueError: If the arguments do not fit together, eps or, on a CPU, a feature is negative.
    """
    _check(query, key, value, causal, key_mask)
    check_number('eps', eps, 0)
    resolve(feature_map)
    tensors = (query, key, value)
    options = dict(feature_map=feature_map, causal=causal, key_mask=key_mask, eps=eps)
    if value.shape[0] == 0:
        zero = sum(x.sum() for x in tensors)  # a gradient of 0 for every tensor
        return value.new_empty(0, query.shape[1], *value.shape[2:]) + zero
    with no_autocast(value):
        _, run = implementation('linear_attention', tensors, options)
        result: Tensor = run(*tensors, **options)
        return result


def linear_attention_init_state(
    batch_size: int,
    num_heads: int,
    num_features: int,
    channels: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> LinearState:
    """Return empty sums s [B, h, d', m] and z [B, h, d'] with d' = num_features."""
    check_int('batch_size', batch_size, 0)
    check_int('num_heads', num_heads, 1)
    check_int('num_features', num_features, 1)
    check_int('channels', channels, 1)
    if dtype not in FLOATS:
        refuse('dtype', 'float64, float32, bfloat16 or float16', dtype)
    sums = torch.zeros(
        batch_size, num_heads, num_features, channels + 1, device=device, dtype=dtype
    )
    return LinearState(sums, torch.zeros(batch_size, dtype=torch.long, device=device))


@torch.no_grad()
def linear_attention_step(
    state: LinearState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: Maps = 'elu',
    eps: float = 0.0,
) -> tuple[Tensor, LinearState]:
    """Compute one token of causal :func:`linear_attention` in O(d'·m) per head (eq. 16 to 20).

    Args:
        state: The previous state, which must not be used again.
        query, key: [B, h, d].
        value: [B, h, m].

    Returns:
        y [B, h, m] and the next state.
    """
    _check_state(state, (), query=query, key=key, value=value)
    check_position(state.position)
    check_number('eps', eps, 0)
    options = dict(feature_map=feature_map, eps=eps)
    tensors = (query, key, value)
    with no_autocast(value):
        _, run = implementation('linear_attention_step', tensors, options)
        mixed, following = run(state, *tensors, **options)
    use_up(state.position)
    return mixed, following


@torch.no_grad()
def linear_attention_prefill(
    state: LinearState, key: Tensor, value: Tensor, lengths: Tensor, *, feature_map: Maps = 'elu'
) -> LinearState:
    """Return the state after the first lengths[b] tokens of each prompt, in one parallel pass.

    Args:
        state: A fresh state.
        key: [B, L, h, d].
        value: [B, L, h, m].
        lengths: As for :func:`aft_mm.ops.prefill`.

    Raises:
        ValueError: If the state is used or of other sizes, or a length is outside 0 to L.
    """
    check_tensor('key', key)
    _check_state(state, key.shape[1:2], key=key, value=value)
    tokens = key.shape[1]
    check_lengths(lengths, state.position, tokens)
    keep = torch.arange(tokens, device=key.device) < lengths[:, None]
    with no_autocast(value):
        sums = linear_attention_sums(key, value, keep, state.sums.dtype, feature_map=feature_map)
    return LinearState(sums, lengths.to(state.position, copy=True))


def _check(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, key_mask: Tensor | None
) -> None:
    check_tensor('value', value)
    check_tensor('key', key, value)
    check_tensor('query', query, value)
    check_flag('causal', causal)
    shapes = [list(x.shape) for x in (query, key, value)]
    is_4d = all(len(shape) == 4 and 0 not in shape[1:] for shape in shapes)
    same_heads = is_4d and (query.shape[0], query.shape[2:]) == (key.shape[0], key.shape[2:])
    if not same_heads or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            'query must be [B, T, h, d], key [B, S, h, d] and value [B, S, h, m] with sizes of '
            f'1 or more, got {shapes[0]}, {shapes[1]} and {shapes[2]}'
        )
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            f'query and key must have the same length here, got T={query.shape[1]} and '
            f'S={key.shape[1]}'
        )
    check_mask(key_mask, key)


def _check_state(state: LinearState, length: Sequence[int], **tokens: Tensor) -> None:
    """Check (query,) key and value [B, *length, h, channels] against the state."""
    if not isinstance(state, LinearState):
        raise ValueError(f'state must be a LinearState, got {type(state).__name__}')
    for name, x in tokens.items():
        check_tensor(name, x, state.sums)
    batch, heads, _, channels = state.sums.shape
    lead, dims = (batch, *length, heads), tokens['key'].shape[-1:]
    expected = [*[(*lead, *dims)] * (len(tokens) - 1), (*lead, channels - 1)]
    if 0 in (*length, *dims) or [x.shape for x in tokens.values()] != expected:
        sizes = f'{batch}, {"L, " * len(length)}{heads}'
        *keys, _ = tokens
        raise ValueError(
            f'{" and ".join(keys)} must be [{sizes}, d] and value [{sizes}, {channels - 1}] with '
            'sizes of 1 or more as the state was made for, got '
            f'{" and ".join(str(list(x.shape)) for x in tokens.values())}'
        )
