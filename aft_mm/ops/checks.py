"""Checks of the arguments of the public ops; those of plain values are in `aft_mm/checks.py`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aft_mm.checks import check_choice, check_flag, check_sizes, is_int, per_dimension, refuse

from .gates import Gate, check_gate, in_kernels
from .geometry import Window, near_radius, split_joined

#: Names the backends to use, see `dispatch.py`.
ENVIRONMENT_VARIABLE = 'AFT_MM_BACKEND'
KEY_FUNCTIONS = ('softmax', 'relu', 'relu2')
# Sums are float32, or float64.
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensor(name: str, x: Any, like: Tensor | None = None) -> None:
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        refuse(name, 'a tensor of float64, float32, bfloat16 or float16', x)
    check_dense(name, x)
    if like is not None and x.device != like.device:
        raise ValueError(f'{name} must be on {like.device} with the others, got {x.device}')


def check_dense(name: str, x: Tensor) -> None:
    if x.is_nested:
        hint = 'such as sequences in one row with cu_seqlens'
        raise ValueError(f'{name} must be dense, {hint}, got a nested tensor')
    if x.layout != torch.strided:
        raise ValueError(f'{name} must be dense, got a sparse tensor')


def has_shape(x: Tensor, shape: Sequence[int]) -> bool:
    """Return whether x has this shape; torch.compile does not compare tuples of open sizes."""
    return x.dim() == len(shape) and all(a == b for a, b in zip(x.shape, shape, strict=True))


def check_decay(decay: Any, value: Tensor) -> None:
    check_tensor('decay', decay, value)
    if not has_shape(decay, value.shape[-1:]):
        refuse('decay', f'[{value.shape[-1]}], a number per channel of value', decay)


def check_num_heads(num_heads: int, embed_dims: int) -> None:
    if not is_int(num_heads) or num_heads < 1 or embed_dims % num_heads:
        refuse('num_heads', f'an int that divides embed_dims={embed_dims}', num_heads)


def check_key_function(key_function: str, gate: Any) -> None:
    check_choice('key_function', key_function, KEY_FUNCTIONS)
    if key_function == 'relu2' and gate != 'relu':
        raise ValueError(f"gate must be 'relu' for key_function='relu2', got {gate!r}")


def check_mask(key_mask: Tensor | None, key: Tensor) -> None:
    if key_mask is None:
        return
    is_bool = isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool
    if not is_bool or not has_shape(key_mask, key.shape[:2]):
        refuse('key_mask', f'bool {list(key.shape[:2])} with True for tokens to keep', key_mask)
    if key_mask.device != key.device:
        raise ValueError(f'key_mask must be on {key.device} with the tokens, got {key_mask.device}')


def _check_query(query: Tensor | None, value: Tensor, gate: Gate) -> None:
    if not in_kernels(gate):
        check_gate(gate)
    if (query is None) != (gate == 'none'):
        given = 'no query' if query is None else 'a query'
        raise ValueError(
            f"query must be None exactly for gate='none', got {given} with gate={gate!r}"
        )
    if query is None:
        return
    check_tensor('query', query, value)
    same_dims = query.dim() == value.dim() and query.shape[0] == value.shape[0]
    if not same_dims or query.shape[-1] != value.shape[-1] or 0 in query.shape[1:]:
        raise ValueError(
            f'query must be [B, T, D] with the B and D of value and T of 1 or more, got query '
            f'{list(query.shape)} and value {list(value.shape)}'
        )


def check_tokens(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    gate: Gate,
    same_length: bool,
    heads: int | None = None,
) -> None:
    """Check query [B, T, D], key [B, S, D or heads], value [B, S, D] and key_mask [B, S].

    T must be S with `same_length` or if causal.
    """
    check_tensor('value', value)
    check_tensor('key', key, value)
    if not isinstance(causal, bool):
        check_flag('causal', causal)
    same_tokens = value.dim() == 3 and key.dim() == 3 and key.shape[:2] == value.shape[:2]
    if not same_tokens or 0 in value.shape[1:]:
        raise ValueError(
            f'key and value must be [B, S, channels] with the same B and S, and S and channels of '
            f'1 or more, got {list(key.shape)} and {list(value.shape)}'
        )
    channels = value.shape[-1]
    if heads is None and key.shape[-1] != channels:
        raise ValueError(f'key must have the {channels} channels of value, got {key.shape[-1]}')
    if heads is not None and (key.shape[-1] != heads or heads < 1 or channels % heads):
        raise ValueError(
            f'the {heads} heads of weight must equal the channels of key and divide those of '
            f'value, got key {key.shape[-1]} and value {channels}'
        )
    _check_query(query, value, gate)
    if query is not None and (same_length or causal) and query.shape[1] != key.shape[1]:
        raise ValueError(
            f'query and key must have the same length here, got T={query.shape[1]} and '
            f'S={key.shape[1]}'
        )
    if key_mask is not None:
        check_mask(key_mask, key)


def check_joined(qkv: Tensor, weight: Tensor, gate: Gate) -> tuple[Tensor | None, Tensor, Tensor]:
    """Check [B, T, 2D + h], without a gate [B, T, h + D]; return query, key and value."""
    check_tensor('weight', weight)
    check_tensor('qkv', qkv, weight)
    heads = weight.shape[0] if weight.dim() else 0
    others, parts = qkv.shape[-1] - heads, 1 if gate == 'none' else 2
    if qkv.dim() != 3 or others < parts or others % parts:
        sizes = f'{"2D" if parts > 1 else "D"} + {heads}'
        raise ValueError(f'qkv must be [B, T, {sizes}], got {list(qkv.shape)}')
    return split_joined(qkv, heads, gate)


def check_step(
    query: Tensor | None, key: Tensor, value: Tensor, gate: Gate, keys: Tensor, values: Tensor
) -> None:
    check_tensor('value', value, values)
    check_tensor('key', key, value)
    _check_query(query, value, gate)
    allowed = (keys.shape[0], keys.shape[2]), (values.shape[0], values.shape[2])
    if (key.shape, value.shape) != allowed:
        raise ValueError(
            f'key and value of a step must be {list(allowed[0])} and {list(allowed[1])} as the '
            f'state was made for, got {list(key.shape)} and {list(value.shape)}'
        )


def check_prefill(
    key: Tensor, value: Tensor, lengths: Tensor, position: Tensor, keys: Tensor, values: Tensor
) -> None:
    check_tensor('key', key, keys)
    check_tensor('value', value, keys)
    is_prompt = key.dim() == 3 and key.shape[:2] == value.shape[:2] and key.shape[1] > 0
    if not is_prompt or [x.shape[::2] for x in (key, value)] != [
        x.shape[::2] for x in (keys, values)
    ]:
        batch = len(keys)
        raise ValueError(
            f'key and value of a prompt must be [{batch}, L, {keys.shape[2]}] and [{batch}, L, '
            f'{values.shape[2]}] with L ≥ 1 as the state was made for, got {list(key.shape)} and '
            f'{list(value.shape)}'
        )
    check_lengths(lengths, position, key.shape[1])


def check_lengths(lengths: Tensor, position: Tensor, tokens: int) -> None:
    """Check the lengths [B] of prompts, at most `tokens`, and that their state is fresh."""
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int64, torch.int32):
        refuse('lengths', 'a tensor of ints [B]', lengths)
    if torch.compiler.is_compiling():  # a graph cannot read values
        return
    if lengths.shape != position.shape or (lengths < 0).any() or (lengths > tokens).any():
        raise ValueError(
            f'lengths must be {len(position)} ints of 0 to {tokens}, got {lengths.tolist()}'
        )
    if position.any():
        raise ValueError(f'state must be fresh for prefill, got one at {position.tolist()}')


def check_terms(sums: Tensor, value: Tensor, key_function: str) -> None:
    """Check that a state holds the sums of this key function; relu2 has two."""
    terms = 2 if key_function == 'relu2' else 1
    if sums.shape[-1] != terms * value.shape[-1]:
        raise ValueError(
            f'state must be made with the key_function of the step, {key_function!r}, which sums '
            f'{terms * value.shape[-1]} channels, but it holds {sums.shape[-1]}'
        )


def check_buffer(size: int, needed: int) -> None:
    if size != needed:
        raise ValueError(
            f'state must be made with the window, kernel_size and grid of the step, which need '
            f'{needed} tokens, but it holds {size}'
        )


def check_grid(
    grid: Sequence[int],
    tokens: int | None = None,
    dims: Sequence[int] = (1, 2, 3),
    kernel: Sequence[int] | None = None,
) -> None:
    """Check for as many sizes as one of `dims`, `tokens` tokens, and the kernel of AFT-conv."""
    # check_sizes is slow, so only for the message and for the sizes of a graph.
    if type(grid) not in (tuple, list) or len(grid) not in dims:
        check_sizes('grid', grid, dims)
    for size in grid:
        if type(size) is not int or size < 1:
            check_sizes('grid', grid, dims)
    if tokens is not None and math.prod(grid) != tokens:
        raise ValueError(
            f'grid {tuple(grid)} holds {math.prod(grid)} tokens, but the sequence has {tokens}'
        )
    if kernel is None:
        return
    if len(kernel) != len(grid):
        raise ValueError(
            f'weight must be [heads, *kernel] with a kernel of {len(grid)} dimensions for grid '
            f'{tuple(grid)}, got kernel {tuple(kernel)}'
        )
    for size in kernel:
        if size % 2 == 0:
            raise ValueError(f'weight must have odd kernel sizes, got {tuple(kernel)}')


def check_window(window: Window, grid: Sequence[int] | None) -> None:
    per_dimension('window', window, 1 if grid is None else len(grid), 0)


def check_hard_window(window: Window, grid: Sequence[int] | None) -> None:
    """Check for sizes of 1 or larger, in 2-d even, so that a token sees itself."""
    sizes = per_dimension('window', window, 1 if grid is None else len(grid))
    if len(sizes) == 2 and any(size % 2 for size in sizes):
        refuse('window', 'even in both dimensions of a grid (H, W)', window)


def check_factors(pos_u: Tensor, pos_v: Tensor, targets: int, sources: int) -> None:
    same_rank = pos_u.dim() == 2 and pos_v.dim() == 2 and pos_u.shape[1] == pos_v.shape[1]
    if not same_rank or len(pos_u) != targets or len(pos_v) != sources:
        raise ValueError(
            f"pos_u and pos_v must be [{targets}, d'] and [{sources}, d'], "
            f'got {list(pos_u.shape)} and {list(pos_v.shape)}'
        )


def check_free_bias(
    pos_u: Tensor, tokens: int, window: Window, grid: Sequence[int] | None, causal: bool
) -> None:
    """Check a free bias on a 1-d grid: a row per token, a column per visible offset."""
    if grid is not None and len(grid) != 1:
        raise ValueError(f'pos_v must be given for a grid of 2 dimensions, got None for {grid!r}')
    size = near_radius(window, grid) + 1
    if size < 1:
        raise ValueError(f'window must be 1 or larger without pos_v, got {window!r}')
    offsets = size if causal else 2 * size - 1
    if not has_shape(pos_u, (tokens, offsets)):
        raise ValueError(
            f'pos_u without pos_v must be [{tokens}, {offsets}], a column per offset of the '
            f'window {window!r} with causal={causal}, got {list(pos_u.shape)}'
        )


def check_position_bias(
    position_bias: Tensor,
    query: Tensor | None,
    key: Tensor,
    causal: bool,
    num_heads: int | None = None,
) -> None:
    """Check w [T, S] or [B, T, S], with heads [h, T, S] or [B, h, T, S]."""
    batch, sources, channels = key.shape
    head: tuple[int, ...] = ()
    if num_heads is not None:
        check_num_heads(num_heads, channels)
        head = (num_heads,)
    if query is not None:
        targets = query.shape[1]
    else:
        targets = sources if causal or position_bias.dim() < 2 else position_bias.shape[-2]
    shared, per_sample = (*head, targets, sources), (batch, *head, targets, sources)
    fits = has_shape(position_bias, shared) or has_shape(position_bias, per_sample)
    if not fits or not targets:
        names = 'T, S' if num_heads is None else 'h, T, S'
        raise ValueError(
            f'position_bias must be [{names}] = {list(shared)} or [B, {names}] = '
            f'{list(per_sample)} with num_heads={num_heads}, got {list(position_bias.shape)}'
        )


def check_pair_mask(pair_mask: Tensor, position_bias: Tensor, key: Tensor) -> None:
    expected = [key.shape[0], *position_bias.shape[-2:]]
    is_bool = isinstance(pair_mask, Tensor) and pair_mask.dtype == torch.bool
    if not is_bool or not has_shape(pair_mask, expected):
        refuse('pair_mask', f'bool {expected} with True for pairs to keep', pair_mask)
    if pair_mask.device != key.device:
        raise ValueError(
            f'pair_mask must be on {key.device} with the tokens, got {pair_mask.device}'
        )
