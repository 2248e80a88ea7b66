"""The Triton kernels of AFT-conv against the float64 oracle, forward and every gradient.

How: `triton_parity.py`.
"""

import pytest
import torch

from aft_mm import ops

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

from aft_mm.ops.triton import conv_launch as launch  # isort: skip - where Triton is
from aft_mm.ops.triton import conv_library as library  # isort: skip

pytestmark = MARKS


@pytest.fixture
def kernels_only(monkeypatch):
    """A call that goes another way fails."""

    def refuse(*args):
        raise AssertionError('went to the safe path of eager')

    monkeypatch.setattr(library, 'safe_conv_mean', refuse)


@pytest.fixture(params=[3, 8])
def width(request, monkeypatch):
    """Tiles of 3 columns, several per row and the last one not whole; of 8, one."""
    monkeypatch.setattr(launch, 'WIDTHS', (request.param,))


def conv(grid=(2, 5), kernel=(3, 3), heads=2, channels=4, **options):
    options = dict(grid=grid, **options)
    shape = (heads, *kernel)
    return Case(
        'conv', 'aft_conv', grid[0] * grid[1], options, None, heads, (shape,), True, channels
    )


def inputs(case, batch=1, dtype=torch.float32):
    return on_device(case.inputs(batch, dtype=dtype))


SERVED = [
    case
    for case in CASES
    if case.op == 'aft_conv'
    and len(case.options['grid']) < 3
    and not case.options['causal']
    and case.options.get('global_connectivity', True)
]


@pytest.mark.parametrize('case', SERVED, ids=lambda case: case.name)
def test_matches_oracle(case, kernels_only, monkeypatch):
    compare(case, inputs(case), monkeypatch)


# Kernels of one entry, wide, higher than the map; tokens on every side.
@pytest.mark.parametrize('kernel', [(1, 1), (1, 7), (7, 1)])
def test_tiles(kernel, width, kernels_only, monkeypatch):
    case = conv((3, 7), kernel, channels=2)
    compare(case, inputs(case), monkeypatch)


@DTYPES
@pytest.mark.parametrize('heads', [1, 2, 4])
def test_types_and_heads(dtype, heads, monkeypatch):
    case = conv(heads=heads)
    compare(case, inputs(case, dtype=dtype), monkeypatch)


# Of 3 columns with one beyond the kernel; of 5 with none; of 17, which is more than one span holds.
@pytest.mark.parametrize('kernel, widest', [((3, 3), 2), ((1, 15), 6), ((1, 17), 15)])
def test_spans(kernel, widest, kernels_only, monkeypatch):
    monkeypatch.setattr(launch, 'WIDEST_SPAN', widest)
    case = conv((3, 9), kernel, channels=2)
    compare(case, inputs(case), monkeypatch)


def test_a_map_of_14_by_14(kernels_only, monkeypatch):
    """Several programs per map, two tiles per row, rows far outside of the kernel."""
    case = conv((14, 14), (3, 7), heads=1, channels=1)
    compare(case, inputs(case), monkeypatch)


def test_weights_and_queries_of_another_type(kernels_only, monkeypatch):
    """As under autocast: parameters stay float32."""
    case = conv()
    query, key, value, weight = inputs(case)
    tensors = [query.half(), key, value.bfloat16(), weight]
    got = run_with_gradients(case, tensors)
    assert [x.dtype for x in got] == [value.bfloat16().dtype, *(x.dtype for x in tensors)]
    assert_close(got, oracle(case, tensors, monkeypatch), TOLERANCE[torch.bfloat16])


def test_autocast_does_not_reach_the_sums():
    case = conv()
    tensors = inputs(case)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = case(*tensors)
    assert inside.dtype == torch.float32 and torch.equal(inside, case(*tensors))


def test_more_channels_than_a_program_owns(monkeypatch):
    case = conv((1, 3), heads=35, channels=70)
    compare(case, inputs(case), monkeypatch)


