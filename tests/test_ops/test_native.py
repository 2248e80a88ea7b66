"""The C++ loops, for every set of instructions of this processor, against the oracle."""

import inspect
import operator
import os
import shutil
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aft_mm import ops
from aft_mm.ops import dispatch, eager
from aft_mm.ops.cases import conv, decay, pairs, simple
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE, choose_backend
from aft_mm.ops.native import availability, bindings

from ..helpers import each, nightly
from . import test_numerics
from .cases import CASES, run_with_gradients
from .test_backends import RESULTS, TOLERANCE, assert_close, oracle
from .test_numerics import TERMS

# From old to new: a processor has all up to one.
INSTRUCTIONS = ('any', 'avx2', 'avx512')
HERE = availability.INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), 'any')
NAME = operator.attrgetter('name')
DTYPES = each('dtype', [torch.float32, torch.bfloat16])
COMPILER = next(filter(shutil.which, [os.environ.get('CXX', 'c++'), 'g++', 'clang++']), None)


@pytest.fixture(scope='module', autouse=True)
def built():
    """Fail if the loops can be built but are not, or are of other sources."""
    if not availability.library_path(HERE).exists():
        if COMPILER is None:
            pytest.skip('no C++ compiler: the loops cannot be built')
        command = availability.BUILD_COMMAND
        pytest.fail(f'the loops are not built for the sources here: run {command}', pytrace=False)


# One source is compiled for each; those in between are tested at night.
BETWEEN = INSTRUCTIONS[1 : INSTRUCTIONS.index(HERE)]
KINDS = [*dict.fromkeys(('any', HERE)), *nightly(BETWEEN)]


@pytest.fixture(autouse=True, params=KINDS)
def loops(request, monkeypatch):
    monkeypatch.setattr(
        availability, 'find_library', lambda: availability.library_path(request.param)
    )
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'native')


# Several heads, and channels and rows that end inside of a vector and of a block of rows.
CONV = conv((5, 7), (3, 3), 8, channels=40)
FULL = pairs(37, heads=2, masked=True, channels=40)
SIMPLE = simple(64, channels=70, causal=True)
DECAY = decay(65, causal=False, channels=70)
# Full and partial vectors of 4, 8 and 16 channels; one head per channel, few and many heads per
# vector; rows that fill the registers, or not; kernels of one piece and several, wider and higher
# than the grid; full and partial segments.
SHAPES = [
    FULL,
    pairs(250, 37, heads=3, channels=24),
    pairs(13, 130, channels=70),
    pairs(64, causal=True, channels=32),
    CONV,
    conv((3, 29), (5, 11), 37, channels=37),
    conv((1, 1), (3, 3), 16, channels=16),
    conv((9, 13), (11, 3), 24, channels=48),
    conv((67,), (31,), 3, channels=18),
    conv((2, 20), (1, 5), 22, channels=66),
    conv((5, 9), (5, 7), 8, channels=40, causal=True),
    conv((67,), (31,), 18, channels=18, causal=True),
    conv((6, 5), (5, 3), 4, channels=20, global_connectivity=False),
    simple(1, channels=3, causal=True),
    simple(31, channels=16, causal=True),
    SIMPLE,
    simple(33, channels=64, causal=True),
    decay(32, channels=16),
    decay(65, channels=70),
    decay(33, causal=False, channels=64),
    DECAY,
]
DEFAULTS = dict(key_function='softmax', causal=False, grid=())


def is_supported(case):
    options = DEFAULTS | case.options
    needed = availability.KERNELS.get(case.op, {'causal': None})
    if not getattr(case, 'per_sample', True):
        return False
    return len(options['grid'] or ()) < 3 and needed == {name: options[name] for name in needed}


EDGES = [case for case in CASES if is_supported(case)]


