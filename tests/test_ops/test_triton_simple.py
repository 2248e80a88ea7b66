"""The kernels of causal AFT-simple against the float64 oracle; see `triton_parity.py`."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aft_mm import ops
from aft_mm.ops.triton import availability as triton_availability

from .cases import CASES, Case, run_with_gradients
from .test_backends import assert_close, oracle
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

from aft_mm.ops.triton import block_sizes, simple  # isort: skip - where Triton is

pytestmark = MARKS


BLOCKS = {name: block_sizes.BLOCKS[name] for name in ('scan', 'scan_backward')}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Use tiles of 16 and 8 tokens, so that short sequences have several."""
    for kernel, groups in ('scan', 8), ('scan_backward', 4):
        small = block_sizes.ScanBlock(groups, rows=2, row_bytes=64, warps=1)
        monkeypatch.setitem(block_sizes.BLOCKS, kernel, {(8, 0): small})


def cut_into_chunks(monkeypatch):
    """Split sequences into chunks of 16 tokens, as for few sequences."""
    monkeypatch.setattr(simple, 'SHORTEST_CHUNK', 16)
    monkeypatch.setattr(simple, 'count_processors', lambda device: 10**6)


@pytest.fixture(params=['one chunk', 'chunks'])
def chunks(request, monkeypatch):
    """Run with and without chunks."""
    if request.param == 'chunks':
        cut_into_chunks(monkeypatch)


def causal(tokens, channels=3, **options):
    name = f'simple-{tokens}x{channels}'
    options = dict(causal=True, **options)
    return Case(name, 'aft_simple', tokens, options, heads=channels, channels=channels)


SERVED = [case for case in CASES if case.op == 'aft_simple' and case.options.get('causal')]
SIZES = [*SERVED, causal(7, 6), causal(16, 1), causal(33, 21)]


@pytest.mark.parametrize('case', SIZES, ids=lambda case: case.name)
def test_matches_oracle(case, chunks, monkeypatch):
    batch = 2 if case.tokens < 10 else 1
    compare(case, on_device(case.inputs(batch, dtype=torch.float32)), monkeypatch)


KEYS = {'softmax': 'sigmoid', 'relu': 'sigmoid', 'relu2': 'relu'}


@DTYPES
@pytest.mark.parametrize('key', KEYS)
def test_types(key, dtype, monkeypatch):
    case = causal(18, 6, key_function=key, gate=KEYS[key])
    compare(case, on_device(case.inputs(batch=1, dtype=dtype)), monkeypatch)


def test_blocks_of_a_device_and_many_chunks(monkeypatch):
    for kernel, sizes in BLOCKS.items():
        monkeypatch.setitem(block_sizes.BLOCKS, kernel, sizes)
    cut_into_chunks(monkeypatch)
    case = causal(150, 40)
    tensors = on_device(case.inputs(batch=1, dtype=torch.float32))
    assert simple.plan_chunks(tensors[2]).chunks == 3
    compare(case, tensors, monkeypatch)


def test_inputs_may_have_different_dtypes(monkeypatch):
    case = causal(9)
    query, key, value = on_device(case.inputs(dtype=torch.float32))
    tensors = [query.half(), key, value.bfloat16()]
    compare(case, tensors, monkeypatch)


@pytest.mark.parametrize('gate', ['sigmoid', 'relu', 'none'])
@pytest.mark.parametrize('key', ['softmax', 'relu'])
def test_gates(key, gate, monkeypatch):
    case = causal(19, gate=gate, key_function=key)
    query, key, value = on_device(case.inputs(dtype=torch.float32))
    if gate != 'none':
        query[0, :3] = torch.tensor([0.0, 1e4, -1e4]).view(3, 1)
        compare(case, [query, key, value], monkeypatch)
    else:
        bare = Case(case.name, case.op, case.tokens, case.options)
        compare(lambda k, v, **extra: bare(None, k, v, **extra), [key, value], monkeypatch)


