"""The op cases of `aft_mm.ops.cases`, and a function to run a case with gradients."""

import torch
from torch import Tensor

from aft_mm.ops.cases import CASES, CHANNELS, Case
from aft_mm.ops.selftest import TOLERANCE

__all__ = ['CASES', 'CAUSAL_CASES', 'CHANNELS', 'IDS', 'ONE_OF_EACH', 'TOLERANCE', 'Case']
__all__ += ['run_with_gradients']
IDS = [case.name for case in CASES]
ONE_OF_EACH = {
    f'{case.op}-{len(case.parameters)}-{case.options.get("causal", False)}': case
    for case in CASES
    if 7 < case.tokens < 64
}
CAUSAL_CASES = [case for case in CASES if case.options.get('causal', False)]


def run_with_gradients(
    case: Case, tensors: list[Tensor], *, scale: float = 1.0, **extra
) -> list[Tensor]:
    """Return the output and the gradient of ``(output · fixed randn · scale).sum()`` per input."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = case(*leaves, **extra)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(
        (output * cotangent.to(output) * scale).sum(), leaves, allow_unused=True
    )
    filled = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, gradients, strict=True)
    ]
    return [output.detach(), *filled]
