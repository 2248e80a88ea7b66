"""What fla-core's kernel of causal linear attention serves, found out without loading it."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SERVED_DEVICE = 'cuda'
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reasons_against(
    op: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]
) -> list[str]:
    """Why it does not serve the call; empty if it does."""
    if op != 'linear_attention':
        return ['has a kernel for linear_attention only']
    value, reasons = tensors[2], []
    if importlib.util.find_spec('fla') is None:
        reasons.append('fla-core is not installed')
    if value.device.type != SERVED_DEVICE:
        reasons.append('serves cuda tensors')
    if not options.get('causal', True):
        reasons.append('has a kernel for linear_attention with causal=True only, got False')
    if value.dtype not in DTYPES:
        reasons.append(f'has a kernel for float32, float16 and bfloat16, got {value.dtype}')
    return reasons