# At the ends of groups of 2 tokens, tiles of 8 and chunks of 16.
STEPS = {f'step at {place}': place for place in (3, 16)}
KINDS = ['huge', 'rising', 'lowest', *STEPS]


def spread_keys(kind, key):
    """Return keys of sizes for which sums with a common maximum fail."""
    token = torch.arange(key.shape[1]).view(1, -1, 1).to(key)
    if kind in STEPS:
        return key + 120 * (token >= STEPS[kind])
    return {
        'huge': key + 1e4 * torch.randn(key.shape).sign().to(key),
        'rising': key + 120 * token,
        'lowest': torch.full_like(key, torch.finfo(key.dtype).min),
    }[kind]


@pytest.mark.parametrize('kind', KINDS)
def test_keys_of_any_size(kind, chunks, monkeypatch):
    case = causal(21)
    query, key, value = on_device(case.inputs(batch=1, dtype=torch.float32))
    compare(case, [query, spread_keys(kind, key), value], monkeypatch, TERMS)


@DTYPES
def test_a_late_spike_leaves_the_prefix_as_it_was(dtype, monkeypatch):
    case = causal(19)
    query, key, value = on_device(case.inputs(batch=1, dtype=dtype))
    before = case(query, key, value)
    key[:, -1] += 1000
    after = compare(case, [query, key, value], monkeypatch, TERMS)[0]
    assert torch.equal(after[:, :-1], before[:, :-1])


@pytest.mark.parametrize('key_function', KEYS)
def test_padding_may_be_nan_or_inf(key_function, chunks, monkeypatch):
    case = causal(20, key_function=key_function, gate=KEYS[key_function])
    query, key, value = on_device(case.inputs(batch=4, dtype=torch.float32))
    mask = torch.rand(4, 20, device=DEVICE) < 0.6
    mask[1], mask[2, :17], mask[3, 10:] = False, False, False
    hidden = ~mask.unsqueeze(-1)
    if key_function == 'softmax':
        key = key * torch.tensor([1, 1, 1000, 1000], device=DEVICE).view(4, 1, 1)
    clean = [query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)]
    poisoned = [query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)]
    got = run_with_gradients(case, poisoned, key_mask=mask)
    expected = oracle(case, clean, monkeypatch, key_mask=mask)
    assert_close(got, expected, TOLERANCE[torch.float32], TERMS)
    assert (got[0][1] == 0).all() and (got[0][2, :17] == 0).all()
    assert all((x.masked_select(hidden) == 0).all() for x in got[2:])


def test_a_key_of_minus_infinity_is_hidden(monkeypatch):
    case = causal(9)
    query, key, value = on_device(case.inputs(batch=1, dtype=torch.float32))
    mask = torch.ones(1, 9, dtype=torch.bool, device=DEVICE)
    mask[:, [0, 4]] = False
    expected = case(query, key, value, key_mask=mask)
    key[:, [0, 4]] = -torch.inf
    assert torch.equal(case(query, key, value), expected)


def test_nan_is_not_hidden():
    case = causal(19)
    query, key, value = on_device(case.inputs(batch=1, dtype=torch.float32))
    key[:, 5] = torch.nan
    output = case(query, key, value)
    assert output[:, :5].isfinite().all() and output[:, 5:].isnan().all()


def test_layouts(chunks):
    case = causal(17, 5)
    tensors = on_device(case.inputs(dtype=torch.float32))
    expected = run_with_gradients(case, tensors)
    other = layouts(tensors)
    assert not any(x.is_contiguous() for x in other)
    mask = torch.ones(17, 2, dtype=torch.bool, device=DEVICE).T
    leaves = [x.requires_grad_() for x in other]
    output = case(*leaves, key_mask=mask)
    assert torch.equal(output, expected[0]) and output.is_contiguous()
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    strange = cotangent.transpose(0, 2).contiguous().transpose(0, 2)
    gradients = torch.autograd.grad(output, leaves, strange)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1:], strict=True))


