"""A graph of a model, and how torch traces it for a runtime."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from aft_mm.errors import UserError
from aft_mm.ops import record_paths, replay_paths

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
