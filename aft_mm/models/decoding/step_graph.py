"""Steps of a decoder one after another: plain, on buffers that stay, as a CUDA graph, compiled.

A step is hundreds of small kernels, which a device finishes faster than Python launches them; a
graph launches them at once. It reads and writes where it did when it was captured, so token, state
and output need a place that stays. On a CPU the compiler makes a few kernels of them, for the same
buffers at every token.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from aft_mm.layers.mixers import TokenMixer

__all__ = [
    'CapturedSteps',
    'CompiledSteps',
    'PlainSteps',
    'StaticSteps',
    'count_pays',
    'laid_out_for_steps',
    'make_steps',
]

# (token, state) -> (hidden, state), see SequenceDecoder.step.
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]

# A graph costs a step to warm up, one to capture and what the driver makes of it.
FEWEST_STEPS = 8
MOST_GRAPHS = 2**20  # as good as any number of them


class PlainSteps:
    """Called with a token [B] or [B, C] it gives hidden [B, D], and keeps the state."""

    def __init__(self, step: Step, state: Any) -> None:
        self.step, self.state = step, state

    def __call__(self, token: Tensor) -> Tensor:
        hidden, self.state = self.step(token, self.state)
        return hidden


class StaticSteps(PlainSteps):
    """The same, where token, state and hidden keep their storage; the next call overwrites hidden.

    token and hidden tell shapes and types; the state given becomes the buffer.
    """

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
    """The same as one CUDA graph per token."""

    def __init__(self, step: Step, token: Tensor, hidden: Tensor, state: Any) -> None:
        super().__init__(step, token, hidden, state)
        with torch.cuda.device_of(token):
            # What a first call compiles and sets up must not be captured; it may not use up a step.
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                step(self.token, copy_state(state))
            current.wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            # Threads of data loaders and process groups may go on calling the device.
            with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):
                super()._advance()

    def _advance(self) -> None:
        self.graph.replay()


class CompiledSteps(StaticSteps):
    """The same by torch.compile, one graph for all tokens; equal to plain steps to rounding.

    seconds: how long the first token took, which compiles, or finds the kernels in the cache that
    the compiler keeps on disk.
    """

    def __init__(self, step: Step, token: Tensor, hidden: Tensor, state: Any) -> None:
        # A copy is dense: a buffer that is a part of another has strides that each length changes.
        super().__init__(step, token, hidden, copy_state(state))
        start = time.perf_counter()
        _compiled_advance()(step, self.token.clone(), self.hidden.clone(), copy_state(self.state))
        self.seconds = time.perf_counter() - start

    def _advance(self) -> None:
        _compiled_advance()(self.step, self.token, self.hidden, self.state)


def _advance_in_place(step: Step, token: Tensor, hidden: Tensor, state: Any) -> None:
    """Write what the step gives over hidden and state."""
    new_hidden, new_state = step(token, state)
    hidden.copy_(new_hidden)
    for kept, new in zip(leaves(state), leaves(new_state), strict=True):
        if new is not kept:
            kept.copy_(new)


@cache
def _compiled_advance() -> Callable[..., None]:
    """One function for all, so that later generations of the same sizes find what was compiled."""
    # After 8 sizes of a process torch would give up, which with fullgraph is an error.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_GRAPHS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MOST_GRAPHS)
    return torch.compile(_advance_in_place, fullgraph=True, dynamic=False)


def make_steps(
    step: Step, token: Tensor, hidden: Tensor, state: Any, count: int, compiled: bool = False
) -> PlainSteps:
    """What takes `count` steps fastest; `compiled` asks for :class:`CompiledSteps` on a CPU."""
    if token.device.type == 'cuda' and count_pays(state, count):
        return CapturedSteps(step, token, hidden, state)
    if compiled and token.device.type == 'cpu' and count_pays(state, count):
        return CompiledSteps(step, token, hidden, state)
    return PlainSteps(step, state)


@contextmanager
def laid_out_for_steps(decoder: nn.Module, columns: bool) -> Iterator[None]:
    """Inside, steps on a CPU read the weights faster; the parameters come back as they were.

    Query, key and value are projected in one product. `columns`: the matrices of linear layers lie
    column by column, which torch's product of a single row with them reads up to twice as fast.
    """
    device = next(decoder.parameters()).device.type
    mixers = [module for module in decoder.modules() if isinstance(module, TokenMixer)]
    # Autocast would convert the fused weights anew at every token; of a GPU nobody has timed it.
    if device != 'cpu' or torch.is_autocast_enabled(device):
        mixers = []
    linear = [module for module in decoder.modules() if type(module) is nn.Linear]
    rows = [layer.weight.data for layer in linear] if columns else []
    try:
        for layer, weight in zip(linear, rows, strict=False):
            layer.weight.data = by_columns(weight)
        for mixer in mixers:
            mixer.fuse_projections()
        yield
    finally:
        for mixer in mixers:
            mixer.split_projections()
        for layer, weight in zip(linear, rows, strict=False):
            layer.weight.data = weight


def by_columns(weight: Tensor) -> Tensor:
    """The same matrix, the elements of a column side by side in memory."""
    return weight.t().contiguous().t()


def count_pays(state: Any, count: int) -> bool:
    """Whether `count` steps are worth a graph, and the state is tensors only.

    A cache that grows counts its tokens in Python, which a graph would not see.
    """
    return count >= FEWEST_STEPS and all(isinstance(x, Tensor) for x in leaves(state))


def leaves(state: Any) -> Iterator[Any]:
    """What a state of nested tuples and lists holds, but None."""
    if isinstance(state, (tuple, list)):
        for part in state:
            yield from leaves(part)
    elif state is not None:
        yield state


def copy_state(state: Any) -> Any:
    """The state with tensors of its own."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, list):
        return [copy_state(part) for part in state]
    if isinstance(state, tuple):
        parts = map(copy_state, state)
        return type(state)(*parts) if hasattr(state, '_fields') else tuple(parts)
    return state
