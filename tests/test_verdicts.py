"""tools/analysis_tools/verdicts.py against scipy.stats, and its words."""

import sys
from pathlib import Path

import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / 'tools' / 'analysis_tools'))

from verdicts import (  # noqa: E402
    NOT_DECIDABLE,
    OPPOSITE,
    SAME,
    difference,
    mean_interval,
    verdict,
    verdict_table,
)

A, B, NOISY = [3.10, 3.11, 3.09], [3.20, 3.24, 3.22, 3.21], [3.0, 3.3, 3.4]


def test_the_interval_of_a_mean_is_students():
    expected = stats.t.interval(0.95, 2, loc=3.10, scale=stats.sem(A))
    assert mean_interval(A) == pytest.approx(expected)
    assert mean_interval(A[:1]) is None


@pytest.mark.parametrize('values', [A, B, NOISY])
def test_differences_are_welchs(values):
    reference = [3.15, 3.12, 3.18]
    found, expected = (
        difference(values, reference),
        stats.ttest_ind(values, reference, equal_var=False),
    )
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.degrees == pytest.approx(expected.df)
    assert found.interval == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    'values, sign, expected',
    [
        (B, '+', SAME),
        (B, '-', OPPOSITE),
        (NOISY, '+', NOT_DECIDABLE),
        (B[:1], '+', NOT_DECIDABLE),
    ],
)
def test_verdicts(values, sign, expected):
    assert verdict(difference(values, A), sign) == expected


def test_runs_that_are_all_equal_have_no_interval():
    assert difference([2.0, 2.0], [1.0, 1.0]).p is None


def test_a_verdict_never_speaks_of_the_paper():
    table = verdict_table({'a': A, 'b|c': B, 'd': NOISY}, 'bits', {'b|c': '+'})
    half = stats.t.ppf(0.975, 2) * stats.sem(A)
    assert table.splitlines()[2] == f'| a | 3 | 3.1000 ± {half:.4f} | – | – | – |'
    assert '| b\\|c | 4 |' in table and f'| {SAME} |' in table
    assert table.splitlines()[-1].endswith('| – |')
    assert 'confirm' not in table and 'contradict' not in table
