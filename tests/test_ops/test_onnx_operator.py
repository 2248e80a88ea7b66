"""AFT-conv as an operator of ONNX Runtime, `aft_mm/ops/native/onnx_operator.cpp`."""

import numpy as np
import pytest
import torch

from aft_mm.ops import reference
from aft_mm.ops.gates import GATES
from aft_mm.ops.native import availability

from ..helpers import each
from .test_native import HERE, KINDS, built  # noqa: F401, a fixture of this file too

onnxruntime = pytest.importorskip('onnxruntime', reason='onnxruntime runs the operator')
onnx = pytest.importorskip('onnx', reason='onnx builds the graphs of these tests')
NAMES = ['query', 'key', 'value', 'kernel', 'sizes']


def open_session(gate='sigmoid', instructions=HERE, threads=1):
    """Return a session of a graph with the operator alone, whose inputs have any shapes."""
    helper, types = onnx.helper, [onnx.TensorProto.FLOAT] * 4 + [onnx.TensorProto.INT64]
    inputs = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in zip(NAMES, types, strict=True)
    ]
    given = ['', *NAMES[1:]] if gate == 'none' else NAMES
    graph = helper.make_graph(
        [helper.make_node('AFTConv', given, ['output'], domain='aft_mm')],
        'graph',
        inputs if gate != 'none' else inputs[1:],
        [helper.make_tensor_value_info('output', onnx.TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid('', 20), helper.make_opsetid('aft_mm', 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised too
    library = availability.library_path(instructions, 'operator')
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def constants_of(weight, grid, gate, global_connectivity):
    """Return the kernel and the sizes of the operator."""
    additive = bool((weight < -3).any())
    kernel = (torch.expm1 if global_connectivity and not additive else torch.exp)(weight)
    kernel, rows = kernel.flatten(1).T, (1,) * (2 - len(grid))
    form = global_connectivity * (1 + additive)
    sizes = [*rows, *grid, *rows, *weight.shape[1:], form, GATES.index(gate)]
    return np.ascontiguousarray(kernel), np.array(sizes, dtype=np.int64)


def oracle(query, key, value, weight, grid, gate, global_connectivity, key_mask=None):
    wide = [None if gate == 'none' else query.double(), *(x.double() for x in (key, value, weight))]
    options = dict(gate=gate, global_connectivity=global_connectivity, key_mask=key_mask)
    return reference.aft_conv(*wide, grid=grid, causal=False, **options).float()


def run(session, query, key, value, weight, grid, gate='sigmoid', global_connectivity=True):
    arrays = [np.ascontiguousarray(x) for x in (query, key, value)]
    arrays += constants_of(weight, grid, gate, global_connectivity)
    feeds = dict(zip(NAMES, arrays, strict=True))
    if gate == 'none':
        del feeds['query']
    return torch.from_numpy(session.run(None, feeds)[0])


# Batch, grid, kernel, heads and channels: partial vectors, one head per channel and few, rows that
# fill the registers, kernels larger than the grid, and enough numbers for several threads.
SHAPES = [
    (2, (5, 7), (3, 5), 3, 6),
    (1, (14, 14), (11, 11), 32, 192),
    (3, (4, 3), (9, 7), 20, 20),
    (2, (67,), (31,), 4, 36),
    (1, (1, 1), (3, 3), 1, 1),
]


@pytest.mark.parametrize('instructions', KINDS)
@each('gate', GATES)
def test_the_operator_equals_the_oracle(gate, instructions):
    sessions = [open_session(gate, instructions, threads) for threads in (1, 3)]
    for batch, grid, kernel, heads, channels in SHAPES:
        tokens = torch.Size(grid).numel()
        query, value = torch.randn(2, batch, tokens, channels)
        weight, hidden = torch.randn(heads, *kernel), torch.rand(batch, tokens, 1) < 0.2
        weight = weight * (3 if batch == 2 else 0.5)  # the additive form, where that is below -3
        # In a window, sums with one shift are exact for a small range of keys only.
        for global_connectivity, scale in ((True, 30), (False, 3)):
            key = scale * torch.randn(batch, tokens, heads)
            masked = torch.where(hidden, -torch.inf, key)
            own = query, masked, value, weight, grid, gate, global_connectivity
            found, threaded = (run(session, *own) for session in sessions)
            assert threaded.equal(found)
            given = query, key, value, weight, grid, gate, global_connectivity
            expected = oracle(*given, key_mask=~hidden[..., 0])
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
