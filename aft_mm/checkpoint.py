"""Safe loading of checkpoints: ``weights_only`` with a closed allow-list of training state.

mmengine's training checkpoints hold more than tensors (log history, numpy scalars), and recent
torch refuses to load them. The entries below let exactly these objects through. The builtin
``getattr`` that mmengine's pickles ask for is mapped to a restricted one: the real one would let a
file fetch ``eval``.
"""

import errno
import os
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mmengine.dist import barrier, is_distributed
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler import OneCycleParamScheduler
from mmengine.runner import CheckpointLoader

# The only attributes that a checkpoint may fetch.
_ATTRIBUTES = {
    HistoryBuffer: ('min', 'max', 'mean', 'current'),
    OneCycleParamScheduler: ('_annealing_cos', '_annealing_linear'),
}


def _restricted_getattr(owner: object, name: str) -> Any:
    if isinstance(owner, type) and name in _ATTRIBUTES.get(owner, ()):
        return getattr(owner, name)
    raise pickle.UnpicklingError(f'GLOBAL getattr({owner!r}, {name!r}) is not allowed')


def _alias(function: Callable, path: str) -> Callable:
    """``function`` under the dotted name that pickles use for it."""

    def call(*args):
        return function(*args)

    # torch finds an entry by these attributes; its (function, name) pairs do not exist before 2.6.
    call.__module__, _, call.__name__ = path.rpartition('.')
    call.__qualname__ = call.__name__
    return call


_NUMPY_FUNCTIONS = {
    '_reconstruct': np.empty(0).__reduce__()[0],
    'scalar': np.float64(0).__reduce__()[0],
}
_SAFE_GLOBALS = [
    HistoryBuffer,
    OneCycleParamScheduler,
    _alias(_restricted_getattr, 'builtins.getattr'),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in '?bBhHiIlLqQefdU'},
    # numpy 1 and numpy 2 name the module differently.
    *(_alias(function, f'numpy.{core}.multiarray.{name}')
      for name, function in _NUMPY_FUNCTIONS.items() for core in ('core', '_core')),
]


# What torch raises for a file that is no checkpoint, or half of one.
_CORRUPT = (AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError,
            ValueError, struct.error)


def _load(load: Callable[[], dict], filename: str) -> dict:
    """Run ``load`` and say in one sentence why a file is refused."""
    try:
        checkpoint = load()
    except (pickle.UnpicklingError, OSError, *_CORRUPT) as error:
        # Torch steps back beyond the start of a file that was cut short; other errors of the
        # system, such as a failed download, speak for themselves.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        found = re.search(r'GLOBAL (getattr\(.*\)|\S+)', str(error))
        if found:
            raise pickle.UnpicklingError(
                f'checkpoint {filename!r} is refused because it asks for {found.group(1)}, which '
                'is neither a weight nor the training state of mmengine') from error
        # Torch puts its advice around the reason.
        lines = str(error).rpartition('WeightsUnpickler error:')[2].split('\n')
        reason = next(filter(None, map(str.strip, lines)), '')
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} is damaged or holds something other than weights and '
            f'training state ({type(error).__name__}: {reason})') from error
    if not isinstance(checkpoint, dict):
        raise pickle.UnpicklingError(f'checkpoint {filename!r} holds a '
                                     f'{type(checkpoint).__name__} instead of a dict')
    # mmengine's Runner.resume executes this entry of old checkpoints as a python file.
    meta = checkpoint.get('meta')
    if isinstance(meta, dict):
        meta.pop('config', None)
    return checkpoint


def load_from_local(filename: str, map_location: Any = None) -> dict:
    """Load a checkpoint file with ``weights_only=True``.

    Raises:
        FileNotFoundError: there is no such file.
        pickle.UnpicklingError: the file asks for anything outside the allow-list, is damaged, or
            holds no dict.
    """
    filename = os.path.expanduser(filename)
    if not os.path.isfile(filename):
        raise FileNotFoundError(f'checkpoint {filename!r} does not exist')
    return _load(
        lambda: torch.load(filename, map_location=map_location, weights_only=True), filename)


def load_from_http(filename: str, map_location: Any = None) -> dict:
    """Download a checkpoint into torch's hub folder and load it with ``weights_only=True``.

    One process per machine downloads. mmengine's own loader reads the file as a plain pickle.

    Raises:
        pickle.UnpicklingError: the file asks for anything outside the allow-list, is damaged, or
            holds no dict.
    """

    def fetch():
        return torch.hub.load_state_dict_from_url(
            filename, map_location=map_location, progress=False, weights_only=True)

    first_on_machine = int(os.environ.get('LOCAL_RANK', 0)) == 0
    if is_distributed() and not first_on_machine:
        barrier()
    try:
        return _load(fetch, filename)
    finally:  # also after an error, for which the others would wait in vain
        if is_distributed() and first_on_machine:
            barrier()


def register_safe_loading() -> None:
    """Let every checkpoint that mmengine loads from a file or an http address go through here.

    Calling it again changes nothing.
    """
    torch.serialization.add_safe_globals(_SAFE_GLOBALS)
    CheckpointLoader.register_scheme('', load_from_local, force=True)
    CheckpointLoader.register_scheme(('http://', 'https://'), load_from_http, force=True)
