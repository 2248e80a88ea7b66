"""Packed batches: sequences one after another, [1, total, C], without padding between them.

They are mixed in groups of similar lengths, which are padded as a batch, in memory of O(total).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import refuse

from .checks import check_mask

# A group has at most a quarter of padding.
LEAST_SHARE = 0.75


def sequence_lengths(cu_seqlens: Any, total: int) -> list[int]:
    """Return the length of each sequence, by reading values."""
    is_ints = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)
    if not is_ints or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        refuse('cu_seqlens', 'a tensor [N + 1] of int32 or int64', cu_seqlens)
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(ends[:-1], ends[1:], strict=True)]
    if ends[0] != 0 or ends[-1] != total or min(lengths, default=0) < 0:
        refuse('cu_seqlens', f'0 first, never falling, and {total} tokens last', ends)
    return lengths


def mix_packed(
    mix: Callable[..., Tensor],
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Any,
    key_mask: Tensor | None,
    causal: bool,
    pads: bool = True,
) -> Tensor:
    """Return the tokens of every sequence mixed alone, [1, total, D].

    Args:
        mix: ``mix(query, key, value, key_mask)`` of a batch [B, T, C], which ignores hidden tokens.
        query: [1, total, D] or None.
        key: [1, total, C].
        value: [1, total, D].
        cu_seqlens: int [N + 1], see :mod:`aft_mm.ops`.
        key_mask: bool [1, total] or None.
        causal: Whether `mix` is, so that it does not see padding.
        pads: Whether `mix` may get sequences of several lengths.
    """
    _check_packed('key', key)
    total = key.shape[1]
    _check_packed('value', value, total)
    if query is not None:
        _check_packed('query', query, total)
    check_mask(key_mask, key)
    lengths = sequence_lengths(cu_seqlens, total)
    if total == 0:
        # One token checks the arguments, and gives each a gradient of 0.
        tokens = [None if x is None else F.pad(x, (0, 0, 0, 1)) for x in (query, key, value)]
        return mix(*tokens, None)[:, :0]
    given = query, key, value, key_mask
    parts = [None if x is None else x[0].split(lengths) for x in given]
    mixed: dict[int, Tensor] = {}
    for group in _groups(lengths, LEAST_SHARE if pads else 1.0):
        sizes = [lengths[i] for i in group]
        *tokens, mask = (
            None if part is None else _padded([part[i] for i in group], sizes[0]) for part in parts
        )
        if mask is None and not causal and sizes[-1] < sizes[0]:
            places = torch.arange(sizes[0], device=key.device)
            mask = places < torch.tensor(sizes, device=key.device)[:, None]
        for i, row in zip(group, mix(*tokens, mask).unbind(), strict=True):
            mixed[i] = row[: lengths[i]]
    return torch.cat([mixed[i] for i in sorted(mixed)]).unsqueeze(0)


def _check_packed(name: str, x: Any, total: int | None = None) -> None:
    is_packed = isinstance(x, Tensor) and x.dim() == 3 and len(x) == 1
    if not is_packed or (total is not None and x.shape[1] != total):
        shape = f'[1, {"total" if total is None else total}, channels]'
        refuse(name, f'{shape} with cu_seqlens', x)


def _padded(parts: Sequence[Tensor], length: int) -> Tensor:
    """Return sequences [n, ...] as [N, length, ...]; torch.func.vmap has no `pad_sequence`."""
    before = (0, 0) * (parts[0].dim() - 1)
    return torch.stack([F.pad(x, (*before, 0, length - len(x))) for x in parts])


def _groups(lengths: Sequence[int], least_share: float) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] and (not groups or lengths[i] < least_share * lengths[groups[-1][0]]):
            groups.append([])
        if lengths[i]:
            groups[-1].append(i)
    return groups


def run_packed(
    op: Callable[..., Tensor],
    tokens: tuple[Tensor | None, Tensor, Tensor, Tensor | None],
    cu_seqlens: Tensor,
    biases: Mapping[str, tuple[Any, Sequence[int]]],
    options: Mapping[str, Any],
) -> Tensor:
    """Return :func:`mix_packed` of an op.

    Args:
        tokens: query, key, value and key_mask.
        biases: By name, that of the longest sequence, and its dimensions of tokens, to be cropped.
    """

    def mix(query: Tensor | None, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        cropped = [_crop(name, *bias, key.shape[1]) for name, bias in biases.items()]
        return op(query, key, value, *cropped, key_mask=key_mask, **options)

    return mix_packed(mix, *tokens[:3], cu_seqlens, tokens[3], options['causal'])


def _crop(name: str, bias: Any, dims: Sequence[int], tokens: int) -> Any:
    if not isinstance(bias, Tensor):  # None, a plan, or what the op refuses
        return bias
    for dim in dims:
        if bias.dim() <= dim or bias.shape[dim] < tokens:
            raise ValueError(
                f'{name} must have an entry per token of the longest sequence, {tokens}, got '
                f'{list(bias.shape)}'
            )
        bias = bias.narrow(dim, 0, tokens)
    return bias


def check_packed_grid(grid: Sequence[int] | None, key: Tensor) -> None:
    """Check for the grid of all tokens, on which no sequence is a grid of more dimensions."""
    total = tuple(key.shape[1:2]) if isinstance(key, Tensor) else None
    if grid is not None and (not isinstance(grid, (tuple, list)) or tuple(grid) != total):
        refuse('grid', f'(T,) with cu_seqlens, {total}', grid)
