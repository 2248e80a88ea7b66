"""The kernels of AFT-full and AFT-local 1-d against the float64 oracle; how: `triton_parity.py`."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aft_mm import ops

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

from aft_mm.ops.triton import product_cut as cutting  # isort: skip - where Triton is
from aft_mm.ops.triton import product_launch as launch  # isort: skip
from aft_mm.ops.triton import product_library as library  # isort: skip

pytestmark = MARKS


def full(tokens, sources=None, channels=6, **options):
    shape = tokens, sources or tokens
    name = 'full-{}x{}x{}'.format(*shape, channels)
    return Case(name, 'aft_full', tokens, options, sources, channels, (shape,), channels=channels)


def local(tokens, window, rank=3, channels=6, **options):
    """With factors, or a free bias for rank 0."""
    causal = options.get('causal', False)
    shapes = ((tokens, rank),) * 2 if rank else ((tokens, window if causal else 2 * window - 1),)
    name = f'local-{tokens}x{channels}-s={window}-rank={rank}-causal={causal}'
    options = dict(window=window, **options)
    return Case(name, 'aft_local', tokens, options, None, channels, shapes, channels=channels)


ONE_TILE = [full(9, 5), full(9, causal=True), local(9, 3), local(9, 3, rank=0, causal=True)]
ONE_TILE.append(local(9, (2, 2), grid=(3, 3), causal=True))
IDS = lambda case: getattr(case, 'name', None)  # noqa: E731
EACH = pytest.mark.parametrize('case', ONE_TILE, ids=IDS)
OPS = 'aft_full', 'aft_local', 'aft_local_normalized'
SERVED = [case for case in CASES if case.op in OPS]
# Five tiles of 32 tokens: past and future ones, on a line and on a grid.
MANY_TILES = [
    local(150, 3),
    local(150, 40, causal=True),
    local(150, (3, 4), grid=(15, 10)),
    local(150, (3, 4), grid=(15, 10), causal=True),
    full(70, 130),
    full(100, causal=True),
]
SIZES = [
    *SERVED,
    *(full(5, 70), full(40, channels=70, causal=True)),
    local(70, 2, rank=40),
    local(70, 3, channels=70),
]


@pytest.fixture(autouse=True)
def cuts(request, monkeypatch):
    """Tiles of 32 tokens and blocks of 32 channels, unless a test asks for those of the devices."""
    if getattr(request, 'param', 'small') == 'shipped':
        return
    sizes = dict(tile=32, width=32, step=16, warps=4)
    small = {kind: cut._replace(**sizes) for kind, cut in cutting.CUTS.items()}
    monkeypatch.setattr(cutting, 'CUTS', small)
    if INTERPRETED:  # which takes its time for each step, not for what is in it
        monkeypatch.setattr(launch, 'SOME', 32)
        monkeypatch.setattr(launch, 'ROWS_WEIGHED', 32)


SHIPPED = pytest.mark.parametrize('cuts', ['shipped'], indirect=True)


@pytest.mark.parametrize('case', SIZES, ids=IDS)
def test_matches_oracle(case, monkeypatch):
    tensors = on_device(case.inputs(2 if case.tokens < 10 else 1, dtype=torch.float32))
    # With one token the gradients of key and w cancel to 0: see test_numerics.py.
    compare(case, tensors, monkeypatch, TERMS if case.tokens == 1 else 1e-3)


@SHIPPED
@DTYPES
@pytest.mark.parametrize('case', [full(63), full(1), local(150, 5), MANY_TILES[3]], ids=IDS)
def test_types(case, dtype, monkeypatch):
    tensors = on_device(case.inputs(1, dtype=dtype))
    tensors[2] += 10  # the gradient of the key is then a small difference
    compare(case, tensors, monkeypatch, TERMS if case.tokens == 1 else 1e-3)


@SHIPPED
@DTYPES
@pytest.mark.parametrize('case', [full(40, 70), local(150, 5, causal=True), MANY_TILES[3]], ids=IDS)
def test_inference(case, dtype, monkeypatch):
    """Without a gradient bfloat16 is multiplied as it is."""
    tensors = on_device(case.inputs(1, dtype=dtype))
    with torch.no_grad():
        got = case(*tensors)
    assert_close([got], oracle(case, tensors, monkeypatch)[:1], TOLERANCE[dtype])


def test_the_types_of_the_inputs_may_differ(monkeypatch):
    case = local(9, 3)
    query, key, value, u, v = on_device(case.inputs(dtype=torch.float32))
    tensors = [query.half(), key, value.bfloat16(), u, v.bfloat16()]
    got = run_with_gradients(case, tensors)
    assert [x.dtype for x in got] == [value.bfloat16().dtype, *(x.dtype for x in tensors)]
    assert_close(got, oracle(case, tensors, monkeypatch), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize('gate', ['sigmoid', 'relu', 'none'])
@pytest.mark.parametrize('make', [full, local])
def test_gates(make, gate, monkeypatch):
    case = make(7, 5, gate=gate)
    query, *others = on_device(case.inputs(dtype=torch.float32))
    if gate != 'none':
        query[0, :3] = torch.tensor([0.0, 1e4, -1e4]).view(3, 1)
        compare(case, [query, *others], monkeypatch)
    else:
        bare = Case(case.name, case.op, case.tokens, case.options)
        compare(lambda *parts, **extra: bare(None, *parts, **extra), others, monkeypatch)


def spread_keys(kind, key):
    """The keys, of one of the sizes that break sums with a common maximum."""
    token = torch.arange(key.shape[1]).view(1, -1, 1).to(key)
    return {
        'huge': key + 1e4 * torch.randn(key.shape).sign().to(key),
        'far below 0': key - 1e4,
        'rising': key + 120 * token,
        'step': key + 120 * (token >= key.shape[1] // 2),
        'late': key + 1000 * (token == key.shape[1] - 1),
    }[kind]


@EACH
@pytest.mark.parametrize('kind', ['huge', 'far below 0', 'step'])
def test_keys_of_any_size(kind, case, monkeypatch):
    query, key, *others = on_device(case.inputs(dtype=torch.float32))
    compare(case, [query, spread_keys(kind, key), *others], monkeypatch, TERMS)


@pytest.mark.parametrize('size, spike', [(31, 0), (25, 50), (-80, 0), (80, 100)])
@EACH
def test_biases_of_any_size(case, size, spike, monkeypatch):
    query, key, value, *bias = on_device(case.inputs(dtype=torch.float32))
    key[:, 2] += spike
    bias[0] = size * bias[0].sign()
    if len(bias) == 2:
        bias = [torch.zeros_like(part) for part in bias]
        bias[0][:, 0], bias[1][:, 0] = size * torch.randn(9).sign(), 1
    compare(case, [query, key, value, *bias], monkeypatch, TERMS)


@pytest.mark.parametrize('kind', ['huge', 'rising', 'late'])
@pytest.mark.parametrize('case', MANY_TILES[1:5], ids=IDS)
def test_keys_of_any_size_from_tile_to_tile(kind, case, monkeypatch):
    query, key, *others = on_device(case.inputs(1, dtype=torch.float32))
    compare(case, [query, spread_keys(kind, key), *others], monkeypatch, TERMS)


def flags_of(case, tensors, key_mask=None):
    """The flags that a call with gradients writes, [B, tiles, blocks of channels]."""
    arguments = op_arguments(case, tensors, key_mask)
    saved = library.product(*arguments, True)[1]
    cut, band = cut_of(arguments)
    return cutting.split_saved(saved, arguments[2], band, cut.width).flags


@pytest.mark.parametrize('case', MANY_TILES, ids=IDS)
def test_only_what_needs_it_is_done_once_more(case):
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


@pytest.mark.parametrize('scale', [1, 1000])
@EACH
def test_padding_holds_anything(case, scale, monkeypatch):
    query, key, value, *bias = on_device(case.inputs(batch=4, dtype=torch.float32))
    mask = torch.rand(4, key.shape[1], device=DEVICE) < 0.6
    mask[1], mask[2, :4], mask[3, 4:] = False, False, False
    hidden = ~mask.unsqueeze(-1)
    key = key * scale
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


@pytest.mark.parametrize('case', [full(9, channels=70), local(9, 3, channels=70)], ids=IDS)
def test_the_sum_of_the_bias_gradient_may_be_shared_out(case, monkeypatch):
    tensors = on_device(case.inputs(dtype=torch.float32))
    expected = run_with_gradients(case, tensors)
    monkeypatch.setattr(launch, 'PROGRAMS_PER_PROCESSOR', 10**6)
    assert launch.share_out(10, 1, tensors[2].device) == (10, 1)
    got = run_with_gradients(case, tensors)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_what_sums_the_bias_gradient_fills_the_device(monkeypatch):
    monkeypatch.setattr(launch, 'count_processors', lambda device: 50)
    assert launch.share_out(80, 200, 'meta') == (1, 80)
    assert launch.share_out(80, 60, 'meta') == (2, 40)
    assert launch.share_out(80, 3, 'meta') == (27, 3)


def op_arguments(case, tensors=None, key_mask=None, batch=1):
    """The arguments of the op `product` up to `save`, with gradients wanted for all of them."""
    if tensors is None:
        tensors = on_device(case.inputs(batch, dtype=torch.float32))
    query, key, value, *bias = tensors
    window, grid, causal = (case.options.get(name) for name in ('window', 'grid', 'causal'))
    if window is not None:
        window, grid = library.window_on(window, grid)
    if window is not None:
        bias = [
            library.local_table(
                *bias, *(None,) * (2 - len(bias)), value, window, grid, causal, True
            )
        ]
    query, key, value, bias = (x.detach().requires_grad_() for x in (query, key, value, *bias))
    gate = case.options.get('gate', 'sigmoid')
    query = None if gate == 'none' else query
    return [query, key, value, bias, key_mask, window, grid, bool(causal), gate]


def cut_of(arguments):
    _, _, value, bias, _, window, grid, causal, _ = arguments
    cut = cutting.choose_cut(value, True)
    return cut, cutting.make_band(bias, value, window, grid, causal, cut.tile)


def detached(arguments):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]


CALLS = [local(9, 3, rank=0), full(7, 5, gate='none'), ONE_TILE[-1]]


@pytest.mark.parametrize('case', CALLS, ids=IDS)
def test_the_op_is_sound(case):
    """opcheck: schema, fake kernel, autograd registration, compiled with dynamic shapes."""
    masked = case.op == 'aft_local'
    mask = torch.rand(1, case.tokens, device=DEVICE) < 0.6 if masked else None
    arguments = op_arguments(case, key_mask=mask)
    torch.library.opcheck(library.product, (*arguments, True))
    output, saved = library.product(*detached(arguments), True)
    backward = torch.ops.aft_mm.product_backward.default
    for biased in (True, False):
        wanted = [arguments[0] is not None, True, True, biased, False]
        parts = torch.randn_like(output), saved, *detached(arguments), wanted
        torch.library.opcheck(backward, parts)


@EACH
def test_an_empty_batch(case):
    arguments = op_arguments(case, batch=0)
    output, saved = library.product(*arguments, True)
    assert output.shape == (0, 9, 6)
    leaves = arguments[:4]
    for leaf, gradient in zip(leaves, torch.autograd.grad(output.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape and (gradient == 0).all()


@pytest.mark.parametrize('case', [ONE_TILE[1], ONE_TILE[-1]], ids=IDS)
def test_compiles_without_graph_break(case):
    """fullgraph, forward and backward, with exact tiles and others in one graph."""
    torch._dynamo.reset()
    tensors = on_device(case.inputs(dtype=torch.float32))
    compiled = torch.compile(case.function, fullgraph=True, backend='aot_eager')

    def call(*parts):
        return compiled(*parts, **case.options)

    for _ in ('plain', 'flagged'):
        expected = run_with_gradients(case, tensors)
        got = run_with_gradients(call, tensors)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        tensors[1] *= 1000


class NoWait(TorchDispatchMode):
    """An error for what would wait for a device: reading a number, or sizes that depend on one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
        assert not set(tags) & set(function.tags), f'{function} waits for the device'
        return function(*args, **(kwargs or {}))


