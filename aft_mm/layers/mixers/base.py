"""What every token mixer shares: projections, masks, grids, steps."""

import inspect
import logging
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.logging import print_log
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import check_choice, check_flag, check_int, check_probability, refuse
from aft_mm.ops.checks import FLOATS, GATES, check_mask

from ..grid import Grid, check_grid

__all__ = ['AFTMixer', 'ProjectedMemory', 'TokenMixer']


class ProjectedMemory(NamedTuple):
    """The keys and values [B, S, D] that a mixer makes of a memory, and the mask [B, S]."""

    key: Tensor
    value: Tensor
    key_mask: Tensor | None


class TokenMixer(nn.Module):
    """A layer that mixes tokens, ``[B, T, D] -> [B, T, D]``: projections around an op.

    A subclass calls its op in `_mix` and, if it can be causal, in `_init_state`, `_mix_step` and,
    if its state is not that of an op, in `_prefill`. When it begins to compute another function of
    the same parameters it raises `_version`, which torch keeps in every state dict: a checkpoint
    of an earlier one is refused, one that does not tell is loaded with a warning.

    Args:
        embed_dims: channels D.
        grid: sizes of the token grid: (T,) of a sequence, (H, W) of a picture, or of a volume. None
            for a mixer without learned positions and sequences of any length.
        num_prefix_tokens: class tokens P in front of the grid's, T = P + prod(grid).
        causal: sums run over t' ≤ t in raster order.
        qkv_bias: whether query, key and value projection have a bias.
        proj_drop: dropout probability of the output.

    Raises ValueError for an argument outside these ranges and TypeError for an unknown one.
    """

    takes_memory: bool = False
    # Whether position_bias() is one over a memory, so that the row of a token tells what it reads.
    biased_memory: bool = False
    takes_prefix_tokens = False
    # What init_state makes.
    state_type: Any = ops.StepState

    def __init__(
        self,
        embed_dims: int,
        grid: Sequence[int] | None = None,
        num_prefix_tokens: int = 0,
        causal: bool = False,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        **unknown: Any,
    ) -> None:
        name = type(self).__name__
        if unknown:
            raise TypeError(
                f'{name} has no argument {next(iter(unknown))!r}, only {_arguments(self)}'
            )
        check_int('embed_dims', embed_dims, 1)
        check_int('num_prefix_tokens', num_prefix_tokens, 0)
        if num_prefix_tokens and not self.takes_prefix_tokens:
            refuse('num_prefix_tokens', f'0 for {name}', num_prefix_tokens)
        check_flag('causal', causal)
        check_flag('qkv_bias', qkv_bias)
        check_probability('proj_drop', proj_drop)
        super().__init__()
        self.embed_dims = embed_dims
        self.grid = None if grid is None else check_grid(grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.causal = causal
        self.query: nn.Module | None = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.key = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.value = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop)
        self._fused: tuple[Tensor, Tensor | None, list[int]] | None = None

    @property
    def has_steps(self) -> bool:
        """Whether the class defines how to take one token at a time, if it is causal."""
        own, base = type(self), TokenMixer
        return own._init_state is not base._init_state and own._mix_step is not base._mix_step

    def fuse_projections(self) -> None:
        """Let steps project query, key and value in one product, with the present weights.

        Weights that change later are not seen, until :meth:`split_projections`; the state dict
        stays. Where a projection is no plain linear layer, or has a hook, nothing is fused.
        """
        layers = [layer for layer in (self.query, self.key, self.value) if layer is not None]
        hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        if hooks or any(type(layer) is not nn.Linear for layer in layers):
            return
        weights, biases = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
        if len({bias is None for bias in biases}) > 1:
            return
        bias = None if biases[0] is None else torch.cat(biases).detach()
        sizes = [layer.out_features for layer in layers]
        # By columns if they are so: the product of a row with them is faster then.
        columns = all(weight.t().is_contiguous() for weight in weights)
        weight = torch.cat([w.t() for w in weights], 1).t() if columns else torch.cat(weights)
        self._fused = weight.detach(), bias, sizes

    def split_projections(self) -> None:
        """Undo :meth:`fuse_projections`."""
        self._fused = None

    def forward(
        self,
        x: Tensor,
        grid: Sequence[int] | None = None,
        memory: Tensor | ProjectedMemory | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens x [B, T, D]; returns [B, T, D].

        Args:
            grid: the grid of these tokens where it is not that of the constructor.
            memory: tokens [B, S, D] that keys and values come from instead (cross-attention), or
                what :meth:`project_memory` made of them, which holds its mask.
            key_mask: bool [B, S], True = keep; padding may hold NaN and gets zero gradient.

        Raises ValueError for tokens of another shape or of no floats, if T is not P + prod(grid),
        for memory where the mixer takes none, and for a mask of another shape or type.
        """
        self._check_tokens('x', x)
        grid = self._resolve_grid(x.shape[1], grid)
        if memory is None:
            x = _hide(x, key_mask)
            source = ProjectedMemory(self.key(x), self.value(x), key_mask)
        elif isinstance(memory, Tensor):
            source = self.project_memory(memory, key_mask)
        elif key_mask is None:
            source = memory
        else:
            raise ValueError('key_mask must be None for a projected memory, which holds its own')
        query = None if self.query is None else self.query(x)
        mixed = self._mix(query, source.key, source.value, grid, source.key_mask)
        return self.proj_drop(self.proj(mixed))

    def project_memory(self, memory: Tensor, key_mask: Tensor | None = None) -> ProjectedMemory:
        """The keys and values of a memory [B, S, D], made once for many calls of `forward`.

        Raises ValueError as `forward`.
        """
        if self.causal or not self.takes_memory:
            raise ValueError(
                f'memory must be None for {type(self).__name__} with causal={self.causal}, '
                f'got {list(memory.shape)}'
            )
        self._check_tokens('memory', memory)
        memory = _hide(memory, key_mask)
        return ProjectedMemory(self.key(memory), self.value(memory), key_mask)

    @torch.no_grad()
    def step_memory(self, x_t: Tensor, memory: ProjectedMemory, position: Tensor) -> Tensor:
        """One token x_t [B, D] with index position [B] reads a projected memory, y_t [B, D].

        Token after token this is `forward` with the memory. Without gradient.
        """
        return self(x_t.unsqueeze(1), memory=memory).squeeze(1)

    @torch.no_grad()
    def init_state(self, batch_size: int) -> Any:
        """The state before the first token; its size is that of the op's, see docs/ops.md.

        Raises ValueError for a mixer that is not causal, or without steps.
        """
        if not self.has_steps:
            raise ValueError(
                f'{type(self).__name__} must have _init_state and _mix_step to take one token at a '
                'time, which drawing from a model needs'
            )
        if not self.causal:
            raise ValueError(
                f'init_state needs {type(self).__name__}(causal=True), got causal=False'
            )
        return self._init_state(batch_size)

    @torch.no_grad()
    def prefill(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
        """A whole prompt in one parallel pass: x [B, L, D] gives y [B, L, D] and the state.

        lengths [B]: the tokens of each sequence, 0 to L; what follows them in x is padding, which
        may hold NaN: it reaches neither the rows before it nor the state, and its own rows mean
        nothing. L may be shorter than the grid. Raises as `init_state` and `forward` do.
        """
        self._check_tokens('x', x)
        length, state = x.shape[1], self.init_state(len(x))
        if lengths.shape != x.shape[:1]:
            raise ValueError(f'lengths must be [{len(x)}], got {list(lengths.shape)}')
        x = _hide(x, torch.arange(length, device=x.device) < lengths[:, None])
        query = None if self.query is None else self.query(x)
        key, value = self.key(x), self.value(x)
        prompt = (query, key, value)
        if self.grid is not None and len(self.grid) > 1:
            # A raster has no shorter form; the op is causal, so what fills it up changes nothing.
            rest = self.num_prefix_tokens + prod(self.grid) - length
            prompt = tuple(None if p is None else F.pad(p, (0, 0, 0, rest)) for p in prompt)
        mixed = self._mix(*prompt, self._resolve_grid(prompt[1].shape[1]), None)[:, :length]
        return self.proj_drop(self.proj(mixed)), self._prefill(state, key, value, lengths)

    @torch.no_grad()
    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token: x_t [B, D] and the state so far give y_t [B, D] and the next state.

        Token after token this is the causal `forward`. Without gradient; `state` is used up. Raises
        ValueError for the state of another kind of mixer, or of another batch.
        """
        self._check_step(x_t, state)
        mixed, state = self._mix_step(*self._project_token(x_t), state)
        return self.proj_drop(self.proj(mixed)), state

    def _project_token(self, x_t: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        if self._fused is None:
            query = None if self.query is None else self.query(x_t)
            return query, self.key(x_t), self.value(x_t)
        weight, bias, sizes = self._fused
        *query, key, value = F.linear(x_t, weight, bias).split(sizes, -1)
        return query[0] if query else None, key, value

    @torch.no_grad()
    def select_state(self, state: Any, rows: Tensor) -> Any:
        """The state of the sequences rows [N] of its batch, in this order, such as those that a
        beam search goes on with; `state` stays as it is.
        """
        return ops.select(state, rows)

    def _check_step(self, x_t: Tensor, state: Any) -> None:
        if not isinstance(state, self.state_type):
            what = f'what init_state, prefill or a step of this {type(self).__name__} gave'
            refuse('state', what, state)
        self._check_tokens('x_t', x_t, dims='B')
        if len(x_t) != len(state.position):
            refuse('x_t', f'[{len(state.position)}, {self.embed_dims}] as the state', x_t)

    def _check_tokens(self, name: str, x: Tensor, dims: str = 'B, T') -> None:
        floats = isinstance(x, Tensor) and x.dtype in FLOATS
        if not floats or x.dim() != dims.count(',') + 2 or x.shape[-1] != self.embed_dims:
            refuse(name, f'a tensor of floats [{dims}, {self.embed_dims}]', x)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args) -> None:
        if self._version > 1 and any(name.startswith(prefix) for name in state_dict):
            self._check_version(local_metadata.get('version'), prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _check_version(self, saved: int | None, prefix: str) -> None:
        what = f'{prefix.rstrip(".") or "the mixer"} of the checkpoint'
        name = type(self).__name__
        if saved is None:
            print_log(
                f'{what} does not tell its version: if aft_mm 0.1 saved it, its {name} computed '
                'another function of these weights',
                'current',
                logging.WARNING,
            )
        elif saved < self._version:
            raise ValueError(
                f'{what} was saved by aft_mm 0.1, whose {name} computed another function of the '
                'same weights: use it there, or train it anew'
            )

    def position_bias(self) -> Tensor | None:
        """The bias w for pictures, ``[1, T, T]`` or ``[h, *kernel]``; None where there is none."""
        return None

    def _mix(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        grid: Grid,
        key_mask: Tensor | None,
    ) -> Tensor:
        raise NotImplementedError

    def _init_state(self, batch_size: int) -> Any:
        raise NotImplementedError

    def _prefill(self, state: Any, key: Tensor, value: Tensor, lengths: Tensor) -> Any:
        return ops.prefill(state, key, value, lengths)

    def _mix_step(
        self, query: Tensor | None, key: Tensor, value: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        raise NotImplementedError

    @property
    def _device(self) -> torch.device:
        return self.proj.weight.device

    def _resolve_grid(self, num_tokens: int, grid: Sequence[int] | None = None) -> Grid:
        """The grid of `num_tokens` tokens: as given, else that of the constructor.

        A sequence may have another length than the constructor's grid (T,).
        """
        length = num_tokens - self.num_prefix_tokens
        if grid is None:
            grid = (length,) if self.grid is None or len(self.grid) == 1 else self.grid
        check_grid(grid)
        if prod(grid) != length:
            raise ValueError(
                f'grid {tuple(grid)} with {self.num_prefix_tokens} prefix tokens does not hold '
                f'{num_tokens} tokens'
            )
        return tuple(grid)


class AFTMixer(TokenMixer):
    """A token mixer with a gate, ``y = proj(g(query(x)) ⊙ mix(key(x), value(x)))``.

    Args:
        embed_dims: channels D.
        gate: g, 'sigmoid', 'relu', or 'none', which leaves out the query projection too.
        others: see :class:`TokenMixer`.
    """

    def __init__(self, embed_dims: int, *, gate: str = 'sigmoid', **kwargs: Any) -> None:
        check_choice('gate', gate, GATES)
        super().__init__(embed_dims, **kwargs)
        self.gate = gate
        if gate == 'none':
            self.query = None

    @property
    def _state_options(self) -> dict[str, Any]:
        """Device and type of a state: sums are float32, but those of a float64 model."""
        weight = self.proj.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return dict(device=weight.device, dtype=dtype)


def _arguments(mixer: TokenMixer) -> str:
    classes = (cls for cls in type(mixer).__mro__ if issubclass(cls, TokenMixer))
    parameters = (p for cls in classes for p in inspect.signature(cls.__init__).parameters.values())
    names = dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    return ', '.join(name for name in names if name != 'self')


def _hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x with 0 for hidden tokens: 0 · NaN would reach the gradient of the projections."""
    if key_mask is None:
        return x
    check_mask(key_mask, x)
    return x.masked_fill(~key_mask.unsqueeze(-1), 0)
