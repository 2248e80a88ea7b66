"""The op cases of `aft_mm.ops.cases`, and a function to run a case with gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aft_mm.ops import aft_full, cases
from aft_mm.ops.cases import CHANNELS, TOLERANCE, Case

__all__ = ['CASES', 'CAUSAL_CASES', 'CHANNELS', 'IDS', 'ONE_OF_EACH', 'PAIR_CASES', 'STEP_CASES']
__all__ += ['TOLERANCE', 'Case', 'indices', 'randn', 'run_with_gradients']


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def indices(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.arange(tokens)[:, None], torch.arange(tokens)[None]


@dataclass(frozen=True)
class PairCase(Case):
    """AFT-full with a bias per head, per sample or both, and with a mask of pairs.

    The kernels, and so their check, do not support them.
    """

    per_sample: bool = False
    masked: bool = False

    @property
    def function(self) -> Callable[..., Tensor]:
        return aft_full

    def shapes(self, batch: int) -> list[tuple[int, ...]]:
        *tokens, bias = super().shapes(batch)
        return [*tokens, (batch, *bias) if self.per_sample else bias]

    def __call__(self, *tensors: Tensor | None, **extra) -> Tensor:
        if self.masked:
            extra['pair_mask'] = self.pair_mask(len(tensors[1]))
        return super().__call__(*tensors, **extra)

    def pair_mask(self, batch: int) -> Tensor:
        shape = batch, self.tokens, self.sources or self.tokens
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
        mask |= torch.eye(*shape[1:], dtype=torch.bool)
        mask[:, shape[2] :, 0] = True
        return mask


def pairs(
    tokens: int,
    sources: int | None = None,
    heads: int | None = None,
    causal: bool = False,
    per_sample: bool = True,
    masked: bool = False,
) -> PairCase:
    bias = (*([heads] if heads else []), tokens, sources or tokens)
    name = f'pairs-{"B×" * per_sample}{"×".join(map(str, bias))}-{causal=}-{masked=}'
    options = dict(causal=causal, num_heads=heads)
    return PairCase(
        name,
        'aft_full_batched',
        tokens,
        options,
        sources,
        parameters=(bias,),
        per_sample=per_sample,
        masked=masked,
    )


PAIR_CASES = [
    pairs(1),
    pairs(7, 4),
    pairs(63, heads=2),
    pairs(7, heads=3, per_sample=False),
    pairs(7, 9, per_sample=False, masked=True),
    pairs(11, causal=True),
    pairs(33, heads=3, causal=True, per_sample=False),
    pairs(33, heads=2, causal=True, masked=True),
]
CASES = [*cases.CASES, *PAIR_CASES]
IDS = [case.name for case in CASES]
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
