"""The pre-norm block around a token mixer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import MLP, StochasticDepth

from aft_mm.checks import check_config, check_int, check_number, check_probability
from aft_mm.ops import select
from aft_mm.registry import MODELS

from .mixers import ProjectedMemory, TokenMixer

__all__ = ['Block', 'BlockState']


class BlockState(NamedTuple):
    """What a block keeps between steps: the state of its mixer, and the memory, projected once."""

    mixing: Any
    memory: ProjectedMemory | None

    @property
    def position(self) -> Tensor:
        """Index of the next token of each sequence, [B]."""
        return self.mixing.position


class Block(nn.Module):
    """Pre-norm block, ``x + drop(mixer(norm(x)))`` then ``x + drop(mlp(norm(x)))``, [B, T, D].

    With a cross mixer, ``x + drop(cross_mixer(norm(x), memory))`` stands between the two.
    Linear layers start as in DeiT: N(0, 0.02²) truncated, bias 0.

    Args:
        embed_dims: channels D.
        token_mixer: config of the mixer, such as ``dict(type='aft_mm.AFTFull', rank=128)``; the
            block adds embed_dims, grid and num_prefix_tokens.
        grid, num_prefix_tokens: see :class:`TokenMixer`.
        mlp_ratio: width of the MLP over D; ValueError where that leaves it no channel.
        drop_rate: dropout probability inside the MLP and after the mixer.
        drop_path_rate: probability that a sample skips a branch, while training.
        cross_mixer: config of the mixer over the memory of an encoder, not causal; the block adds
            embed_dims. Raises ValueError for a mixer that takes no memory, and for one whose
            position bias is over its own tokens, see :attr:`TokenMixer.biased_memory`.
    """

    def __init__(
        self,
        embed_dims: int,
        token_mixer: dict[str, Any],
        grid: Sequence[int] | None = None,
        num_prefix_tokens: int = 0,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        cross_mixer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        check_number('mlp_ratio', mlp_ratio, above=0)
        check_probability('drop_rate', drop_rate)
        check_probability('drop_path_rate', drop_path_rate)
        check_config('token_mixer', token_mixer)
        if cross_mixer is not None:
            check_config('cross_mixer', cross_mixer)
        mlp_dims = int(embed_dims * mlp_ratio)
        if mlp_dims < 1:
            raise ValueError(
                f'mlp_ratio must leave the MLP 1 channel or more, got {mlp_ratio} with '
                f'embed_dims={embed_dims}'
            )
        context = dict(
            embed_dims=embed_dims,
            grid=grid,
            num_prefix_tokens=num_prefix_tokens,
            proj_drop=drop_rate,
        )
        self.norm1 = nn.LayerNorm(embed_dims, eps=1e-6)
        self.token_mixer = MODELS.build({**context, **token_mixer})
        self.norm_cross: nn.Module | None = None
        self.cross_mixer: TokenMixer | None = None
        if cross_mixer is not None:
            self.norm_cross = nn.LayerNorm(embed_dims, eps=1e-6)
            self.cross_mixer = _build_cross_mixer(
                {'embed_dims': embed_dims, 'proj_drop': drop_rate, **cross_mixer}
            )
        self.norm2 = nn.LayerNorm(embed_dims, eps=1e-6)
        self.mlp = MLP(
            embed_dims,
            [mlp_dims, embed_dims],
            activation_layer=nn.GELU,
            inplace=None,
            dropout=drop_rate,
        )
        self.drop_path = StochasticDepth(drop_path_rate, mode='row')
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(
        self,
        x: Tensor,
        grid: Sequence[int] | None = None,
        key_mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """x [B, T, D] on `grid`, key_mask [B, T] True = keep; returns [B, T, D].

        memory [B, S, D] and memory_mask [B, S] are for the cross mixer; ValueError for one without
        the other.
        """
        projected = self._project(memory, memory_mask)
        x = x + self.drop_path(self.token_mixer(self.norm1(x), grid=grid, key_mask=key_mask))
        return self._after_mixing(x, projected)

    @torch.no_grad()
    def prefill(
        self,
        x: Tensor,
        lengths: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        """A whole prompt, x [B, L, D] -> y [B, L, D], and the state after lengths [B] tokens.

        The steps after it read the same memory. Raises ValueError as :meth:`forward`.
        """
        projected = self._project(memory, memory_mask)
        mixed, mixing = self.token_mixer.prefill(self.norm1(x), lengths)
        y = self._after_mixing(x + self.drop_path(mixed), projected)
        return y, BlockState(mixing, projected)

    @torch.no_grad()
    def step(self, x_t: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """One token, x_t [B, D] -> y_t [B, D], and the next state; see :meth:`TokenMixer.step`."""
        # A copy for who reads a memory: the mixer marks that of the state as used up.
        position = None if self.cross_mixer is None else state.position.clone()
        mixed, mixing = self.token_mixer.step(self.norm1(x_t), state.mixing)
        x_t = x_t + self._drop(mixed)
        return self._after_mixing(x_t, state.memory, position), state._replace(mixing=mixing)

    def select_state(self, state: BlockState, rows: Tensor, same_memory: bool) -> BlockState:
        """The state of the sequences rows [N] of its batch; the memory stays if it is that of the
        rows as they lie.
        """
        mixing = self.token_mixer.select_state(state.mixing, rows)
        return BlockState(mixing, state.memory if same_memory else select(state.memory, rows))

    def _project(self, memory: Tensor | None, mask: Tensor | None) -> ProjectedMemory | None:
        if (memory is None) != (self.cross_mixer is None):
            raise ValueError(
                'memory must be given exactly where there is a cross_mixer, got '
                f'memory={None if memory is None else list(memory.shape)} with '
                f'cross_mixer={type(self.cross_mixer).__name__}'
            )
        if self.cross_mixer is None or memory is None:
            return None
        return self.cross_mixer.project_memory(memory, mask)

    def _after_mixing(
        self, x: Tensor, memory: ProjectedMemory | None, position: Tensor | None = None
    ) -> Tensor:
        """The rest of the block for x [B, T, D], or in a step for one token [B, D] at position."""
        if self.cross_mixer is not None and self.norm_cross is not None:
            normed = self.norm_cross(x)
            if position is None:
                read = self.cross_mixer(normed, memory=memory)
            else:
                read = self.cross_mixer.step_memory(normed, memory, position)
            x = x + self._drop(read)
        return x + self._drop(self.mlp(self.norm2(x)))

    def _drop(self, branch: Tensor) -> Tensor:
        # In a step of a small model every call of a module counts.
        return self.drop_path(branch) if self.training else branch


def _build_cross_mixer(config: dict[str, Any]) -> TokenMixer:
    mixer = MODELS.build(config)
    biased = mixer.position_bias() is not None and not mixer.biased_memory
    if not mixer.takes_memory or mixer.causal or biased:
        raise ValueError(
            'cross_mixer must take a memory, not be causal and have no position bias but one over '
            f'the memory, got {config}'
        )
    return mixer
