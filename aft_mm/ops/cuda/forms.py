from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..gates import GATES
from .nvrtc import Macros

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows and columns that the registers of a warp hold in conv_small.cu.
SMALL = 16
# Shared memory that a block may have without a request.
SHARED_BYTES = 48 * 1024
# Blocks of 8 columns that a warp of conv_any.cu computes, on a line and on a map.
MOST_BLOCKS = {True: 8, False: 4}
# The columns of a kernel of conv_any.cu, whose loops over blocks of 8 are unrolled.
MOST_COLUMNS = 129
# Products of blocks that a warp sums for the gradient of w, in four registers each.
MOST_SUMS = 44


class Form(NamedTuple):
    """A source, its macros, and what its launches depend on."""

    name: str
    macros: Macros
    grid: tuple[int, int]
    kernel: tuple[int, int]
    warps: int
    blocks: int  # of 8 columns in a row
    strips: int  # of blocks, each with a warp of its own
    words: int  # of 32 bits that hold terms of two columns
    rows: int  # of the kernel whose gradient a warp sums


def near(kernel: Sequence[int]) -> int:
    """Blocks of 8 columns that the kernel reaches on either side, at least one."""
    return max(1, (kernel[1] // 2 + 7) // 8)


def form_of(
    grid: Sequence[int],
    kernel: Sequence[int],
    dtype: torch.dtype,
    share: int,
    gate: str,
    global_connectivity: bool,
    causal: bool,
    masked: bool,
    even: bool = True,
) -> Form:
    """Return the form of a call.

    Args:
        kernel: Sizes of w, which may exceed the grid.
        share: Channels of a key.
        even: Whether pairs of tokens are aligned.
    """
    height, width = size = (1, *grid)[-2:]
    kernel = [min(k, 2 * n - 1) for k, n in zip((1, *kernel)[-2:], size, strict=True)]
    macros = dict(H=height, W=width, KH=kernel[0], KW=kernel[1], HALF=int(dtype == torch.float16))
    macros['FULL'] = int(dtype == torch.float32)
    macros.update(EVEN=int(even and width % 2 == 0), MASKED=int(masked), GATE=GATES.index(gate))
    macros.update(GLOBAL=int(global_connectivity), CAUSAL=int(causal), SHARED=int(share > 1))
    blocks, rows = -(-width // 8), kernel[0]
    if max(size) <= SMALL and dtype == torch.bfloat16 and not causal:
        # A warp adds four numbers per entry of the kernel.
        warps = 4 if 4 * 16 * kernel[0] * kernel[1] <= SHARED_BYTES else 2
        name, count = 'conv_small', blocks
    else:
        name, warps, count = 'conv_any', 4, min(blocks, MOST_BLOCKS[height == 1])
        macros.update(COUNT=count, HALO=near(kernel) if count < blocks else 0)
        rows = max(1, min(kernel[0], MOST_SUMS // (2 * near(kernel) + 2)))
        macros['ROWS'] = rows
    macros['WARPS'] = warps
    shape = (height, width), (kernel[0], kernel[1])
    strips = -(-blocks // count)
    return Form(
        name,
        tuple(macros.items()),
        *shape,
        warps,
        blocks,
        strips,
        2 if dtype == torch.bfloat16 else 4,
        rows,
    )
