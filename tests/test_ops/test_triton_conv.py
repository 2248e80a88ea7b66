"""The Triton kernels of AFT-conv against the float64 oracle, forward and every gradient.

See `triton_parity.py`. The cases are similar to `test_triton_product.py`.
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
    TERMS,
    TOLERANCE,
    compare,
    layouts,
    on_device,
)

from .product_cases import MARKS, SHIPPED, NoWait, tiling, spread_keys  # isort: skip - where Triton is
from aft_mm.ops.triton import conv as library  # isort: skip
from aft_mm.ops.triton import full_local as launch  # isort: skip

pytestmark = MARKS


def conv(grid=(2, 5), kernel=(3, 3), heads=2, channels=4, **options):
    options = dict(grid=grid, **options)
    shape = (heads, *kernel)
    tokens = torch.Size(grid).numel()
    return Case('conv', 'aft_conv', tokens, options, None, heads, (shape,), True, channels)


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
def test_matches_oracle(case, monkeypatch):
    compare(case, inputs(case, 3), monkeypatch)


# With tiles of 32 positions: kernel rows that reach over zero, one and two tiles; sums beyond them;
# one or many empty positions at the end of each row; a row longer than a tile.
@pytest.mark.parametrize('grid, kernel', [((14, 14), (3, 7)), ((3, 40), (1, 7)), ((150,), (5,))])
def test_maps_of_several_tiles(grid, kernel, monkeypatch):
    case = conv(grid, kernel, channels=2)
    compare(case, inputs(case), monkeypatch)


@SHIPPED
@DTYPES
def test_types(dtype, monkeypatch):
    """Two tiles of 64 positions, with a mean for which the gradient of the key is a difference."""
    case = conv((7, 11), heads=1, channels=2)
    tensors = inputs(case, 2, dtype)
    tensors[2] += 10
    compare(case, tensors, monkeypatch)
    with torch.no_grad():  # bfloat16 is multiplied without conversion
        got = case(*tensors)
    assert_close([got], oracle(case, tensors, monkeypatch)[:1], TOLERANCE[dtype])


def test_weights_and_queries_of_another_type(monkeypatch):
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


def test_more_sequences_and_channels_than_a_program_takes(monkeypatch):
    case = conv((1, 3), heads=2, channels=18)
    compare(case, inputs(case, 9), monkeypatch)


@pytest.mark.parametrize('gate', ['relu', 'none'])
def test_gates(gate, monkeypatch):
    case = conv(gate=gate)
    tensors = inputs(case)
    if gate != 'none':
        compare(case, tensors, monkeypatch)
    else:
        compare(lambda *x, **extra: case(None, *x, **extra), tensors[1:], monkeypatch)


# Three tiles, without and with rows that are recomputed.
@pytest.mark.parametrize(
    'keys, signs, bias',
    [('huge', 'all', -20), ('late', 'both', 29)],
)
def test_keys_and_biases_of_any_size(keys, signs, bias, monkeypatch):
    """For a kernel value of −20 on a key of +20, the difference of sums would be 0/0."""
    case = conv((9, 8), channels=2)
    query, key, value, weight = inputs(case)
    sign = weight.sign() if signs == 'both' else (weight > 0).float()
    if signs == 'all':
        sign = torch.ones_like(weight)
    compare(case, [query, spread_keys(keys, key), value, bias * sign], monkeypatch, TERMS)


def flags_of(case, tensors):
    """Return the flags that a call with gradients writes, [h, tiles, blocks of channels]."""
    query, key, value, weight = (x.requires_grad_() for x in tensors)
    grid = case.options['grid']
    saved = library.conv(query, key, value, weight, None, list(grid), 'sigmoid', True)[1]
    places = library._map(value, weight, grid)
    band, block = places.tiles(value, True)
    like = value.new_empty(places.shape)
    return tiling.split_saved(saved, like, band, block.width).flags


def test_only_flagged_rows_are_recomputed():
    """Not for keys of any size, nor for biases of 20; those of one head starve rows of that."""
    case = conv((9, 8), channels=2)
    query, key, value, weight = inputs(case)
    assert (flags_of(case, [query, 1e4 * key, value, 20 * weight.sign()]) == 0).all()
    key[:, 20] = 100
    weight[1], weight[1, 0, 0] = -50, 50
    flags = flags_of(case, [query, key, value, weight])
    assert flags.shape == (2, 3, 1) and (flags[0] == 0).all() and flags[1].any()


def test_padding_may_be_nan_or_inf(monkeypatch):
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


def test_layouts():
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


def test_the_gradient_of_weight_in_parts(monkeypatch):
    case = conv((9, 8), channels=2)
    tensors = inputs(case)
    expected = run_with_gradients(case, tensors)
    monkeypatch.setattr(launch, 'PROGRAMS_PER_PROCESSOR', 10**6)
    torch.testing.assert_close(run_with_gradients(case, tensors), expected, rtol=1e-5, atol=1e-5)


def test_an_empty_batch():
    leaves = [x.requires_grad_() for x in inputs(conv(), batch=0)]
    output, saved = library.conv(*leaves, None, [2, 5], 'sigmoid', True)
    assert output.shape == (0, 10, 4) and saved.numel() == 0
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]
    assert (gradients[3] == 0).all()


@pytest.mark.parametrize('gate, masked', [('sigmoid', True), ('none', False)])
def test_opcheck(gate, masked):
    """opcheck: schema, fake kernel, autograd registration, compiled with dynamic shapes."""
    query, key, value, weight = (x.requires_grad_() for x in inputs(conv((1, 5), (1, 3))))
    query = None if gate == 'none' else query
    mask = (torch.rand(1, 5) < 0.6).to(DEVICE) if masked else None
    arguments = (query, key, value, weight, mask, [1, 5], gate)
    torch.library.opcheck(library.conv, (*arguments, True))
    _, saved = library.conv(*arguments, True)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    wanted = [query is not None, True, True, masked, False]
    backward = torch.ops.aft_mm.conv_backward.default
    torch.library.opcheck(backward, (torch.randn_like(value), saved, *arguments, wanted))


def test_compiles_without_graph_break():
    """fullgraph, forward and backward, with exact tiles and others in one graph."""
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


def test_the_op_does_not_synchronise():
    """Forward and backward, inside and around the op."""
    case = conv()
    leaves = [x.requires_grad_() for x in inputs(case)]
    gradient = torch.randn_like(leaves[2])
    tensors = [x.detach() for x in leaves]
    mask = torch.ones(1, 10, dtype=torch.bool, device=DEVICE)
    with NoWait():
        torch.autograd.grad(case(*leaves), leaves, gradient)
        places, call = library._call(*tensors, mask, [2, 5], 'sigmoid', True)
        saved = tiling.new_saved(call.value, call.band, call.block.width)
        places.move_back(launch.launch_forward(call, saved))
        launch.launch_backward(places.move(gradient), None, saved, call, True)


def test_memory_saved_for_the_gradient():
    """12 bytes per element in float32, and no copies of inputs."""
    case = conv((3, 19))
    tensors = [x.requires_grad_() for x in inputs(case)]
    parts = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: parts.append(x) or x, lambda x: x):
        case(*tensors)
    own = {x.data_ptr() for x in tensors}
    (saved_part,) = (x for x in parts if x.data_ptr() not in own)
    places = (3 * 20 - 1) * 4
    assert saved_part.dtype == torch.float32 and 3 * places < saved_part.numel() < 3 * places + 50
    assert library.conv(*tensors, None, [3, 19], 'sigmoid', False)[1].numel() == 0


def test_unsupported_gradients_give_a_reason():
    case = conv()
    tensors = [x.requires_grad_() for x in inputs(case)]
    output = library.conv(*tensors, None, [2, 5], 'sigmoid', False)[0]
    with pytest.raises(RuntimeError, match='must be called with save=True'):
        output.sum().backward()
    (gradient,) = torch.autograd.grad(case(*tensors).sum(), tensors[1], create_graph=True)
    with pytest.raises(
        RuntimeError, match='once; AFT_MM_BACKEND=eager supports second derivatives'
    ):
        gradient.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason='takes 60 GB')
def test_more_than_2_to_the_31_elements():
    """The last of many maps equals a call with that map only."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip('needs 60 GB of device memory')
    x = torch.randn(1, 2000, 1024, device=DEVICE, dtype=torch.bfloat16)
    many = x.new_zeros(1100, 2000, 1024)
    many[-1] = x[0]
    weight = torch.randn(1024, 3, 3, device=DEVICE)
    got = ops.aft_conv(many, many, many, weight, grid=(40, 50))[-1:]
    torch.testing.assert_close(got, ops.aft_conv(x, x, x, weight, grid=(40, 50)))
