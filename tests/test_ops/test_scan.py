"""Running sums in blocks, which long sequences on a CPU take, on short ones against the oracle."""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops import reference
from aft_mm.ops.eager import running_mean, scan


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 rows, however few numbers there are."""
    torch.manual_seed(0)
    monkeypatch.setattr(scan, 'BLOCK', 4)
    monkeypatch.setattr(scan, 'FEWEST_NUMBERS', 1)
    monkeypatch.setattr(scan, 'FEWEST_COLUMNS', 1)


def leaves(tokens: int, channels: int = 5, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, tokens, channels, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('shape, dim', [((2, 8, 3), 1), ((37, 2, 3), 0), ((2, 3, 66, 2), -2)])
def test_blocks_are_the_running_sum_from_either_end(shape, dim, reverse):
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    expected = x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
    found = scan.scan(x, dim, reverse)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    cotangent = torch.randn_like(x)
    given, wanted = (torch.autograd.grad(y, x, cotangent)[0] for y in (found, expected))
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('tokens', [8, 63])
def test_causal_simple_is_the_oracle_with_first_and_second_derivatives(tokens, masked):
    inputs = leaves(tokens)
    mask = torch.rand(2, tokens) > 0.4
    mask[:, :3] = False  # tokens that see nothing
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
def test_a_key_or_a_value_without_gradient(frozen):
    inputs = leaves(22)[:2]
    inputs[frozen].requires_grad_(False)
    assert torch.autograd.gradcheck(running_mean.running_mean, inputs)
    assert torch.autograd.gradgradcheck(running_mean.running_mean, inputs)


@pytest.mark.parametrize('late', [1e4, torch.nan, torch.inf])
def test_no_block_lets_a_later_token_through(late):
    q, k, v = leaves(22, dtype=torch.float32)
    y = ops.aft_simple(q, k, v, causal=True)
    for grad in torch.autograd.grad(y[:, 13].sum(), (k, v)):
        assert grad[:, :14].any() and not grad[:, 14:].any()
    changed = torch.cat((v[:, :14], torch.full_like(v[:, 14:], late)), 1)
    assert torch.equal(ops.aft_simple(q, k, changed, causal=True)[:, :14], y[:, :14])


def test_a_trace_serves_other_lengths():
    traced = torch.jit.trace(lambda x: scan.scan(x, 1), torch.randn(2, 22, 5))
    longer = torch.randn(2, 31, 5)
    torch.testing.assert_close(traced(longer), longer.cumsum(1))


def test_transforms_of_torch_func_see_plain_operations():
    q, k, v = (x.detach() for x in leaves(22))

    def one(q, k, v):
        return ops.aft_simple(q[None], k[None], v[None], causal=True)[0]

    expected = ops.aft_simple(q, k, v, causal=True)
    torch.testing.assert_close(torch.func.vmap(one)(q, k, v), expected)
    _, tangent = torch.func.jvp(one, (q[0], k[0], v[0]), (v[0], q[0], k[0]))
    _, pullback = torch.func.vjp(one, q[0], k[0], v[0])
    by_q, by_k, by_v = pullback(torch.ones_like(tangent))
    torch.testing.assert_close(tangent.sum(), (by_q * v[0] + by_k * q[0] + by_v * k[0]).sum())
