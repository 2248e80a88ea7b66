"""Token mixers, one file each.

Every file is imported: a class registered in ``MODELS`` becomes an attribute of this package and of
:mod:`aft_mm.layers`.
"""

from importlib import import_module
from pkgutil import iter_modules

from aft_mm.registry import MODELS

from ..projections import ProjectedMemory
from .base import AFTMixer, TokenMixer

for _file in iter_modules(__path__):
    import_module(f'{__name__}.{_file.name}')

#: The mixers of this package by name.
MIXERS: dict[str, type[TokenMixer]] = {
    name: cls for name, cls in MODELS.module_dict.items() if cls.__module__.startswith(__name__)
}
globals().update(MIXERS)

__all__ = ['MIXERS', 'AFTMixer', 'ProjectedMemory', 'TokenMixer']
__all__ += list(MIXERS)
