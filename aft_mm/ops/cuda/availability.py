import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..tracing import constant, transformed
from ..verified import missing_device, unverified_reasons
from . import nvrtc
from .forms import DTYPES, MOST_COLUMNS, form_of

KERNELS: dict[str, dict[str, Any]] = {'aft_conv': {}}
LIMITS = {'aft_conv': f'a grid of 1 or 2 sizes; up to {MOST_COLUMNS} columns'}


# torch.compile must not trace the query.
@constant
def machine_reasons(device_type: str, index: int | None) -> tuple[str, ...]:
    return ask_machine(device_type, index)


@functools.cache
def ask_machine(device_type: str, index: int | None) -> tuple[str, ...]:
    if device_type != 'cuda':
        return ('runs on cuda tensors only',)
    return missing_device(index) or ((reason,) if (reason := nvrtc.missing()) else ())


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
    columns = [min(x.shape[-1], 2 * grid[-1] - 1) for x in tensors[3:] if grid]
    if columns and columns[0] > MOST_COLUMNS:
        reasons.append(f'has kernels for w of up to {MOST_COLUMNS} columns, got {columns[0]}')
    if any(x is not None and x.device != value.device for x in tensors):
        reasons.append('needs all tensors on one device')
    dtypes = {x.dtype for x in (query, key, value) if x is not None}
    if len(dtypes) > 1 or value.dtype not in DTYPES:
        names = ', '.join(sorted(str(dtype) for dtype in dtypes))
        reasons.append(f'has kernels for tokens of float32, float16 or bfloat16, got {names}')
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


def reasons_on_request_only(op: str, tensors: Sequence[Tensor | None]) -> list[str]:
    """Return why kernels that can run the call are not the default; empty if they are."""
    value = tensors[2]
    reasons = unverified_reasons('cuda', op, value.dtype, value.device.index)
    return [f'{reason}; AFT_MM_BACKEND=cuda uses it' for reason in reasons]