@EACH
def test_nothing_waits_for_the_device(case):
    """Forward and backward, inside the op, whose calls the mode would not see, and around it."""
    leaves = [x.requires_grad_() for x in on_device(case.inputs(dtype=torch.float32))]
    gradients = torch.randn(2, case.tokens, 6, device=DEVICE)
    arguments = detached(op_arguments(case, [x.detach() for x in leaves]))
    cut, band = cut_of(arguments)
    query, key, value, bias, mask, *_, gate = arguments
    call = launch.Call(query, key, value, bias, mask, gate, band, cut)
    with NoWait():
        output = case(*leaves)
        torch.autograd.grad(output, leaves, gradients)
        saved = cutting.new_saved(value, band, cut.width)
        launch.product_forward(call, saved)
        launch.product_backward(gradients, None, saved, call, True)
    with NoWait(), pytest.raises(AssertionError, match='waits for the device'):
        bool((output > 0).all())


@EACH
def test_autocast_does_not_reach_the_sums(case):
    tensors = on_device(case.inputs(dtype=torch.float32))
    expected = run_with_gradients(case, tensors)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = run_with_gradients(case, tensors)
    assert all(torch.equal(a, b) for a, b in zip(inside, expected, strict=True))


def test_only_the_gradients_that_are_asked_for(monkeypatch):
    case = local(9, 3)
    tensors = on_device(case.inputs(dtype=torch.float32))
    monkeypatch.setattr(launch, '_bias_gradient', None)
    value = tensors[2].requires_grad_()
    (got,) = torch.autograd.grad(case(*tensors).sum(), value)
    assert (got != 0).any()


