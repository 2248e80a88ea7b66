from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aft_mm.checks import check_config, check_int, check_number, check_probability, refuse
from aft_mm.ops import select
from aft_mm.registry import MODELS

from .mixers import ProjectedMemory, TokenMixer
from .projections import dropout
from .resetting import Resettable


class BlockState(NamedTuple):
    """State of the mixer between steps, and the projected memory."""

    mixing: Any
    memory: ProjectedMemory | None

    @property
    def position(self) -> Tensor:
        position: Tensor = self.mixing.position
        return position


class DropPath(nn.Module):
    """Skip the branch of a sample with probability p in training; scale others by 1 / (1 − p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return branch
        kept = branch.new_empty(len(branch), *[1] * (branch.dim() - 1)).bernoulli_(1 - self.p)
        return branch * (kept / (1 - self.p) if self.p < 1 else kept)

    def extra_repr(self) -> str:
        return f'p={self.p}'


class Block(Resettable):
    """Pre-norm block on [B, T, D].

    ``x = x + drop(f(norm(x)))`` for f the mixer, the cross mixer over a memory if there is one, and
    the MLP. Linear layers start from truncated N(0, 0.02²), biases at 0.

    Args:
        token_mixer: Config of the mixer, such as ``dict(type='aft_mm.AFTFull', rank=128)``;
            embed_dims, grid, num_prefix_tokens and proj_drop are added.
        grid, num_prefix_tokens: See :class:`TokenMixer`.
        mlp_ratio: Hidden channels of the MLP over D.
        drop_rate: Dropout probability inside the MLP and after the mixer.
        drop_path_rate: See :class:`DropPath`.
        cross_mixer: Config of a non-causal mixer over a memory.

    Raises:
        ValueError: `mlp_ratio` leaves the MLP without a channel, or the cross mixer is causal or
            does not fit a memory.
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
        _check_type(token_mixer.get('type'))
        self.token_mixer = MODELS.build({**context, **token_mixer})
        self.norm_cross: Any = None
        self.cross_mixer: TokenMixer | None = None
        if cross_mixer is not None:
            self.norm_cross = nn.LayerNorm(embed_dims, eps=1e-6)
            self.cross_mixer = _build_cross_mixer(
                {'embed_dims': embed_dims, 'proj_drop': drop_rate, **cross_mixer}
            )
        self.norm2 = nn.LayerNorm(embed_dims, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dims, mlp_dims),
            nn.GELU(),
            dropout(drop_rate),
            nn.Linear(mlp_dims, embed_dims),
            dropout(drop_rate),
        )
        self.drop_path = DropPath(drop_path_rate)
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
        **pairs: Tensor | None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: Tokens [B, T, D].
            grid, key_mask: See :meth:`TokenMixer.forward`.
            memory: Tokens [B, S, D] for the cross mixer.
            memory_mask: bool [B, S], True = keep.
            **pairs: position_bias, pair_mask and cu_seqlens, see :meth:`TokenMixer.forward`.
        """
        projected = self._project_memory(memory, memory_mask)
        mixed = self.token_mixer(self.norm1(x), grid=grid, key_mask=key_mask, **pairs)
        x = x + self._drop(mixed)
        if self.cross_mixer is not None:
            x = x + self._drop(self.cross_mixer(self.norm_cross(x), memory=projected))
        return x + self._drop(self.mlp(self.norm2(x)))

    def recomputed(self, *inputs: Any, **pairs: Tensor | None) -> Tensor:
        """Run :meth:`forward` with gradient checkpointing."""
        norms = [m for m in self.modules() if isinstance(m, (nn.BatchNorm1d, nn.SyncBatchNorm))]
        contexts: dict[str, Any] = {}
        # A compiled graph updates statistics once.
        if norms and not torch.compiler.is_compiling():
            contexts = dict(context_fn=lambda: (nullcontext(), _without_statistics(norms)))
        run = partial(self, **pairs)
        result: Tensor = checkpoint(run, *inputs, use_reentrant=False, **contexts)
        return result

    @torch.no_grad()
    def prefill(
        self,
        x: Tensor,
        lengths: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        """Return tokens [B, L, D] and the state after prompts, see :meth:`TokenMixer.prefill`."""
        projected = self._project_memory(memory, memory_mask)
        mixed, mixing = self.token_mixer.prefill(self.norm1(x), lengths)
        x = x + self._drop(mixed)
        if self.cross_mixer is not None:
            x = x + self._drop(self.cross_mixer(self.norm_cross(x), memory=projected))
        x = x + self._drop(self.mlp(self.norm2(x)))
        return x, BlockState(mixing, projected)

    @torch.no_grad()
    def step(self, x_t: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """Run one token x_t [B, D], see :meth:`TokenMixer.step`."""
        memory = state.memory
        # The step of the mixer overwrites the position of its state.
        position = state.position if memory is None else state.position.clone()
        mixed, mixing = self.token_mixer.step(self.norm1(x_t), state.mixing)
        x_t = x_t + self._drop(mixed)
        if self.cross_mixer is not None and memory is not None:
            x_t = x_t + self._drop(
                self.cross_mixer.step_memory(self.norm_cross(x_t), memory, position)
            )
        x_t = x_t + self._drop(self.mlp(self.norm2(x_t)))
        return x_t, state._replace(mixing=mixing)

    def select_state(self, state: BlockState, rows: Tensor, same_memory: bool) -> BlockState:
        """Return the state of the sequences rows [N]; `same_memory`: places keep their memory."""
        mixing = self.token_mixer.select_state(state.mixing, rows)
        return BlockState(mixing, state.memory if same_memory else select(state.memory, rows))

    def _project_memory(self, memory: Tensor | None, mask: Tensor | None) -> ProjectedMemory | None:
        if (memory is None) != (self.cross_mixer is None):
            raise ValueError(
                'memory must be given if and only if there is a cross_mixer, got '
                f'memory={None if memory is None else list(memory.shape)} with '
                f'cross_mixer={type(self.cross_mixer).__name__}'
            )
        if self.cross_mixer is None or memory is None:
            return None
        return self.cross_mixer.project_memory(memory, mask)

    def _drop(self, branch: Tensor) -> Tensor:
        # Calling a module takes a measurable share of a small step.
        return self.drop_path(branch) if self.training else branch


@contextmanager
def _without_statistics(norms: Sequence[Any]) -> Iterator[None]:
    """Keep running statistics, which the first pass has updated."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, values in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = values


