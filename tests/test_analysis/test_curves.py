"""Training curves and `aft_mm plot curves`."""

import json
import math

import numpy as np
import pytest

from aft_mm.analysis.plot_curves import draw_curves
from aft_mm.analysis.run_logs import read_scalars

from ..errors import refuses, stops
from ..helpers import command, picture


def log(epochs, length=6, interval=4, first=1, offset=0.0):
    """Return records of mmengine: losses by iteration, validations by epoch."""
    records = []
    for epoch in range(first, epochs + 1):
        for i in range((epoch - 1) * length + interval, epoch * length + 1, interval):
            loss = math.log(2) * (8 - i / 10 + offset)
            records.append(dict(loss=loss, lr=1e-3, epoch=epoch, iter=i, step=i))
        records.append(dict(bits_per_char=8 - epoch + offset, time=0.1, step=epoch))
    return records


def lines(figure):
    return {
        line.get_label().partition(':')[0].lstrip('_'): line.get_xydata()
        for line in figure.axes[0].get_lines()
        if not line.get_label().startswith('_child')
    }


def test_losses_in_bits_by_iteration_and_validations_at_the_end_of_their_epochs():
    curves = lines(draw_curves({'a': log(8)}))
    x, y = curves['a, training'].T
    assert x.tolist() == [6 * epoch + 4 for epoch in range(8)]
    np.testing.assert_allclose(y, 8 - x / 10)
    assert curves['a'].tolist() == [[6.0 * epoch, 8.0 - epoch] for epoch in range(1, 9)]


def test_validations_that_are_numbered_by_iteration():
    records = [record for record in log(3) if 'loss' in record]
    records += [dict(bits_per_char=3.0, step=16), dict(bits_per_char=2.0, step=18)]
    assert lines(draw_curves({'a': records}))['a'].tolist() == [[16, 3], [18, 2]]


def test_several_runs():
    figure = draw_curves({'a': log(2), 'b': log(3, offset=1.0)})
    curves = lines(figure)
    assert list(curves) == ['a, training', 'a', 'b, training', 'b']
    assert curves['b'][-1].tolist() == [18, 6]
    assert figure.axes[0].get_ylabel() == 'bits/char'


def test_the_metric_may_be_chosen():
    records = log(2)
    records[-1]['bits_per_word'] = 11.0
    figure = draw_curves({'a': records}, metric='bits_per_word')
    assert lines(figure)['a'][:, 1].tolist() == [11]
    assert figure.axes[0].get_ylabel() == 'bits/word'
    message = r"one of the logs \(bits_per_char, loss, lr\), got 'bits_per_cha'"
    refuses(message, draw_curves, {'a': log(2)}, 'bits_per_cha')


def test_runs_on_one_axis_have_one_unit():
    pixels = [
        record if 'loss' in record else dict(bits_per_dim=3.0, step=record['step'])
        for record in log(2)
    ]
    message = "same unit, but 'b' has bits_per_dim and no bits_per_char"
    for metric in (None, 'bits_per_char'):
        refuses(message, draw_curves, {'a': log(2), 'b': pixels}, metric)
    training = [record for record in log(2) if 'loss' in record]
    assert len(lines(draw_curves({'a': training, 'b': pixels}))) == 3
    assert list(lines(draw_curves({'a': training}))) == ['a, training']


def test_the_legend_of_many_runs_does_not_hide_the_curves():
    few, many = (draw_curves({str(i): log(1) for i in range(n)}) for n in (4, 5))
    assert few.axes[0].get_legend() and not few.legends
    assert many.legends and not many.axes[0].get_legend()
    assert [text.get_text()[:1] for text in many.legends[0].get_texts()] == list('01234')


def classifier(seed=0, length=120, interval=50, epochs=3):
    """Return records of mmpretrain: a cross entropy, and an accuracy in per cent."""
    records = []
    for epoch in range(1, epochs + 1):
        for i in range((epoch - 1) * length + interval, epoch * length + 1, interval):
            records.append(dict(loss=2 - i / 1000 + seed, time=0.5, epoch=epoch, iter=i, step=i))
        records.append({'accuracy/top1': 10.0 * epoch + seed, 'time': 0.1, 'step': epoch})
    return records


def test_a_classifier_has_loss_and_accuracy_axes():
    """The validation is at the end of its epoch even if that is not logged: 120, not 110."""
    figure = draw_curves({'a': classifier()})
    loss, accuracy = figure.axes
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ('loss', 'accuracy/top1 [%]')
    (line,) = loss.get_lines()
    np.testing.assert_allclose(line.get_ydata(), 2 - line.get_xdata() / 1000)
    (dots,) = accuracy.get_lines()
    assert dots.get_xydata().tolist() == [[120, 10], [240, 20], [360, 30]]