@pytest.mark.parametrize('gate', ['sigmoid', 'relu', 'none'])
def test_gates(gate, kernels_only, monkeypatch):
    case = conv(gate=gate)
    tensors = inputs(case)
    if gate != 'none':
        compare(case, tensors, monkeypatch)
    else:
        compare(lambda *x, **extra: case(None, *x, **extra), tensors[1:], monkeypatch)


BIASES = {'suppressed': -20.0, 'lowest': -59.0, 'highest': 59.0, 'both': 29.0}


@pytest.mark.parametrize('bias', BIASES)
@pytest.mark.parametrize('keys', ['huge', 'spike', 'falling'])
def test_keys_and_biases_of_any_size(keys, bias, kernels_only, monkeypatch):
    """The difference of sums is 0/0 where a kernel of −20 lies over a key of +20."""
    case = conv((3, 4), channels=2)
    query, key, value, weight = inputs(case)
    sign = weight.sign() if bias == 'both' else (weight > 0).float()
    if bias == 'suppressed':
        sign = torch.ones_like(weight)
    token = torch.arange(12, device=DEVICE).view(1, -1, 1)
    key = {
        'huge': key + 1e4 * key.sign(),
        'spike': key * 0 + 20.0 * (token == 5),
        'falling': key - 120 * token,
    }[keys]
    compare(case, [query, key, value, BIASES[bias] * sign], monkeypatch, TERMS)


@pytest.mark.parametrize('size, calls', [(29.9, 0), (30.1, 1), (80.0, 1)])
def test_what_the_kernels_are_not_exact_for_goes_to_the_safe_path(size, calls, monkeypatch):
    made, safe = [], library.safe_conv_mean
    monkeypatch.setattr(library, 'safe_conv_mean', lambda *x: made.append(1) or safe(*x))
    case = conv((3, 4), channels=2)
    query, key, value, weight = inputs(case)
    weight = size * weight.sign()
    weight[0, 0, 0], weight[0, 0, 1] = size, -size
    compare(case, [query, 100 * key, value, weight], monkeypatch, TERMS)
    assert len(made) == calls


def test_padding_holds_anything(width, kernels_only, monkeypatch):
    case = conv()
    query, key, value, weight = inputs(case, batch=3)
    mask = torch.rand(3, 10, device=DEVICE) < 0.6
    mask[1] = False
    hidden = ~mask.unsqueeze(-1)
    clean = [query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), weight]
    bad = [query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf), weight]
    got = run_with_gradients(case, bad, key_mask=mask)
    expected = oracle(case, clean, monkeypatch, key_mask=mask)
    assert_close(got, expected, TOLERANCE[torch.float32])
    assert (got[0][1] == 0).all()
    assert all((x.masked_select(hidden) == 0).all() for x in got[2:4])


def test_nan_is_not_hidden():
    case = conv()
    query, key, value, weight = inputs(case)
    value[:, 4, 0] = torch.nan
    output = case(query, key, value, weight)
    assert output[..., 0].isnan().all() and output[..., 1:].isfinite().all()


def test_layouts(kernels_only):
    case = conv(heads=4)
    tensors = inputs(case)
    expected = run_with_gradients(case, tensors)
    other = layouts(tensors[:3])
    other.append(tensors[3].transpose(0, 2).contiguous().transpose(0, 2))
    leaves = [x.detach().requires_grad_() for x in other]
    output = case(*leaves, key_mask=torch.ones(10, 1, dtype=torch.bool, device=DEVICE).T)
    assert torch.equal(output, expected[0]) and output.is_contiguous()
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    strange = cotangent.transpose(0, 2).contiguous().transpose(0, 2)
    gradients = torch.autograd.grad(output, leaves, strange)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1:], strict=True))


# Of 7 tiles: all at once, 2 and in the last part 1, one each.
@pytest.mark.parametrize('programs', [1, 4, 10**6])
def test_the_gradient_of_weight_in_parts(programs, monkeypatch):
    monkeypatch.setattr(launch, 'wanted_programs', lambda device: programs)
    case = conv((7, 4), channels=2)
    compare(case, inputs(case), monkeypatch)


