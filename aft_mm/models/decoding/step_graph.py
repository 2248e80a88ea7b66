"""Runners for the steps of a decoder: eager, on fixed buffers, as a CUDA graph, or compiled.

A GPU finishes the small kernels of a step faster than Python launches them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from aft_mm.layers.mixers import TokenMixer

# (token, state) -> (hidden, state), see SequenceDecoder.step.
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]

# A graph costs two steps and its instantiation.
FEWEST_STEPS = 8
MOST_GRAPHS = 2**20  # in effect no limit


class PlainSteps:
    """Eager steps from a token [B] or [B, C] to hidden [B, D]; holds the state."""

    def __init__(self, step: Step, state: Any) -> None:
        self.step, self.state = step, state

    def __call__(self, token: Tensor) -> Tensor:
        hidden, self.state = self.step(token, self.state)
        return hidden


class StaticSteps(PlainSteps):
    """Steps on fixed buffers, like `token` and `hidden`; each call overwrites the last results."""

    def __init__(self, step: Step, token: Tensor, hidden: Tensor, state: Any) -> None:
        super().__init__(step, state)
        self.token, self.hidden = token.clone(), hidden.clone()

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self._advance()
        return self.hidden

    def _advance(self) -> None:
        _advance_in_place(self.step, self.token, self.hidden, self.state)


class CapturedSteps(StaticSteps):
    """Steps on fixed buffers as one CUDA graph per token."""

    def __init__(self, step: Step, token: Tensor, hidden: Tensor, state: Any) -> None:
        super().__init__(step, token, hidden, state)
        with torch.cuda.device_of(token):
            # Warm up on a copy of the state.
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                step(self.token, copy_state(state))
            current.wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads may use the device.
            with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):
                super()._advance()

    def _advance(self) -> None:
        self.graph.replay()


class CompiledSteps(StaticSteps):
    """Steps on fixed buffers by torch.compile; equal to plain steps up to rounding.

    seconds: duration of the first step, which compiles.
    """

    def __init__(self, step: Step, token: Tensor, hidden: Tensor, state: Any) -> None:
        # Dense copies, as strides of a view depend on the length.
        super().__init__(step, token, hidden, copy_state(state))
        start = time.perf_counter()
        # By default torch gives up after 8 sizes.
        limits: dict[str, Any] = dict(
            recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=MOST_GRAPHS
        )
        given = self.token.clone(), self.hidden.clone(), copy_state(self.state)
        with torch._dynamo.config.patch(**limits):
            _compiled_advance()(step, *given)
        self.seconds = time.perf_counter() - start

    def _advance(self) -> None:
        _compiled_advance()(self.step, self.token, self.hidden, self.state)


def _advance_in_place(step: Step, token: Tensor, hidden: Tensor, state: Any) -> None:
    new_hidden, new_state = step(token, state)
    hidden.copy_(new_hidden)
    for old, new in zip(leaves(state), leaves(new_state), strict=True):
        if new is not old:
            old.copy_(new)


@cache
def _compiled_advance() -> Callable[..., None]:
    return torch.compile(_advance_in_place, fullgraph=True, dynamic=False)


def make_steps(
    step: Step, token: Tensor, hidden: Tensor, state: Any, count: int, compiled: bool = False
) -> PlainSteps:
    """Return a CUDA graph, or on a CPU `compiled` steps, if :func:`graph_pays`; else PlainSteps."""
    if token.device.type == 'cuda' and graph_pays(state, count):
        return CapturedSteps(step, token, hidden, state)
    if compiled and token.device.type == 'cpu' and graph_pays(state, count):
        return CompiledSteps(step, token, hidden, state)
    return PlainSteps(step, state)


@contextmanager
def step_layout(decoder: nn.Module, columns: bool) -> Iterator[None]:
    """Project query, key and value in one product on a CPU within the context.

    With `columns`, matrices are column-major, which is faster for a single row.
    """
    device = next(decoder.parameters()).device.type
    mixers = [module for module in decoder.modules() if isinstance(module, TokenMixer)]
    # Autocast would cast the weights at every token.
    if device != 'cpu' or torch.is_autocast_enabled(device):
        mixers = []
    linear = [module for module in decoder.modules() if type(module) is nn.Linear]
    rows = [layer.weight.data for layer in linear] if columns else []
    try:
        for layer, weight in zip(linear, rows, strict=False):
            layer.weight.data = weight.t().contiguous().t()
        for mixer in mixers:
            mixer.fuse_projections()
        yield
    finally:
        for mixer in mixers:
            mixer.split_projections()
        for layer, weight in zip(linear, rows, strict=False):
            layer.weight.data = weight


def graph_pays(state: Any, count: int) -> bool:
    """Return whether `count` steps are worth a graph and the state consists of tensors."""
    return count >= FEWEST_STEPS and all(isinstance(x, Tensor) for x in leaves(state))


def leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, (tuple, list)):
        for part in state:
            yield from leaves(part)
    elif state is not None:
        yield state


def map_leaves(function: Callable[[Any], Any], state: Any, whole: tuple[type, ...] = ()) -> Any:
    """Return nested tuples and lists of ``function(leaf)``; parts of the types `whole` are leaves."""
    if isinstance(state, whole) or not isinstance(state, tuple | list):
        return function(state)
    parts = [map_leaves(function, part, whole) for part in state]
    return type(state)(*parts) if hasattr(state, '_fields') else type(state)(parts)


def copy_state(state: Any) -> Any:
    return map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
