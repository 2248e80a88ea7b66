"""Linear attention: the public op and its steps."""

import torch
from torch import Tensor

from .dispatch import implementation, no_autocast
from .eager.linear import linear_attention_sums
from .linear_terms import FeatureMap, LinearState, resolve
from .state import check_position, use_up

__all__ = [
    'LinearState',
    'linear_attention',
    'linear_attention_init_state',
    'linear_attention_prefill',
    'linear_attention_step',
]

Maps = str | FeatureMap | tuple[FeatureMap, FeatureMap]


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
    """Attention whose weights are products of features (arXiv 2006.16236, eq. 5 and 9).

    ``y_t = φ(q_t)ᵀ s_t / (φ(q_t)ᵀ z_t + eps)``, ``s_t = Σ φ(k_t') v_t'ᵀ``, ``z_t = Σ φ(k_t')``,
    sums over t' ≤ t if causal; a row whose weights are all 0, or that sees nothing, gives 0. Sums
    are float32, float64 for float64. Causal, the gradient needs the inputs and outputs and next to
    nothing beside them (algorithm 1); it can be taken once.

    Args:
        query [B, T, h, d], key [B, S, h, d], value [B, S, h, m]; causal: S = T.
        feature_map: φ, 'elu' for ``elu(x) + 1``, 'relu', 'square' for ``x²``, or a function of
            ``[..., d]`` without parameters that gives ``[..., d']``, none of it negative; a pair of
            functions for queries and keys.
        key_mask: bool [B, S], True for keys to keep; hidden keys and values may hold NaN or inf and
            get zero gradient.
        eps: added to the denominator, as implementations do that divide by it anyway.

    Returns [B, T, h, m] in the type of value. Raises ValueError for arguments that do not fit
    together, for a negative eps and, on a CPU, a negative feature.
    """
    _check(query, key, value, causal, key_mask)
    _check_eps(eps)
    resolve(feature_map)
    tensors = (query, key, value)
    options = dict(feature_map=feature_map, causal=causal, key_mask=key_mask, eps=eps)
    if value.shape[0] == 0:
        nothing = sum(x.sum() for x in tensors)
        return value.new_empty(0, query.shape[1], *value.shape[2:]) + nothing
    # Autocast would turn the float32 products inside the op back into bfloat16.
    with no_autocast(value):
        return implementation('linear_attention', tensors, options)(*tensors, **options)


def linear_attention_init_state(
    batch_size: int,
    num_heads: int,
    num_features: int,
    channels: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> LinearState:
    """Empty sums s [B, h, d', m] and z [B, h, d'], d' the number of features."""
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
    """One token of causal :func:`linear_attention` in O(d'·m) per head (eq. 16 to 20).

    query, key [B, h, d], value [B, h, m] -> y [B, h, m] and the next state; `state` is used up.
    Raises ValueError for a token of another batch, heads or channels than the state's.
    """
    _check_state(state, key, value, 'a step')
    check_position(state.position)
    _check_eps(eps)
    options = dict(feature_map=feature_map, eps=eps)
    tensors = (query, key, value)
    with no_autocast(value):
        run = implementation('linear_attention_step', tensors, options)
        mixed, following = run(state, *tensors, **options)
    use_up(state.position)
    return mixed, following


@torch.no_grad()
def linear_attention_prefill(
    state: LinearState, key: Tensor, value: Tensor, lengths: Tensor, *, feature_map: Maps = 'elu'
) -> LinearState:
    """The state after the first lengths[b] tokens of key [B, L, h, d] and value [B, L, h, m].

    `state` is fresh; tokens past the lengths [B] are padding, NaN allowed. Raises ValueError for a
    state that has taken a token or was made for other sizes, and for lengths outside 0 … L.
    """
    _check_state(state, key[:, 0], value[:, 0], 'a prompt')
    tokens = key.shape[1]
    if lengths.shape != state.position.shape or (lengths < 0).any() or (lengths > tokens).any():
        raise ValueError(
            f'lengths must be {len(state.position)} ints of 0 to {tokens}, got {lengths.tolist()}'
        )
    if state.position.any():
        raise ValueError(f'state must be fresh for prefill, got one at {state.position.tolist()}')
    keep = torch.arange(tokens, device=key.device) < lengths[:, None]
    with no_autocast(value):
        sums = linear_attention_sums(key, value, keep, state.sums.dtype, feature_map=feature_map)
    return LinearState(sums, lengths.to(state.position, copy=True))


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f'eps must be 0 or larger, got {eps!r}')


def _check(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, key_mask: Tensor | None
) -> None:
    shapes = [list(x.shape) for x in (query, key, value)]
    fits = all(len(shape) == 4 and 0 not in shape[1:] for shape in shapes)
    if not fits or key.shape[:3] != value.shape[:3] or not _same_heads(query, key):
        raise ValueError(
            'query must be [B, T, h, d], key [B, S, h, d] and value [B, S, h, m] with sizes of '
            f'1 or more, got {shapes[0]}, {shapes[1]} and {shapes[2]}'
        )
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            f'query and key must have the same length here, got T={query.shape[1]} and '
            f'S={key.shape[1]}'
        )
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != key.shape[:2]):
        raise ValueError(
            f'key_mask must be bool {list(key.shape[:2])} with True for keys to keep, '
            f'got {key_mask.dtype} {list(key_mask.shape)}'
        )


def _same_heads(query: Tensor, key: Tensor) -> bool:
    return query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:]


def _check_state(state: LinearState, key: Tensor, value: Tensor, what: str) -> None:
    if not isinstance(state, LinearState):
        raise ValueError(f'state must be a LinearState, got {type(state).__name__}')
    batch, heads, _, channels = state.sums.shape
    if value.shape != (batch, heads, channels - 1) or key.shape[:2] != (batch, heads):
        raise ValueError(
            f'key and value of {what} must have the batch, heads and channels of the state, '
            f'{batch}, {heads} and {channels - 1}, got {list(key.shape)} and {list(value.shape)}'
        )
