"""Exported files in their runtimes."""

import importlib.util

import pytest

MISSING = [
    name for name in ('onnx', 'onnxscript', 'onnxruntime') if not importlib.util.find_spec(name)
]


def open_openvino(path, loops=False):
    openvino = pytest.importorskip('openvino', reason='openvino runs the exported graph')
    core = openvino.Core()
    if loops:
        core.add_extension(str(path.with_suffix('.openvino.so')))
    return core.compile_model(path, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})


def open_onnx(path, loops=False):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if loops:
        options.register_custom_ops_library(str(path.with_suffix('.loops.so')))
    return onnxruntime.InferenceSession(str(path), options)
