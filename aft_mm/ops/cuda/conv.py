"""AFT-conv by the kernels of conv_small.cu and conv_any.cu.

They read tokens channel-major, the numbers of neighbouring tokens of a channel next to each other,
as ``torch.mm(weight, x.t())`` writes them: [B, T, D] with strides (T, 1, B·T). Tensors in another
order are copied. The output has the order of the value, a gradient that of its input. Without a
value, the key is [B, T, C], query, key and value side by side, and so is its gradient.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry import crop_kernel, split_joined
from ..kernel_op import differentiated, register
from . import nvrtc
from .forms import Form, form_of, near

POINTERS = 'weight table least units sums targets parts extra flags scratch'.split()
# Blocks of the exact kernels, and the numbers that they may keep.
EXACT_BLOCKS, EXACT_NUMBERS = 1024, 2**24
# Warps that a gradient of w is spread over, before a sum of their parts.
WEIGHT_WARPS = 3072


class Tokens(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p), ('channel', ctypes.c_int64), ('batch', ctypes.c_int64)]


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, Tokens) for name in 'query key value grad out grad_key grad_value'.split()),
        ('mask', ctypes.c_void_p),
        ('mask_batch', ctypes.c_int64),
        ('mask_token', ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int) for name in 'batch channels share splits flagged'.split()),
    ]


def is_channel_major(x: Tensor) -> bool:
    return x.stride(1) == 1 or x.shape[1] == 1


def _channel_major(x: Tensor) -> Tensor:
    """Return tokens [B, T, C] with neighbouring tokens next to each other."""
    return x if is_channel_major(x) else x.movedim(2, 0).contiguous().movedim(0, 2)


def empty_like(x: Tensor) -> Tensor:
    """Return an empty tensor that is channel-major if the tokens x are, else contiguous."""
    if x.dim() != 3 or not is_channel_major(x):
        return x.new_empty(x.shape)
    batch, tokens, channels = x.shape
    return x.new_empty(channels, batch, tokens).movedim(0, 2)


def _tokens(x: Tensor | None) -> Tokens:
    return Tokens() if x is None else Tokens(x.data_ptr(), x.stride(2), x.stride(0))


def _is_even(x: Tensor | None) -> bool:
    return x is None or not (x.data_ptr() % (2 * x.itemsize) or x.stride(0) % 2 or x.stride(2) % 2)


class _Call:
    """The launches of a call, and the memory that they share."""

    def __init__(
        self,
        gradient: Tensor | None,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        key_mask: Tensor | None,
        grid: Sequence[int],
        gate: str,
        global_connectivity: bool,
        causal: bool,
    ) -> None:
        names = 'query', 'key', 'value', 'grad'
        tensors = query, key, value, gradient
        given = (None if x is None else _channel_major(x) for x in tensors)
        self.tokens = dict(zip(names, given, strict=True))
        batch, _, channels = value.shape
        heads = key.shape[2]
        self.value, self.heads, self.share = value, heads, channels // heads
        self.groups = -(-batch // 8)
        even = all(map(_is_even, self.tokens.values()))
        options = gate, global_connectivity, causal, key_mask is not None, even
        form = form_of(grid, weight.shape[1:], value.dtype, self.share, *options)
        self.form: Form = form
        self.kept: list[Tensor] = []
        arguments = Arguments(batch=batch, channels=channels, share=self.share)
        for name, x in self.tokens.items():
            setattr(arguments, name, _tokens(x))
        if key_mask is not None:
            arguments.mask = key_mask.data_ptr()
            arguments.mask_batch, arguments.mask_token = key_mask.stride()
        self.arguments = arguments
        self.weight = weight.float().contiguous()
        self._point('weight', self.weight)
        span = 16 * (near(form.kernel) + 1)
        self._new('table', heads, 2, form.kernel[0], span, dtype=torch.int32)
        self._new('least', heads)
        self._launch('table', (heads, 1), 32)
        if form.name == 'conv_any':
            self._new('units', channels, batch, 2)
            self._new('sums', channels, batch, form.grid[0], form.blocks, 2)
            if form.strips > 1:
                self._by_channel('units', self.groups)
                self._by_channel('sums', self.groups * -(-form.blocks // 8))

    def _point(self, name: str, x: Tensor) -> None:
        self.kept.append(x)
        setattr(self.arguments, name, x.data_ptr())

    def _new(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = self.value.new_empty(shape, dtype=dtype)
        self._point(name, x)
        return x

    def _launch(self, kernel: str, blocks: tuple[int, int], threads: int) -> None:
        form, index = self.form, self.value.get_device()
        name = f'conv_{kernel}_kernel'
        nvrtc.launch(form.name, form.macros, name, blocks, threads, self.arguments, index)

    def _by_channel(self, kernel: str, blocks: int) -> None:
        """Launch with a warp for each channel and each of `blocks`."""
        channels, warps = self.arguments.channels, self.form.warps
        self._launch(kernel, (blocks, -(-channels // warps)), 32 * warps)

    def _exact(self, kernel: str) -> None:
        blocks = min(self.arguments.channels, EXACT_BLOCKS)
        tokens = self.value.shape[1]
        if kernel == 'exact_backward':
            blocks = min(blocks, max(1, EXACT_NUMBERS // (4 * tokens)))
            self._new('scratch', blocks, tokens, 4)
        self._launch(kernel, (blocks, 1), 32)

    def _flags(self, count: int) -> None:
        self.arguments.flagged = count
        shape = self.arguments.channels, self.arguments.batch
        self._new('flags', count, *shape, dtype=torch.int32)

    def _result(
        self, name: str, x: Tensor, new: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return `new`, or an empty channel-major tensor like the tokens x, for a kernel to write."""
        batch, tokens, channels = x.shape
        if new is None:
            new = x.new_empty(channels, batch, tokens, dtype=dtype).movedim(0, 2)
        self.kept.append(new)
        setattr(self.arguments, name, _tokens(new))
        return new

    def forward(self) -> Tensor:
        output = self._result('out', self.value)
        self._flags(self.form.strips)
        self._by_channel('forward', self.groups * self.form.strips)
        self._exact('exact_forward')
        return _in_order_of(self.value, output)

    def backward(
        self, query: Tensor | None, key: Tensor, weight: Tensor, into: Sequence[Tensor | None]
    ) -> list[Any]:
        """Return the gradients, those of tokens channel-major, in the tensors `into` if given."""
        form, channels = self.form, self.arguments.channels
        rows, columns = form.kernel
        is_small, shared = form.name == 'conv_small', self.share > 1
        grad_query = None if query is None else self._result('out', query, into[0])
        if shared:
            grad_key = self._result('grad_key', self.value, dtype=torch.float32)
        else:
            grad_key = self._result('grad_key', key, into[1])
        grad_value = self._result('grad_value', self.value, into[2])
        parts_of_kernel = -(-rows // form.rows)
        splits = max(1, min(self.groups, WEIGHT_WARPS // (channels * parts_of_kernel)))
        self.arguments.splits = splits
        parts = self._new('parts', splits, channels, rows, columns)
        extra = self._new('extra', channels, rows, columns)
        self._flags(1 if is_small else 2 * form.strips)
        if is_small:
            self._by_channel('backward', splits)
        else:
            shape = channels, self.arguments.batch, form.grid[0], form.blocks, 4, form.words
            self._new('targets', *shape, dtype=torch.int32)
            blocks = self.groups * form.strips
            self._by_channel('targets', blocks)
            if form.strips > 1:
                self._by_channel('target_sums', self.groups * -(-form.blocks // 8))
            self._by_channel('sources', blocks)
            self._by_channel('weight', splits * parts_of_kernel)
        self._exact('exact_backward')
        if shared:  # added before it is rounded
            per_channel = grad_key.movedim(2, 0).unflatten(0, (self.heads, -1))
            grad_key = per_channel.sum(1).to(key.dtype).movedim(0, 2)
            if into[1] is not None:
                into[1].copy_(grad_key)
        # Infinite where float32 does not hold e^w; then all sequences were flagged.
        factor = self.weight.exp().clamp(max=torch.finfo(torch.float32).max)
        sums = parts.sum(0).unflatten(0, (self.heads, -1)).sum(1) * factor.view(-1, rows, columns)
        sums += extra.unflatten(0, (self.heads, -1)).sum(1)
        return [grad_query, grad_key, grad_value, sums.view(weight.shape).to(weight.dtype)]


def _in_order_of(x: Tensor, result: Any) -> Tensor:
    """Return a channel-major result with the strides of :func:`empty_like`."""
    ordered: Tensor = result if is_channel_major(x) else result.contiguous()
    return ordered


def cuda_conv(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return AFT-conv [B, T, D], and an empty tensor, as nothing is saved for the gradient."""
    query, key, value, weight, *options = inputs[:-1]
    if value is None:
        query, key, value = split_joined(_channel_major(key), len(weight), options[2])
    return _Call(None, query, key, value, weight, *options).forward(), key.new_empty(0)


def _backward(gradient: Tensor, saved: Tensor, *inputs: Any) -> list[Tensor | None]:
    query, key, value, weight, *options = inputs[:-1]
    if value is None:
        given = _channel_major(key)
        grads = empty_like(given)
        parts, into = (split_joined(x, len(weight), options[2]) for x in (given, grads))
        call = _Call(gradient, *parts, weight, *options)
        *_, grad_weight = call.backward(parts[0], parts[1], weight, into)
        return [None, _in_order_of(key, grads), None, grad_weight]
    call = _Call(gradient, query, key, value, weight, *options)
    *results, grad_weight = call.backward(query, key, weight, (None, None, None))
    pairs = zip((query, key, value), results, strict=True)
    return [*(None if x is None else _in_order_of(x, y) for x, y in pairs), grad_weight]


def _empty(*inputs: Any) -> tuple[Tensor, Tensor]:
    _, key, value, weight, _, _, gate, *_ = inputs
    if value is None:
        *_, value = split_joined(key, len(weight), gate)
    return empty_like(value), value.new_empty(0)


cuda_conv = register(
    cuda_conv,
    'Tensor? query, Tensor key, Tensor? value, Tensor weight, Tensor? key_mask, SymInt[] grid, '
    'str gate, bool global_connectivity, bool causal',
    _backward,
    fake=_empty,
    public_name='aft_conv',
    backend='cuda',
    like=empty_like,
)


def aft_conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute AFT-conv [B, T, D] of float16 or bfloat16 tokens on a 1-d or 2-d grid."""
    weight = crop_kernel(weight, grid)
    save = differentiated(query, key, value, weight)
    options = key_mask, list(grid), gate, global_connectivity, causal, save
    return cuda_conv(query, key, value, weight, *options)[0]
