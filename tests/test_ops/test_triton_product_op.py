"""The Triton ops of AFT-full and AFT-local: shapes, graphs, memory, synchronisation."""

import pytest
import torch

from aft_mm import ops

from .cases import run_with_gradients
from .test_dispatch import LargestTensor
from .triton_parity import DEVICE, INTERPRETED, on_device

from .product_cases import (  # isort: skip - where Triton is
    EACH,
    IDS,
    MARKS,
    ONE_TILE,
    NoWait,
    cut_of,
    tiling,
    detached,
    full,
    library,
    local,
    op_arguments,
)
from aft_mm.ops.triton import full_local as launch  # isort: skip

pytestmark = MARKS


@pytest.mark.parametrize('case', [local(9, 3, channels=70)], ids=IDS)
def test_the_bias_gradient_may_be_split_over_programs(case, monkeypatch):
    tensors = on_device(case.inputs(dtype=torch.float32))
    expected = run_with_gradients(case, tensors)
    monkeypatch.setattr(launch, 'PROGRAMS_PER_PROCESSOR', 10**6)
    assert launch.share_out(10, 1, tensors[2].device) == (10, 1)
    got = run_with_gradients(case, tensors)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_programs_of_the_bias_gradient_fill_the_device(monkeypatch):
    monkeypatch.setattr(launch, 'count_processors', lambda device: 50)
    assert launch.share_out(80, 200, 'meta') == (1, 80)
    assert launch.share_out(80, 60, 'meta') == (2, 40)
    assert launch.share_out(80, 3, 'meta') == (27, 3)


@pytest.mark.parametrize('which', [1, 2], ids=['key', 'value'])
@pytest.mark.parametrize('case', [full(9, causal=True), local(9, 3, causal=True)], ids=IDS)
def test_nan_does_not_reach_earlier_rows(case, which):
    tensors = on_device(case.inputs(dtype=torch.float32))
    before = case(*tensors)
    for number in (torch.nan, torch.inf, -torch.inf):
        tensors[which][0, 5, 0] = number
        for gradient in (False, True):
            got = case(*(x.clone().requires_grad_(gradient) for x in tensors)).detach()
            for rows in ((0, slice(5)), 1, (0, slice(None), slice(1, None))):
                torch.testing.assert_close(got[rows], before[rows], rtol=1e-5, atol=1e-6)


CALLS = [local(9, 3, rank=0), full(7, 5, gate='none')]


@pytest.mark.parametrize('case', CALLS, ids=IDS)
def test_opcheck(case):
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


@EACH
def test_the_op_does_not_synchronise(case):
    """Forward and backward, around the op and inside it, where the mode does not see calls."""
    leaves = [x.requires_grad_() for x in on_device(case.inputs(dtype=torch.float32))]
    gradients = torch.randn(2, case.tokens, 6, device=DEVICE)
    arguments = detached(op_arguments(case, [x.detach() for x in leaves]))
    cut, band = cut_of(arguments)
    query, key, value, bias, mask, *_, gate = arguments
    call = launch.MatmulCall(query, key, value, bias, mask, gate, band, cut)
    with NoWait():
        output = case(*leaves)
        torch.autograd.grad(output, leaves, gradients)
        saved = tiling.new_saved(value, band, cut.width)
        launch.launch_forward(call, saved)
        launch.launch_backward(gradients, None, saved, call, True)
    with NoWait(), pytest.raises(AssertionError, match='waits for the device'):
        bool((output > 0).all())


@EACH
def test_autocast_does_not_reach_the_sums(case):
    tensors = on_device(case.inputs(dtype=torch.float32))
    expected = run_with_gradients(case, tensors)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = run_with_gradients(case, tensors)
    assert all(torch.equal(a, b) for a, b in zip(inside, expected, strict=True))


def test_only_requested_gradients_are_computed(monkeypatch):
    case = local(9, 3)
    tensors = on_device(case.inputs(dtype=torch.float32))
    monkeypatch.setattr(launch, '_bias_gradient', None)
    value = tensors[2].requires_grad_()
    (got,) = torch.autograd.grad(case(*tensors).sum(), value)
    assert (got != 0).any()


@EACH
def test_memory_saved_for_the_gradient(case):
    tensors = [x.requires_grad_() for x in on_device(case.inputs(dtype=torch.float32))]
    parts = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: parts.append(x) or x, lambda x: x):
        output = case(*tensors)
    saved_parts = [x for x in parts if x.dim() == 1]
    # Three numbers per token and channel: mean, λ and its unit; for tiles and rows one of each.
    assert [x.numel() for x in saved_parts] == [3 * output.numel() + 2 * 6 + 9 + 2]


@pytest.mark.parametrize('rank', [3])
def test_memory_grows_with_tokens_not_their_square(rank):
    case = local(400, 3, rank, channels=2, causal=True)
    arguments = detached(op_arguments(case))
    query, key, value, bias, mask, *_, gate = arguments
    cut, band = cut_of(arguments)
    with LargestTensor() as recorder:  # which does not see the calls inside an op
        call = launch.MatmulCall(query, key, value, bias, mask, gate, band, cut)
        saved = tiling.new_saved(value, band, cut.width)
        output = launch.launch_forward(call, saved)
        launch.launch_backward(output, None, saved, call, True)
    # Tiles of 64 tokens against two tiles, which the interpreter counts in bytes.
    assert recorder.largest <= 4 * 2 * 64 * 448 < 4 * 400 * 400


def test_unsupported_gradients_give_a_reason():
    output = library.product(*op_arguments(local(9, 3, 0)), False)[0]
    with pytest.raises(RuntimeError, match='must be called with save=True'):
        output.sum().backward()
    x, bias = torch.randn(1, 9, 3, device=DEVICE), torch.randn(9, 9, device=DEVICE)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(ops.aft_full(x, x, x, bias).sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match='once; AFT_MM_BACKEND=eager supports second derivatives'
    ):
        gradient.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason='takes 25 GB')
def test_more_than_2_to_the_31_elements():
    """The last of many sequences equals a call with that sequence only."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip('needs 60 GB of device memory')
    x = torch.randn(1, 2000, 1024, device=DEVICE, dtype=torch.bfloat16)
    factors = torch.randn(2, 2000, 16, device=DEVICE, dtype=torch.bfloat16)
    many = x.new_zeros(1100, 2000, 1024)
    many[-1] = x[0]
    got = ops.aft_local(many, many, many, *factors, window=32, causal=True)[-1:]
    torch.testing.assert_close(got, ops.aft_local(x, x, x, *factors, window=32, causal=True))
