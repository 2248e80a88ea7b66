"""AFT-conv: w depends on the offset only, per head. :func:`aft_conv` chooses among five forms.

Tensors are key [B, T, h], −inf where hidden, value [B, T, D] and weight w [h, *K].
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..conv_plan import DIFFERENCE_LOWEST_BIAS, ConvPlan, exponents_of_bias, is_range_exact
from ..online_softmax import (
    FAST_RANGE,
    apply_gate,
    column_ranges,
    column_shift,
    hide,
    key_range,
    mean,
    running_sum,
    zero_if_finite,
)
from ..path_choice import choose
from ..tracing import may_read, transformed
from . import conv_dense
from .bf16_matmul import matmul_precision
from .conv_exact import exact_conv_mean, outside_sums
from .custom_ops import as_graph_node

# oneDNN is slower with these columns than with FAST_COLUMNS.
SLOW_COLUMNS = (11, 13)
FAST_COLUMNS = 15
TERMS_AT_ONCE = 2**20
DENSE_DEVICES = ('cuda',)


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
    """Compute :func:`aft_mm.ops.aft_conv` by the fastest form that is exact to tolerance.

    1. *dense* (`conv_dense.py`): one matrix product per head with W as a [T, T] matrix, on CUDA and
       small grids. Its only condition is that one shift per column is exact.
    2. *difference*, the form of the paper: ``conv(e^k v, e^w − 1) + Σ e^k v`` over the same without
       v. It cancels where e^w is small, so it needs w ≥ −3.
    3. *inference*: the difference form on a CPU without a gradient, a few samples at a time.
    4. *additive*: ``conv(e^k v, e^w)`` plus the sums outside the kernel, for any w.
    5. *exact* (`conv_exact.py`): entry by entry of the kernel in float64, each row with its own
       shift. By far the slowest, right for any finite key and |w| up to 80.

    With ``global_connectivity=False`` 2 subtracts nothing, and 5 takes the place of 4. A graph with
    the form of a :class:`ConvPlan` does not choose.
    """
    dtype = value.dtype
    plan = ConvPlan(weight) if plan is None else plan
    weight = plan.cropped(grid, dtype)
    is_exact: Callable[..., Tensor | bool] = partial(plan.is_exact, weight)
    # Then every row sees the largest key, so keys and values do not matter.
    weight_decides = global_connectivity and not causal
    if weight_decides and is_inference_applicable(query, key, value, plan.weight):
        if is_exact(difference=True):
            kernel = _inference_kernel(plan, weight, value)
            if key_mask is None and query is not None and plan.may_repeat(query, key, value):
                run = partial(_inference_mean, kernel=kernel, grid=grid, gate=gate)
                plan.keep_call(run, query, key, value, grid, gate)
            return _inference_mean(query, key, value, kernel, grid, gate, key_mask)
    options: dict[str, Any] = dict(
        grid=grid, global_connectivity=global_connectivity, causal=causal
    )
    fast, dense = partial(convolved_mean, **options), False
    if value.device.type in DENSE_DEVICES:
        precision = matmul_precision(value)
        dense = conv_dense.is_applicable(value, weight, grid, precision)
        if dense:
            fast = partial(conv_dense.dense_mean, precision=precision, **options)
    tokens = query, key, value, key_mask
    key, value = hide(key, value, key_mask)
    form = plan.form if weight_decides and torch.compiler.is_compiling() else None
    if not weight_decides:
        is_exact = partial(is_one_shift_exact, key, value, weight, global_connectivity, causal)

    def safe(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        if form == 'exact':  # for any w
            return exact_conv_mean_node(key, value, weight, grid, global_connectivity, causal)
        if form is None and torch.compiler.is_compiling():
            return safe_conv_mean_node(key, value, weight, grid, global_connectivity, causal)
        return safe_conv_mean(key, value, weight, **options, is_exact=is_exact(difference=False))

    mixed = choose(is_exact(difference=not dense), fast, safe, key, value, weight)
    output = apply_gate(query, mixed, gate, dtype)
    if form in ('difference', 'additive'):
        fits = is_range_exact(weight, form == 'difference' and not dense)
        _repeat_unless_exact(output, *tokens, weight, fits, list(grid), gate)
    return output


def is_one_shift_exact(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    global_connectivity: bool,
    causal: bool,
    difference: bool,
) -> Tensor:
    """Return whether float32 sums with one shift per column are exact to tolerance.

    difference: whether they are those of the difference form.
    """
    if global_connectivity and not causal:
        return is_range_exact(weight, difference)
    exponents = key_range(key, 1) + exponents_of_bias(weight)
    if causal:  # the convolution multiplies later tokens by 0
        exponents = exponents + zero_if_finite(value)
    is_exact = exponents <= FAST_RANGE
    if difference and global_connectivity:
        is_exact = is_exact & (weight.detach() >= DIFFERENCE_LOWEST_BIAS)
    return is_exact.all()


def convolved_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    additive: bool = False,
) -> Tensor:
    """Return ``Σ W e^k v / Σ W e^k`` [B, T, D] by the difference form, or the additive one."""
    heads = key.shape[-1]
    kernel, outside = kernel_and_outside(weight, grid, global_connectivity, causal, additive)
    if not torch.is_grad_enabled():
        kernel = with_fast_columns(kernel)
    exp_key = torch.exp(key - column_shift(key, 1))
    terms = (exp_key.unsqueeze(3) * value.unflatten(2, (heads, -1))).flatten(2, 3)
    kernels = kernel.repeat_interleave(terms.shape[2] // heads, 0), kernel
    # In place, a graph would keep a view of open sizes, whose strides Inductor cannot compare.
    add = torch.add if torch.compiler.is_compiling() else Tensor.add_
    sums = []
    for x, own_kernel in zip((terms, exp_key), kernels, strict=True):
        convolved = convolve(x, own_kernel, grid)
        sums.append(convolved if outside is None else add(convolved, outside(x)))
    numerator, denominator = (x.unflatten(2, (heads, -1)) for x in sums)
    mixed = mean(numerator, denominator, in_place=True).flatten(2, 3)
    # A compiler does not see that open channels are again those of the other path.
    return mixed.expand(value.shape)


def kernel_and_outside(
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    additive: bool = False,
    dim: int = 1,
) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Return the kernel of a convolution [h, *K], and what adds the sums outside along `dim`."""
    outside: Callable[[Tensor], Tensor] | None = None
    if not global_connectivity:
        kernel = torch.exp(weight)
    elif additive:
        reach = [size // 2 for size in weight.shape[1:]]
        kernel, outside = torch.exp(weight), partial(_outside_sums, grid, reach, causal, dim)
    elif causal:
        kernel, outside = torch.expm1(weight), partial(running_sum, dim=dim)
    else:
        kernel, outside = torch.expm1(weight), partial(torch.sum, dim=dim, keepdim=True)
    if causal:
        # Later entries are 0, by arange: Inductor loses a literal inside torch.cond.
        entries = kernel[0].numel()
        past = torch.arange(entries, device=kernel.device) <= entries // 2
        kernel = kernel * past.view(kernel.shape[1:])
    return kernel, outside


def _outside_sums(
    grid: Sequence[int], reach: Sequence[int], causal: bool, dim: int, x: Tensor
) -> Tensor:
    sums: Tensor = outside_sums(x.unflatten(dim, grid), reach, causal, dim)
    return sums.flatten(dim, dim + len(grid) - 1)


def convolution(
    kernel: Tensor, grid: Sequence[int]
) -> tuple[Callable[..., Tensor], Tensor, Sequence[int], list[int]]:
    """Return torch's convolution of a kernel [C, *K] with the kernel, grid and padding for it."""
    if len(grid) == 1:  # 1-d has no channels-last layout
        grid, kernel = (1, *grid), kernel.unsqueeze(1)
    padding = [size // 2 for size in kernel.shape[1:]]
    return F.conv3d if len(grid) == 3 else F.conv2d, kernel, grid, padding


def convolve(x: Tensor, kernel: Tensor, grid: Sequence[int]) -> Tensor:
    """Return the cross-correlation of tokens x [B, T, C] with kernel [C, *K], per channel."""
    function, kernel, grid, padding = convolution(kernel, grid)
    x = x.unflatten(1, grid).movedim(-1, 1)
    convolved = function(x, kernel.unsqueeze(1), padding=padding, groups=len(kernel))
    return convolved.movedim(1, -1).flatten(1, -2)


def with_fast_columns(kernel: Tensor) -> Tensor:
    """Return the kernel, padded with columns of 0 where oneDNN is faster with them.

    Without a gradient only: that of a wider kernel is much slower.
    """
    columns = kernel.shape[-1]
    if columns not in SLOW_COLUMNS or kernel.device.type != 'cpu':
        return kernel
    return F.pad(kernel, [(FAST_COLUMNS - columns) // 2] * 2)


def safe_conv_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    is_exact: Tensor | bool | None = None,
) -> Tensor:
    """Return :func:`convolved_mean` for any finite key: additive if `is_exact`, else exact."""
    options: dict[str, Any] = dict(
        grid=grid, global_connectivity=global_connectivity, causal=causal
    )

    fast = partial(convolved_mean, additive=global_connectivity, **options)
    exact: Callable[..., Tensor] = partial(exact_conv_mean, **options)
    otherwise = exact
    keys_decide = causal or not global_connectivity
    if keys_decide and all(map(may_read, (key, value, weight))):
        otherwise = partial(_mean_by_heads, fast, exact, causal)
    if not global_connectivity:
        return otherwise(key, value, weight)
    if is_exact is None:
        is_exact = is_one_shift_exact(key, value, weight, global_connectivity, causal, False)
    return choose(is_exact, fast, otherwise, key, value, weight)


def _mean_by_heads(
    fast: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    causal: bool,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
) -> Tensor:
    """Return the mean by `exact` for the heads of samples that need it, by `fast` for others.

    One large key would otherwise take hundreds of times the time and memory.
    """
    heads = len(weight)
    values = value.unflatten(-1, (heads, -1))
    exponents = column_ranges(key, 1) + exponents_of_bias(weight)
    if causal:  # as in is_one_shift_exact
        exponents = exponents + zero_if_finite(values, (1, 3))
    is_exact = exponents <= FAST_RANGE
    samples, others = (~is_exact).nonzero(as_tuple=True)
    if not 0 < 2 * len(others) <= is_exact.numel():
        return exact(key, value, weight)
    is_exact = is_exact.unsqueeze(1)
    mixed = fast(key.where(is_exact, 0), values.where(is_exact.unsqueeze(-1), 0).flatten(2), weight)
    # The pairs of a sample and a head become the heads of one sample.
    keys, values = (x.transpose(1, 2)[samples, others].movedim(0, 1) for x in (key, values))
    part = exact(keys.unsqueeze(0), values.flatten(1).unsqueeze(0), weight[others])
    parts = part.squeeze(0).unflatten(-1, (len(others), -1)).movedim(1, 0)
    pairs: Tensor = mixed.unflatten(-1, (heads, -1)).transpose(1, 2)
    return pairs.index_put((samples, others), parts).transpose(1, 2).flatten(2)


# Traced, they would take minutes to compile.
safe_conv_mean_node = as_graph_node('aft_mm::safe_conv_mean', safe_conv_mean)
exact_conv_mean_node = as_graph_node('aft_mm::exact_conv_mean', exact_conv_mean)


@torch.library.custom_op('aft_mm::repeat_conv_unless_exact', mutates_args=('output',))
def _repeat_unless_exact(
    output: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    weight: Tensor,
    is_exact: Tensor,
    grid: Sequence[int],
    gate: str,
) -> None:
    """Compute the output again where the form of a graph is not exact for w.

    A CUDA graph, which cannot choose, gets NaN.
    """
    if output.is_cuda and torch.cuda.is_current_stream_capturing():
        output.masked_fill_(~is_exact, torch.nan)
    elif not is_exact:
        mixed = safe_conv_mean(*hide(key, value, key_mask), weight, grid, True, False)
        output.copy_(apply_gate(query, mixed, gate))


@_repeat_unless_exact.register_fake
def _(output: Tensor, *others: Any) -> None:
    return None


def is_inference_applicable(*tensors: Tensor | None) -> bool:
    """Return whether all are plain tensors on a CPU, outside autograd, tracing and torch.func."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    given = [x for x in tensors if x is not None]
    return all(x.device.type == 'cpu' for x in given) and not transformed()


def _inference_kernel(plan: ConvPlan, weight: Tensor, value: Tensor) -> Tensor:
    """Return ``e^w − 1`` of the cropped w per channel of value, then of key, [D + h, *K]."""
    channels, heads = value.shape[2], len(weight)

    def make() -> Tensor:
        kernel = with_fast_columns(torch.expm1(weight))
        return torch.cat([kernel.repeat_interleave(channels // heads, 0), kernel])

    return plan.once(('inference', channels, weight.dtype, weight.shape), make)


def _inference_mean(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    kernel: Tensor,
    grid: Sequence[int],
    gate: str,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Return the gated mean [B, T, D], a few samples at a time, as new memory pages cost more."""
    batch, tokens, _ = value.shape
    at_once = torch.get_num_threads() * TERMS_AT_ONCE
    parts = min(batch, math.ceil(batch * tokens * len(kernel) / at_once))
    if parts == 1:
        mixed = _convolved_mean_in_place(*hide(key, value, key_mask), kernel, grid)
        return apply_gate(query, mixed, gate, value.dtype)
    result = value.new_empty(value.shape)
    for i in range(parts):
        part = slice(i * batch // parts, (i + 1) * batch // parts)
        mask = None if key_mask is None else key_mask[part]
        mixed = _convolved_mean_in_place(*hide(key[part], value[part], mask), kernel, grid)
        result[part] = apply_gate(None if query is None else query[part], mixed, gate)
    return result


def _convolved_mean_in_place(
    key: Tensor, value: Tensor, kernel: Tensor, grid: Sequence[int]
) -> Tensor:
    """Return the mean [B, T, D] of the difference form over its own temporaries."""
    channels, heads = value.shape[2], key.shape[2]
    exp_key = torch.exp_(key - column_shift(key, 1))
    terms = exp_key.unsqueeze(-1) * value.unflatten(-1, (heads, -1))
    sums = []
    for x, own_kernel in ((terms.flatten(2), kernel[:channels]), (exp_key, kernel[channels:])):
        outside = x.sum(1, keepdim=True)
        if x is exp_key:  # positive where every key is hidden
            outside.clamp_min_(torch.finfo(key.dtype).tiny)
        sums.append(convolve(x, own_kernel, grid).add_(outside))
    mixed, normalizer = sums
    mixed.unflatten(-1, (heads, -1)).div_(normalizer.unsqueeze(-1))
    return mixed
