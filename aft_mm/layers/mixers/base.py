from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import check_config, check_flag, check_int, check_probability, refuse
from aft_mm.errors import unknown_argument
from aft_mm.ops.checks import FLOATS, check_dense, check_lengths, check_mask
from aft_mm.ops.gates import Gate, check_gate
from aft_mm.registry import MODELS

from ..grid import Grid, check_grid
from ..projections import (
    FUSED_DEVICES,
    FusedLinear,
    ProjectedMemory,
    apply_fused,
    argument_names,
    dropout,
    fuse_linear,
)
from ..resetting import Resettable


class BiasedState(NamedTuple):
    """State of an op between steps, and the position biases of its steps, computed once."""

    mixing: Any
    bias: tuple[Tensor, ...]

    @property
    def position(self) -> Tensor:
        """Index of the next token of each sequence, [B]."""
        position: Tensor = self.mixing.position
        return position


#: Arguments of each mixer next to x, and those of a mixer with `takes_pairs`.
TAKEN, PAIRS = ('grid', 'memory', 'key_mask', 'cu_seqlens'), ('position_bias', 'pair_mask')


def check_tokens(name: str, x: Tensor, *shape: str | int) -> None:
    """Check for a dense float tensor of this shape, such as ('B', 'T', 192)."""
    if isinstance(x, Tensor):
        check_dense(name, x)
    floats = isinstance(x, Tensor) and x.dtype in FLOATS
    if not floats or x.dim() != len(shape) or x.shape[-1] != shape[-1]:
        is_image = floats and len(shape) == 3 and x.dim() == 4
        hint = f', of an image {name}.flatten(2).mT' * is_image
        refuse(name, f'a tensor of floats [{", ".join(map(str, shape))}]{hint}', x)


def hide_tokens(x: Tensor, key_mask: Tensor) -> Tensor:
    """Set hidden tokens of x [B, T, D] to 0, as 0 · NaN would reach gradients."""
    check_mask(key_mask, x)
    return x.masked_fill(~key_mask.unsqueeze(-1), 0)


def query_key_value(parts: Sequence[Tensor]) -> tuple[Any, Tensor, Tensor]:
    """Return the outputs of the three projections, None for the query if there are two."""
    *query, key, value = parts
    return (query[0] if query else None), key, value


