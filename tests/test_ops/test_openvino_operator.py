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


def test_inputs_that_do_not_fit_are_an_error_not_a_crash(library):
    tokens, weight = torch.randn(2, 35, 15), torch.randn(3, 3, 3)
    for wrong in (
        dict(grid=(5, 8)),
        dict(weight=weight[:2]),
        dict(tokens=tokens[:, :34]),
        dict(tokens=tokens[..., :14]),
        dict(channels=5),
        dict(gate='none', tokens=tokens[..., :2]),
        dict(gate='relu', tokens=tokens[..., 6:]),
        dict(weight=weight[:, :2]),
    ):
        given = dict(tokens=tokens, channels=6, weight=weight, grid=(5, 7), gate='sigmoid') | wrong
        with pytest.raises(RuntimeError, match='inputs of aft_mm.AFTConv do not fit together'):
            run(library, **given, threads=2)
    given = library, tokens, 6, weight
    assert run(*given, (5, 7), 'sigmoid').isfinite().all()
    assert run(*given, (7, 6), 'sigmoid').isnan().all()  # with one thread, errors are ignored
