"""AFT-simple, causal, of the Triton backend: how its kernels are launched, and the op."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import scan_kernels as kernels
from .blocks import count_processors, find_block
from .register import differentiated, register
from .rows import Tensors, strided
from .scan_kernels import MOST_CHUNKS, Block, Sizes

# A shorter chunk costs more than it brings.
SHORTEST_CHUNK = 256


class Cut(NamedTuple):
    """Tokens per chunk, chunks per sequence, channels per program and programs per chunk."""

    chunk: int
    chunks: int
    channels: int
    programs: int


def cut(value: Tensor) -> Cut:
    """Whole sequences where they make programs for half of the device, else chunks for twice it.

    On 132 processors, 2-byte types: [16, 1024, 512] and [8, 4096, 1024] make 128 programs of 64
    channels, so 32 are taken, 256 programs; [16, 3072, 256] 128. [2, 3072, 256] would make 16 and
    is cut into 12 chunks, 192 programs, [1, 16384, 256] into 32, 256.
    """
    batch, tokens, channels = value.shape
    processors = count_processors(value.device)
    tile = find_block('scan', value.device)
    width = tile.row_bytes // value.itemsize
    if batch * triton.cdiv(channels, width) < 2 * processors:
        width //= 2
    programs = batch * triton.cdiv(channels, width)
    chunks = 1
    if 2 * programs < processors:
        chunks = min(2 * processors // programs, tokens // SHORTEST_CHUNK, MOST_CHUNKS.value)
    rows = tile.groups * tile.rows
    chunk = triton.cdiv(triton.cdiv(tokens, max(chunks, 1)), rows) * rows
    return Cut(chunk, triton.cdiv(tokens, chunk), width, programs)


def _launch_settings(kernel: str, value: Tensor) -> tuple[Cut, Sizes, dict]:
    parts = cut(value)
    tile = find_block(kernel, value.device)
    block = Block(tile.groups, tile.rows, parts.channels)
    _, tokens, channels = value.shape
    tiles = parts.chunk // (tile.groups * tile.rows)
    sizes = Sizes(tokens, channels, parts.chunk, tiles)
    return parts, sizes, dict(BLOCK=block, num_warps=tile.warps)


def new_sums(value: Tensor, count: int) -> Tensor:
    """Room for `count` sums per sequence and channel, [3, B, count, D]."""
    batch, _, channels = value.shape
    return torch.empty(3, batch, count, channels, dtype=torch.float32, device=value.device)


def count_groups(value: Tensor) -> int:
    """The groups of a sequence, before each of which its sum is saved for the gradient."""
    rows = find_block('scan', value.device).rows
    return (value.shape[1] + rows - 1) // rows


def causal_simple(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    key_function: str,
    gate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Causal AFT-simple [B, T, D], and to `save` the sum before each group [3, B, groups, D]."""
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    saved = new_sums(value, count_groups(value) if save else 0)
    if len(value) == 0:
        return output, saved
    inputs = Tensors(*map(strided, (query, key, value, key_mask)))
    parts, sizes, settings = _launch_settings('scan', value)
    grid, starts = (parts.programs, parts.chunks), None
    with torch.cuda.device_of(value):
        if parts.chunks > 1:
            starts = strided(new_sums(value, parts.chunks))
            kernels.chunk_sums[grid](starts, inputs, sizes, KEY=key_function, **settings)
        kept = strided(saved) if save else None
        options = dict(KEY=key_function, GATE=gate, **settings)
        kernels.forward[grid](strided(output), kept, starts, inputs, sizes, **options)
    return output, saved


def causal_simple_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    key_function: str,
    gate: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those of query, key and value that are wanted."""
    results = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed else None
        for x, needed in zip((query, key, value), wanted, strict=False)
    ]
    if len(value):
        inputs = Tensors(*map(strided, (query, key, value, key_mask, gradient)))
        parts, sizes, settings = _launch_settings('scan_backward', value)
        options = dict(KEY=key_function, GATE=gate, **settings)
        grid, ends = (parts.programs, parts.chunks), None
        kept, nowhere = strided(saved), Tensors()
        with torch.cuda.device_of(value):
            if parts.chunks > 1:
                ends = strided(new_sums(value, parts.chunks))
                kernels.backward_chunk_sums[grid](ends, nowhere, kept, inputs, sizes, **options)
            kernels.backward[grid](
                Tensors(*map(strided, results)), kept, ends, inputs, sizes, **options
            )
    return [x for x in results if x is not None]


def _empty(query, key, value, key_mask, key_function, gate, save):
    return value.new_empty(value.shape), new_sums(value, count_groups(value) if save else 0)


simple_op = register(causal_simple, causal_simple_backward, fake=_empty, name='aft_simple')


def aft_simple(query, key, value, *, key_function, causal, key_mask, gate) -> Tensor:
    """O(T·D): running sums, causal."""
    save = differentiated(query, key, value)
    return simple_op(query, key, value, key_mask, key_function, gate, save)[0]
