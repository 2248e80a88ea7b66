"""AFT-conv by the CUDA C++ kernels, emulated on a CPU, against the float64 oracle."""

import pytest
import torch

from aft_mm.ops import dispatch
from aft_mm.ops.cases import LONG_CASES, TOLERANCE
from aft_mm.ops.cases import conv as case_of
from aft_mm.ops.cuda.conv import empty_like, is_channel_major

from .cases import CASES, run_with_gradients
from .cuda_emulation import emulated, emulation_folder  # noqa: F401 - fixtures
from .test_backends import assert_close, oracle

pytestmark = [pytest.mark.usefixtures('emulated'), pytest.mark.slow]
BF16, HALF = torch.bfloat16, torch.float16
# One key takes all the weight: see test_numerics.py.
TERMS = 1.0


def serves(case):
    if case.op != 'aft_conv':
        return False
    return len(case.options['grid']) < 3


def conv(grid, kernel, heads=2, channels=4, **options):
    return case_of(grid, kernel, heads, channels=channels, **options)


def is_breadth(case):
    others = (7,), (9,), (1, 9), (3, 14), (5, 7)
    return case.options['grid'] in others or case.name.startswith('conv-(5, 4)-k=(3, 3)-h=1')


SERVED = [*filter(serves, CASES)]
SHAPES = [
    *(case for case in SERVED if not is_breadth(case)),
    conv((14, 14), (11, 11)),
    conv((7, 28), (5, 9), heads=4),  # a warp per map
    conv((5, 41), (7, 27)),  # strips with two blocks on either side, an odd width
    conv((20, 17), (5, 3), global_connectivity=False),
    conv((100,), (31,)),
    conv((150,), (63,), heads=4, causal=True),
    conv((3, 40), (1, 7), gate='none'),
    conv((4, 12), (3, 3), gate='relu'),
    conv((3, 24), (27, 47)),  # larger than the map
    # Causal: registers and loops of rows, strips, rows above and below.
    conv((14, 14), (11, 11), heads=4, causal=True),
    conv((9, 41), (3, 5), causal=True),
    conv((20, 17), (17, 3), causal=True),
    conv((6, 33), (3, 5), causal=True, global_connectivity=False),
]
MORE_SHAPES = [
    *filter(is_breadth, SERVED),
    conv((16, 16), (31, 5), heads=4),  # the largest of conv_small
    conv((17, 3), (3, 3)),
    conv((70,), (9,), causal=True, global_connectivity=False),
    conv((4, 12), (3, 3), gate='silu'),
    conv((7, 12), (5, 7), causal=True),
    conv((4, 70), (3, 27), heads=4, causal=True),  # far blocks on both sides
    conv((12, 3), (5, 5), heads=1, causal=True, gate='relu'),
    conv((3, 24), (27, 47), causal=True),
]
nightly = pytest.mark.nightly


def inputs(case, batch=3, dtype=BF16, order=lambda x: x):
    tensors = [x.detach() for x in case.inputs(batch, dtype)]
    return [*map(order, tensors[:3]), *(x.float() for x in tensors[3:])]


def channel_major(x):
    """Return tokens [B, T, C] as a view of [C, B·T], as a projection may write them."""
    return x.movedim(2, 0).contiguous().movedim(0, 2)


def run(case, tensors, **extra):
    if case.options.get('gate') != 'none':
        return run_with_gradients(case, tensors, **extra)
    return run_with_gradients(lambda *x, **more: case(None, *x, **more), tensors[1:], **extra)


def compare(case, tensors, monkeypatch, floor=1e-3, **extra):
    got = run(case, tensors, **extra)
    with monkeypatch.context() as patch:
        patch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'reference')
        expected = run(case, [x.double() for x in tensors], **extra)
    dtype = tensors[2].dtype
    assert got[0].dtype == dtype
    assert_close(got, expected, TOLERANCE[dtype], floor)
    return got


@pytest.mark.parametrize(
    'case',
    [*SHAPES, *(pytest.param(case, marks=nightly) for case in MORE_SHAPES)],
    ids=lambda case: case.name,
)
def test_matches_oracle(case, monkeypatch):
    tensors = inputs(case, 9 if case.tokens < 20 else 2)
    tensors[2] += 3  # the gradient of the key is a difference
    compare(case, tensors, monkeypatch)


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(SERVED[2], marks=nightly),
        pytest.param(conv((5, 41), (3, 27)), marks=nightly),
        pytest.param(conv((40,), (7,), causal=True), marks=nightly),
        conv((9, 41), (3, 5), causal=True),
    ],
)
def test_float16_is_multiplied_in_tf32(case, monkeypatch):
    compare(case, inputs(case, 2, HALF), monkeypatch)


