"""Is your AFT right? Copy this file, write your function into `aft`, and run pytest -x. Needs only torch."""

import pytest
import torch

CAUSAL = False  # True for a function that hides later tokens by itself


def aft(query, key, value, bias):
    """Return your AFT of [B, T, D] with a position bias [T, T], in which −inf hides a pair."""
    from aft_mm.ops import aft_full  # yours instead

    return aft_full(query, key, value, bias.expand(len(key), -1, -1))


def exact(query, key, value, bias):
    """Equation 2 of arXiv 2105.14103 in float64, with the largest exponent of a row taken out."""
    query, key, value, bias = (x.double() for x in (query, key, value, bias))
    bias = causal(bias) if CAUSAL else bias
    weights = (key[:, None] + bias[None, :, :, None]).softmax(2)  # [B, T, T, D]
    return query.sigmoid() * (weights * value[:, None]).sum(2)


def tokens(key_size=1.0, length=9):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, length, 4)
    return query, key_size * key, value, torch.randn(length, length)


def same(found, expected):
    return (found.double() - expected).abs().max() <= 1e-4 * max(1.0, expected.abs().max().item())


def check(found, expected, fault):
    error = (found.double() - expected).abs().max().item()
    assert same(found, expected), f'{fault} (wrong by {error:.3g})'


def causal(bias):
    return bias.masked_fill(torch.ones_like(bias).triu(1) > 0, -torch.inf)


FAULTS = {
    'plain': (lambda *x: x, 'not the function of the paper'),
    'large keys': (lambda q, k, v, w: (q, 100 * k, v, w), 'exp of a key overflows or is cut off'),
    'small biases': (lambda q, k, v, w: (q, k, v, w - 200), 'a row of small biases becomes 0'),
    'large biases': (lambda q, k, v, w: (q, k, v, 100 * w), 'biases are clamped or overflow'),
    'distances': (lambda q, k, v, w: (q, k, v, -60 - 40 * w.abs()), 'biases are clamped'),
    'shifted keys': (
        lambda q, k, v, w: (q, k + 95, v, w),
        'a shift of all keys changes the result',
    ),
    'no bias': (lambda q, k, v, w: (q, k, v, 0 * w), 'the bias multiplies instead of being added'),
    'hidden pairs': (
        lambda q, k, v, w: (q, k, v, w.masked_fill(w > 1, -torch.inf)),
        'hidden pairs leak',
    ),
    'causal': (lambda q, k, v, w: (q, k, v, causal(w)), 'the future leaks'),
    'causal, large keys': (
        lambda q, k, v, w: (q, 100 * k, v, causal(w)),
        'weights overflow, or underflow if the largest key of all tokens is subtracted',
    ),
    'large keys and biases': (
        lambda q, k, v, w: (q, 100 * k, v, 100 * w),
        'weights overflow, or underflow if the largest key and bias are subtracted apart',
    ),
}


@pytest.mark.parametrize('name', FAULTS)
def test_outputs_and_gradients(name):
    change, fault = FAULTS[name]
    given = [x.detach().requires_grad_() for x in change(*tokens())]
    found, expected = aft(*given), exact(*given)
    if not same(found, expected) and same(found, exact(*given[:3], causal(given[3]))):
        fault = 'matches the causal function: set CAUSAL = True'
    check(found, expected, fault)
    weights = torch.randn_like(found)
    mine = torch.autograd.grad((found * weights).sum(), given, allow_unused=True)
    right = torch.autograd.grad((expected * weights).sum(), given)
    for name, x, y in zip(('query', 'key', 'value', 'bias'), mine, right, strict=True):
        assert x is not None, f'{name} has no gradient'
        check(x, y.double(), f'gradient of {name}: {fault}')


def test_a_constant_value_is_gated():
    query, key, value, bias = tokens()
    expected = query.double().sigmoid() * 3
    fault = 'the gate is missing, or the weights of a row do not sum to 1'
    check(aft(query, key, torch.full_like(value, 3.0), bias), expected, fault)


def test_a_late_key_does_not_change_the_past():
    query, key, value, bias = tokens()
    past = aft(query, key, value, causal(bias))[:, :8]
    for size in (25.0, 110.0):
        later = key.index_add(1, torch.tensor([8]), torch.full((2, 1, 4), size))
        found = aft(query, later, value, causal(bias))[:, :8]
        check(found, past.double(), f'a later key of {size} moves the past')


def test_a_hidden_token_leaks_nothing():
    query, key, value, bias = tokens()
    bias[:, 3] = -torch.inf
    hidden = torch.arange(9)[:, None] == 3
    other = aft(query, key.masked_fill(hidden, 50.0), value.masked_fill(hidden, 1e6), bias)
    check(other, aft(query, key, value, bias).double(), 'a hidden token leaks')


def test_the_keys_matter():
    query, key, value, bias = tokens()
    change = (aft(query, key.roll(1, 1), value, bias) - aft(query, key, value, bias)).abs().max()
    assert change > 1e-3, 'the keys do nothing: the sum over tokens is missing'


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype):  # delete it if you use float32 alone
    given = [x.to(dtype) for x in tokens(key_size=12.0)]
    found, error = aft(*given).float(), 8 * torch.finfo(dtype).eps
    assert found.isfinite().all(), 'exp overflows in half precision'
    torch.testing.assert_close(found, exact(*given).float(), rtol=error, atol=error)
