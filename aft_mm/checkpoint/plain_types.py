"""Training state in plain types, for ``weights_only=True``."""

from collections import OrderedDict
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

from .safe_unpickler import history_buffer

#: Entries of the state of mmengine's MessageHub.
HUB_KEYS = ('log_scalars', 'runtime_info', 'resumed_keys')
_HISTORY_KEYS = {'log_history', 'count_history', 'max_length'}


def plain_value(value: Any) -> Any:
    """Replace numpy arrays and scalars by lists and numbers, also inside dicts, lists, tuples."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        copy = {key: plain_value(item) for key, item in value.items()}
        return OrderedDict(copy) if type(value) is OrderedDict else copy
    if isinstance(value, list | tuple):
        return type(value)(map(plain_value, value)) if type(value) in (list, tuple) else list(value)
    return value


def plain_hub(state: dict) -> dict:
    """Convert the state of mmengine's MessageHub: each history becomes two tensors and a number."""
    scalars = {
        key: dict(
            log_history=torch.from_numpy(np.array(value.data[0])),
            count_history=torch.from_numpy(np.array(value.data[1])),
            max_length=value.max_length,
        )
        for key, value in state['log_scalars'].items()
        if isinstance(value, HistoryBuffer)
    }
    return dict(
        log_scalars=scalars,
        runtime_info=plain_value(state['runtime_info']),
        resumed_keys=plain_value(state['resumed_keys']),
    )


def restored_hub(state: Any) -> dict:
    """Invert :func:`plain_hub`, without the config text, which mmengine's inferencers would run.

    Raises:
        UnpicklingError: ``state`` is not the state of a MessageHub.
    """
    parts = [state.get(key, {}) for key in HUB_KEYS] if isinstance(state, dict) else [None]
    if not all(
        isinstance(part, dict) and all(isinstance(key, str) for key in part) for part in parts
    ):
        raise UnpicklingError('its message_hub is not one of mmengine')
    restored = {key: dict(state[key]) for key in HUB_KEYS if key in state}
    for key, value in restored.get('log_scalars', {}).items():
        if isinstance(value, dict) and value.keys() == _HISTORY_KEYS:
            restored['log_scalars'][key] = history_buffer(**value)
    for part in ('runtime_info', 'resumed_keys'):
        restored.get(part, {}).pop('cfg', None)
    return restored
