"""Sampling from a categorical distribution: temperature, top-k and top-p."""

import torch
from torch import Tensor

from aft_mm.checks import check_flag, check_int, check_number


def check_sampling(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    greedy: bool = False,
) -> None:
    """Check the options of :func:`sample_categorical`, and a seed of at most 63 bits."""
    check_number('temperature', temperature, above=0)
    if top_k is not None:
        check_int('top_k', top_k, 1)
    if top_p is not None:
        check_number('top_p', top_p, above=0, most=1)
    check_flag('greedy', greedy)
    for name, given in dict(temperature=temperature != 1, top_k=top_k, top_p=top_p).items():
        if greedy and given:
            raise ValueError(f'{name} has no effect with greedy=True')
    if seed is not None:
        check_int('seed', seed, 0, 2**63 - 1)


def check_logits(logits: Tensor) -> None:
    """Raise ValueError if a row of logits [B, V] has NaN or no finite value; synchronises."""
    if not logits.amax(-1).isfinite().all():
        raise ValueError(
            'logits must be finite, got NaN or infinity: the weights of the model are damaged or '
            'too large'
        )


def sample_categorical(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample one value per row of ``softmax(logits / temperature)``, int64 [B].

    Args:
        logits: [B, V].
        temperature, top_k, top_p, greedy: See :func:`aft_mm.models.generate`.
        generator: torch's default generator if None.

    Raises:
        ValueError: As :func:`check_sampling`; on a CPU also if a row has NaN or no finite logit.
    """
    check_sampling(temperature, top_k, top_p, greedy=greedy)
    if logits.device.type == 'cpu':
        check_logits(logits)
    if greedy:
        return logits.argmax(-1)
    p = (logits.double() / temperature).softmax(-1)
    if top_k is not None or top_p is not None:
        p = p * _most_probable(p, top_k, top_p)
    # Unsorted, so that noise belongs to a value and not to its rank.
    return torch.multinomial(p, 1, generator=generator).squeeze(-1)


def _most_probable(p: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return which values `top_k` and then `top_p` allow, bool [B, V]."""
    p, values = p.sort(stable=True, dim=-1, descending=True)
    allowed = torch.ones_like(p, dtype=torch.bool)
    if top_k is not None:
        allowed[:, top_k:] = False
        p = p * allowed
        p = p / p.sum(-1, keepdim=True)
    if top_p is not None:
        allowed &= p.cumsum(-1) - p < top_p
    return allowed.scatter(-1, values, allowed)