def mixer_of_each(token_mixer: Any, num_layers: int) -> list[dict[str, Any]]:
    """Return the configs of the mixers of `num_layers` blocks: one for all, or a list of them."""
    if not isinstance(token_mixer, (list, tuple)):
        check_config('token_mixer', token_mixer)
        return [token_mixer] * num_layers
    if len(token_mixer) != num_layers:
        allowed = f'a dict for all blocks or a list with one for each of the {num_layers}'
        raise ValueError(f'token_mixer must be {allowed}, got a list of {len(token_mixer)}')
    for i, config in enumerate(token_mixer):
        check_config(f'token_mixer[{i}]', config)
    return list(token_mixer)


def kinds_of(mixers: Iterable[nn.Module]) -> str:
    return ' and '.join(dict.fromkeys(type(mixer).__name__ for mixer in mixers))


def _check_type(name: Any) -> None:
    """Refuse the name of two mixers, of which the default scope would choose one."""
    ours, theirs = MODELS.module_dict, getattr(MODELS, 'parent', MODELS).module_dict
    if isinstance(name, str) and name in ours and theirs.get(name, ours[name]) is not ours[name]:
        allowed = f'aft_mm.{name}, or mmengine.{name} for that of {theirs[name].__module__}'
        refuse('the type of a mixer', allowed, name)


def _build_cross_mixer(config: dict[str, Any]) -> TokenMixer:
    _check_type(config.get('type'))
    mixer: TokenMixer = MODELS.build(config)
    biased = mixer.position_bias() is not None and not mixer.biased_memory
    if not mixer.takes_memory or mixer.causal or biased:
        raise ValueError(
            "cross_mixer must take a memory (not with gate='none'), not be causal and have no position "
            f'bias except one over the memory, got {config}'
        )
    return mixer