class TokenMixer(Resettable):
    """Base class of token mixers, ``[B, T, D] -> [B, T, D]``: projections around an op.

    A subclass implements :meth:`_mix`; for steps also :meth:`_init_state`, :meth:`_mix_step` and,
    if the state is no :class:`aft_mm.ops.StepState` or :class:`BiasedState`, :meth:`_prefill`.

    Args:
        embed_dims: Channels D.
        grid: (T,) of a sequence, (H, W) of an image, or 3 sizes; None without learned positions.
        num_prefix_tokens: Class tokens P in front of the grid, T = P + prod(grid).
        causal: Token t only sees tokens t' ≤ t, in raster order.
        qkv_bias: Whether the query, key and value projections have a bias.
        proj_drop: Dropout probability of the output.
    """

    __call__: Callable[..., Tensor]
    #: Arguments of a small mixer with embed_dims=12, for the tests.
    example: ClassVar[dict[str, Any]] = {}
    #: Whether the weights of the visible tokens sum to one.
    normalized: ClassVar[bool] = True
    #: Whether the mixer accepts causal=True.
    can_be_causal: ClassVar[bool] = True
    #: Whether keys and values can come from a memory.
    takes_memory: bool = False
    #: Whether :meth:`position_bias` is a bias [1, T, S] over a memory.
    biased_memory: bool = False
    #: Whether :meth:`forward` takes a `position_bias` and a `pair_mask` of its tokens.
    takes_pairs: ClassVar[bool] = False
    #: Whether weights depend on the number of tokens, so that packed sequences are not padded.
    depends_on_length: bool = False
    #: Whether class tokens may precede the grid.
    takes_prefix_tokens: ClassVar[bool] = False
    #: The type that :meth:`_init_state` returns. A new state type is a NamedTuple with a
    #: ``position`` [B] (int64, the index of the next token); its tensors, also nested, have the
    #: batch as first axis. A field that Python counts rules out CUDA graphs.
    state_type: ClassVar[Any] = ops.StepState

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
            raise unknown_argument(name, next(iter(unknown)), argument_names(self, TokenMixer))
        check_int('embed_dims', embed_dims, 1)
        check_int('num_prefix_tokens', num_prefix_tokens, 0)
        if num_prefix_tokens and not self.takes_prefix_tokens:
            refuse('num_prefix_tokens', f'0 for {name}', num_prefix_tokens)
        check_flag('causal', causal)
        if causal and not self.can_be_causal:
            refuse('causal', f'False for {name}', causal)
        check_flag('qkv_bias', qkv_bias)
        check_probability('proj_drop', proj_drop)
        super().__init__()
        self.embed_dims = embed_dims
        self.grid = None if grid is None else check_grid(grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.causal = causal
        self.query: nn.Module | None = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.key: nn.Module = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.value: nn.Module = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = dropout(proj_drop)
        self._fused: FusedLinear | None = None

    def forward(
        self,
        x: Tensor,
        grid: Sequence[int] | None = None,
        memory: Tensor | ProjectedMemory | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **pairs: Tensor | None,
    ) -> Tensor:
        """Mix the tokens x [B, T, D].

        Args:
            grid: Grid of these tokens, if it is not the constructor's.
            memory: Tokens [B, S, D] of keys and values (cross-attention), or from
                :meth:`project_memory`.
            key_mask: bool [B, S], True = keep. Hidden tokens may hold NaN and get a gradient of 0.
            cu_seqlens: int [N + 1]: x [1, T, D] holds N sequences, see :mod:`aft_mm.ops`. Only
                without a grid of 2 or more dimensions, prefix tokens, memory and pairs.
            **pairs: position_bias and pair_mask for a mixer with :attr:`takes_pairs`.
        """
        check_tokens('x', x, 'B', 'T', self.embed_dims)
        taken = (*TAKEN, *PAIRS) if self.takes_pairs else TAKEN
        for name in pairs:
            if name not in taken:
                allowed = f'left out for {type(self).__name__}, which takes {", ".join(taken)}'
                refuse(name, allowed, pairs[name])
        if cu_seqlens is not None:
            return self._mix_packed(x, grid, memory, key_mask, cu_seqlens, pairs)
        grid = self._resolve_grid(x.shape[1], grid)
        if memory is None:
            x = x if key_mask is None else hide_tokens(x, key_mask)
            mixed = self._project_and_mix(x, grid, key_mask, **pairs)
        else:
            if isinstance(memory, Tensor):
                memory = self.project_memory(memory, key_mask)
            elif key_mask is not None:
                raise ValueError('key_mask must be None for a projected memory, which has its own')
            query: Any = None if self.query is None else self._apply_projection(self.query, x)
            mixed = self._mix(query, memory.key, memory.value, grid, memory.key_mask, **pairs)
        output: Tensor = self.proj_drop(self._project_output(mixed))
        return output

    def _mix_packed(
        self,
        x: Tensor,
        grid: Sequence[int] | None,
        memory: Tensor | ProjectedMemory | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor,
        pairs: dict[str, Tensor | None],
    ) -> Tensor:
        given = dict(grid=self.grid if grid is None else grid, memory=memory, **pairs)
        if given['grid'] is not None and len(given['grid']) == 1:
            del given['grid']
        for name, value in given.items():
            if value is not None:
                refuse(name, 'None, or 1-d for a grid, with cu_seqlens', value)
        if self.num_prefix_tokens:
            refuse('num_prefix_tokens', '0 with cu_seqlens', self.num_prefix_tokens)
        x = x if key_mask is None else hide_tokens(x, key_mask)
        query, key, value = self._project_all(x)

        def mix(query: Any, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
            return self._mix(query, key, value, self._resolve_grid(key.shape[1]), key_mask)

        pads = not self.depends_on_length
        mixed = ops.mix_packed(mix, query, key, value, cu_seqlens, key_mask, self.causal, pads)
        output: Tensor = self.proj_drop(self._project_output(mixed))
        return output

    def project_memory(self, memory: Tensor, key_mask: Tensor | None = None) -> ProjectedMemory:
        """Project a memory [B, S, D] once, for many calls of :meth:`forward`."""
        if self.causal or not self.takes_memory:
            raise ValueError(
                f'memory must be None for {type(self).__name__} with causal={self.causal}, '
                f'got {list(memory.shape)}'
            )
        check_tokens('memory', memory, 'B', 'S', self.embed_dims)
        if memory.shape[1] == 0:
            raise ValueError('memory must have 1 or more tokens, got 0')
        memory = memory if key_mask is None else hide_tokens(memory, key_mask)
        return ProjectedMemory(self.key(memory), self.value(memory), key_mask)

    @torch.no_grad()
    def step_memory(self, x_t: Tensor, memory: ProjectedMemory, position: Tensor) -> Tensor:
        """Return :meth:`forward` with a memory for one token x_t [B, D] at index position [B]."""
        return self(x_t.unsqueeze(1), memory=memory).squeeze(1)

    @property
    def has_steps(self) -> bool:
        """Whether the class implements steps, which sampling needs."""
        cls, base = type(self), TokenMixer
        return cls._init_state is not base._init_state and cls._mix_step is not base._mix_step

    @torch.no_grad()
    def init_state(self, batch_size: int) -> Any:
        """Return the state before the first token.

        Raises:
            ValueError: The mixer is not causal, or implements no steps.
        """
        if not self.has_steps:
            raise ValueError(
                f'{type(self).__name__} must have _init_state and _mix_step to take one token at a '
                'time, which sampling from a model needs'
            )
        if not self.causal:
            raise ValueError(f'causal must be True for steps of {type(self).__name__}, got False')
        return self._init_state(batch_size)

    @torch.no_grad()
    def prefill(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
        """Mix whole prompts in one parallel pass, without gradient.

        Args:
            x: Prompts [B, L, D]; L may be shorter than the grid.
            lengths: Tokens of each prompt [B], 0 to L; the rest is padding, which may hold NaN.

        Returns:
            Mixed tokens [B, L, D], arbitrary at padding, and the state after the prompts.
        """
        check_tokens('x', x, 'B', 'T', self.embed_dims)
        length, state = x.shape[1], self.init_state(len(x))
        check_lengths(lengths, state.position, length)
        x = hide_tokens(x, torch.arange(length, device=x.device) < lengths[:, None])
        query, key, value = query_key_value([layer(x) for layer in self._projections])
        prompt: list[Any] = [query, key, value]
        if self.grid is not None and len(self.grid) > 1:
            # The op needs the whole raster.
            rest = self.num_prefix_tokens + prod(self.grid) - length
            if rest < 0:
                raise ValueError(f'x must have at most {length + rest} tokens, got {length}')
            prompt = [None if p is None else F.pad(p, (0, 0, 0, rest)) for p in prompt]
        grid = self._resolve_grid(prompt[1].shape[1])
        mixed = self._mix(prompt[0], prompt[1], prompt[2], grid, None)[:, :length]
        return self.proj_drop(self.proj(mixed)), self._prefill(state, key, value, lengths)

    @torch.no_grad()
    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Mix one token without gradient; a loop of steps equals the causal :meth:`forward`.

        Args:
            x_t: Next token of each sequence [B, D].
            state: From :meth:`init_state`, :meth:`prefill` or the last step; it is overwritten.

        Returns:
            Mixed token [B, D] and the next state.
        """
        self._check_step(x_t, state)
        fused = self._fused  # once, as another thread may split it
        if fused is None:
            parts: Sequence[Tensor] = [layer(x_t) for layer in self._projections]
        else:
            parts = apply_fused(fused, x_t)
        mixed, state = self._mix_step(*query_key_value(parts), state)
        return self.proj_drop(self.proj(mixed)), state

    @torch.no_grad()
    def select_state(self, state: Any, rows: Tensor) -> Any:
        """Return a copy of the state for the sequences rows [N], int64 or int32."""
        if (
            not isinstance(rows, Tensor)
            or rows.dtype not in (torch.int64, torch.int32)
            or rows.dim() != 1
        ):
            refuse('rows', 'an int64 or int32 tensor [N] of sequences', rows)
        if isinstance(state, BiasedState):
            return state._replace(mixing=ops.select(state.mixing, rows))
        return ops.select(state, rows)

    def fuse_projections(self) -> None:
        """Let steps compute query, key and value in one product of copied weights.

        Later changes of the weights are ignored until :meth:`split_projections`.
        """
        with torch.no_grad():
            self._fused = fuse_linear(self._projections)

    def split_projections(self) -> None:
        """Undo :meth:`fuse_projections`."""
        self._fused = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> 'TokenMixer':
        # The fused weights follow to another dtype or device.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        fused = self._fused
        if fused is not None:
            with torch.no_grad():
                bias = None if fused.bias is None else fn(fused.bias)
                self._fused = fused._replace(weight=fn(fused.weight), bias=bias)
        return self

    def position_bias(self) -> Tensor | None:
        """Return the position bias w for plots, ``[1, T, T]`` or ``[h, *kernel]``, or None."""
        return None

    def _project_and_mix(
        self, x: Tensor, grid: Grid, key_mask: Tensor | None, **pairs: Tensor | None
    ) -> Tensor:
        """Return what `proj` reads for tokens x [B, T, D] that are their own memory."""
        query, key, value = self._project_all(x)
        return self._mix(query, key, value, grid, key_mask, **pairs)

    @property
    def _projections(self) -> list[nn.Module]:
        """The layers of query, if there is one, key and value."""
        return [layer for layer in (self.query, self.key, self.value) if layer is not None]

    def _project_all(self, x: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return query, None without its layer, key and value of tokens x [B, T, D].

        One product reads x once. With gradients, its backward pass would copy those of the outputs.
        """
        if x.device.type in FUSED_DEVICES and not torch.is_grad_enabled():
            fused = fuse_linear(self._projections)
            if fused is not None:
                return query_key_value(self._apply_projection(fused, x).split(fused.sizes, -1))
        return query_key_value([self._apply_projection(layer, x) for layer in self._projections])

    def _apply_projection(self, layer: nn.Module | FusedLinear, x: Tensor) -> Tensor:
        """Return the query, key or value of tokens x [B, T, D], or all of them side by side."""
        if isinstance(layer, FusedLinear):
            return F.linear(x, layer.weight, layer.bias)
        projected: Tensor = layer(x)
        return projected

    def _project_output(self, mixed: Tensor) -> Tensor:
        output: Tensor = self.proj(mixed)
        return output

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        """Mix projected tokens.

        Args:
            query: [B, T, D]; :class:`AFTMixer` also takes None, if ``self.query`` is None.
            key: [B, S, D]. S = T without a memory.
            value: [B, S, D].
            grid: Grid of the T tokens without prefix tokens.
            key_mask: bool [B, S], True = keep. A token that sees none gets 0.
        """
        raise NotImplementedError

    def _init_state(self, batch_size: int) -> Any:
        """Return an empty `state_type` on the device of the weights."""
        raise NotImplementedError

    def _prefill(self, state: Any, key: Tensor, value: Tensor, lengths: Tensor) -> Any:
        """Return the state after lengths[b] tokens of each sequence b.

        Args:
            key: [B, L, D], padding from lengths[b] on.
            value: [B, L, D].
            lengths: [B], 0 to L.
        """
        if isinstance(state, BiasedState):
            return state._replace(mixing=ops.prefill(state.mixing, key, value, lengths))
        return ops.prefill(state, key, value, lengths)

    def _mix_step(
        self, query: Tensor, key: Tensor, value: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """Mix one token [B, D]; return it and the next state. `state` may be overwritten."""
        raise NotImplementedError

    def _reference(self) -> Tensor:
        """Return a tensor with the device and dtype of the output layer, whatever replaces it."""
        for tensor in (*self.proj.parameters(), *self.parameters(), *self.buffers()):
            if tensor.is_floating_point():
                return tensor
        return torch.empty(0)  # quantized layers run on a CPU and return float32

    @property
    def _state_options(self) -> dict[str, Any]:
        """Device and dtype of a state: float32, or float64 for a float64 model."""
        reference = self._reference()
        dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
        return dict(device=reference.device, dtype=dtype)

    @property
    def _device(self) -> torch.device:
        return self._reference().device

    def _required_grid(self, purpose: str = '') -> Grid:
        if self.grid is None:
            raise ValueError(f'grid must be given for {type(self).__name__}{purpose}, got None')
        return self.grid

    def _resolve_grid(self, num_tokens: int, grid: Sequence[int] | None = None) -> Grid:
        length = num_tokens - self.num_prefix_tokens
        if grid is not None:
            ops.checks.check_grid(grid)
        elif self.grid is None or len(self.grid) == 1:
            grid = (length,)
        else:
            grid = self.grid
        if length < 1:
            after = f' after {self.num_prefix_tokens} prefix tokens' * (self.num_prefix_tokens > 0)
            raise ValueError(f'x must have 1 or more tokens{after}, got {max(length, 0)}')
        if prod(grid) != length:
            raise ValueError(
                f'grid must hold {num_tokens} tokens with {self.num_prefix_tokens} prefix tokens, '
                f'got {tuple(grid)}'
            )
        return tuple(grid)

    def _check_step(self, x_t: Tensor, state: Any) -> None:
        if not isinstance(state, self.state_type):
            allowed = f'from init_state, prefill or step of this {type(self).__name__}'
            refuse('state', allowed, state)
        check_tokens('x_t', x_t, 'B', self.embed_dims)
        if len(x_t) != len(state.position):
            refuse('x_t', f'[{len(state.position)}, {self.embed_dims}] as the state', x_t)


class AFTMixer(TokenMixer):
    """Base class of mixers with a gate, ``y = proj(g(query(x)) ⊙ mix(key(x), value(x)))``.

    Args:
        gate: g, a name, module or function (:mod:`aft_mm.ops`), or the config of a module, such as
            ``dict(type='torch.nn.PReLU')``. 'none' also leaves out the query projection.
    """

    def __init__(
        self, embed_dims: int, *, gate: Gate | dict[str, Any] = 'sigmoid', **kwargs: Any
    ) -> None:
        if isinstance(gate, dict):
            check_config('gate', gate)
        built: Gate = MODELS.build(gate) if isinstance(gate, dict) else gate
        check_gate(built)
        super().__init__(embed_dims, **kwargs)
        self.gate = built
        if gate == 'none':
            self.query = None


class OpMixer(AFTMixer):
    """Base class of mixers that call one op of :mod:`aft_mm.ops`, and its steps."""

    #: Name of the op and, with suffixes, of its steps.
    op: ClassVar[str]

    def _op_options(self, grid: Grid | None) -> dict[str, Any]:
        """Return the options of the op and its steps for tokens on `grid`."""
        raise NotImplementedError

    def _op_bias(self, grid: Grid | None = None) -> Sequence[Tensor | None]:
        """Return the position bias of the op for tokens on `grid`."""
        return ()

    def _mix(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        shared = dict(causal=self.causal, key_mask=key_mask, gate=self.gate)
        tensors = query, key, value, *self._op_bias(grid)
        op: Callable[..., Tensor] = getattr(ops, self.op)
        return op(*tensors, **self._op_options(grid), **shared)

    def _init_state(self, batch_size: int) -> Any:
        options = {**self._op_options(self.grid), **self._state_options}
        return getattr(ops, f'{self.op}_init_state')(batch_size, self.embed_dims, **options)

    def _mix_step(
        self, query: Tensor | None, key: Tensor, value: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        tensors, options = (query, key, value, *self._op_bias()), self._op_options(self.grid)
        step: Callable[..., tuple[Tensor, Any]] = getattr(ops, f'{self.op}_step')
        return step(state, *tensors, **options, gate=self.gate)
