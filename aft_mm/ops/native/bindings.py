"""Calls of the C++ loops: tensors go in by address, gradients come back through autograd.

Lazy negation, missing memory and saved tensors are checked before an address is passed.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import eager
from ..conv_plan import ConvPlan, cancels, is_range_exact
from ..eager.conv import is_one_shift_exact
from ..gates import GATES
from ..geometry import crop_kernel
from ..online_softmax import composed_gradients, hide, needs_torch
from . import availability

# Tokens between the sums saved for the gradient, their numbers per channel, and the tokens of a
# row; the same as in simple.cpp.
SEGMENT = 32
SIMPLE_STATE, DECAY_STATE = 3, 7
BEFORE, AFTER, BOTH = range(3)
# Samples whose kernel gradients one thread sums, for reproducible bits.
SAMPLES = 8
OUT_OF_MEMORY, INEXACT = 1, 2
# Where the fields of `ConvArgs` are the addresses of query, key, value, mask and output.
ADDRESSES = slice(13, 28, 3)
PLAIN_TYPES = frozenset([Tensor, Parameter, type(None)])


def aft_simple(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute causal :func:`aft_mm.ops.aft_simple` in O(T·D), scaled by the largest key so far."""
    if torch.compiler.is_compiling():
        output: Tensor = _simple_node(query, key, value, key_mask, gate)
        return output
    op = _Simple(gate, _resolved(key_mask), True, SIMPLE_STATE)
    return _run(op, *_of_one_dtype(query, key, value), None).to(value.dtype)


def aft_decay(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_decay` in O(T·D), scaled by a large key of each side."""
    tokens = _of_one_dtype(query, key, value)
    if not causal:  # gradients of both sides are added in memory
        tokens = [x if x is None else x.float() for x in tokens]
    op = _Simple(gate, _resolved(key_mask), causal, DECAY_STATE)
    return _run(op, *tokens, _dense(decay.float())).to(value.dtype)


def aft_conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
    plan: ConvPlan | None = None,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_conv` in O(T·K·D) by the difference or additive form, if exact."""
    call: dict[str, Any] = dict(
        grid=grid,
        global_connectivity=global_connectivity,
        causal=causal,
        key_mask=key_mask,
        gate=gate,
    )
    weight_decides = global_connectivity and not causal
    plan = ConvPlan(weight) if plan is None else plan
    cropped = crop_kernel(weight.float(), grid)

    def is_exact(difference: bool) -> Tensor:
        if weight_decides:
            return is_range_exact(cropped, difference)
        hidden = hide(key, value, key_mask)
        return is_one_shift_exact(*hidden, cropped, global_connectivity, causal, difference)

    if torch.compiler.is_compiling():
        kernel = _exponential(cropped, global_connectivity)
        call['grid'] = list(grid)
        tensors = query, key, value, cropped, kernel, is_exact(difference=True)
        result: Tensor = _conv_node(*tensors, **call)
        return result

    def make_kernel() -> tuple[Tensor, bool] | None:
        """Return the kernel and whether it is that of the additive form."""
        if not is_exact(difference=False):
            return None
        additive = global_connectivity and bool(cancels(cropped))
        return _exponential(cropped, global_connectivity and not additive), additive

    name = 'loops', cropped.shape
    made = plan.once(name, make_kernel) if weight_decides else make_kernel()
    if made is None:
        return eager.aft_conv(query, key, value, weight, plan=plan, **call)
    kernel, additive = made
    output = _run_conv(query, key, value, cropped, kernel, additive, **call)
    if weight_decides and key_mask is None and query is not None:
        tokens = query, key, value
        repeats = plan.may_repeat(*tokens) and query.dtype == key.dtype == value.dtype
        if repeats and all(_dense(x) is x for x in tokens):
            constant = cropped.detach()
            op = _Conv(gate, None, grid, True, False, kernel, additive, constant, None)
            plan.keep_call(_RepeatedConv(op, *tokens), *tokens, grid, gate)
    return output


def aft_full_batched(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    num_heads: int | None,
    pair_mask: Tensor | None,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_full` of a bias per sample by products with shifts, if exact."""
    pairs = None if pair_mask is None else _dense(pair_mask)
    op = _Full(gate, _resolved(key_mask), pairs, num_heads, causal, position_bias.shape[-2])
    tokens = _of_one_dtype(query, key, value)
    # A loop is for one head of a sample. The gradients of a single key are exactly 0.
    if len(key) * (num_heads or 1) >= torch.get_num_threads() and key.shape[1] > 1:
        try:
            return _run(op, *tokens, _dense(position_bias.float())).to(value.dtype)
        except _InexactError:
            pass
    return op.by_eager(query, key, value, position_bias)


def _exponential(weight: Tensor, difference: bool) -> Tensor:
    kernel = (torch.expm1 if difference else torch.exp)(weight.detach())
    return kernel.flatten(1).T.contiguous()


def _run_conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    kernel: Tensor,
    additive: bool,
    *,
    key_mask: Tensor | None,
    **call: Any,
) -> Tensor:
    tokens = _of_one_dtype(query, key, value)
    constant = weight.detach()
    op = _Conv(
        key_mask=_resolved(key_mask),
        kernel=kernel,
        additive=additive,
        constant_weight=constant,
        version=_version(constant),
        **call,
    )
    return _run(op, *tokens, weight if weight.requires_grad else None).to(value.dtype)


