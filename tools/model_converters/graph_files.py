"""Write, quantise and run the files of exported graphs."""

import importlib.util
import logging
import math
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
from aft_mm.ops.native.availability import find_built

OPSET = 20
LOOPS = 'aft_mm'  # the domain of AFT-conv as an operator
ONNX = ('onnx', 'onnxscript', 'onnxruntime')
PACKAGES = {'.onnx': ONNX, '.xml': (*ONNX, 'openvino'), '.pt2': ()}
RUNTIMES = {'.onnx': 'onnxruntime', '.xml': 'openvino', '.pt2': 'torch'}


def check_packages(suffix: str) -> None:
    missing = [name for name in PACKAGES[suffix] if importlib.util.find_spec(name) is None]
    if missing:
        command = install_command('export')
        if 'openvino' in missing:
            command += ' openvino'
        raise UserError(f'{suffix} needs the packages {", ".join(missing)}: {command}')


def trace(graph: Graph, suffix: str, loops: bool = False) -> tuple[ExportedProgram, list[bool]]:
    """Return the program of a graph, and the paths of the ops in it.

    With `loops`, AFT-conv is an operator for ONNX Runtime, whose library is :func:`operator_library`.
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
            'global_connectivity=True and no position bias below -3, got none'
        )
    return program, paths


def operator_library() -> Path:
    """Return the library of AFT-conv as an operator, for ONNX Runtime on this processor."""
    library = find_built('operator')
    if isinstance(library, str):
        raise UserError(f'the library of AFT-conv for ONNX Runtime {library}')
    return library


def library_of(path: Path) -> Path:
    """Return where the library of a graph with loops is."""
    return path.with_suffix('.loops.so')


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
    if path.suffix == '.onnx':
        onnx_program.save(str(path), external_data=False)
        return
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / 'model.onnx')
        onnx_program.save(file, external_data=False)
        openvino.save_model(openvino.convert_model(file), str(path), compress_to_fp16=False)


def quantize(path: Path) -> None:
    """Store the weights of matrix products in int8, per output channel; rounds their inputs too.

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


def session(path: Path, library: Path | None = None, threads: int = 0) -> Any:
    """Return an ONNX Runtime session on the CPU, by default with a thread per core."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Else the threads of a session still occupy their cores when another runtime is measured next.
    options.add_session_config_entry('session.force_spinning_stop', '1')
    if library is not None:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])


def load(path: Path, graph: Graph) -> Call:
    if path.suffix == '.pt2':
        module = torch.export.load(path).module()
        return lambda inputs: module(*(inputs[name] for name in graph.inputs))
    if path.suffix == '.xml':
        import openvino

        # Recent CPUs would compute in bfloat16.
        compiled = openvino.Core().compile_model(path, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})

        def infer(inputs: Any) -> Sequence[Tensor]:
            arrays = {name: inputs[name].numpy() for name in graph.inputs}
            found = compiled(arrays)
            return [torch.from_numpy(found[name].copy()) for name in graph.outputs]

        return infer
    library = library_of(path)
    opened = session(path, library if library.exists() else None)

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
    if path.suffix == '.onnx':
        library_of(path).unlink(missing_ok=True)
