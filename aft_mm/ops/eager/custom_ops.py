"""Functions that torch.compile must not trace, each as one node of a graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INPUTS = (
    'Tensor key, Tensor value, Tensor weight, SymInt[] grid, bool global_connectivity, bool causal'
)


def as_graph_node(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``function(key, value, weight, grid, global_connectivity, causal)`` as one graph node.

    `function` returns a tensor like `value`. Its gradient is a second node, which runs it again.
    """

    def backward(
        grad: Tensor, key: Tensor, value: Tensor, weight: Tensor, *options: Any
    ) -> tuple[Tensor, ...]:
        def of_tensors(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
            return function(key, value, weight, *options)

        grads = torch.func.vjp(of_tensors, key, value, weight)[1](grad)
        inputs = zip((key, value, weight), grads, strict=True)
        return tuple(torch.empty_like(x).copy_(grad) for x, grad in inputs)

    def forward(*inputs: Any) -> Tensor:
        return function(*inputs).contiguous()

    custom_op, schema = torch.library.custom_op, f'({INPUTS}) -> Tensor'
    node = custom_op(name, forward, mutates_args=(), schema=schema)
    schema = f'(Tensor grad, {INPUTS}) -> (Tensor, Tensor, Tensor)'
    backward_node = custom_op(f'{name}_backward', backward, mutates_args=(), schema=schema)

    @node.register_fake
    def _(key: Tensor, value: Tensor, weight: Tensor, *options: Any) -> Tensor:
        return value.new_empty(value.shape)

    @backward_node.register_fake
    def _(
        grad: Tensor, key: Tensor, value: Tensor, weight: Tensor, *options: Any
    ) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, (key, value, weight)))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.options = inputs[3:]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *backward_node(grad, *ctx.saved_tensors, *ctx.options), None, None, None

    node.register_autograd(differentiate, setup_context=setup_context)
    return node
