"""Errors of products of bfloat16 tokens as on a CUDA device, where operands are rounded.

bfloat16 operands are multiplied in float32 here, as a tensor core does.
"""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.eager import bf16_matmul, conv, conv_dense, full_local

from .cases import CASES, run_with_gradients
from .test_backends import TOLERANCE, assert_close, oracle

BANDED = [c for c in CASES if c.op in ('aft_full', 'aft_local', 'aft_local_learned')]
CONV = [c for c in CASES if c.op == 'aft_conv']


def set_precision(monkeypatch, function):
    for module in (conv, full_local):
        monkeypatch.setattr(module, 'matmul_precision', function)


@pytest.fixture(autouse=True)
def precisions(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    chosen = []

    def matmul_precision(value):
        if value.dtype != torch.bfloat16:
            return 'fp32'
        chosen.append('bf16x2' if torch.is_grad_enabled() else 'bf16')
        return chosen[-1]

    monkeypatch.setattr(bf16_matmul, 'bmm_to_float32', lambda a, b: torch.bmm(a.float(), b.float()))
    monkeypatch.setattr(
        bf16_matmul, 'add_bmm', lambda x, a, b: torch.baddbmm(x, a.float(), b.float())
    )
    set_precision(monkeypatch, matmul_precision)
    monkeypatch.setattr(conv, 'DENSE_DEVICES', ('cpu',))
    monkeypatch.setattr(conv_dense, 'is_applicable', lambda *args: True)
    monkeypatch.setattr(conv, 'is_inference_applicable', lambda *args: False)
    return chosen


@pytest.mark.parametrize('case', [*BANDED, *CONV], ids=lambda case: case.name)
def test_bfloat16_matches_the_oracle(case, monkeypatch, precisions):
    tensors = case.inputs(dtype=torch.bfloat16)
    expected = oracle(case, tensors, monkeypatch)
    assert_close(run_with_gradients(case, tensors), expected, TOLERANCE[torch.bfloat16])
    with torch.no_grad():
        assert_close([case(*tensors)], expected[:1], TOLERANCE[torch.bfloat16])
    assert precisions == ['bf16x2', 'bf16']


SIZES = {
    'aft_full': (ops.aft_full, {}, 196, ((196, 196),)),
    'aft_local': (ops.aft_local, dict(window=32, causal=True), 300, ((300, 16), (300, 16))),
    'aft_conv': (ops.aft_conv, dict(grid=(14, 14)), 196, ((32, 11, 11),)),
    'local_learned': (
        ops.aft_local_learned,
        dict(window=32, causal=True),
        300,
        ((300, 16), (300, 16)),
    ),
}


def worst_error(name: str) -> float:
    """Return the largest error of output and gradients at values of 1 ± 0.1.

    The unit is the error of rounding the result to bfloat16. The tokens are bfloat16 numbers in
    float32, so the result itself is not rounded.
    """
    op, options, tokens, shapes = SIZES[name]
    query, key, value = torch.randn(3, 2, tokens, 32).unbind()
    tensors = [x.bfloat16().float() for x in (query, 2 * key, 1 + 0.1 * value)]
    tensors += [0.5 * torch.randn(shape) for shape in shapes]
    cotangent = torch.randn(2, tokens, 32).bfloat16()

    def run(kind):
        leaves = [x.to(kind).requires_grad_() for x in tensors]
        output = op(*leaves, **options)
        return [output, *torch.autograd.grad(output, leaves, cotangent.to(kind))]

    errors = []
    for got, exact in zip(run(torch.float32), run(torch.float64), strict=True):
        rounding = (exact.bfloat16().double() - exact).abs().max()
        errors.append((got.double() - exact).abs().max() / rounding)
    return max(errors).item()


@pytest.mark.parametrize('name', SIZES)
def test_gradients_that_nearly_cancel_need_bf16x2(name, monkeypatch):
    """Errors stay within twice the rounding of a bfloat16 result, which bf16 exceeds."""

    def error_with(precision):
        set_precision(monkeypatch, lambda x: precision if x.dtype == torch.float32 else 'fp32')
        return worst_error(name)

    assert error_with('bf16x2') < 2
    assert error_with('bf16') > 4


def test_other_dtypes_and_devices_use_fp32(monkeypatch):
    monkeypatch.undo()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert bf16_matmul.matmul_precision(torch.empty(1, dtype=dtype)) == 'fp32'
        on_meta = torch.empty(1, dtype=dtype, device='meta')
        assert bf16_matmul.matmul_precision(on_meta) == 'fp32'


COMPILED = [next(c for c in BANDED if c.name == 'local-131-s=33-causal=False'), CONV[4]]


@pytest.mark.slow
@pytest.mark.parametrize('case', COMPILED, ids=lambda case: case.name)
def test_compiled_products_are_the_same(case):
    torch._dynamo.reset()
    tensors = case.inputs(dtype=torch.bfloat16)
    compiled = torch.compile(case.function, fullgraph=True, backend='aot_eager')

    def call(*parts):
        return compiled(*parts, **case.options)

    expected = [x.double() for x in run_with_gradients(case, tensors)]
    assert_close(run_with_gradients(call, tensors), expected, TOLERANCE[torch.bfloat16] / 2)
