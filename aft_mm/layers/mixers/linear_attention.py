from typing import Any

from torch import Tensor

from aft_mm import ops
from aft_mm.checks import check_choice
from aft_mm.ops.checks import check_num_heads
from aft_mm.ops.linear_terms import FEATURE_MAPS, FeatureMap
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer


class FeatureAttention(TokenMixer):
    """Base class of linear attention."""

    takes_memory = True
    takes_prefix_tokens = True
    state_type = ops.LinearState
    example = dict(num_heads=3)
    #: φ, or the pair of its functions, see ops.linear_attention.
    feature_map: str | tuple[FeatureMap, FeatureMap]
    #: Number of features of φ per head.
    num_features: int

    def __init__(self, embed_dims: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, **kwargs)
        check_num_heads(num_heads, embed_dims)
        self.num_heads = num_heads

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        return ops.linear_attention(
            *map(self._heads, (query, key, value)),
            feature_map=self.feature_map,
            causal=self.causal,
            key_mask=key_mask,
        ).flatten(2)

    def _init_state(self, batch_size: int) -> ops.LinearState:
        dims = self.embed_dims // self.num_heads
        return ops.linear_attention_init_state(
            batch_size, self.num_heads, self.num_features, dims, **self._state_options
        )

    def _prefill(
        self, state: ops.LinearState, key: Tensor, value: Tensor, lengths: Tensor
    ) -> ops.LinearState:
        key, value = self._heads(key), self._heads(value)
        return ops.linear_attention_prefill(
            state, key, value, lengths, feature_map=self.feature_map
        )

    def _mix_step(
        self, query: Tensor, key: Tensor, value: Tensor, state: ops.LinearState
    ) -> tuple[Tensor, ops.LinearState]:
        parts = map(self._heads, (query, key, value))
        mixed, state = ops.linear_attention_step(state, *parts, feature_map=self.feature_map)
        return mixed.flatten(1), state


@MODELS.register_module()
class LinearAttention(FeatureAttention):
    """Linear attention, ``φ(q) Σ φ(k) vᵀ / φ(q) Σ φ(k)`` per head (arXiv 2006.16236, eq. 5).

    Args:
        num_heads: h, a divisor of D.
        feature_map: φ, 'elu' for ``elu(x) + 1`` as in the paper, 'relu' or 'square'.
    """

    def __init__(
        self, embed_dims: int, num_heads: int, feature_map: str = 'elu', **kwargs: Any
    ) -> None:
        check_choice('feature_map', feature_map, tuple(FEATURE_MAPS))
        super().__init__(embed_dims, num_heads, **kwargs)
        self.feature_map = feature_map
        self.num_features = embed_dims // num_heads
