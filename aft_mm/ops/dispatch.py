"""Which backend serves a call, and the reasons why another one does not.

Of :data:`DEFAULT_BACKENDS` the first without a reason against it serves; a kernel needs a verdict
on its device for that (`verify/`).
``AFT_MM_BACKEND`` names others to try, such as ``triton`` or ``triton,eager``; if none of them can
serve, the call fails with their reasons instead of falling back in silence. So does a call whose
backend was chosen and then failed.
"""

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import eager, path_choice, reference, verify
from .fla import support as fla_support
from .native import availability as native_availability
from .triton import support as triton_support

OPS = (
    'aft_simple',
    'aft_full',
    'aft_local',
    'aft_conv',
    'aft_local_hard',
    'aft_local_learned',
    'linear_attention',
)
STEPS = tuple(f'{op}_step' for op in OPS)
BACKENDS = ('triton', 'native', 'eager', 'reference', 'fla')
# Those that serve without being asked for.
DEFAULT_BACKENDS = ('triton', 'native', 'eager')
ENVIRONMENT_VARIABLE = 'AFT_MM_BACKEND'
# Settled once: asking the environment takes half of the time that a choice takes.
INTERPRETED = triton_support.interpreted()
logger = logging.getLogger('aft_mm.ops')


class BackendError(RuntimeError):
    """No backend, of those asked for, can serve a call; the message gives the reasons of each."""


def requested_backends() -> tuple[str, ...]:
    """The backends named by ``AFT_MM_BACKEND``, in order; raises ValueError for an unknown name."""
    names = os.environ.get(ENVIRONMENT_VARIABLE)
    if not names:
        return ()
    requested = tuple(name.strip() for name in names.split(','))
    for name in requested:
        if name not in BACKENDS:
            raise ValueError(
                f'{ENVIRONMENT_VARIABLE} must be names of {", ".join(BACKENDS)} with commas '
                f'between them, got {names!r}'
            )
    return requested


def reasons_against(
    backend: str,
    op: str,
    tensors: Sequence[Tensor | None],
    options: Mapping[str, Any],
    check: bool = False,
) -> list[str]:
    """Why `backend` cannot serve `op` on (query, key, value, ...); empty if it can.

    `check` lets a missing verdict on the kernels be made.
    """
    reasons = []
    if backend == 'triton':
        reasons += triton_support.reasons_against(op, tensors, options)
        if not reasons and 'triton' not in requested_backends():
            reasons += _reasons_against_unasked_kernels(op, tensors[2], check)
    if backend == 'native':
        reasons += native_availability.unsupported_reasons(op, tensors, options)
    if backend == 'fla':
        if 'fla' not in requested_backends():
            reasons.append(f'not tried here: serves only when {ENVIRONMENT_VARIABLE}=fla asks')
        reasons += fla_support.reasons_against(op, tensors, options)
    if backend == 'reference':
        if 'reference' not in requested_backends():
            reasons.append(f'the oracle serves only when {ENVIRONMENT_VARIABLE}=reference asks')
        if op in STEPS:
            reasons.append('has no steps')
        if tensors[2].device.type == 'mps':
            reasons.append('computes in float64, which the mps device lacks')
    return reasons


def _reasons_against_unasked_kernels(op: str, value: Tensor, check: bool) -> list[str]:
    if path_choice.recording_or_replaying():
        return ['an exported graph replays the paths of eager']
    place = value.device.type, value.device.index
    reason = _verdict(op, value.dtype, *place, check, torch.compiler.is_compiling())
    return [] if reason is None else [reason]


# The compiler takes what was found out and does not look into how.
@triton_support.constant
def _verdict(*about) -> str | None:
    return verify.reason_against(*about)


def choose_backend(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any], check: bool = True
) -> str:
    """Name of the backend for the call; raises :class:`BackendError` if none can serve."""
    if os.environ.get(ENVIRONMENT_VARIABLE):
        names = requested_backends()
    elif tensors[2].is_cuda or INTERPRETED:
        names = DEFAULT_BACKENDS
    else:
        # Without a library the call need not be checked.
        if torch.compiler.is_compiling() or isinstance(native_availability.find_library(), str):
            return 'eager'
        return (
            'eager' if native_availability.unsupported_reasons(op, tensors, options) else 'native'
        )
    refused = []
    for name in names:
        reasons = reasons_against(name, op, tensors, options, check)
        if not reasons:
            return name
        refused.append(f'{name}: {"; ".join(reasons)}')
    where = tensors[2].device.type
    raise BackendError(f'no AFT backend serves {op} on {where}: {", and ".join(refused)}')


# Triton is missing in torch's CPU builds, fla or the loops in C++ may be: such a backend loads when
# it first serves.
_MODULES: dict[str, ModuleType] = {'eager': eager, 'reference': reference}
_MODULE_NAMES = {'triton': '.triton.library', 'native': '.native.bindings', 'fla': '.fla.library'}
_served: set[tuple[str, str, torch.dtype]] = set()


# The compiler does not look into an import or a log.
@triton_support.constant
def _begin(name: str, op: str, dtype: torch.dtype) -> bool:
    """Load the backend, and say once what serves an op in a type."""
    serving = name, op, dtype
    if serving not in _served:
        if name not in _MODULES:
            _MODULES[name] = importlib.import_module(_MODULE_NAMES[name], __package__)
        logger.info('%s serves %s in %s', name, op, str(dtype).removeprefix('torch.'))
        _served.add(serving)
    return True


def no_autocast(value: Tensor) -> AbstractContextManager:
    """Autocast would turn the float32 products inside of an op back into bfloat16.

    To enter it takes as long as three small products: only where it is on, or a graph is made that
    may run where it is. On the meta device there is none.
    """
    device = value.device.type
    if value.is_meta or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device)):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def implementation(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """The function of the serving backend for the call."""
    name = choose_backend(op, tensors, options)
    _begin(name, op, tensors[2].dtype)
    return getattr(_MODULES[name], op)
