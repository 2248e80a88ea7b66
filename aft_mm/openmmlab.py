"""The parts of mmengine that layers and models use, or stand-ins where mmengine is not installed.

The stand-ins, which need torch only, have the same constructors and state dicts; what belongs to
mmengine's Runner is missing.
"""

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

__all__ = [
    'HAS_MMENGINE',
    'BaseDataElement',
    'BaseDataPreprocessor',
    'BaseModel',
    'BaseModule',
    'all_reduce',
    'get_world_size',
    'print_log',
    'registries',
    'warn',
]

HAS_MMENGINE = find_spec('mmengine') is not None


class PlainRegistry:
    """Classes by name; a child shares the table of its parent. `scope` is not used.

    Args:
        parent: Registry whose table is shared.
        locations: Packages that register classes, imported before a lookup.
    """

    def __init__(
        self,
        name: str,
        parent: 'PlainRegistry | None' = None,
        scope: str = '',
        locations: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.module_dict: dict[str, type] = {} if parent is None else parent.module_dict
        self._locations: set[str] = set() if parent is None else parent._locations
        self._locations.update(locations)

    def register_module(self, name: str | None = None, force: bool = False) -> Any:
        def register(cls: type) -> type:
            key = name or cls.__name__
            if not force and self.module_dict.get(key, cls) is not cls:
                raise KeyError(f'name must not be registered yet, got {key!r}')
            self.module_dict[key] = cls
            return cls

        return register

    def get(self, name: str) -> type:
        for location in self._locations:
            import_module(location)
        key = name.rpartition('.')[2]
        if name not in (key, f'aft_mm.{key}') or key not in self.module_dict:
            raise KeyError(f'type must be a registered class, without mmengine, got {name!r}')
        return self.module_dict[key]

    def build(self, config: Mapping[str, Any]) -> Any:
        if not isinstance(config, Mapping) or 'type' not in config:
            raise ValueError(f'config must be a dict with a type, got {config!r}')
        arguments = dict(config)
        cls = arguments.pop('type')
        return (self.get(cls) if isinstance(cls, str) else cls)(**arguments)


class PlainModule(nn.Module):
    """A module whose constructor initialises the parameters."""

    def __init__(self, init_cfg: dict | list[dict] | None = None) -> None:
        if init_cfg is not None:
            raise ValueError(f'init_cfg must be None without mmengine, got {init_cfg}')
        super().__init__()


class PlainDataPreprocessor(nn.Module):
    """Moves a batch to the device of the model that contains it."""

    _here: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('_here', torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        return self._here.device

    def cast_data(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.cast_data(item) for item in data]
        return data.to(self.device)


class PlainModel(PlainModule):
    """A module with a data preprocessor, given as module or config."""

    def __init__(
        self,
        data_preprocessor: nn.Module | dict[str, Any],
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        if not isinstance(data_preprocessor, nn.Module):
            data_preprocessor = plain_registries.MODELS.build(data_preprocessor)
        self.data_preprocessor = data_preprocessor


class PlainDataElement(SimpleNamespace):
    """Named facts about a sample."""

    def __init__(self, *, metainfo: Mapping[str, Any] | None = None, **data: Any) -> None:
        super().__init__(**{**(metainfo or {}), **data})

    def set_metainfo(self, metainfo: Mapping[str, Any]) -> None:
        vars(self).update(metainfo)

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self).get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def to(self, device: torch.device) -> 'PlainDataElement':
        copy = type(self)()
        for name, value in vars(self).items():
            setattr(copy, name, value.to(device) if isinstance(value, Tensor) else value)
        return copy


def plain_world_size() -> int:
    initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialized else 1


def plain_all_reduce(data: Tensor) -> None:
    if plain_world_size() > 1:
        distributed.all_reduce(data)


def plain_log(message: str, logger: str | None = None, level: int = logging.INFO) -> None:
    logging.getLogger('aft_mm').log(level, message)


class PlainRegistries:
    """Registries by name, each made when it is first read."""

    Registry = PlainRegistry

    def __getattr__(self, name: str) -> PlainRegistry:
        if not name.isupper():
            raise AttributeError(name)
        setattr(self, name, PlainRegistry(name))
        return getattr(self, name)


plain_registries: Any = PlainRegistries()
if TYPE_CHECKING or HAS_MMENGINE:
    from mmengine import registry as registries
    from mmengine.dist import all_reduce, get_world_size
    from mmengine.logging import print_log
    from mmengine.model import BaseDataPreprocessor, BaseModel, BaseModule
    from mmengine.structures import BaseDataElement
else:
    registries = plain_registries
    all_reduce, get_world_size, print_log = plain_all_reduce, plain_world_size, plain_log
    BaseDataPreprocessor, BaseModel, BaseModule = PlainDataPreprocessor, PlainModel, PlainModule
    BaseDataElement = PlainDataElement


def warn(message: str) -> None:
    print_log(message, 'current', logging.WARNING)
