"""Inputs for which a common maximum, a difference of sums or a product of shifts fails."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.eager import conv as eager_conv
from aft_mm.ops.eager.conv_exact import exact_conv_mean

from ..helpers import each
from .cases import CASES, CAUSAL_CASES, ONE_OF_EACH, STEP_CASES, run_with_gradients
from .test_backends import RESULTS, TOLERANCE, assert_close, oracle

# Every offset inside a block of the smallest size, its ends and the last token.
PLACES = [*range(34), 62]
DTYPES = each('dtype', [torch.float32, torch.bfloat16])


pytestmark = [pytest.mark.usefixtures('eager'), pytest.mark.slow]


# One key has all the weight: gradients of keys are differences of O(1) terms that cancel, so their
# rounding is compared with the terms.
TERMS = 1.0


def compare(case, tensors, monkeypatch, dtype=torch.float32, **extra):
    expected = oracle(case, tensors, monkeypatch, **extra)
    assert_close(run_with_gradients(case, tensors, **extra), expected, TOLERANCE[dtype], TERMS)


def with_key(tensors, key):
    """Return the inputs with another key, rounded to its dtype for both backends."""
    return [tensors[0], key.to(tensors[1].dtype), *tensors[2:]]


@DTYPES
@each('case', CASES)
def test_huge_keys(case, dtype, monkeypatch):
    tensors = case.inputs(dtype=dtype)
    signs = torch.randn(tensors[1].shape).sign()
    compare(case, with_key(tensors, 1e4 * signs + tensors[1].detach()), monkeypatch, dtype)


@DTYPES
@each('case', CASES)
def test_late_spike(case, dtype, monkeypatch):
    tensors = case.inputs(dtype=dtype)
    key = tensors[1].detach().clone()
    key[:, -1] += 1000
    compare(case, with_key(tensors, key), monkeypatch, dtype)


BY_COLUMNS = ('aft_simple', 'aft_full', 'aft_local', 'aft_local_hard', 'aft_local_learned')


@each('place', [0, -1])
@each('case', [c for c in STEP_CASES if c.op in BY_COLUMNS and c.tokens > 1])
def test_outliers_leave_other_columns_on_the_fast_path(case, place, monkeypatch):
    tensors = case.inputs(dtype=torch.float32)
    expected = case(*tensors)
    key, others = tensors[1].detach().clone(), torch.ones_like(expected, dtype=torch.bool)
    key[1, place, 2] += 200
    others[1, :, 2] = False
    compare(case, with_key(tensors, key), monkeypatch)
    result = case(*with_key(tensors, key))
    assert torch.equal(result[others], expected[others])  # also in the last digit
    tensors[2] = tensors[2].detach().clone()
    tensors[2][0, -1, 1] = torch.nan
    others[0, :, 1] = False
    result = case(*with_key(tensors, key))
    assert torch.equal(result[others], expected[others])
    assert result[0, :-1, 1].isfinite().all() and result[0, -1, 1].isnan()
    # Only the sum of all values is not finite.
    tensors[2] = torch.full_like(tensors[2], 2e38 / case.tokens)
    assert case(*tensors).isfinite().all()


@each(
    'case',
    [
        case
        for case in CASES
        if case.op == 'aft_conv'
        and (case.options.get('causal') or not case.options.get('global_connectivity', True))
    ],
)
def test_outliers_of_a_head_leave_others_on_the_fast_path(case, monkeypatch):
    tensors, shapes = case.inputs(dtype=torch.float32), []
    key, value = (x.detach().clone() for x in tensors[1:3])
    heads = key.shape[2]
    key[1, case.tokens // 2, 0] += 200
    tensors = [tensors[0], key, value, tensors[3]]

    def spy(key, *args, **options):
        shapes.append(key.shape)
        return exact_conv_mean(key, *args, **options)

    monkeypatch.setattr(eager_conv, 'exact_conv_mean', spy)
    compare(case, tensors, monkeypatch)
    assert shapes == [(1, case.tokens, 1) if heads * len(key) > 1 else key.shape]
    value[0, -1, -1] = torch.nan
    result = case(*tensors)
    assert result[1].isfinite().all() and result[0, -1, -1].isnan()
    if case.options.get('causal'):
        assert result[0, :-1].isfinite().all()


@DTYPES
@each('case', CAUSAL_CASES)
def test_step_at_every_offset_of_a_block(case, dtype, monkeypatch):
    places = [place for place in PLACES if place < case.tokens]
    places = places if dtype == torch.float32 else places[::4]
    for some in (places[i : i + 7] for i in range(0, len(places), 7)):  # one sample for each
        tensors = case.inputs(len(some), dtype)
        later = torch.arange(case.tokens) >= torch.tensor(some)[:, None]
        tensors = with_key(tensors, tensors[1].detach() + 120 * later.unsqueeze(-1))
        got, expected = run_with_gradients(case, tensors), oracle(case, tensors, monkeypatch)
        assert_close(got, expected, TOLERANCE[dtype], TERMS)
        for sample, place in enumerate(some):
            one, other = ([x[sample] for x in results[:4]] for results in (got, expected))
            names = [f'with the step at token {place}: {name}' for name in RESULTS[:4]]
            assert_close(one, other, TOLERANCE[dtype], TERMS, names)


@each('step', [55, 66, 69, 71, -62, -69, -71])
@each('case', CASES)
def test_both_sides_of_the_limit_of_the_fast_path(case, step, monkeypatch):
    """Denominators may be e^-70, and their gradients must not overflow."""
    tensors = case.inputs(dtype=torch.float32)
    key = tensors[1].detach().clone()
    key[:, key.shape[1] // 2 :] += step
    compare(case, with_key(tensors, key), monkeypatch)


@each(
    'size, spike',
    [(-2.9, 0), (-2.9, 50), (-3.1, 0), (-3.1, 50), (25, 50), (-25, 0), (29, 0), (29, 50), (31, 50)],
)
@each('case', [c for c in CASES if len(c.parameters) == 1])
def test_both_sides_of_the_limit_of_the_bias(case, spike, size, monkeypatch):
    tensors = case.inputs(dtype=torch.float32)
    bias = tensors[3].detach()
    bias = size * bias.sign() if abs(size) > 3 and size != -3.1 else bias.abs().clamp_max(1) * size
    key = tensors[1].detach().clone()
    key[:, key.shape[1] // 2] += spike
    compare(case, with_key(tensors, key)[:3] + [bias], monkeypatch)


@DTYPES
@each('case', CASES)
def test_staircase(case, dtype, monkeypatch):
    tensors = case.inputs(dtype=dtype)
    steps = 120.0 * torch.arange(tensors[1].shape[1]).view(1, -1, 1)
    compare(case, with_key(tensors, tensors[1].detach() + steps), monkeypatch, dtype)
    compare(case, with_key(tensors, tensors[1].detach() - steps), monkeypatch, dtype)


BIASED = each('case', [c for c in CASES if c.parameters])


def with_large_bias(case, tensors):
    """Return the inputs with w = ±80."""
    if len(case.parameters) == 1:
        return [*tensors[:3], tensors[3].detach().sign() * 80]
    # u v' of rank one
    big = [torch.zeros_like(part) for part in tensors[3:]]
    big[0][:, 0], big[1][:, 0] = 80, torch.randn(len(big[1])).sign()
    return [*tensors[:3], *big]


@BIASED
def test_large_bias(case, monkeypatch):
    """|w| up to 80, also with keys that compensate it."""
    tensors = with_large_bias(case, case.inputs(dtype=torch.float32))
    for scale in (1, 100):
        compare(case, with_key(tensors, tensors[1].detach() * scale), monkeypatch)


@each('of', ['token', 'channel', 'sample'])
@BIASED
def test_a_key_of_minus_infinity_has_no_weight(case, of, monkeypatch):
    """Whatever its w, also if another w of the row is e^-160 of it."""
    tensors = with_large_bias(case, case.inputs(dtype=torch.float32))
    key = tensors[1].detach()
    shape = {'token': (*key.shape[:2], 1), 'channel': key.shape, 'sample': (len(key), 1, 1)}[of]
    absent = torch.rand(shape) < 0.5
    absent[0] |= of == 'sample'
    for scale in (1, 100):
        compare(case, with_key(tensors, (scale * key).masked_fill(absent, -torch.inf)), monkeypatch)


@each('key_scale', [1, 100, 1e4])
@each('bias_scale', [1, 30, 700])
@pytest.mark.parametrize('per_sample', [False, True])
def test_a_bias_of_minus_infinity_hides_a_pair(per_sample, bias_scale, key_scale, monkeypatch):
    """Also the largest key, and all keys of a row."""
    query, value = torch.randn(2, 2, 7, 4).unbind()
    key = key_scale * torch.randn(2, 7, 4)
    bias = bias_scale * torch.randn(2, 7, 7)
    bias = bias.masked_fill(torch.rand(7, 7) < 0.4, -torch.inf)
    bias[:, 3] = -torch.inf
    tensors = query, key, value, bias if per_sample else bias[0]
    got = run_with_gradients(ops.aft_full, tensors)
    assert (got[0][:, 3] == 0).all()
    with monkeypatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, 'reference')
        expected = run_with_gradients(ops.aft_full, [x.double() for x in tensors])
    assert_close(got, expected, TOLERANCE[torch.float32], TERMS)


@each('key_scale', [1, 100, 1e4])
@each('bias_scale', [1, 30])
@each('case', [c for c in CASES if len(c.parameters) == 1 and c.op != 'aft_decay'])
def test_a_free_bias_of_minus_infinity_hides_a_pair(case, bias_scale, key_scale, monkeypatch):
    """Also the largest key, and all keys of some rows where W is not 1 elsewhere."""
    *tensors, bias = (x.detach() for x in case.inputs(dtype=torch.float32))
    tensors[1] *= key_scale
    hidden = torch.rand(bias.shape) < 0.4
    hidden[-1] = True
    bias = (bias_scale * bias).masked_fill(hidden, -torch.inf)
    compare(case, [*tensors, bias], monkeypatch)
    mask = torch.rand(tensors[1].shape[:2]) < 0.7
    compare(case, [*tensors, bias], monkeypatch, key_mask=mask)


def test_the_default_dtype_changes_nothing():
    tensors = torch.randn(3, 1, 40, 4).unbind()
    pos = torch.randn(2, 40, 2).unbind()
    calls = [
        partial(op, *tensors, *pos, window=3, causal=causal)
        for op in (ops.aft_local, ops.aft_local_learned)
        for causal in (False, True)
    ]
    expected = [call() for call in calls]
    torch.set_default_dtype(torch.float64)
    try:
        got = [call() for call in calls]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@DTYPES
@BIASED
def test_suppressed_spike(case, dtype, monkeypatch):
    """w = −20 at the token itself under a key of +20: the difference of sums is 0/0 in float32."""
    tensors = case.inputs(dtype=dtype, bias_scale=0.0)
    key = torch.zeros_like(tensors[1])
    key[:, key.shape[1] // 2] = 20
    bias = [part.detach().clone() for part in tensors[3:]]
    if len(bias) == 1:
        bias[0].fill_(-20)
    else:
        bias[0][:, 0], bias[1][:, 0] = -20, 1
    compare(case, with_key(tensors, key)[:3] + bias, monkeypatch, dtype)


@each('key_scale', [1, 1000])
@each('case', CASES)
def test_padding_may_be_nan_or_inf(case, key_scale, monkeypatch):
    """Hidden NaN and inf change nothing and get a gradient of 0; if all is hidden, y is 0."""
    tensors = case.inputs(batch=3, dtype=torch.float32)
    tensors[1] = tensors[1].detach() * key_scale
    mask = torch.rand(3, tensors[1].shape[1]) < 0.6
    mask[1] = False
    mask[0, 0] = True
    poisoned = [part.detach().clone() for part in tensors]
    poisoned[1][~mask], poisoned[2][~mask] = torch.nan, torch.inf
    clean = [part.detach().clone() for part in tensors]
    got = run_with_gradients(case, poisoned, key_mask=mask)
    expected = oracle(case, clean, monkeypatch, key_mask=mask)
    assert_close(got, expected, TOLERANCE[torch.float32], TERMS)
    assert (got[0][1] == 0).all()
    assert (got[2][~mask] == 0).all() and (got[3][~mask] == 0).all()
    # A sample that sees nothing divides 0 by 0; its gradient must not be NaN.
    for gradient in run_with_gradients(case, poisoned, key_mask=mask, scale=1e6)[1:]:
        assert gradient.isfinite().all()


# Denominators are e^-50.
RISING = torch.tensor([-25.0, 25, 0]).view(1, 3, 1)
SECOND = {
    'simple': lambda *x: ops.aft_simple(*x, causal=True),
    'full': lambda *x: ops.aft_full(*x, x[0].new_ones(3, 3), causal=True),
    'pairs': lambda *x: ops.aft_full(*x, x[0].new_ones(1, 3, 3), causal=True),
    'local': lambda *x: ops.aft_local(*x, *x[0].new_ones(2, 3, 1), window=2, causal=True),
    'learned': lambda *x: ops.aft_local_learned(*x, *x[0].new_ones(2, 3, 1), window=2, causal=True),
    'conv': lambda *x: ops.aft_conv(*x, x[0].new_ones(1, 3), grid=(3,), causal=True),
    'hard': lambda *x: ops.aft_local_hard(*x, window=2),
}


@pytest.mark.parametrize('op', SECOND)
def test_second_derivatives_of_small_denominators(op, monkeypatch):
    query, value = torch.randn(2, 1, 3, 1)

    def compute(dtype):
        def loss(key):
            return SECOND[op](query.to(dtype), key, value.to(dtype)).square().sum()

        return torch.autograd.functional.hessian(loss, RISING.to(dtype))

    got = compute(torch.float32)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'reference')
    torch.testing.assert_close(got.double(), compute(torch.float64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('case', ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_vmap_and_forward_mode(case):
    query, *others = (x.detach() for x in case.inputs(dtype=torch.float32))
    others[0][..., 0] *= 100  # the safe path for one channel
    tensors = query, *others
    for place, x in enumerate(tensors):
        pair = torch.stack([x, -x])

        def run(x, place=place):
            return case(*tensors[:place], x, *tensors[place + 1 :])

        with torch.no_grad() if place else nullcontext():
            expected, got = torch.stack([*map(run, pair)]), torch.func.vmap(run)(pair)
        torch.testing.assert_close(got, expected, msg=lambda text, i=place: f'input {i}: {text}')
    value, tangent = others[1], torch.randn_like(others[1])
    leaves = [x.clone().requires_grad_() for x in others]
    result = case(query, *leaves)
    with forward_ad.dual_level():  # a gradient is linear in that of the result
        cotangent, tangent = torch.randn(2, *result.shape)
        dual = forward_ad.make_dual(cotangent, tangent)
        grads = torch.autograd.grad(result, leaves, dual, retain_graph=True)
        found = [forward_ad.unpack_dual(x).tangent for x in grads]
    torch.testing.assert_close(found, [*torch.autograd.grad(result, leaves, tangent)])
    with forward_ad.dual_level():  # the op is linear in the values
        others[1] = forward_ad.make_dual(value, tangent)
        got = forward_ad.unpack_dual(case(query, *others)).tangent
    others[1] = tangent
    torch.testing.assert_close(got, case(query, *others), rtol=1e-4, atol=1e-5)
