"""AFT-conv as an operator in C++: its libraries, and the graphs of OpenVINO that call it."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aft_mm.errors import UserError
from aft_mm.ops.export_conv import OPERATOR_SOURCES, find_operator

DOMAIN = 'aft_mm'  # of the operator in ONNX
# Flags for the instructions that torch uses.
MACHINES = {'AVX512': ['-march=x86-64-v4'], 'AVX2': ['-march=x86-64-v3']}


def onnx_library() -> Path:
    library = find_operator()
    if isinstance(library, str):
        raise UserError(f'the library of AFT-conv for ONNX Runtime {library}')
    return library


def compile_for_openvino(library: Path) -> None:
    """Compile AFT-conv as an operator of the installed OpenVINO, whose C++ classes it uses."""
    libraries = openvino_libraries()
    capability = torch.backends.cpu.get_cpu_capability()
    command = [
        find_compiler(),
        *('-std=c++17', '-O3', '-ffp-contract=fast', '-fvisibility=hidden', '-shared', '-fPIC'),
        *MACHINES.get(capability, ()),
        f'-I{libraries[0].parents[1] / "include"}',
        str(OPERATOR_SOURCES / 'openvino_operator.cpp'),
        *map(str, libraries),
        '-Wl,-z,nodelete',  # threads may still return from it when OpenVINO unloads it
        *('-w', '-o', str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if 'error' in line]
        raise UserError(f'the loops for OpenVINO do not compile: {(errors or [command[0]])[0]}')


def find_compiler() -> str:
    for name in (os.environ.get('CXX'), 'c++', 'g++', 'clang++'):
        if name and (path := shutil.which(name)):
            return path
    raise UserError('--loops for OUT.xml needs a C++ compiler, such as g++ or clang++, got none')


def openvino_libraries() -> list[Path]:
    import openvino

    folder = Path(openvino.__file__).parent
    matches = [[*(folder / 'libs').glob(f'lib{name}.so.*')] for name in ('openvino', 'tbb')]
    if not all(matches) or not (folder / 'include/openvino').is_dir():
        raise UserError(
            '--loops for OUT.xml needs an openvino for Linux with headers and libraries, as pip '
            f'installs it, got {folder}'
        )
    return [paths[0] for paths in matches]


def openvino_conversion(library: Path) -> Any:
    from openvino import opset13
    from openvino.frontend.onnx import ConversionExtension
    from openvino.utils.node_factory import NodeFactory

    factory = NodeFactory()
    factory.add_extension(str(library))

    def convert(node: Any) -> list:
        *tokens, kernel, sizes = [node.get_input(index) for index in range(node.get_input_size())]
        channels = tokens[-1].get_partial_shape()[2].get_length()
        joined = opset13.concat(tokens, -1)
        inputs = [joined.output(0), kernel, sizes]
        return factory.create('AFTConv', inputs, {'channels': channels}).outputs()

    return ConversionExtension('AFTConv', DOMAIN, convert)


def join_products(model: Any) -> None:
    import numpy as np
    from openvino import opset13

    def sources(nodes: Sequence[Any], index: int) -> list[Any]:
        return [node.input(index).get_source_output() for node in nodes]

    def joined(constants: Sequence[Any], axis: int) -> Any:
        arrays = [output.get_node().data for output in constants]
        return opset13.constant(np.concatenate(arrays, axis))

    def kinds(outputs: Sequence[Any]) -> set[str]:
        return {output.get_node().get_type_name() for output in outputs}

    for concat in model.get_ordered_ops():
        if concat.get_type_name() != 'Concat':
            continue
        parts, biases = [x.get_source_output() for x in concat.inputs()], []
        if kinds(parts) == {'Add'}:
            adds = [part.get_node() for part in parts]
            parts, biases = sources(adds, 0), sources(adds, 1)
        if kinds(parts) != {'MatMul'}:
            continue
        products = [part.get_node() for part in parts]
        inputs, weights = sources(products, 0), sources(products, 1)
        ids = {(x.get_node().get_instance_id(), x.get_index()) for x in inputs}
        transposed = {product.get_attributes()['transpose_b'] for product in products}
        if len(ids) > 1 or len(transposed) > 1 or kinds([*weights, *biases]) != {'Constant'}:
            continue
        product = opset13.matmul(
            inputs[0], joined(weights, 0 if True in transposed else -1), False, True in transposed
        )
        whole = opset13.add(product, joined(biases, -1)) if biases else product
        for target in concat.output(0).get_target_inputs():
            target.replace_source_output(whole.output(0))


def round_inputs(model: Any) -> None:
    from openvino import opset13

    for node in model.get_ordered_ops():
        if node.get_type_name() == 'AFTConv':
            given, targets = node.input(0), node.output(0).get_target_inputs()
            rounded = opset13.convert(given.get_source_output(), 'bf16')
            given.replace_source_output(rounded.output(0))
            mixed = opset13.convert(node.output(0), 'f32')
            for target in targets:
                target.replace_source_output(mixed.output(0))
    model.validate_nodes_and_infer_types()