def test_any_metric_over_epochs_or_time():
    figure = draw_curves({'a': classifier()}, 'accuracy/top1', over='epoch')
    assert figure.axes[0].get_lines()[0].get_xdata().tolist() == [1, 2, 3]
    records = classifier()
    records[3]['time'] = 1.5  # of each iteration from 101 to 170
    figure = draw_curves({'a': records}, ['time', 'accuracy/top1'], over='time')
    training, validation = (axis.get_lines()[0] for axis in figure.axes)
    assert training.get_ydata().tolist() == [0.5, 0.5, 1.5, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(60 * training.get_xdata(), [25, 50, 155, 180, 215, 240])
    np.testing.assert_allclose(60 * validation.get_xdata(), [80, 190, 250])
    assert figure.axes[-1].get_xlabel() == 'training time [min], without validation'


def test_seeds_are_their_mean_and_its_standard_error():
    seeds = [classifier(seed) for seed in range(3)]
    del seeds[1][-1]  # one run without a final validation
    (axis,) = draw_curves({'a': seeds, 'b': classifier()}, 'accuracy/top1').axes
    mean, _ = axis.get_lines()
    assert mean.get_xydata().tolist() == [[120, 11], [240, 21]]
    (band,) = axis.collections
    low, high = band.get_paths()[0].get_extents().intervaly
    np.testing.assert_allclose([low, high], [11 - 3**-0.5, 21 + 3**-0.5])
    assert mean.get_label() == 'a: 21.000 ± 0.577 at the end, 3 runs'
    runs = {'a': [classifier(), classifier(length=130)]}
    refuses(
        "of 'a' have no iteration in common .* accuracy/top1 in", draw_curves, runs, 'accuracy/top1'
    )


def test_smoothed_losses_are_means_and_the_axis_ends_at_the_top():
    losses = [9.0, 4.0, 2.0, 6.0]
    runs = {'a': [dict(loss=loss, iter=5 * i, step=5 * i) for i, loss in enumerate(losses, 1)]}
    (axis,) = draw_curves(runs, smooth=2, top=5.0).axes
    (line,) = axis.get_lines()
    assert line.get_xydata().tolist() == [[10, 6.5], [15, 3.0], [20, 4.0]]
    bottom, top = axis.get_ylim()
    assert top == 5 and 2.5 < bottom < 3  # the lowest loss stands just above it
    refuses('top must be above the lowest value, 2, got 1.5', draw_curves, runs, top=1.5)
    refuses("smooth must be at most 4, .* of 'a', got 5", draw_curves, runs, smooth=5)
    refuses('smooth must be an int', draw_curves, runs, smooth=0)


def test_the_lines_of_the_eleventh_run_differ_from_those_of_the_first():
    axis = draw_curves({str(number): log(2) for number in range(11)}).axes[0]
    styles = [(line.get_color(), line.get_linestyle()) for line in axis.get_lines()]
    assert len(set(styles)) == 11


@pytest.mark.parametrize(
    ('metric', 'over', 'message'),
    [
        ('accuracy/top1', 'iteration', "the log 'b' has no accuracy/top1; it has loss"),
        ('loss', 'epoch', "'b' cannot be plotted over epochs: its log does not have them"),
        ('loss', 'time', "'b' cannot be plotted over time: the log must have the iteration time"),
    ],
)
def test_logs_without_epochs_or_times_are_rejected(metric, over, message):
    runs = {'a': classifier(), 'b': [dict(loss=1.0, iter=4, step=4)]}
    refuses(message, draw_curves, runs, metric, over=over)


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def test_a_resumed_run_counts_as_it_ran_last(tmp_path):
    write(tmp_path / '20260101_000000/vis_data/scalars.json', log(3))
    write(tmp_path / '20260102_000000/vis_data/scalars.json', log(4, first=3, offset=0.5))
    write(tmp_path / '20260102_000000/vis_data/config.json', [])
    expected = [*log(2), *log(4, first=3, offset=0.5)]
    assert read_scalars(tmp_path) == expected
    assert read_scalars(tmp_path / '20260101_000000/vis_data/scalars.json') == log(3)
    # It validated its checkpoint once more.
    again = dict(bits_per_char=5.5, time=0.1, step=2)
    write(tmp_path / '20260102_000000/vis_data/scalars.json', [again, *log(3, first=3)])
    assert read_scalars(tmp_path) == [*log(2)[:-1], again, *log(3, first=3)]


@pytest.mark.parametrize('resumed', [True, False])
def test_the_text_log_says_where_a_run_goes_on(resumed, tmp_path):
    write(tmp_path / '20260101_000000/vis_data/scalars.json', log(3, interval=1))
    write(tmp_path / '20260102_000000/vis_data/scalars.json', log(4, interval=5)[4:])
    text = ' - INFO - resumed epoch: 2, iter: 14\n' * resumed + ' - INFO - Epoch(train) [3] '
    (tmp_path / '20260102_000000/a.log').write_text(text)
    before = [*log(2, interval=1), *log(3, interval=1, first=3)[:2]] * resumed
    assert read_scalars(tmp_path) == [*before, *log(4, interval=5)[4:]]


def test_the_length_of_a_single_epoch_is_in_the_text_log(tmp_path):
    write(tmp_path / '20260101_000000/vis_data/scalars.json', classifier(epochs=1))
    (axis,) = draw_curves({'a': read_scalars(tmp_path)}, 'accuracy/top1').axes
    assert axis.get_lines()[0].get_xdata().tolist() == [100]  # the only one in the scalars
    (tmp_path / '20260101_000000/20260101_000000.log').write_text(
        '2026/01/01 00:00:01 - mmengine - INFO - Epoch(train)  [1][ 50/120]  lr: 1.0e-03\n'
    )
    (axis,) = draw_curves({'a': read_scalars(tmp_path)}, 'accuracy/top1').axes
    assert axis.get_lines()[0].get_xdata().tolist() == [120]


def test_the_last_line_of_a_killed_run_is_left_out(tmp_path):
    path = tmp_path / 'a.json'
    for last, records in (('{"loss": 2, "st', 1), ('{"loss": 2}', 2), ('', 1)):
        path.write_text('{"loss": 1}\n' + last)
        assert [record['loss'] for record in read_scalars(path)] == [1, 2][:records]


def test_bad_logs_are_named(tmp_path):
    for path in (tmp_path, tmp_path / 'no.json'):
        refuses(f"'{path}' is neither a log of scalars", read_scalars, path)
    for text in (b'{"loss": 1}\nloss 2\n', b'\x80', b'[1]\n'):
        (tmp_path / 'a.json').write_bytes(text)
        refuses("a.json' is not a log of JSON lines", read_scalars, tmp_path / 'a.json')
    refuses("the log 'a' has no loss; it has no metric", draw_curves, {'a': [dict(step=1)]})


class TestPlotCurves:
    @pytest.fixture
    def plot(self, here):
        records = [dict(loss=5.0, epoch=1, iter=1, step=1), dict(bits_per_char=7.0, step=1)]
        for name in ('log', 'copy'):
            (here / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, records)))
        return lambda *words: command('plot curves')(words)

    def test_a_picture_of_two_runs(self, plot, tmp_path, capsys):
        words = 'log.jsonl again=log.jsonl --out new/a.png --dpi 50 --metric bits_per_char'
        plot(*words.split())
        assert capsys.readouterr().out == 'plotted 2 runs to new/a.png\n'
        assert picture(tmp_path / 'new/a.png').std() > 1

    def test_seeds_are_a_group_and_one_run_is_one(self, plot, capsys):
        plot(*'--out a.png --dpi 50 --over epoch log.jsonl'.split())
        assert capsys.readouterr().out == 'plotted 1 run to a.png\n'
        plot(*'--group b log.jsonl copy.jsonl --out a.png --dpi 50'.split())
        assert capsys.readouterr().out == 'plotted 2 runs to a.png\n'

    @pytest.mark.parametrize(
        ('words', 'message'),
        [
            ('log.jsonl log.jsonl', "LOG must have unique labels, got 'log.jsonl' twice"),
            ('a=log.jsonl a=log.jsonl', "LOG must have unique labels, got 'a' twice"),
            ('log.jsonl --metric bits_per_dim', 'metric must be one of the logs'),
            ('no.jsonl', "'no.jsonl' is neither a log"),
            ('log.jsonl --group b a a', '--group must be LABEL LOG .* got b a a'),
            ('', r'\[LABEL=\]LOG or --group must give at least one log, got none'),
        ],
    )
    def test_bad_arguments_give_a_one_line_message(self, plot, words, message):
        stops(f'^Error: .*{message}', plot, *words.split(), '--out', 'a.png')
