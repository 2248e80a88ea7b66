"""Which backend serves a call, and the reasons why another one does not.

Backends are tried in the order of :data:`BACKENDS`; the first without a reason against it serves.
``AFT_MM_BACKEND=name`` asks for one; if it cannot serve, the call fails with its reasons instead of
falling back in silence.
"""

import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from . import eager, reference

OPS = (
    'aft_simple',
    'aft_full',
    'aft_local',
    'aft_conv',
    'aft_window',
    'aft_local_normalized',
)
BACKENDS: dict[str, ModuleType] = {'eager': eager, 'reference': reference}
ENVIRONMENT_VARIABLE = 'AFT_MM_BACKEND'


def requested_backend() -> str | None:
    """The backend named by ``AFT_MM_BACKEND``, or None; raises ValueError for an unknown name."""
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f'{ENVIRONMENT_VARIABLE} must be one of {", ".join(BACKENDS)}, got {name!r}'
        )
    return name


def reasons_against(backend: str, device: torch.device) -> list[str]:
    """Why `backend` cannot serve tensors on `device`; empty if it can."""
    reasons = []
    if backend == 'reference':
        if requested_backend() != 'reference':
            reasons.append(f'the oracle serves only when {ENVIRONMENT_VARIABLE}=reference asks')
        if device.type == 'mps':
            reasons.append('computes in float64, which the mps device lacks')
    return reasons


def choose_backend(device: torch.device) -> str:
    """Name of the backend for `device`; raises RuntimeError with the reasons if none can serve."""
    requested = requested_backend()
    refused = {}
    for name in [requested] if requested else BACKENDS:
        reasons = reasons_against(name, device)
        if not reasons:
            return name
        refused[name] = '; '.join(reasons)
    raise RuntimeError(f'no AFT backend serves device {device.type}: {refused}')


def implementation(op: str, device: torch.device) -> Callable[..., Tensor]:
    """The function of the serving backend for `op`."""
    return getattr(BACKENDS[choose_backend(device)], op)
