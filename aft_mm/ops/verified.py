"""The kernels that were right on a device, by its compute capability; they are the default there.

Dtypes for each backend and op, from docs/results/benchmarks/h100.txt.
"""

import functools

import torch

from .tracing import constant

ALL = (torch.float32, torch.float16, torch.bfloat16)
OPS = ('aft_simple', 'aft_full', 'aft_conv')
STEPS = (*(f'{op}_step' for op in OPS), 'aft_local_step', 'aft_local_hard_step')
VERIFIED: dict[tuple[int, int], dict[str, dict[str, tuple[torch.dtype, ...]]]] = {
    (9, 0): dict(
        triton={**dict.fromkeys((*OPS, *STEPS), ALL), 'aft_local': (torch.bfloat16,)},
        cuda={},
    ),
}


# The oldest chip that the tests compile for.
OLDEST_CAPABILITY = (8, 0)


def missing_device(index: int | None) -> tuple[str, ...]:
    if torch.version.hip is not None:
        return ('runs on NVIDIA devices only',)
    if not torch.cuda.is_available():
        return ('finds no CUDA device',)
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        return (
            'needs compute capability {}.{}, got {}.{}'.format(*OLDEST_CAPABILITY, *capability),
        )
    return ()


@functools.cache
def ask_capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# torch.compile must not trace the query.
@constant
def unverified_reasons(
    backend: str, op: str, dtype: torch.dtype, index: int | None
) -> tuple[str, ...]:
    """Return why the kernels of an op are not the default on a device; empty if they are."""
    capability = ask_capability(index)
    if dtype in VERIFIED.get(capability, {}).get(backend, {}).get(op, ()):
        return ()
    where = 'on capability {}.{} in {}'.format(*capability, str(dtype).removeprefix('torch.'))
    return (f'not verified {where}',)