@DTYPES
@each('case', [*SHAPES, *EDGES])
def test_matches_oracle(case, dtype, monkeypatch):
    batch = 3
    monkeypatch.setattr(bindings, 'SAMPLES', 2)
    tensors = case.inputs(batch, dtype, bias_scale=0.5)
    mask = torch.rand(batch, case.sources or case.tokens) < 0.7
    mask[1] = False
    with torch.no_grad():
        for poison, x in zip((torch.nan, torch.inf), tensors[1:3], strict=True):
            x[~mask] = poison
    for gate in ('sigmoid', 'relu', 'none'):
        given = [x for x in tensors if gate != 'none' or x is not tensors[0]]
        call = case if gate != 'none' else partial(case, None)
        options = dict(gate=gate, key_mask=mask)
        clean = [x.detach().nan_to_num(0, 0, 0) for x in given]
        expected = oracle(call, clean, monkeypatch, **options)
        names = RESULTS if gate != 'none' else [RESULTS[0], *RESULTS[2:]]
        got = run_with_gradients(call, given, **options)
        assert_close(got, expected, TOLERANCE[dtype], TERMS, names)


@DTYPES
@each('what', ['huge_keys', 'late_spike', 'staircase'])
@each('case', EDGES)
def test_any_finite_key(case, what, dtype, monkeypatch):
    inspect.unwrap(getattr(test_numerics, f'test_{what}'))(case, dtype, monkeypatch)


@each('size', [-2.9, -3.1, 25, 31, -80])
@each('case', [c for c in EDGES if c.parameters])
def test_biases_around_the_limit_of_the_loop(case, size, monkeypatch):
    test = test_numerics.test_both_sides_of_the_limit_of_the_bias
    inspect.unwrap(test)(case, 50, size, monkeypatch)


@each('of', ['token', 'channel'])
@each('case', [c for c in EDGES if c.parameters])
def test_a_key_of_minus_infinity_has_no_weight(case, of, monkeypatch):
    test = test_numerics.test_a_key_of_minus_infinity_has_no_weight
    inspect.unwrap(test)(case, of, monkeypatch)


@each('key_scale', [1, 100, 1e4])
@each('case', [c for c in EDGES if c.parameters and c.op != 'aft_decay'])
def test_a_bias_of_minus_infinity_hides_a_pair(case, key_scale, monkeypatch):
    test = test_numerics.test_a_free_bias_of_minus_infinity_hides_a_pair
    inspect.unwrap(test)(case, 1, key_scale, monkeypatch)


@each('heads', [[2], [0, 1, 3]])
@each('causal', [False, True])
@DTYPES
def test_heads_with_a_low_bias_need_no_eager(heads, causal, dtype, monkeypatch):
    case = conv((7, 9), (3, 5), 4, channels=24, causal=causal)
    tensors = case.inputs(3, dtype, bias_scale=0.5)
    with torch.no_grad():
        tensors[3][heads, 0, 1:4] = -9
        tensors[1][:, 40] += 12  # in the window with the low bias it has nearly all the weight
    expected = oracle(case, tensors, monkeypatch)
    monkeypatch.setattr(eager, 'aft_conv', None)
    assert_close(run_with_gradients(case, tensors), expected, TOLERANCE[dtype], TERMS)
    plan = ops.plan_conv(tensors[3])
    for _ in range(2):
        with torch.no_grad():
            repeated = case(*tensors[:3], plan)
        assert_close([repeated], expected[:1], TOLERANCE[dtype])


