"""The kernels of AFT-full and AFT-local against the float64 oracle; see `triton_parity.py`."""

import pytest
import torch

from .cases import CASES, Case, run_with_gradients
from .test_backends import assert_close, oracle
from .triton_parity import DEVICE, DTYPES, TERMS, TOLERANCE, compare, layouts, on_device

from .product_cases import (  # isort: skip - where Triton is
    EACH,
    IDS,
    MANY_TILES,
    MARKS,
    SHIPPED,
    cut_of,
    tiling,
    full,
    library,
    local,
    op_arguments,
    spread_keys,
)

pytestmark = MARKS

# Longer ones are those of many tiles.
# Without those that differ only in sizes.
SERVED = [
    case
    for case in CASES
    if case.op in ('aft_full', 'aft_local') and (case.tokens < 60 or case.tokens == 110)
]
SIZES = [
    *SERVED,
    *(full(5, 70), full(40, channels=70, causal=True)),
    local(70, 2, rank=40),
    local(70, 3, channels=70),
]


@pytest.mark.parametrize('case', SIZES, ids=IDS)
def test_matches_oracle(case, monkeypatch):
    tensors = on_device(case.inputs(2 if case.tokens < 10 else 1, dtype=torch.float32))
    # With one token the gradients of key and w cancel to 0: see test_numerics.py.
    compare(case, tensors, monkeypatch, TERMS if case.tokens == 1 else 1e-3)


@SHIPPED
@DTYPES
@pytest.mark.parametrize('case', [MANY_TILES[3]], ids=IDS)
def test_types(case, dtype, monkeypatch):
    tensors = on_device(case.inputs(1, dtype=dtype))
    tensors[2] += 10  # the gradient of the key is then a small difference
    compare(case, tensors, monkeypatch)


@SHIPPED
@DTYPES
@pytest.mark.parametrize('case', [full(40, 70)], ids=IDS)
def test_inference(case, dtype, monkeypatch):
    """Without a gradient bfloat16 is multiplied as it is."""
    tensors = on_device(case.inputs(1, dtype=dtype))
    with torch.no_grad():
        got = case(*tensors)
    assert_close([got], oracle(case, tensors, monkeypatch)[:1], TOLERANCE[dtype])


