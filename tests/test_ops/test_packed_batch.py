"""Packed batches: sequences one after another equal the loop over the sequences."""

from functools import partial

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE

from ..errors import refuses
from ..helpers import each
from .cases import TOLERANCE, run_with_gradients
from .test_backends import assert_close
from .test_dispatch import LargestTensor

D, HEADS, LONGEST = 6, 2, 40
LENGTHS = {
    'mixed': [0, 5, 1, 0, 9, 7, 9, 1, 40, 3, 0],
    'equal': [7, 7, 7],
    'one': [13],
    'single tokens': [1] * 5,
    'none': [],
    'empty': [0, 0],
}


def starts(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def local(query, key, value, u, v=None, *, causal, **options):
    u, v = u[: key.shape[1]], None if v is None else v[: key.shape[1]]
    return ops.aft_local(query, key, value, u, v, window=4, causal=causal, **options)


def full(query, key, value, bias, **options):
    length = key.shape[1]
    return ops.aft_full(query, key, value, bias[..., :length, :length], **options)


def conv(query, key, value, weight, **options):
    return ops.aft_conv(query, key, value, weight, grid=key.shape[1:2], **options)


# The op of one sequence, the packed one, and the shapes of the biases, causal and not.
CASES = {
    'simple': (ops.aft_simple, ops.aft_simple, lambda causal: []),
    'relu': (*2 * [partial(ops.aft_simple, key_function='relu')], lambda causal: []),
    'decay': (ops.aft_decay, ops.aft_decay, lambda causal: [(D,)]),
    'full': (full, ops.aft_full, lambda causal: [(LONGEST, LONGEST)]),
    'full heads': (
        partial(full, num_heads=HEADS),
        partial(ops.aft_full, num_heads=HEADS),
        lambda causal: [(HEADS, LONGEST, LONGEST)],
    ),
    'local': (local, partial(ops.aft_local, window=4), lambda causal: [(LONGEST, 3)] * 2),
    'local free': (
        local,
        partial(ops.aft_local, window=4),
        lambda causal: [(LONGEST, 4 if causal else 7)],
    ),
    'conv': (conv, conv, lambda causal: [(HEADS, 5)]),
    'conv window': (*2 * [partial(conv, global_connectivity=False)], lambda causal: [(HEADS, 5)]),
}
each_case = pytest.mark.parametrize('name', CASES)
each_causal = pytest.mark.parametrize('causal', [False, True])


def inputs(name, total, causal, dtype=torch.float64):
    heads = HEADS if 'conv' in name else D
    shapes = (1, total, D), (1, total, heads), (1, total, D), *CASES[name][2](causal)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def loop(name, lengths, causal, query, key, value, *biases, key_mask=None, **options):
    """The oracle: one call per sequence."""
    rows, ends = [query[:, :0]], starts(lengths).tolist()
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        if end > start:
            part = [x[:, start:end] for x in (query, key, value)]
            mask = None if key_mask is None else key_mask[:, start:end]
            one = CASES[name][0](*part, *biases, causal=causal, key_mask=mask, **options)
            rows.append(one)
    return torch.cat(rows, 1) + 0 * sum(x.sum() for x in biases)


def packed(name, lengths, causal, *tensors, **options):
    cu_seqlens = options.pop('cu_seqlens', starts(lengths))
    return CASES[name][1](*tensors, causal=causal, cu_seqlens=cu_seqlens, **options)


@each_causal
@each_case
@each('lengths', LENGTHS)
@each('masked', [False, True])
def test_equals_the_loop_over_the_sequences(name, lengths, causal, masked, monkeypatch):
    lengths = LENGTHS[lengths]
    total = sum(lengths)
    mask = (torch.rand(1, total) < 0.7) if masked else None
    options = dict(key_mask=mask, gate='relu')
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given = inputs(name, total, causal, dtype)
        got = run_with_gradients(partial(packed, name, lengths, causal), given, **options)
        with monkeypatch.context() as patch:
            patch.setenv(ENVIRONMENT_VARIABLE, 'reference')
            wide = [x.double() for x in given]
            expected = run_with_gradients(partial(loop, name, lengths, causal), wide, **options)
        assert got[0].shape == (1, total, D) and got[0].dtype == dtype
        if total:
            # The gradient of the only key of a sequence is a difference that is 0.
            assert_close(got, expected, TOLERANCE[dtype], floor=1.0)
        else:
            assert [x.shape for x in got] == [x.shape for x in expected]
            assert not any(x.any() for x in got)


@each_causal
@each_case
def test_vmap_and_grad_equal_a_loop(name, causal):
    lengths = [6, 0, 9, 7]
    samples = [inputs(name, 22, causal) for _ in range(2)]
    run = partial(packed, name, lengths, causal)
    together = [torch.stack(x) for x in zip(*samples, strict=True)]
    for result, sample in zip(torch.func.vmap(run)(*together), samples, strict=True):
        torch.testing.assert_close(result, run(*sample))
    gradient = torch.func.grad(lambda *tensors: run(*tensors).square().sum(), 1)
    for result, sample in zip(torch.func.vmap(gradient)(*together), samples, strict=True):
        leaf = sample[1].requires_grad_()
        (expected,) = torch.autograd.grad(run(*sample).square().sum(), leaf)
        torch.testing.assert_close(result, expected)


@each_causal
@each_case
def test_nothing_of_one_sequence_reaches_another(name, causal):
    lengths = [6, 9, 1, 9]
    tensors = inputs(name, 25, causal, torch.float32)
    calm = packed(name, lengths, causal, *tensors)
    for poison in (1e4, torch.nan, torch.inf):
        query, key, value, *biases = (x.clone() for x in tensors)
        for x in (query, key, value):
            x[:, 6:15] = poison
            x.requires_grad_()
        mixed = packed(name, lengths, causal, query, key, value, *biases)
        others = [*range(6), *range(15, 25)]
        # A sequence of similar length may choose another path, to rounding the same.
        torch.testing.assert_close(mixed[:, others], calm[:, others])
        gradients = torch.autograd.grad(mixed[:, others].sum(), (query, key, value))
        for x in gradients:
            assert x[:, others].isfinite().all()
            if poison == 1e4:
                assert not x[:, 6:15].any()


@each_causal
@each('name', ['simple', 'local', 'conv'])
@each('lengths', [[1] * 4000 + [2000], list(range(60))])
def test_memory_does_not_grow_with_the_square_of_the_tokens(name, lengths, causal, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    total = sum(lengths)
    tensors = inputs(name, total, causal, torch.float32)
    if name == 'local':
        tensors[3:] = [torch.randn(max(lengths), 3) for _ in range(2)]
    with LargestTensor() as seen:
        packed(name, lengths, causal, *(x.requires_grad_() for x in tensors)).sum().backward()
    assert total * D <= seen.largest <= 32 * total * D


def test_int32_and_repeated_use():
    tensors = inputs('simple', 12, True)
    lengths = [5, 7]
    expected = packed('simple', lengths, True, *tensors)
    got = packed('simple', lengths, True, *tensors, cu_seqlens=starts(lengths, torch.int32))
    assert torch.equal(got, expected)
    assert not torch.allclose(expected, ops.aft_simple(*tensors, causal=True))


X, MASK = torch.randn(1, 7, D), torch.ones(1, 7, dtype=torch.bool)
WRONG = {
    'cu_seqlens must be a tensor .N . 1. of int32 or int64, got .0, 7.': dict(cu_seqlens=[0, 7]),
    'of int32 or int64, got torch.float32': dict(cu_seqlens=torch.tensor([0.0, 7.0])),
    r'of int32 or int64, got torch.int64 \[0\]': dict(cu_seqlens=torch.tensor([]).long()),
    r'0 first, never falling, and 7 tokens last, got \[0, 6\]': dict(
        cu_seqlens=torch.tensor([0, 6])
    ),
    r'got \[1, 7\]': dict(cu_seqlens=torch.tensor([1, 7])),
    r'got \[0, 5, 4, 7\]': dict(cu_seqlens=torch.tensor([0, 5, 4, 7])),
    r'query must be \[1, 7, channels\] with cu_seqlens': dict(query=X[:, :6]),
    r'value must be \[1, 7, channels\] with cu_seqlens': dict(value=X.expand(2, -1, -1)),
    r'key must be \[1, total, channels\] with cu_seqlens, got torch.float32 \[7\]': dict(
        key=X[0, :, 0]
    ),
    r'key_mask must be bool \[1, 7\] .*, got torch.bool \[7\]': dict(key_mask=MASK[0]),
    r'key_mask must be bool \[1, 7\] .*, got torch.int64 \[1, 7\]': dict(key_mask=MASK.long()),
}


@each('message', WRONG)
def test_wrong_packed_batches(message):
    given = dict(query=X, key=X, value=X, cu_seqlens=torch.tensor([0, 3, 7]))
    refuses(message, ops.aft_simple, **(given | WRONG[message]))


def test_biases_and_grids_of_packed_batches():
    ends = torch.tensor([0, 3, 7])
    bias = torch.randn(3, 3)
    message = r'position_bias must have an entry per token of the longest sequence, 4, got \[3, 3\]'
    refuses(message, ops.aft_full, X, X, X, bias, cu_seqlens=ends)
    message = 'position_bias must be one for all sequences'
    refuses(message, ops.aft_full, X, X, X, torch.randn(1, 4, 4), cu_seqlens=ends)
    pairs = torch.ones(1, 4, 4, dtype=torch.bool)
    message = 'pair_mask must be None with cu_seqlens'
    refuses(message, ops.aft_full, X, X, X, torch.randn(4, 4), pair_mask=pairs, cu_seqlens=ends)
    weight = torch.randn(D, 3, 3)
    message = r'grid must be \(T,\) with cu_seqlens, \(7,\), got \(1, 7\)'
    refuses(message, ops.aft_conv, X, X, X, weight, grid=(1, 7), cu_seqlens=ends)
    factors = torch.randn(2, 4, 2)
    refuses(message, ops.aft_local, X, X, X, *factors, window=2, grid=(1, 7), cu_seqlens=ends)
    # Also without a token.
    empty, gate = X[:, :0], dict(gate='tan', cu_seqlens=torch.tensor([0]))
    refuses('gate must be none', ops.aft_simple, empty, empty, empty, **gate)
