"""tools/analysis_tools/verdicts.py against scipy.stats, and its words."""

import pytest
from scipy import stats

from aft_mm.analysis.verdicts import (
    INCONCLUSIVE,
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


def test_differences_are_welchs():
    """The example of the R manual for t.test: extra hours of sleep with two drugs."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = difference(first, second)
    assert found.mean == pytest.approx(-1.58)
    assert found.interval == pytest.approx((-3.3654832, 0.2054832))
    assert found.p == pytest.approx(0.07939414)


@pytest.mark.parametrize(
    'values, sign, expected',
    [
        (B, '+', SAME),
        (B, '-', OPPOSITE),
        (NOISY, '+', INCONCLUSIVE),
        (B[:1], '+', INCONCLUSIVE),
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
