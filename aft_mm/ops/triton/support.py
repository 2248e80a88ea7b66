"""What the Triton kernels serve and why not the rest; found out without loading them.

``TRITON_INTERPRET=1``, set before the first call, runs the kernels in Triton's interpreter on the
CPU: slow, and for checking them.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# The ops that have a kernel, and the options that it needs.
KERNELS: dict[str, dict[str, Any]] = {
    'aft_simple': dict(causal=True),
    'aft_full': {},
    'aft_local': {},
    'aft_local_learned': {},
    'aft_local_hard': {},
    'aft_conv': dict(global_connectivity=True, causal=False),
}
# The steps of `ops/steps.py` that have one; the last of their tensors is the buffer of keys.
STEP_KERNELS: dict[str, dict[str, Any]] = {
    'aft_simple_step': dict(key_function='softmax'),
    'aft_full_step': {},
    'aft_local_step': {},
    'aft_conv_step': {},
    'aft_local_hard_step': {},
}
KERNELS.update(STEP_KERNELS)


def _step_limits(tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> list[str]:
    """a float32 state"""
    dtype = tensors[-1].dtype
    if dtype == torch.float32:
        return []
    return [f'has steps for states of float32, got {dtype}']


def _conv_limits(tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> list[str]:
    """a grid of 1 or 2 sizes"""
    grid = tuple(options.get('grid', ()))
    if len(grid) < 3:
        return []
    return [f'has a kernel for aft_conv on grids of 1 or 2 sizes only, got {grid}']


# What else a kernel cannot serve, as sentences, by the inputs and options of a call. The docstring
# of each says what it can, for the table of `ops/__main__.py`.
LIMITS: dict[str, Callable[[Sequence[Tensor | None], Mapping[str, Any]], list[str]]] = {
    op: _step_limits for op in STEP_KERNELS
}
LIMITS['aft_conv'] = _conv_limits
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What the kernels are compiled for in the tests.
OLDEST_CAPABILITY = (8, 0)
# Products that are summed in a loop are reported to come out wrong there.
REFUSED_CAPABILITY = 10
# That of torch 2.11. Older ones have no tuples in kernels (3.2) or were not tried, nor newer ones.
ONLY_TRITON = (3, 6)


def interpreted() -> bool:
    """Whether the environment asks for Triton's interpreter."""
    return os.environ.get('TRITON_INTERPRET') == '1'


def constant(function: Callable) -> Callable:
    """``torch.compiler.assume_constant_result``, whose own call imports the compiler: seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The compiler takes the answer and does not look into how a package or a device is asked.
@constant
def machine_reasons(device_type: str, index: int | None) -> tuple[str, ...]:
    """What this machine lacks."""
    return ask_machine(device_type, index, interpreted())


@functools.cache
def ask_machine(device_type: str, index: int | None, interpreted: bool) -> tuple[str, ...]:
    """What this machine lacks, asked once: drivers and disks take longer than a step."""
    needed = 'cpu' if interpreted else 'cuda'
    if device_type != needed:
        where = " in Triton's interpreter" if interpreted else ''
        return (f'serves {needed} tensors{where}',)
    if importlib.util.find_spec('triton') is None:
        return ('Triton is not installed',)
    if needed == 'cuda':
        if torch.version.hip is not None:
            return ('serves NVIDIA devices',)
        if not torch.cuda.is_available():
            return ('no CUDA device is available',)
        capability = torch.cuda.get_device_capability(index)
        if capability < OLDEST_CAPABILITY:
            return (
                'needs compute capability {}.{}, got {}.{}'.format(*OLDEST_CAPABILITY, *capability),
            )
        if capability[0] == REFUSED_CAPABILITY:
            return ('is refused on compute capability {}.{}'.format(*capability),)
    version = importlib.import_module('triton').__version__
    if tuple(map(int, version.split('.')[:2])) != ONLY_TRITON:
        return ('needs Triton {}.{}, got {}'.format(*ONLY_TRITON, version),)
    return ()


def compiler(device_type: str, index: int | None) -> dict[str, str | None]:
    """The versions of Triton and, for a CUDA device, of the ptxas that it calls there."""
    ptxas = None
    if device_type == 'cuda':
        major, minor = torch.cuda.get_device_capability(index)
        nvidia = importlib.import_module('triton.backends.nvidia.compiler')
        ptxas = nvidia.get_ptxas_version(10 * major + minor).strip().splitlines()[-1]
    return dict(triton=importlib.import_module('triton').__version__, ptxas=ptxas)


def reasons_against(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    """Why no kernel serves the call; empty if one does."""
    device = tensors[2].device
    reasons = list(machine_reasons(device.type, device.index))
    if op not in KERNELS:
        return [*reasons, 'has no kernel']
    for name, needed in KERNELS[op].items():
        if options[name] != needed:
            reasons.append(
                f'has a kernel for {op} with {name}={needed!r} only, got {options[name]!r}'
            )
    if any(x is not None and x.device != device for x in tensors):
        reasons.append('needs all tensors on one device')
    if op in LIMITS:
        reasons += LIMITS[op](tensors, options)
    for x in tensors:
        if x is not None and x.dtype not in DTYPES:
            reasons.append(f'has kernels for float32, float16 and bfloat16, got {x.dtype}')
            break
    return reasons