@each('broken', [torch.nan, torch.inf])
@each('case', [simple(70, channels=40, causal=True), decay(70, channels=40)])
def test_nan_key_reaches_only_its_channel_and_later_rows(case, broken):
    query, key, value, *bias = (x.detach() for x in case.inputs(dtype=torch.float32))
    expected = case(query, key, value, *bias)
    key[1, 33, 20] = broken
    got = case(query, key, value, *bias)
    assert got[1, 33:, 20].isnan().all()
    got[1, 33:, 20] = expected[1, 33:, 20]
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    'case', [conv((3, 29), (5, 11), 37, channels=37), SIMPLE, DECAY, FULL], ids=NAME
)
def test_strides_and_dtypes_of_the_inputs(case):
    tensors = case.inputs(2, torch.float32, bias_scale=0.5)
    expected = run_with_gradients(case, tensors)
    query, key, value, *bias = tensors
    fused = torch.cat([query, key, value], -1).detach()
    parts = fused.split([x.shape[-1] for x in (query, key, value)], -1)
    strided = key.detach().transpose(1, 2).contiguous().transpose(1, 2)
    for given in (parts, (parts[0], strided, parts[2])):
        given = [x.detach().requires_grad_() for x in given]
        got = run_with_gradients(case, [*given, *bias])
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    rounded = query.bfloat16(), key, value.bfloat16(), *bias
    wide = rounded[0].float(), key, rounded[2].float(), *bias
    assert torch.equal(case(*rounded), case(*wide).bfloat16())


@pytest.mark.parametrize('case', [CONV, SIMPLE, DECAY, FULL], ids=NAME)
def test_results_do_not_depend_on_the_number_of_threads(case):
    tensors = case.inputs(bindings.SAMPLES + 1, torch.float32, bias_scale=0.5)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(run_with_gradients(case, tensors))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize('case', [CONV, SIMPLE, DECAY, FULL], ids=NAME)
def test_second_derivatives_and_batched_gradients_equal_eager(case, monkeypatch):
    tensors = case.inputs(2, torch.float32, bias_scale=0.5)

    def measure():
        first = torch.autograd.grad(case(*tensors).square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), tensors)
        torch.manual_seed(1)
        rows = torch.randn(3, *tensors[0].shape)
        batched = torch.autograd.grad(case(*tensors), tensors, rows, is_grads_batched=True)
        return [x.detach() for x in (*first, *second, *batched)]

    got = measure()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    for a, b in zip(got, measure(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max())


def test_a_plan_computes_its_kernel_once(monkeypatch):
    case, exponentials = CONV, []
    query, key, value, weight = (x.detach() for x in case.inputs(2, torch.float32))
    expected = case(query, key, value, weight)
    plan, expm1 = ops.plan_conv(weight), torch.expm1
    weight.fill_(7)  # the plan has a copy
    monkeypatch.setattr(torch, 'expm1', lambda x: exponentials.append(x) or expm1(x))
    assert all(torch.equal(case(query, key, value, plan), expected) for _ in range(3))
    assert len(exponentials) == 1


def reasons(case, *tensors):
    return availability.unsupported_reasons(
        case.op, tensors, dict(key_function='softmax') | case.options
    )


def test_calls_that_need_torch_operations(monkeypatch):
    case = CONV
    tensors = case.inputs(2, torch.float32)
    assert reasons(case, *tensors) == []
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    with FlopCounterMode(display=False) as flops:
        case(*tensors)
    assert flops.get_total_flops() > 0
    duals = torch.func.jvp(
        lambda key: case(tensors[0], key, *tensors[2:]),
        (tensors[1],) * 1,
        (torch.ones_like(tensors[1]),),
    )
    assert duals[1].abs().max() < 1e-5  # a shift of all keys changes nothing
    with torch.autograd.forward_ad.dual_level():
        assert reasons(case, *tensors) == ['torch.func and forward mode need torch operations']
    with ops.record_paths() as paths:
        case(*tensors)
    assert paths
    assert reasons(case, *(x.double() for x in tensors)) == [
        'has loops for float32 and bfloat16, got torch.float64'
    ]
    monkeypatch.setattr(torch.jit, 'is_tracing', lambda: True)
    (reason,) = reasons(case, *tensors)
    assert reason.startswith('a graph calls the loops only for inference')


def test_without_a_library_eager_is_used_and_the_error_says_why(monkeypatch, tmp_path, caplog):
    monkeypatch.undo()
    case = SIMPLE
    tensors = case.inputs(2, torch.float32)
    monkeypatch.setattr(availability, 'library_path', lambda *kinds: tmp_path / 'none.so')
    availability.find_library.cache_clear()
    try:
        (reason,) = reasons(case, *tensors)
        assert reason.startswith('was built from other sources than these; ')
        call = case.op, tensors, dict(key_function='softmax') | case.options
        assert choose_backend(*call) == 'eager'
        (warning,) = caplog.messages
        assert warning.startswith('the C++ loops are not used: was built from other sources')
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'native')
        with pytest.raises(dispatch.BackendError, match='native: was built from other sources'):
            case(*tensors)
    finally:
        availability.find_library.cache_clear()


