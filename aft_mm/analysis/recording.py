"""Record what the layers of a model compute: outputs, keys, attention."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aft_mm.checks import refuse


def mixers_with_keys(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, 'position_bias') and isinstance(getattr(module, 'key', None), nn.Linear)
    }


def by_layer(mixers: Mapping[str, Any]) -> dict[int, Any]:
    """Return mixers by the number of their block, or by their order if they are not in one stack."""
    found = [re.search(r'^(.*)\.(\d+)\.token_mixer$', name) for name in mixers]
    numbers = [int(match[2]) for match in found if match]
    stacks = {match[1] for match in found if match}
    if sorted(set(numbers)) != numbers or len(numbers) != len(mixers) or len(stacks) > 1:
        numbers = list(range(len(mixers)))
    return dict(zip(numbers, mixers.values(), strict=True))


@contextmanager
def record_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.__setitem__(name, output)

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class _AttentionMode(TorchFunctionMode):
    def __init__(self, take: Callable[[Tensor], Any], inside: bool) -> None:
        super().__init__()
        self.take, self.inside = take, inside

    def set_inside(self, inside: bool) -> Callable[..., None]:
        return lambda *call: setattr(self, 'inside', inside)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside and func is F.scaled_dot_product_attention:
            self.take(attention_probabilities(*args, **kwargs))
        return func(*args, **kwargs)


@contextmanager
def record_attention(
    take: Callable[[Tensor], Any], modules: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Pass the probabilities ``[B, h, T, S]`` of each attention inside the block to ``take``.

    It sees torch's ``scaled_dot_product_attention`` only, and of given modules no other.
    """
    mode = _AttentionMode(take, inside=not modules)
    handles = [module.register_forward_pre_hook(mode.set_inside(True)) for module in modules]
    handles += [module.register_forward_hook(mode.set_inside(False)) for module in modules]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


def attention_probabilities(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``softmax(q kᵀ · scale)`` [..., T, S] of torch's attention before dropout."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = (query @ key.mT).float() * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if attn_mask is not None:
        logits = (
            logits.masked_fill(~attn_mask, -torch.inf)
            if attn_mask.dtype == torch.bool
            else logits + attn_mask
        )
    return logits.softmax(-1)


def grid_of(num_tokens: int, image_size: Sequence[int]) -> tuple[int, int] | None:
    """Return rows and columns of square patches that cover an image (H, W), or None."""
    grids = (
        (rows, num_tokens // rows) for rows in range(1, num_tokens + 1) if num_tokens % rows == 0
    )
    return next((grid for grid in grids if _fits(grid, image_size)), None)


def as_map(output: Any, image_size: Sequence[int], num_prefix_tokens: int = 0) -> Tensor:
    """Convert the output of a layer to a map [B, D, H', W'] over images of ``image_size``."""
    while isinstance(output, Sequence) and len(output):
        output = output[0]
    if isinstance(output, Tensor) and output.dim() == 4:
        last = _fits(output.shape[1:3], image_size) and not _fits(output.shape[2:], image_size)
        return output.permute(0, 3, 1, 2) if last else output
    if isinstance(output, Tensor) and output.dim() == 3:
        grid = grid_of(output.shape[1] - num_prefix_tokens, image_size)
        if grid is not None:
            return output[:, num_prefix_tokens:].unflatten(1, grid).permute(0, 3, 1, 2)
    refuse(
        'the output of the layer',
        'a map [B, D, H, W] or tokens [B, T, D] that cover images of '
        f'{tuple(image_size)} pixels after {num_prefix_tokens} prefix tokens',
        output,
    )


def _fits(grid: Sequence[int], image_size: Sequence[int]) -> bool:
    cells = {-(-pixels // count) for pixels, count in zip(image_size, grid, strict=True)}
    return any(
        all(-(-pixels // cell) == count for pixels, count in zip(image_size, grid, strict=True))
        for cell in cells
    )
