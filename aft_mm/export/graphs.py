"""A graph of a model, how torch traces it for a runtime, and what its file says about it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from mmengine.config import Config
from mmengine.registry import TRANSFORMS, DefaultScope
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from aft_mm.apis.images import label_rule, takes_bgr
from aft_mm.config.texts import type_name
from aft_mm.errors import UserError
from aft_mm.ops import record_paths, replay_paths
from aft_mm.structures import DATASET_META

# From inputs by name to outputs.
Call = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]


class Graph(NamedTuple):
    """A function of tensors, and how it is exported.

    `name` is the suffix of the file, `inputs` are examples, `dynamic` the open axes of each.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: list[str]
    dynamic: list[dict[int, Any]] | None = None
    metadata: Mapping[str, Any] = {}


class Exportable(Protocol):
    """The graphs of a model, and inputs on which they are compared with it.

    The constructor refuses a model without such graphs.
    """

    #: Inputs and outputs, for the user.
    about: str

    @property
    def graphs(self) -> list[Graph]:
        pass

    def cases(self, calls: Mapping[str, Call]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield cases, each with a name, an output of the model and that of the files.

        Args:
            calls: The file of each graph, by name of the graph.
        """


def trace(graph: Graph, runtime: str, loops: bool = False) -> tuple[ExportedProgram, list[bool]]:
    """Return the program of a graph, and the paths of the ops in it.

    With `loops`, AFT-conv is an operator, whose library is written next to the file.

    Raises:
        UserError: No AFT-conv can be such an operator.
    """
    examples = tuple(graph.inputs.values())
    shapes: tuple | None = None
    if graph.dynamic is not None:
        # The arguments after *, such as a state, are one entry.
        named = graph.module.forward.__code__.co_argcount - 1
        shapes, rest = tuple(graph.dynamic[:named]), tuple(graph.dynamic[named:])
        shapes = (*shapes, rest) if rest else shapes
    with torch.no_grad():
        with record_paths() as paths:
            graph.module(*examples)
        with replay_paths(paths, runtime, loops):
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


def graph_modules(program: ExportedProgram) -> list[GraphModule]:
    return [x for x in program.graph_module.modules() if isinstance(x, GraphModule)]


#: Tasks by type of the model.
TASKS = {
    'ImageClassifier': 'classification',
    'EncoderDecoder': 'segmentation',
    'RetinaNet': 'detection',
    'AutoregressiveModel': 'generation',
    'CTCModel': 'transcription',
}


def type_of(config: Config) -> str:
    return type_name(config.model.type)


def describe_task(config: Config, model: Any) -> dict[str, Any]:
    """Return the ``task`` of a model, and ``thr`` or ``topk`` of a multi-label classifier."""
    kind = type_of(config)
    rule = label_rule(model) if kind == 'ImageClassifier' else {}
    return dict(task='multi-label ' * bool(rule) + TASKS[kind], **rule)


def describe_images(config: Config, model: Any, channels: int) -> dict[str, Any]:
    """Return how an image file becomes the input of a graph, and the classes.

    - ``classes``, ``palette``, ``best_f1_score``: as the checkpoint has them
    - ``resize``: steps of the test pipeline with all their arguments
    - ``mean``, ``std``: [channels], for pixels of 0 to 255, in the order of the input's channels
    - ``channels``: this order, RGB, BGR or grey
    """
    about = {key: model.dataset_meta[key] for key in DATASET_META if key in model.dataset_meta}
    steps = config.get('test_dataloader', {}).get('dataset', {}).get('pipeline')
    if steps is not None:
        with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
            built = [TRANSFORMS.build(step) for step in steps]
        about['resize'] = [
            {'type': type(step).__name__, **vars(step)}
            for step in built
            if not type(step).__name__.startswith(('Load', 'Pack'))
        ]
    # Measured, as each library has names of its own for what its preprocessor does.
    images = torch.zeros(1 + channels, channels, 1, 1, dtype=torch.uint8)
    for channel in range(channels):
        images[1 + channel, channel] = 255
    batch = model.data_preprocessor(dict(inputs=list(images), data_samples=None), False)
    black, *bright = batch['inputs'][:, :channels, 0, 0]
    changes = torch.stack(bright) - black
    std = 255 / changes.amax(0)
    about['mean'], about['std'] = (
        [float(f'{value:.7g}') for value in values.tolist()] for values in (0 - black * std, std)
    )
    if channels == 3:
        names = 'BGR' if takes_bgr(config) else 'RGB'
        about['channels'] = ''.join(names[channel] for channel in changes.argmax(0).tolist())
    elif channels == 1:
        about['channels'] = 'grey'
    return about
