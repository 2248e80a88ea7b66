"""The public AFT ops: check the arguments, choose a backend, call it.

All are batch first and compute
``y_t = g(q_t) ⊙ Σ_t' W[t,t'] e^{k_t'} v_t' / Σ_t' W[t,t'] e^{k_t'}`` with different ``W = exp(w)``.
Shared arguments:

- query [B, T, D]: gates the output; None with ``gate='none'``.
- key [B, S, D], value [B, S, D].
- causal: sums run over t' ≤ t in raster order.
- key_mask [B, S] bool: True for keys to keep; hidden keys and values may hold NaN or inf and get
  zero gradient, a row that sees nothing gives 0.
- gate: g, one of 'sigmoid', 'relu', 'none'.

A NaN or infinite key or value of a causal op leaves the rows before it, the other channels (of
aft_conv: those of other heads) and samples as they are.

Exponentials and sums are float32 for every input type but float64; the output has the type of
value. Every op raises ValueError for arguments that do not fit together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aft_mm.checks import check_flag, check_sizes

from . import checks
from .dispatch import implementation, no_autocast
from .geometry import Window


def _run(op: str, query: Tensor | None, key: Tensor, *others: Tensor | None, **options) -> Tensor:
    tensors, value = (query, key, *others), others[0]
    if value.shape[0] == 0:
        # Without a query only a dense bias w [T, S] tells how many rows there are.
        tokens = len(others[1]) if op == 'aft_full' else (key if query is None else query).shape[1]
        return _empty(tokens, value, *tensors)
    with no_autocast(value):
        return implementation(op, tensors, options)(*tensors, **options)


def _one_graph(grid: Sequence[int]) -> Sequence[int]:
    """The grid, as constants to torch.compile, which makes a graph for each.

    Of symbols it does not know that their product is the number of tokens, and torch.cond refuses
    forms whose results it does not know to be of one size.
    """
    return [len(range(n)) for n in grid] if torch.compiler.is_dynamo_compiling() else grid


def _empty(tokens: int, value: Tensor, *tensors: Tensor | None) -> Tensor:
    """The output of an empty batch; the gradient of every tensor is 0, not missing."""
    nothing = sum(x.sum() for x in tensors if x is not None)
    return value.new_empty(0, tokens, value.shape[2]) + nothing


def aft_simple(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str = 'softmax',
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: str = 'sigmoid',
) -> Tensor:
    """AFT without position bias, ``W = 1`` (arXiv 2105.14103, eq. 5).

    ``key_function='relu'`` is the unnormalised ``g(q) ⊙ Σ relu(k) ⊙ v`` (ICLR submission, eq. 3);
    ``'relu2'``, with gate='relu' only, is ``relu(q) ⊙ Σ relu(k) ⊙ v + relu(−q) ⊙ Σ relu(−k) ⊙ v``,
    which is ``Σ relu(q ⊙ k) ⊙ v`` (eq. 6 there). Without `causal` T may differ from S.
    Returns [B, T, D].
    """
    shared = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_key_function(key_function, gate)
    checks.check_tokens(query, key, value, same_length=False, **shared)
    return _run('aft_simple', query, key, value, key_function=key_function, **shared)


def aft_full(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: str = 'sigmoid',
) -> Tensor:
    """AFT with a dense position bias, ``W = exp(w)`` (arXiv 2105.14103, eq. 2).

    position_bias is w [T, S]; without `causal` T may differ from S. Returns [B, T, D].
    """
    shared = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=False, **shared)
    checks.check_tensor('position_bias', position_bias, value)
    checks.check_position_bias(position_bias, query, key, causal)
    return _run('aft_full', query, key, value, position_bias, **shared)


def aft_local(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None = None,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: str = 'sigmoid',
) -> Tensor:
    """AFT with a position bias inside a window only (arXiv 2105.14103, eq. 4 and 7).

    ``w = pos_u pos_vᵀ`` where ``|t − t'| < window``, on a 2-d `grid` (H, W) where ``|Δrow| < s_r``
    and ``|Δcol| < s_c`` with window an int or the pair (s_r, s_c); w = 0 elsewhere, so far tokens
    still count. pos_u, pos_v [T, d'].

    Without pos_v the bias is not factorised and pos_u is w itself, on a 1-d grid: column
    ``s − 1 + (t' − t)`` of row t is w[t, t'], [T, s] if causal and [T, 2s − 1] if not, s ≥ 1.
    Returns [B, T, D].
    """
    shared = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=True, **shared)
    _check_local(pos_u, pos_v, value, window, grid, causal)
    factors = dict(window=window, grid=grid)
    return _run('aft_local', query, key, value, pos_u, pos_v, **factors, **shared)


def aft_conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool = True,
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: str = 'sigmoid',
) -> Tensor:
    """AFT whose position bias depends on the offset only, per head (arXiv 2105.14103, eq. 6 and 8).

    key [B, T, h]; head i serves the channels i·D/h … (i+1)·D/h − 1. weight is w
    ``[h, *kernel]``, already reparameterised: entry ``centre + (t' − t)`` is the bias of the source
    at t'. grid has 1, 2 or 3 sizes, kernels are odd and may be larger than the grid.
    ``global_connectivity=False`` sets W = 0 outside the kernel instead of 1. Returns [B, T, D].
    """
    shared = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tensor('weight', weight)
    heads = weight.shape[0] if weight.dim() else 0
    checks.check_tokens(query, key, value, same_length=True, heads=heads, **shared)
    checks.check_tensor('weight', weight, value)
    check_flag('global_connectivity', global_connectivity)
    check_sizes('grid', grid, (1, 2, 3))
    checks.check_grid(grid, key.shape[1], dims=(1, 2, 3))
    checks.check_kernel(weight.shape[1:], grid)
    places = dict(grid=_one_graph(grid), global_connectivity=global_connectivity)
    return _run('aft_conv', query, key, value, weight, **places, **shared)


def aft_local_hard(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    gate: str = 'sigmoid',
) -> Tensor:
    """AFT over a hard window, W = 1 inside and 0 outside (ICLR submission, algorithms 1 and 2).

    1-d: ``t − s < t' ≤ t`` (not causal: ``|t − t'| < s``). 2-d with `grid` (H, W) and the even
    window (s_h, s_w): a left block, rows ``r − s_h/2 < r' ≤ r`` and columns
    ``c − s_w/2 < c' ≤ c``, and a right block, rows ``r − s_h/2 ≤ r' < r`` and columns
    ``c < c' ≤ c + s_w/2``: the left block of the row above, moved right. Every token counts once;
    the paper's pseudo code clamps an index and so counts some twice at the right border. Not
    causal: rows ``r − s_h/2 < r' ≤ r + s_h/2``, columns ``c − s_w/2 < c' ≤ c + s_w/2``.
    Returns [B, T, D].
    """
    shared = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=True, **shared)
    checks.check_grid(grid, key.shape[1], dims=(1, 2))
    checks.check_hard_window(window, grid)
    if grid is not None:
        grid = _one_graph(grid)
    return _run('aft_local_hard', query, key, value, window=window, grid=grid, **shared)


def aft_local_learned(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None = None,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: str = 'sigmoid',
) -> Tensor:
    """AFT with learned local weights that have a softmax of their own (ICLR submission, eq. 8).

    ``y_t = g(q_t) ⊙ Σ_t' softmax(w_t)[t'] softmax(k)[t'] ⊙ v_t' = g(q_t) ⊙ N_t / (Z_t D_t)`` with
    the w of :func:`aft_local`, 0 outside the window, N its numerator ``Σ W e^k v``, ``Z = Σ W`` and
    ``D = Σ e^k``, all over the visible tokens. The weights do not sum to one: W = 1 gives
    AFT-simple over the number of visible tokens, as window 0 does. pos_v may be None as there.
    Returns [B, T, D].
    """
    shared = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=True, **shared)
    _check_local(pos_u, pos_v, value, window, grid, causal)
    factors = dict(window=window, grid=grid)
    return _run('aft_local_learned', query, key, value, pos_u, pos_v, **factors, **shared)


def _check_local(
    pos_u: Tensor,
    pos_v: Tensor | None,
    value: Tensor,
    window: Window,
    grid: Sequence[int] | None,
    causal: bool,
) -> None:
    checks.check_grid(grid, value.shape[1], dims=(1, 2))
    checks.check_window(window, grid)
    checks.check_tensor('pos_u', pos_u, value)
    if pos_v is None:
        checks.check_free_bias(pos_u, value.shape[1], window, grid, causal)
    else:
        checks.check_tensor('pos_v', pos_v, value)
        checks.check_factors(pos_u, pos_v, value.shape[1], value.shape[1])
