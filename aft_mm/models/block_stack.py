from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_choice, check_config, check_flag, check_int, check_probability
from aft_mm.layers import Block, PositionEmbedding, Resettable, SinusoidalPositions
from aft_mm.layers.block import mixer_of_each
from aft_mm.layers.grid import check_grid
from aft_mm.openmmlab import BaseModule
from aft_mm.registry import MODELS

POSITIONS = ('learned', 'sinusoidal', 'none')


class BlockStack(Resettable, BaseModule):
    """Embedding, positions, pre-norm blocks and a final LayerNorm.

    Args:
        embed_dims: Channels D.
        num_layers: Number of blocks.
        embedding: Config of the embedding without embed_dims; None shares the decoder's.
        token_mixer: Config of the mixer of every block, or a list of one each; `causal` is set here.
        grid: Grid of the position table and the mixers, see :class:`TokenMixer`; 3·W columns for
            sub-pixels.
        causal: See :class:`TokenMixer`.
        mlp_ratio: Hidden channels of the MLP over D.
        drop_rate: Dropout probability after embedding and mixers and in MLPs.
        tokens_per_position: Consecutive tokens that share a position, a divisor of T; for a grid
            (T,) only.
        positions: 'learned', 'sinusoidal' for a grid (T,), or 'none'.
        cross_mixer: Config of a mixer over a memory, see :class:`Block`.
        with_cp: Gradient checkpointing per block.
    """

    def __init__(
        self,
        embed_dims: int,
        num_layers: int,
        embedding: dict[str, Any] | None,
        token_mixer: dict[str, Any] | list[dict[str, Any]],
        grid: Sequence[int],
        *,
        causal: bool,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        tokens_per_position: int = 1,
        positions: str = 'learned',
        cross_mixer: dict[str, Any] | None = None,
        with_cp: bool = False,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        check_int('embed_dims', embed_dims, 1)
        check_int('num_layers', num_layers, 1)
        check_int('tokens_per_position', tokens_per_position, 1)
        check_probability('drop_rate', drop_rate)
        check_flag('with_cp', with_cp)
        check_choice('positions', positions, POSITIONS)
        if embedding is not None:
            check_config('embedding', embedding)
        self.mixer_configs = mixer_of_each(token_mixer, num_layers)
        self.embed_dims = embed_dims
        self.with_cp = with_cp
        self.embedding: Any = None
        if embedding is not None:
            self.embedding = MODELS.build({'embed_dims': embed_dims, **embedding})
        self.grid = check_grid(grid)
        self.tokens_per_position = tokens_per_position
        places = self._places()
        self.position_embedding: PositionEmbedding | SinusoidalPositions | None = None
        if positions == 'learned':
            self.position_embedding = PositionEmbedding(places, embed_dims)
        elif positions == 'sinusoidal':
            self.position_embedding = SinusoidalPositions(places, embed_dims)
        self.drop = nn.Dropout(drop_rate)
        self.layers: Any = nn.ModuleList(
            Block(
                embed_dims,
                {**mixer, 'causal': causal},
                grid=self.grid,
                mlp_ratio=mlp_ratio,
                drop_rate=drop_rate,
                cross_mixer=cross_mixer,
            )
            for mixer in self.mixer_configs
        )
        self.norm = nn.LayerNorm(embed_dims, eps=1e-6)

    def share_embedding(self, embedding: nn.Module) -> None:
        """Use the embedding of another stack, whose checkpoint holds it."""
        # A plain attribute is not registered as a submodule.
        self.__dict__['embedding'] = embedding

    @property
    def max_length(self) -> int:
        """Number of tokens T of the grid."""
        return prod(self.grid)

    @property
    def limited_by(self) -> str:
        """What limits the length, for messages of errors."""
        return 'grid' if self.position_embedding is None else 'position table'

    def check_length(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(
                f'a sequence must not be longer than the {self.limited_by} of {self.max_length} '
                f'tokens, got {length}'
            )

    def add_positions(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """Add the vectors of the positions to x, and apply dropout.

        Args:
            x: Tokens [B, D] at `index` [B], or the first T tokens, [B, T, D].
        """
        if self.position_embedding is not None:
            if index is None:
                index = torch.arange(x.shape[1], device=x.device)
            x = x + self.position_of(index)
        dropped: Tensor = self.drop(x)
        return dropped

    def position_of(self, index: Tensor) -> Tensor:
        """Return the position vectors [..., D] of the tokens with indices [...]."""
        assert self.position_embedding is not None
        # F.embedding sums gradients in a fixed order, indexing does not.
        return F.embedding(index // self.tokens_per_position, self.position_embedding())

    def run_blocks(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        **pairs: Tensor | None,
    ) -> Tensor:
        """Return x [B, T, D] after blocks and norm; see :meth:`Block.forward`."""
        inputs = (None, key_mask, memory, memory_mask)
        for layer in self.layers:
            run = layer.recomputed if self.with_cp and torch.is_grad_enabled() else layer
            x = run(x, *inputs, **pairs)
        normed: Tensor = self.norm(x)
        return normed

    def _places(self) -> Sequence[int]:
        n = self.tokens_per_position
        if n == 1:
            return self.grid
        if len(self.grid) > 1 or self.grid[0] % n:
            raise ValueError(
                'tokens_per_position must be 1, or a divisor of T for a grid (T,), '
                f'got {n} for {self.grid}'
            )
        return (self.grid[0] // n,)
