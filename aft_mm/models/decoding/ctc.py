"""Decoding of the posteriors of CTC."""

import math
from collections import defaultdict
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from aft_mm.checks import check_int, refuse

BLANK = 0
NEVER = -math.inf

Prefix = tuple[int, ...]


class Hypothesis(NamedTuple):
    """Decoded units and their log probability in nats."""

    units: Prefix
    score: float


def decode_greedily(log_probs: Tensor) -> Hypothesis:
    """Return the most likely alignment of log_probs [T, V], without repetitions and blanks.

    Its score is the log probability of that alignment alone.
    """
    _check(log_probs)
    best, path = log_probs.max(-1)
    units = tuple(unit for unit, _ in groupby(path.tolist()) if unit != BLANK)
    return Hypothesis(units, best.double().sum().item())


def decode_by_beam(log_probs: Tensor, beam_size: int) -> list[Hypothesis]:
    """Return the most likely transcripts of log_probs [T, V], best first.

    Prefix beam search (Hannun et al. 2014): each prefix carries the summed probability of its
    alignments so far, separately for those that end in a blank and in its last unit. After every
    frame the `beam_size` most likely prefixes survive; ties are broken by their units. Scores are
    exact if no prefix is dropped.

    Args:
        log_probs: log probabilities [T, V], blank first.
        beam_size: number of prefixes, and the largest number of results.
    """
    check_int('beam_size', beam_size, 1)
    _check(log_probs)
    beam: dict[Prefix, tuple[float, float]] = {(): (0.0, NEVER)}
    for frame in log_probs.double().tolist():
        ends: dict[Prefix, list[float]] = defaultdict(lambda: [NEVER, NEVER])
        for prefix, (blank, unit) in beam.items():
            both = _add(blank, unit)
            same = ends[prefix]
            same[0] = _add(same[0], both + frame[BLANK])
            if prefix:
                same[1] = _add(same[1], unit + frame[prefix[-1]])
            for new in range(1, len(frame)):
                # A unit only repeats after a blank.
                before = blank if prefix and prefix[-1] == new else both
                if before + frame[new] > NEVER:
                    longer = ends[prefix + (new,)]
                    longer[1] = _add(longer[1], before + frame[new])
        best = sorted(ends.items(), key=lambda item: (-_add(*item[1]), item[0]))[:beam_size]
        beam = {prefix: (blank, unit) for prefix, (blank, unit) in best}
    return [Hypothesis(prefix, _add(*ends)) for prefix, ends in beam.items()]


def _add(a: float, b: float) -> float:
    """Return ``log(e^a + e^b)``."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == NEVER else high + math.log1p(math.exp(low - high))


def _check(log_probs: Tensor) -> None:
    if log_probs.dim() != 2 or log_probs.shape[-1] < 2:
        refuse('log_probs', 'a tensor [T, V] with V of 2 or more', log_probs)
    if not log_probs.amax(-1).isfinite().all():
        raise ValueError('log_probs must be finite, got NaN or infinite ones')
