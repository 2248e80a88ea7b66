"""Banded products with oneDNN, one tile at a time."""

import pytest
import torch
from torch.autograd import forward_ad

from aft_mm import ops
from aft_mm.ops.eager import banded_matmul, onednn_matmul

from .cases import CASES, run_with_gradients
from .test_backends import TOLERANCE, assert_close, oracle

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason='this build of torch has no oneDNN'
)
BANDED = [c for c in CASES if c.op in ('aft_full', 'aft_local', 'aft_local_learned')]


@pytest.fixture(autouse=True)
def multiplied(monkeypatch):
    """Use oneDNN for tiles of any size; return the shapes of its products."""
    shapes, multiply = [], onednn_matmul._multiply

    def noted(a, b, row=None):
        # oneDNN is a thousand times slower for other strides.
        assert b.is_contiguous() or b.T.is_contiguous()
        shapes.append((*a.shape, len(b)))
        return multiply(a, b, row)

    monkeypatch.setattr(onednn_matmul, '_multiply', noted)
    monkeypatch.setattr(onednn_matmul, 'FEWEST', 0)
    monkeypatch.setattr(onednn_matmul, 'onednn_is_faster', lambda: True)
    return shapes


@pytest.mark.parametrize('case', BANDED, ids=lambda case: case.name)
def test_matches_the_oracle(case, monkeypatch, multiplied):
    tensors = case.inputs(dtype=torch.float32)
    expected = oracle(case, tensors, monkeypatch)
    monkeypatch.setattr(banded_matmul, 'CHUNK', 1)
    monkeypatch.setattr(banded_matmul, 'SMALLEST_WIDTH', 7)  # of 12 columns: two parts
    assert_close(run_with_gradients(case, tensors), expected, TOLERANCE[torch.float32])
    trained = len(multiplied)
    with torch.no_grad():
        assert_close([case(*tensors)], expected[:1], TOLERANCE[torch.float32])
    assert trained < len(multiplied)
    # aft_local_learned leaves its product to autograd in training.
    assert trained or case.op == 'aft_local_learned'


def test_tokens_beyond_the_ends_are_not_multiplied(multiplied):
    weights, x = torch.randn(3, 32, 96), torch.randn(90, 5)
    found = torch.cat([rows for _, rows in onednn_matmul.products(weights, x, 1, None)])
    expected = banded_matmul._near_product(weights, x, 1, 1, 'fp32').flatten(0, 1)[:90]
    torch.testing.assert_close(found, expected)
    assert multiplied == [(32, 64, 5), (32, 90, 5), (26, 58, 5)]


def test_second_derivatives_and_transforms():
    q, k, v = torch.randn(3, 2, 70, 4, dtype=torch.float64).unbind()
    factors = 0.5 * torch.randn(2, 70, 3, dtype=torch.float64)
    found = []
    for dtype in (torch.float32, torch.float64):
        key, *others = (x.to(dtype) for x in (k, q, v, *factors))

        def mixed(key, query=others[0], value=others[1], factors=others[2:]):
            return ops.aft_local(query, key, value, *factors, window=9, causal=True)

        key.requires_grad_()
        first = torch.autograd.grad(mixed(key).sin().sum(), key, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), key)[0]
        each = torch.func.vmap(lambda k, q, v: mixed(k[None], q[None], v[None])[0])
        tangent = torch.func.jvp(mixed, (key.detach(),), (others[1],))[1]
        found.append([second, each(key.detach(), *others[:2]), tangent])
    for narrow, wide in zip(*found, strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4)


def test_unsupported_tensors(monkeypatch):
    weights, x = torch.randn(2, 32, 64), torch.randn(64, 8)
    assert onednn_matmul.is_applicable(weights, x)
    assert not onednn_matmul.is_applicable(weights.double(), x.double())
    assert not onednn_matmul.is_applicable(weights.to('meta'), x.to('meta'))
    assert not onednn_matmul.is_applicable(weights, x.clone().requires_grad_())
    with forward_ad.dual_level():
        assert not onednn_matmul.is_applicable(weights, forward_ad.make_dual(x, x))
    for name, value in (('MOST_THREADS', 0), ('FEWEST', 2 * weights.numel() * 8)):
        with monkeypatch.context() as patch:
            patch.setattr(onednn_matmul, name, value)
            assert not onednn_matmul.is_applicable(weights, x)
    applicable = []

    def traced(x):
        applicable.append(onednn_matmul.is_applicable(weights, x))
        return x + 1

    torch.jit.trace(traced, x, check_trace=False)
    assert applicable and not any(applicable)


@pytest.mark.parametrize(
    ('processor', 'faster'),
    [
        (dict(avx512_f=True, cpu_name='AMD EPYC'), True),
        (dict(avx512_f=False, cpu_name='AMD Ryzen'), False),
        (dict(avx512_f=True, cpu_name='Intel(R) Xeon(R)'), False),
        (dict(architecture='aarch64'), False),
    ],
)
def test_processors_on_which_mkl_lacks_avx512(processor, faster, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: processor, raising=False)
    monkeypatch.setattr(torch.backends.mkl, 'is_available', lambda: True)
    assert onednn_matmul.onednn_is_faster.__wrapped__() == faster
    monkeypatch.delattr(torch.cpu, 'get_capabilities')
    assert not onednn_matmul.onednn_is_faster.__wrapped__()
