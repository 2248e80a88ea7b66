from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_choice, check_int
from aft_mm.ops.checks import check_num_heads
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer
from .softmax_attention import masked_softmax, split_heads
from .token_table import TokenTable

PATTERNS = ('strided', 'fixed')


@MODELS.register_module()
class StridedAttention(TokenMixer):
    """Softmax attention over O(√T) tokens (Sparse Transformer, arXiv 1904.10509, §4).

    With stride l, in raster order: 'strided' sees tokens at most l or a multiple of l away; 'fixed'
    its own block of l tokens and the last `summary` tokens of every block.

    Args:
        num_heads: h, a divisor of D and of qk_dims.
        stride: l, near √T.
        pattern: 'strided' for images, 'fixed' for text.
        summary: Tokens of a block that all later ones see, 1 to l; for 'fixed' only.
        qk_dims: Channels of query and key; None for D.
        **kwargs: See :class:`TokenMixer`; grid is required for steps.
    """

    state_type = TokenTable
    example = dict(num_heads=3, stride=3)

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        stride: int,
        pattern: str = 'strided',
        summary: int | None = None,
        qk_dims: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        check_num_heads(num_heads, embed_dims)
        check_choice('pattern', pattern, PATTERNS)
        check_int('stride', stride, 1)
        for name, size in (('summary', summary), ('qk_dims', qk_dims)):
            if size is not None:
                check_int(name, size, 1)
        if (summary is not None) != (pattern == 'fixed') or (summary or 1) > stride:
            raise ValueError(
                f"summary must be 1 to stride={stride} for pattern='fixed' and None for 'strided', "
                f'got {summary} with {pattern!r}'
            )
        qk_dims = embed_dims if qk_dims is None else qk_dims
        if qk_dims % num_heads:
            raise ValueError(f'qk_dims must be a multiple of num_heads={num_heads}, got {qk_dims}')
        self.num_heads, self.stride, self.pattern = num_heads, stride, pattern
        self.summary, self.qk_dims = summary, qk_dims
        if qk_dims != embed_dims:
            bias = self.value.bias is not None
            self.query = nn.Linear(embed_dims, qk_dims, bias=bias)
            self.key = nn.Linear(embed_dims, qk_dims, bias=bias)

    def visible(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether targets see sources by the local and by the far part of the pattern."""
        distance = target - source
        if self.summary is None:
            near = distance.abs() <= self.stride
            far = (distance % self.stride == 0) & ~near
        else:
            near = target // self.stride == source // self.stride
            far = (source % self.stride >= self.stride - self.summary) & ~near
        allowed = (distance >= 0) if self.causal else torch.ones_like(near)
        return near & allowed, far & allowed

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        tokens, stride = query.shape[1], self.stride
        pad = -tokens % stride
        blocks = [
            F.pad(split_heads(x, self.num_heads), (0, 0, 0, pad)).unflatten(2, (-1, stride))
            for x in (query, key, value)
        ]
        near_keys, far_keys = self._near(blocks[1]), self._far(blocks[1])
        near_values, far_values = self._near(blocks[2]), self._far(blocks[2])
        query = blocks[0] * blocks[0].shape[-1] ** -0.5
        logits = query @ near_keys.mT, self._columns(self._columns(query) @ far_keys.mT)
        visible = self._masks(tokens, pad, key_mask, query.device)
        weights = masked_softmax(torch.cat(logits, -1), torch.cat(visible, -1)).to(value.dtype)
        near, far = weights.split([part.shape[-1] for part in logits], -1)
        mixed: Tensor = near @ near_values + self._columns(self._columns(far) @ far_values)
        return mixed.flatten(2, 3)[:, :, :tokens].transpose(1, 2).flatten(2)

    def _near(self, x: Tensor) -> Tensor:
        """Return blocks [..., R, l, c] with the neighbours that may be visible, [..., R, n, c]."""
        if self.pattern == 'fixed':
            return x
        after = 0 if self.causal else 1
        padded = F.pad(x, (0, 0, 0, 0, 1, after))
        rows = x.shape[-3]
        return torch.cat([padded.narrow(-3, i, rows) for i in range(2 + after)], -2)

    def _far(self, x: Tensor) -> Tensor:
        """Return the far part of blocks [..., R, l, c]: columns, or summaries of all blocks."""
        if self.summary is None:
            return x.transpose(-3, -2)
        return x[..., -self.summary :, :].flatten(-3, -2).unsqueeze(-3)

    def _columns(self, x: Tensor) -> Tensor:
        """Return blocks [..., R, l, c] as columns [..., l, R, c], or the reverse."""
        return x.transpose(-3, -2) if self.pattern == 'strided' else x

    def _masks(
        self, tokens: int, pad: int, key_mask: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return what is visible of _near and of _far, bool [1 or B, 1, R, l, n] each."""
        target = torch.arange(tokens + pad, device=device).view(-1, self.stride, 1)
        # 0 marks the padding.
        index = 1 + target
        exists = torch.ones(1, tokens, dtype=torch.bool, device=device)
        exists = F.pad(exists if key_mask is None else key_mask, (0, pad)).view(-1, *target.shape)
        masks = []
        for i, part in enumerate((self._near, self._far)):
            source = part(index).squeeze(-1)
            if i == 1 and self.pattern == 'strided':
                source = source.unsqueeze(0)  # [1, l, R]: every block has the same columns
            else:
                source = source.unsqueeze(-2)  # [R or 1, 1, n]
            allowed = self.visible(target, source - 1)[i] & (source > 0)
            mask = part(exists).squeeze(-1)
            mask = mask.unsqueeze(1) if i == 1 and self.pattern == 'strided' else mask.unsqueeze(-2)
            masks.append((allowed & mask).unsqueeze(1))
        return masks[0], masks[1]

    def _init_state(self, batch_size: int) -> TokenTable:
        tokens = prod(self._required_grid(' to take steps'))
        channels = (self.qk_dims, self.embed_dims)
        return TokenTable.empty(batch_size, tokens, channels, self._reference())

    def _prefill(
        self, state: TokenTable, key: Tensor, value: Tensor, lengths: Tensor
    ) -> TokenTable:
        return state.fill((key, value), lengths)

    def _mix_step(
        self, query: Tensor, key: Tensor, value: Tensor, state: TokenTable
    ) -> tuple[Tensor, TokenTable]:
        state = state.store(key, value)
        target = state.position[:, None] - 1
        source = self._sources(target, state.size)
        near, far = self.visible(target, source)
        allowed = (near | far) & (source >= 0) & (source <= target)
        keys, values = (
            split_heads(
                x.gather(1, source.clamp(0, state.size - 1)[..., None].expand(-1, -1, x.shape[2])),
                self.num_heads,
            ).to(value.dtype)
            for x in state.rows
        )
        query = split_heads(query.unsqueeze(1), self.num_heads)
        logits = query @ keys.mT * query.shape[-1] ** -0.5
        weights = masked_softmax(logits, allowed[:, None, None]).to(value.dtype)
        return (weights @ values).transpose(1, 2).flatten(1), state

    def _sources(self, target: Tensor, tokens: int) -> Tensor:
        """Return the tokens that targets [B, 1] may see, [B, n]; some are out of range."""
        stride, blocks = self.stride, -(-tokens // self.stride)
        if self.summary is None:
            back = torch.arange(blocks + 1, device=target.device)
            offsets = torch.cat((torch.arange(stride, device=target.device), back[1:] * stride))
            return target - offsets
        inside = torch.arange(stride, device=target.device)
        block = target // stride * stride + inside
        others = (torch.arange(blocks, device=target.device)[:, None] * stride + inside)[
            :, -self.summary :
        ].flatten()
        others = others.expand(len(target), -1)
        others = others.masked_fill(others // stride == target // stride, -1)
        return torch.cat((block, others), 1)
