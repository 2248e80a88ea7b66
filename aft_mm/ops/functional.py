from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aft_mm.checks import refuse

from . import checks
from .conv_plan import ConvPlan
from .dispatch import implementation
from .gates import Gate, in_kernels
from .geometry import Window
from .online_softmax import apply_gate
from .packed_batch import check_packed_grid, run_packed
from .tracing import no_autocast


def aft_simple(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str = 'softmax',
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: Gate = 'sigmoid',
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute AFT without position bias, ``W = 1`` (arXiv 2105.14103, eq. 5).

    - ``key_function='softmax'``: ``g(q) ⊙ Σ e^k ⊙ v / Σ e^k``.
    - ``'relu'``: the unnormalised ``g(q) ⊙ Σ relu(k) ⊙ v`` (ICLR submission, eq. 3).
    - ``'relu2'``: ``Σ relu(q ⊙ k) ⊙ v = relu(q) ⊙ Σ relu(k) ⊙ v + relu(−q) ⊙ Σ relu(−k) ⊙ v`` (ICLR
      submission, eq. 6), with ``gate='relu'`` only.

    For shared arguments see :mod:`aft_mm.ops`.

    Args:
        key_function: 'softmax', 'relu' or 'relu2'.
    """
    if cu_seqlens is not None:
        tokens = query, key, value, key_mask
        options: dict[str, Any] = dict(key_function=key_function, causal=causal, gate=gate)
        return run_packed(aft_simple, tokens, cu_seqlens, {}, options)
    shared: dict[str, Any] = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_key_function(key_function, gate)
    checks.check_tokens(query, key, value, same_length=False, **shared)
    return _run('aft_simple', query, key, value, key_function=key_function, **shared)


def aft_decay(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    gate: Gate = 'sigmoid',
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute AFT-simple whose keys lose weight with the distance, ``w = −λ |t − t'|``.

    Causal, it is :func:`aft_simple` of the keys ``k_t + λ t``, but exact for any length. It is no
    variant of the papers.

    For shared arguments see :mod:`aft_mm.ops`.

    Args:
        decay: λ [D], per channel and token.
    """
    if cu_seqlens is not None:
        tokens = query, key, value, key_mask
        biases, options = dict(decay=(decay, ())), dict(causal=causal, gate=gate)
        return run_packed(aft_decay, tokens, cu_seqlens, biases, options)
    shared: dict[str, Any] = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=True, **shared)
    checks.check_decay(decay, value)
    return _run('aft_decay', query, key, value, decay, **shared)


def aft_full(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    num_heads: int | None = None,
    pair_mask: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: Gate = 'sigmoid',
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute AFT with a dense position bias, ``W = exp(w)`` (arXiv 2105.14103, eq. 2).

    Head i covers the channels i·D/h … (i+1)·D/h − 1 of keys and values.

    For shared arguments see :mod:`aft_mm.ops`.

    Args:
        position_bias: w [T, S], or [B, T, S] per sample; with `num_heads` [h, T, S] or [B, h, T,
            S]. −inf hides a pair.
        num_heads: h, a divisor of D; None for a w without an axis of heads.
        pair_mask: bool [B, T, S], True for pairs to keep, in addition to `key_mask`. Hidden entries
            of w, and keys and values that no row sees, may be NaN and get a gradient of 0.
    """
    if cu_seqlens is not None:
        if pair_mask is not None:
            raise ValueError('pair_mask must be None with cu_seqlens, got a mask')
        dims = (0, 1) if num_heads is None else (1, 2)
        if not isinstance(position_bias, Tensor) or position_bias.dim() != dims[-1] + 1:
            refuse('position_bias', 'one for all sequences with cu_seqlens', position_bias)
        tokens = query, key, value, key_mask
        options: dict[str, Any] = dict(num_heads=num_heads, causal=causal, gate=gate)
        biases = dict(position_bias=(position_bias, dims))
        return run_packed(aft_full, tokens, cu_seqlens, biases, options)
    shared: dict[str, Any] = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=False, **shared)
    checks.check_tensor('position_bias', position_bias, value)
    checks.check_position_bias(position_bias, query, key, causal, num_heads)
    if position_bias.dim() == 2 and pair_mask is None:
        return _run('aft_full', query, key, value, position_bias, **shared)
    if pair_mask is not None:
        checks.check_pair_mask(pair_mask, position_bias, key)
        visible = (pair_mask.tril() if causal else pair_mask).any(1)
        shared['key_mask'] = visible if key_mask is None else key_mask & visible
    options = dict(num_heads=num_heads, pair_mask=pair_mask, **shared)
    return _run('aft_full_batched', query, key, value, position_bias, **options)


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
    gate: Gate = 'sigmoid',
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute AFT with a position bias in a window (arXiv 2105.14103, eq. 4 and 7).

    ``w = pos_u pos_vᵀ`` where ``|t − t'| < window``, on a 2-d grid where ``|Δrow| < s_r`` and
    ``|Δcol| < s_c``. Outside the window W = 1.

    For shared arguments see :mod:`aft_mm.ops`.

    Args:
        pos_u: u [T, d']. Without `pos_v` w itself, on a 1-d grid: column ``s − 1 + (t' − t)`` of
            row t is w[t, t'], [T, s] if causal and [T, 2s − 1] if not, s ≥ 1; −inf hides a pair.
        pos_v: v [T, d'], or None if the bias is not factorised.
        window: s, 0 or larger; on a 2-d grid an int or (s_r, s_c).
        grid: (T,) or (H, W); None for (T,).
    """
    if cu_seqlens is not None:
        check_packed_grid(grid, key)
        tokens = query, key, value, key_mask
        options: dict[str, Any] = dict(window=window, causal=causal, gate=gate)
        biases = dict(pos_u=(pos_u, (0,)), pos_v=(pos_v, (0,)))
        return run_packed(aft_local, tokens, cu_seqlens, biases, options)
    shared: dict[str, Any] = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=True, **shared)
    _check_local(pos_u, pos_v, value, window, grid, causal)
    options = dict(window=window, grid=grid, **shared)
    return _run('aft_local', query, key, value, pos_u, pos_v, **options)


