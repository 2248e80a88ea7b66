"""Causal AFT-simple of the Triton backend: the op, its shapes and its gradient as opaque nodes."""

import torch
from torch import Tensor

from . import simple_launch as launch
from .common import differentiated, once


def aft_simple(query, key, value, *, key_function, causal, key_mask, gate) -> Tensor:
    """O(T·D): running sums, causal and with softmax keys."""
    save = differentiated(query, key, value)
    return causal_simple(query, key, value, key_mask, gate, save)[0]


@torch.library.custom_op('aft_mm::causal_simple', mutates_args=())
def causal_simple(
    query: Tensor | None, key: Tensor, value: Tensor, key_mask: Tensor | None, gate: str, save: bool
) -> tuple[Tensor, Tensor]:
    """Causal AFT-simple [B, T, D], and with `save` what its gradient needs."""
    return launch.causal_simple_forward(query, key, value, key_mask, gate, save)


@torch.library.custom_op('aft_mm::causal_simple_backward', mutates_args=())
def causal_simple_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    gate: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query (nothing without one), key and value."""
    by_query, by_key, by_value = launch.causal_simple_backward(
        gradient, saved, query, key, value, key_mask, gate
    )
    return key.new_empty(0) if by_query is None else by_query, by_key, by_value


@causal_simple.register_fake
def _(query, key, value, key_mask, gate, save):
    blocks = launch.count_blocks(value.shape[1]) if save else 0
    return value.new_empty(value.shape), launch.states(value, blocks)


@causal_simple_backward.register_fake
def _(gradient, saved, query, key, value, key_mask, gate):
    by_query = key.new_empty(0) if query is None else query.new_empty(query.shape)
    return by_query, key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx, inputs, output) -> None:
    query, key, value, key_mask, ctx.gate, ctx.save = inputs
    ctx.save_for_backward(output[1], query, key, value, key_mask)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient: Tensor | None, _):
    if gradient is None:
        return (None,) * 6
    if not ctx.save:
        raise RuntimeError('aft_mm::causal_simple must be called with save=True for its gradient')
    by_query, by_key, by_value = causal_simple_backward(gradient, *ctx.saved_tensors, ctx.gate)
    return None if ctx.saved_tensors[1] is None else by_query, by_key, by_value, None, None, None


causal_simple.register_autograd(_backward, setup_context=_setup_context)
causal_simple_backward.register_autograd(once('aft_simple'))
