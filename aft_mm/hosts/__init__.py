"""Adaptations of the host packages.

mmdet and mmseg import ``mmcv.ops``, which needs the compiled module ``mmcv._ext``. mmcv-lite ships
without it. :func:`extension_spec` supplies a replacement on torch and torchvision
(:mod:`aft_mm.hosts.mmcv_ext`); a compiled one that loads is preferred.
"""

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

__all__ = ['MMCV_EXT', 'extension_spec', 'quiet_pycocotools', 'selected_operators']

MMCV_EXT = 'mmcv._ext'
# Beginnings of the progress that pycocotools prints.
_PROGRESS = (
    'loading annotations',
    'Done (t=',
    'creating index',
    'index created',
    'Loading and preparing',
    'DONE (t=',
    'Running per image',
    'Evaluate annotation',
    'Accumulating evaluation',
)
logger = logging.getLogger('aft_mm.hosts')


class _ReplacementLoader:
    """Load a compiled extension that works, else the replacement."""

    def __init__(self, compiled: ModuleSpec | None) -> None:
        self.compiled = compiled

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if self.compiled is not None and self.compiled.loader is not None:
            try:
                module = module_from_spec(self.compiled)
                self.compiled.loader.exec_module(module)
                return module
            except (ImportError, OSError) as error:
                logger.warning(
                    'the compiled operators of mmcv cannot be loaded (%s); the operators of '
                    'torchvision are used instead. Reinstall mmcv for this torch, or replace it: '
                    'pip uninstall -y mmcv && pip install --force-reinstall --no-deps mmcv-lite',
                    ' '.join(str(error).split()),
                )
        return import_module('aft_mm.hosts.mmcv_ext').make_module(MMCV_EXT)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: modules are complete when they are created."""


def extension_spec(path: Sequence[str] | None) -> ModuleSpec:
    """Return the import spec of ``mmcv._ext``, given ``mmcv.__path__``."""
    compiled = PathFinder.find_spec(MMCV_EXT, path)
    return ModuleSpec(MMCV_EXT, _ReplacementLoader(compiled), origin='aft_mm.hosts.mmcv_ext')


def selected_operators() -> str:
    """Return ``'compiled'`` or ``'torchvision'``: which ``mmcv._ext`` an import yields here."""
    module = import_module(MMCV_EXT)
    return 'torchvision' if hasattr(module, 'SUPPORTED') else 'compiled'


def quiet_pycocotools() -> None:
    """Leave out the progress that pycocotools prints."""
    if find_spec('pycocotools') is None:
        return
    for name in ('coco', 'cocoeval'):
        vars(import_module(f'pycocotools.{name}'))['print'] = _print_others


def _print_others(*values: Any, **options: Any) -> None:
    if not (values and str(values[0]).startswith(_PROGRESS)):
        print(*values, **options)
