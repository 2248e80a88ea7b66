"""Write, quantise and run the files of exported graphs."""

import importlib.util
import logging
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from exported_graphs import Call, Graph
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from aft_mm.config.finding import install_command
from aft_mm.errors import UserError
from aft_mm.ops import record_paths, replay_paths
from aft_mm.ops.export_conv import OPERATOR_SOURCES, find_operator

OPSET = 20
LOOPS = 'aft_mm'  # the domain of AFT-conv as an operator
ONNX = ('onnx', 'onnxscript', 'onnxruntime')
PACKAGES = {'.onnx': ONNX, '.xml': (*ONNX, 'openvino'), '.pt2': ()}
# Flags for the instructions that torch uses.
MACHINES = {'AVX512': ['-march=x86-64-v4'], 'AVX2': ['-march=x86-64-v3']}
RUNTIMES = {'.onnx': 'onnxruntime', '.xml': 'openvino', '.pt2': 'torch'}


def check_packages(suffix: str, int8: bool = False) -> None:
    needed = [*PACKAGES[suffix], *(['nncf'] if int8 and suffix == '.xml' else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        others = [name for name in missing if name not in ONNX]
        command = ' '.join([install_command('export'), *others])
        raise UserError(f'{suffix} needs {", ".join(missing)}: {command}')


def trace(graph: Graph, suffix: str, loops: bool = False) -> tuple[ExportedProgram, list[bool]]:
    """Return the program of a graph, and the paths of the ops in it.

    With `loops`, AFT-conv is an operator, whose library :func:`write_library` writes.
    """
    examples = tuple(graph.inputs.values())
    shapes: Any = graph.dynamic
    if shapes is not None:
        # The arguments after *, such as a state, are one entry.
        named = graph.module.forward.__code__.co_argcount - 1
        shapes = tuple(shapes[:named])
        if len(examples) > named:
            shapes = (*shapes, tuple(graph.dynamic[named:]))
    with torch.no_grad():
        with record_paths() as paths:
            graph.module(*examples)
        with replay_paths(paths, RUNTIMES[suffix], loops):
            program = torch.export.export(
                graph.module, examples, dynamic_shapes=shapes, strict=False
            )
    nodes = (node for module in graph_modules(program) for node in module.graph.nodes)
    if loops and not any('onnx_symbolic' in str(node.target) for node in nodes):
        raise UserError(
            'a graph with loops needs AFT-conv in one or two dimensions that is not causal, with '
            'global_connectivity=True and position biases in a range of 60 nats, got none'
        )
    return program, paths


def check_loops(suffix: str) -> None:
    """Raise a UserError if :func:`write_library` cannot write the library for this runtime."""
    if suffix == '.xml':
        _compiler()
        _openvino_libraries()
    else:
        operator_library()


def operator_library() -> Path:
    """Return the library of AFT-conv as an operator of ONNX Runtime on this processor."""
    library = find_operator()
    if isinstance(library, str):
        raise UserError(f'the library of AFT-conv for ONNX Runtime {library}')
    return library


def _compiler() -> str:
    for name in (os.environ.get('CXX'), 'c++', 'g++', 'clang++'):
        if name and (path := shutil.which(name)):
            return path
    raise UserError('--loops for OUT.xml needs a C++ compiler, such as g++ or clang++, got none')


def _openvino_libraries() -> list[Path]:
    """Return the libraries of OpenVINO for the linker, which are next to its headers."""
    import openvino

    folder = Path(openvino.__file__).parent
    found = [[*(folder / 'libs').glob(f'lib{name}.so.*')] for name in ('openvino', 'tbb')]
    if not all(found) or not (folder / 'include/openvino').is_dir():
        raise UserError(
            '--loops for OUT.xml needs an openvino for Linux with headers and libraries, as pip '
            f'installs it, got {folder}'
        )
    return [paths[0] for paths in found]


def write_library(path: Path) -> None:
    """Write the library of AFT-conv as an operator, for the runtime of a graph and this processor.

    That for OpenVINO is compiled, for the installed release, whose C++ classes it uses.
    """
    if path.suffix == '.onnx':
        shutil.copyfile(operator_library(), library_of(path))
        return
    libraries = _openvino_libraries()
    capability = torch.backends.cpu.get_cpu_capability()
    command = [
        _compiler(),
        *('-std=c++17', '-O3', '-ffp-contract=fast', '-fvisibility=hidden', '-shared', '-fPIC'),
        *MACHINES.get(capability, ()),
        f'-I{libraries[0].parents[1] / "include"}',
        str(OPERATOR_SOURCES / 'openvino_operator.cpp'),
        *map(str, libraries),
        '-Wl,-z,nodelete',  # threads may still return from it when OpenVINO unloads it
        *('-w', '-o', str(library_of(path))),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if 'error' in line]
        raise UserError(f'the loops for OpenVINO do not compile: {(errors or [command[0]])[0]}')


def library_of(path: Path) -> Path:
    """Return where the library of a graph with loops is, other for each runtime."""
    return path.with_suffix('.loops.so' if path.suffix == '.onnx' else '.openvino.so')


def graph_modules(program: ExportedProgram) -> list[GraphModule]:
    return [x for x in program.graph_module.modules() if isinstance(x, GraphModule)]


def shrink_constants(program: ExportedProgram) -> None:
    """Replace constants outside of float32 by its extremes.

    The exporter to ONNX writes them as float32, also in the float64 sums of the safe form, where
    the lowest number means an empty sum and would become −inf.
    """
    limits = torch.finfo(torch.float32)

    def shrunk(value: Any) -> Any:
        if not isinstance(value, float) or not math.isfinite(value) or value == 0:
            return value
        return math.copysign(min(max(abs(value), limits.tiny), limits.max), value)

    for module in graph_modules(program):
        for node in module.graph.nodes:
            node.args = map_aggregate(node.args, shrunk)
        module.recompile()


def write(program: ExportedProgram, graph: Graph, path: Path) -> None:
    if path.suffix == '.pt2':
        torch.export.save(program, path)
        return
    shrink_constants(program)
    # It warns about every op with several outputs that it does not optimise.
    logging.getLogger('onnxscript.optimizer').setLevel(logging.ERROR)
    onnx_program = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=list(graph.inputs),
        output_names=graph.outputs,
        verbose=False,
    )
    onnx_program.model.metadata_props.update(graph.metadata)
    if path.suffix == '.onnx':
        onnx_program.save(str(path), external_data=False)
        return
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / 'model.onnx')
        onnx_program.save(file, external_data=False)
        model = openvino.convert_model(file, extension=_operators(library_of(path)))
    if library_of(path).exists():
        join_products(model)
    save_openvino(model, path)


