"""Drawing from a categorical distribution, the one place that defines the sampling options."""

import torch
from torch import Tensor

__all__ = ['check_sampling', 'draw']


def check_sampling(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> None:
    """Raise ValueError unless temperature > 0, top_k ≥ 1 and 0 < top_p ≤ 1."""
    if not temperature > 0:
        raise ValueError(f'temperature must be above 0, got {temperature}')
    if top_k is not None and top_k < 1:
        raise ValueError(f'top_k must be 1 or larger, got {top_k}')
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f'top_p must be above 0 and at most 1, got {top_p}')


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
    :func:`check_sampling`.
    """
    check_sampling(temperature, top_k, top_p)
    if greedy:
        return logits.argmax(-1)
    log_p, values = (logits.double() / temperature).log_softmax(-1).sort(-1, descending=True)
    if top_k is not None:
        log_p = log_p[:, :top_k].log_softmax(-1)
    p = log_p.exp()
    if top_p is not None:
        before = p.cumsum(-1) - p
        p = p.masked_fill(before >= top_p, 0)
    return values.gather(-1, torch.multinomial(p, 1, generator=generator)).squeeze(-1)
