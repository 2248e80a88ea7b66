"""Products of bfloat16 tokens as a CUDA device takes them: what is rounded, and what comes of it.

Here bfloat16 operands are multiplied in float32, which is what a tensor core does.
"""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.eager import mixing, products

from .cases import CASES, run_with_gradients
from .test_backends import TOLERANCE, assert_close, oracle

BANDED = [c for c in CASES if c.op in ('aft_full', 'aft_local', 'aft_local_learned')]
CONV = [c for c in CASES if c.op == 'aft_conv']


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """As on a CUDA device; the forms that were asked for."""
    torch.manual_seed(0)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    asked = []

    def term_parts(value):
        if value.dtype != torch.bfloat16:
            return 0
        asked.append(2 if torch.is_grad_enabled() else 1)
        return asked[-1]

    monkeypatch.setattr(products, 'bmm_to_float32', lambda a, b: torch.bmm(a.float(), b.float()))
    monkeypatch.setattr(mixing, 'term_parts', term_parts)
    monkeypatch.setattr(mixing, 'serves', lambda *args: True)
    return asked


@pytest.mark.parametrize('case', [*BANDED, *CONV], ids=lambda case: case.name)
def test_bfloat16_matches_the_oracle(case, monkeypatch, parts):
    tensors = case.inputs(dtype=torch.bfloat16)
    expected = oracle(case, tensors, monkeypatch)
    assert_close(run_with_gradients(case, tensors), expected, TOLERANCE[torch.bfloat16])
    with torch.no_grad():
        assert_close([case(*tensors)], expected[:1], TOLERANCE[torch.bfloat16])
    assert parts == [2, 1]


SIZES = {
    'aft_full': (ops.aft_full, {}, 196, ((196, 196),)),
    'aft_local': (ops.aft_local, dict(window=32, causal=True), 300, ((300, 16), (300, 16))),
    'aft_conv': (ops.aft_conv, dict(grid=(14, 14)), 196, ((32, 11, 11),)),
    'normalized': (
        ops.aft_local_learned,
        dict(window=32, causal=True),
        300,
        ((300, 16), (300, 16)),
    ),
}


def worst_error(name: str) -> float:
    """Of output and gradients at values of 1 ± 0.1, in roundings of the result to bfloat16.

    The tokens are bfloat16 numbers in float32, so that the rounding of the result is not in it.
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
def test_gradients_that_nearly_cancel_need_terms_in_two_parts(name, monkeypatch):
    """Errors stay within twice the rounding of a bfloat16 result, which one part misses."""

    def as_float32(count):
        monkeypatch.setattr(mixing, 'term_parts', lambda x: count * (x.dtype == torch.float32))
        return worst_error(name)

    assert as_float32(2) < 2
    assert as_float32(1) > 4


def test_other_types_and_devices_are_multiplied_as_they_are(monkeypatch):
    monkeypatch.undo()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert products.term_parts(torch.empty(1, dtype=dtype)) == 0
        assert products.term_parts(torch.empty(1, dtype=dtype, device='meta')) == 0


COMPILED = [next(c for c in BANDED if c.name == 'local-131-s=33-causal=False'), CONV[4]]


@pytest.mark.parametrize('case', COMPILED, ids=lambda case: case.name)
def test_compiled_products_are_the_same(case):
    torch._dynamo.reset()
    tensors = case.inputs(dtype=torch.bfloat16)
    compiled = torch.compile(case.function, fullgraph=True, backend='aot_eager')

    def call(*parts):
        return compiled(*parts, **case.options)

    expected = [x.double() for x in run_with_gradients(case, tensors)]
    assert_close(run_with_gradients(call, tensors), expected, TOLERANCE[torch.bfloat16] / 2)
