"""Weights in the safetensors format, with their metadata as one JSON entry."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save

SUFFIX = '.safetensors'
#: One entry: the library writes several in any order.
_ENTRY = 'aft_mm'
# Key of a state_dict for the version of each module.
_VERSION = 'version'


def write_safetensors(file: BinaryIO, checkpoint: Mapping) -> None:
    """Write ``state_dict`` and ``meta`` of a checkpoint, with reproducible bytes.

    The metadata also holds the versions of the modules and the ``sha256`` of the weights.

    Raises:
        TypeError, ValueError: ``meta`` is not JSON, or the state holds more than tensors.
    """
    state = {name: tensor.contiguous() for name, tensor in checkpoint['state_dict'].items()}
    versions = {
        name: entry[_VERSION]
        for name, entry in getattr(checkpoint['state_dict'], '_metadata', {}).items()
        if _VERSION in entry
    }
    metadata = dict(
        meta=dict(checkpoint.get('meta') or {}),
        versions=versions,
        sha256=_sha256_of_weights(save(state)),
    )
    file.write(save(state, {_ENTRY: json.dumps(metadata, sort_keys=True)}))


def read_safetensors(path: str, map_location: Any = None) -> dict:
    """Read ``state_dict`` and ``meta`` of any safetensors file, and compare its ``sha256``.

    Raises:
        UnpicklingError, SafetensorError, ValueError, ...: The file is damaged or of another format.
    """
    with safe_open(path, 'pt', device='cpu') as file:
        metadata = json.loads((file.metadata() or {}).get(_ENTRY, '{}'))
        # Tensors of a memory-mapped file change with it.
        state = OrderedDict((name, file.get_tensor(name).clone()) for name in file.keys())
    meta, versions = metadata.get('meta', {}), metadata.get('versions', {})
    if not (isinstance(versions, dict) and all(type(v) is int for v in versions.values())):
        raise UnpicklingError('its versions are not numbers')
    wanted = metadata.get('sha256')
    if wanted is not None and wanted != _sha256_of_weights(Path(path).read_bytes()):
        raise UnpicklingError('its weights do not match the sha256 in its metadata')
    device = torch.device('cpu' if map_location is None else map_location)
    state = OrderedDict((name, tensor.to(device)) for name, tensor in state.items())
    if versions:
        state._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name, {_VERSION: version}) for name, version in versions.items()
        )
    return dict(state_dict=state, meta=meta)


def _sha256_of_weights(file: bytes) -> str:
    view = memoryview(file)
    return hashlib.sha256(view[8 + int.from_bytes(view[:8], 'little') :]).hexdigest()