def test_expanded_inputs_and_gradients(monkeypatch):
    case = causal(9)
    one = torch.randn(1, 1, 3, device=DEVICE, requires_grad=True)
    key = torch.randn(2, 9, 3, device=DEVICE)
    (got,) = torch.autograd.grad(case(one.expand(2, 9, 3), key, one.expand(2, 9, 3)).sum(), one)
    # The mean of a constant is the constant: y = sigmoid(x) x.
    gate = torch.sigmoid(one)
    expected = 18 * (gate + one * gate * (1 - gate))
    torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-5)


def test_an_empty_batch():
    empty = torch.empty(0, 5, 3, device=DEVICE, requires_grad=True)
    output, saved = simple.simple_op(empty, empty, empty, None, 'softmax', 'sigmoid', True)
    assert output.shape == (0, 5, 3) and saved.shape == (3, 0, 3, 3)
    (gradient,) = torch.autograd.grad(output.sum(), empty)
    assert gradient.shape == empty.shape


@pytest.mark.parametrize(
    'key_function, gate, masked', [('softmax', 'sigmoid', True), ('relu', 'none', False)]
)
def test_opcheck(key_function, gate, masked):
    """opcheck: schema, fake kernel, autograd registration, compiled with dynamic shapes."""
    query, key, value = (torch.randn(1, 9, 3, device=DEVICE, requires_grad=True) for _ in range(3))
    query = None if gate == 'none' else query
    mask = (torch.rand(1, 9) < 0.6).to(DEVICE) if masked else None
    arguments = query, key, value, mask, key_function, gate, True
    torch.library.opcheck(simple.simple_op, arguments)
    _, saved = simple.simple_op(*arguments)
    inputs = [None if x is None else x.detach() for x in (query, key, value)]
    wanted = [query is not None, True, True]
    arguments = (torch.randn_like(value), saved, *inputs, mask, key_function, gate, wanted)
    torch.library.opcheck(torch.ops.aft_mm.causal_simple_backward.default, arguments)


def test_compiles_without_graph_break():
    """With the shape of the first call, and any length after that of the second."""
    torch._dynamo.reset()
    compiled = torch.compile(ops.aft_simple, fullgraph=True, backend='aot_eager')
    for tokens in (9, 20):
        case = causal(tokens)
        tensors = on_device(case.inputs(batch=1, dtype=torch.float32))

        def call(*parts):
            return compiled(*parts, causal=True)

        expected = run_with_gradients(case, tensors)
        got = run_with_gradients(call, tensors)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        with torch.no_grad():
            assert torch.equal(call(*tensors), expected[0])


def test_autocast_does_not_reach_the_sums():
    case = causal(9)
    tensors = on_device(case.inputs(dtype=torch.float32))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = case(*tensors)
    assert inside.dtype == torch.float32 and torch.equal(inside, case(*tensors))


def test_memory_saved_for_the_gradient():
    case = causal(32)
    tensors = [x.requires_grad_() for x in on_device(case.inputs(dtype=torch.float32))]
    parts = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: parts.append(x) or x, lambda x: x):
        case(*tensors)
    own = [x for x in parts if all(x is not y for y in tensors)]
    assert sum(x.numel() for x in own) == 3 * 2 * 32 // 2 * 3
    assert simple.simple_op(*tensors, None, 'softmax', 'sigmoid', False)[1].numel() == 0


def test_unsupported_gradients_give_a_reason():
    x = torch.randn(1, 9, 3, device=DEVICE, requires_grad=True)
    output = simple.simple_op(x, x, x, None, 'softmax', 'sigmoid', False)[0]
    with pytest.raises(RuntimeError, match='must be called with save=True'):
        output.sum().backward()
    output = ops.aft_simple(x, x, x, causal=True)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match='once; AFT_MM_BACKEND=eager supports second derivatives'
    ):
        gradient.sum().backward()


