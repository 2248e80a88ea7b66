"""Checkpoints: read without running code from the file, written whole or not at all."""

from .latest import (
    ATOMIC_BACKEND,
    average,
    averaged,
    checkpoints_in,
    disown_checkpoints,
    latest_checkpoint,
    remove_parts,
    save_whole,
    write_pointer,
)
from .loading import CONFIG_TEXT, load_from_http, load_from_hub, load_from_local, load_weights
from .plain_types import HUB_KEYS, plain_hub, plain_value
from .safetensors import read_safetensors, write_safetensors

__all__ = [
    'ATOMIC_BACKEND',
    'CONFIG_TEXT',
    'HUB_KEYS',
    'average',
    'averaged',
    'checkpoints_in',
    'disown_checkpoints',
    'latest_checkpoint',
    'load_from_http',
    'load_from_hub',
    'load_from_local',
    'load_weights',
    'plain_hub',
    'plain_value',
    'read_safetensors',
    'remove_parts',
    'save_whole',
    'write_pointer',
    'write_safetensors',
]
