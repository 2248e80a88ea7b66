"""Batches by tokens, for one process and several."""

import itertools

import numpy as np
import pytest
from mmengine.dataset import DefaultSampler
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import DataLoader

from aft_mm.datasets import TokenBatchSampler
from aft_mm.engine.loops import Batches


class Lengths:
    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return index


@pytest.fixture
def data():
    return Lengths(np.random.default_rng(0).integers(1, 40, (501, 2)))


def batches(data, budget, epoch=0, rank=0, processes=1, **options):
    sampler = DefaultSampler(data, **{'seed': 3, **options})
    sampler.rank, sampler.world_size = rank, processes
    sampler.set_epoch(epoch)
    found = TokenBatchSampler(sampler, budget)
    assert len(found) == len(list(found))
    return list(found)


def test_every_sample_once_and_no_batch_too_large(data):
    found = batches(data, 200)
    assert sorted(itertools.chain(*found)) == list(range(501))
    cost = [len(batch) * data.lengths[batch].max() for batch in found]
    assert max(cost) <= 200
    # Samples of a batch are of similar length: little is padding.
    assert data.lengths.max(1).sum() > 0.85 * sum(cost)
    # No batch but the last has room for the next longer sample.
    longest = sorted((data.lengths[batch].max(), len(batch)) for batch in found)
    for (length, count), (following, _) in itertools.pairwise(longest):
        assert (count + 1) * following > 200 or following == length


def test_an_epoch_has_an_order_of_its_own_and_as_many_batches(data):
    first, again, other = batches(data, 200), batches(data, 200), batches(data, 200, epoch=1)
    assert first == again and len(first) == len(other)
    shared = {frozenset(batch) for batch in first} & {frozenset(batch) for batch in other}
    assert len(shared) < 0.1 * len(first)  # of a rare length
    assert batches(data, 200, seed=4) != first
    shuffled, lengths = (
        [data.lengths[batch].max() for batch in found]
        for found in (first, batches(data, 200, shuffle=False))
    )
    assert shuffled != lengths == sorted(lengths)
    assert abs(np.corrcoef(shuffled, np.arange(len(shuffled)))[0, 1]) < 0.5


@pytest.mark.parametrize('processes', [2, 3])
def test_the_batches_of_all_processes_are_those_of_one(data, processes):
    one = batches(data, 200 * processes, epoch=2)
    ranks = [batches(data, 200, 2, rank, processes) for rank in range(processes)]
    whole = [batch for batch in one if len(batch) >= processes]
    assert len(one) - len(whole) <= 1
    for together, parts in zip(whole, zip(*ranks, strict=True), strict=True):
        assert sorted(itertools.chain(*parts)) == sorted(together)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_rest_of_an_epoch_is_in_the_same_order(data):
    sampler = TokenBatchSampler(DefaultSampler(data, seed=3), 200)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=list)
    assert list(Batches(loader).start(5)) == list(loader)[5:]


def test_bad_arguments_end_in_one_sentence(data):
    for wrong in (list(range(5)), None):
        with pytest.raises(ValueError, match='needs a DefaultSampler over a dataset that has len'):
            TokenBatchSampler(DefaultSampler(wrong, seed=0) if wrong else None, 9)
    with pytest.raises(ValueError, match='must be at least 39 tokens, the longest sample, got 38'):
        DATA_SAMPLERS.build(
            dict(
                type='aft_mm.TokenBatchSampler', batch_size=38, sampler=DefaultSampler(data, seed=0)
            )
        )
    with pytest.raises(ValueError, match='batch_size in tokens must be an int, 1 or larger'):
        TokenBatchSampler(DefaultSampler(data, seed=0), 0)
