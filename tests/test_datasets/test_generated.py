"""Generated data: samples, and when they repeat."""

from statistics import median_low

import cv2
import numpy as np
import pytest
import torch

from aft_mm.datasets import AssociativeRecall, CopyTask, ListOps, Pathfinder


def test_a_sequence_repeats_itself_after_the_separator():
    data = CopyTask('val', num_samples=300)
    lengths, symbols = set(), set()
    for i in range(len(data)):
        tokens, sample = data[i]['inputs'], data[i]['data_samples']
        first, separator, copy = tokens.split([len(tokens) // 2, 1, len(tokens) // 2])
        assert torch.equal(first, copy) and separator == 0 and tokens.dtype == torch.uint8
        assert (sample.length, sample.num_context) == (len(tokens), len(first) + 1)
        lengths.add(len(first))
        symbols |= set(first.tolist())
    assert symbols == set(range(1, 11)) and {1, 63} <= lengths <= set(range(1, 64))


def test_every_key_is_asked_once_and_only_its_value_is_predicted():
    data = AssociativeRecall('val', num_pairs=5, num_keys=9, num_samples=50)
    for i in range(len(data)):
        tokens, sample = data[i]['inputs'], data[i]['data_samples']
        pairs, queries = tokens.view(10, 2)[:5], tokens.view(10, 2)[5:]
        table = dict(pairs.tolist())
        assert len(table) == 5 and max(table) < 9 <= min(table.values())
        assert dict(queries.tolist()) == table
        assert sample.predicted.nonzero().flatten().tolist() == [11, 13, 15, 17, 19]


def evaluate(tokens):
    names = {10: max, 11: min, 12: median_two, 13: lambda values: sum(values) % 10}
    stack = []
    for token in tokens:
        if token != ListOps.CLOSE:
            stack.append(token)
            continue
        values = []
        while stack[-1] < 10:
            values.append(stack.pop())
        stack.append(names[stack.pop()](values))
    (value,) = stack
    return value


def median_two(values):
    low, high = median_low(values), -median_low([-v for v in values])
    return (low + high) // 2


@pytest.mark.parametrize(('low', 'high'), [(10, 64), (33, 128)])
def test_list_ops_end_with_their_value(low, high):
    data = ListOps('val', num_samples=300, max_length=high, min_length=low)
    depths, values = set(), []
    for i in range(len(data)):
        tokens, sample = data[i]['inputs'].tolist(), data[i]['data_samples']
        assert low <= len(tokens) <= high and tokens[-2] == ListOps.EQUALS
        assert tokens[-1] == evaluate(tokens[:-2])
        assert sample.num_context == len(tokens) - 1
        nesting = np.cumsum([(10 <= t < 14) - (t == ListOps.CLOSE) for t in tokens])
        depths.add(int(nesting.max()))
        values.append(tokens[-1])
    assert max(depths) == 5 and np.bincount(values, minlength=10).max() < 0.25 * len(values)


def test_dots_of_a_path_are_connected():
    train, val = (Pathfinder(split, 200, 48, 6, shortest=0.75) for split in ('train', 'val'))
    images = [val[i]['img'] for i in range(200)]
    assert not any((train[i]['img'] == images[i]).all() for i in range(200))
    found = []
    for image in images:
        # Thickening closes the gaps between dashes, and seldom those between paths.
        thick = cv2.dilate(image, np.ones((3, 3)))
        _, parts = cv2.connectedComponents((thick > 0).astype(np.uint8))
        found.append(len(set(parts[image[..., 0] == 255].tolist())) == 1)
    found, labels = np.array(found), np.array([val[i]['gt_label'] == 1 for i in range(200)])
    assert 60 < labels.sum() < 140
    assert found[labels].all() and found[~labels].mean() < 0.3


def test_paths_of_fewer_steps_have_fewer_dashes():
    dashes = {}
    for steps in (3, 6):
        image = Pathfinder('val', 1, 64, steps, shortest=0.75)[0]['img']
        dashes[steps] = cv2.connectedComponents((image[..., 0] > 30).astype(np.uint8))[0] - 1
    assert 4 < dashes[3] <= 8 < dashes[6] <= 14  # of two paths, with two dots


def test_paths_have_lengths_in_the_given_range():
    distances = {}
    for lengths in ((0.25, 0.25), (0.75, 0.75), (0.25, 0.75)):
        data = Pathfinder('val', 100, 64, 2, *lengths)
        samples = [data[i] for i in range(100)]
        # Only connected dots: the distance of their ends is at most the length.
        ends = [np.argwhere(x['img'][..., 0] == 255) for x in samples if x['gt_label']]
        distances[lengths] = [np.ptp(points, 0).max() for points in ends]
    short, long, mixed = distances.values()
    assert max(short) < 20 and min(long) > 20
    assert min(mixed) < 20 and max(mixed) > 32


def test_training_draws_anew_and_the_other_splits_do_not():
    train, val, test = (CopyTask(split, num_samples=9) for split in ('train', 'val', 'test'))

    def tokens(data):
        return [data[i]['inputs'].tolist() for i in range(9)]

    assert tokens(val) == tokens(val) != tokens(test) == tokens(test)
    assert tokens(CopyTask('val', num_samples=9, seed=1)) != tokens(val)
    np.random.seed(3)
    first, again = tokens(train), tokens(train)
    np.random.seed(3)
    assert tokens(train) == first != again


@pytest.mark.parametrize(
    'kind, wrong, message',
    [
        (CopyTask, dict(split='dev'), "split must be one of .* got 'dev'"),
        (CopyTask, dict(max_length=2), 'max_length must be an int, 3 or larger, got 2'),
        (CopyTask, dict(num_symbols=256), 'num_symbols must be an int, 1 to 255, got 256'),
        (CopyTask, dict(num_samples=0), 'num_samples must be an int, 1 or larger, got 0'),
        (CopyTask, dict(seed=-1), 'seed must be an int, 0 or larger, got -1'),
        (AssociativeRecall, dict(num_pairs=9, num_keys=8), 'num_keys must be an int, 9 to 128'),
        (ListOps, dict(max_args=1), 'max_args must be an int, 2 or larger, got 1'),
        (ListOps, dict(max_depth=1), 'min_length must be reachable by 1 lists of 5, got 32'),
        (Pathfinder, dict(size=8), 'size must be an int, 16 or larger, got 8'),
        (Pathfinder, dict(shortest=0), 'shortest must be a finite number above 0 .* got 0'),
        (Pathfinder, dict(longest=0.2), 'longest must be a finite number.* 0.25 to 1, got 0.2'),
        (
            Pathfinder,
            dict(size=16, shortest=0.9, longest=1),
            'shortest and longest must leave room for two paths in 16 px, got 0.9 and 1',
        ),
    ],
)
def test_bad_arguments_end_in_one_sentence(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        kind(**wrong)


def test_lists_that_hardly_ever_fit_end_in_one_sentence():
    """Most lists of ten levels have millions of elements."""
    data = ListOps(num_samples=1, max_length=40, min_length=20, max_depth=10, max_args=10)
    assert 20 <= len(data[0]['inputs']) <= 40
    data = ListOps(num_samples=1, max_length=40, min_length=20, max_args=2)
    data.max_depth = 1  # of at most 6 tokens
    with pytest.raises(ValueError, match='max_length must fit to lists of max_depth=1 .* got 40'):
        data[0]


def test_an_index_outside_is_refused():
    with pytest.raises(IndexError, match='index must be 0 to 2, got 3'):
        CopyTask(num_samples=3)[3]
