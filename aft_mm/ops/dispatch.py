"""Which backend serves a call, and the reasons why another one does not.

Backends are tried in the order of :data:`BACKENDS`; the first without a reason against it serves.
``AFT_MM_BACKEND=name`` asks for one; if it cannot serve, the call fails with its reasons instead of
falling back in silence. So does a call whose backend was chosen and then failed.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from . import eager, reference, triton_support

OPS = (
    'aft_simple',
    'aft_full',
    'aft_local',
    'aft_conv',
    'aft_window',
    'aft_local_normalized',
)
BACKENDS = ('triton', 'eager', 'reference')
ENVIRONMENT_VARIABLE = 'AFT_MM_BACKEND'


def requested_backend() -> str | None:
    """The backend named by ``AFT_MM_BACKEND``, or None; raises ValueError for an unknown name."""
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f'{ENVIRONMENT_VARIABLE} must be one of {", ".join(BACKENDS)}, got {name!r}'
        )
    return name


def reasons_against(
    backend: str, op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    """Why `backend` cannot serve `op` on (query, key, value, ...); empty if it can."""
    reasons = []
    if backend == 'triton':
        # The interpreter and the compiler have seen the kernels, a device has not.
        if requested_backend() != 'triton':
            reasons.append(
                f'no GPU has run it yet: serves only when {ENVIRONMENT_VARIABLE}=triton asks'
            )
        reasons += triton_support.reasons_against(op, tensors, options)
    if backend == 'reference':
        if requested_backend() != 'reference':
            reasons.append(f'the oracle serves only when {ENVIRONMENT_VARIABLE}=reference asks')
        if tensors[2].device.type == 'mps':
            reasons.append('computes in float64, which the mps device lacks')
    return reasons


def choose_backend(op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> str:
    """Name of the backend for the call; raises RuntimeError with the reasons if none can serve."""
    requested = requested_backend()
    refused = []
    for name in [requested] if requested else BACKENDS:
        reasons = reasons_against(name, op, tensors, options)
        if not reasons:
            return name
        refused.append(f'{name}: {"; ".join(reasons)}')
    raise RuntimeError(f'no AFT backend serves {op} on {tensors[2].device.type}: {refused}')


# Triton is missing in torch's CPU builds: its backend is loaded when it first serves.
_MODULES: dict[str, ModuleType] = {'eager': eager, 'reference': reference}


# The compiler does not look into an import.
@triton_support.constant
def _load(name: str) -> bool:
    if name not in _MODULES:
        _MODULES[name] = importlib.import_module(f'.{name}', __package__)
    return True


def implementation(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """The function of the serving backend for the call."""
    name = choose_backend(op, tensors, options)
    _load(name)
    return getattr(_MODULES[name], op)
