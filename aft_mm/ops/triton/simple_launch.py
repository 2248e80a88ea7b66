"""How a sequence is cut for the chip, and the launches of causal AFT-simple."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import simple_kernels as kernels
from .common import count_processors, strided

# Tokens in registers at a time, and channels of a warp: two per thread, so that a row of 2-byte
# numbers is one transaction of 128 bytes. The backward pass holds up to 16 rows without spills.
ROWS = 8
COLUMNS = 64
NARROW_COLUMNS = 32
# One warp per program. 16 of them, each with 8 rows of three 2-byte tensors on the way, have 48 KiB
# in flight: twice what hides 800 cycles of a memory of 21 bytes per cycle and multiprocessor.
PROGRAMS_PER_PROCESSOR = 16
# Cutting a sequence reads its inputs twice: of 2-byte tensors 12 bytes per number instead of 8
# forward, 22 instead of 14 backward. Its chunks are joined one after another.
SHORTEST_CHUNK = 128
MOST_CHUNKS = 512


class Cut(NamedTuple):
    """Tokens per chunk, chunks per sequence, channels per program, programs per chunk."""

    chunk: int
    chunks: int
    columns: int
    programs: int


def wanted_programs(device: torch.device) -> int:
    """How many programs fill the device."""
    return PROGRAMS_PER_PROCESSOR * count_processors(device)


def cut(value: Tensor) -> Cut:
    """One chunk where batch and channels fill the device, else as many as fill it."""
    batch, tokens, channels = value.shape
    columns = COLUMNS if channels > NARROW_COLUMNS else NARROW_COLUMNS
    programs = batch * triton.cdiv(channels, columns)
    chunks = min(
        triton.cdiv(wanted_programs(value.device), programs),
        triton.cdiv(tokens, SHORTEST_CHUNK),
        MOST_CHUNKS,
    )
    chunk = triton.cdiv(triton.cdiv(tokens, chunks), ROWS) * ROWS
    return Cut(chunk, triton.cdiv(tokens, chunk), columns, programs)


def count_blocks(tokens: int) -> int:
    """Blocks of ROWS tokens, before each of which the sums are saved."""
    return (tokens + ROWS - 1) // ROWS


def states(value: Tensor, count: int) -> Tensor:
    """Room for `count` sums per sequence and channel, [3, B, count, D]."""
    batch, _, channels = value.shape
    return torch.empty(3, batch, count, channels, dtype=torch.float32, device=value.device)


def _join(sums: Tensor, parts: Cut, reverse: bool) -> tuple:
    """From the sum of each chunk in place to what it starts from, or ends on in reverse."""
    kernels.prefix[(parts.programs,)](
        strided(sums),
        channels=sums.shape[-1],
        count=parts.chunks,
        REVERSE=reverse,
        ROWS=ROWS,
        COLUMNS=parts.columns,
        num_warps=1,
    )
    return strided(sums)


def causal_simple_forward(
    query: Tensor | None, key: Tensor, value: Tensor, key_mask: Tensor | None, gate: str, save: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, T, D] and, to `save` for the gradient, the sums before each block [3, B, n, D]."""
    batch, tokens, channels = value.shape
    output = torch.empty((batch, tokens, channels), dtype=value.dtype, device=value.device)
    saved = states(value, count_blocks(tokens) if save else 0)
    if batch == 0:
        return output, saved
    parts = cut(value)
    sources = [strided(x) for x in (key, value, key_mask)]
    sizes = dict(tokens=tokens, channels=channels, chunk=parts.chunk)
    blocks = dict(ROWS=ROWS, COLUMNS=parts.columns, num_warps=1)
    grid = parts.programs, parts.chunks
    starts = None
    with torch.cuda.device_of(value):
        if parts.chunks > 1:
            sums = states(value, parts.chunks)
            kernels.chunk_sums[grid](strided(sums), *sources, **sizes, **blocks)
            starts = _join(sums, parts, reverse=False)
        kernels.forward[grid](
            output,
            strided(saved if save else None),
            starts,
            strided(query),
            *sources,
            **sizes,
            GATE=gate,
            **blocks,
        )
    return output, saved


def causal_simple_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    gate: str,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of query, key and value."""
    batch, tokens, channels = value.shape
    results = [
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (query, key, value)
    ]
    if batch == 0:
        return tuple(results)
    parts = cut(value)
    inputs = [strided(x) for x in (gradient, query, key, value, key_mask)]
    sizes = dict(tokens=tokens, channels=channels, chunk=parts.chunk)
    blocks = dict(GATE=gate, ROWS=ROWS, COLUMNS=parts.columns, num_warps=1)
    grid = parts.programs, parts.chunks
    ends = None
    with torch.cuda.device_of(value):
        if parts.chunks > 1:
            sums = states(value, parts.chunks)
            kernels.backward_chunk_sums[grid](
                strided(sums), strided(saved), *inputs, **sizes, **blocks
            )
            ends = _join(sums, parts, reverse=True)
        kernels.backward[grid](*results, strided(saved), ends, *inputs, **sizes, **blocks)
    return tuple(results)
