"""AFT-conv, not causal, as a product in which each head has its own W.

A map [H, W] whose rows are P = W + K_w // 2 places apart, with nothing between them, is a line on
which a kernel [K_h, K_w] covers ``(K_h − 1) P + K_w`` places, with 0 between its rows. So AFT-conv
is AFT-local on a line, with two differences: the bias depends only on the distance of two tokens,
so all tiles of a head share one W; and heads take the role of the sequences, the channels of a head
in all sequences that of the channels. `move` copies the tokens into that order and back.
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

# Places, sequences and channels of a program; reads are contiguous along the channels, writes along
# the sequences.
MOVED = (2, 32, 32)
# With tiles of 128 a map of 14 × 14 would fill two thirds of them.
LARGEST_TILE = 64


class MoveSizes(NamedTuple):
    """Sizes of a copy; `share`: channels per column of the key."""

    places: Any
    row: Any
    width: Any
    batches: Any
    channels: Any
    group: Any
    share: Any


@triton.jit
def move(
    moved, tensors, key_mask, order, FILLS: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy each tensor [B, T, D] to its `moved` [h, places, B · d], or back with BACK.

    Places without a token become the FILL of the tensor. The key, whose FILL is not 0, may have
    fewer channels; hidden tokens are filled, too.
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
    head = (channel // order.group).to(tl.int64)
    to = (head * order.places + place) * (order.batches * order.group)
    to += batch * order.group + channel % order.group
    for i in tl.static_range(len(FILLS)):
        x = tensors[i]
        column = channel if FILLS[i] == 0 else channel // order.share
        at = x.at + batch.to(tl.int64) * x.batch + token * x.token + column.to(tl.int64) * x.channel
        if BACK:
            numbers = tl.load(moved[i] + to, mask=real)
            tl.store(at, numbers.to(x.at.dtype.element_ty), mask=real)
        else:
            seen = real
            if FILLS[i] != 0 and key_mask is not None:
                shown = batch.to(tl.int64) * key_mask[1] + token * key_mask[2]
                seen &= tl.load(key_mask[0] + shown, mask=real, other=0) != 0
            numbers = tl.load(at, mask=seen, other=FILLS[i])
            tl.store(moved[i] + to, numbers.to(moved[i].dtype.element_ty), mask=inside)


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
        return (self.grid[0] - 1) * self.row + self.grid[1]

    @property
    def radius(self) -> int:
        """Places that the kernel covers on either side."""
        return self.kernel[0] // 2 * self.row + self.kernel[1] // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.places, self.batch * self.channels // self.heads

    def move(
        self, *others: Tensor | None, key: Tensor | None = None, key_mask: Tensor | None = None
    ) -> list[Tensor | None]:
        """Copy tensors [B, T, D], and last the key, to [h, places, B · d]; None stays None."""
        tensors = [*others] if key is None else [*others, key]
        fills = [0.0] * len(others) + [float('-inf')]
        moved = [None if x is None else x.new_empty(self.shape) for x in tensors]
        # Gradients of a shared key are added before they are rounded.
        if key is not None and self.heads != self.channels:
            moved[-1] = key.new_empty(self.shape, dtype=torch.float32)
        self._launch(moved, tensors, fills, key_mask, False)
        return moved

    def move_back(self, *moved: Tensor | None) -> list[Tensor | None]:
        shape = self.batch, self.grid[0] * self.grid[1], self.channels
        tensors = [None if x is None else x.new_empty(shape) for x in moved]
        self._launch(moved, tensors, [0.0] * len(moved), None, True)
        return tensors

    def _launch(self, moved, tensors, fills, key_mask: Tensor | None, back: bool) -> None:
        copies = [x for x in zip(moved, tensors, fills, strict=False) if x[1] is not None]
        to, given, fills = zip(*copies, strict=True)
        group, share = self.channels // self.heads, self.channels // given[-1].shape[2]
        sizes = self.places, self.batch, self.channels
        order = MoveSizes(self.places, self.row, self.grid[1], *sizes[1:], group, share)
        tokens = tuple(Tokens(x, *x.stride()) for x in given)
        programs = tuple(map(cdiv, sizes, MOVED))
        move[programs](to, tokens, strided(key_mask), order, FILLS=fills, BACK=back, BLOCK=MOVED)

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
    query, key, value, weight, *, grid, global_connectivity, causal, key_mask, gate, known=None
) -> Tensor:
    """Compute AFT-conv [B, T, D] on a 1-d or 2-d grid, not causal, with global connectivity."""
    weight = crop_kernel(weight, grid)
    if len(grid) == 1:
        grid, weight = (1, *grid), weight.unsqueeze(1)
    save = differentiated(query, key, value, weight)
    return conv(query, key, value, weight, key_mask, list(grid), gate, save)[0]


def _map(value: Tensor, weight: Tensor, grid: Sequence[int]) -> PaddedMaps:
    return PaddedMaps(value.shape[0], weight.shape[0], value.shape[2], grid, weight.shape[1:])


def _call(query, key, value, weight, key_mask, grid, gate, save, *gradient: Tensor) -> tuple:
    """Return the maps, the product of the moved tensors, and the moved gradient of the output."""
    places = _map(value, weight, grid)
    band, block = places.tiles(value, save)
    *others, keys = places.move(query, value, *gradient, key=key, key_mask=key_mask)
    queries, values, *grad_output = others
    call = MatmulCall(queries, keys, values, places.table(weight), None, gate, band, block)
    return places, call, *grad_output


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
    if not len(value):
        return value.new_empty(value.shape), value.new_empty(0, dtype=torch.float32)
    with torch.cuda.device_of(value):
        places, call = _call(query, key, value, weight, key_mask, grid, gate, save)
        kept = new_saved(call.value, call.band, call.block.width, save)
        (output,) = places.move_back(launch_forward(call, kept))
    return output, kept


def conv_backward(
    gradient, saved, query, key, value, weight, key_mask, grid, gate, wanted
) -> list[Tensor | None]:
    inputs = query, key, value, weight
    if not len(value):
        return [None if x is None else torch.zeros_like(x) for x in inputs]
    with torch.cuda.device_of(value):
        places, call, grad_output = _call(*inputs, key_mask, grid, gate, True, gradient)
        *others, grad_table = launch_backward(grad_output, None, saved, call, wanted[3])
        grad_query, grad_key, grad_value = places.move_back(*others)
    if key.shape[2] != value.shape[2]:
        grad_key = grad_key.unflatten(-1, (key.shape[2], -1)).sum(-1).to(key.dtype)
    grad_weight = places.table_back(grad_table) if wanted[3] else None
    return [grad_query, grad_key, grad_value, grad_weight]


def _empty(query, key, value, weight, key_mask, grid, gate, save):
    output = value.new_empty(value.shape)
    places = _map(value, weight, grid)
    band, block = places.tiles(value, save)
    like, some = value.new_empty(places.shape), save and len(value) > 0
    return output, new_saved(like, band, block.width, some)


conv = register(conv, conv_backward, fake=_empty, public_name='aft_conv')
