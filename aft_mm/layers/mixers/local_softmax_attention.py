from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import per_dimension, refuse
from aft_mm.ops.checks import check_num_heads
from aft_mm.ops.state import StepState, check_state, new_state, push, slot_tokens, use_up
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer
from .softmax_attention import masked_attention, split_heads

Places = tuple[Tensor, Tensor]


class Blocks(NamedTuple):
    """Size of the blocks of a grid (H, W), and of the margins that their queries also see."""

    size: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def on(self, grid: Sequence[int]) -> 'Blocks':
        size = tuple(map(min, self.size, grid))
        last = [(length - 1) // s * s for length, s in zip(grid, size, strict=True)]
        return Blocks(size, tuple(map(min, self.before, last)), tuple(map(min, self.after, last)))

    def visible(self, target: Places, source: Places, causal: bool) -> Tensor:
        (row, column), (source_row, source_column) = target, source
        visible = (source_row < row) | ((source_row == row) & (source_column <= column))
        visible = visible if causal else torch.ones_like(visible)
        for t, s, size, before, after in zip(target, source, *self, strict=True):
            first = t // size * size
            visible = visible & (s >= first - before) & (s < first + size + after)
        return visible

    def mask(self, causal: bool, device: torch.device) -> Tensor:
        """Return what the queries of a block see, bool [queries, sources]."""
        target = [torch.arange(size, device=device) for size in self.size]
        source = [
            torch.arange(-before, size + after, device=device)
            for size, before, after in zip(*self, strict=True)
        ]
        rows, columns = torch.meshgrid(*target, indexing='ij')
        source_rows, source_columns = torch.meshgrid(*source, indexing='ij')
        return self.visible(
            (rows.reshape(-1, 1), columns.reshape(-1, 1)),
            (source_rows.reshape(1, -1), source_columns.reshape(1, -1)),
            causal,
        )

    def cut(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Return the n blocks of x [B, T, C] with margins, [n, B, sources, C]; 0 outside."""
        pad = [0, 0]
        for axis in (1, 0):
            pad += [self.before[axis], self.after[axis] + -grid[axis] % self.size[axis]]
        x = F.pad(x.unflatten(1, tuple(grid)), pad)
        for axis, (size, before, after) in enumerate(zip(*self, strict=True)):
            x = x.unfold(1 + axis, before + size + after, size)
        return x.permute(1, 2, 0, 4, 5, 3).flatten(3, 4).flatten(0, 1)

    def join(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Return blocks [n, B, queries, C] in raster order, [B, T, C]."""
        columns = -(-grid[1] // self.size[1])
        x = x.unflatten(2, self.size).unflatten(0, (-1, columns)).permute(2, 0, 3, 1, 4, 5)
        return x.flatten(3, 4).flatten(1, 2)[:, : grid[0], : grid[1]].flatten(1, 2)


@MODELS.register_module()
class LocalSoftmaxAttention(TokenMixer):
    """Softmax attention in local blocks (Image Transformer, arXiv 1802.05751, §3.3).

    A query sees its own block and a margin around it, if causal up to itself in raster order.

    Args:
        num_heads: h, a divisor of D.
        window: Tokens of a block; on a 2-d grid an int or (rows, columns).
        margin: Size of the margin, by default `window`.
        **kwargs: See :class:`TokenMixer`; grid is required in 2-d.
    """

    example = dict(num_heads=3, window=2)

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        window: int | Sequence[int],
        margin: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        check_num_heads(num_heads, embed_dims)
        self.num_heads = num_heads
        if self.grid is not None and len(self.grid) > 2:
            raise ValueError(
                f'grid must have 1 or 2 dimensions for LocalSoftmaxAttention, got {self.grid}'
            )
        self.raster = None if self.grid is None or len(self.grid) == 1 else self.grid
        size = before = per_dimension('window', window, self._num_dims)
        if margin is not None:
            before = per_dimension('margin', margin, self._num_dims, 0)
        if self.raster is None:
            after = (0,) if self.causal else before
            self.blocks = Blocks((1, *size), (0, *before), (0, *after))
        else:
            self.blocks = Blocks(size, before, (0, before[1]) if self.causal else before)

    @property
    def _num_dims(self) -> int:
        return 1 if self.raster is None else 2

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        if len(grid) != self._num_dims:
            refuse('grid', f'of {self._num_dims} sizes', grid)
        grid = (1, *grid) if len(grid) == 1 else grid
        blocks = self.blocks.on(grid)
        keep = torch.ones_like(key[:1, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        keep = blocks.cut(keep.unsqueeze(-1), grid).transpose(2, 3)
        visible = blocks.mask(self.causal, key.device) & keep  # [n, 1 or B, queries, sources]
        query = blocks._replace(before=(0, 0), after=(0, 0)).cut(query, grid)
        key, value = blocks.cut(key, grid), blocks.cut(value, grid)
        query, key, value = (split_heads(x, self.num_heads) for x in (query, key, value))
        # Fused kernels take 4 dimensions: [n, B·h, ...] with a shared mask, else [n·B, h, ...].
        merged = (1, 2) if key_mask is None else (0, 1)
        parts = (query, key, value, visible.unsqueeze(2))
        mixed = masked_attention(*(part.flatten(*merged) for part in parts)).view(query.shape)
        return blocks.join(mixed.transpose(2, 3).flatten(3), grid)

    def _init_state(self, batch_size: int) -> StepState:
        rows, reach = (s - 1 + before for s, before in zip(*self.blocks[:2], strict=True))
        if self.raster is not None:
            height, width = self.raster
            reach = min(rows, height - 1) * width + min(reach, width - 1)
        dtype = self._reference().dtype
        state = new_state(batch_size, self.embed_dims, reach + 1, self._device, dtype)
        return _without_infinity(state)

    def _prefill(self, state: StepState, key: Tensor, value: Tensor, lengths: Tensor) -> StepState:
        return _without_infinity(super()._prefill(state, key, value, lengths))

    def _mix_step(
        self, query: Tensor, key: Tensor, value: Tensor, state: StepState
    ) -> tuple[Tensor, StepState]:
        check_state(state, None if self.raster is None else prod(self.raster))
        tokens = slot_tokens(state.position, state.keys.shape[1])
        target, source = self._places(state.position[:, None]), self._places(tokens)
        visible = self.blocks.visible(target, source, causal=True) & (tokens >= 0)
        used, state = state, push(state, key, value, update_sums=False)
        use_up(used.position)
        parts = (query.to(state.keys.dtype).unsqueeze(1), state.keys, state.values)
        query, key, value = (split_heads(x, self.num_heads) for x in parts)
        mask = visible[:, None, None]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(1).to(value.dtype), state

    def _places(self, tokens: Tensor) -> Places:
        if self.raster is None:
            return torch.zeros_like(tokens), tokens
        return tokens // self.raster[1], tokens % self.raster[1]


def _without_infinity(state: StepState) -> StepState:
    """Return the state with keys of 0 in empty slots, as q · (−inf) is NaN."""
    return state._replace(keys=state.keys.masked_fill(state.keys == -torch.inf, 0))
