"""AFT-conv as an operator of OpenVINO, `aft_mm/ops/native/openvino_operator.cpp`."""

import numpy as np
import pytest
import torch

from aft_mm.ops.gates import GATES

from ..helpers import each
from .test_onnx_operator import SHAPES, constants_of, oracle

openvino = pytest.importorskip('openvino', reason='openvino runs the operator')
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def library(openvino_loops):
    return str(openvino_loops())


def run(library, tokens, channels, weight, grid, gate, global_connectivity=True, threads=1):
    """Run a graph with the operator alone."""
    from openvino import opset13
    from openvino.utils.node_factory import NodeFactory

    factory = NodeFactory()
    factory.add_extension(library)
    parameter = opset13.parameter(list(tokens.shape), np.float32)
    constants = map(opset13.constant, constants_of(weight, grid, gate, global_connectivity))
    node = factory.create('AFTConv', [parameter, *constants], {'channels': channels})
    settings = {'INFERENCE_PRECISION_HINT': 'f32', 'INFERENCE_NUM_THREADS': threads}
    core = openvino.Core()
    core.add_extension(library)
    compiled = core.compile_model(openvino.Model([node], [parameter]), 'CPU', settings)
    return torch.from_numpy(compiled(tokens.numpy())[0].copy())


@each('gate', GATES)
def test_the_operator_equals_the_oracle(gate, library):
    for batch, grid, kernel, heads, channels in SHAPES:
        count = torch.Size(grid).numel()
        query, value = torch.randn(2, batch, count, channels)
        key, weight = 3 * torch.randn(batch, count, heads), 0.5 * torch.randn(heads, *kernel)
        tokens = torch.cat([*([] if gate == 'none' else [query]), key, value], -1)
        for global_connectivity in (True, False):
            own = library, tokens, channels, weight, grid, gate, global_connectivity
            found = run(*own)
            if gate == 'none':
                assert run(*own, threads=2).equal(found)
            expected = oracle(query, key, value, weight, grid, gate, global_connectivity)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
