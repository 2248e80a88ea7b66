"""The loops in C++, of every set of instructions that this processor has, against the oracle."""

import gc
import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aft_mm import ops
from aft_mm.ops import dispatch
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE, choose_backend
from aft_mm.ops.native import library, support

from . import test_numerics
from .cases import CASES, Case, run_with_gradients
from .test_backends import TOLERANCE, assert_close, oracle
from .test_numerics import TERMS

# In the order in which processors got them.
INSTRUCTIONS = ('any', 'avx2', 'avx512')
HERE = support.INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), 'any')
DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
pytestmark = pytest.mark.skipif(
    not support.library_path(HERE).exists(), reason='the loops were not built: no C++ compiler'
)


@pytest.fixture(autouse=True, params=INSTRUCTIONS[: INSTRUCTIONS.index(HERE) + 1])
def loops(request, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(support, 'find_library', lambda: support.library_path(request.param))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'native')


def conv(grid, kernel, channels, heads, **options):
    name = f'conv-{grid}-{kernel}-{channels}-{heads}-{"-".join(options)}'
    tokens = torch.Size(grid).numel()
    return Case(
        name,
        'aft_conv',
        tokens,
        dict(grid=grid, **options),
        None,
        heads,
        ((heads, *kernel),),
        channels=channels,
    )


def simple(tokens, channels):
    return Case(
        f'simple-{tokens}-{channels}',
        'aft_simple',
        tokens,
        dict(causal=True),
        heads=channels,
        channels=channels,
    )


# Whole and broken vectors of 4, 8 and 16 channels, next to each other and alone; heads that are
# channels, and that a vector meets few and many of; rows that fill the registers, or not; kernels
# of one piece and several, wider and higher than the grid; segments, whole and not.
SHAPES = [
    conv((5, 7), (3, 3), 40, 8), conv((3, 29), (5, 11), 37, 37), conv((1, 1), (3, 3), 16, 16),
    conv((9, 13), (11, 3), 48, 24), conv((67,), (31,), 18, 3), conv((2, 20), (1, 5), 66, 22),
    conv((5, 9), (5, 7), 40, 8, causal=True), conv((67,), (31,), 18, 18, causal=True),
    conv((6, 5), (5, 3), 20, 4, global_connectivity=False),
    simple(1, 3), simple(31, 16), simple(64, 70), simple(33, 64),
]  # fmt: skip
DEFAULTS = dict(key_function='softmax', causal=False, grid=())


def has_a_loop(case):
    options = DEFAULTS | case.options
    needed = support.KERNELS.get(case.op, {'causal': None})
    return len(options['grid'] or ()) < 3 and needed == {name: options[name] for name in needed}


EDGES = [case for case in CASES if has_a_loop(case)]


@DTYPES
@pytest.mark.parametrize('case', [*SHAPES, *EDGES], ids=lambda case: case.name)
def test_matches_oracle(case, dtype, monkeypatch):
    batch = 3
    monkeypatch.setattr(library, 'SAMPLES', 2)
    tensors = case.inputs(batch, dtype, bias_scale=0.5)
    mask = torch.rand(batch, case.tokens) < 0.7
    mask[1] = False
    with torch.no_grad():
        for poison, x in zip((torch.nan, torch.inf), tensors[1:3], strict=True):
            x[~mask] = poison
    for gate in ('sigmoid', 'relu', 'none'):
        given = [x for x in tensors if gate != 'none' or x is not tensors[0]]
        call = case if gate != 'none' else _without_query(case)
        options = dict(gate=gate, key_mask=mask)
        clean = [x.detach().nan_to_num(0, 0, 0) for x in given]
        expected = oracle(call, clean, monkeypatch, **options)
        assert_close(run_with_gradients(call, given, **options), expected, TOLERANCE[dtype], TERMS)


class _Gateless(Case):
    def __call__(self, *tensors, **extra):
        return self.function(None, *tensors, **{**self.options, **extra})


def _without_query(case):
    return _Gateless(**vars(case))


@DTYPES
@pytest.mark.parametrize('what', ['huge_keys', 'late_spike', 'staircase'])
@pytest.mark.parametrize('case', EDGES, ids=lambda case: case.name)
def test_any_finite_key(case, what, dtype, monkeypatch):
    getattr(test_numerics, f'test_{what}')(case, dtype, monkeypatch)


@pytest.mark.parametrize('size', [-2.9, -3.1, 25, 31, -80])
@pytest.mark.parametrize('case', [c for c in EDGES if c.parameters], ids=lambda case: case.name)
def test_biases_on_both_sides_of_what_the_loop_holds(case, size, monkeypatch):
    test_numerics.test_both_sides_of_the_limit_of_the_bias(case, 50, size, monkeypatch)


@pytest.mark.parametrize('broken', [torch.nan, torch.inf])
def test_a_broken_key_leaves_what_does_not_see_it(broken):
    case = simple(70, 40)
    query, key, value = (x.detach() for x in case.inputs(dtype=torch.float32))
    expected = case(query, key, value)
    key[1, 33, 20] = broken
    got = case(query, key, value)
    assert got[1, 33:, 20].isnan().all()
    got[1, 33:, 20] = expected[1, 33:, 20]
    assert torch.equal(got, expected)


