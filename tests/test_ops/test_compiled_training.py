"""Compiled training steps: one graph, and no more expensive operations than without a compiler."""

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE

from .cases import ONE_OF_EACH, run_with_gradients

aten = torch.ops.aten
# The expensive operations of an op: products, convolutions, running sums, and the shifts of window
# sums.
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
    """Count the operations that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def operations(graph: GraphModule) -> Counter:
    """Return the operations of a graph for keys and biases of the fast path."""
    counts = Counter()
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.cond:
            counts += operations(getattr(graph, node.args[1].target))
        elif isinstance(node.target, torch._ops.OpOverload):
            counts[node.target.overloadpacket] += 1
    return counts


@pytest.mark.parametrize('case', ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_compiles_without_graph_break(case, monkeypatch):
    """fullgraph, forward and backward, both paths of eager in one graph."""
    torch._dynamo.reset()
    tensors = case.inputs(dtype=torch.float32)
    compiled = Counter()

    def count(graph, inputs):
        compiled.update(operations(graph))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    function = torch.compile(case.function, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for key_scale in (1, 300):
            tensors[1] = (tensors[1] * key_scale).detach()
            expected = run_with_gradients(case, tensors)
            got = run_with_gradients(lambda *x: function(*x, **case.options), tensors)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    tensors[1] = tensors[1] / 300
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    with Uncompiled() as plain:
        run_with_gradients(case, tensors)
    found = {op: compiled[op] for op in WORK if compiled[op]}
    assert found and all(found[op] <= plain.counts[op] for op in found), (found, plain.counts)