def test_an_empty_batch():
    leaves = [x.requires_grad_() for x in inputs(conv(), batch=0)]
    output, sums = library.conv(*leaves, None, [2, 5], 'sigmoid', True)
    assert output.shape == (0, 10, 4) and sums.shape == (0, 2, 2, 5, 4)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]
    assert (gradients[3] == 0).all()


@pytest.mark.parametrize('gate, masked', [('sigmoid', True), ('none', False)])
def test_the_ops_are_sound(gate, masked):
    """opcheck: schema, fake kernel, autograd registration, compiled with dynamic shapes."""
    query, key, value, weight = (x.requires_grad_() for x in inputs(conv(heads=2)))
    query = None if gate == 'none' else query
    mask = (torch.rand(1, 10) < 0.6).to(DEVICE) if masked else None
    arguments = (query, key, value, weight, mask, [2, 5], gate)
    torch.library.opcheck(library.conv, (*arguments, True))
    _, *saved = library.conv(*arguments, True)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    backward = torch.randn_like(value), *saved, *arguments
    torch.library.opcheck(library.conv_backward, backward)


def test_compiles_without_graph_break():
    """Both sides of the decision in one graph: a weight beyond what the kernels are exact for."""
    torch._dynamo.reset()
    compiled = torch.compile(ops.aft_conv, fullgraph=True, backend='aot_eager')
    case = conv()
    for size in (1, 100):
        tensors = inputs(case)
        tensors[3] = tensors[3] * size
        expected = run_with_gradients(case, tensors)
        got = run_with_gradients(lambda *x: compiled(*x, **case.options), tensors)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_kept_for_the_gradient():
    case = conv()
    tensors = [x.requires_grad_() for x in inputs(case)]
    parts = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: parts.append(x) or x, lambda x: x):
        case(*tensors)
    own = {x.data_ptr() for x in tensors}
    assert sum(x.numel() for x in parts if x.data_ptr() not in own) == 2 * tensors[2].numel()
    assert library.conv(*tensors, None, [2, 5], 'sigmoid', False)[1].numel() == 0


def test_gradients_that_cannot_be_had_say_why():
    case = conv()
    tensors = [x.requires_grad_() for x in inputs(case)]
    output = library.conv(*tensors, None, [2, 5], 'sigmoid', False)[0]
    with pytest.raises(RuntimeError, match='must be called with save=True'):
        output.sum().backward()
    (gradient,) = torch.autograd.grad(case(*tensors).sum(), tensors[1], create_graph=True)
    with pytest.raises(RuntimeError, match='once; AFT_MM_BACKEND=eager serves second derivatives'):
        gradient.sum().backward()


def test_tiles_and_spans():
    def cut(kernel, grid):
        parts = launch.cut(384, kernel, grid)
        width, tiles = parts.blocks['WIDTH'], parts.sizes['tiles']
        return width, tiles, parts.slots, parts.blocks['SPANS'], parts.blocks['SPAN']

    assert cut((11, 11), (14, 14)) == (7, 2, 28, 1, 11)
    assert cut((15, 15), (24, 24)) == (8, 3, 72, 1, 15)
    assert cut((25, 25), (24, 24)) == (8, 3, 72, 2, 13)
    assert cut((27, 27), (51, 84)) == (7, 12, 624, 2, 14)
    assert cut((1, 101), (1, 300)) == (7, 43, 43, 7, 15)


@pytest.mark.skipif(INTERPRETED, reason='takes 60 GB')
def test_more_numbers_than_an_int_counts():
    """The last of many maps is that map alone."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip('needs 60 GB of device memory')
    x = torch.randn(1, 2000, 1024, device=DEVICE, dtype=torch.bfloat16)
    many = x.new_zeros(1100, 2000, 1024)
    many[-1] = x[0]
    weight = torch.randn(1024, 3, 3, device=DEVICE)
    got = ops.aft_conv(many, many, many, weight, grid=(40, 50))[-1:]
    torch.testing.assert_close(got, ops.aft_conv(x, x, x, weight, grid=(40, 50)))
