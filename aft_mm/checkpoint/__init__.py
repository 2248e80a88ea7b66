"""Checkpoints: read without running what a file says, written whole or not at all.

``notes.py`` reads a pickle to notes of what it would do, ``values.py`` builds from them what a
checkpoint may hold, ``archive.py`` knows torch's file formats, ``tensors.py`` that of safetensors,
and ``loading.py`` is what mmengine calls. ``plain.py`` turns training state into plain types before
it is saved, ``writing.py`` writes files whole or not at all, and ``folder.py`` finds the newest
whole checkpoint of a run.
"""

from .folder import checkpoints_in, latest_checkpoint, remove_parts, write_pointer
from .loading import load_from_http, load_from_hub, load_from_local, register_safe_loading
from .plain import HUB_KEYS, plain_hub, plain_value
from .tensors import read_safetensors, write_safetensors
from .writing import write_whole

__all__ = [
    'HUB_KEYS',
    'checkpoints_in',
    'latest_checkpoint',
    'load_from_http',
    'load_from_hub',
    'load_from_local',
    'plain_hub',
    'plain_value',
    'read_safetensors',
    'register_safe_loading',
    'remove_parts',
    'write_pointer',
    'write_safetensors',
    'write_whole',
]
