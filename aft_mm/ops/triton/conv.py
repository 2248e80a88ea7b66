"""AFT-conv, not causal, as a product in which each head has its own W.

A map [H, W] whose rows are P = W + K_w // 2 places apart, with nothing between them, is a line on
which a kernel [K_h, K_w] covers ``(K_h − 1) P + K_w`` places, with 0 between its rows. So AFT-conv
is AFT-local on a line, in which all tiles of a head share one W, and heads take the role of the
sequences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..geometry import crop_kernel
from ..kernel_op import TOKENS, differentiated, register
from .block_sizes import MatmulBlock, cdiv
from .full_local import MatmulCall, launch_backward, launch_forward
from .online_softmax import Ints, Pointers, Strided, entry_pointer, store_entry, strided
from .tiling import TileBand, choose_block, new_saved

# Places, sequences and channels of a program; reads are contiguous along the channels, writes along
# the sequences.
MOVED = (2, 32, 32)
# With tiles of 128 a map of 14 × 14 would fill two thirds of them.
LARGEST_TILE = 64


@triton.jit
def conv_move_kernel(
    moved: 'tuple[Pointers, ...]',
    tensors: 'tuple[Strided, ...]',
    key_mask: 'Strided | None',
    order: 'tuple[Ints, ...]',
    FILLS: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy each tensor [B, T, D] to its `moved` [h, places, B · d], or back with BACK.

    Places without a token become the FILL of the tensor. The key, whose FILL is not 0, may have
    fewer channels, one for `share` of the others; hidden tokens are filled, too.
    """
    places, row, width, batches, channels, group, share = order
    PLACES: tl.constexpr = BLOCK[0]
    SEQUENCES: tl.constexpr = BLOCK[1]
    CHANNELS: tl.constexpr = BLOCK[2]
    position = tl.program_id(0) * PLACES + tl.arange(0, PLACES)[:, None, None]
    batch = tl.program_id(1) * SEQUENCES + tl.arange(0, SEQUENCES)[None, :, None]
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, None, :]
    inside = (position < places) & (batch < batches) & (channel < channels)
    real = inside & (position % row < width)
    token = (position // row * width + position % row).to(tl.int64)
    to = ((channel // group).to(tl.int64) * places + position) * (batches * group)
    to += batch * group + channel % group
    for i in tl.static_range(len(FILLS)):
        x = tensors[i]
        column = channel if FILLS[i] == 0 else channel // share
        if BACK:
            numbers = tl.load(moved[i] + to, mask=real)  # [PLACES, SEQUENCES, CHANNELS]
            store_entry(x, batch, token, column, real, numbers)
        else:
            visible = real
            if FILLS[i] != 0 and key_mask is not None:
                shown = batch.to(tl.int64) * key_mask[1] + token * key_mask[2]
                visible &= tl.load(key_mask[0] + shown, mask=real, other=0) != 0
            numbers = tl.load(entry_pointer(x, batch, token, column), mask=visible, other=FILLS[i])
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
        return max(self.grid[1] + self.kernel[1] // 2, self.kernel[1])

    @property
    def places(self) -> int:
        return (self.grid[0] - 1) * self.row + self.grid[1]

    @property
    def radius(self) -> int:
        return self.kernel[0] // 2 * self.row + self.kernel[1] // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.places, self.batch * self.channels // self.heads

    def move(self, tensors: list[Tensor | None], key_mask: Tensor | None) -> list[Any]:
        """Copy tensors [B, T, D], the last one the key, to [h, places, B · d]; None stays None."""
        moved = [None if x is None else x.new_empty(self.shape) for x in tensors]
        # Gradients of a shared key are added before they are rounded.
        if self.heads != self.channels:
            moved[-1] = tensors[-1].new_empty(self.shape, dtype=torch.float32)
        fills = [0.0] * (len(tensors) - 1) + [float('-inf')]
        self._launch(moved, tensors, fills, key_mask, False)
        return moved

    def move_back(self, *moved: Tensor | None) -> list[Tensor | None]:
        shape = self.batch, self.grid[0] * self.grid[1], self.channels
        tensors = [None if x is None else x.new_empty(shape) for x in moved]
        self._launch(moved, tensors, [0.0] * len(moved), None, True)
        return tensors

    def _launch(
        self,
        moved: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        fills: Sequence[float],
        key_mask: Tensor | None,
        back: bool,
    ) -> None:
        copies = [x for x in zip(moved, tensors, fills, strict=True) if x[1] is not None]
        to, given, fills = zip(*copies, strict=True)
        sizes = self.places, self.batch, self.channels
        shares = self.channels // self.heads, self.channels // given[-1].shape[2]
        order = self.places, self.row, self.grid[1], *sizes[1:], *shares
        arguments = to, tuple(map(strided, given)), strided(key_mask), order
        conv_move_kernel[tuple(map(cdiv, sizes, MOVED))](
            *arguments, FILLS=fills, BACK=back, BLOCK=MOVED
        )

    def tiles(self, value: Tensor, save: bool) -> tuple[TileBand, MatmulBlock]:
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
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute AFT-conv [B, T, D] on a 1-d or 2-d grid, not causal, with global connectivity."""
    weight = crop_kernel(weight, grid)
    if len(grid) == 1:
        grid, weight = (1, *grid), weight.unsqueeze(1)
    save = differentiated(query, key, value, weight)
    return conv(query, key, value, weight, key_mask, list(grid), gate, save)[0]


def _padded_maps(value: Tensor, weight: Tensor, grid: Sequence[int]) -> PaddedMaps:
    return PaddedMaps(value.shape[0], weight.shape[0], value.shape[2], grid, weight.shape[1:])


def _moved_call(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    key_mask: Tensor | None,
    grid: Sequence[int],
    gate: str,
    save: bool,
    *gradient: Tensor,
) -> tuple[Any, ...]:
    places = _padded_maps(value, weight, grid)
    band, block = places.tiles(value, save)
    queries, values, *moved, keys = places.move([query, value, *gradient, key], key_mask)
    call = MatmulCall(queries, keys, values, places.table(weight), None, gate, band, block)
    return places, call, *moved


def conv(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return AFT-conv [B, T, D] on a 2-d grid, and with `save` what its gradient needs."""
    places, call = _moved_call(*inputs)
    kept = new_saved(call.value, call.band, call.block.width, inputs[-1])
    return places.move_back(launch_forward(call, kept))[0], kept


def conv_backward(gradient: Tensor, saved: Tensor, *inputs: Any) -> list[Tensor | None]:
    (key, value), wanted = inputs[1:3], inputs[-1]
    given: tuple[Any, ...] = (*inputs[:-1], True, gradient)
    places, call, grad_output = _moved_call(*given)
    *others, grad_table = launch_backward(grad_output, saved, call, wanted[3])
    grad_query, grad_key, grad_value = places.move_back(*others)
    if key.shape[2] != value.shape[2]:
        grad_key = grad_key.unflatten(-1, (key.shape[2], -1)).sum(-1).to(key.dtype)
    grad_weight = places.table_back(grad_table) if wanted[3] else None
    return [grad_query, grad_key, grad_value, grad_weight]


def _empty(*inputs: Any) -> tuple[Tensor, Tensor]:
    value, weight, _, grid, _, save = inputs[2:]
    places = _padded_maps(value, weight, grid)
    band, block = places.tiles(value, save)
    saved = new_saved(value.new_empty(places.shape), band, block.width, save and len(value) > 0)
    return value.new_empty(value.shape), saved


conv = register(
    conv,
    f'{TOKENS}, Tensor weight, Tensor? key_mask, SymInt[] grid, str gate',
    conv_backward,
    fake=_empty,
    public_name='aft_conv',
)