MASKED = conv((5, 7), (3, 5)), conv((3, 24), (3, 5)), conv((5, 40), (3, 5), causal=True)


@pytest.mark.parametrize(
    'case, dtype',
    [
        pytest.param(case, dtype, id=f'case{index}-{dtype}', marks=[nightly] * (number != index))
        for index, case in enumerate(MASKED)
        for number, dtype in enumerate((BF16, HALF, torch.float32))
    ],
)
def test_masked_tokens_may_be_nan(case, dtype, monkeypatch):
    query, key, value, weight = inputs(case, 9, dtype)
    mask = torch.rand(9, case.tokens) < 0.6
    mask[1] = False
    hidden = ~mask.unsqueeze(-1)
    clean = [query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), weight]
    poisoned = [query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)]
    got = run_with_gradients(case, [*poisoned, weight], key_mask=mask)
    assert_close(got, oracle(case, clean, monkeypatch, key_mask=mask), TOLERANCE[dtype])
    assert (got[0][1] == 0).all()
    assert all((x.masked_select(hidden) == 0).all() for x in got[2:4])


@pytest.mark.parametrize(
    'case',
    [
        SERVED[2],
        pytest.param(conv((14, 14), (11, 11)), marks=nightly),
        pytest.param(conv((5, 41), (3, 27)), marks=nightly),
        conv((40,), (7,), causal=True),
        pytest.param(conv((9, 41), (3, 5), causal=True), marks=nightly),
        pytest.param(conv((20, 17), (5, 3), global_connectivity=False), marks=nightly),
        pytest.param(conv((3, 40), (1, 7), gate='none'), marks=nightly),
    ],
)
def test_float32_is_multiplied_in_three_parts(case, monkeypatch):
    tensors = inputs(case, 2, torch.float32)
    tensors[2] += 3
    compare(case, tensors, monkeypatch)


@pytest.mark.parametrize('name', ['spread keys', 'keys of ±1e4', 'both'])
def test_float32_keys_and_biases_of_any_size(name, monkeypatch):
    case, (spread, shift) = conv((5, 26), (3, 5), causal=True), EXTREMES[name]
    query, key, value, weight = inputs(case, 2, torch.float32)
    compare(case, [query, key * spread, value, weight + shift], monkeypatch, TERMS)


EXTREMES = {  # keys times a number, w plus a number
    'spread keys': (15, 0),
    'a key with all the weight': (30, -20),
    'keys of ±1e4': (5000, 0),
    'large w': (1, 78),
    'small w': (1, -78),
    'both': (1000, 40),
    'w beyond float32': (1, 100),
}


@pytest.mark.parametrize('name', EXTREMES)
@pytest.mark.parametrize(
    'case', [conv((7, 12), (5, 7)), conv((3, 24), (3, 5)), conv((5, 26), (3, 5), causal=True)]
)
def test_keys_and_biases_of_any_size(case, name, monkeypatch):
    spread, shift = EXTREMES[name]
    query, key, value, weight = inputs(case, 2)
    compare(case, [query, key * spread, value, weight + shift], monkeypatch, TERMS)


@pytest.mark.parametrize(
    'grid, kernel',
    [
        pytest.param((60,), (9,), marks=nightly),
        ((4, 15), (3, 5)),
        pytest.param((2, 30), (3, 3), marks=nightly),
    ],
)
def test_a_late_key_leaves_the_rows_before_it(grid, kernel, monkeypatch):
    case = conv(grid, kernel, heads=4, causal=True)
    tensors = inputs(case, 2)
    before = case(*tensors)
    tensors[1][:, -3] += 1000
    after = compare(case, tensors, monkeypatch, TERMS)[0]
    torch.testing.assert_close(after[:, :-3], before[:, :-3], rtol=2e-2, atol=2e-2)
    tensors[2][:, -2] = torch.nan
    assert torch.equal(case(*tensors).isnan().any(2).any(0), torch.arange(60) >= 58)


def test_rows_that_float32_does_not_hold_need_the_exact_kernels(emulated, monkeypatch):  # noqa: F811
    """A sequence that is not flagged is not computed again."""
    case = conv((7, 12), (5, 7), heads=4, global_connectivity=False)
    query, key, value, weight = inputs(case, 2)
    key[1] *= 1000  # rows without the largest key
    expected = compare(case, [query, key, value, weight], monkeypatch, TERMS)[0]
    launch = emulated.launch

    def leave_out(name, macros, kernel, *others):
        if 'exact' not in kernel:
            launch(name, macros, kernel, *others)

    monkeypatch.setattr(dispatch._modules['cuda'].nvrtc, 'launch', leave_out)
    got = case(query, key, value, weight)
    assert torch.equal(got[0], expected[0]) and not torch.equal(got[1], expected[1])


