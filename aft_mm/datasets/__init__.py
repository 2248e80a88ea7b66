"""One file per kind of data; in configs, classes are ``aft_mm.NAME``."""

import importlib
import pkgutil

from aft_mm.errors import UnusableFile
from aft_mm.images import read_rgb
from aft_mm.registry import DATA_SAMPLERS, DATASETS, TRANSFORMS

from .file_dataset import FileDataset
from .point_clouds import read_points
from .sound_files import filter_banks, read_sound
from .texts import read_lines
from .transforms.speech import StackFrames
from .utterances import Utterances, read_transcripts

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f'{__name__}.{_file.name}')
_registered = {
    name: member
    for registry in (DATASETS, DATA_SAMPLERS, TRANSFORMS)
    for name, member in registry.module_dict.items()
    if member.__module__.startswith(f'{__name__}.')
}
globals().update(_registered)

__all__ = [
    'FileDataset',
    'StackFrames',
    'UnusableFile',
    'Utterances',
    'filter_banks',
    'read_lines',
    'read_points',
    'read_rgb',
    'read_sound',
    'read_transcripts',
    *sorted(_registered.keys() - {'StackFrames'}),
]
