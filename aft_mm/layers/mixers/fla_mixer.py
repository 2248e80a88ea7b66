"""A layer of flash-linear-attention as a token mixer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from aft_mm.checks import refuse
from aft_mm.registry import MODELS

from ..projections import ProjectedMemory, check_tokens, hide_tokens
from .base import TokenMixer


@MODELS.register_module()
class FlaMixer(TokenMixer):
    """A causal layer of flash-linear-attention, which has its own projections, on a GPU.

    ``FlaMixer(layer='GatedDeltaNet', options=dict(head_dim=64, num_heads=6))`` is
    ``fla.layers.GatedDeltaNet(hidden_size=D, head_dim=64, num_heads=6)``. The package is
    ``flash-linear-attention``; no device has run it in this project. It trains and evaluates; it
    has no steps, so it draws no samples.

    Args:
        embed_dims: channels D.
        layer: the name of a class of ``fla.layers``, such as 'GatedLinearAttention'.
        options: its arguments but ``hidden_size``.
        causal: True, as these layers are recurrent.
        others: see :class:`TokenMixer`, but for ``qkv_bias``; tokens are taken in raster order.

    Raises ValueError where the package is missing or has no such layer, and for causal=False.
    """

    def __init__(
        self,
        embed_dims: int,
        layer: str,
        options: Mapping[str, Any] | None = None,
        causal: bool = True,
        **kwargs: Any,
    ) -> None:
        if 'qkv_bias' in kwargs:
            raise TypeError("FlaMixer has no argument 'qkv_bias': options has those of its layer")
        super().__init__(embed_dims, causal=causal, **kwargs)
        if not causal:
            refuse('causal', 'True for FlaMixer, whose layers read from first to last', causal)
        try:
            from fla import layers
        except ImportError as error:
            raise ValueError(
                'FlaMixer needs a GPU and pip install flash-linear-attention, of which '
                f'{error.name or "a part"} is missing'
            ) from error
        kind = getattr(layers, layer, None) if isinstance(layer, str) else None
        if not isinstance(kind, type):
            refuse('layer', 'the name of a class of fla.layers', layer)
        # The layer projects by itself.
        self.query = self.key = self.value = self.proj = None  # type: ignore[assignment]
        self.layer = kind(hidden_size=embed_dims, **(options or {}))

    def forward(
        self,
        x: Tensor,
        grid: Sequence[int] | None = None,
        memory: Tensor | ProjectedMemory | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens x [B, T, D]; returns [B, T, D]. Raises as :meth:`TokenMixer.forward`."""
        check_tokens('x', x, 'B', 'T', self.embed_dims)
        self._resolve_grid(x.shape[1], grid)
        if memory is not None:
            raise ValueError('memory must be None for FlaMixer')
        # The library leaves hidden tokens out and gives 0 in their place.
        mask = None if key_mask is None else key_mask.int()
        mixed, *_ = self.layer(hide_tokens(x, key_mask), attention_mask=mask)
        return self.proj_drop(mixed)

    def fuse_projections(self) -> None:
        """There is nothing to fuse."""
