"""Compiled training steps: one graph, and no more expensive operations than without a compiler."""

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aft_mm import ops
from aft_mm.ops import online_softmax, reference
from aft_mm.ops.eager import simple

from ..helpers import nightly
from .cases import CAUSAL_CASES, ONE_OF_EACH, PAIR_CASES, run_with_gradients

pytestmark = pytest.mark.slow

aten = torch.ops.aten
# The expensive operations: products, convolutions, running sums, and shifts of window sums.
WORK = (
    aten.bmm,
    aten.mm,
    aten.convolution,
    aten.convolution_backward,
    aten.cumsum,
    aten.constant_pad_nd,
    aten.exp,
)


class Uncompiled(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def operations(graph: GraphModule) -> Counter:
    counts = Counter()
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.cond:
            counts += operations(getattr(graph, node.args[1].target))
        elif isinstance(node.target, torch._ops.OpOverload):
            counts[node.target.overloadpacket] += 1
    return counts


def assert_no_more_work(compiled, case, tensors):
    with Uncompiled() as plain:
        run_with_gradients(case, tensors)
    found = {op: compiled[op] for op in WORK if compiled[op]}
    assert found and all(found[op] <= plain.counts[op] for op in found), (found, plain.counts)


def counting(compiled: Counter):
    def count(graph, inputs):
        compiled.update(operations(graph))
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=count, bw_compiler=count)


# Small windows are a few shifts without a compiler, and tiles with one.
TILED = 'aft_local-2-False', 'aft_local-1', 'aft_local_learned'
COMPILED = {
    **ONE_OF_EACH,
    'masked': next(c for c in PAIR_CASES if c.masked and c.options['causal']),
}


@pytest.mark.parametrize(
    'name',
    nightly(
        COMPILED,
        [
            'aft_conv-1-False',
            'aft_full-1-False',
            'aft_full_batched-1-False',
            'aft_local-1-True',
            'aft_local-2-False',
            'aft_local-2-True',
            'aft_local_hard-0-False',
            'aft_local_learned-1-True',
        ],
    ),
)
def test_compiles_without_graph_break(name):
    """fullgraph, forward and backward, both paths of eager in one graph."""
    torch._dynamo.reset()
    case, compiled = COMPILED[name], Counter()
    options = case.options
    if name == 'masked':
        options = dict(options, pair_mask=case.pair_mask(2))
    tensors = case.inputs(dtype=torch.float32)
    function = torch.compile(case.function, fullgraph=True, backend=counting(compiled))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for key_scale in (300, 1):
            inputs = [tensors[0], (tensors[1] * key_scale).detach(), *tensors[2:]]
            expected = run_with_gradients(case, inputs)
            got = run_with_gradients(lambda *x: function(*x, **options), inputs)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    if not name.startswith((*TILED, 'masked')):
        assert_no_more_work(compiled, case, tensors)


class PromisedStrides(Interpreter):
    """Compare the strides of each result with those that the compiler reads it by."""

    def run_node(self, node):
        if node.target is torch.ops.higher_order.cond:
            choice, *branches, operands = self.fetch_args_kwargs_from_env(node)[0]
            result = PromisedStrides(branches[0 if choice else 1]).run(*operands)
        else:
            result = super().run_node(node)
        if node.op == 'call_function' and 'val' in node.meta:
            for x, promised in zip(tree_leaves(result), tree_leaves(node.meta['val']), strict=True):
                assert not isinstance(x, torch.Tensor) or x.stride() == promised.stride(), node
        return result

    @classmethod
    def backend(cls, graph, inputs):
        return make_boxed_func(cls(graph).run)


@pytest.mark.parametrize(
    'key_scale, trained', nightly(product([1, 60], [False, True]), [(1, True), (60, False)])
)
def test_nodes_of_a_graph_return_the_strides_that_they_promise(key_scale, trained):
    torch._dynamo.reset()
    storage = torch.randn(2, 24, 6)  # [B, D, T]
    key, weight = key_scale * torch.randn(2, 24, 3), torch.randn(3, 3, 3)

    def call(key, value, weight):
        options = dict(grid=(4, 6), global_connectivity=False, gate='none')
        return ops.aft_conv(None, key, value, weight, **options) + 1

    run = PromisedStrides.backend
    backend = aot_autograd(fw_compiler=run, bw_compiler=run, inference_compiler=run)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    value = storage.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not value.is_contiguous()
    if trained:
        tensors = [x.requires_grad_() for x in (key, value, weight)]
        results = []
        for function in (compiled, call):
            results.append(torch.autograd.grad(function(*tensors).square().sum(), tensors))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    else:
        torch.testing.assert_close(compiled(key, value, weight), call(key, value, weight))


def test_conv_compiles_for_open_channels():
    torch._dynamo.reset()

    def call(*tensors):
        return ops.aft_conv(*tensors, grid=(7,))

    compiled = torch.compile(call, fullgraph=True, backend='eager')
    for channels in (4, 8, 6):
        query, value = torch.randn(2, 2, 7, channels)
        tensors = [query, torch.randn(2, 7, 2), value, torch.randn(2, 5)]
        expected = run_with_gradients(call, tensors)
        torch.testing.assert_close(run_with_gradients(compiled, tensors), expected)


def test_running_sums_are_compiled_once(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(online_softmax, 'LONGEST_COMPILED_SCAN', 1000)  # compiled as one sum
    case, compiled = next(case for case in CAUSAL_CASES if case.op == 'aft_simple'), Counter()
    tensors = case.inputs(dtype=torch.float32)
    function = torch.compile(case.function, fullgraph=True, backend=counting(compiled))
    run_with_gradients(lambda *x: function(*x, **case.options), tensors)
    assert_no_more_work(compiled, case, tensors)


@pytest.mark.parametrize('scale', nightly([1.0, 1e4], [1.0]))
def test_one_scan_is_exact_for_any_key(scale, monkeypatch):
    """The form that is compiled for a GPU, with hidden NaN and rows that see nothing."""
    torch._dynamo.reset()
    monkeypatch.setattr(simple, 'SCAN_DEVICES', ('cpu',))
    monkeypatch.setattr(simple, 'FEWEST_SCANNED_COLUMNS', 10)
    query, key, value = torch.randn(3, 2, 67, 5)
    key_mask = torch.rand(2, 67) < 0.7
    key_mask[:, :3] = key_mask[1, 3:40] = False
    # Several keys near each other, however large.
    key, value = key + scale * key.round(), value.masked_fill(~key_mask.unsqueeze(-1), torch.nan)

    def run(function, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        output = function(*inputs, causal=True, key_mask=key_mask)
        weight = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
        return output, *torch.autograd.grad((output * weight).sum(), inputs)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)

    compiled = torch.compile(ops.aft_simple, fullgraph=True, backend=backend)
    expected = run(
        partial(reference.aft_simple, key_function='softmax', gate='sigmoid'), torch.float64
    )
    for got, wanted in zip(run(compiled, torch.float32), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    (graph,) = graphs
    called = {node.target for module in graph.modules() for node in module.graph.nodes}
    assert torch.ops.higher_order.associative_scan in called
    assert torch.ops.higher_order.cond not in called
