"""The kernels of AFTLocalHard against the float64 oracle; see `triton_parity.py`."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aft_mm import ops
from aft_mm.ops.triton import availability as triton_availability

from .cases import CASES, Case, run_with_gradients
from .test_backends import assert_close, oracle
from .test_dispatch import LargestTensor
from .triton_parity import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    MARKS,
    TERMS,
    TOLERANCE,
    compare,
    layouts,
    on_device,
)

from aft_mm.ops.triton import block_sizes, window  # isort: skip - where Triton is

pytestmark = MARKS
PLANE = (5, 9)


@pytest.fixture(autouse=True)
def _many_lanes(monkeypatch):
    """Use few programs, since the time of the interpreter depends on their number."""
    many = block_sizes.WindowBlock(lanes=64, rows=3, channels=8, warps=1)
    monkeypatch.setitem(block_sizes.BLOCKS, 'window', {(8, 0): many})


def line(tokens, size, causal=True, channels=3, **options):
    options = dict(window=size, causal=causal, **options)
    name = f'{tokens}-s={size}-causal={causal}'
    return Case(name, 'aft_local_hard', tokens, options, heads=channels, channels=channels)


def plane(size, grid=PLANE, causal=True, channels=3):
    options = dict(window=size, grid=grid, causal=causal)
    name = f'{grid}-s={size}-causal={causal}'
    tokens = grid[0] * grid[1]
    return Case(name, 'aft_local_hard', tokens, options, heads=channels, channels=channels)


def inputs(case, batch=1, dtype=torch.float32):
    return on_device(case.inputs(batch, dtype=dtype))


SERVED = [case for case in CASES if case.op == 'aft_local_hard']
LINES = [line(7, 7), line(40, 13), line(25, 11, causal=False), line(9, 5, channels=40)]
PLANES = [
    plane((2, 2)),
    plane((2, 4)),
    plane((100, 100), causal=False),
    plane((4, 4), (1, 9)),
    plane((6, 2), (37, 3)),
    plane((4, 50), (3, 20), causal=False),
]


@pytest.mark.parametrize('case', SERVED + LINES + PLANES, ids=lambda case: case.name)
def test_matches_oracle(case, monkeypatch):
    compare(case, inputs(case, batch=2 if case.tokens < 10 else 1), monkeypatch)


BLOCK = block_sizes.BLOCKS['window']
ALONE = [line(9, 1), plane((2, 2), (1, 9)), plane((2, 2), (9, 1))]


@pytest.mark.parametrize('case', ALONE, ids=lambda case: case.name)
def test_a_window_of_the_token_itself(case, monkeypatch):
    query, key, value = inputs(case)
    got = compare(case, [query, key, value], monkeypatch, TERMS)[0]
    torch.testing.assert_close(got, torch.sigmoid(query) * value)


def test_blocks_of_a_device(monkeypatch):
    monkeypatch.setitem(block_sizes.BLOCKS, 'window', BLOCK)
    case = plane((4, 4), (3, 7), channels=40)
    compare(case, inputs(case), monkeypatch)


@DTYPES
@pytest.mark.parametrize('case', [line(20, 9), plane((4, 4))], ids=lambda case: case.name)
def test_types(case, dtype, monkeypatch):
    query, key, value = inputs(case, dtype=dtype)
    # Far from 0, so that the gradient of the key is a small difference.
    compare(case, [query, key, value + 10], monkeypatch)


def test_inputs_may_have_different_dtypes(monkeypatch):
    case = line(9, 4)
    query, key, value = inputs(case)
    compare(case, [query.half(), key, value.bfloat16()], monkeypatch)


@pytest.mark.parametrize('gate', ['relu', 'none'])
def test_gates(gate, monkeypatch):
    case = line(19, 4, gate=gate)
    query, key, value = inputs(case)
    if gate != 'none':
        query[0, :3] = torch.tensor([0.0, 1e4, -1e4]).view(3, 1)
        compare(case, [query, key, value], monkeypatch)
    else:
        bare = Case(case.name, case.op, case.tokens, case.options)
        compare(lambda k, v, **extra: bare(None, k, v, **extra), [key, value], monkeypatch)


def spread_keys(kind, key):
    """Return keys of sizes for which sums with a common maximum fail."""
    token = torch.arange(key.shape[1]).view(1, -1, 1).to(key)
    return {
        'huge': key + 1e4 * torch.randn(key.shape).sign().to(key),
        'rising': key + 120 * token,
        'lowest': torch.full_like(key, torch.finfo(key.dtype).min),
    }[kind]


KINDS = ['huge', 'lowest']
SHAPES = {
    'line': line(30, 13),
    'both sides': line(21, 5, causal=False),
    'plane': plane((4, 4)),
    'whole plane': plane((4, 4), causal=False),
}
EACH_SHAPE = pytest.mark.parametrize('shape', SHAPES)


@pytest.mark.parametrize(
    'shape, kind',
    [
        *(('line', kind) for kind in KINDS),
        ('plane', 'rising'),
        ('both sides', 'rising'),
        ('whole plane', 'huge'),
    ],
)
def test_keys_of_any_size(shape, kind, monkeypatch):
    case = SHAPES[shape]
    query, key, value = inputs(case)
    compare(case, [query, spread_keys(kind, key), value], monkeypatch, TERMS)


@pytest.mark.parametrize('case', [line(37, 17), plane((4, 4))], ids=['line', 'plane'])
def test_a_late_spike_leaves_the_prefix_as_it_was(case, monkeypatch):
    query, key, value = inputs(case)
    before = case(query, key, value)
    key[:, -3] += 1000
    after = compare(case, [query, key, value], monkeypatch, TERMS)[0]
    assert torch.equal(after[:, :-3], before[:, :-3])


@EACH_SHAPE
def test_padding_may_be_nan_or_inf(shape, monkeypatch):
    case, scale = SHAPES[shape], 1000 if 'plane' in shape else 1
    query, key, value = inputs(case, batch=3)
    mask = torch.rand(3, case.tokens, device=DEVICE) < 0.6
    mask[1], mask[2, : case.tokens - 3] = False, False
    hidden = ~mask.unsqueeze(-1)
    key = scale * key
    clean = [query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)]
    poisoned = [query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)]
    got = run_with_gradients(case, poisoned, key_mask=mask)
    expected = oracle(case, clean, monkeypatch, key_mask=mask)
    assert_close(got, expected, TOLERANCE[torch.float32], TERMS)
    assert (got[0][1] == 0).all()
    assert all((x.masked_select(hidden) == 0).all() for x in got[2:])


def test_a_key_of_minus_infinity_is_hidden():
    case = line(20, 5)
    query, key, value = inputs(case)
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    mask[:, [0, 4, 11]] = False
    expected = case(query, key, value, key_mask=mask)
    key[:, [0, 4, 11]] = -torch.inf
    assert torch.equal(case(query, key, value), expected)


def test_nan_is_not_hidden():
    """NaN has no influence beyond the window."""
    case = line(40, 17)
    query, key, value = inputs(case)
    key[:, 5] = torch.nan
    output = case(query, key, value)
    sees = (torch.arange(40) >= 5) & (torch.arange(40) < 5 + 17)
    assert output[:, sees].isnan().all() and output[:, ~sees].isfinite().all()


@pytest.mark.parametrize('case', [line(20, 9), plane((4, 4))], ids=['line', 'plane'])
def test_layouts(case):
    tensors = inputs(case, batch=2)
    expected = run_with_gradients(case, tensors)
    other = layouts(tensors)
    assert not any(x.is_contiguous() for x in other)
    mask = torch.ones(case.tokens, 2, dtype=torch.bool, device=DEVICE).T
    leaves = [x.requires_grad_() for x in other]
    output = case(*leaves, key_mask=mask)
    assert torch.equal(output, expected[0]) and output.is_contiguous()
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    strange = cotangent.transpose(0, 2).contiguous().transpose(0, 2)
    gradients = torch.autograd.grad(output, leaves, strange)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1:], strict=True))


OPTIONS = 'sigmoid', [4], [9], True


def test_an_empty_batch():
    empty = torch.empty(0, 9, 3, device=DEVICE, requires_grad=True)
    output, saved = window.window_op(empty, empty, empty, None, *OPTIONS, True)
    assert output.shape == (0, 9, 3) and saved.shape == (3, 0, 9, 3)
    (gradient,) = torch.autograd.grad(output.sum(), empty)
    assert gradient.shape == empty.shape
    assert ops.aft_local_hard(empty, empty, empty, window=3).shape == (0, 9, 3)


@pytest.mark.parametrize('gate, masked', [('sigmoid', True), ('none', False)])
def test_opcheck(gate, masked):
    """opcheck: schema, fake kernel, autograd registration, compiled with dynamic shapes."""
    query, key, value = (torch.randn(1, 9, 3, device=DEVICE, requires_grad=True) for _ in range(3))
    query = None if gate == 'none' else query
    mask = (torch.rand(1, 9) < 0.6).to(DEVICE) if masked else None
    options = gate, *OPTIONS[1:]
    arguments = query, key, value, mask, *options, True
    torch.library.opcheck(window.window_op, arguments)
    _, saved = window.window_op(*arguments)
    tensors = [None if x is None else x.detach() for x in (query, key, value)]
    wanted = [query is not None, True, True]
    arguments = torch.randn_like(value), saved, *tensors, mask, *options, wanted
    torch.library.opcheck(torch.ops.aft_mm.hard_window_backward.default, arguments)


def test_compiles_without_graph_break():
    """With the shape of the first call, and any length after that."""
    torch._dynamo.reset()
    compiled = torch.compile(ops.aft_local_hard, fullgraph=True, backend='aot_eager')

    def call(*parts):
        return compiled(*parts, window=4)

    for tokens, scale in (9, 1), (20, 300):
        case = line(tokens, 4)
        query, key, value = inputs(case)
        tensors = [query, scale * key, value]
        expected = run_with_gradients(case, tensors)
        got = run_with_gradients(call, tensors)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_compiles_a_grid_without_a_query():
    torch._dynamo.reset()
    options = dict(window=4, grid=PLANE, gate='none')
    _, key, value = inputs(plane(4))

    def call(key, value):
        return ops.aft_local_hard(None, key, value, **options)

    compiled = torch.compile(call, fullgraph=True, backend='aot_eager')
    expected = run_with_gradients(call, [key, value])
    got = run_with_gradients(compiled, [key, value])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_autocast_does_not_reach_the_sums():
    case = line(9, 4)
    tensors = inputs(case)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = case(*tensors)
    assert inside.dtype == torch.float32 and torch.equal(inside, case(*tensors))


def test_memory_saved_for_the_gradient():
    case = line(32, 4)
    tensors = [x.requires_grad_() for x in inputs(case)]
    parts = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: parts.append(x) or x, lambda x: x):
        case(*tensors)
    own = [x for x in parts if all(x is not y for y in tensors)]
    assert sum(x.numel() for x in own) == 3 * 32 * 3
    options = 'sigmoid', [4], [32], True, False
    assert window.window_op(*tensors, None, *options)[1].numel() == 0


@pytest.mark.parametrize('case', [line(128, 20), plane((8, 16), (8, 16))], ids=['line', 'plane'])
def test_memory_grows_with_tokens_not_their_square(case):
    with LargestTensor() as recorder:
        run_with_gradients(case, inputs(case))
    assert recorder.largest <= 3 * 3 * 128 * 1.5


def test_unsupported_gradients_give_a_reason():
    x = torch.randn(1, 9, 3, device=DEVICE, requires_grad=True)
    output = window.window_op(x, x, x, None, *OPTIONS, False)[0]
    with pytest.raises(RuntimeError, match='must be called with save=True'):
        output.sum().backward()
    (gradient,) = torch.autograd.grad(
        ops.aft_local_hard(x, x, x, window=3).sum(), x, create_graph=True
    )
    with pytest.raises(
        RuntimeError, match='once; AFT_MM_BACKEND=eager supports second derivatives'
    ):
        gradient.sum().backward()


def test_a_kernel_error_is_raised(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError('out of registers')

    monkeypatch.setattr(window.sum_windows, 'run', fail)
    x = torch.randn(1, 9, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match='out of registers'):
        ops.aft_local_hard(x, x, x, window=3)


def test_the_op_does_not_synchronise(monkeypatch):
    """Forward and backward with fake tensors, for which reading a value fails."""
    monkeypatch.setattr(triton_availability, 'machine_reasons', lambda kind, index: ())
    with FakeTensorMode():
        x = torch.empty(2, 12, 3, requires_grad=True)
        for size, grid in (4, None), ((2, 2), (3, 4)):
            output = ops.aft_local_hard(x, x, x, window=size, grid=grid)
            (gradient,) = torch.autograd.grad(output.sum(), x)
            assert gradient.shape == x.shape


@pytest.mark.skipif(INTERPRETED, reason='takes 50 GB')
def test_more_than_2_to_the_31_elements():
    """The last of many sequences equals a call with that sequence only."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip('needs 60 GB of device memory')
    x = torch.randn(1, 2000, 1024, device=DEVICE, dtype=torch.bfloat16)
    many = x.new_zeros(1100, 2000, 1024)
    many[-1] = x[0]
    got = ops.aft_local_hard(many, many, many, window=100)[-1:]
    torch.testing.assert_close(got, ops.aft_local_hard(x, x, x, window=100))