def aft_conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor | ConvPlan,
    *,
    grid: Sequence[int],
    global_connectivity: bool = True,
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: Gate = 'sigmoid',
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute AFT whose position bias depends on the offset only (arXiv 2105.14103, eq. 6 and 8).

    ``w[t, t'] = weight[head, centre + (t' − t)]`` inside the kernel, W = 1 outside it. Head i
    covers the channels i·D/h … (i+1)·D/h − 1 of value.

    For shared arguments see :mod:`aft_mm.ops`.

    Args:
        key: [B, T, h], one channel per head.
        weight: w ``[h, *kernel]``, already reparameterised; sizes are odd and may exceed the grid,
            and −inf hides a pair. Or its plan, from :func:`plan_conv`, for many calls with one w.
        grid: 1, 2 or 3 sizes, whose product is T.
        global_connectivity: Whether W is 1 outside the kernel, else 0.
    """
    if cu_seqlens is not None:
        check_packed_grid(grid, key)

        def mix(query: Tensor | None, key: Tensor, *others: Any, **shared: Any) -> Tensor:
            return aft_conv(query, key, *others, grid=(key.shape[1],), **shared)

        tokens = query, key, value, key_mask
        options: dict[str, Any] = dict(
            global_connectivity=global_connectivity, causal=causal, gate=gate
        )
        return run_packed(mix, tokens, cu_seqlens, dict(weight=(weight, ())), options)
    plan = None
    if isinstance(weight, ConvPlan):
        plan, weight = weight, weight.weight
        # For one image, the checks take longer than the C++ loop.
        if key_mask is None and global_connectivity and not causal:
            if not torch.compiler.is_dynamo_compiling():
                repeated = plan.repeat(query, key, value, grid, gate)
                if repeated is not None:
                    return repeated
    shared: dict[str, Any] = dict(causal=causal, key_mask=key_mask, gate=gate)
    grid = _check_conv(query, key, value, weight, grid, global_connectivity, **shared)
    options = dict(grid=grid, global_connectivity=global_connectivity, **shared)
    return _run('aft_conv', query, key, value, weight, plan=plan, **options)


def aft_conv_joined(
    qkv: Tensor,
    weight: Tensor | ConvPlan,
    *,
    grid: Sequence[int],
    global_connectivity: bool = True,
    causal: bool = False,
    key_mask: Tensor | None = None,
    gate: Gate = 'sigmoid',
) -> Tensor:
    """Compute :func:`aft_conv` of query, key and value side by side, as one product writes them.

    Kernels that read them so also write their gradients so, for one product to read.

    Args:
        qkv: [B, T, 2D + h], or with ``gate='none'`` key and value [B, T, h + D].
    """
    plan, bias = (weight, weight.weight) if isinstance(weight, ConvPlan) else (None, weight)
    query, key, value = checks.check_joined(qkv, bias, gate)
    options: dict[str, Any] = dict(
        grid=grid,
        global_connectivity=global_connectivity,
        causal=causal,
        key_mask=key_mask,
        gate=gate,
    )
    if len(qkv) == 0 or not in_kernels(gate):
        return aft_conv(query, key, value, weight, **options)
    options['grid'] = _check_conv(query, key, value, bias, **options)
    with no_autocast(qkv):
        name, run = implementation('aft_conv', (query, key, value, bias), options, plan)
        tokens = (None, qkv, None) if name == 'cuda' else (query, key, value)
        result: Tensor = run(*tokens, bias, **options)
        return result


def _check_conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    **shared: Any,
) -> Sequence[int]:
    """Check the arguments; return the grid as constants of a graph."""
    checks.check_tensor('weight', weight)
    heads = weight.shape[0] if weight.dim() else 0
    checks.check_tokens(query, key, value, same_length=True, heads=heads, **shared)
    checks.check_tensor('weight', weight, value)
    if not isinstance(global_connectivity, bool):
        checks.check_flag('global_connectivity', global_connectivity)
    checks.check_grid(grid, key.shape[1], kernel=weight.shape[1:])
    return _as_constants(grid) if torch.compiler.is_dynamo_compiling() else grid


def aft_local_hard(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    gate: Gate = 'sigmoid',
) -> Tensor:
    """Compute AFT in a hard window, W = 1 inside and 0 outside (ICLR submission, alg. 1 and 2).

    1-d: ``t − s < t' ≤ t`` (not causal: ``|t − t'| < s``).

    2-d, for row r and column c: a left block, rows ``r − s_h/2 < r' ≤ r`` and columns ``c − s_w/2 <
    c' ≤ c``, and a right block, rows ``r − s_h/2 ≤ r' < r`` and columns ``c < c' ≤ c + s_w/2``. Not
    causal: rows ``r − s_h/2 < r' ≤ r + s_h/2``, columns ``c − s_w/2 < c' ≤ c + s_w/2``. Every token
    counts once, unlike in the paper's pseudo code.

    For shared arguments see :mod:`aft_mm.ops`.

    Args:
        window: s of 1 or larger in 1-d; in 2-d an even int or a pair (s_h, s_w) of even ints.
        grid: (T,) or (H, W); None for (T,).
    """
    shared: dict[str, Any] = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=True, **shared)
    if grid is not None:
        checks.check_grid(grid, key.shape[1], dims=(1, 2))
    checks.check_hard_window(window, grid)
    if grid is not None and torch.compiler.is_dynamo_compiling():
        grid = _as_constants(grid)
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
    gate: Gate = 'sigmoid',
) -> Tensor:
    """Compute AFT with a separate softmax over the local weights (ICLR submission, eq. 8).

    ``y_t = g(q_t) ⊙ Σ_t' softmax(w_t)[t'] softmax(k)[t'] ⊙ v_t' = g(q_t) ⊙ N_t / (Z_t D_t)`` with
    the w of :func:`aft_local`, 0 outside the window, and ``N = Σ W e^k v``, ``Z = Σ W`` and ``D = Σ
    e^k`` over the visible tokens. Arguments are those of :func:`aft_local`.
    """
    shared: dict[str, Any] = dict(causal=causal, key_mask=key_mask, gate=gate)
    checks.check_tokens(query, key, value, same_length=True, **shared)
    _check_local(pos_u, pos_v, value, window, grid, causal)
    options = dict(window=window, grid=grid, **shared)
    return _run('aft_local_learned', query, key, value, pos_u, pos_v, **options)


def _check_local(
    pos_u: Tensor,
    pos_v: Tensor | None,
    value: Tensor,
    window: Window,
    grid: Sequence[int] | None,
    causal: bool,
) -> None:
    if grid is not None:
        checks.check_grid(grid, value.shape[1], dims=(1, 2))
    checks.check_window(window, grid)
    checks.check_tensor('pos_u', pos_u, value)
    if pos_v is None:
        checks.check_free_bias(pos_u, value.shape[1], window, grid, causal)
    else:
        checks.check_tensor('pos_v', pos_v, value)
        checks.check_factors(pos_u, pos_v, value.shape[1], value.shape[1])


def _as_constants(grid: Sequence[int]) -> Sequence[int]:
    """Return the grid as constants: torch.cond needs results of equal sizes."""
    return [len(range(n)) for n in grid]


def _run(
    op: str,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *others: Tensor | None,
    plan: ConvPlan | None = None,
    **options: Any,
) -> Tensor:
    tensors = (query, key, value, *others)
    if value.shape[0] == 0:
        # Without a query only a dense bias w [..., T, S] tells the number of rows.
        if op in ('aft_full', 'aft_full_batched'):
            tokens = tensors[3].shape[-2]
        else:
            tokens = (key if query is None else query).shape[1]
        zero = sum(x.sum() for x in tensors if x is not None)  # a gradient of 0 for every tensor
        return value.new_empty(0, tokens, value.shape[2]) + zero
    gate = options['gate']
    if not in_kernels(gate):
        mixed = _run(op, None, key, value, *others, plan=plan, **{**options, 'gate': 'none'})
        if op == 'aft_simple' and not options['causal']:
            mixed = mixed[:, :1]  # its rows are equal, and as many as keys
        with no_autocast(value):
            wide = mixed.to(torch.promote_types(value.dtype, torch.float32))
            return apply_gate(query, wide, gate, value.dtype)
    with no_autocast(value):
        _, run = implementation(op, tensors, options, plan)
        result: Tensor = run(*tensors, **options)
        return result
