"""Functions that torch.compile must not trace, each as one node of a graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TENSORS = 'Tensor key, Tensor value, Tensor weight'
CONV_OPTIONS = ', SymInt[] grid, bool global_connectivity, bool causal'


def as_graph_node(
    name: str,
    function: Callable[..., Tensor],
    options: str = CONV_OPTIONS,
    like: Callable[..., Tensor] = lambda key, value, weight: value,
    gradients: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[..., Tensor]:
    """Return ``function(key, value, weight, *options)`` as one graph node.

    Its gradients are a second node, ``gradients(grad, key, value, weight, *options)``, by default
    one that runs `function` again. The result is of the shape of ``like(key, value, weight)``.
    """

    def run_again(
        grad: Tensor, key: Tensor, value: Tensor, weight: Tensor, *options: Any
    ) -> tuple[Tensor, ...]:
        def of_tensors(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
            return function(key, value, weight, *options)

        grads = torch.func.vjp(of_tensors, key, value, weight)[1](grad)
        inputs = zip((key, value, weight), grads, strict=True)
        return tuple(torch.empty_like(x).copy_(grad) for x, grad in inputs)

    def forward(*inputs: Any) -> Tensor:
        return function(*inputs).contiguous()

    custom_op, schema = torch.library.custom_op, f'({TENSORS}{options}) -> Tensor'
    node = custom_op(name, forward, mutates_args=(), schema=schema)
    schema = f'(Tensor grad, {TENSORS}{options}) -> (Tensor, Tensor, Tensor)'
    backward = gradients or run_again
    backward_node = custom_op(f'{name}_backward', backward, mutates_args=(), schema=schema)

    @node.register_fake
    def _(key: Tensor, value: Tensor, weight: Tensor, *options: Any) -> Tensor:
        return value.new_empty(like(key, value, weight).shape)

    @backward_node.register_fake
    def _(
        grad: Tensor, key: Tensor, value: Tensor, weight: Tensor, *options: Any
    ) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, (key, value, weight)))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.options = inputs[3:]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = backward_node(grad, *ctx.saved_tensors, *ctx.options)
        return *grads, *(None for _ in ctx.options)

    node.register_autograd(differentiate, setup_context=setup_context)
    return node
