"""Block sizes of the kernels by compute capability: the one place where chips differ."""

import functools
from typing import NamedTuple

import torch


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


# By kernel the sizes from a compute capability on: those of the largest that the device reaches
# serve.
BLOCKS: dict[str, dict[tuple[int, int], NamedTuple]] = {
    # A thread loads 16 bytes of a row: 8 channels of a 2-byte type. With more rows it would spill.
    # Rows are the same in both directions: the one saves the sums before each group for the other.
    'scan': {(8, 0): ScanBlock(groups=16, rows=4, row_bytes=128, warps=4)},
    'scan_backward': {(8, 0): ScanBlock(groups=8, rows=4, row_bytes=128, warps=4)},
    # Most of what is moved are sums in float32, 4 channels of them are 16 bytes.
    'window': {(8, 0): WindowBlock(lanes=4, rows=2, channels=32, warps=1)},
}


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def find_block(kernel: str, device: torch.device) -> NamedTuple:
    """The sizes for the device; without one, in the interpreter say, those of the least chip."""
    entries = BLOCKS[kernel]
    if device.type != 'cuda':
        return entries[min(entries)]
    index = torch.cuda.current_device() if device.index is None else device.index
    return entries[max(least for least in entries if least <= _capability(index))]