def test_inputs_may_have_different_dtypes(monkeypatch):
    case = local(9, 3)
    query, key, value, u, v = on_device(case.inputs(dtype=torch.float32))
    tensors = [query.half(), key, value.bfloat16(), u, v.bfloat16()]
    got = run_with_gradients(case, tensors)
    assert [x.dtype for x in got] == [value.bfloat16().dtype, *(x.dtype for x in tensors)]
    assert_close(got, oracle(case, tensors, monkeypatch), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize('make, gate', [(full, 'relu'), (local, 'none')])
def test_gates(make, gate, monkeypatch):
    case = make(7, 5, gate=gate)
    query, *others = on_device(case.inputs(dtype=torch.float32))
    if gate != 'none':
        query[0, :3] = torch.tensor([0.0, 1e4, -1e4]).view(3, 1)
        compare(case, [query, *others], monkeypatch)
    else:
        bare = Case(case.name, case.op, case.tokens, case.options)
        compare(lambda *parts, **extra: bare(None, *parts, **extra), others, monkeypatch)


@EACH
@pytest.mark.parametrize('kind', ['huge'])
def test_keys_of_any_size(kind, case, monkeypatch):
    query, key, *others = on_device(case.inputs(dtype=torch.float32))
    compare(case, [query, spread_keys(kind, key), *others], monkeypatch, TERMS)


@pytest.mark.parametrize('size, spike', [(25, 50), (-80, 0), (80, 100)])
@EACH
def test_biases_of_any_size(case, size, spike, monkeypatch):
    query, key, value, *bias = on_device(case.inputs(dtype=torch.float32))
    key[:, 2] += spike
    bias[0] = size * bias[0].sign()
    if len(bias) == 2:
        bias = [torch.zeros_like(part) for part in bias]
        bias[0][:, 0], bias[1][:, 0] = size * torch.randn(9).sign(), 1
    compare(case, [query, key, value, *bias], monkeypatch, TERMS)


@pytest.mark.parametrize(
    'case, kind',
    [
        (MANY_TILES[1], 'rising'),
        (MANY_TILES[3], 'late'),
        (MANY_TILES[2], 'huge'),
        (MANY_TILES[4], 'late'),
    ],
    ids=IDS,
)
def test_keys_of_any_size_from_tile_to_tile(kind, case, monkeypatch):
    query, key, *others = on_device(case.inputs(1, dtype=torch.float32))
    compare(case, [query, spread_keys(kind, key), *others], monkeypatch, TERMS)


def flags_of(case, tensors, key_mask=None):
    """The flags that a call with gradients writes, [B, tiles, blocks of channels]."""
    arguments = op_arguments(case, tensors, key_mask)
    saved = library.product(*arguments, True)[1]
    cut, band = cut_of(arguments)
    return tiling.split_saved(saved, arguments[2], band, cut.width).flags


@pytest.mark.parametrize('case', MANY_TILES[1:5:2], ids=IDS)
def test_only_flagged_rows_are_recomputed(case):
    """Not for keys of a few nats, nor for rows that see nothing; where a late key starves a row."""
    query, key, *others = tensors = on_device(case.inputs(2, dtype=torch.float32))
    mask = torch.ones(key.shape[:2], dtype=torch.bool, device=DEVICE)
    mask[0, :40], mask[1] = False, False
    assert (flags_of(case, tensors) == 0).all()
    assert (flags_of(case, [query, 9 * key, *others], mask) == 0).all()
    late = key.clone()
    late[1, 50, 2] = 100
    flags = flags_of(case, [query, late, *others])
    expected = torch.zeros_like(flags)
    expected[1, 1] = case.options['causal'] if 'causal' in case.options else 0
    assert torch.equal(flags, expected)


@pytest.mark.parametrize('case', [full(40, causal=True), local(70, 3, causal=True)], ids=IDS)
def test_causality(case, monkeypatch):
    query, key, *others = on_device(case.inputs(batch=1, dtype=torch.float32))
    leaves = [x.clone().requires_grad_() for x in (query, key, *others)]
    before = case(*leaves)
    for x in torch.autograd.grad(before[:, :-7].sum(), leaves[:3]):
        assert (x[:, -7:] == 0).all() and (x[:, :-7] != 0).all()
    for spike in (20, 1000):  # within the range of the fast path, and beyond
        late = key.clone()
        late[:, -1] += spike
        after = compare(case, [query, late, *others], monkeypatch, TERMS)[0]
        torch.testing.assert_close(after[:, :-1], before.detach()[:, :-1], rtol=1e-4, atol=1e-5)


@EACH
def test_padding_may_be_nan_or_inf(case, monkeypatch):
    query, key, value, *bias = on_device(case.inputs(batch=4, dtype=torch.float32))
    mask = torch.rand(4, key.shape[1], device=DEVICE) < 0.6
    mask[1], mask[2, :4], mask[3, 4:] = False, False, False
    hidden = ~mask.unsqueeze(-1)
    key = key * torch.tensor([1, 1, 1000, 1000], device=DEVICE).view(4, 1, 1)
    clean = [query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), *bias]
    poisoned = [query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)]
    got = run_with_gradients(case, [*poisoned, *bias], key_mask=mask)
    assert_close(got, oracle(case, clean, monkeypatch, key_mask=mask), 2e-5, TERMS)
    assert (got[0][1] == 0).all()
    assert all((x.masked_select(hidden) == 0).all() for x in got[2:4])


@EACH
def test_a_key_of_minus_infinity_is_hidden(case):
    query, key, *others = on_device(case.inputs(batch=1, dtype=torch.float32))
    mask = torch.ones(key.shape[:2], dtype=torch.bool, device=DEVICE)
    mask[:, [0, 4]] = False
    expected = case(query, key, *others, key_mask=mask)
    key[:, [0, 4]] = -torch.inf
    assert torch.equal(case(query, key, *others), expected)


def test_a_bias_of_minus_infinity_hides(monkeypatch):
    case = full(9, 5)
    *others, bias = on_device(case.inputs(batch=1, dtype=torch.float32))
    bias[2], bias[3, 1] = -torch.inf, -torch.inf
    got = compare(case, [*others, bias], monkeypatch)
    assert (got[0][:, 2] == 0).all() and (got[4][2] == 0).all()


@EACH
def test_nan_is_not_hidden(case):
    query, key, *others = on_device(case.inputs(batch=2, dtype=torch.float32))
    key[0, 1] = torch.nan
    output = case(query, key, *others)
    assert output[0, 1:].isnan().all() and output[1].isfinite().all()


def spaced(x):
    """The same matrix columns first, with numbers between that no one may read."""
    wide = torch.full((2 * x.shape[1], len(x)), torch.nan).to(x)
    wide[::2] = x.T
    return wide[::2].T


@EACH
def test_layouts(case):
    tensors = on_device(case.inputs(dtype=torch.float32))
    expected = run_with_gradients(case, tensors)
    other = [*layouts(tensors[:3]), *map(spaced, tensors[3:])]
    assert not any(x.is_contiguous() for x in other)
    mask = torch.ones(case.sources or case.tokens, 2, dtype=torch.bool, device=DEVICE).T
    leaves = [x.requires_grad_() for x in other]
    output = case(*leaves, key_mask=mask)
    assert torch.equal(output, expected[0]) and output.is_contiguous()
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    strange = cotangent.transpose(0, 2).contiguous().transpose(0, 2)
    gradients = torch.autograd.grad(output, leaves, strange)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1:], strict=True))
