"""Selection of the backend of a call, and the reasons why another one cannot run it.

docs/ops.md has the order. A selected backend that fails is not replaced.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import eager, export_conv, reference
from .checks import ENVIRONMENT_VARIABLE
from .conv_plan import ConvPlan
from .cuda import availability as cuda_availability
from .cuda.forms import DTYPES
from .export_paths import export_stage
from .native import availability as native_availability
from .tracing import constant
from .triton import availability as triton_availability
from .verified import unverified_reasons

OPS = (
    'aft_simple',
    'aft_full',
    'aft_local',
    'aft_conv',
    'aft_local_hard',
    'aft_local_learned',
    'aft_decay',
    'linear_attention',
)
STEPS = tuple(f'{op}_step' for op in OPS)
BACKENDS = ('cuda', 'triton', 'native', 'eager', 'reference')
DEFAULT_BACKENDS = ('cuda', 'triton', 'native', 'eager')
# The backends of kernels, which may have to be requested.
KERNELS = {'cuda': cuda_availability, 'triton': triton_availability}
# Backends that compute less for a constant w of AFT-conv.
PLANNED = ('native', 'eager')
# Devices whose kernels may read tokens channel-major.
CHANNEL_MAJOR_DEVICES = ('cuda',)
# Read once, as reading the environment is slow.
INTERPRETED = triton_availability.interpreted()
logger = logging.getLogger('aft_mm.ops')


class BackendError(RuntimeError):
    """None of the requested backends can run a call."""


def requested_backends() -> tuple[str, ...]:
    names = os.environ.get(ENVIRONMENT_VARIABLE)
    if not names:
        return ()
    requested = tuple(map(str.strip, names.split(',')))
    for name in requested:
        if name not in BACKENDS:
            raise ValueError(
                f'{ENVIRONMENT_VARIABLE} must be names of {", ".join(BACKENDS)} with commas '
                f'between them, got {names!r}'
            )
    return requested


def unsupported_reasons(
    backend: str, op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    """Return why `backend` cannot run `op` on (query, key, value, ...); empty if it can."""
    if backend in KERNELS:
        availability = KERNELS[backend]
        if backend not in requested_backends():
            if export_stage():
                return ['an exported graph replays the paths of eager']
        reasons: list[str] = availability.unsupported_reasons(op, tensors, options)
        if not reasons and backend not in requested_backends():
            reasons = availability.reasons_on_request_only(op, tensors)
        if not reasons and backend == 'cuda':
            reasons = cuda_availability.compile_reasons(tensors, options)
        return reasons
    if backend == 'native':
        return native_availability.unsupported_reasons(op, tensors, options)
    reasons = []
    if backend == 'reference':
        if 'reference' not in requested_backends():
            reasons.append(f'used only with {ENVIRONMENT_VARIABLE}=reference')
        if op in STEPS:
            reasons.append('has no steps')
        if tensors[2].device.type == 'mps':
            reasons.append('computes in float64, which the mps device lacks')
    return reasons


def choose_backend(op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> str:
    if os.environ.get(ENVIRONMENT_VARIABLE):
        names = requested_backends()
    elif tensors[2].is_cuda or INTERPRETED:
        names = DEFAULT_BACKENDS
    else:
        unsupported = native_availability.unsupported_reasons(op, tensors, options)
        return 'eager' if unsupported else 'native'
    refused = []
    for name in names:
        reasons = unsupported_reasons(name, op, tensors, options)
        if not reasons:
            return name
        refused.append(f'{name}: {"; ".join(reasons)}')
    where = tensors[2].device.type
    raise BackendError(f'no AFT backend runs {op} on {where}: {", and ".join(refused)}')


def prefers_channel_major(x: Tensor, is_product: bool) -> bool:
    """Return whether `aft_conv` reads x channel-major, [B, T, D] with strides (T, 1, B·T).

    Args:
        x: Tokens.
        is_product: Whether the op reads a product with x, whose dtype autocast may choose.
    """
    device, dtype = x.device, x.dtype
    if device.type not in CHANNEL_MAJOR_DEVICES:
        return False
    if is_product and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if dtype not in DTYPES:
        return False
    if requested := requested_backends():
        if requested[0] != 'cuda':
            return False
    elif unverified_reasons('cuda', 'aft_conv', dtype, device.index):
        return False
    return not cuda_availability.machine_reasons(device.type, device.index)


def backend_module(name: str) -> ModuleType:
    if name == 'eager':
        return eager
    if name == 'reference':
        return reference
    # CUDA, Triton or the C++ loops may not be installed.
    if name == 'native':
        from .native import bindings as native

        return native
    if name == 'cuda':
        from .cuda import conv as cuda

        return cuda
    from .triton import library as triton

    return triton


_modules: dict[str, ModuleType] = {}
_logged: set[tuple[str, str, torch.dtype]] = set()


# torch.compile does not trace an import or a log.
@constant
def _prepare(name: str, op: str, dtype: torch.dtype) -> bool:
    used = name, op, dtype
    if used in _logged:
        return True
    if name not in _modules:
        _modules[name] = backend_module(name)
    logger.info('%s backend used for %s in %s', name, op, str(dtype).removeprefix('torch.'))
    _logged.add(used)
    return True


def implementation(
    op: str,
    tensors: Sequence[Tensor | None],
    options: Mapping[str, Any],
    plan: ConvPlan | None = None,
) -> tuple[str, Callable[..., Any]]:
    """Return the backend of a call, and its op with the plan of AFT-conv if the backend uses it."""
    name = choose_backend(op, tensors, options)
    if torch.compiler.is_compiling() or (name, op, tensors[2].dtype) not in _logged:
        _prepare(name, op, tensors[2].dtype)
    if name == 'eager' and op == 'aft_conv' and export_stage():
        return name, export_conv.aft_conv
    function = getattr(_modules[name], op)
    if plan is not None and name in PLANNED:
        function = partial(function, plan=plan)
    return name, function
