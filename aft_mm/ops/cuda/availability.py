"""The calls that the CUDA C++ kernels support, and the reasons why others are not."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tracing import constant, transformed
from ..verified import unverified_reasons
from . import nvrtc
from .forms import DTYPES, MOST_COLUMNS, form_of

KERNELS: dict[str, dict[str, Any]] = {'aft_conv': {}}
LIMITS = {'aft_conv': f'a grid of 1 or 2 sizes, causal in 1-d only; up to {MOST_COLUMNS} columns'}
# bfloat16 products in mma.sync.
OLDEST_CAPABILITY = (8, 0)


# torch.compile must not trace the query.
@constant
def machine_reasons(device_type: str, index: int | None) -> tuple[str, ...]:
    return ask_machine(device_type, index)


@functools.cache
def ask_machine(device_type: str, index: int | None) -> tuple[str, ...]:
    if device_type != 'cuda':
        return ('runs on cuda tensors only',)
    if torch.version.hip is not None:
        return ('runs on NVIDIA devices only',)
    if not torch.cuda.is_available():
        return ('finds no CUDA device',)
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        return (
            'needs compute capability {}.{}, got {}.{}'.format(*OLDEST_CAPABILITY, *capability),
        )
    return (reason,) if (reason := nvrtc.missing()) else ()


@constant
def _compile_reason(index: int, *call: Any) -> str:
    form = form_of(*call)
    return nvrtc.failure(form.name, form.macros, index)


def unsupported_reasons(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    """Return the reasons why no kernel can run the call; empty if one can, once it is compiled."""
    query, key, value, *_ = tensors
    reasons = [*machine_reasons(value.device.type, value.device.index)]
    if transformed():
        reasons.append('torch.func and forward-mode differentiation need operations of torch')
    if op not in KERNELS:
        return [*reasons, 'has no kernel']
    grid = tuple(options.get('grid', ()))
    if len(grid) > 2:
        reasons.append(f'has a kernel for aft_conv on grids of 1 or 2 sizes only, got {grid}')
    elif options.get('causal') and len(grid) == 2:
        reasons.append(f'has a kernel for causal aft_conv on 1-d grids only, got {grid}')
    columns = [min(x.shape[-1], 2 * grid[-1] - 1) for x in tensors[3:] if grid]
    if columns and columns[0] > MOST_COLUMNS:
        reasons.append(f'has kernels for w of up to {MOST_COLUMNS} columns, got {columns[0]}')
    if any(x is not None and x.device != value.device for x in tensors):
        reasons.append('needs all tensors on one device')
    dtypes = {x.dtype for x in (query, key, value) if x is not None}
    if len(dtypes) > 1 or value.dtype not in DTYPES:
        names = ', '.join(sorted(str(dtype) for dtype in dtypes))
        reasons.append(f'has kernels for tokens of float16 or of bfloat16, got {names}')
    return reasons


def compile_reasons(tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> list[str]:
    _, key, value, *others = tensors
    if not others or not value.shape[0]:  # the table of backends has no weight
        return []
    kernel, share = tuple(others[0].shape[1:]), value.shape[2] // key.shape[2]
    switches = options['global_connectivity'], options['causal'], options['key_mask'] is not None
    call = tuple(options['grid']), kernel, value.dtype, share, options['gate'], *switches
    reason = _compile_reason(value.get_device(), *call)
    return [reason] if reason else []


@constant
def unverified(op: str, dtype: torch.dtype, index: int | None) -> tuple[str, ...]:
    return unverified_reasons('cuda', op, dtype, index)


def reasons_on_request_only(op: str, tensors: Sequence[Tensor | None]) -> list[str]:
    """Return why kernels that can run the call are not the default; empty if they are."""
    value = tensors[2]
    reasons = unverified(op, value.dtype, value.device.index)
    return [f'{reason}; AFT_MM_BACKEND=cuda uses it' for reason in reasons]
