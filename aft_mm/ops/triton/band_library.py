"""AFT-full and AFT-local 1-d of the Triton backend: ops, shapes and gradients as opaque nodes.

The kernels hold the fast path of the numerics policy (`ops/eager/`): one shift per channel, plain
float32 sums. The range of keys and biases is checked as there, and beyond it eager's safe path
takes over.
"""

import torch
from torch import Tensor

from .. import eager
from ..eager.decisions import recording
from ..eager.sums import FAST_BIAS_SPREAD, FAST_SPREAD, choose, lowest
from . import band_launch as launch
from .common import once
from .register import differentiated


def aft_full(query, key, value, position_bias, *, causal, key_mask, gate) -> Tensor:
    """O(T·S·D) time: tiles of exp(w) times e^k v and e^k."""

    def safe() -> Tensor:
        tensors = map(_compact, (query, key, value, position_bias))
        mixed = eager.aft_full(*tensors, causal=causal, key_mask=key_mask, gate=gate)
        return mixed.contiguous()

    return _mix(query, key, value, position_bias, None, key_mask, None, causal, gate, safe)


def aft_local(query, key, value, pos_u, pos_v, *, window, grid, causal, key_mask, gate) -> Tensor:
    """O(T·s·D) time: the same around the window, and sums of the tiles beyond."""
    size = window if isinstance(window, int) else window[0]

    def safe() -> Tensor:
        tensors = map(_compact, (query, key, value, pos_u, pos_v))
        mixed = eager.aft_local(
            *tensors, window=size, grid=None, causal=causal, key_mask=key_mask, gate=gate
        )
        return mixed.contiguous()

    return _mix(query, key, value, pos_u, pos_v, key_mask, size, causal, gate, safe)


def _compact(x: Tensor | None) -> Tensor | None:
    """x, whose gradient is contiguous: torch.cond asks for one layout from both branches."""
    return None if x is None else x.flatten().unflatten(0, x.shape)


def _mix(query, key, value, bias, other, key_mask, window, causal, gate, safe) -> Tensor:
    sides = [None if x is None else x.detach() for x in (bias, other)]
    keys, rows = band_ranges(key.detach(), *sides, key_mask, window, causal)
    # Far tokens have W = 1, so only without them may the rows of w be shifted.
    row_shift = rows[0].clamp_min(lowest(rows.dtype)) if window is None else None
    shift = keys[0].clamp_min(lowest(keys.dtype))
    save = differentiated(query, key, value, bias, other)

    tensors = query, key, value, bias, other, key_mask, shift, row_shift

    def fast() -> Tensor:
        return band(*tensors, window, causal, gate, save)[0]

    return choose(_fits(keys, rows, window, causal), fast, safe)


def _fits(keys: Tensor, rows: Tensor, window: int | None, causal: bool) -> Tensor:
    """Whether one common shift and float32 are exact to tolerance (`sums.py`)."""
    key_spread = (keys[0] - keys[1]).amax().clamp_min(0)
    if recording():  # for any key
        key_spread = torch.full_like(key_spread, torch.inf)
    high, low = rows
    if window is None:
        bias_spread = (high - low).amax()
    else:
        bias_spread = high.amax().clamp_min(0) - low.amin().clamp_max(0)
    fits = key_spread + bias_spread <= FAST_SPREAD
    return fits if causal else fits | (bias_spread <= FAST_BIAS_SPREAD)


@torch.library.custom_op('aft_mm::band_ranges', mutates_args=())
def band_ranges(
    key: Tensor,
    bias: Tensor,
    other: Tensor | None,
    key_mask: Tensor | None,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Largest and smallest visible key of each channel [2, B, D], and w of each row [2, T]."""
    return launch.ranges(key, key_mask, launch.make_band(bias, other, window, causal, key))


@torch.library.custom_op('aft_mm::band', mutates_args=())
def band(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    other: Tensor | None,
    key_mask: Tensor | None,
    shift: Tensor,
    row_shift: Tensor | None,
    window: int | None,
    causal: bool,
    gate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """AFT-full, or AFT-local with a window: [B, T, D], and with `save` what its gradient needs.

    Keys are taken over `shift` [B, D]; w over `row_shift` [T], which only AFT-full may have.
    """
    where = launch.make_band(bias, other, window, causal, value)
    return launch.banded_forward(query, key, value, key_mask, shift, row_shift, where, gate, save)


@torch.library.custom_op('aft_mm::band_backward', mutates_args=())
def band_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    other: Tensor | None,
    key_mask: Tensor | None,
    shift: Tensor,
    row_shift: Tensor | None,
    window: int | None,
    causal: bool,
    gate: str,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bias and other; nothing for what there is not.

    Those of bias and other are wanted if `biased`.
    """
    where = launch.make_band(bias, other, window, causal, value)
    *results, by_bias, by_other = launch.banded_backward(
        gradient, saved, query, key, value, key_mask, shift, row_shift, where, gate, biased
    )
    results.append(None if by_bias is None else by_bias.to(bias.dtype, copy=True))
    results.append(None if by_other is None else by_other.to(other.dtype, copy=True))
    return tuple(key.new_empty(0) if x is None else x for x in results)


@band_ranges.register_fake
def _(key, bias, other, key_mask, window, causal):
    batch, _, channels = key.shape
    wide = dict(dtype=torch.float32)
    return key.new_empty(2, batch, channels, **wide), key.new_empty(2, len(bias), **wide)


@band.register_fake
def _(query, key, value, bias, other, key_mask, shift, row_shift, window, causal, gate, save):
    batch, _, channels = value.shape
    rows = len(bias), channels
    saved = value.new_empty(2, batch if save else 0, *rows, dtype=torch.float32)
    return value.new_empty(batch, *rows), saved


@band_backward.register_fake
def _(
    gradient,
    saved,
    query,
    key,
    value,
    bias,
    other,
    key_mask,
    shift,
    row_shift,
    window,
    causal,
    gate,
    biased,
):
    wanted = query, key, value, *((bias, other) if biased else (None, None))
    return tuple(key.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.causal, ctx.gate, ctx.save = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient: Tensor | None, _):
    nothing = (None,) * 12
    if gradient is None:
        return nothing
    if not ctx.save:
        raise RuntimeError('aft_mm::band must be called with save=True for its gradient')
    saved, *tensors = ctx.saved_tensors
    biased = any(ctx.needs_input_grad[3:5])
    results = band_backward(gradient, saved, *tensors, ctx.window, ctx.causal, ctx.gate, biased)
    wanted = zip(results, ctx.needs_input_grad, strict=False)
    return *(x if needed else None for x, needed in wanted), *nothing[5:]


band.register_autograd(_backward, setup_context=_setup_context)
band_backward.register_autograd(once('aft_full and aft_local'))
