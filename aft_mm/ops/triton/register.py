"""Kernels as ops of torch: opaque nodes with shapes, a gradient and no second one.

On `torch.library.Library` and a bare autograd function: of a call that does nothing that takes 7 µs
of a CPU core without a gradient and 14 µs with one, where `custom_op` takes 10 µs and 25 µs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library('aft_mm', 'FRAGMENT')


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked for, so that the forward pass saves what it needs."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def register(
    forward: Callable,
    backward: Callable | None = None,
    *,
    fake: Callable,
    mutates: Sequence[str] = (),
    name: str = '',
) -> Callable:
    """The op ``aft_mm::<forward.__name__>``, differentiable if there is a `backward`.

    - forward(*tensors, *options, save: bool) -> (output, saved): `saved` is what `backward` needs
      and may be empty unless `save`. Without a `backward` any arguments and results do.
    - backward(gradient, saved, *tensors, *options, wanted: Sequence[bool]) -> list[Tensor]: the
      gradients of those of the tensors that are `wanted`, in their order, contiguous. It is an op
      of its own, whose gradient is a RuntimeError that says so of `name`.
    - fake: the results of `forward` as empty tensors, from the same arguments.
    - mutates: the tensors that `forward` writes into.
    """
    op = _define(forward, fake, mutates)
    written = [list(forward.__annotations__).index(tensor) for tensor in mutates]
    label = f'aft_mm::{forward.__name__}'
    if backward is None:
        _set_gradient(op, _refusing(op, f'{label} has no gradient'), written)
        return op
    tensors = sum('Tensor' in str(argument.type) for argument in op._schema.arguments)
    by_inputs = _define(backward, _like_wanted, ())
    message = (
        f'the gradient of {name} of the triton backend is differentiable once; '
        f'AFT_MM_BACKEND=eager serves second derivatives'
    )
    _set_gradient(by_inputs, _refusing(by_inputs, message))

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with torch._C._AutoDispatchBelowAutograd():
                output, saved = op(*inputs)
            *inputs, ctx.save = inputs
            ctx.options = inputs[tensors:]
            ctx.save_for_backward(saved, *inputs[:tensors])
            ctx.mark_non_differentiable(saved)
            ctx.set_materialize_grads(False)
            return output, saved

        @staticmethod
        def backward(ctx, gradient, _):
            wanted = list(ctx.needs_input_grad)
            if gradient is None:
                return (None,) * len(wanted)
            if not ctx.save:
                raise RuntimeError(f'{label} must be called with save=True for its gradient')
            inputs = *ctx.saved_tensors, *ctx.options, wanted[:tensors]
            gradients = iter(by_inputs(gradient, *inputs))
            return tuple(next(gradients) if needed else None for needed in wanted)

    _set_gradient(op, Differentiated)
    return op


def _define(function: Callable, fake: Callable, mutates: Sequence[str]) -> Any:
    """The op of the function's name and annotations, on every device and on shapes alone."""
    name = function.__name__
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    LIBRARY.impl(name, function, 'CompositeExplicitAutograd')
    torch.library.register_fake(f'aft_mm::{name}', fake, lib=LIBRARY)
    return getattr(torch.ops.aft_mm, name).default


def _set_gradient(
    op: Any, function: type[torch.autograd.Function], written: Sequence[int] = ()
) -> None:
    """`function` runs the op where a gradient may be asked for; autograd hears of what it wrote."""

    def run(*inputs):
        if written:
            torch.autograd.graph.increment_version([inputs[place] for place in written])
        if differentiated(*(x for x in inputs if isinstance(x, Tensor))):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    LIBRARY.impl(op._schema.name.split('::')[1], run, 'Autograd')


def _refusing(op: Any, message: str) -> type[torch.autograd.Function]:
    """The op, whose results give a RuntimeError when a gradient is asked for."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with torch._C._AutoDispatchBelowAutograd():
                return tuple(op(*inputs))

        @staticmethod
        def backward(ctx, *gradients):
            raise RuntimeError(message)

    return Refusing


def _like_wanted(gradient: Tensor, saved: Tensor, *inputs) -> list[Tensor]:
    """The results of a `backward` as empty tensors."""
    *inputs, wanted = inputs
    wanted = zip(inputs, wanted, strict=False)
    return [x.new_empty(x.shape) for x, needed in wanted if needed]
