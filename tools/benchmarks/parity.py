"""Comparison of outputs and gradients with the float64 oracle before timing.

The oracle stores [B, T, T, D] products, so it is given two sequences and a few channels, and an
output gradient that is zero elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from op_cases import BenchmarkCase
from torch import Tensor

from aft_mm.ops.cases import LEAST_SCALE
from aft_mm.ops.kernel_check import using

# For hidden vectors of a decoder, which accumulate rounding errors of all layers.
DECODER_TOLERANCE = {'float32': 2e-5, 'float16': 5e-3, 'bfloat16': 3e-2}
PER_HEAD = ('aft_conv', 'aft_decay')  # whose parameter has a row for each head
# The oracle stores [T, T] weights per head. Longer sequences are compared with eager in float64.
MOST_ORACLE_TOKENS = 4096
# Maximum entries of a [B, T, T, D] product of the oracle.
LARGEST_PRODUCT = {'cpu': 2**22, 'cuda': 2**26}


def relative_error(got: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().clamp_min(LEAST_SCALE)
    return ((got.double() - expected.double()).abs().max() / scale).item()


def require_close(name: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    require_small(name, relative_error(got, expected), tolerance)


def require_small(name: str, error: float, tolerance: float) -> None:
    if not error <= tolerance:
        raise SystemExit(f'{name} is wrong by {error:.2e} > {tolerance}: not timed')


def spread(length: int, count: int) -> list[int]:
    return sorted(set(torch.linspace(0, length - 1, min(count, length)).round().long().tolist()))


@dataclass(frozen=True)
class Sample:
    sequences: list[int]
    channels: list[int]
    key_channels: list[int]

    @classmethod
    def of(cls, case: BenchmarkCase, largest_product: int) -> 'Sample':
        sequences = spread(case.batch, 2)
        count = max(2, largest_product // (len(sequences) * case.tokens**2))
        heads = case.heads
        if heads == 1:
            return cls(sequences, spread(case.channels, count), [0])
        # One channel of each head, evenly spaced from the first to the last.
        key_channels, group = spread(heads, count), case.channels // heads
        offsets = torch.linspace(0, group - 1, len(key_channels)).round().long().tolist()
        channels = [head * group + i for head, i in zip(key_channels, offsets, strict=True)]
        return cls(sequences, channels, key_channels)

    def select(self, x: Tensor, channels: list[int]) -> Tensor:
        return x[self.sequences][:, :, channels]


@dataclass(frozen=True)
class Oracle:
    sample: Sample
    cotangent: Tensor
    output: Tensor
    gradients: list[Tensor]

    @classmethod
    def of(cls, case: BenchmarkCase, tensors: Sequence[Tensor]) -> 'Oracle':
        value = tensors[2]
        sample = Sample.of(case, LARGEST_PRODUCT[value.device.type])
        columns = [sample.channels, sample.key_channels, sample.channels]
        parts = [sample.select(x, c) for x, c in zip(tensors[:3], columns, strict=True)]
        parameters = list(tensors[3:])
        if case.op in PER_HEAD:
            parameters = [parameters[0][sample.key_channels]]
        inputs = [x.double().requires_grad_() for x in (*parts, *parameters)]
        with using('reference' if case.tokens <= MOST_ORACLE_TOKENS else 'eager'):
            output = case(*inputs)
        generator = torch.Generator(value.device).manual_seed(1)
        chosen = torch.randn(output.shape, generator=generator, device=value.device)
        chosen = chosen.to(value.dtype)
        grads = torch.autograd.grad(output, inputs, chosen.double())
        gradients = [torch.zeros_like(x, dtype=torch.float64) for x in tensors]
        rows = torch.tensor(sample.sequences, device=value.device)[:, None]
        for gradient, part, c in zip(gradients, grads, columns, strict=False):
            gradient.transpose(1, 2)[rows, c] = part.transpose(1, 2)
        for gradient, part in zip(gradients[3:], grads[3:], strict=True):
            gradient[sample.key_channels if case.op in PER_HEAD else slice(None)] = part
        cotangent = torch.zeros_like(value)
        cotangent.transpose(1, 2)[rows, sample.channels] = chosen.transpose(1, 2)
        return cls(sample, cotangent, output.detach(), gradients)

    def errors(
        self, call: Callable[..., Tensor], tensors: Sequence[Tensor], training: bool = True
    ) -> dict[str, float]:
        inputs = [x.detach().requires_grad_(training) for x in tensors]
        with torch.set_grad_enabled(training):
            output = call(*inputs)
        got = self.sample.select(output.detach(), self.sample.channels)
        errors = {'output': relative_error(got, self.output)}
        if training:
            names = ['query', 'key', 'value', 'first parameter', 'second parameter']
            grads = torch.autograd.grad(output, inputs, self.cotangent)
            for name, gradient, expected in zip(names, grads, self.gradients, strict=False):
                errors[f'gradient of {name}'] = relative_error(gradient, expected)
        return errors
