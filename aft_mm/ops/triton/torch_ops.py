"""Registration of kernels as torch operators with shapes and a gradient that is differentiable once.

Uses `torch.library.Library` and a plain autograd function: an empty call takes 7 µs of CPU time
without a gradient and 14 µs with one, where `custom_op` takes 10 µs and 25 µs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library('aft_mm', 'FRAGMENT')


def differentiated(*tensors: Tensor | None) -> bool:
    """Return whether a gradient may be wanted, so that the forward pass must save tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def register(
    forward: Callable,
    backward: Callable | None = None,
    *,
    fake: Callable,
    mutates: Sequence[str] = (),
    name: str = '',
) -> Callable:
    """Register ``aft_mm::<forward.__name__>``, differentiable if there is a `backward`.

    Args:
        forward: (*tensors, *options, save: bool) -> (output, saved). `saved` is what `backward`
            needs and may be empty unless `save`. Without a `backward`, any signature.
        backward: (gradient, saved, *tensors, *options, wanted: Sequence[bool]) -> list[Tensor], the
            contiguous gradients of the tensors that are `wanted`. Registered as an operator whose
            own gradient is a RuntimeError.
        fake: the results of `forward` as empty tensors, from the same arguments.
        mutates: names of the tensors that `forward` writes into.
        name: the name of the op in the error for a second gradient.

    Returns:
        The operator.
    """
    op = _define(forward, fake, mutates)
    written = [list(forward.__annotations__).index(tensor) for tensor in mutates]
    label = f'aft_mm::{forward.__name__}'
    if backward is None:
        _set_gradient(op, _refusing(op, f'{label} has no gradient'), written)
        return op
    tensors = sum('Tensor' in str(argument.type) for argument in op._schema.arguments)
    grad_op = _define(backward, _like_wanted, ())
    message = (
        f'the gradient of {name} of the triton backend is differentiable once; '
        f'AFT_MM_BACKEND=eager supports second derivatives'
    )
    _set_gradient(grad_op, _refusing(grad_op, message))

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
            gradients = iter(grad_op(gradient, *inputs))
            return tuple(next(gradients) if needed else None for needed in wanted)

    _set_gradient(op, Differentiated)
    return op


def _define(function: Callable, fake: Callable, mutates: Sequence[str]) -> Any:
    """Define an operator with the name and annotations of `function`, and its shape function."""
    name = function.__name__
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    LIBRARY.impl(name, function, 'CompositeExplicitAutograd')
    torch.library.register_fake(f'aft_mm::{name}', fake, lib=LIBRARY)
    return getattr(torch.ops.aft_mm, name).default


def _set_gradient(
    op: Any, function: type[torch.autograd.Function], written: Sequence[int] = ()
) -> None:
    """Run `function` where a gradient may be wanted, and mark written tensors as modified."""

    def run(*inputs):
        if written:
            torch.autograd.graph.increment_version([inputs[place] for place in written])
        if differentiated(*(x for x in inputs if isinstance(x, Tensor))):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    LIBRARY.impl(op._schema.name.split('::')[1], run, 'Autograd')


def _refusing(op: Any, message: str) -> type[torch.autograd.Function]:
    """Return a function that runs the op and raises RuntimeError in its backward pass."""

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
    """Return the results of a `backward` as empty tensors."""
    *inputs, wanted = inputs
    wanted = zip(inputs, wanted, strict=False)
    return [x.new_empty(x.shape) for x, needed in wanted if needed]
