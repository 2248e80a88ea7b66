"""Drawing from a categorical distribution, the one place that defines the sampling options."""

import torch
from torch import Tensor

from aft_mm.checks import check_flag, check_int, check_number

__all__ = ['check_logits', 'check_sampling', 'draw']


def check_sampling(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> None:
    """Raise ValueError unless 0 < temperature < ∞, top_k is an int ≥ 1, 0 < top_p ≤ 1 and seed is
    an int of at most 63 bits, which every device takes."""
    check_number('temperature', temperature, above=0)
    if top_k is not None:
        check_int('top_k', top_k, 1)
    if top_p is not None:
        check_number('top_p', top_p, above=0, most=1)
    if seed is not None:
        check_int('seed', seed, 0, 2**63 - 1)


def check_logits(logits: Tensor) -> None:
    """Raise ValueError for logits [B, V] that are NaN or leave no value; waits for the device."""
    if not logits.amax(-1).isfinite().all():
        raise ValueError(
            'logits must be finite, got NaN or infinite ones: the weights of the model are damaged '
            'or too large'
        )


def draw(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One value per row of logits [B, V], int64 [B].

    Drawn from ``softmax(logits / temperature)`` over the `top_k` most probable values and, of what
    they leave, over the smallest set of most probable values that together have at least `top_p`.
    `greedy` takes the most probable value and draws nothing. Raises ValueError as
    :func:`check_sampling`, and on a CPU for logits that are NaN or leave no value to draw;
    elsewhere a look at them would wait for the device.
    """
    check_sampling(temperature, top_k, top_p)
    check_flag('greedy', greedy)
    if logits.device.type == 'cpu':
        check_logits(logits)
    if greedy:
        return logits.argmax(-1)
    p = (logits.double() / temperature).softmax(-1)
    if top_k is not None or top_p is not None:
        p = p * _most_probable(p, top_k, top_p)
    # In the order of values: the noise belongs to a value, whatever rounding does to its rank.
    return torch.multinomial(p, 1, generator=generator).squeeze(-1)


def _most_probable(p: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Which values `top_k` and then `top_p` leave, bool [B, V]; of equals the first."""
    p, values = p.sort(stable=True, dim=-1, descending=True)
    kept = torch.ones_like(p, dtype=torch.bool)
    if top_k is not None:
        kept[:, top_k:] = False
        p = p * kept
        p = p / p.sum(-1, keepdim=True)
    if top_p is not None:
        kept &= p.cumsum(-1) - p < top_p
    return kept.scatter(-1, values, kept)
