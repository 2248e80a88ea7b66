from typing import Any, NamedTuple

import torch

from ..tracing import constant
from ..verified import ask_capability


class MatmulBlock(NamedTuple):
    """Tile sizes and precision of a matrix product.

    tile: tokens along a side of a tile of W; width: channels of a program, two numbers each; step:
    inner size of a product; stages: steps loaded ahead.
    """

    operand: torch.dtype
    precision: str
    tile: int
    width: int
    step: int
    warps: int
    stages: int


class ScanBlock(NamedTuple):
    """A tile has `groups` · `rows` tokens; a thread processes the rows of its group in order."""

    groups: int
    rows: int
    row_bytes: int
    warps: int


class SimpleStepBlock(NamedTuple):
    channels: int
    warps: int


class BufferStepBlock(NamedTuple):
    least_rows: int
    most_rows: int
    channels: int
    rank: int
    warps: int
    registers: int


TF32X3 = MatmulBlock(torch.float32, 'tf32x3', tile=64, width=32, step=16, warps=4, stages=3)
# Sizes by kernel and least compute capability; the largest one that the device reaches is used.
BLOCKS: dict[str, dict[tuple[int, int], NamedTuple]] = {
    # A stage takes 32 KiB of shared memory, with tf32x3 8 or 16, of 99 KiB on the smallest devices.
    # Only Hopper multiplies operands in shared memory; elsewhere both parts of tf32x3 are in
    # registers, which steps of 32 would spill.
    'product_bfloat16': {(8, 0): MatmulBlock(torch.bfloat16, 'tf32', 128, 64, 64, 8, 3)},
    'product_tf32': {(8, 0): MatmulBlock(torch.float32, 'tf32', 128, 64, 32, 8, 2)},
    'product_tf32x3': {
        (8, 0): TF32X3,
        (9, 0): TF32X3._replace(step=32, stages=2),
        (10, 0): TF32X3,
    },
    # A thread loads 16 bytes, 8 channels of a 2-byte type; more rows would spill. Both directions
    # have the same rows: forward saves the sums before each group for backward.
    'scan': {(8, 0): ScanBlock(groups=16, rows=4, row_bytes=128, warps=4)},
    'scan_backward': {(8, 0): ScanBlock(groups=8, rows=4, row_bytes=128, warps=4)},
    'simple_step': {(8, 0): SimpleStepBlock(channels=128, warps=1)},
    # A row of 32 float32 numbers is one transaction of 128 bytes. 32 rows take up to 128 registers;
    # 64 would spill. Without this limit, ptxas spills at 80 registers to fit one more program.
    'buffer_step': {
        (8, 0): BufferStepBlock(
            least_rows=16, most_rows=32, channels=32, rank=32, warps=4, registers=128
        )
    },
}


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up; `triton.cdiv` takes 20 times as long."""
    return -(-a // b)


@constant
def capability(device_type: str, index: int | None) -> tuple[int, int]:
    if device_type != 'cuda':
        return (0, 0)
    return ask_capability(torch.cuda.current_device() if index is None else index)


def find_block(kernel: str, device: torch.device) -> Any:
    """Return the sizes for the device; off CUDA those of the oldest chip."""
    entries = BLOCKS[kernel]
    reached = max(capability(device.type, device.index), min(entries))
    return entries[max([least for least in entries if least <= reached])]


def count_processors(device: torch.device) -> int:
    if device.type != 'cuda':
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
