"""The op cases of `aft_mm.ops.cases`, and a function to run a case with gradients."""

import torch
from torch import Tensor

from aft_mm.ops import cases
from aft_mm.ops.cases import CHANNELS, PAIR_CASES, TOLERANCE, Case, PairCase

__all__ = ['CASES', 'CAUSAL_CASES', 'CHANNELS', 'ONE_OF_EACH', 'PAIR_CASES', 'STEP_CASES']
__all__ += ['TOLERANCE', 'Case', 'indices', 'randn', 'run_with_gradients']


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def indices(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.arange(tokens)[:, None], torch.arange(tokens)[None]


CASES = [*cases.CASES, *PAIR_CASES]
ONE_OF_EACH = {
    f'{case.op}-{len(case.parameters)}-{case.options.get("causal", False)}': case
    for case in CASES
    if 7 < case.tokens < 64 and not (isinstance(case, PairCase) and case.masked)
}
CAUSAL_CASES = [case for case in CASES if case.options.get('causal', False)]
# Those whose op has steps.
STEP_CASES = [case for case in CAUSAL_CASES if case not in PAIR_CASES]


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
