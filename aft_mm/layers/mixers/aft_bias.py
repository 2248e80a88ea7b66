from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import check_number, refuse
from aft_mm.ops.checks import check_num_heads, check_tensor
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import AFTMixer


@MODELS.register_module()
class AFTBias(AFTMixer):
    """AFT-full whose w is an argument of the call (arXiv 2105.14103, eq. 2).

    w may be negative distances of points, or any relation of tokens::

        encoder(tokens, position_bias=-distances, pair_mask=adjacency)

    Without it w = 0, as in AFT-simple. There are no steps.

    Args:
        num_heads: h of a bias [h, T, S] or [B, h, T, S]; None for [T, S] or [B, T, S].
        scales: Initial values of a learned factor per head for a bias [T, S] or [B, T, S]; needs
            num_heads=None.
    """

    takes_memory = True
    takes_pairs: ClassVar[bool] = True

    def __init__(
        self,
        embed_dims: int,
        num_heads: int | None = None,
        scales: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        if num_heads is not None:
            check_num_heads(num_heads, embed_dims)
        self.scale: nn.Parameter | None = None
        if scales is not None:
            if num_heads is not None:
                raise ValueError(f'num_heads must be None with scales, got {num_heads}')
            if not isinstance(scales, (list, tuple)) or not scales:
                refuse('scales', 'a list of numbers, one per head', scales)
            for scale in scales:
                check_number('scales', scale)
            if embed_dims % len(scales):
                refuse('scales', f'a list whose length divides embed_dims={embed_dims}', scales)
            num_heads = len(scales)
            self.scale = nn.Parameter(torch.tensor(scales, dtype=torch.float32))
        self.num_heads = num_heads
        # Without a query the number of targets is unknown.
        self.takes_memory = self.query is not None

    def _mix(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        grid: Grid,
        key_mask: Tensor | None,
        position_bias: Tensor | None = None,
        pair_mask: Tensor | None = None,
    ) -> Tensor:
        options: dict[str, Any] = dict(causal=self.causal, key_mask=key_mask, gate=self.gate)
        if position_bias is None:
            if self.scale is not None:
                raise ValueError('position_bias must be given for AFTBias with scales, got None')
            if pair_mask is None:
                return ops.aft_simple(query, key, value, **options)
            targets = key.shape[1] if query is None else query.shape[1]
            position_bias, options['num_heads'] = key.new_zeros(targets, key.shape[1]), None
        elif self.scale is not None:
            check_tensor('position_bias', position_bias, key)
            if position_bias.dim() not in (2, 3):
                refuse('position_bias', '[T, S] or [B, T, S] with scales', position_bias)
            position_bias = self.scale.view(-1, 1, 1) * position_bias.unsqueeze(-3)
        options = {'num_heads': self.num_heads, **options}
        return ops.aft_full(query, key, value, position_bias, pair_mask=pair_mask, **options)
