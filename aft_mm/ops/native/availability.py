"""The path of the C++ loops, and the calls that they support.

File names hold a digest of the sources, so an outdated library is never called.
"""

import ctypes
import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..export_paths import export_stage
from ..tracing import constant, transformed

FOLDER = Path(__file__).parent
# Ops with a loop, and the options that it needs.
KERNELS: dict[str, dict[str, Any]] = {
    'aft_simple': dict(key_function='softmax', causal=True),
    'aft_decay': {},
    'aft_conv': {},
    'aft_full_batched': {},
}
LIMITS = {'aft_conv': 'a grid of 1 or 2 sizes', 'aft_full_batched': 'a bias per sample'}
NODES = ('aft_simple', 'aft_conv')  # of torch.compile
DTYPES = (torch.float32, torch.bfloat16)
INSTRUCTIONS = {'AVX512': 'avx512', 'AVX2': 'avx2'}
logger = logging.getLogger('aft_mm.ops')
BUILD_COMMAND = 'python setup.py build_ext --inplace'


def digest(folder: Path = FOLDER) -> str:
    sources = sorted([*folder.glob('*.cpp'), *folder.glob('*.h')])
    return hashlib.sha256(b''.join(path.read_bytes() for path in sources)).hexdigest()[:12]


def library_path(instructions: str, kind: str = 'loops') -> Path:
    """Return the path of the loops, or of kind='operator', that of ONNX Runtime."""
    return FOLDER / f'{kind}.{instructions}.{digest()}.so'


def find_built(kind: str) -> Path | str:
    capability = torch.backends.cpu.get_cpu_capability()
    path = library_path(INSTRUCTIONS.get(capability, 'any'), kind)
    if path.exists():
        if _is_intact(path):  # loading a damaged library may kill the process
            return path
        reason = f'{path.name} is damaged or has no hash next to it'
    elif any(FOLDER.glob(f'{kind}.*.so')):
        reason = 'was built from other sources than these'
    else:
        return 'is not built; installing aft_mm from source builds it on Linux with a C++ compiler'
    reason += f'; {BUILD_COMMAND} builds it again'
    if kind == 'loops':
        logger.warning('the C++ loops are not used: %s', reason)
    return reason


@functools.cache
def find_library() -> Path | str:
    path = find_built('loops')
    if isinstance(path, str):
        return path
    try:
        load(path)
    except OSError as error:  # such as a torch without OpenMP
        return f'its library does not load: {error}'
    return path


def _is_intact(path: Path) -> bool:
    try:
        expected = path.with_name(f'{path.name}.sha256').read_bytes().strip()
        return hashlib.sha256(path.read_bytes()).hexdigest().encode() == expected
    except OSError:
        return False


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def unsupported_reasons(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    if op not in KERNELS:
        return ['has no loop']
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        if _is_node_applicable(op, tensors, options):
            return []
        return ['a graph calls the loops only for inference by torch.compile on a CPU']
    reasons = []
    if not isinstance(library := find_library(), Path):
        reasons.append(library)
    for name, needed in KERNELS[op].items():
        if options.get(name, needed) != needed:
            reasons.append(
                f'has a loop for {op} with {name}={needed!r} only, got {options[name]!r}'
            )
    if op == 'aft_full_batched':
        if tensors[3].dim() == (3 if options.get('num_heads') else 2):
            reasons.append('has a loop for aft_full with a bias per sample only')
    if len(options.get('grid', ())) > 2:
        reasons.append(f'has a loop for grids of 1 or 2 sizes only, got {tuple(options["grid"])}')
    if tensors[2].dtype not in DTYPES:
        reasons.append(f'has loops for float32 and bfloat16, got {tensors[2].dtype}')
    if transformed():
        reasons.append('torch.func and forward mode need torch operations')
    if export_stage():
        reasons.append('an exported graph replays the paths of eager')
    needs_torch = torch._C._len_torch_dispatch_stack() > 0
    for x in (*tensors, options.get('key_mask'), options.get('pair_mask')):
        if x is None:
            continue
        if not x.is_cpu:
            reasons.append('supports cpu tensors')
            break
        needs_torch = needs_torch or type(x) is not Tensor and type(x) is not Parameter
    if needs_torch:
        reasons.append('a dispatch mode or a subclass of torch.Tensor needs torch operations')
    return reasons


def _is_node_applicable(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> bool:
    if op not in NODES:
        return False
    if not torch.compiler.is_dynamo_compiling() or not _may_be_in_graphs():
        return False
    given = [x for x in (*tensors, options.get('key_mask')) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    return (
        all(x.device.type == 'cpu' for x in given)
        and tensors[2].dtype in DTYPES
        and len(options.get('grid', ())) <= 2
        and all(options.get(name, needed) == needed for name, needed in KERNELS[op].items())
        and not torch._C._are_functorch_transforms_active()
    )


# Traced, is_exporting would always be True.
@constant
def _may_be_in_graphs() -> bool:
    return isinstance(find_library(), Path) and not torch.compiler.is_exporting()
