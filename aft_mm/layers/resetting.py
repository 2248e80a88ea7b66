import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from aft_mm.errors import unknown_argument


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    _, *parameters = inspect.signature(init).parameters.values()
    names = [p.name for p in parameters]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)

    @functools.wraps(init)
    def recording(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in names]
        if unknown and not is_open:
            raise unknown_argument(type(self).__name__, unknown[0], names)
        # Those of the outermost class. Before its constructor nn.Module takes no attribute.
        if '_arguments' not in self.__dict__:
            self.__dict__['_arguments'] = copy.deepcopy((args, kwargs))
        init(self, *args, **kwargs)

    return recording


class Resettable(nn.Module):
    """Base class of modules that can be initialised again, also after the meta device."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if '__init__' in cls.__dict__:
            cls.__init__ = _recording(cls.__init__)  # type: ignore[method-assign]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give all parameters and buffers the values of a new module with the same arguments.

        Call it for the whole model: a :class:`Block` initialises its mixer in another way.

        Raises:
            RuntimeError: A parameter has another shape than in a new module.
        """
        args, kwargs = self._arguments
        if 'device' in kwargs:
            kwargs = {**kwargs, 'device': 'cpu'}
        with torch.device('cpu'):
            fresh = type(self)(*args, **kwargs)
        buffers = dict(fresh.named_buffers())
        for name, buffer in self.named_buffers():
            buffer.copy_(buffers[name])
        # With its hooks, and without layers that were removed.
        given, own = fresh.state_dict(), self.state_dict().keys()
        self.load_state_dict({name: given[name] for name in own & given.keys()})
