"""How a map is cut into tiles for AFT-conv, and the launches of its passes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import conv_kernels as kernels
from .common import count_processors, strided

# Tokens of a row that a warp sums, with two of its 64 channels per thread: 7 where that leaves
# fewer idle (of 14 columns none). Compiled for sm_90 a step of a kernel of 11 columns takes 707
# instructions for 8 tokens, 352 of which multiply and add, or half; with one channel per thread it
# would be a third. Twice the tokens would not fit: 8 tokens take up to 255 registers, so that two
# programs of four warps share a multiprocessor. The loads of a step stand together before its
# sums, and the two warps of a scheduler take turns at them.
WIDTHS = (8, 7)
COLUMNS = 64
# Such a step reads 18 columns of 8 bytes for 8 tokens: 198 bytes per number over 11 rows, while
# the sums take 3.8 cycles, in which a multiprocessor gets some 100 bytes from the second-level
# cache. The four warps of a program, on two rows and two tiles, find what another one has read in
# the first-level cache: 26 columns of 12 rows for 32 tokens are 78 bytes per number.
SLOTS = 4
# More columns of a kernel are taken in spans, or registers would spill and compiling would take
# long: its time grows with the square of the loads, 5 s per kernel for 27 columns at once, 2 s in
# two spans.
WIDEST_SPAN = 15
# Tokens of a program of the passes that write pairs.
TOKENS = 16
# Of `weight_gradient` three fit at a time; twice that, so that the last ones leave little idle.
PROGRAMS_PER_PROCESSOR = 6


class Cut(NamedTuple):
    """Sizes and blocks that the launches share, blocks of channels, and slots of a map."""

    sizes: dict[str, int]
    blocks: dict[str, int]
    columns: int
    slots: int


def wanted_programs(device: torch.device) -> int:
    """How many programs fill the device."""
    return PROGRAMS_PER_PROCESSOR * count_processors(device)


def cut(channels: int, kernel: Sequence[int], grid: Sequence[int]) -> Cut:
    """Tiles of the width that leaves the fewest tokens idle."""
    height, width = grid
    tokens = min(WIDTHS, key=lambda tokens: triton.cdiv(width, tokens) * tokens)
    tiles = triton.cdiv(width, tokens)
    spans = triton.cdiv(kernel[1], WIDEST_SPAN)
    sizes = dict(
        channels=channels,
        height=height,
        width=width,
        tiles=tiles,
        kernel_rows=kernel[0],
        reach=kernel[1] // 2,
    )
    blocks = dict(
        SPANS=spans,
        SPAN=triton.cdiv(kernel[1], spans),
        WIDTH=tokens,
        SLOTS=SLOTS,
        COLUMNS=COLUMNS,
        num_warps=SLOTS,
    )
    strip = min(height, 2)
    slots = triton.cdiv(height, strip) * strip * tiles
    return Cut(sizes, blocks, triton.cdiv(channels, COLUMNS), slots)


def new_pair(batch: int, cut: Cut, like: Tensor) -> Tensor:
    """Room for two numbers per token and channel, [B, H, 2, W, D]."""
    height, width, channels = (cut.sizes[name] for name in ('height', 'width', 'channels'))
    shape = batch, height, 2, width, channels
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _largest_key(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """M of each sequence and head, [B, h] in float32, finite also where every key is hidden."""
    if key_mask is not None:
        key = key.masked_fill(~key_mask.unsqueeze(-1), -torch.inf)
    return key.amax(1).float().clamp_min(torch.finfo(torch.float32).min)


def _terms(key: Tensor, value: Tensor, key_mask: Tensor | None, cut: Cut) -> Tensor:
    """The pair (E v, E)."""
    batch, tokens, channels = value.shape
    pair = new_pair(batch, cut, value)
    kernels.terms[(batch * triton.cdiv(tokens, TOKENS) * cut.columns,)](
        pair,
        strided(value),
        strided(key),
        strided(_largest_key(key, key_mask)),
        strided(key_mask),
        tokens=tokens,
        channels=channels,
        width=cut.sizes['width'],
        group=channels // key.shape[-1],
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
    )
    return pair


def _background(pair: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """What counts with W = 1 for a whole tile.

    `beyond` [B, H, 2, D], the rows outside of the kernel, and `beside` [B, H, 2, tiles, D], in
    each row the columns that no token of the tile sees.
    """
    batch, height, _, width, channels = pair.shape
    tiles, blocks = cut.sizes['tiles'], cut.blocks
    reach = cut.sizes['reach']
    steps = triton.cdiv(width + reach, blocks['WIDTH']) + 1
    sides = pair.new_empty(2, batch, height, 2, steps, channels)
    kernels.side_sums[(triton.cdiv(batch * height, SLOTS) * cut.columns, 2)](
        sides,
        pair,
        rows=batch * height,
        channels=channels,
        width=width,
        tiles=tiles,
        steps=steps,
        reach=reach,
        right_reach=blocks['SPANS'] * blocks['SPAN'] - 1 - reach,
        WIDTH=blocks['WIDTH'],
        SLOTS=SLOTS,
        COLUMNS=COLUMNS,
        num_warps=SLOTS,
    )
    left, right = sides[..., :tiles, :]
    rows = sides[0, ..., -1, :]
    beyond = torch.zeros_like(rows)
    far = cut.sizes['kernel_rows'] // 2 + 1
    if far < height:
        beyond[:, far:] = rows[:, :-far].cumsum(1)
        beyond[:, :-far] += rows[:, far:].flip(1).cumsum(1).flip(1)
    return beyond, left + right.flip(-2)


def _channel_weights(weight: Tensor, cut: Cut) -> Tensor:
    """``e^w`` of each channel, [rows, SPANS · SPAN, D]; columns beyond the kernel count as 1."""
    each = weight.float().repeat_interleave(cut.sizes['channels'] // weight.shape[0], 0)
    beyond = cut.blocks['SPANS'] * cut.blocks['SPAN'] - weight.shape[2]
    return F.pad(each, (0, beyond)).exp().movedim(0, -1).contiguous()


def conv_forward(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    key_mask: Tensor | None,
    grid: Sequence[int],
    gate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, D] and, to `save` for the gradient, the sums n and d [B, H, 2, W, D]."""
    batch, _, channels = value.shape
    parts = cut(channels, weight.shape[1:], grid)
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    sums = new_pair(batch if save else 0, parts, value)
    if batch == 0:
        return output, sums
    with torch.cuda.device_of(value):
        pair = _terms(key, value, key_mask, parts)
        kernels.forward[(batch * parts.columns * triton.cdiv(parts.slots, SLOTS),)](
            output,
            sums if save else None,
            strided(query),
            pair,
            *_background(pair, parts),
            _channel_weights(weight, parts),
            **parts.sizes,
            **parts.blocks,
            GATE=gate,
        )
    return output, sums


