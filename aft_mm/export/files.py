"""Files of exported graphs: each format writes, quantises and runs a graph with its runtime."""

import importlib.util
import json
import logging
import math
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.node import map_aggregate

from aft_mm.config.finding import install_command
from aft_mm.errors import UserError

from . import operators
from .graphs import Call, Graph, graph_modules

OPSET = 20
ONNX = ('onnx', 'onnxscript', 'onnxruntime')
NOTES = 'aft_mm.json'  # in OUT.pt2
#: Metadata that say what the input is.
OF_INPUT = ('task', 'size', 'dynamic', 'mean', 'std', 'channels', 'longest_prompt', 'image_shape')


class GraphFile(ABC):
    """A graph in a file of one format."""

    suffix: str
    #: One of ``aft_mm.ops.export_paths.RUNTIMES``, for which the graph is traced.
    runtime: str
    about: str
    packages: Sequence[str] = ()
    #: Further packages for int8.
    quantizers: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def parts(self) -> list[Path]:
        return [self.path]

    @property
    def library(self) -> Path | None:
        """Absolute, as the system searches a name without a slash elsewhere."""
        return None

    @property
    def size(self) -> int:
        return sum(part.stat().st_size for part in self.parts)

    @property
    def notes(self) -> Path:
        return self.path.with_suffix('.json')

    def check_notes(self, graph: Graph) -> None:
        """Raise a UserError if the metadata would replace those of another file, or annotations."""
        if not self.notes.exists():
            return
        try:
            earlier = json.loads(self.notes.read_text(encoding='utf-8'))
        except ValueError:
            earlier = None
        if not isinstance(earlier, dict) or not {'version', 'task'} <= earlier.keys():
            raise UserError(
                f'{str(self.notes)!r} must be free for the metadata of {self.path.name}, got a '
                'file of something else; name another OUT'
            )
        name = earlier.get('file', self.path.name)
        if name == self.path.name or not self.path.with_name(name).exists():
            return
        differing = [key for key in OF_INPUT if earlier.get(key) != graph.metadata.get(key)]
        if differing:
            raise UserError(
                f'{str(self.notes)!r} holds the metadata of {name}, whose {differing[0]} is another; '
                'remove that file or name another OUT'
            )

    def write_notes(self, graph: Graph) -> None:
        notes = {'file': self.path.name, **graph.metadata}
        text = json.dumps(notes, indent=1, ensure_ascii=False, default=str)
        self.notes.write_text(f'{text}\n', encoding='utf-8')

    def remove(self) -> None:
        for part in (*self.parts, self.library, self.notes):
            if part is not None:
                part.unlink(missing_ok=True)

    @classmethod
    def check_packages(cls, int8: bool = False) -> None:
        needed = [*cls.packages, *(cls.quantizers if int8 else ())]
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            others = [name for name in missing if name not in ONNX]
            command = ' '.join([install_command('export'), *others])
            raise UserError(f'{cls.suffix} needs {", ".join(missing)}: {command}')

    @classmethod
    def check_loops(cls) -> None:
        raise UserError(f'{cls.suffix} has no loops')

    @abstractmethod
    def write(self, program: ExportedProgram, graph: Graph, loops: bool = False) -> None:
        """Write the file, and with `loops` the library, for this processor."""

    @abstractmethod
    def metadata(self) -> Mapping[str, str]:
        pass

    @abstractmethod
    def load(self, graph: Graph) -> Call:
        pass

    def quantize(self, images: Sequence[Tensor] = ()) -> None:
        """Store the weights of matrix products in int8, per output channel; images are examples."""
        raise UserError(f'{self.suffix} has no int8')

    def round_inputs_of_loops(self) -> None:
        raise UserError(f'{self.suffix} has no loops in bfloat16')


class TorchFile(GraphFile):
    suffix, runtime, about = '.pt2', 'torch', f'torch {torch.__version__}'

    def write(self, program: ExportedProgram, graph: Graph, loops: bool = False) -> None:
        texts = json.dumps(as_texts(graph.metadata))
        torch.export.save(program, self.path, extra_files={NOTES: texts})

    def metadata(self) -> Mapping[str, str]:
        files = {NOTES: ''}
        torch.export.load(self.path, extra_files=files)
        return json.loads(files[NOTES] or '{}')

    def load(self, graph: Graph) -> Call:
        module = torch.export.load(self.path).module()
        return lambda inputs: module(*(inputs[name] for name in graph.inputs))