def _of_one_dtype(*tokens: Tensor | None) -> list[Tensor | None]:
    mixed = len({x.dtype for x in tokens if x is not None}) > 1
    return [x if x is None else _dense(x.float() if mixed else x) for x in tokens]


def _dense(x: Tensor) -> Tensor:
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride()[-1] == 1 else x.contiguous()


def _resolved(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.resolve_neg()


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _strided(x: Tensor | None, reverse: bool = False) -> tuple[int, int, int]:
    """Return the fields of `Tensor` in tensors.h, with `reverse` from the last token on."""
    if x is None:
        return 0, 0, 0
    step = x.stride(1)
    if reverse:
        return _address(x) + (x.shape[1] - 1) * step * x.element_size(), x.stride(0), -step
    return _address(x), x.stride(0), step


def _address(x: Tensor | None) -> int:
    if x is None:
        return 0
    address = x.data_ptr()
    if address == 0 and x.numel():  # such as a storage that was resized to 0
        raise RuntimeError(f'a tensor {list(x.shape)} must have memory, got one without')
    return address


def _call(name: str, fields: Sequence[int], value: Tensor) -> None:
    args = struct.pack(f'={len(fields)}q', *fields)
    function = getattr(availability.load(availability.find_library()), name)
    status = function(args, ctypes.c_int64(value.dtype == torch.bfloat16))
    if status == OUT_OF_MEMORY:
        raise MemoryError(f'{name} of {list(value.shape)} could not allocate its memory')
    if status == INEXACT:
        raise _InexactError


class _InexactError(Exception):
    """Keys and biases need more than a shift of each."""


class _Simple(NamedTuple):
    """AFT-simple, causal, or AFT-decay."""

    gate: str
    key_mask: Tensor | None
    causal: bool
    state_size: int  # numbers of a state per channel

    def forward(self, save: bool, tensors: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        value, saved = tensors[2], None
        output = value.new_empty(value.shape)
        sizes = self._sizes(value.shape[1])
        if save or not self.causal:
            sizes = sizes if save else sizes[:1]
            saved = value.new_empty(len(value), sum(sizes), value.shape[2], dtype=torch.float32)
        parts = [] if saved is None else saved.split(sizes, 1)
        side = BEFORE if self.causal else BOTH
        fields = self._args(side, tensors, output, parts)
        _call('aft_simple_forward', fields, value)
        return output, saved if save else None

    def _sizes(self, tokens: int) -> list[int]:
        """Return the rows of what is saved: states per side; ratios and gaps of the sides."""
        states = math.ceil(tokens / SEGMENT) * self.state_size
        return [states] if self.causal else [states, states, tokens, tokens]

    def saved_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        batch, tokens, channels = shape
        return batch, sum(self._sizes(tokens)), channels

    def backward(
        self, grad: Tensor, saved: Tensor, wanted: Sequence[bool], tensors: Sequence[Any]
    ) -> list[Tensor | None]:
        *tokens, decay = tensors
        value, grads = tokens[2], [None if x is None else x.new_empty(x.shape) for x in tokens]
        sides = [BEFORE] if self.causal else [BEFORE, AFTER]
        parts = saved.split(self._sizes(value.shape[1]), 1)
        grad_decay = value.new_empty(len(sides), len(value), value.shape[2], dtype=torch.float32)
        for side, states_of_side, of_decay in zip(sides, parts, grad_decay, strict=False):
            kept = [states_of_side, None, *parts[2:]]
            # The second side adds to the gradients of keys and values.
            grad_query = grads[0] if side == BEFORE else None
            fields = self._args(side, tensors, grad, kept, [grad_query, *grads[1:], of_decay])
            _call('aft_simple_backward', fields, value)
        if decay is None:
            return [*grads, None]
        return [*grads, grad_decay.sum((0, 1), dtype=torch.float64).float()]

    def by_eager(
        self, query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor | None
    ) -> Tensor:
        options: dict[str, Any] = dict(causal=self.causal, key_mask=self.key_mask, gate=self.gate)
        if decay is None:
            return eager.aft_simple(query, key, value, key_function='softmax', **options)
        return eager.aft_decay(query, key, value, decay, **options)

    def _args(
        self,
        side: int,
        tensors: Sequence[Any],
        output: Tensor,
        parts: Sequence[Tensor | None],
        grads: Sequence[Tensor | None] = (None,) * 4,
    ) -> list[int]:
        *tokens, decay = tensors
        fields = [*output.shape, GATES.index(self.gate), torch.get_num_threads(), side]
        saved, after, *rows = [*parts, None, None, None, None][:4]
        *grads, grad_decay = grads
        reverse = side == AFTER
        for x in (*tokens, self.key_mask, output, *grads):
            fields += _strided(x, reverse)
        fields += [*_strided(saved), *_strided(after)]
        for x in rows:
            fields += _strided(x, reverse)
        return [*fields, _address(decay), _address(grad_decay)]


class _Conv(NamedTuple):
    """AFT-conv; `kernel` [entries, h] is made of `constant_weight` at `version`, for a form."""

    gate: str
    key_mask: Tensor | None
    grid: Sequence[int]
    global_connectivity: bool
    causal: bool
    kernel: Tensor
    additive: bool
    constant_weight: Tensor
    version: int | None

    def forward(self, save: bool, tensors: Sequence[Any]) -> tuple[Tensor, None]:
        value = tensors[2]
        output = value.new_empty(value.shape)
        _call('aft_conv_forward', self._args(tensors, output), value)
        return output, None

    def backward(
        self, grad: Tensor, saved: Tensor | None, wanted: Sequence[bool], tensors: Sequence[Any]
    ) -> list[Tensor | None]:
        query, key, value, weight = tensors
        grad_query = None if query is None else query.new_empty(query.shape)
        grad_value = value.new_empty(value.shape)
        grad_key = value.new_empty(value.shape, dtype=torch.float32)
        grad_kernel = None
        if wanted[3]:
            parts = math.ceil(len(value) / SAMPLES)
            grad_kernel = self.kernel.new_empty(parts, len(self.kernel), value.shape[2])
        grads = grad_query, grad_key, grad_value
        fields = self._args(tensors, grad, grads, grad_kernel)
        _call('aft_conv_backward', fields, value)
        grad_key = _sum_over_heads(grad_key, key.shape[2]).to(key.dtype)
        grad_weight = None
        if grad_kernel is not None:
            grad_weight = _sum_over_heads(grad_kernel.sum(0), len(weight)).T.reshape(weight.shape)
            grad_weight = grad_weight * weight.exp()
        return [grad_query, grad_key, grad_value, grad_weight]

    def by_eager(
        self, query: Tensor | None, key: Tensor, value: Tensor, weight: Tensor | None
    ) -> Tensor:
        options = self._asdict()
        for name in ('kernel', 'additive', 'constant_weight', 'version'):
            del options[name]
        if weight is None:
            weight = self.constant_weight
            if _version(weight) != self.version:
                raise RuntimeError(
                    'weight must not be modified in place before a backward pass that uses it '
                    f'again, got version {_version(weight)} instead of {self.version}'
                )
        return eager.aft_conv(query, key, value, weight, **options)

    def _args(
        self,
        tensors: Sequence[Any],
        output: Tensor,
        grads: Sequence[Tensor | None] = (None,) * 3,
        grad_kernel: Tensor | None = None,
    ) -> list[int]:
        query, key, value, *_ = tensors
        rows = (1,) * (2 - len(self.grid))  # a line is a grid of one row
        kernel_size = self.constant_weight.shape[1:]
        fields = [*value.shape, key.shape[2], *rows, *self.grid, *rows, *kernel_size]
        form = self.global_connectivity + self.additive  # that of conv.h
        fields += form, self.causal, GATES.index(self.gate)
        fields += torch.get_num_threads(), SAMPLES
        for x in (query, key, value, self.key_mask, output, *grads):
            fields += _strided(x)
        return [*fields, _address(self.kernel), _address(grad_kernel)]


class _Full(NamedTuple):
    gate: str
    key_mask: Tensor | None
    pair_mask: Tensor | None
    num_heads: int | None
    causal: bool
    targets: int

    def forward(self, save: bool, tensors: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        value, saved = tensors[2], None
        output = value.new_empty(len(value), self.targets, value.shape[2])
        if save:
            saved = value.new_empty(self.saved_shape(value.shape), dtype=torch.float32)
        fields = self._args(tensors, output, saved)
        _call('aft_full_batched_forward', fields, value)
        return output, saved

    def saved_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return shape[0], self.targets, 2, shape[2]

    def backward(
        self, grad: Tensor, saved: Tensor | None, wanted: Sequence[bool], tensors: Sequence[Any]
    ) -> list[Tensor | None]:
        *tokens, bias = tensors
        grads = [None if x is None else x.new_empty(x.shape) for x in tokens]
        grads.append(bias.new_empty(bias.shape) if wanted[3] else None)
        fields = self._args(tensors, grad, saved, grads)
        _call('aft_full_batched_backward', fields, tokens[2])
        return grads

    def by_eager(self, query: Tensor | None, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        options = self._asdict()
        del options['targets']
        return eager.aft_full_batched(query, key, value, bias, **options)

    def _args(
        self,
        tensors: Sequence[Any],
        output: Tensor,
        saved: Tensor | None,
        grads: Sequence[Tensor | None] = (None,) * 4,
    ) -> list[int]:
        *tokens, bias = tensors
        *grads, grad_bias = grads
        fields = [*tokens[2].shape, self.targets, self.num_heads or 1, self.causal]
        fields += GATES.index(self.gate), torch.get_num_threads()
        for x in (*tokens, self.key_mask, output, *grads):
            fields += _strided(x)
        fields += _address(bias), bias.stride(0), bias.stride(-3), bias.stride(-2)
        fields += _strided(self.pair_mask)
        return [*fields, _address(grad_bias), _address(saved)]


class _RepeatedConv:
    def __init__(self, op: _Conv, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._op = op  # its kernel is passed by address
        self._fields = op._args((query, key, value), value.new_empty(value.shape))
        self._pack = struct.Struct(f'={len(self._fields)}q').pack
        self._loop = availability.load(availability.find_library()).aft_conv_forward
        self._is_bfloat = ctypes.c_int64(value.dtype == torch.bfloat16)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        output = torch.empty_like(value, memory_format=torch.contiguous_format)
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, output.data_ptr()
        if addresses.count(0) > 1:  # a tensor without memory
            return None
        fields = self._fields.copy()
        fields[ADDRESSES] = addresses
        if self._loop(self._pack(*fields), self._is_bfloat) == OUT_OF_MEMORY:
            return None
        return output


def _sum_over_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-1] == heads else x.unflatten(-1, (heads, -1)).sum(-1)


def _run(op: _Simple | _Conv | _Full, *tensors: Any) -> Tensor:
    """Run an op on query, key, value and what its W depends on, None if on nothing."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Differentiable.apply(op, *tensors)
    return op.forward(False, tensors)[0]


class _Differentiable(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, op: _Simple | _Conv | _Full, *tensors: Any) -> Tensor:
        output, saved = op.forward(True, tensors)
        # The caller may write to a mask before the backward pass.
        masks = {name: getattr(op, name, None) for name in ('key_mask', 'pair_mask')}
        copies: dict[str, Any] = {k: x.clone() for k, x in masks.items() if x is not None}
        ctx.op = op._replace(**copies)
        ctx.save_for_backward(saved, *tensors)
        ctx.kinds = [None if x is None else (x.dtype, x.shape) for x in tensors]
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, *tensors = ctx.saved_tensors
        for x, kind in zip(tensors, ctx.kinds, strict=True):
            if kind is not None:
                _check_hooks(x, *kind)
        if saved is not None:
            _check_hooks(saved, torch.float32, ctx.op.saved_shape(tensors[2].shape))
        wanted = ctx.needs_input_grad[1:]
        types = map(type, (grad, saved, *tensors))
        if _needs_torch(grad) or not PLAIN_TYPES.issuperset(types):
            return None, *composed_gradients(wanted, ctx.op.by_eager, tensors, grad)
        # Hooks may return saved tensors with other strides.
        dense = [x if x is None else _dense(x) for x in (grad, *tensors)]
        saved = None if saved is None else saved.resolve_neg().contiguous()
        return None, *ctx.op.backward(dense[0], saved, wanted, dense[1:])


def _check_hooks(x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_cpu:
        raise RuntimeError(
            f'hooks must return a saved tensor as {dtype} {list(shape)} on cpu, got {x.dtype} '
            f'{list(x.shape)} on {x.device}'
        )


def _needs_torch(grad: Tensor) -> bool:
    return needs_torch(grad) or grad._is_zerotensor() or torch._C._len_torch_dispatch_stack() > 0


# Nodes of a graph of torch.compile; values are read when the graph runs.
@torch.library.custom_op('aft_mm::native_simple', mutates_args=())
def _simple_node(
    query: Tensor | None, key: Tensor, value: Tensor, key_mask: Tensor | None, gate: str
) -> Tensor:
    options: dict[str, Any] = dict(
        key_function='softmax', causal=True, key_mask=key_mask, gate=gate
    )
    return aft_simple(query, key, value, **options)


@torch.library.custom_op('aft_mm::native_conv', mutates_args=())
def _conv_node(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    kernel: Tensor,
    is_exact: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    call: dict[str, Any] = dict(
        grid=grid,
        global_connectivity=global_connectivity,
        causal=causal,
        key_mask=key_mask,
        gate=gate,
    )
    if is_exact:
        return _run_conv(query, key, value, weight, kernel, False, **call)
    return aft_conv(query, key, value, weight, **call).contiguous()


@_simple_node.register_fake
@_conv_node.register_fake
def _(query: Tensor | None, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return value.new_empty(value.shape)
