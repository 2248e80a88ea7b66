"""Block sizes of all kernels by compute capability: the one place where chips differ."""

import functools
from typing import Any, NamedTuple

import torch

from .support import constant


class ProductBlock(NamedTuple):
    """How a product is cut and multiplied.

    tile: tokens along a side of a tile of W; width: channels of a program, two numbers each; step:
    tokens, or numbers, of a product; stages: steps on the way while one is multiplied.
    """

    operand: torch.dtype
    precision: str
    tile: int
    width: int
    step: int
    warps: int
    stages: int


class ScanBlock(NamedTuple):
    """A tile is `groups` times `rows` tokens; a thread walks along the rows of its group.

    A row has `row_bytes` of channels, half of that where programs are few.
    """

    groups: int
    rows: int
    row_bytes: int
    warps: int


class WindowBlock(NamedTuple):
    """A lane walks along a block of a line, `rows` places at a time."""

    lanes: int
    rows: int
    channels: int
    warps: int


class SimpleStepBlock(NamedTuple):
    """Channels of a program."""

    channels: int
    warps: int


class BufferStepBlock(NamedTuple):
    """A tile has as many rows as the buffer has tokens, within bounds; `rank` terms of u · v."""

    least_rows: int
    most_rows: int
    channels: int
    rank: int
    warps: int
    registers: int


TF32X3 = ProductBlock(torch.float32, 'tf32x3', tile=64, width=32, step=16, warps=4, stages=3)
# By kernel the sizes from a compute capability on: those of the largest that the device reaches
# serve.
BLOCKS: dict[str, dict[tuple[int, int], NamedTuple]] = {
    # A stage takes 32 KiB, for tf32x3 8 or 16: the least of the devices served have 99 KiB. Only
    # products of Hopper take operands from shared memory; elsewhere both parts of tf32x3 are
    # registers, which steps of 32 would spill.
    'product_bfloat16': {(8, 0): ProductBlock(torch.bfloat16, 'tf32', 128, 64, 64, 8, 3)},
    'product_tf32': {(8, 0): ProductBlock(torch.float32, 'tf32', 128, 64, 32, 8, 2)},
    'product_tf32x3': {
        (8, 0): TF32X3,
        (9, 0): TF32X3._replace(step=32, stages=2),
        (10, 0): TF32X3,
    },
    # A thread loads 16 bytes of a row: 8 channels of a 2-byte type. With more rows it would spill.
    # Rows are the same in both directions: the one saves the sums before each group for the other.
    'scan': {(8, 0): ScanBlock(groups=16, rows=4, row_bytes=128, warps=4)},
    'scan_backward': {(8, 0): ScanBlock(groups=8, rows=4, row_bytes=128, warps=4)},
    # Most of what is moved are sums in float32, 4 channels of them are 16 bytes.
    'window': {(8, 0): WindowBlock(lanes=4, rows=2, channels=32, warps=1)},
    'simple_step': {(8, 0): SimpleStepBlock(channels=128, warps=1)},
    # A row of 32 float32 numbers is one transaction of 128 bytes, and few sequences make programs
    # enough. 32 rows, 8 numbers of a tile per thread, take up to 128 registers; 64 would spill.
    # Unless it is told that number, ptxas spills at 80 to fit one more program.
    'buffer_step': {
        (8, 0): BufferStepBlock(
            least_rows=16, most_rows=32, channels=32, rank=32, warps=4, registers=128
        )
    },
}


@functools.cache
def _ask(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@constant
def capability(device_type: str, index: int | None) -> tuple[int, int]:
    """The compute capability; none in the interpreter."""
    if device_type != 'cuda':
        return (0, 0)
    return _ask(torch.cuda.current_device() if index is None else index)


def find_block(kernel: str, device: torch.device) -> Any:
    """The sizes for the device; without one, in the interpreter say, those of the least chip."""
    entries = BLOCKS[kernel]
    found = max(capability(device.type, device.index), min(entries))
    return entries[max([least for least in entries if least <= found])]


def count_processors(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter has one."""
    if device.type != 'cuda':
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