class OnnxFile(GraphFile):
    suffix, runtime, about = '.onnx', 'onnxruntime', f'ONNX opset {OPSET}'
    packages = ONNX

    @property
    def library(self) -> Path:
        return self.path.with_suffix('.loops.so').absolute()

    @classmethod
    def check_loops(cls) -> None:
        operators.onnx_library()

    def write(self, program: ExportedProgram, graph: Graph, loops: bool = False) -> None:
        self.library.unlink(missing_ok=True)  # of an earlier export
        if loops:
            shutil.copyfile(operators.onnx_library(), self.library)
        shrink_constants(program)
        # It warns about every op with several outputs that it does not optimise.
        logging.getLogger('onnxscript.optimizer').setLevel(logging.ERROR)
        written = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(graph.inputs),
            output_names=graph.outputs,
            verbose=False,
        )
        assert written is not None  # of dynamo=True
        written.model.metadata_props.update(as_texts(graph.metadata))
        written.save(str(self.path), external_data=False)

    def metadata(self) -> Mapping[str, str]:
        return self.session().get_modelmeta().custom_metadata_map

    def load(self, graph: Graph) -> Call:
        session = self.session()

        def call(inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
            arrays = {name: inputs[name].numpy() for name in graph.inputs}
            return [torch.from_numpy(part) for part in session.run(None, arrays)]

        return call

    def session(self, threads: int = 0) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Else the threads of a session still occupy their cores when another runtime is measured next.
        options.add_session_config_entry('session.force_spinning_stop', '1')
        if self.library.exists():
            options.register_custom_ops_library(str(self.library))
        providers = ['CPUExecutionProvider']
        return onnxruntime.InferenceSession(str(self.path), options, providers=providers)

    def quantize(self, images: Sequence[Tensor] = ()) -> None:
        """Quantise to 7 bits, as processors without VNNI add pairs of products in 16 bits."""
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        model = onnx.load(self.path)
        # Shapes of weights are stale where the exporter transposed them; those of loops are not inferred.
        nodes = [node for node in model.graph.node if node.domain == operators.DOMAIN]
        known = {name for node in nodes for name in node.output}
        shapes = [info for info in model.graph.value_info if info.name in known]
        del model.graph.value_info[:]
        model.graph.value_info.extend(shapes)
        logging.disable(logging.WARNING)  # advice, and the float64 sums, which stay
        try:
            quantize_dynamic(
                model,
                self.path,
                op_types_to_quantize=['MatMul', 'Gemm'],
                per_channel=True,
                weight_type=QuantType.QInt8,
                reduce_range=True,
            )
        finally:
            logging.disable(logging.NOTSET)


class OpenVINOFile(GraphFile):
    suffix, runtime, about = '.xml', 'openvino', 'OpenVINO'
    packages = (*ONNX, 'openvino')
    quantizers = ('nncf',)

    @property
    def parts(self) -> list[Path]:
        return [self.path, self.path.with_suffix('.bin')]

    @property
    def library(self) -> Path:
        return self.path.with_suffix('.openvino.so').absolute()

    @classmethod
    def check_loops(cls) -> None:
        operators.find_compiler()
        operators.openvino_libraries()

    def write(self, program: ExportedProgram, graph: Graph, loops: bool = False) -> None:
        import openvino

        self.library.unlink(missing_ok=True)  # of an earlier export
        conversions = None
        if loops:
            operators.compile_for_openvino(self.library)
            conversions = [operators.openvino_conversion(self.library)]
        with tempfile.TemporaryDirectory() as folder:
            onnx = OnnxFile(Path(folder) / 'model.onnx')
            onnx.write(program, graph)
            model = openvino.convert_model(str(onnx.path), extension=conversions)
        if loops:
            operators.join_products(model)
        self.save(model)

    def metadata(self) -> Mapping[str, str]:
        # Where OpenVINO puts the metadata of ONNX.
        model = self.core().read_model(self.path)
        known = model.has_rt_info(['framework'])
        return dict(model.get_rt_info(['framework']).value) if known else {}

    def load(self, graph: Graph) -> Call:
        # Recent CPUs would compute in bfloat16.
        compiled = self.compile({'INFERENCE_PRECISION_HINT': 'f32'})

        def call(inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
            outputs = compiled({name: inputs[name].numpy() for name in graph.inputs})
            return [torch.from_numpy(outputs[name].copy()) for name in graph.outputs]

        return call

    def compile(self, settings: Mapping[str, Any]) -> Any:
        return self.core().compile_model(self.path, 'CPU', dict(settings))

    def core(self) -> Any:
        import openvino

        core = openvino.Core()
        if self.library.exists():
            core.add_extension(str(self.library))
        return core

    def read(self) -> Any:
        """Return the model such that :meth:`save` may replace its file."""
        core = self.core()
        core.set_property({'ENABLE_MMAP': False})
        return core.read_model(self.path)

    def save(self, model: Any) -> None:
        import openvino

        openvino.save_model(model, str(self.path), compress_to_fp16=False)

    def quantize(self, images: Sequence[Tensor] = ()) -> None:
        import nncf

        nncf.set_log_level(logging.ERROR)
        # Smoothing adds products, and errors: 28 instead of 4 % for a small model.
        smoothing = nncf.AdvancedSmoothQuantParameters(matmul=-1)
        model = nncf.quantize(
            self.read(),
            nncf.Dataset([image.numpy() for image in images]),
            model_type=nncf.ModelType.TRANSFORMER,
            advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=smoothing),
        )
        self.save(model)

    def round_inputs_of_loops(self) -> None:
        model = self.read()
        operators.round_inputs(model)
        self.save(model)


#: Formats by suffix.
FORMATS: Mapping[str, type[GraphFile]] = {
    kind.suffix: kind for kind in (OnnxFile, OpenVINOFile, TorchFile)
}


def as_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in metadata.items()
    }


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
