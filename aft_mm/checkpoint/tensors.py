"""Files of safetensors: weights, and beside them as JSON what a reader of them has a use for."""

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
#: The one entry of a file's metadata. The library writes several in any order, so that the bytes
#: of a file would differ from one writing to the next.
_ENTRY = 'aft_mm'
# What state_dict keeps of each module: the version of its weights.
_VERSION = 'version'


def write_safetensors(file: BinaryIO, checkpoint: Mapping) -> None:
    """Write ``state_dict`` and ``meta`` of a checkpoint; the same one gives the same bytes.

    The metadata holds ``meta``, the versions of the modules, and ``sha256`` of the weights.

    Raises:
        TypeError, ValueError: ``meta`` is none of JSON, or the state holds no tensors alone.
    """
    state = {name: tensor.contiguous() for name, tensor in checkpoint['state_dict'].items()}
    versions = {
        name: entry[_VERSION]
        for name, entry in getattr(checkpoint['state_dict'], '_metadata', {}).items()
        if _VERSION in entry
    }
    notes = dict(
        meta=dict(checkpoint.get('meta') or {}),
        versions=versions,
        sha256=_sha256_of_weights(save(state)),
    )
    file.write(save(state, {_ENTRY: json.dumps(notes, sort_keys=True)}))


def read_safetensors(path: str, map_location: Any = None) -> dict:
    """``state_dict`` and ``meta`` of a file of :func:`write_safetensors`, or of another's weights.

    The format holds no code. ``sha256`` is compared where it is there.

    Raises:
        UnpicklingError, SafetensorError, ValueError, ...: the file is damaged or none of these.
    """
    with safe_open(path, 'pt', device='cpu') as file:
        notes = json.loads((file.metadata() or {}).get(_ENTRY, '{}'))
        # Copies, since the tensors of a file that is mapped change with it.
        state = OrderedDict((name, file.get_tensor(name).clone()) for name in file.keys())
    meta, versions = notes.get('meta', {}), notes.get('versions', {})
    if not (isinstance(versions, dict) and all(type(v) is int for v in versions.values())):
        raise UnpicklingError('its versions are no numbers')
    wanted = notes.get('sha256')
    if wanted is not None and wanted != _sha256_of_weights(Path(path).read_bytes()):
        raise UnpicklingError('its weights have another sha256 than it says')
    device = torch.device('cpu' if map_location is None else map_location)
    state = OrderedDict((name, tensor.to(device)) for name, tensor in state.items())
    if versions:
        state._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name, {_VERSION: version}) for name, version in versions.items()
        )
    return dict(state_dict=state, meta=meta)


def _sha256_of_weights(file: bytes) -> str:
    """Of what follows the header, whose length is the first eight bytes."""
    view = memoryview(file)
    return hashlib.sha256(view[8 + int.from_bytes(view[:8], 'little') :]).hexdigest()