def conv_backward(
    gradient: Tensor,
    sums: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    key_mask: Tensor | None,
    grid: Sequence[int],
    gate: str,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and weight."""
    batch, tokens, channels = value.shape
    heads = weight.shape[0]
    by_query, by_key, by_value = (
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (query, key, value)
    )
    if batch == 0:
        return by_query, by_key, by_value, torch.zeros_like(weight)
    if heads != channels:  # the parts of a head are added in float32
        by_key = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    parts = cut(channels, weight.shape[1:], grid)
    with torch.cuda.device_of(value):
        source = _terms(key, value, key_mask, parts)
        pair = torch.empty_like(source)
        kernels.output_gradients[(batch * triton.cdiv(tokens, TOKENS) * parts.columns,)](
            by_query,
            pair,
            strided(gradient),
            sums,
            strided(query),
            tokens=tokens,
            channels=channels,
            width=parts.sizes['width'],
            GATE=gate,
            TOKENS=TOKENS,
            COLUMNS=COLUMNS,
        )
        kernels.backward[(batch * parts.columns * triton.cdiv(parts.slots, SLOTS),)](
            by_key,
            by_value,
            source,
            pair,
            *_background(pair, parts),
            _channel_weights(weight.flip(1, 2), parts),
            **parts.sizes,
            **parts.blocks,
        )
        by_weight = _weight_gradient(source, pair, parts)[:, : weight.shape[2]]
    by_weight = by_weight.unflatten(-1, (heads, -1)).sum(-1).movedim(-1, 0) * weight.float().exp()
    if heads != channels:
        by_key = by_key.unflatten(-1, (heads, -1)).sum(-1).to(key.dtype)
    return by_query, by_key, by_value, by_weight.to(weight.dtype).contiguous()


def _weight_gradient(source: Tensor, pair: Tensor, parts: Cut) -> Tensor:
    """``Σ_t E_{t+j} (a_t v_{t+j} − c_t)`` of each channel, [rows, SPANS · SPAN, D]."""
    sizes, blocks = parts.sizes, parts.blocks
    count = pair.shape[0] * sizes['height'] * sizes['tiles']
    # As many shares as fill the device: their sums are added afterwards.
    spans = sizes['kernel_rows'] * blocks['SPANS']
    programs = parts.columns * triton.cdiv(spans, SLOTS)
    shares = min(triton.cdiv(wanted_programs(pair.device), programs), count)
    share = triton.cdiv(count, shares)
    shares = triton.cdiv(count, share)
    kernel = sizes['kernel_rows'], blocks['SPANS'] * blocks['SPAN']
    by_weight = pair.new_empty(shares, *kernel, sizes['channels'])
    kernels.weight_gradient[(programs * shares,)](
        by_weight, source, pair, **sizes, count=count, share=share, **blocks
    )
    return by_weight.sum(0)
