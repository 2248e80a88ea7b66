"""Adaptations of the host packages.

docs/hosts.md says what they change and why.
"""

import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from aft_mm.images import is_hidden, read_unlike_opencv

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


class _ReplacementLoader(Loader):
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
        pass


def extension_spec(path: Sequence[str] | None) -> ModuleSpec:
    compiled = PathFinder.find_spec(MMCV_EXT, path)
    return ModuleSpec(MMCV_EXT, _ReplacementLoader(compiled), origin='aft_mm.hosts.mmcv_ext')


def selected_operators() -> str:
    """Return ``'compiled'`` or ``'torchvision'``: which ``mmcv._ext`` an import yields here."""
    module = import_module(MMCV_EXT)
    return 'torchvision' if hasattr(module, 'SUPPORTED') else 'compiled'


def adapt_image_reading() -> None:
    """Replace ``mmcv.imfrombytes``, also that of ``mmcv.imread`` and ``LoadImageFromFile``."""
    decode = vars(sys.modules['mmcv'])['imfrombytes']

    @functools.wraps(decode)
    def imfrombytes(
        content: bytes, flag: str = 'color', channel_order: str = 'bgr', backend: str | None = None
    ) -> np.ndarray:
        image = read_unlike_opencv(content) if flag in ('color', 'grayscale') else None
        if image is None:
            return decode(content, flag, channel_order, backend)
        if flag == 'grayscale':
            return np.array(Image.fromarray(image).convert('L'))
        return image if channel_order == 'rgb' else np.ascontiguousarray(image[..., ::-1])

    for name in ('mmcv', 'mmcv.image', 'mmcv.image.io'):
        vars(sys.modules[name])['imfrombytes'] = imfrombytes


def without_hidden(paths: Iterable[str]) -> Iterator[str]:
    """Leave out relative paths of hidden files and folders, and those inside of one."""
    return (path for path in paths if not any(map(is_hidden, path.split(os.sep))))


def leave_out_multimodal() -> None:
    """Let mmpretrain register placeholders for models that this Transformers lacks the parts of."""
    dependency = vars(import_module('mmpretrain.utils.dependency'))
    if not dependency['WITH_MULTIMODAL']:
        return
    spec = find_spec('transformers')
    # An import would take seconds.
    source = Path((spec and spec.origin) or '').with_name('modeling_utils.py')
    if not source.is_file() or 'apply_chunking_to_forward' not in source.read_text('utf-8'):
        dependency['WITH_MULTIMODAL'] = False


def quiet_pycocotools() -> None:
    if find_spec('pycocotools') is None:
        return
    for name in ('coco', 'cocoeval'):
        vars(import_module(f'pycocotools.{name}'))['print'] = _print_others


def _print_others(*values: Any, **options: Any) -> None:
    if not (values and str(values[0]).startswith(_PROGRESS)):
        print(*values, **options)