@each('dtype', [torch.float32, torch.bfloat16])
def test_a_gate_near_zero_scales_a_mean_of_many_tokens(dtype):
    """The product of both denominators is larger than float32 numbers."""
    query, value = torch.full((1, 1600, 8), -83.0, dtype=dtype), torch.full((1, 1600, 8), 1e8)
    key, value = torch.zeros(1, 1600, 8, dtype=dtype), value.to(dtype)
    expected = torch.sigmoid(query.double()) * value.double()
    conv = ops.aft_conv(query, key, value, torch.zeros(8, 3, 3), grid=(40, 40))
    for found in (conv, ops.aft_simple(query, key, value, causal=True)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize('case', [CONV, SIMPLE, DECAY, FULL], ids=NAME)
def test_hidden_tokens_get_no_gradient_if_the_mask_is_overwritten(case):
    tensors = case.inputs(2, torch.float32, bias_scale=0.5)
    mask = torch.ones(2, case.tokens, dtype=torch.bool)
    mask[:, ::2] = False
    output, hidden = case(*tensors, key_mask=mask), ~mask
    mask.fill_(True)
    gradient = torch.ones_like(output)
    gradient[:, -1] = torch.nan
    for x in torch.autograd.grad(output, tensors[1:3], gradient):
        assert (x[hidden] == 0).all()


@pytest.mark.parametrize('case', [CONV, SIMPLE, DECAY, FULL], ids=NAME)
def test_saved_tensor_hooks_and_autocast_in_the_backward_pass(case, monkeypatch):
    tensors = case.inputs(2, torch.float32, bias_scale=0.5)
    expected = torch.autograd.grad(case(*tensors).sum(), tensors)

    def unpack(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        got = torch.autograd.grad(case(*tensors).sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with torch.autocast('cpu', torch.bfloat16):
        got = torch.autograd.grad(case(*tensors).sum(), tensors, create_graph=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max())


def test_sums_over_many_tokens_are_accurate():
    tokens = 200_000
    value = (1 + 0.1 * torch.randn(1, tokens, 4)).requires_grad_()
    key = torch.randn(1, tokens, 4)
    wide = [x.detach().double() for x in (key, value)]
    mean = (wide[0].exp() * wide[1]).cumsum(1) / wide[0].exp().cumsum(1)
    got = ops.aft_simple(None, key, value, causal=True, gate='none')
    torch.testing.assert_close(got.double(), mean, rtol=1e-6, atol=0)
    weight = torch.zeros(4, 3)
    got = ops.aft_conv(None, key, value, weight, grid=(tokens,), gate='none')
    torch.testing.assert_close(got[:, 0].double(), mean[:, -1], rtol=1e-6, atol=0)


@each('causal', [True, False])
@each('rate', [1e-4, 0.02, 0.5, 20.0])
def test_the_gradient_of_a_decay_is_no_difference_of_large_sums(rate, causal):
    """Values have a large mean, which the gradients of a decay and of keys do not depend on."""
    key, value = torch.randn(2, 2, 1500, 8)
    decay = rate * (1 + torch.rand(8))
    weight, gradients = torch.randn_like(value), []
    for offset in (0, 64):
        tensors = [x.clone().requires_grad_() for x in (key, value + offset, decay)]
        y = ops.aft_decay(None, *tensors, causal=causal, gate='none')
        gradients.append(torch.autograd.grad((y * weight).sum(), tensors))
    wide = [x.double().requires_grad_() for x in (key, value, decay)]
    y = eager.aft_decay(None, *wide, causal=causal, key_mask=None, gate='none')
    expected = torch.autograd.grad((y * weight).sum(), wide)
    assert_close(gradients[0], expected, TOLERANCE[torch.float32], TERMS)
    assert_close(gradients[1], expected, 5e-5, 1.0)


@each('key_scale, bias_scale', [(1, 1), (1, 300), (8, 300), (15, 15)])
def test_full_needs_no_eager_for_keys_of_a_small_range(key_scale, bias_scale, monkeypatch):
    """Biases may have any size; beyond it a call is exact by eager."""
    tensors = [x.detach() for x in FULL.inputs(3, torch.float32, bias_scale)]
    tensors[1] *= key_scale
    expected = oracle(FULL, tensors, monkeypatch)
    with monkeypatch.context() as patch:
        if key_scale < 10:
            patch.setattr(eager, 'aft_full_batched', None)
        assert_close(run_with_gradients(FULL, tensors), expected, TOLERANCE[torch.float32], TERMS)


def test_a_mask_of_pairs_may_be_overwritten_before_the_backward_pass():
    query, key, value, bias = (x.detach() for x in FULL.inputs(3, torch.float32))
    mask = FULL.pair_mask(3)
    hidden = ~mask
    bias.requires_grad_()
    output = ops.aft_full(query, key, value, bias, num_heads=2, pair_mask=mask)
    mask.fill_(True)
    (grad,) = torch.autograd.grad(output.sum(), bias)
    assert (grad[hidden.unsqueeze(1).expand_as(grad)] == 0).all() and grad.abs().max() > 0


def nodes_of(function, *inputs):
    names = []

    def backend(graph, example):
        names.extend(str(node.target) for node in graph.graph.nodes if 'aft_mm' in str(node.target))
        return graph

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)(*inputs), names


# The graph does not depend on the instructions.
@pytest.mark.parametrize('loops', [HERE], indirect=True)
@each('dtype, scale', [(torch.float32, 1), (torch.float32, 200), (torch.bfloat16, 200)])
def test_compiled_inference_calls_the_loops(dtype, scale, monkeypatch):
    """Also for keys and biases that need the safe path."""
    grid = 4, 5
    query, value = torch.randn(2, 2, 20, 6).to(dtype)
    key = (scale * torch.randn(2, 20, 3)).to(dtype)
    weight, mask = scale / 4 * torch.randn(3, 3, 7), torch.rand(2, 20) < 0.8
    for options in (
        dict(),
        dict(key_mask=mask),
        dict(causal=True),
        dict(global_connectivity=False),
    ):
        options['grid'] = grid

        def mix(query, key, value, weight, options=options):
            return ops.aft_conv(query, key, value, weight, **options)

        inputs = query, key, value, weight
        expected = mix(*inputs)
        found, names = nodes_of(mix, *inputs)
        assert names == ['aft_mm.native_conv.default']
        torch.testing.assert_close(found, expected)
        if dtype != torch.bfloat16:
            continue
        trained = [x.clone().requires_grad_() for x in inputs]
        with monkeypatch.context() as patch:
            patch.setenv(ENVIRONMENT_VARIABLE, 'native,eager')
            assert 'aft_mm.native_conv.default' not in nodes_of(mix, *trained)[1]

    def running_mean(query, key, value):
        return ops.aft_simple(query, key, value, causal=True)

    inputs = query, scale * value, value
    found, names = nodes_of(running_mean, *inputs)
    assert names == ['aft_mm.native_simple.default']
    torch.testing.assert_close(found, running_mean(*inputs))