def _operators(library: Path) -> list | None:
    """Return the conversion of AFT-conv as an operator, if the graph has a library with it.

    It reads query, key and value as one tensor, which is one product instead of three.
    """
    if not library.exists():
        return None
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

    return [ConversionExtension('AFTConv', LOOPS, convert)]


def join_products(model: Any) -> None:
    """Replace concatenated products of one tensor with constants by one product."""
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


def quantize(path: Path, images: Sequence[Tensor] = ()) -> None:
    """Store the weights of matrix products in int8, per output channel; rounds their inputs too.

    Images are examples for OpenVINO, from which NNCF computes the ranges of inputs. ONNX Runtime
    computes them at run time.
    """
    if path.suffix == '.xml':
        import nncf

        nncf.set_log_level(logging.ERROR)
        core = openvino_core(path)
        core.set_property({'ENABLE_MMAP': False})  # the file is written again
        # Smoothing adds products, and errors: 28 instead of 4 % for a small model.
        smoothing = nncf.AdvancedSmoothQuantParameters(matmul=-1)
        model = nncf.quantize(
            core.read_model(path),
            nncf.Dataset([image.numpy() for image in images]),
            model_type=nncf.ModelType.TRANSFORMER,
            advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=smoothing),
        )
        save_openvino(model, path)
    else:
        _quantize_onnx(path)


def round_inputs_of_loops(path: Path) -> None:
    """Let the loops of a graph for OpenVINO read and write bfloat16."""
    from openvino import opset13

    core = openvino_core(path)
    core.set_property({'ENABLE_MMAP': False})  # the file is written again
    model = core.read_model(path)
    for node in model.get_ordered_ops():
        if node.get_type_name() == 'AFTConv':
            given, targets = node.input(0), node.output(0).get_target_inputs()
            rounded = opset13.convert(given.get_source_output(), 'bf16')
            given.replace_source_output(rounded.output(0))
            mixed = opset13.convert(node.output(0), 'f32')
            for target in targets:
                target.replace_source_output(mixed.output(0))
    model.validate_nodes_and_infer_types()
    save_openvino(model, path)


def _quantize_onnx(path: Path) -> None:
    """Quantise for ONNX Runtime.

    Weights have 7 bits: processors without VNNI add pairs of products in 16 bits, which 8 overflow.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    # Shapes of weights are stale where the exporter transposed them; those of loops are not inferred.
    known = {name for node in model.graph.node if node.domain == LOOPS for name in node.output}
    shapes = [info for info in model.graph.value_info if info.name in known]
    del model.graph.value_info[:]
    model.graph.value_info.extend(shapes)
    logging.disable(logging.WARNING)  # advice, and the float64 sums, which stay
    try:
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=['MatMul', 'Gemm'],
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=True,
        )
    finally:
        logging.disable(logging.NOTSET)


def session(path: Path, threads: int = 0) -> Any:
    """Return an ONNX Runtime session on the CPU, by default with a thread per core."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Else the threads of a session still occupy their cores when another runtime is measured next.
    options.add_session_config_entry('session.force_spinning_stop', '1')
    if library_of(path).exists():
        options.register_custom_ops_library(str(library_of(path)))
    return onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])


def openvino_core(path: Path) -> Any:
    """Return an OpenVINO core for a graph."""
    import openvino

    core = openvino.Core()
    if library_of(path).exists():
        core.add_extension(str(library_of(path)))
    return core


def save_openvino(model: Any, path: Path) -> None:
    import openvino

    openvino.save_model(model, str(path), compress_to_fp16=False)


def load(path: Path, graph: Graph) -> Call:
    if path.suffix == '.pt2':
        module = torch.export.load(path).module()
        return lambda inputs: module(*(inputs[name] for name in graph.inputs))
    if path.suffix == '.xml':
        # Recent CPUs would compute in bfloat16.
        settings = {'INFERENCE_PRECISION_HINT': 'f32'}
        compiled = openvino_core(path).compile_model(path, 'CPU', settings)

        def infer(inputs: Any) -> Sequence[Tensor]:
            arrays = {name: inputs[name].numpy() for name in graph.inputs}
            found = compiled(arrays)
            return [torch.from_numpy(found[name].copy()) for name in graph.outputs]

        return infer
    opened = session(path)

    def call(inputs: Any) -> Sequence[Tensor]:
        arrays = {name: inputs[name].numpy() for name in graph.inputs}
        return [torch.from_numpy(part) for part in opened.run(None, arrays)]

    return call


def size_of(path: Path) -> int:
    weights = path.with_suffix('.bin')
    return path.stat().st_size + (weights.stat().st_size if path.suffix == '.xml' else 0)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    if path.suffix == '.xml':
        path.with_suffix('.bin').unlink(missing_ok=True)
    if path.suffix != '.pt2':
        library_of(path).unlink(missing_ok=True)
