from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .conv_plan import cancels
from .eager.conv import (
    convolution,
    convolved_mean,
    is_one_shift_exact,
    kernel_and_outside,
    with_fast_columns,
)
from .eager.conv_exact import exact_conv_mean
from .export_paths import export_stage, exports_loops
from .gates import GATES
from .native.availability import FOLDER, find_built
from .online_softmax import apply_gate, column_shift, hide, mean
from .path_choice import choose

#: The C++ sources of the operator `aft_mm::AFTConv`.
OPERATOR_SOURCES = FOLDER


def find_operator() -> Path | str:
    return find_built('operator')


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
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_conv` by the paths of `export_paths.py`.

    The kernel is not cropped, as the graph may be run on other grids.
    """
    dtype = value.dtype
    options: dict[str, Any] = dict(
        grid=grid, global_connectivity=global_connectivity, causal=causal
    )
    weight = weight.to(torch.promote_types(dtype, torch.float32))
    key, value = hide(key, value, key_mask)
    is_exact = partial(is_one_shift_exact, key, value, weight, global_connectivity, causal)
    fast = partial(_MEANS[export_stage()], **options)
    exact: Callable[..., Tensor] = partial(exact_conv_mean, **options)
    additive: Callable[..., Tensor] = partial(fast, additive=True)
    loops = exports_loops() and len(grid) <= 2 and not causal
    if loops:  # for both forms, and gated
        fast = additive = partial(_loops_operator, query, gate, grid, global_connectivity)
        exact = partial(_gated, exact, query, gate, dtype)

    def safe(*tensors: Tensor) -> Tensor:
        if not global_connectivity:
            return exact(*tensors)
        return choose(is_exact(difference=False), additive, exact, *tensors)

    mixed = choose(is_exact(difference=True), fast, safe, key, value, weight)
    return mixed if loops else apply_gate(query, mixed, gate, dtype)


def _gated(
    path: Callable[..., Tensor],
    query: Tensor | None,
    gate: str,
    dtype: torch.dtype,
    *tensors: Tensor,
) -> Tensor:
    return apply_gate(query, path(*tensors), gate, dtype)


def _loops_operator(
    query: Tensor | None,
    gate: str,
    grid: Sequence[int],
    global_connectivity: bool,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
) -> Tensor:
    rows = (1,) * (2 - len(grid))  # a line is a grid of one row
    sizes = torch.tensor([*rows, *grid, *rows, *weight.shape[1:]])
    kernel, form = torch.exp(weight), torch.tensor([0])
    if global_connectivity:  # in the difference form, 1, or the additive one, 2
        additive = cancels(weight)
        kernel = torch.where(additive, kernel, torch.expm1(weight))
        form = 1 + additive.long().view(1)
    sizes = torch.cat([sizes, form, torch.tensor([GATES.index(gate)])])
    operands = query, key, value, kernel.flatten(1).T, sizes
    return torch.onnx.ops.symbolic(
        'aft_mm::AFTConv', operands, dtype=value.dtype, shape=value.shape, version=1
    )


def _tokens_first_mean(
    key: Tensor, value: Tensor, weight: Tensor, *, grid: Sequence[int], join: bool, **options: Any
) -> Tensor:
    """Return :func:`convolved_mean` of tokens [B, T, C], for torch and OpenVINO.

    join: Whether one convolution computes both sums: OpenVINO 2026.4 may overwrite e^k before a
    second one reads it.
    """
    heads = key.shape[-1]
    kernel, outside = kernel_and_outside(weight, grid, **options)
    if not join and not torch.is_grad_enabled():
        kernel = with_fast_columns(kernel)
    exp_key = torch.exp(key - column_shift(key, 1))
    terms = (exp_key.unsqueeze(3) * value.unflatten(2, (heads, -1))).flatten(2, 3)
    kernels = kernel.repeat_interleave(terms.shape[2] // heads, 0), kernel
    if join:
        both = _convolve_tokens_first(
            torch.cat([terms, exp_key], 2), torch.cat(kernels), grid, outside
        )
        sums = both.split([terms.shape[2], heads], 2)
    else:
        sums = [
            _convolve_tokens_first(x, k, grid, outside)
            for x, k in zip((terms, exp_key), kernels, strict=True)
        ]
    numerator, denominator = (x.unflatten(2, (heads, -1)) for x in sums)
    return mean(numerator, denominator, in_place=True).flatten(2, 3)


def _channels_first_mean(
    key: Tensor, value: Tensor, weight: Tensor, *, grid: Sequence[int], **options: Any
) -> Tensor:
    """Return :func:`convolved_mean` by tokens [B, C, T], for ONNX Runtime."""
    heads = key.shape[-1]
    kernel, outside = kernel_and_outside(weight, grid, dim=2, **options)
    # Views would fix open sizes.
    key, value = (x.transpose(1, 2).contiguous() for x in (key, value))
    exp_key = torch.exp(key - column_shift(key, 2))
    terms = (exp_key.unsqueeze(2) * value.unflatten(1, (heads, -1))).flatten(1, 2)
    kernels = kernel.repeat_interleave(terms.shape[1] // heads, 0), kernel
    numerator, denominator = (
        _convolve_channels_first(x, own_kernel, grid, outside).unflatten(1, (heads, -1))
        for x, own_kernel in zip((terms, exp_key), kernels, strict=True)
    )
    return mean(numerator, denominator, in_place=True).flatten(1, 2).transpose(1, 2)


def _convolve_tokens_first(
    x: Tensor, kernel: Tensor, grid: Sequence[int], outside: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return the sums [B, T, C] in the kernel and outside; runtimes transpose 3 axes faster than 4."""
    convolve, kernel, grid, padding = convolution(kernel, grid)
    tokens = x.transpose(1, 2).unflatten(-1, grid)
    convolved = convolve(tokens, kernel.unsqueeze(1), padding=padding, groups=len(kernel))
    sums = convolved.flatten(2).transpose(1, 2)
    return sums if outside is None else sums + outside(x)


def _convolve_channels_first(
    x: Tensor, kernel: Tensor, grid: Sequence[int], outside: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return the sums [B, C, T] in the kernel and outside.

    ONNX Runtime is slow where a kernel reaches into the padding of columns, so columns are padded
    before. The axis of 1 keeps it from merging the two.
    """
    convolve, kernel, grid, padding = convolution(kernel, grid)
    tokens = F.pad(x.unflatten(2, grid).unsqueeze(1), [padding.pop()] * 2).squeeze(1)
    convolved = convolve(tokens, kernel.unsqueeze(1), padding=[*padding, 0], groups=len(kernel))
    sums = convolved.flatten(2)
    return sums if outside is None else sums + outside(x)


_MEANS: dict[str | None, Callable[..., Tensor]] = {
    'recording': convolved_mean,
    'torch': partial(_tokens_first_mean, join=False),
    'openvino': partial(_tokens_first_mean, join=True),
    'onnxruntime': _channels_first_mean,
}
