"""The calls with a Triton kernel, and the reasons why others have none, without loading Triton.

``TRITON_INTERPRET=1``, set before Python starts, runs the kernels in Triton's interpreter on the
CPU, for tests.
"""

import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..tracing import constant
from ..verified import ALL, missing_device, unverified_reasons

# Ops that have a kernel, and the options that it requires.
KERNELS: dict[str, dict[str, Any]] = {
    'aft_simple': dict(causal=True),
    'aft_full': {},
    'aft_full_batched': {},
    'aft_local': {},
    'aft_conv': dict(global_connectivity=True, causal=False),
    'aft_simple_step': dict(key_function='softmax'),
    'aft_full_step': {},
    'aft_local_step': {},
    'aft_conv_step': {},
    'aft_local_hard_step': {},
}
# What else a call needs.
LIMITS = {op: 'a float32 state' for op in KERNELS if op.endswith('_step')}
LIMITS['aft_conv'] = 'a grid of 1 or 2 sizes'
DTYPES = ALL
# Triton 3.6 is reported to compile products in a loop wrongly for this chip.
REFUSED_CAPABILITY = 10
# The oldest and the newest version that compiled and interpreted all kernels: those of torch 2.11 and
# 2.14. Devices ran the first one only.
VERSIONS = (3, 6), (3, 8)


def interpreted() -> bool:
    return os.environ.get('TRITON_INTERPRET') == '1'


# torch.compile must not trace the query.
@constant
def machine_reasons(device_type: str, index: int | None) -> tuple[str, ...]:
    return ask_machine(device_type, index, interpreted())


@functools.cache
def ask_machine(device_type: str, index: int | None, interpreted: bool) -> tuple[str, ...]:
    needed = 'cpu' if interpreted else 'cuda'
    if device_type != needed:
        where = " in Triton's interpreter" if interpreted else ''
        return (f'runs on {needed} tensors only{where}',)
    if importlib.util.find_spec('triton') is None:
        return ('is not installed',)
    if needed == 'cuda':
        if reasons := missing_device(index):
            return reasons
        if (capability := torch.cuda.get_device_capability(index))[0] == REFUSED_CAPABILITY:
            return ('is refused on compute capability {}.{}'.format(*capability),)
    if not VERSIONS[0] <= triton_version() <= VERSIONS[1]:
        (oldest, newest), found = VERSIONS, triton_version()
        return ('needs Triton {}.{} to {}.{}, got {}.{}'.format(*oldest, *newest, *found),)
    return _missing_for_compilation() if needed == 'cuda' else ()


def _missing_for_compilation() -> tuple[str, ...]:
    compiler = os.environ.get('CC')
    if not any(map(shutil.which, [compiler] if compiler else ['gcc', 'clang'])):
        return (f'needs a C compiler, got none as {compiler or "gcc or clang"}',)
    header = Path(sysconfig.get_paths()['include'], 'Python.h')
    return () if header.exists() else (f'needs the headers of Python, got no {header}',)


def triton_version() -> tuple[int, ...]:
    return tuple(map(int, importlib.import_module('triton').__version__.split('.')[:2]))


# Evaluated while a graph is compiled, in which the state of torch.func is that of the traced code.
@constant
def _differentiation_reasons() -> tuple[str, ...]:
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return ('torch.func and forward-mode differentiation need operations of torch',)
    return ()


@constant
def default_reasons(
    op: str, dtype: torch.dtype, device_type: str, index: int | None
) -> tuple[str, ...]:
    if device_type != 'cuda':
        return ("not the default in Triton's interpreter",)
    reasons = unverified_reasons('triton', op, dtype, index)
    if (version := triton_version()) != VERSIONS[0]:
        reasons += ('not verified with Triton {}.{}'.format(*version),)
    return reasons


def reasons_on_request_only(op: str, tensors: Sequence[Tensor | None]) -> list[str]:
    """Return why kernels that can run the call are not the default; empty if they are."""
    _, key, value, *_ = tensors
    reasons = [*default_reasons(op, value.dtype, value.device.type, value.device.index)]
    # 0.7 times as fast as eager with 24 channels per head on an H100, 2.8 times with one.
    if op == 'aft_conv' and key.shape[-1] < value.shape[-1]:
        reasons.append('slower than eager for heads of several channels')
    return [f'{reason}; AFT_MM_BACKEND=triton uses it' for reason in reasons]


def unsupported_reasons(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    device = tensors[2].device
    reasons = [*machine_reasons(device.type, device.index), *_differentiation_reasons()]
    if op not in KERNELS:
        return [*reasons, 'has no kernel']
    for name, needed in KERNELS[op].items():
        if (got := options[name]) != needed:
            reasons.append(f'has a kernel for {op} with {name}={needed!r} only, got {got!r}')
    if any(x is not None and x.device != device for x in tensors):
        reasons.append('needs all tensors on one device')
    # The last of a step's tensors is the buffer of keys.
    if op.endswith('_step') and tensors[-1].dtype != torch.float32:
        reasons.append(f'has steps for states of float32, got {tensors[-1].dtype}')
    if op == 'aft_conv' and len(grid := tuple(options.get('grid', ()))) > 2:
        reasons.append(f'has a kernel for aft_conv on grids of 1 or 2 sizes only, got {grid}')
    other = [x.dtype for x in tensors if x is not None and x.dtype not in DTYPES]
    if other:
        reasons.append(f'has kernels for float32, float16 and bfloat16, got {other[0]}')
    return reasons
