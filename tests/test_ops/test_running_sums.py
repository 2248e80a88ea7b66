"""Running sums in blocks, as used for long sequences on a CPU, on short sequences."""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops import online_softmax, reference
from aft_mm.ops.eager.simple import running_mean
from aft_mm.ops.online_softmax import scan


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(online_softmax, 'SCAN_BLOCK', 4)
    monkeypatch.setattr(online_softmax, 'SMALLEST_SCAN', 1)
    monkeypatch.setattr(online_softmax, 'FEWEST_SCAN_COLUMNS', 1)


def make_inputs(tokens: int, channels: int = 5, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, tokens, channels, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('shape, dim', [((2, 8, 3), 1), ((37, 2, 3), 0), ((2, 3, 66, 2), -2)])
def test_scan_equals_cumsum_in_both_directions(shape, dim, reverse):
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    expected = x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
    found = scan(x, dim, reverse)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    cotangent = torch.randn_like(x)
    grads = (torch.autograd.grad(y, x, cotangent)[0] for y in (found, expected))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-13)


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('tokens', [8, 63])
def test_causal_simple_matches_oracle_in_first_and_second_derivatives(tokens, masked):
    inputs = make_inputs(tokens)
    mask = torch.rand(2, tokens) > 0.4
    mask[:, :3] = False  # the first tokens see nothing
    options = dict(
        causal=True, key_function='softmax', gate='sigmoid', key_mask=mask if masked else None
    )
    results = []
    for op in (ops.aft_simple, reference.aft_simple):
        y = op(*inputs, **options)
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
        results.append([y, *first, *second])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('frozen', [0, 1])
def test_running_mean_with_a_frozen_key_or_value(frozen):
    inputs = make_inputs(22)[:2]
    inputs[frozen].requires_grad_(False)
    assert torch.autograd.gradcheck(running_mean, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(running_mean, inputs)


@pytest.mark.parametrize('late', [1e4, torch.nan, torch.inf])
def test_later_tokens_do_not_reach_earlier_rows(late):
    q, k, v = make_inputs(22, dtype=torch.float32)
    y = ops.aft_simple(q, k, v, causal=True)
    for grad in torch.autograd.grad(y[:, 13].sum(), (k, v)):
        assert grad[:, :14].any() and not grad[:, 14:].any()
    changed = torch.cat((v[:, :14], torch.full_like(v[:, 14:], late)), 1)
    assert torch.equal(ops.aft_simple(q, k, changed, causal=True)[:, :14], y[:, :14])


def test_traced_scan_handles_other_lengths():
    traced = torch.jit.trace(lambda x: scan(x, 1), torch.randn(2, 22, 5))
    longer = torch.randn(2, 31, 5)
    torch.testing.assert_close(traced(longer), longer.cumsum(1))


def test_torch_func_transforms():
    q, k, v = (x.detach() for x in make_inputs(22))

    def one(q, k, v):
        return ops.aft_simple(q[None], k[None], v[None], causal=True)[0]

    expected = ops.aft_simple(q, k, v, causal=True)
    torch.testing.assert_close(torch.func.vmap(one)(q, k, v), expected)
    _, tangent = torch.func.jvp(one, (q[0], k[0], v[0]), (v[0], q[0], k[0]))
    _, pullback = torch.func.vjp(one, q[0], k[0], v[0])
    grad_q, grad_k, grad_v = pullback(torch.ones_like(tangent))
    torch.testing.assert_close(tangent.sum(), (grad_q * v[0] + grad_k * q[0] + grad_v * k[0]).sum())