def test_only_requested_gradients_are_returned():
    case = causal(9)
    tensors = on_device(case.inputs(dtype=torch.float32))
    expected = run_with_gradients(case, tensors)
    cotangent = torch.randn(tensors[2].shape, generator=torch.Generator().manual_seed(1))
    for wanted in range(3):
        leaves = [x.requires_grad_(n == wanted) for n, x in enumerate(on_device(tensors))]
        case(*leaves).backward(cotangent.to(DEVICE))
        assert torch.equal(leaves[wanted].grad, expected[1 + wanted])
        assert sum(x.grad is not None for x in leaves) == 1


def test_a_kernel_error_is_raised(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError('out of registers')

    monkeypatch.setattr(simple.scan_forward, 'run', fail)
    x = torch.randn(1, 9, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match='out of registers'):
        ops.aft_simple(x, x, x, causal=True)


CONFIG_SHAPES = {
    (16, 3072, 256): (3072, 1, 32, 128),
    (2, 3072, 256): (256, 12, 32, 16),
    (16, 1024, 512): (1024, 1, 32, 256),
    (8, 4096, 1024): (4096, 1, 32, 256),
    (64, 4096, 1024): (4096, 1, 64, 1024),
    (1, 16384, 256): (512, 32, 32, 8),
    (1, 100, 8): (128, 1, 32, 1),
}


@pytest.mark.parametrize('shape', CONFIG_SHAPES, ids=str)
def test_sequences_are_split_unless_they_fill_half_of_the_device(shape, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(simple, 'count_processors', lambda device: 132)
    value = torch.empty(shape, dtype=torch.bfloat16, device='meta')
    assert simple.plan_chunks(value) == CONFIG_SHAPES[shape]


def test_the_op_does_not_synchronise(monkeypatch):
    """Forward and backward with fake tensors, for which reading a value fails."""
    with FakeTensorMode():
        x = torch.empty(2, 9, 3, requires_grad=True)
        monkeypatch.setattr(triton_availability, 'machine_reasons', lambda kind, index: ())
        (gradient,) = torch.autograd.grad(ops.aft_simple(x, x, x, causal=True).sum(), x)
    assert gradient.shape == x.shape


@pytest.mark.skipif(INTERPRETED, reason='takes 25 GB')
def test_more_than_2_to_the_31_elements():
    """The last of many sequences equals a call with that sequence only."""
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip('needs 30 GB of device memory')
    x = torch.randn(1, 2000, 1024, device=DEVICE, dtype=torch.bfloat16)
    many = x.new_zeros(1100, 2000, 1024)
    many[-1] = x[0]
    got = ops.aft_simple(many, many, many, causal=True)[-1:]
    torch.testing.assert_close(got, ops.aft_simple(x, x, x, causal=True))


def test_channel_offsets_are_64_bit():
    """Channel · stride beyond int32: three channels, 2^30 numbers apart, untouched in between."""
    stride = 2**30
    memory = torch.empty(2 * stride + 16, dtype=torch.float16, device=DEVICE)
    key = memory.as_strided((1, 9, 3), (9, 1, stride))
    key.copy_(torch.randn(1, 9, 3))
    plain = key.clone(memory_format=torch.contiguous_format)
    expected = ops.aft_simple(plain, plain, plain, causal=True)
    assert torch.equal(ops.aft_simple(key, key, key, causal=True), expected)
    expected = ops.aft_local_hard(plain, plain, plain, window=4)
    assert torch.equal(ops.aft_local_hard(key, key, key, window=4), expected)


def test_torch_func_and_forward_mode_use_eager(monkeypatch):
    x, tangent = torch.randn(2, 1, 9, 3, device=DEVICE)

    def call(x):
        return ops.aft_simple(x, x, x, causal=True)

    with pytest.raises(RuntimeError, match='forward-mode differentiation need operations of torch'):
        torch.func.jvp(call, (x,), (tangent,))
    monkeypatch.setenv('AFT_MM_BACKEND', 'triton,eager')
    _, got = torch.func.jvp(call, (x,), (tangent,))
    step = 1e-3
    expected = (call(x + step * tangent) - call(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
    torch.testing.assert_close(found, got)
    gradient = torch.func.grad(lambda x: call(x).sum())(x)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(call(leaf).sum(), leaf)
    torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)
