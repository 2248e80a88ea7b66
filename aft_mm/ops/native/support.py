"""What the loops in C++ serve and why not the rest, and where they are.

The library's name holds a digest of the sources, so that one built from others is never called.
"""

import ctypes
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..eager import decisions

FOLDER = Path(__file__).parent
# The ops that have a loop, and the options that it needs.
KERNELS: dict[str, dict[str, Any]] = {
    'aft_simple': dict(key_function='softmax', causal=True),
    'aft_conv': {},
}
DTYPES = (torch.float32, torch.bfloat16)
# What a library is built for, by torch's name of what it uses itself.
INSTRUCTIONS = {'AVX512': 'avx512', 'AVX2': 'avx2'}


def digest(folder: Path = FOLDER) -> str:
    """Of the sources; setup.py computes the same."""
    sources = sorted([*folder.glob('*.cpp'), *folder.glob('*.h')])
    return hashlib.sha256(b''.join(path.read_bytes() for path in sources)).hexdigest()[:12]


def library_path(instructions: str) -> Path:
    """Where the library for these instructions lies, if it was built."""
    return FOLDER / f'loops.{instructions}.{digest()}.so'


@functools.cache
def find_library() -> Path | str:
    """The library for this processor, or why there is none."""
    capability = torch.backends.cpu.get_cpu_capability()
    path = library_path(INSTRUCTIONS.get(capability, 'any'))
    if not path.exists():
        return 'is not built; installing aft_mm again builds it where there is a C++ compiler'
    try:
        load(path)
    except OSError as error:  # such as a torch without OpenMP
        return f'its library does not load: {error}'
    return path


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library, which takes its threads from the OpenMP that torch has loaded."""
    return ctypes.CDLL(str(path))


def reasons_against(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    """Why no loop serves the call; empty if one does."""
    if op not in KERNELS:
        return ['has no loop']
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return ['a graph is made of operations of torch']
    reasons = []
    if not isinstance(library := find_library(), Path):
        reasons.append(library)
    for name, needed in KERNELS[op].items():
        if options.get(name, needed) != needed:
            reasons.append(
                f'has a loop for {op} with {name}={needed!r} only, got {options[name]!r}'
            )
    if len(options.get('grid', ())) > 2:
        reasons.append(f'has a loop for grids of 1 or 2 sizes only, got {tuple(options["grid"])}')
    if tensors[2].dtype not in DTYPES:
        reasons.append(f'has loops for float32 and bfloat16, got {tensors[2].dtype}')
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        reasons.append('torch.func or forward mode looks at operations')
    if decisions.recording() or decisions.repeating():
        reasons.append('an exported graph repeats the decisions of eager')
    watched = torch._C._len_torch_dispatch_stack() > 0
    for x in tensors:
        if x is None:
            continue
        if not x.is_cpu:
            reasons.append('serves cpu tensors')
            break
        watched = watched or type(x) is not Tensor and type(x) is not Parameter
    if watched:
        reasons.append('a mode or a subclass of torch.Tensor looks at operations')
    return reasons
