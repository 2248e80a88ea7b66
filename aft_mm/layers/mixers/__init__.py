"""Token mixers, one file each.

A class registered in ``MODELS`` becomes an attribute of this package and of :mod:`aft_mm.layers`.
Another package adds mixers by an entry point of the group ``aft_mm.mixers``.
"""

import warnings
from importlib import import_module
from importlib.metadata import entry_points
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


def load_mixers_of_others() -> None:
    """Import the modules of the entry points ``aft_mm.mixers``, which register further mixers."""
    for point in entry_points(group='aft_mm.mixers'):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist else point.name
            reason = f'{type(error).__name__}: {error}'
            warnings.warn(
                f'mixers of {package} ({point.value}) cannot be imported: {reason}', stacklevel=2
            )


__all__ = ['MIXERS', 'AFTMixer', 'ProjectedMemory', 'TokenMixer']
__all__ += list(MIXERS)
