"""`aft_mm compare seeds`: its table, intervals and verdicts against scipy.stats, rejected arguments."""

import json
from pathlib import Path

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

from ..errors import stops
from ..helpers import command

main = command('compare seeds')


@pytest.fixture
def files(here):
    values = dict(a_seed0=2.61, a_seed1=2.58, a_seed2=2.63, b_seed0=2.51, text='2.5', true=True)
    values['nan'] = float('nan')
    for name, value in values.items():
        metrics = dict(bits_per_char=value, perplexity_per_char=6.1)
        Path(f'{name}.json').write_text(json.dumps(metrics))
    Path('list.json').write_text('[2.5]')
    Path('half.json').write_text('{"bits_per_char": 2.')
    Path('deep.json').write_text('[' * 10**5)
    Path('bytes.json').write_bytes(b'\x80\x00')
    return here


A = ['--group', 'a', 'a_seed0.json', 'a_seed1.json', 'a_seed2.json']
B = ['--group', 'b', 'b_seed0.json']
TABLE = """\
| group | n | bits/char | difference from a | p |
| --- | ---: | ---: | ---: | ---: |
| a | 3 | 2.607 ± 0.063 | – | – |
| b | 1 | 2.510 | -0.097 | – |
"""


def test_the_table(files, capsys):
    main(['--metric', 'bits_per_char', *A, *B])
    assert capsys.readouterr().out == TABLE


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (
            ['--metric', 'bits_per_dim', *A],
            r"'a_seed0.json' has no metric 'bits_per_dim'; it holds bits_per_char, perplexity_per_char$",
        ),
        ([*A, '--group', 'c', 'half.json'], "'half.json' is damaged or not JSON: "),
        ([*A, '--group', 'c', 'deep.json'], "'deep.json' is damaged or not JSON: maximum recur"),
        ([*A, '--group', 'c', 'bytes.json'], "'bytes.json' is not valid UTF-8 in byte 0"),
        ([*A, '--group', 'c', 'list.json'], "'list.json' must hold metrics .*, got a list"),
        ([*A, '--group', 'c', 'no.json'], "'no.json' cannot be read: No such file"),
        ([*A, '--group', 'c', 'text.json'], "bits_per_char of 'text.json' must be .* got '2.5'"),
        ([*A, '--group', 'c', 'nan.json'], 'must be a finite number, got nan'),
        ([*A, '--group', 'c', 'true.json'], 'must be a finite number, got True'),
        ([*A, '--group', 'c'], r'--group must be LABEL FILE \[FILE ...\], got c'),
        (
            [*A, '--group', 'b_seed0.json', 'b_seed0.json'],
            '--group must be LABEL FILE .* got b_seed0',
        ),
        ([*A, '--group', 'a', 'b_seed0.json'], "--group must have unique labels, got 'a' twice"),
        ([*A, *A[:1], 'c', './a_seed0.json'], "different files, got './a_seed0.json' twice"),
        ([*A, *B, '--expect', 'b'], "--expect must be LABEL=. or LABEL=-, got 'b'"),
        ([*A, *B, '--expect', 'b=0'], "--expect must be LABEL=. or LABEL=-, got 'b=0'"),
        ([*A, *B, '--expect', 'a=+'], 'expected must name groups after the first, b, got a'),
    ],
)
def test_bad_arguments_give_a_one_line_message(files, words, message):
    metric = [] if '--metric' in words else ['--metric', 'bits_per_char']
    stops(message, main, [*metric, *words])


RUNS, OTHERS, NOISY = [3.10, 3.11, 3.09], [3.20, 3.24, 3.22, 3.21], [3.0, 3.3, 3.4]


def test_the_interval_of_a_mean_is_students():
    expected = stats.t.interval(0.95, 2, loc=3.10, scale=stats.sem(RUNS))
    assert mean_interval(RUNS) == pytest.approx(expected)
    assert mean_interval(RUNS[:1]) is mean_interval([2.0, 2.0]) is None


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
        (OTHERS, '+', SAME),
        (OTHERS, '-', OPPOSITE),
        (NOISY, '+', INCONCLUSIVE),
        (OTHERS[:1], '+', INCONCLUSIVE),
    ],
)
def test_verdicts(values, sign, expected):
    assert verdict(difference(values, RUNS), sign) == expected


def test_runs_that_are_all_equal_have_no_interval():
    assert difference([2.0, 2.0], [1.0, 1.0]).p is None


def test_a_verdict_never_speaks_of_the_paper():
    table = verdict_table({'a|a': RUNS, 'b|c': OTHERS, 'd': NOISY}, 'bits', {'b|c': '+'})
    half = stats.t.ppf(0.975, 2) * stats.sem(RUNS)
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
