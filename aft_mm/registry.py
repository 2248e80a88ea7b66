"""Registries of the package, children of mmengine's root: types are written ``aft_mm.X``.

mmengine imports this module when it first meets the prefix ``aft_mm.``, and hides an ImportError
raised here, so it imports nothing that can fail. It also applies :mod:`aft_mm.hosts`, and makes
mmengine read and write by :mod:`aft_mm.checkpoint` and :mod:`aft_mm.config.texts`.
"""

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from .openmmlab import HAS_MMENGINE
from .openmmlab import registries as root

MODELS = root.Registry(
    'model', parent=root.MODELS, scope='aft_mm', locations=['aft_mm.layers', 'aft_mm.models']
)
DATASETS = root.Registry(
    'dataset', parent=root.DATASETS, scope='aft_mm', locations=['aft_mm.datasets']
)
DATA_SAMPLERS = root.Registry(
    'data sampler', parent=root.DATA_SAMPLERS, scope='aft_mm', locations=['aft_mm.datasets']
)
TRANSFORMS = root.Registry(
    'transform', parent=root.TRANSFORMS, scope='aft_mm', locations=['aft_mm.datasets.transforms']
)
METRICS = root.Registry(
    'metric', parent=root.METRICS, scope='aft_mm', locations=['aft_mm.evaluation']
)
HOOKS = root.Registry('hook', parent=root.HOOKS, scope='aft_mm', locations=['aft_mm.engine'])
OPTIM_WRAPPERS = root.Registry(
    'optim_wrapper', parent=root.OPTIM_WRAPPERS, scope='aft_mm', locations=['aft_mm.engine']
)
OPTIM_WRAPPER_CONSTRUCTORS = root.Registry(
    'optimizer wrapper constructor',
    parent=root.OPTIM_WRAPPER_CONSTRUCTORS,
    scope='aft_mm',
    locations=['aft_mm.engine'],
)
PARAM_SCHEDULERS = root.Registry(
    'parameter scheduler', parent=root.PARAM_SCHEDULERS, scope='aft_mm', locations=['aft_mm.engine']
)
LOOPS = root.Registry('loop', parent=root.LOOPS, scope='aft_mm', locations=['aft_mm.engine'])
if HAS_MMENGINE:  # which warns if the default scope lacks a registry that it builds from
    for _parent in vars(root).values():
        if isinstance(_parent, root.Registry) and 'aft_mm' not in _parent.children:
            root.Registry(_parent.name, parent=_parent, scope='aft_mm', locations=['aft_mm.engine'])

# Prefixes of checkpoint names, by their loader.
_CHECKPOINT_PREFIXES = {
    'local': '',
    'http': ('http://', 'https://'),
    'hub': 'hf://',
    'minis': 'mini://',
    'torchvision': ('torchvision://', 'modelzoo://'),
    'openmmlab': ('open-mmlab://', 'openmmlab://'),
    'mmcls': 'mmcls://',
}


@functools.cache
def _lazy_loader(kind: str) -> Callable[..., dict]:
    def load(filename: str, map_location: Any = None) -> dict:
        loading = importlib.import_module('aft_mm.checkpoint.loading')
        return loading.load_for_mmengine(kind, filename, map_location)

    load.__name__ = f'load_from_{kind}'  # mmengine logs the part after "load_from_"
    return load


def register_safe_loading() -> None:
    from mmengine.runner import CheckpointLoader

    for kind, prefixes in _CHECKPOINT_PREFIXES.items():
        CheckpointLoader.register_scheme(prefixes, _lazy_loader(kind), force=True)


class _AdaptedHosts(MetaPathFinder):
    """Supply ``mmcv._ext`` where it is missing, and the other adaptations of :mod:`aft_mm.hosts`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name == 'mmcv.transforms':  # mmcv has imported its mmcv.image
            import_module('aft_mm.hosts').adapt_image_reading()
        elif name in ('mmpretrain.models', 'mmpretrain.datasets'):
            import_module('aft_mm.hosts').leave_out_multimodal()
        return import_module('aft_mm.hosts').extension_spec(path) if name == 'mmcv._ext' else None


class _RemovedModules(MetaPathFinder):
    """Supply the parts of modules that mmengine imports and newer releases removed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name != 'pkg_resources':
            return None
        source = Path(__file__).parent / 'hosts/pkg_resources.py'
        return spec_from_file_location(name, source)


def _find_loader(name: str) -> Any:
    spec = find_spec(name)
    return spec and spec.loader


def _register_bases() -> None:
    from mmengine.config import Config

    find_base = Config._get_cfg_path

    def find(name: str, filename: str) -> tuple[str, str | None]:
        # Scope None: types of ours keep the default scope.
        if name.startswith('aft_mm::'):
            return import_module('aft_mm.config.finding').find_base(name), None
        return find_base(name, filename)

    Config._get_cfg_path = staticmethod(find)


def _register_writing() -> None:
    from mmengine.config import Config

    write = Config.pretty_text.fget

    def pretty_text(config: Config) -> str:
        return import_module('aft_mm.config.texts').config_text(config, write)

    Config.pretty_text = property(pretty_text)


def _register_listing() -> None:
    from mmengine.fileio import LocalBackend

    list_all = LocalBackend.list_dir_or_file

    def list_dir_or_file(backend: Any, *args: Any, **options: Any) -> Iterator[str]:
        listed = list_all(backend, *args, **options)
        return import_module('aft_mm.hosts').without_hidden(listed)

    LocalBackend.list_dir_or_file = list_dir_or_file


def _register_reading() -> None:
    """Let mmengine read configs with a byte order mark, as Python reads modules."""
    config = import_module('mmengine.config.config')

    def open_text(file: Any, mode: str = 'r', encoding: str | None = None) -> Any:
        return open(file, mode, encoding='utf-8-sig' if mode == 'r' else encoding)

    vars(config)['open'] = open_text


if HAS_MMENGINE:
    register_safe_loading()
    if 'mmcv.transforms' in sys.modules:
        import_module('aft_mm.hosts').adapt_image_reading()
    sys.meta_path.insert(0, _AdaptedHosts())
    sys.meta_path.append(_RemovedModules())
    if not hasattr(pkgutil, 'find_loader'):
        setattr(pkgutil, 'find_loader', _find_loader)  # noqa: B010, mypy knows it as removed
    _register_bases()
    _register_writing()
    _register_reading()
    _register_listing()
