"""Drawing from a categorical distribution, the one place that defines the sampling options."""

import math

import torch
from torch import Tensor

__all__ = ['check_sampling', 'draw']


def check_sampling(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> None:
    """Raise ValueError unless 0 < temperature < ∞, top_k is an int ≥ 1, 0 < top_p ≤ 1 and seed is
    an int of at most 63 bits, which every device takes."""
    if not 0 < temperature < math.inf:
        raise ValueError(f'temperature must be above 0 and finite, got {temperature}')
    if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
        raise ValueError(f'top_k must be an int, 1 or larger, got {top_k!r}')
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f'top_p must be above 0 and at most 1, got {top_p}')
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise ValueError(f'seed must be an int, 0 to 2^63 − 1, got {seed!r}')


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
