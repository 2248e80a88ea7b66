"""AFT-conv: depthwise convolutions of ``e^k v`` and ``e^k`` plus what lies outside of the kernel.

The fastest form that is exact to tolerance serves:

- *dense*: a product per head with W as a matrix, on CUDA and small grids (`dense_convolution.py`);
- *difference*: ``conv(e^k v, e^w − 1) + Σ e^k v``, the paper's; loses digits where e^w is small; on
  a CPU without a gradient in fewer passes (`inference_convolution.py`);
- *additive*: ``conv(e^k v, e^w) +`` the sums outside of the kernel, none of which is a difference;
- *exact*: entry by entry of the kernel in float64, every row with its own shift, for any key.

Keys are [B, *grid, h], values [B, *grid, h·d]: viewed channels-last, so nothing is copied, and
torch's channels-last depthwise convolution has no cliff over the kernel sizes (docs/benchmarks.md).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import decisions
from .exact_convolution import exact_conv_mean, outside_sums
from .sums import (
    FAST_BIAS_SPREAD,
    FAST_SPREAD,
    choose,
    column_shift,
    mean_in_place,
    running_sum,
    spread,
    zero_if_finite,
)

# The difference form loses a factor e^−w of precision: 3 nats keep 5 of float32's 7 digits.
DIFFERENCE_LOWEST_BIAS = -3.0
# Kernels of these many columns take oneDNN 1.3 to 3 times as long as those of FAST_COLUMNS.
SLOW_COLUMNS = (11, 13)
FAST_COLUMNS = 15


def difference_fits(
    key: Tensor, value: Tensor, weight: Tensor, global_connectivity: bool, causal: bool
) -> Tensor:
    """Whether the difference form is exact to tolerance; a lone kernel subtracts nothing."""
    fits = one_shift_fits(key, value, weight, global_connectivity, causal)
    if not global_connectivity:
        return fits
    return fits & (weight.detach().amin() >= DIFFERENCE_LOWEST_BIAS)


def difference_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> Tensor:
    """``Σ W e^k v / Σ W e^k`` [B, T, D] of key [B, T, h], −inf where hidden, value [B, T, D]."""
    if not global_connectivity:
        return _convolved_mean(key, value, torch.exp(weight), None, grid, causal)
    background = _running if causal else _everything
    return _convolved_mean(key, value, torch.expm1(weight), background, grid, causal)


def safe_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    fits: Tensor | bool | None = None,
) -> Tensor:
    """The same for any finite key and |w| up to 80: additive where that fits, else exact.

    `fits` is what :func:`one_shift_fits` said, if that was asked before.
    """

    def additive(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        reach = [size // 2 for size in weight.shape[1:]]

        def outside(x: Tensor) -> Tensor:
            return outside_sums(x, reach, causal)

        return _convolved_mean(key, value, torch.exp(weight), outside, grid, causal)

    def exact(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        places = (grid, global_connectivity, causal)
        return exact_conv_mean(key.double(), value.double(), weight.double(), *places).to(key.dtype)

    if not global_connectivity:
        return exact(key, value, weight)
    if fits is None:
        fits = one_shift_fits(key, value, weight, global_connectivity, causal)
    return choose(fits, additive, exact, key, value, weight)


def one_shift_fits(
    key: Tensor, value: Tensor, weight: Tensor, global_connectivity: bool, causal: bool
) -> Tensor:
    """Whether float32 sums with one shift per column are exact to tolerance (`sums.py`)."""
    weight = weight.detach()
    bias_spread = weight.amax().clamp_min(0) - weight.amin().clamp_max(0)
    if weights_decide(global_connectivity, causal):
        return bias_spread <= FAST_BIAS_SPREAD
    exponents = spread(key, 1) + bias_spread
    if causal:  # a kernel multiplies what comes later by 0, which is NaN for a NaN
        exponents = exponents + zero_if_finite(value)
    return exponents <= FAST_SPREAD


def weights_decide(global_connectivity: bool, causal: bool) -> bool:
    """Whether keys have no say in the choice of a form: every row sees the largest one."""
    return global_connectivity and not causal


def crop_kernel(weight: Tensor, grid: Sequence[int]) -> Tensor:
    """Leave out kernel entries that no pair of tokens on the grid can reach."""
    if decisions.recording() or decisions.repeating():  # a graph may serve other grids, too
        return weight
    for dim, length in enumerate(grid, start=1):
        extra = max(0, weight.shape[dim] // 2 - (length - 1))
        weight = weight.narrow(dim, extra, weight.shape[dim] - 2 * extra)
    return weight


def _depthwise(x: Tensor, kernel: Tensor) -> Tensor:
    """Cross-correlation of x [B, *grid, C] with kernel [h, *K], channels in h contiguous groups."""
    kernel = with_fast_columns(kernel)
    return convolve(x, kernel.repeat_interleave(x.shape[-1] // kernel.shape[0], 0))


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Cross-correlation of x [B, *grid, C] with kernel [C, *K], channel by channel."""
    if x.dim() == 3:  # as a grid of one row: 1-d convolution has no channels-last layout
        return convolve(x.unsqueeze(1), kernel.unsqueeze(1)).squeeze(1)
    function = F.conv2d if x.dim() == 4 else F.conv3d
    padding = [size // 2 for size in kernel.shape[1:]]
    x, kernel = x.movedim(-1, 1), kernel.unsqueeze(1)
    return function(x, kernel, padding=padding, groups=len(kernel)).movedim(1, -1)


def with_fast_columns(kernel: Tensor) -> Tensor:
    """The kernel, with columns of 0 where oneDNN convolves faster with them.

    Of a convolution alone: the gradients of a wider kernel take up to five times as long.
    """
    columns = kernel.shape[-1]
    if columns not in SLOW_COLUMNS or kernel.device.type != 'cpu' or torch.is_grad_enabled():
        return kernel
    return F.pad(kernel, [(FAST_COLUMNS - columns) // 2] * 2)


def _everything(x: Tensor) -> Tensor:
    return x.sum(tuple(range(1, x.dim() - 1)), keepdim=True)


def _running(x: Tensor) -> Tensor:
    return running_sum(x.flatten(1, -2), 1).view_as(x)


def _convolved_mean(
    key: Tensor,
    value: Tensor,
    kernel: Tensor,
    background: Callable[[Tensor], Tensor] | None,
    grid: Sequence[int],
    causal: bool,
) -> Tensor:
    """Convolutions of ``e^k v`` and ``e^k``, each plus its background, and their quotient."""
    if causal:
        # The middle entry is the token itself, those before it in raster order are earlier. Made
        # by arange: Inductor loses a literal inside of torch.cond.
        entries = kernel[0].numel()
        past = torch.arange(entries, device=kernel.device) <= entries // 2
        kernel = kernel * past.view(kernel.shape[1:])
    heads = key.shape[-1]
    exp_key = torch.exp(key - column_shift(key, 1))
    terms = exp_key.unsqueeze(-1) * value.unflatten(-1, (heads, -1))
    sums = []
    for x in (terms.flatten(2), exp_key):
        x = x.unflatten(1, grid)
        convolved = _depthwise(x, kernel)
        if background is not None:
            convolved += background(x)
        sums.append(convolved.flatten(1, -2).unflatten(-1, (heads, -1)))
    return mean_in_place(*sums).flatten(2)
