"""AFT-conv, not causal, as a product in which each head has its own W.

A map [H, W] whose rows are P = W + K_w // 2 places apart, with nothing between them, is a line on
which a kernel [K_h, K_w] covers ``(K_h − 1) P + K_w`` places, with 0 between the rows of the kernel.
A window then crosses the border of the map only into empty places. So AFT-conv is AFT-local on a
line, with W = 1 outside the window, and two differences: the bias depends only on the distance of
two tokens, so all tiles of a head share one W; and the heads take the role of the sequences, the
channels of a head in all sequences that of the channels.

`move` copies the tokens into that order, [h, places, B · d], and back. For exactness see `matmul.py`
and `recompute_flagged.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..eager.conv import crop_kernel
from .block_sizes import MatmulBlock, cdiv
from .full_local import MatmulCall, launch_backward, launch_forward
from .online_softmax import strided
from .tiling import TileBand, choose_block, new_saved
from .torch_ops import differentiated, register
from .weights import Tokens

# Places, sequences and channels that a program copies; reads are contiguous along the channels,
# writes along the sequences.
MOVED = (4, 32, 32)
# Tokens along a side of a tile; with 128 a map of 14 × 14 would fill two thirds of its tiles.
LARGEST_TILE = 64


class MoveSizes(NamedTuple):
    """Sizes of a copy; `share`: channels per column of x."""

    places: Any
    row: Any
    width: Any
    batches: Any
    channels: Any
    group: Any
    share: Any


@triton.jit
def move(moved, x, mask, order, FILL: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Copy x [B, T, D] to `moved` [h, places, B · d], or back with BACK.

    Places without a token, and tokens that `mask` [B, T] hides, become FILL.
    """
    PLACES: tl.constexpr = BLOCK[0]
    SEQUENCES: tl.constexpr = BLOCK[1]
    CHANNELS: tl.constexpr = BLOCK[2]
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)[:, None, None]
    batch = tl.program_id(1) * SEQUENCES + tl.arange(0, SEQUENCES)[None, :, None]
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, None, :]
    inside = (place < order.places) & (batch < order.batches) & (channel < order.channels)
    real = inside & (place % order.row < order.width)
    token = (place // order.row * order.width + place % order.row).to(tl.int64)
    at = batch.to(tl.int64) * x.batch + token * x.token
    at += (channel // order.share).to(tl.int64) * x.channel
    head = (channel // order.group).to(tl.int64)
    to = moved + (head * order.places + place) * (order.batches * order.group)
    to += batch * order.group + channel % order.group
    if BACK:
        numbers = tl.load(to, mask=real)
        tl.store(x.at + at, numbers.to(x.at.dtype.element_ty), mask=real)
    else:
        if mask is not None:
            seen = batch.to(tl.int64) * mask[1] + token * mask[2]
            real &= tl.load(mask[0] + seen, mask=real, other=0) != 0
        numbers = tl.load(x.at + at, mask=real, other=FILL)
        tl.store(to, numbers.to(moved.dtype.element_ty), mask=inside)


class PaddedMaps(NamedTuple):
    """A batch of maps padded to lines of places, their heads, and the kernel."""

    batch: int
    heads: int
    channels: int
    grid: Sequence[int]
    kernel: Sequence[int]

    @property
    def row(self) -> int:
        """Places from one row to the next."""
        return max(self.grid[1] + self.kernel[1] // 2, self.kernel[1])

    @property
    def places(self) -> int:
        """Places of a map."""
        return (self.grid[0] - 1) * self.row + self.grid[1]

    @property
    def radius(self) -> int:
        """Places that the kernel covers on either side."""
        return self.kernel[0] // 2 * self.row + self.kernel[1] // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """[h, places, B · d]."""
        return self.heads, self.places, self.batch * self.channels // self.heads

    def move(
        self,
        x: Tensor | None,
        fill: float = 0.0,
        mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """Copy x [B, T, D], or [B, T, h] for all channels of a head, to [h, places, B · d]."""
        if x is None:
            return None
        moved = torch.empty(self.shape, dtype=dtype or x.dtype, device=x.device)
        self._launch(moved, x, mask, fill, False)
        return moved

    def move_back(self, moved: Tensor | None) -> Tensor | None:
        """Copy [h, places, B · d] to [B, T, D]."""
        if moved is None:
            return None
        shape = self.batch, self.grid[0] * self.grid[1], self.channels
        x = torch.empty(shape, dtype=moved.dtype, device=moved.device)
        self._launch(moved, x, None, 0.0, True)
        return x

    def _launch(
        self, moved: Tensor, x: Tensor, mask: Tensor | None, fill: float, back: bool
    ) -> None:
        group, share = self.channels // self.heads, self.channels // x.shape[2]
        sizes = self.places, self.batch, self.channels
        programs = tuple(map(cdiv, sizes, MOVED))
        order = MoveSizes(self.places, self.row, self.grid[1], *sizes[1:], group, share)
        tokens = Tokens(x, *x.stride())
        move[programs](moved, tokens, strided(mask), order, FILL=fill, BACK=back, BLOCK=MOVED)

    def tiles(self, value: Tensor, save: bool) -> tuple[TileBand, MatmulBlock]:
        """Return the tiles of places, and a block no wider than the channels."""
        block = choose_block(value, save)
        tile = min(block.tile, LARGEST_TILE)
        warps = min(block.warps, 4)
        width = min(block.width, max(16, triton.next_power_of_2(self.shape[2])))
        window = (self.radius + 1,)
        band = TileBand(window, None, False, self.places, self.places, tile, shared=True)
        return band, block._replace(tile=tile, width=width, warps=warps)

    def table(self, weight: Tensor) -> Tensor:
        """Return w of each head and distance in places [h, 2 · radius + 1]."""
        rows = F.pad(weight, (0, self.row - self.kernel[1])).flatten(1)
        return rows[:, : 2 * self.radius + 1]

    def table_back(self, grad_table: Tensor) -> Tensor:
        """Return the gradient of weight [h, *K] from that of the table."""
        rows = F.pad(grad_table, (0, self.kernel[0] * self.row - grad_table.shape[1]))
        return rows.view(self.heads, self.kernel[0], -1)[..., : self.kernel[1]].contiguous()


def aft_conv(
    query,
    key,
    value,
    weight,
    *,
    grid: Sequence[int],
    global_connectivity,
    causal,
    key_mask,
    gate,
    known=None,
) -> Tensor:
    """Compute AFT-conv [B, T, D] on a 1-d or 2-d grid, not causal, with global connectivity."""
    weight = crop_kernel(weight, grid)
    if len(grid) == 1:
        grid, weight = (1, *grid), weight.unsqueeze(1)
    save = differentiated(query, key, value, weight)
    return conv(query, key, value, weight, key_mask, list(grid), gate, save)[0]


def _map(value: Tensor, weight: Tensor, grid: Sequence[int]) -> PaddedMaps:
    return PaddedMaps(value.shape[0], weight.shape[0], value.shape[2], grid, weight.shape[1:])


def _call(query, key, value, weight, key_mask, grid, gate, save) -> tuple[PaddedMaps, MatmulCall]:
    places = _map(value, weight, grid)
    band, block = places.tiles(value, save)
    # Gradients of a key that several channels share are added before they are rounded.
    wide = torch.float32 if places.heads != places.channels else None
    keys = places.move(key, float('-inf'), key_mask, wide)
    queries, values, table = places.move(query), places.move(value), places.table(weight)
    return places, MatmulCall(queries, keys, values, table, None, gate, band, block)


def conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    key_mask: Tensor | None,
    grid: Sequence[int],
    gate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return AFT-conv [B, T, D] on a 2-d grid, and with `save` what its gradient needs."""
    nothing = value.new_empty(0, dtype=torch.float32)
    if not len(value):
        return torch.empty_like(value, memory_format=torch.contiguous_format), nothing
    with torch.cuda.device_of(value):
        places, call = _call(query, key, value, weight, key_mask, grid, gate, save)
        kept = new_saved(call.value, call.band, call.block.width) if save else None
        output = places.move_back(launch_forward(call, kept))
    return output, nothing if kept is None else kept


def conv_backward(
    gradient, saved, query, key, value, weight, key_mask, grid, gate, wanted
) -> list[Tensor | None]:
    """Return the gradients of those of query, key, value and weight that are wanted."""
    inputs = query, key, value, weight
    if not len(value):
        return [None if x is None else torch.zeros_like(x) for x in inputs]
    with torch.cuda.device_of(value):
        places, call = _call(*inputs, key_mask, grid, gate, True)
        grad_output = places.move(gradient)
        *others, grad_table = launch_backward(grad_output, None, saved, call, wanted[3])
        grad_query, grad_key, grad_value = map(places.move_back, others)
    if key.shape[2] != value.shape[2]:
        grad_key = grad_key.unflatten(-1, (key.shape[2], -1)).sum(-1).to(key.dtype)
    grad_weight = places.table_back(grad_table) if wanted[3] else None
    return [grad_query, grad_key, grad_value, grad_weight]


def _empty(query, key, value, weight, key_mask, grid, gate, save):
    output = value.new_empty(value.shape)
    places = _map(value, weight, grid)
    if not save or not len(value):
        return output, value.new_empty(0, dtype=torch.float32)
    band, block = places.tiles(value, save)
    return output, new_saved(value.new_empty(places.shape), band, block.width)


conv = register(conv, conv_backward, fake=_empty, public_name='aft_conv')