@pytest.mark.parametrize('case', [SHAPES[1], SHAPES[-2]], ids=lambda case: case.name)
def test_strides_and_types_are_those_of_the_caller(case):
    tensors = case.inputs(2, torch.float32, bias_scale=0.5)
    expected = run_with_gradients(case, tensors)
    query, key, value, *bias = tensors
    fused = torch.cat([query, key, value], -1).detach()
    parts = fused.split([x.shape[-1] for x in (query, key, value)], -1)
    turned = key.detach().transpose(1, 2).contiguous().transpose(1, 2)
    for given in (parts, (parts[0], turned, parts[2])):
        given = [x.detach().requires_grad_() for x in given]
        got = run_with_gradients(case, [*given, *bias])
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    rounded = query.bfloat16(), key, value.bfloat16(), *bias
    wide = rounded[0].float(), key, rounded[2].float(), *bias
    assert torch.equal(case(*rounded), case(*wide).bfloat16())


@pytest.mark.parametrize('case', [SHAPES[0], SHAPES[-2]], ids=lambda case: case.name)
def test_threads_change_no_bit(case):
    tensors = case.inputs(library.SAMPLES + 1, torch.float32, bias_scale=0.5)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(run_with_gradients(case, tensors))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize('case', [SHAPES[0], SHAPES[-1]], ids=lambda case: case.name)
def test_second_derivatives_and_batched_gradients_are_those_of_eager(case, monkeypatch):
    tensors = case.inputs(2, torch.float32, bias_scale=0.5)

    def measure():
        first = torch.autograd.grad(case(*tensors).square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), tensors)
        torch.manual_seed(1)
        torch.manual_seed(1)
        rows = torch.randn(3, *tensors[0].shape)
        batched = torch.autograd.grad(case(*tensors), tensors, rows, is_grads_batched=True)
        return [x.detach() for x in (*first, *second, *batched)]

    got = measure()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    for a, b in zip(got, measure(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max())


def test_a_constant_bias_is_prepared_once(monkeypatch):
    case, exponentials = SHAPES[0], []
    query, key, value, weight = (x.detach() for x in case.inputs(2, torch.float32))
    expected = case(query, key, value, weight)
    constant, expm1 = ops.mark_constant(weight), torch.expm1
    monkeypatch.setattr(torch, 'expm1', lambda x: exponentials.append(x) or expm1(x))
    assert all(torch.equal(case(query, key, value, constant), expected) for _ in range(3))
    assert len(exponentials) == 1


def reasons(case, *tensors):
    return support.reasons_against(case.op, tensors, dict(key_function='softmax') | case.options)


def test_onlookers_see_operations(monkeypatch):
    case = SHAPES[0]
    tensors = case.inputs(2, torch.float32)
    assert reasons(case, *tensors) == []
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    with FlopCounterMode(display=False) as flops:
        case(*tensors)
    assert flops.get_total_flops() > 0
    duals = torch.func.jvp(lambda key: case(tensors[0], key, *tensors[2:]), (tensors[1],) * 1,
                           (torch.ones_like(tensors[1]),))  # fmt: skip
    assert duals[1].abs().max() < 1e-5  # what is added to all keys changes nothing
    with torch.autograd.forward_ad.dual_level():
        assert reasons(case, *tensors) == ['torch.func or forward mode looks at operations']
    with ops.record_paths() as decisions:
        case(*tensors)
    assert decisions
    assert reasons(case, *(x.double() for x in tensors)) == [
        'has loops for float32 and bfloat16, got torch.float64'
    ]
    monkeypatch.setattr(torch.jit, 'is_tracing', lambda: True)
    assert reasons(case, *tensors) == ['a graph is made of operations of torch']


def test_without_a_library_eager_serves_and_the_table_says_why(monkeypatch, tmp_path):
    monkeypatch.undo()
    case = SHAPES[-1]
    tensors = case.inputs(2, torch.float32)
    monkeypatch.setattr(support, 'library_path', lambda instructions: tmp_path / 'none.so')
    support.find_library.cache_clear()
    try:
        (reason,) = reasons(case, *tensors)
        assert reason.startswith('is not built; ')
        call = case.op, tensors, dict(key_function='softmax') | case.options
        assert choose_backend(*call) == 'eager'
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'native')
        with pytest.raises(dispatch.BackendError, match='native: is not built; '):
            case(*tensors)
    finally:
        support.find_library.cache_clear()


@pytest.mark.parametrize('case', [SHAPES[0], SHAPES[-2]], ids=lambda case: case.name)
def test_hidden_tokens_get_no_gradient_whatever_happens_to_mask_and_gradient(case):
    tensors = case.inputs(2, torch.float32, bias_scale=0.5)
    mask = torch.ones(2, case.tokens, dtype=torch.bool)
    mask[:, ::2] = False
    output, hidden = case(*tensors, key_mask=mask), ~mask
    mask.fill_(True)
    gradient = torch.ones_like(output)
    gradient[:, -1] = torch.nan
    for x in torch.autograd.grad(output, tensors[1:3], gradient):
        assert (x[hidden] == 0).all()


@pytest.mark.parametrize('case', [SHAPES[0], SHAPES[-2]], ids=lambda case: case.name)
def test_what_hooks_and_autocast_do_to_saved_tensors(case, monkeypatch):
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


def test_constants_die_and_need_no_gradient():
    case = SHAPES[0]
    *tokens, weight = case.inputs(2, torch.float32, bias_scale=0.5)
    with torch.inference_mode():
        constant = ops.mark_constant(weight.detach() * 1)
    case(*tokens, constant).sum().backward()
    died = []
    weakref.finalize(constant, died.append, True)
    del constant
    gc.collect()
    assert died


def test_sums_over_many_tokens_keep_their_digits():
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
