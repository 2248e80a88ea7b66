"""A compiled training step has no more expensive operations than an uncompiled one."""

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from aft_mm.ops.eager import online_softmax

from .cases import CASES, CAUSAL_CASES

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
ONE_OF_EACH = {case.op: case for case in CAUSAL_CASES if case.tokens > 7}
ONE_OF_EACH['aft_conv, not causal'] = next(case for case in CASES if case.op == 'aft_conv')


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


def train(function, tensors, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    torch.autograd.grad(function(*leaves, **options).sum(), leaves)


@pytest.mark.parametrize('case', ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_compiled_step_runs_the_op_once(case, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(online_softmax, 'LONGEST_COMPILED_SCAN', 1000)  # compiled as one sum
    tensors = case.inputs(dtype=torch.float32)
    compiled = Counter()

    def count(graph, inputs):
        compiled.update(operations(graph))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    train(torch.compile(case.function, fullgraph=True, backend=backend), tensors, **case.options)
    with Uncompiled() as expected:
        train(case.function, tensors, **case.options)
    got = {op: compiled[op] for op in WORK if compiled[op]}
    assert got and all(got[op] <= expected.counts[op] for op in got), (got, expected.counts)