@pytest.mark.parametrize('case', [conv((6, 8), (3, 5), heads=4), conv((3, 25), (3, 5))])
def test_layouts_and_runs_give_the_same_bits(case):
    query, key, value, weight = inputs(case, 9)
    expected = run_with_gradients(case, [query, key, value, weight])
    every_other = torch.full((*value.shape[:2], 8), torch.nan, dtype=BF16)
    every_other[..., ::2] = value
    odd = torch.empty(1 + query.numel(), dtype=BF16)[1:].view(4, 9, -1)  # no pair is aligned
    odd.copy_(query.movedim(2, 0))
    for _ in range(2):
        leaves = [odd.movedim(0, 2), channel_major(key), every_other[..., ::2], weight]
        leaves = [x.detach().requires_grad_() for x in leaves]
        output = case(*leaves)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(output, leaves, cotangent.to(BF16))
        for got, want in zip((output, *gradients), expected, strict=True):
            assert torch.equal(got, want)
        assert output.is_contiguous() and is_channel_major(gradients[1])


def test_an_empty_batch():
    case = conv((3, 4), (3, 3))
    leaves = [x.requires_grad_() for x in inputs(case, 0)]
    output = case(*leaves)
    assert output.shape == (0, 12, 4) and output.dtype == BF16
    assert all((x == 0).all() for x in torch.autograd.grad(output.sum(), leaves))


def test_only_the_first_gradient_and_no_transforms(monkeypatch):
    case = conv((3, 4), (3, 3))
    leaves = [x.requires_grad_() for x in inputs(case, 2)]
    (gradient,) = torch.autograd.grad(case(*leaves).sum(), leaves[1], create_graph=True)
    message = 'of the cuda backend is differentiable once; AFT_MM_BACKEND=eager'
    with pytest.raises(RuntimeError, match=message):
        gradient.sum().backward()
    query, key, value, weight = (x.detach() for x in leaves)
    with pytest.raises(dispatch.BackendError, match='torch.func and forward-mode'):
        torch.func.grad(lambda k: case(query, k, value, weight).float().sum())(key)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'cuda,eager')
    assert torch.func.grad(lambda k: case(query, k, value, weight).float().sum())(key).any()


@pytest.mark.parametrize('order', [lambda x: x, channel_major])
def test_opcheck(order):
    """Schema, fake kernel with its strides, and autograd registration."""
    case = conv((3, 4), (3, 3))
    tensors = [x.requires_grad_() for x in inputs(case, 2, order=order)]
    mask = torch.rand(2, 12) < 0.6
    arguments = *tensors, mask, [3, 4], 'sigmoid', True, False, True
    tests = 'test_schema', 'test_autograd_registration', 'test_faketensor'
    torch.library.opcheck(torch.ops.aft_mm.cuda_conv.default, arguments, test_utils=tests)


def test_compiles_without_graph_break(emulated):  # noqa: F811
    case = conv((6, 8), (3, 5))
    tensors = inputs(case, 2, order=channel_major)
    expected = run_with_gradients(case, tensors)
    torch._dynamo.reset()
    compiled = torch.compile(case.function, fullgraph=True, backend='aot_eager')
    got = run_with_gradients(lambda *x: compiled(*x, **case.options), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


REFUSED = {
    'of float32, float16 or bfloat16, got torch.float64': dict(dtype=torch.float64),
    'on grids of 1 or 2 sizes only, got (2, 2, 2)': dict(grid=(2, 2, 2), kernel=(3, 3, 3)),
    'for w of up to 129 columns, got 131': dict(grid=(200,), kernel=(131,)),
}


@pytest.mark.parametrize('message', REFUSED)
def test_other_calls_give_a_reason(message, monkeypatch):
    options = dict(grid=(2, 4), kernel=(3, 3), causal=False, dtype=BF16)
    options.update(REFUSED[message])
    case = conv(options['grid'], options['kernel'], causal=options['causal'])
    tensors = inputs(case, 1, options['dtype'])
    with pytest.raises(dispatch.BackendError) as error:
        case(*tensors)
    assert message in str(error.value)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'cuda,eager')
    assert case(*tensors).isfinite().all()


def test_the_case_of_a_config(monkeypatch):
    # 24 channels of a key, dk added before it is rounded
    (case,) = [case for case in filter(serves, LONG_CASES) if case.channels == 96]
    compare(case, inputs(case, 2), monkeypatch)


def test_gradients_keep_the_order_of_their_tensors():
    x = torch.empty(2, 3, 4)
    assert empty_like(x).is_contiguous() and empty_like(channel_major(x)).stride() == (3, 1, 6)
