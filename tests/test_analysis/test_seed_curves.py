"""Mean curves over seeds by iteration and time."""

import json
import math
import statistics
from pathlib import Path

import matplotlib.image
import numpy as np
import plot_seed_curves
import pytest
from plot_seed_curves import draw_seed_curves


def run(losses, step=5):
    records = [dict(loss=loss, iter=step * (i + 1), lr=1e-3) for i, loss in enumerate(losses)]
    return [*records, dict(bits_per_char=1.0, step=1)]


RUNS = [run([3.0, 2.0, 1.0]), run([3.5, 2.1, 1.3]), run([3.1, 2.6])]


def test_mean_and_error_where_all_runs_have_logged():
    (axis,) = draw_seed_curves({'a': RUNS, 'one': RUNS[:1]}, 'bits', 1 / math.log(2)).axes
    several, one = (line.get_xydata() for line in axis.get_lines())
    assert several[:, 0].tolist() == [5, 10] and one[:, 0].tolist() == [5, 10, 15]
    columns = [(3.0, 3.5, 3.1), (2.0, 2.1, 2.6)]
    mean = np.array([statistics.mean(column) for column in columns]) / math.log(2)
    error = np.array([statistics.stdev(column) / 3**0.5 for column in columns]) / math.log(2)
    np.testing.assert_allclose(several[:, 1], mean)
    (band,) = axis.collections  # a single run has no error
    low, high = (edge(band.get_paths()[0].vertices[:, 1]) for edge in (np.min, np.max))
    np.testing.assert_allclose([low, high], [mean[1] - error[1], mean[0] + error[0]])


def test_smoothed_losses_are_those_of_the_last_ones_and_the_axis_ends_at_the_top():
    (axis,) = draw_seed_curves({'a': [run([9.0, 4.0, 2.0, 6.0])]}, 'nats', top=5.0, smooth=2).axes
    (line,) = axis.get_lines()
    assert line.get_xydata().tolist() == [[10, 6.5], [15, 3.0], [20, 4.0]]
    bottom, top = axis.get_ylim()
    assert top == 5 and 2.5 < bottom < 3  # the lowest loss stands just above it


def test_a_group_that_is_slower_is_stretched_in_time():
    _, axis = draw_seed_curves(
        {'a': RUNS[:1], 'b': RUNS[1:2]}, 'bits', milliseconds=dict(a=100, b=2000)
    ).axes
    a, b = (line.get_xdata().tolist() for line in axis.get_lines())
    assert a == [0.5, 1.0, 1.5] and b == [10, 20, 30]


def test_a_validation_metric_belongs_to_the_last_training_iteration():
    runs = []
    for bits in (1.0, 2.0):
        epochs = [dict(loss=2.0, iter=5 * epoch, epoch=epoch, epoch_length=5) for epoch in (1, 2)]
        metrics = dict(bits_per_char=1.0, step=1), dict(bits_per_char=bits, step=2)
        runs.append([epochs[0], metrics[0], epochs[1], metrics[1]])
    (axis,) = draw_seed_curves({'a': runs}, 'bits', metric='bits_per_char').axes
    (line,) = axis.get_lines()
    assert line.get_xydata().tolist() == [[5, 1.0], [10, 1.5]]


@pytest.mark.parametrize(
    ('groups', 'options', 'message'),
    [
        ({'a': [run([1.0]), run([1.0], step=7)]}, {}, 'at the same iterations'),
        ({'b': RUNS[:1], 'a': RUNS[2:]}, dict(top=2.6), "top must .* .2.6 for 'a'., got 2.6"),
        ({'a': RUNS}, dict(smooth=3), 'smooth must be at most 2, the values .* got 3'),
        ({'a': RUNS}, dict(smooth=0), 'smooth must be an int'),
    ],
)
def test_invalid_curves_are_rejected(groups, options, message):
    with pytest.raises(ValueError, match=message):
        draw_seed_curves(groups, 'bits', **options)


def test_the_tool_finds_the_time_by_the_name_of_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, records in enumerate(RUNS):
        text = ''.join(json.dumps(record) + '\n' for record in records)
        Path(f'x-mini_seed{seed}.jsonl').write_text(text)
    rows = [dict(config='x-mini', milliseconds=250.0)]
    Path('times.json').write_text(json.dumps(dict(rows=rows)))
    logs = [f'x-mini_seed{seed}.jsonl' for seed in range(3)]
    words = ['--label', 'nats', '--out', 'a.png', '--group', 'x', *logs, '--times']
    calls = {}
    monkeypatch.setattr(
        plot_seed_curves,
        'draw_seed_curves',
        lambda *args: calls.update(args=args) or draw_seed_curves(*args),
    )
    plot_seed_curves.main([*words, 'times.json', '--top', '4.2', '--smooth', '2', '--bits'])
    assert calls['args'][2:] == (1 / math.log(2), {'x': 250.0}, 4.2, 2, 'loss')
    assert matplotlib.image.imread('a.png').std() > 0.05
    Path('empty.json').write_text('{}')
    with pytest.raises(SystemExit, match="--times must be .*, got 'empty.json'"):
        plot_seed_curves.main([*words, 'empty.json'])
    Path('x-mini_seed0.jsonl').rename('y-mini_seed0.jsonl')
    words[5:8] = ['x', 'y-mini_seed0.jsonl']
    with pytest.raises(SystemExit, match="--times must have the config 'y-mini'"):
        plot_seed_curves.main(words[:7] + ['--times', 'times.json'])
