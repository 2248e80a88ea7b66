"""Verdicts on groups of runs against scipy.stats, and their table."""

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
    table = verdict_table({'a|a': A, 'b|c': B, 'd': NOISY}, 'bits', {'b|c': '+'})
    half = stats.t.ppf(0.975, 2) * stats.sem(A)
    assert r'| difference from a\|a |' in table
    assert table.splitlines()[2] == f'| a\\|a | 3 | 3.1000 ± {half:.4f} | – | – | – |'
    assert '| b\\|c | 4 |' in table and f'| {SAME} |' in table
    assert table.splitlines()[-1].endswith('| – |')
    assert 'confirm' not in table and 'contradict' not in table


@pytest.mark.parametrize(
    ('groups', 'means'),
    [
        ({'a': [81.2, 79.9], 'b': [70.5, 74.5]}, ['80.55', '72.50']),  # errors 0.65 and 2
        ({'a': [0.00213, 0.00215], 'b': [1.0, 1.0]}, ['0.002140', '1.000000']),  # 1e-5 and 0
        ({'a': [12345.0, 23456.0]}, ['17900']),
        ({'a': [81.234567]}, ['81.23']),
        ({'a': [0.0, 0.0]}, ['0.000']),
        ({'a': [1.0, 1 + 1e-15]}, ['1.00000000']),
    ],
)
def test_numbers_end_at_the_second_digit_of_the_smallest_error(groups, means):
    rows = verdict_table(groups, 'x').splitlines()[2:]
    found = [row.split(' | ')[2].split(' ± ')[0] for row in rows]
    assert found == means
