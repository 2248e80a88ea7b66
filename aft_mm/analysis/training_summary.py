"""Judge a training by its log: how certain the best result is, where the curve went, what to do next."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aft_mm.checks import FEWEST_VALIDATED, counted
from aft_mm.structures import BEST_SCORE, BY_CLASS

from .run_logs import trained, validations
from .verdicts import LEVEL

#: Metrics that are a share of the samples, in percent.
SHARES = re.compile(r'(^|/)accuracy/top\d+$')
#: Change of another metric, relative to its best value, that counts.
NOTABLE = 0.02
#: Validations and iterations from which on a curve has a direction.
FEWEST = 4
FEWEST_ITERATIONS = 50
#: Names in a sentence.
MOST_NAMES = 5


class Summary(NamedTuple):
    """Sentences by title, and the step that follows: 'look', 'data', 'rate', 'longer' or ''."""

    sentences: dict[str, str]
    step: str


def wilson_interval(percent: float, number: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of ``number`` samples, in percent."""
    from scipy.stats import binomtest

    share = binomtest(round(percent / 100 * number), number).proportion_ci(LEVEL, 'wilson')
    return 100 * share.low, 100 * share.high


def summarize(
    records: Sequence[dict],
    metric: str,
    number: int,
    rule: str = 'greater',
    commonest: float = 0.0,
) -> Summary:
    """Judge the best validation of a training.

    Args:
        records: Those of :func:`read_scalars`.
        metric: The metric that chooses the best checkpoint.
        number: Samples of the validation set.
        rule: Which values are better, ``'greater'`` or ``'less'``; '' if unknown.
        commonest: Share of the commonest class in the validation set [%].
    """
    looks = validations(records, metric)
    if not looks:
        return Summary({}, '')
    sign = -1 if rule == 'less' else 1
    best_at, best = max(looks, key=lambda look: sign * look[1])
    sentences, step, noise = (
        {'validated': f'on {counted(number, "sample")}'},
        '',
        NOTABLE * abs(best),
    )
    if SHARES.search(metric) and number:
        low, high = wilson_interval(best, number)
        noise = (high - low) / 2
        sentences['validated'] += f': 95 % interval {low:.1f} to {high:.1f} %'
        if metric.endswith('top1') and low <= commonest:
            sentences['chance'] = f'the commonest class alone gives {commonest:.1f} %'
            step = 'look'
        if number < FEWEST_VALIDATED:
            sentences['validated'] += '; so few say almost nothing'
            return Summary(sentences, '')
    if not rule:
        return Summary(sentences, '')
    if len(looks) > 1:
        sentences['validated'] += (
            f'; the best of {len(looks)} validations, so expect worse on other data'
        )
    losses = trained(records, 'loss')
    if losses and looks[-1][0] < FEWEST_ITERATIONS:
        sentences['trend'] = f'fewer than {FEWEST_ITERATIONS} iterations are too few to judge'
        return Summary(sentences, '')
    direction, next_step = _direction(looks, best_at, sign, noise, losses)
    if direction:
        sentences['trend'] = direction.format(at=f'{best_at:,}')
    return Summary(sentences, step or next_step)


def _direction(
    looks: Sequence[tuple[int, float]],
    best_at: int,
    sign: int,
    noise: float,
    losses: Sequence[tuple[int, float]],
) -> tuple[str, str]:
    if len(looks) < FEWEST:
        return '', ''
    quarter = len(looks) // 4
    values = sign * np.array([value for _, value in looks])
    end, before = values[-quarter:].mean(), values[-2 * quarter : -quarter].mean()
    if best_at < looks[-quarter][0] and values.max() - end > noise:
        word = 'fell' if sign > 0 else 'rose'
        said = f'best at iteration {{at}}, then {word} to {abs(end):.4g}'
        length = looks[-1][0] - looks[-quarter - 1][0]
        at_best = [value for at, value in losses if best_at - length < at <= best_at]
        at_end = [value for at, value in losses if at > looks[-1][0] - length]
        if not at_best or not at_end:
            return said, 'data'
        if np.mean(at_end) < np.mean(at_best):
            return f'{said} while the training loss fell: overfitting', 'data'
        return f'{said}, and the training loss did not fall', 'rate'
    if end - before > noise:
        return 'still improving at the end', 'longer'
    return 'flat at the end', ''


def weakest(measure: str, values: Mapping[str, float], most: int = 3) -> str:
    """Name the classes with the lowest values of a measure, 0 to 1; NaN for a class without samples."""
    known = {name: value for name, value in values.items() if value == value}
    absent = len(values) - len(known)
    without = f'; {absent} of {len(values)} classes have no sample there' if absent else ''
    zero = [name for name, value in known.items() if not value]
    if zero:
        return f'{measure} is 0 for {len(zero)} of {len(known)} classes: {listed(zero)}{without}'
    last = sorted(known, key=known.__getitem__)[: min(most, max(1, len(known) // 2))]
    return ', '.join(f'{name} {100 * known[name]:.1f}' for name in last) + f' % {measure}{without}'


def class_lines(info: dict[str, Any]) -> dict[str, str]:
    """Return sentences about the classes of a detector or segmentor, given the info of a MessageHub."""
    lines, by_class = {}, info.get(BY_CLASS)
    if by_class and len(by_class['values']) > 1:
        lines['weakest'] = weakest(**by_class)
    if by_class and by_class['measure'] == 'AP50' and BEST_SCORE not in info:
        if 0 in by_class['values'].values():
            lines['boxes'] = 'none is detected, so AP is 0: train longer, or from a checkpoint'
    elif BEST_SCORE in info:
        lines['boxes'] = (
            f'the best F1 is at score {info[BEST_SCORE]:.3g}, the default of `aft_mm predict`'
        )
    return lines


def listed(names: Iterable[str], most: int = MOST_NAMES) -> str:
    """Return names separated by commas, of many the first ones and the number of others."""
    names = list(names)
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(names[:most]) + more
