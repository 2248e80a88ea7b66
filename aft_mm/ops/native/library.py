"""The ops that have a loop in C++: how tensors get there and gradients come back."""

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import eager
from ..eager import decisions
from ..eager.convolution import crop_kernel, difference_fits, weights_decide
from ..eager.tokens import hide
from . import support

GATES = ('none', 'sigmoid', 'relu')
# Tokens between the sums that causal AFT-simple keeps for its gradient; simple.cpp knows it, too.
SEGMENT = 32
# Samples whose gradients of a kernel are summed by one thread: whatever the number of threads, so
# that a run repeats to the bit.
SAMPLES = 8


def _strided(x: Tensor | None) -> tuple[int, int, int]:
    """`Tensor` of tokens.h."""
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1))


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _dense(x: Tensor) -> Tensor:
    """x, with its channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(name: str, numbers: Sequence[int], value: Tensor) -> None:
    """Call a function of the library with a `Call` of its .cpp: sizes and addresses, in order."""
    call = struct.pack(f'={len(numbers)}q', *numbers)
    function = getattr(support.load(support.find_library()), name)
    function(call, ctypes.c_int64(value.dtype == torch.bfloat16))


def aft_simple(query, key, value, *, key_function, causal, key_mask, gate) -> Tensor:
    """O(T·D): sums that carry the largest key so far, for any finite keys."""
    tokens = _of_one_type(query, key, value)
    return _run(_Simple(gate, key_mask), *tokens).to(value.dtype)


def aft_conv(
    query, key, value, weight, *, grid: Sequence[int], global_connectivity, causal, key_mask, gate
) -> Tensor:
    """O(T·K·D): the difference form, and those of eager where it is not exact to tolerance."""
    seen = global_connectivity, causal

    cropped = crop_kernel(weight.float(), grid)

    def prepare() -> Tensor | None:
        shown, terms = (key, value) if weights_decide(*seen) else hide(key, value, key_mask)
        if not difference_fits(shown, terms, cropped, *seen):
            return None
        kernel = (torch.expm1 if global_connectivity else torch.exp)(cropped.detach())
        return kernel.flatten(1).T.contiguous()

    if weights_decide(*seen):  # once of a constant
        kernel = decisions.derived(weight, ('loops', *grid), prepare)
    else:
        kernel = prepare()
    if kernel is None:
        tensors, shared = (query, key, value, weight), dict(key_mask=key_mask, gate=gate)
        return eager.aft_conv(
            *tensors, grid=grid, global_connectivity=global_connectivity, causal=causal, **shared
        )
    tokens = _of_one_type(query, key, value)
    op = _Conv(gate, key_mask, grid, *seen, kernel, cropped.detach())
    differentiated = cropped if cropped.requires_grad else None
    return _run(op, *tokens, differentiated).to(value.dtype)


def _of_one_type(*tokens: Tensor | None) -> list[Tensor | None]:
    """Query, key and value, in float32 if their types differ: no key is rounded."""
    mixed = len({x.dtype for x in tokens if x is not None}) > 1
    return [x if x is None else _dense(x.float() if mixed else x) for x in tokens]


class _Simple(NamedTuple):
    """Causal AFT-simple of query, key and value."""

    gate: str
    key_mask: Tensor | None

    def forward(self, save: bool, query, key, value) -> tuple[Tensor, Tensor | None]:
        output = value.new_empty(value.shape)
        kept = None
        if save:
            batch, tokens, channels = value.shape
            segments = math.ceil(tokens / SEGMENT)
            kept = value.new_empty(batch, segments, 3, channels, dtype=torch.float32)
        _call('aft_simple_forward', self._describe(query, key, value, output, kept), value)
        return output, kept

    def backward(self, gradient, kept, wanted, query, key, value) -> list[Tensor | None]:
        gradients = [None if x is None else x.new_empty(x.shape) for x in (query, key, value)]
        call = self._describe(query, key, value, gradient, kept, gradients)
        _call('aft_simple_backward', call, value)
        return gradients

    def by_eager(self, query, key, value) -> Tensor:
        options = dict(key_function='softmax', causal=True)
        return eager.aft_simple(query, key, value, **options, **self._asdict())

    def _describe(self, query, key, value, output, kept, gradients=(None,) * 3) -> list[int]:
        call = [*value.shape, GATES.index(self.gate), torch.get_num_threads()]
        for x in (query, key, value, self.key_mask, output, *gradients):
            call += _strided(x)
        return [*call, _address(kept)]


class _Conv(NamedTuple):
    """AFT-conv of query, key, value and, where it is differentiated, weight [h, *K].

    Of `constant`, the weight without a gradient, `kernel` [entries, h] is made.
    """

    gate: str
    key_mask: Tensor | None
    grid: Sequence[int]
    global_connectivity: bool
    causal: bool
    kernel: Tensor
    constant: Tensor

    def forward(self, save: bool, query, key, value, weight) -> tuple[Tensor, None]:
        output = value.new_empty(value.shape)
        _call('aft_conv_forward', self._describe(query, key, value, output), value)
        return output, None

    def backward(self, gradient, kept, wanted, query, key, value, weight) -> list[Tensor | None]:
        by_query = None if query is None else query.new_empty(query.shape)
        by_value = value.new_empty(value.shape)
        by_key = value.new_empty(value.shape, dtype=torch.float32)
        by_kernel = None
        if wanted[3]:
            parts = math.ceil(len(value) / SAMPLES)
            by_kernel = self.kernel.new_empty(parts, len(self.kernel), value.shape[2])
        gradients = by_query, by_key, by_value
        call = self._describe(query, key, value, gradient, gradients, by_kernel)
        _call('aft_conv_backward', call, value)
        by_key = _per_head(by_key, key.shape[2]).to(key.dtype)
        if by_kernel is not None:
            by_kernel = _per_head(by_kernel.sum(0), len(weight)).T.reshape(weight.shape)
            by_kernel = by_kernel * weight.exp()
        return [by_query, by_key, by_value, by_kernel]

    def by_eager(self, query, key, value, weight) -> Tensor:
        options = self._asdict()
        del options['kernel'], options['constant']
        weight = self.constant if weight is None else weight
        return eager.aft_conv(query, key, value, weight, **options)

    def _describe(
        self, query, key, value, output, gradients=(None,) * 3, by_kernel=None
    ) -> list[int]:
        rows = (1,) * (2 - len(self.grid))  # a line is a map of one row
        call = [*value.shape, key.shape[2], *rows, *self.grid, *rows, *self.constant.shape[1:]]
        call += self.global_connectivity, self.causal, GATES.index(self.gate)
        call += torch.get_num_threads(), SAMPLES
        for x in (query, key, value, self.key_mask, output, *gradients):
            call += _strided(x)
        return [*call, _address(self.kernel), _address(by_kernel)]


def _per_head(x: Tensor, heads: int) -> Tensor:
    """The sums over the channels of each head."""
    return x if x.shape[-1] == heads else x.unflatten(-1, (heads, -1)).sum(-1)


def _run(op: _Simple | _Conv, *tensors: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Differentiated.apply(op, *tensors)
    return op.forward(False, *tensors)[0]


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: _Simple | _Conv, *tensors: Tensor | None) -> Tensor:
        output, kept = op.forward(True, *tensors)
        if op.key_mask is not None:  # which may be another one's by then
            op = op._replace(key_mask=op.key_mask.clone())
        ctx.op = op
        ctx.save_for_backward(kept, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        # One that is to be differentiated, too, or stands for several.
        looks = torch.is_grad_enabled() or forward_ad._current_level >= 0
        if looks or not torch._C._has_storage(gradient):
            return None, *_gradients_by_eager(ctx.op, gradient, wanted, tensors)
        # Who packs what is saved may give it back with other strides.
        dense = [x if x is None else _dense(x) for x in (gradient, *tensors)]
        kept = None if kept is None else kept.contiguous()
        return None, *ctx.op.backward(dense[0], kept, wanted, *dense[1:])


def _gradients_by_eager(
    op: _Simple | _Conv, gradient: Tensor, wanted: Sequence[bool], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    again = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast('cpu', enabled=False):
        output = op.by_eager(*tensors)
        needed = [x for x, need in zip(tensors, wanted, strict=True) if need]
        found = iter(torch.autograd.grad(output, needed, gradient, create_graph=again))
    return [next(found) if need else None for need in wanted]
