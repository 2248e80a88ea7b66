"""The copy task: what a sequence is, and when it is the same."""

import numpy as np
import pytest
import torch

from aft_mm.datasets import CopyTask


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
    'wrong, message',
    [
        (dict(split='dev'), "split must be one of .* got 'dev'"),
        (dict(max_length=2), 'max_length must be an int, 3 or larger, got 2'),
        (dict(num_symbols=256), 'num_symbols must be an int, 1 to 255, got 256'),
        (dict(num_samples=0), 'num_samples must be an int, 1 or larger, got 0'),
        (dict(seed=-1), 'seed must be an int, 0 or larger, got -1'),
    ],
    ids=str,
)
def test_bad_arguments_end_in_one_sentence(wrong, message):
    with pytest.raises(ValueError, match=message):
        CopyTask(**wrong)


def test_an_index_outside_is_refused():
    with pytest.raises(IndexError, match='index must be 0 to 2, got 3'):
        CopyTask(num_samples=3)[3]
