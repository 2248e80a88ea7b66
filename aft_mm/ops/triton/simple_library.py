"""Causal AFT-simple of the Triton backend: the op, its shapes and its gradient as opaque nodes."""

from collections.abc import Sequence

from torch import Tensor

from . import simple_launch as launch
from .register import differentiated, register


def aft_simple(query, key, value, *, key_function, causal, key_mask, gate) -> Tensor:
    """O(T·D): running sums, causal and with softmax keys."""
    save = differentiated(query, key, value)
    return causal_simple(query, key, value, key_mask, gate, save)[0]


def causal_simple(
    query: Tensor | None, key: Tensor, value: Tensor, key_mask: Tensor | None, gate: str, save: bool
) -> tuple[Tensor, Tensor]:
    """Causal AFT-simple [B, T, D], and with `save` what its gradient needs."""
    return launch.causal_simple_forward(query, key, value, key_mask, gate, save)


def causal_simple_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    gate: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those of query, key and value that are wanted."""
    results = launch.causal_simple_backward(gradient, saved, query, key, value, key_mask, gate)
    return [x for x, needed in zip(results, wanted, strict=False) if needed]


def _empty(query, key, value, key_mask, gate, save):
    blocks = launch.count_blocks(value.shape[1]) if save else 0
    return value.new_empty(value.shape), launch.states(value, blocks)


causal_simple = register(causal_simple, causal_simple_backward, fake=_empty, name='aft_simple')