@EACH
def test_what_is_kept_for_the_gradient(case):
    tensors = [x.requires_grad_() for x in on_device(case.inputs(dtype=torch.float32))]
    parts = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: parts.append(x) or x, lambda x: x):
        output = case(*tensors)
    kept = [x for x in parts if x.dim() == 1]
    # Three numbers per token and channel: mean, λ and its unit; for tiles and rows one of each.
    assert [x.numel() for x in kept] == [3 * output.numel() + 2 * 6 + 9 + 2]


@pytest.mark.parametrize('rank', [3, 0])
def test_memory_grows_with_tokens_not_their_square(rank):
    case = local(400, 3, rank, channels=2, causal=True)
    arguments = detached(op_arguments(case))
    query, key, value, bias, mask, *_, gate = arguments
    cut, band = cut_of(arguments)
    with LargestTensor() as recorder:  # which does not look into an op
        call = launch.Call(query, key, value, bias, mask, gate, band, cut)
        saved = cutting.new_saved(value, band, cut.width)
        output = launch.product_forward(call, saved)
        launch.product_backward(output, None, saved, call, True)
    # Tiles of 64 tokens against two tiles, which the interpreter counts in bytes.
    assert recorder.largest <= 4 * 2 * 64 * 448 < 4 * 400 * 400


def test_gradients_that_cannot_be_had_say_why():
    output = library.product(*op_arguments(local(9, 3, 0)), False)[0]
    with pytest.raises(RuntimeError, match='must be called with save=True'):
        output.sum().backward()
    x, bias = torch.randn(1, 9, 3, device=DEVICE), torch.randn(9, 9, device=DEVICE)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(ops.aft_full(x, x, x, bias).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once; AFT_MM_BACKEND=eager serves second derivatives'):
        gradient.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason='takes 25 GB')
def test_more_numbers_than_an_int_counts():
    """The last of many sequences is that sequence alone."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip('needs 60 GB of device memory')
    x = torch.randn(1, 2000, 1024, device=DEVICE, dtype=torch.bfloat16)
    factors = torch.randn(2, 2000, 16, device=DEVICE, dtype=torch.bfloat16)
    many = x.new_zeros(1100, 2000, 1024)
    many[-1] = x[0]
    got = ops.aft_local(many, many, many, *factors, window=32, causal=True)[-1:]
    torch.testing.assert_close(got, ops.aft_local(x, x, x, *factors, window=32, causal=True))
