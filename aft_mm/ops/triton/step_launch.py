"""How a decoding step is cut for the chip, and its launches."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from . import step_kernels as kernels
from .common import strided

# A row of float32 numbers is one transaction of 128 bytes, and a program has 16 KiB of keys and
# values on the way: few sequences make few programs, which wait seldom. 4 numbers of a tile per
# thread take about 115 registers; 16 would spill.
ROWS = 64
COLUMNS = 32
WARPS = 16
ANY_TOKEN = 2**31 - 1
# Terms of u_t · v_t' at a time.
RANK = 32


def _results(value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output [B, D] and the next position [B]."""
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return output, torch.empty(position.shape, dtype=position.dtype, device=position.device)


def simple_step(
    sums: Sequence[Tensor],
    position: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    gate: str,
) -> tuple[Tensor, Tensor]:
    """The output [B, D] and the next position; the sums are updated in place."""
    batch, channels = value.shape
    results = _results(value, position)
    inputs = [strided(x) for x in (*sums, position, query, key, value)]
    if batch:
        with torch.cuda.device_of(value):
            kernels.simple_step[(batch * triton.cdiv(channels, COLUMNS),)](
                *results, *inputs, channels=channels, GATE=gate, COLUMNS=COLUMNS, num_warps=1
            )
    return results


def buffer_step(
    sums: Sequence[Tensor],
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    pos_v: Tensor | None,
    kind: str,
    places: Sequence[int],
    far: bool,
    gate: str,
) -> tuple[Tensor, Tensor]:
    """The output [B, D] and the next position; sums and buffer are updated in place."""
    batch, channels = value.shape
    results = _results(value, position)
    if batch == 0:
        return results
    per_head = channels // key.shape[1]
    table = kind in ('full', 'free', 'factors')
    # Whole heads: another program must not read the slot of a key that this one writes.
    span = max(COLUMNS // per_head, 1) * per_head
    inputs = (*sums, keys, values, position, query, key, value, bias, pos_v)
    with torch.cuda.device_of(value):
        kernels.buffer_step[(batch * triton.cdiv(channels, span),)](
            *results,
            *map(strided, inputs),
            channels=channels,
            per_head=per_head,
            span=span,
            size=keys.shape[1],
            rank=0 if pos_v is None else pos_v.shape[1],
            limit=len(bias) if table else ANY_TOKEN,
            KIND=kind,
            PLACES=tuple(places),
            FAR=far,
            GATE=gate,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            RANK=RANK,
            num_warps=WARPS,
        )
    return results
