"""Registration of kernels as torch operators; their overhead per call is below `custom_op`'s."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library('aft_mm', 'FRAGMENT')
# The first inputs of an op in its schema.
TOKENS = 'Tensor? query, Tensor key, Tensor value'


def differentiated(*tensors: Tensor | None) -> bool:
    """Return whether a gradient may be wanted, so that the forward pass must save tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def register(
    forward: Callable[..., Any],
    inputs: str,
    backward: Callable[..., Any] | None = None,
    *,
    fake: Callable[..., Any],
    public_name: str = '',
    backend: str = 'triton',
    like: Callable[[Tensor], Tensor] = lambda x: x.new_empty(x.shape),
) -> Callable[..., Any]:
    """Register ``aft_mm::<forward.__name__>``, differentiable if there is a `backward`.

    Args:
        forward: (*tensors, *options, save) -> (output, saved), not called for an empty batch.
            `saved` may be empty unless `save`, which is left out without a `backward`.
        inputs: Tensors and options as in a schema of torch. Those with ``(a!)`` are written to.
        backward: (gradient, saved, *tensors, *options, wanted: Sequence[bool]) -> the gradients of
            the tensors, of which those not `wanted` may be None. Its own gradient is a
            RuntimeError.
        fake: The results of `forward` as empty tensors, from the same arguments.
        public_name: The name of the op in the error for a second gradient.
        backend: The backend in that error.
        like: An empty tensor of the layout that the gradient of a tensor has.
    """
    name = forward.__name__
    label = f'aft_mm::{name}'

    def launch(*inputs: Any) -> Any:
        if not len(inputs[1]):  # an empty batch
            return fake(*inputs)
        with torch.cuda.device_of(inputs[1]):
            return forward(*inputs)

    if backward is None:
        op = _define(name, f'({inputs}) -> (Tensor, Tensor)', launch, fake)
        written = [i for i, argument in enumerate(inputs.split(', ')) if '!' in argument]
        _set_gradient(op, _refusing(op, f'{label} has no gradient'), written)
        return op
    op = _define(name, f'({inputs}, bool save) -> (Tensor, Tensor)', launch, fake)
    tensors = inputs.count('Tensor')

    def like_wanted(gradient: Tensor, saved: Tensor, *inputs: Any) -> list[Tensor]:
        pairs = zip(inputs[:-1], inputs[-1], strict=False)
        return [like(x) for x, needed in pairs if needed]

    def gradients(gradient: Tensor, *inputs: Any) -> list[Tensor]:
        if not len(gradient):
            return [x.zero_() for x in like_wanted(gradient, *inputs)]
        with torch.cuda.device_of(gradient):
            pairs = zip(backward(gradient, *inputs), inputs[-1], strict=False)
        return [x for x, needed in pairs if needed and x is not None]

    schema = f'(Tensor gradient, Tensor saved, {inputs}, bool[] wanted) -> Tensor[]'
    grad_op = _define(f'{name}_backward', schema, gradients, like_wanted)
    message = (
        f'the gradient of {public_name} of the {backend} backend is differentiable once; '
        f'AFT_MM_BACKEND=eager supports second derivatives'
    )
    _set_gradient(grad_op, _refusing(grad_op, message))

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
            with torch._C._AutoDispatchBelowAutograd():
                output, saved = op(*inputs)
            ctx.options, ctx.save = inputs[tensors:-1], inputs[-1]
            ctx.save_for_backward(saved, *inputs[:tensors])
            ctx.mark_non_differentiable(saved)
            ctx.set_materialize_grads(False)
            return output, saved

        @staticmethod
        def backward(ctx: Any, gradient: Tensor | None, _: Any) -> Any:
            wanted = list(ctx.needs_input_grad)
            if gradient is None:
                return (None,) * len(wanted)
            if not ctx.save:
                raise RuntimeError(f'{label} must be called with save=True for its gradient')
            if torch._C._functorch.is_legacy_batchedtensor(gradient):
                raise RuntimeError(
                    f'the gradient of {public_name} of the {backend} backend cannot be batched; '
                    f'AFT_MM_BACKEND=eager supports batched gradients'
                )
            inputs = *ctx.saved_tensors, *ctx.options, wanted[:tensors]
            gradients = iter(grad_op(gradient, *inputs))
            return tuple(next(gradients) if needed else None for needed in wanted)

    _set_gradient(op, Differentiated)
    return op


def _define(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, 'CompositeExplicitAutograd')
    torch.library.register_fake(f'aft_mm::{name}', fake, lib=LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.aft_mm, name).default
    return op


def _set_gradient(
    op: Any, function: type[torch.autograd.Function], written: Sequence[int] = ()
) -> None:
    def run(*inputs: Any) -> Any:
        if written:
            torch.autograd.graph.increment_version([inputs[i] for i in written])
        if differentiated(*(x for x in inputs if isinstance(x, Tensor))):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    LIBRARY.impl(op._schema.name.split('::')[1], run, 'Autograd')


def _refusing(op: Any, message: str) -> type[torch.autograd.Function]:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
            with torch._C._AutoDispatchBelowAutograd():
                return tuple(op(*inputs))

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError(message)

    return Refusing
