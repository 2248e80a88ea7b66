import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from aft_mm.checks import check_int, refuse
from aft_mm.tokenizers import TextUnits

from .generation import as_tensor

if TYPE_CHECKING:
    import numpy as np

BLANK = 0
NEVER = -math.inf
SUM_ERROR = 0.1  # of probabilities in bfloat16

Prefix = tuple[int, ...]


class Hypothesis(NamedTuple):
    """Decoded units and their log probability in nats."""

    units: Prefix
    score: float


def decode_greedily(log_probs: 'Tensor | np.ndarray') -> Hypothesis:
    """Return the most likely alignment of log_probs [T, V], without repetitions and blanks."""
    best, path = _checked(log_probs).max(-1)
    units = tuple(unit for unit, _ in groupby(path.tolist()) if unit != BLANK)
    return Hypothesis(units, best.double().sum().item())


class Lexicon:
    """A loop over words: a transcript is one or more of them, with the separator between them.

    Args:
        words: Units of each word.
        separator: Unit between two words, such as the space; None for none.
    """

    def __init__(self, words: Sequence[Prefix], separator: int | None = None) -> None:
        if not words or not all(words) or any(separator in word for word in words):
            refuse('words', 'one or more of one or more units, without the separator', words)
        # A state is the set of possible places, the units of a word so far.
        self.words = frozenset(words)
        self.separator = separator
        self.next_units: dict[Prefix, set[int]] = defaultdict(set)
        for word in words:
            for n, unit in enumerate(word):
                self.next_units[word[:n]].add(unit)

    start: frozenset[Prefix] = frozenset([()])

    @classmethod
    def of(cls, words: Collection[str], units: TextUnits) -> 'Lexicon':
        """Return the lexicon of words, separated by the space if it is a unit."""
        several = isinstance(words, Collection) and not isinstance(words, str)
        if not several or not all(isinstance(word, str) for word in words):
            refuse('words', 'a list of texts', words)
        encoded = [units.encode(word) for word in words]
        for word, (_, unknown) in zip(words, encoded, strict=True):
            if unknown:
                refuse('words', f'written in the units, which lack {unknown[0]!r}', word)
        return cls([pieces for pieces, _ in encoded], units.numbers.get(' '))

    def step(self, state: frozenset[Prefix], unit: int) -> frozenset[Prefix]:
        """Return the state after the unit, empty if no transcript continues so."""
        if unit == self.separator:
            return self.start if state & self.words else frozenset()
        places = set(state)
        if self.separator is None and state & self.words:
            places.add(())
        return frozenset(p + (unit,) for p in places if unit in self.next_units.get(p, ()))

    def is_complete(self, state: frozenset[Prefix]) -> bool:
        return bool(state & self.words)


def decode_by_beam(
    log_probs: 'Tensor | np.ndarray', beam_size: int, lexicon: Lexicon | None = None
) -> list[Hypothesis]:
    """Return the most likely transcripts, best first, by prefix beam search (Hannun et al. 2014).

    Args:
        log_probs: Log probabilities [T, V], blank first.
        beam_size: Number of prefixes, and of results at most.
        lexicon: Words that a transcript consists of; if none is complete, the result is empty.
    """
    check_int('beam_size', beam_size, 1)
    beam: dict[Prefix, tuple[float, float]] = {(): (0.0, NEVER)}
    states: dict[Prefix, frozenset[Prefix]] = {(): Lexicon.start}
    for frame in _checked(log_probs).double().tolist():
        ends: dict[Prefix, list[float]] = defaultdict(lambda: [NEVER, NEVER])
        for prefix, (blank, unit) in beam.items():
            both = _add(blank, unit)
            same = ends[prefix]
            same[0] = _add(same[0], both + frame[BLANK])
            if prefix:
                same[1] = _add(same[1], unit + frame[prefix[-1]])
            for new in range(1, len(frame)):
                if lexicon is not None:
                    state = lexicon.step(states[prefix], new)
                    if not state:
                        continue
                    states[prefix + (new,)] = state
                # A unit only repeats after a blank.
                before = blank if prefix and prefix[-1] == new else both
                if before + frame[new] > NEVER:
                    longer = ends[prefix + (new,)]
                    longer[1] = _add(longer[1], before + frame[new])
        best = sorted(ends.items(), key=lambda item: (-_add(*item[1]), item[0]))[:beam_size]
        beam = {prefix: (blank, unit) for prefix, (blank, unit) in best if max(blank, unit) > NEVER}
        states = {prefix: states[prefix] for prefix in beam if prefix in states}
    if lexicon is not None:
        complete = {p: ends for p, ends in beam.items() if lexicon.is_complete(states[p])}
        beam = complete or {(): (NEVER, NEVER)}
    return [Hypothesis(prefix, _add(*ends)) for prefix, ends in beam.items()]


def _add(a: float, b: float) -> float:
    high, low = (a, b) if a > b else (b, a)
    return high if low == NEVER else high + math.log1p(math.exp(low - high))


def _checked(log_probs: 'Tensor | np.ndarray') -> Tensor:
    wanted = 'a tensor or array [T, V] with V of 2 or more'
    checked = as_tensor(log_probs, 'log_probs', wanted)
    if checked.dim() != 2 or checked.shape[-1] < 2:
        refuse('log_probs', wanted, log_probs)
    if not checked.amax(-1).isfinite().all():
        raise ValueError('log_probs must be finite, got NaN or infinite ones')
    sums = checked.double().logsumexp(-1).exp()
    if (sums > 1 + SUM_ERROR).any():  # below 1 where units are forbidden
        raise ValueError(
            'log_probs must be log probabilities, whose exponentials sum to at most 1 in each frame, '
            f'got a sum of {sums.max():.3g}'
        )
    return checked
