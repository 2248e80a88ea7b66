"""Batches of similar lengths: every sequence once, equal in all processes, repeatable."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import DataLoader

from aft_mm.datasets import LengthBatchSampler
from aft_mm.engine.loops import Batches

LENGTHS = np.random.default_rng(0).gamma(3, 100, 203).astype(int) + 1


def sampler(lengths=LENGTHS, rank=0, world_size=1, epoch=0, shuffle=True, seed=5):
    return SimpleNamespace(
        dataset=SimpleNamespace(lengths=lengths),
        rank=rank,
        epoch=epoch,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
    )


def batches(*, size=16, most=3000, buckets=6, **kwargs):
    built = LengthBatchSampler(sampler(**kwargs), size, most, buckets)
    found = list(built)
    assert len(found) == len(built)
    return found


@pytest.mark.parametrize('world_size', [1, 2, 3])
@pytest.mark.parametrize('number', [203, 7, 3])
def test_every_sequence_is_drawn_once_by_one_process(world_size, number):
    lengths = LENGTHS[:number]
    parts = [
        batches(lengths=lengths, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1
    drawn = [index for part in parts for batch in part for index in batch]
    assert sorted(drawn) == list(range(number))
    for together in zip(*parts, strict=True):
        sizes = [len(batch) for batch in together]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
        assert max(sizes) <= 16 + 1


def test_batches_keep_within_the_places_and_hold_little_padding():
    found = batches()
    places = [len(batch) * LENGTHS[batch].max() for batch in found]
    assert max(places) <= 3000 and max(map(len, found)) <= 16
    padding = sum(places) / LENGTHS.sum()
    at_random = np.array_split(np.random.default_rng(1).permutation(len(LENGTHS)), len(found))
    unsorted = sum(len(batch) * LENGTHS[batch].max() for batch in at_random) / LENGTHS.sum()
    assert padding < 1.2 and unsorted > 1.6


def test_seed_and_epoch_decide():
    assert batches(epoch=3) == batches(epoch=3)
    assert batches(epoch=3) != batches(epoch=4) and batches(seed=5) != batches(seed=6)
    assert len(batches(epoch=3)) == len(batches(epoch=4))
    # Not only the order: which sequences make a batch.
    assert {frozenset(b) for b in batches(epoch=3)} != {frozenset(b) for b in batches(epoch=4)}
    ordered = batches(shuffle=False)
    assert [LENGTHS[index] for batch in ordered for index in batch] == sorted(LENGTHS)


def test_a_run_that_stopped_inside_an_epoch_goes_on_with_what_is_left():
    loader = DataLoader(
        range(203), collate_fn=list, batch_sampler=LengthBatchSampler(sampler(epoch=2), 16)
    )
    assert list(Batches(loader).start(5)) == list(loader)[5:]


def test_two_processes_of_half_the_batch_take_the_batches_of_one():
    one = batches(size=16, most=None)
    two = [batches(size=8, most=None, rank=rank, world_size=2) for rank in (0, 1)]
    assert [set(batch) for batch in one] == [set(a + b) for a, b in zip(*two, strict=True)]


def test_what_cannot_be_is_refused():
    longest = LENGTHS.max()
    with pytest.raises(ValueError, match=f'max_length .* must be an int, {longest} or larger'):
        batches(most=int(longest) - 1)
    with pytest.raises(ValueError, match='for each of 3 processes, got 2'):
        batches(lengths=LENGTHS[:2], world_size=3, most=None)
    with pytest.raises(ValueError, match='needs a dataset with lengths, got list'):
        LengthBatchSampler(SimpleNamespace(dataset=[1]), 4)
