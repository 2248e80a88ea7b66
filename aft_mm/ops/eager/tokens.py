"""How every op takes tokens in and gives its result out: types, hidden keys, the gate."""

import torch
from torch import Tensor

from ..reference import GATES
from .sums import product_in_place


def accumulation_type(value: Tensor) -> torch.dtype:
    """The type of exponentials and sums over these tokens."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def hide(
    key: Tensor, value: Tensor, key_mask: Tensor | None, fill: float = -torch.inf
) -> tuple[Tensor, Tensor]:
    """Key and value in the accumulation type, hidden keys at `fill` and hidden values at 0."""
    dtype = accumulation_type(value)
    key, value = key.to(dtype), value.to(dtype)
    if key_mask is None:
        return key, value
    hidden = ~key_mask.unsqueeze(-1)
    return key.masked_fill(hidden, fill), value.masked_fill(hidden, 0)


def apply_gate(query: Tensor | None, mixed: Tensor, gate: str, dtype: torch.dtype) -> Tensor:
    """``g(q) ⊙ mixed`` in the output type."""
    if gate != 'none':
        mixed = product_in_place(GATES[gate](query.to(mixed.dtype)), mixed)
    return mixed.to(dtype)
