"""Steps of a decoder one after another: plain, on buffers that stay, and as a CUDA graph of these.

A step is hundreds of small kernels, which a device finishes faster than Python launches them; a
graph launches them at once. It reads and writes where it did when it was captured, so token, state
and output need a place that stays.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ['CapturedSteps', 'PlainSteps', 'StaticSteps', 'count_pays', 'make_steps']

# (token, state) -> (hidden, state), see SequenceDecoder.step.
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]

# A graph costs a step to warm up, one to capture and what the driver makes of it.
FEWEST_STEPS = 8


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
        hidden, state = self.step(self.token, self.state)
        self.hidden.copy_(hidden)
        for kept, new in zip(leaves(self.state), leaves(state), strict=True):
            if new is not kept:
                kept.copy_(new)


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


def make_steps(step: Step, token: Tensor, hidden: Tensor, state: Any, count: int) -> PlainSteps:
    """What takes `count` steps fastest."""
    if token.device.type == 'cuda' and count_pays(state, count):
        return CapturedSteps(step, token, hidden, state)
    return PlainSteps(step, state)


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
