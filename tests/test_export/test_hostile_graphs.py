"""Calls of our operators that do not fit are errors, not crashes, whoever wrote the graph.

Each runtime has a process of its own, which a crash would end.
"""

import subprocess
import sys

import pytest

from ..helpers import ROOT

ONNX = """
import numpy as np
from tests.test_ops.test_onnx_operator import open_session

tokens, far = np.ones((2, 35, 6), np.float32), 1 << 60
good = dict(
    query=tokens, key=tokens[..., :3], value=tokens, kernel=np.ones((9, 3), np.float32),
    sizes=np.array([5, 7, 3, 3, 1, 1]))
session = open_session()
assert np.isfinite(session.run(None, good)[0]).all()
empty = np.ones((0, 1 << 50, 6), np.float32)
for wrong in [
    dict(sizes=np.zeros((6, 0), int)),
    dict(sizes=np.zeros(0, int)),
    dict(sizes=np.array(6)),
    dict(sizes=good['sizes'].reshape(6, 1)),
    dict(sizes=good['sizes'].reshape(1, 6)),
    *(dict(sizes=np.array(sizes)) for sizes in [
        (5, 7, 9 + 7 * far, far + 1, 1, 1),  # the products are 9 and 35 modulo 2 ** 64
        (35 + 7 * far, 3 * far + 1, 3, 3, 1, 1),
        (-5, -7, 3, 3, 1, 1),
        (5, 7, -3, -3, 1, 1),
        (5, 7, 3, 3, far, 1),
        (5, 7, 3, 3, 1, -far)]),
    dict(sizes=np.array((5, 8, 3, 3, 1, 1))),
    dict(sizes=np.array((5, 7, 3, 2, 1, 1))),
    dict(kernel=np.ones((9, 2), np.float32)),
    dict(key=tokens[:, :34, :3]),
    dict(key=tokens[..., :0], kernel=np.ones((9, 0), np.float32)),
    dict(query=tokens[:1]),
    dict(value=tokens[..., :5]),
    dict(value=tokens[0]),
    dict(query=tokens[0]),
    dict(kernel=np.ones((9, 3, 1), np.float32)),
    dict(key=np.ones((2, 35, 3, 1), np.float32)),
    dict(query=empty, key=empty[..., :3], value=empty,
         sizes=np.array([1 << 25, 1 << 25, 3, 3, 1, 1])),
]:
    try:
        session.run(None, good | wrong)
    except Exception as error:
        assert 'inputs of aft_mm.AFTConv do not fit together' in str(error), (wrong, error)
    else:
        raise AssertionError(wrong)
"""

OPENVINO = """
import sys
import numpy as np, openvino
from openvino import opset13
from openvino.utils.node_factory import NodeFactory

factory, core = NodeFactory(), openvino.Core()
for each in (factory, core):
    each.add_extension(sys.argv[1])
good = dict(
    kind=np.float32, shape=[2, 35, 15], given=np.ones((2, 35, 15)), channels=6,
    kernel=np.ones((9, 3), np.float32), sizes=np.array([5, 7, 3, 3, 1, 1]))

def run(kind, shape, given, channels, kernel, sizes, threads=2):
    parameter = opset13.parameter(shape, kind)
    inputs = [parameter, *(opset13.constant(x) for x in (kernel, sizes) if x is not None)]
    node = factory.create('AFTConv', inputs, {'channels': channels})
    settings = {'INFERENCE_PRECISION_HINT': 'f32', 'INFERENCE_NUM_THREADS': threads}
    compiled = core.compile_model(openvino.Model([node], [parameter]), 'CPU', settings)
    return compiled(given.astype(kind))[0]

right = run(**good)
assert np.isfinite(right).all()
for same in (dict(shape=[-1, -1, -1]), dict(kernel=np.ones((9, 3), np.float16))):
    assert (run(**good | same) == right).all()
# With one thread, OpenVINO ignores errors.
assert np.isnan(run(**good | dict(sizes=np.array([7, 6, 3, 3, 1, 1])), threads=1)).all()
MISFIT, TYPE = 'do not fit together', 'must get tokens of float32 or bfloat16'
for message, wrong in [
    (TYPE, dict(kind=np.float16)),
    (TYPE, dict(kind=np.float64)),
    (TYPE, dict(kind=np.int64)),
    (TYPE, dict(kernel=np.ones((9, 3), np.int64))),
    (TYPE, dict(sizes=good['sizes'].astype(np.float32))),
    (TYPE, dict(sizes=good['sizes'].astype(np.uint8))),
    (MISFIT, dict(shape=[35, 15], given=np.ones((35, 15)))),
    (MISFIT, dict(shape=[2], given=np.ones(2))),
    (MISFIT, dict(shape=[], given=np.ones(()))),
    (MISFIT, dict(shape=[1, 2, 35, 15], given=np.ones((1, 2, 35, 15)))),
    (MISFIT, dict(channels=-3, shape=[2, 35, 0], given=np.ones((2, 35, 0)))),
    (MISFIT, dict(channels=2**63 - 1)),
    (MISFIT, dict(channels=0)),
    (MISFIT, dict(channels=5)),
    (MISFIT, dict(shape=[2, 34, 15], given=np.ones((2, 34, 15)))),
    (MISFIT, dict(shape=[2, 35, 14], given=np.ones((2, 35, 14)))),
    (MISFIT, dict(kernel=np.ones((9, 2), np.float32))),
    (MISFIT, dict(sizes=np.array([5, 8, 3, 3, 1, 1]))),
    (MISFIT, dict(sizes=np.array([5, 7, 3, 2, 1, 1]))),
    *((MISFIT, dict(shape=[2, 35, n], given=np.ones((2, 35, n)), sizes=np.array([5, 7, 3, 3, 1, gate])))
      for n, gate in [(2, 0), (9, 2)]),
    (MISFIT, dict(kernel=np.ones(9, np.float32))),
    (MISFIT, dict(sizes=np.zeros((6, 0), int))),
    (MISFIT, dict(sizes=good['sizes'].reshape(6, 1))),
    (MISFIT, dict(sizes=np.array(6))),
    (MISFIT, dict(sizes=np.array([5, 7, 9 + (7 << 60), (1 << 60) + 1, 1, 1]))),
    (MISFIT, dict(sizes=None)),
]:
    try:
        run(**good | wrong)
    except Exception as error:
        assert message in str(error), (wrong, error)
    else:
        raise AssertionError(wrong)
"""


def survives(code, *words):
    done = subprocess.run(
        [sys.executable, '-c', code, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_onnx_runtime_refuses_inputs_that_do_not_fit():
    pytest.importorskip('onnxruntime', reason='onnxruntime runs the operator')
    pytest.importorskip('onnx', reason='onnx builds the graphs')
    survives(ONNX)


@pytest.mark.slow
def test_openvino_refuses_inputs_that_do_not_fit(openvino_loops):
    pytest.importorskip('openvino', reason='openvino runs the operator')
    survives(OPENVINO, str(openvino_loops()))
