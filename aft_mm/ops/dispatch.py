"""Which backend serves a call, and the reasons why another one does not.

Of :data:`DEFAULT_BACKENDS` the first without a reason against it serves.
``AFT_MM_BACKEND`` names others to try, such as ``triton`` or ``triton,eager``; if none of them can
serve, the call fails with their reasons instead of falling back in silence. So does a call whose
backend was chosen and then failed.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from . import eager, reference
from .fla import support as fla_support
from .triton import support as triton_support

OPS = (
    'aft_simple',
    'aft_full',
    'aft_local',
    'aft_conv',
    'aft_window',
    'aft_local_normalized',
    'linear_attention',
)
STEPS = tuple(f'{op}_step' for op in OPS)
BACKENDS = ('triton', 'eager', 'reference', 'fla')
# Those that serve without being asked for.
DEFAULT_BACKENDS = ('eager',)
ENVIRONMENT_VARIABLE = 'AFT_MM_BACKEND'


class BackendError(RuntimeError):
    """No backend, of those asked for, can serve a call; the message gives the reasons of each."""


def requested_backends() -> tuple[str, ...]:
    """The backends named by ``AFT_MM_BACKEND``, in order; raises ValueError for an unknown name."""
    names = os.environ.get(ENVIRONMENT_VARIABLE) or ''
    requested = tuple(name.strip() for name in names.split(',')) if names else ()
    for name in requested:
        if name not in BACKENDS:
            raise ValueError(
                f'{ENVIRONMENT_VARIABLE} must be names of {", ".join(BACKENDS)} with commas '
                f'between them, got {names!r}'
            )
    return requested


def reasons_against(
    backend: str, op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    """Why `backend` cannot serve `op` on (query, key, value, ...); empty if it can."""
    reasons = []
    if backend == 'triton':
        # The interpreter and the compiler have seen the kernels, a device has not.
        if 'triton' not in requested_backends():
            reasons.append(
                f'no GPU has run it yet: serves only when {ENVIRONMENT_VARIABLE}=triton asks'
            )
        reasons += triton_support.reasons_against(op, tensors, options)
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


def choose_backend(op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> str:
    """Name of the backend for the call; raises :class:`BackendError` if none can serve."""
    refused = []
    for name in requested_backends() or DEFAULT_BACKENDS:
        reasons = reasons_against(name, op, tensors, options)
        if not reasons:
            return name
        refused.append(f'{name}: {"; ".join(reasons)}')
    raise BackendError(
        f'no AFT backend serves {op} on {tensors[2].device.type}: {", and ".join(refused)}'
    )


# Triton is missing in torch's CPU builds, fla may be: such a backend loads when it first serves.
_MODULES: dict[str, ModuleType] = {'eager': eager, 'reference': reference}


# The compiler does not look into an import.
@triton_support.constant
def _load(name: str) -> bool:
    if name not in _MODULES:
        _MODULES[name] = importlib.import_module(f'.{name}.library', __package__)
    return True


def implementation(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """The function of the serving backend for the call."""
    name = choose_backend(op, tensors, options)
    _load(name)
    return getattr(_MODULES[name], op)
