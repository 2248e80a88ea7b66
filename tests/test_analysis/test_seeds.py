"""Means over seeds: numbers in the table and positions in the picture."""

import math
import statistics

import pytest

from aft_mm.analysis.compare_seeds import draw_seeds
from aft_mm.analysis.run_logs import mean_and_error
from aft_mm.analysis.verdicts import verdict_table

A, B, ONE = [2.61, 2.58, 2.63], [2.51, 2.55], [2.4]


def cells(table):
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()]


def bars(figure):
    """Return ``(x, y, half length of the bar or None)`` of every mean."""
    found = []
    for container in figure.axes[0].containers:
        (x,), (y,) = container.lines[0].get_data()
        ends = [line.get_segments()[0] for line in container.lines[2]]
        half = abs(ends[0][1] - ends[0][0]).max() / 2 if ends else None
        found.append((float(x), float(y), half))
    return found


def test_the_errors_are_those_of_the_statistics_module():
    mean, error = mean_and_error(A)
    assert mean == statistics.mean(A)
    assert error == pytest.approx(math.sqrt(statistics.variance(A) / 3))
    assert mean_and_error(ONE) == (2.4, None)


def test_a_bar_in_a_name_begins_no_column():
    table = verdict_table({'|x| < 2': A}, 'x')
    assert table.count(r'\|x\| < 2') == 2 and table.count('x| < 2') == 0


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
    found = [row[2].split(' ± ')[0] for row in cells(verdict_table(groups, 'x'))[2:]]
    assert found == means


def test_groups_by_name_are_listed_in_order():
    figure = draw_seeds({'b': B, 'a': A, 'one': ONE}, 'bits/char')
    axis = figure.axes[0]
    assert [text.get_text() for text in axis.get_yticklabels()] == ['b', 'a', 'one']
    assert axis.get_ylim()[0] > axis.get_ylim()[1] and axis.get_xlabel() == 'bits/char'
    assert bars(figure)[:2] == [
        (pytest.approx(mean), place, pytest.approx(error))
        for place, (mean, error) in enumerate(map(mean_and_error, (B, A)))
    ]
    assert bars(figure)[2] == (2.4, 2, None)
    runs = [line.get_xdata().tolist() for line in axis.get_lines() if line.get_color() == 'grey']
    assert runs == [B, A, ONE]


@pytest.mark.parametrize(
    ('names', 'scale'), [(['32', '2'], 'log'), (['0', '2'], 'symlog'), (['0'], 'linear')]
)
def test_groups_by_number_are_placed_at_their_number(names, scale):
    figure = draw_seeds(dict(zip(names, [A, B], strict=False)), 'bits/char', numbers='window')
    axis = figure.axes[0]
    assert axis.get_xscale() == scale
    assert (axis.get_xlabel(), axis.get_ylabel()) == ('window', 'bits/char')
    assert bars(figure) == [
        (float(name), *map(pytest.approx, mean_and_error(values)))
        for name, values in zip(names, [A, B], strict=False)
    ]
    figure.draw_without_rendering()
    labels = [text.get_text() for text in axis.get_xticklabels()]
    assert labels == sorted(names, key=int)


def test_no_labels_overlap():
    figure = draw_seeds({f'a long name with all its settings, {i}': A for i in range(9)}, 'x')
    figure.draw_without_rendering()
    axis = figure.axes[0]
    boxes = sorted(
        (text.get_window_extent() for text in axis.get_yticklabels()), key=lambda box: box.y0
    )
    assert all(low.y1 < high.y0 for low, high in zip(boxes, boxes[1:], strict=False))
    assert min(box.x0 for box in boxes) >= 0


@pytest.mark.parametrize(
    ('groups', 'numbers', 'message'),
    [
        ({'2': A, 'transformer': B}, 'window', "numbers, 0 or larger, got 'transformer'"),
        ({'-1': A}, 'window', "'-1'"),
        ({'nan': A}, 'window', "'nan'"),
        ({'inf': A}, 'window', "'inf'"),
        ({'2': A, '2.0': B}, 'window', 'different numbers, got 2, 2.0'),
    ],
)
def test_invalid_groups_are_rejected(groups, numbers, message):
    with pytest.raises(ValueError, match=message):
        draw_seeds(groups, 'x', numbers)
