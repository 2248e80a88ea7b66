"""AFT-conv: depthwise convolutions of ``e^k v`` and ``e^k`` plus what lies outside of the kernel.

Three forms, the fastest that is exact to tolerance serves:

- *difference*: ``conv(e^k v, e^w − 1) + Σ e^k v``, the paper's; loses digits where e^w is small;
- *additive*: ``conv(e^k v, e^w) +`` the sums outside of the kernel, none of which is a difference;
- *exact*: entry by entry of the kernel in float64, every row with its own shift, for any key.

Keys are [B, *grid, h], values [B, *grid, h·d]: viewed channels-last, so nothing is copied, and
torch's channels-last depthwise convolution has no cliff over the kernel sizes (docs/benchmarks.md).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .conv_exact import outside_sums
from .geometry import past_kernel
from .library import exact_conv, opaque_exact_conv
from .sums import FAST_BIAS_SPREAD, FAST_SPREAD, choose, column_shift, mean_in_place, spread

# The difference form loses a factor e^−w of precision: 3 nats keep 5 of float32's 7 digits.
DIFFERENCE_LOWEST_BIAS = -3.0


def conv_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> Tensor:
    """``Σ W e^k v / Σ W e^k`` [B, T, D] of key [B, T, h], −inf where hidden, value [B, T, D]."""
    weight = _crop(weight, grid)
    visible = None
    if causal:
        visible = weight.new_tensor(past_kernel(weight.shape[1:])).view(weight.shape[1:])
    places = dict(grid=grid, visible=visible)

    def difference(key, value, weight):
        kernel = torch.expm1(weight) if global_connectivity else torch.exp(weight)
        background = (_running if causal else _everything) if global_connectivity else None
        return _convolved_mean(key, value, kernel, background, **places)

    def additive(key, value, weight):
        return _convolved_mean(key, value, torch.exp(weight), _outside_of(weight, causal), **places)

    def exact(key, value, weight):
        mix = opaque_exact_conv if torch.compiler.is_compiling() else exact_conv
        return mix(key, value, weight, grid, global_connectivity, causal)

    def additive_or_exact(key, value, weight):
        return choose(fits, additive, exact, key, value, weight)

    high = weight.detach().amax().clamp_min(0)
    low = weight.detach().amin().clamp_max(0)
    fits = spread(key, 1) + high - low <= FAST_SPREAD
    if not global_connectivity:
        return choose(fits, difference, exact, key, value, weight)
    if not causal:
        fits = fits | (high - low <= FAST_BIAS_SPREAD)
    precise = fits & (low >= DIFFERENCE_LOWEST_BIAS)
    return choose(precise, difference, additive_or_exact, key, value, weight)


def _crop(weight: Tensor, grid: Sequence[int]) -> Tensor:
    """Leave out kernel entries that no pair of tokens on the grid can reach."""
    for dim, length in enumerate(grid, start=1):
        extra = max(0, weight.shape[dim] // 2 - (length - 1))
        weight = weight.narrow(dim, extra, weight.shape[dim] - 2 * extra)
    return weight


def _depthwise(x: Tensor, kernel: Tensor) -> Tensor:
    """Cross-correlation of x [B, *grid, C] with kernel [h, *K], channels in h contiguous groups."""
    channels = x.shape[-1]
    if x.dim() == 3:  # as a grid of one row: 1-d convolution has no channels-last layout
        return _depthwise(x.unsqueeze(1), kernel.unsqueeze(1)).squeeze(1)
    convolve = F.conv2d if x.dim() == 4 else F.conv3d
    kernel = kernel.repeat_interleave(channels // kernel.shape[0], 0).unsqueeze(1)
    padding = [size // 2 for size in kernel.shape[2:]]
    return convolve(x.movedim(-1, 1), kernel, padding=padding, groups=channels).movedim(1, -1)


def _everything(x: Tensor) -> Tensor:
    return x.sum(tuple(range(1, x.dim() - 1)), keepdim=True)


def _running(x: Tensor) -> Tensor:
    return x.flatten(1, -2).cumsum(1).view_as(x)


def _outside_of(weight: Tensor, causal: bool) -> Callable[[Tensor], Tensor]:
    reach = [size // 2 for size in weight.shape[1:]]
    return lambda x: outside_sums(x, reach, causal)


def _convolved_mean(key, value, kernel, background, grid, visible) -> Tensor:
    if visible is not None:
        kernel = kernel * visible
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
