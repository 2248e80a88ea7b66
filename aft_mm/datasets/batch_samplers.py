"""Batches of sequences of similar length."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from mmengine.dataset import DefaultSampler
from torch.utils.data import Sampler

from aft_mm.checks import check_int
from aft_mm.registry import DATA_SAMPLERS


@DATA_SAMPLERS.register_module()
class LengthBatchSampler(Sampler):
    """``batch_sampler`` of mmengine's data loaders for batches of sequences of similar length.

    The dataset is split by length into buckets of equal size; every epoch shuffles each bucket,
    splits it into batches, and shuffles the batches. Every sequence is used once per epoch; the
    number of batches is constant. A batch exceeds the limits by less than two sequences per process
    if a process would have none otherwise.

    Args:
        sampler: mmengine's ``DefaultSampler``; its dataset has ``lengths``, int [N].
        batch_size: Largest number of sequences per batch and process.
        max_length: Largest number of tokens per batch and process, with padding, or None.
        num_buckets: Fewer buckets give more random batches with more padding.

    Raises:
        ValueError: If an argument is out of range, a sequence is too long, or the dataset has no
            lengths or fewer sequences than processes.
    """

    def __init__(
        self, sampler: Any, batch_size: int, max_length: int | None = None, num_buckets: int = 10
    ) -> None:
        check_int('batch_size of LengthBatchSampler', batch_size, 1)
        check_int('num_buckets of LengthBatchSampler', num_buckets, 1)
        self.sampler = sampler
        lengths = getattr(sampler.dataset, 'lengths', None)
        if lengths is None:
            raise ValueError(
                'LengthBatchSampler needs a dataset with lengths, got '
                f'{type(sampler.dataset).__name__}'
            )
        lengths = np.asarray(lengths)
        processes = sampler.world_size
        if len(lengths) < processes:
            raise ValueError(
                f'the dataset must have a sequence for each of {processes} '
                f'processes, got {len(lengths)}'
            )
        if max_length is not None:
            check_int('max_length of LengthBatchSampler', max_length, int(lengths.max()))
        order = np.argsort(lengths, kind='stable')
        self.buckets: list[tuple[np.ndarray, int]] = []
        for bucket in np.array_split(order, min(num_buckets, len(order) // processes)):
            size = batch_size
            if max_length is not None:
                size = min(size, max_length // int(lengths[bucket].max()))
            batches = -(-len(bucket) // (size * processes))
            self.buckets.append((bucket, min(batches, len(bucket) // processes)))

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self.sampler
        rng = np.random.default_rng([sampler.seed, sampler.epoch])
        batches = []
        for bucket, number in self.buckets:
            members = rng.permutation(bucket) if sampler.shuffle else bucket
            batches += np.array_split(members, number)
        order = rng.permutation(len(batches)) if sampler.shuffle else range(len(batches))
        for i in order:
            yield batches[i][sampler.rank :: sampler.world_size].tolist()

    def __len__(self) -> int:
        return sum(number for _, number in self.buckets)


@DATA_SAMPLERS.register_module()
class TokenBatchSampler(Sampler):
    """Batches of samples of similar length with at most ``batch_size`` tokens per process.

    A sample is as long as its longest side; padding counts. Every epoch shuffles the samples of
    each length, splits all into batches from short to long, and shuffles the batches. Only a batch
    with fewer samples than processes is left out; the number of batches is constant.

    Args:
        sampler: mmengine's DefaultSampler of a dataset with ``lengths`` [N] or [N, sides].
        batch_size: Largest number of tokens of a batch, times the number of processes, which share it
            as one process would read it. One may get a sample more than another.

    Raises:
        ValueError: If the sampler is of another kind, or the longest sample does not fit.
    """

    def __init__(self, sampler: DefaultSampler, batch_size: int) -> None:
        check_int('batch_size in tokens', batch_size, 1)
        lengths = getattr(getattr(sampler, 'dataset', None), 'lengths', None)
        if not isinstance(sampler, DefaultSampler) or lengths is None:
            raise ValueError(
                'TokenBatchSampler needs a DefaultSampler over a dataset that has '
                f'lengths, such as ParallelText, got {type(sampler).__name__} over '
                f'{type(getattr(sampler, "dataset", None)).__name__}'
            )
        self.sampler = sampler
        self.lengths = np.asarray(lengths).reshape(len(lengths), -1).max(axis=1, initial=0)
        longest = self.lengths.max(initial=0)
        if longest > batch_size:
            raise ValueError(
                f'batch_size must be at least {longest} tokens, the longest sample, '
                f'got {batch_size}'
            )
        self.bounds = self._cut(np.sort(self.lengths), batch_size * sampler.world_size)

    def __len__(self) -> int:
        return len(self.bounds)

    def __iter__(self) -> Iterator[list[int]]:
        order, batches = np.arange(len(self.lengths)), np.arange(len(self))
        if self.sampler.shuffle:
            rng = np.random.default_rng([self.sampler.seed, self.sampler.epoch])
            rng.shuffle(order)
            rng.shuffle(batches)
        order = order[np.argsort(self.lengths[order], kind='stable')]
        for start, end in self.bounds[batches]:
            yield order[start + self.sampler.rank : end : self.sampler.world_size].tolist()

    def _cut(self, lengths: np.ndarray, budget: int) -> np.ndarray:
        start, bounds = 0, []
        while start < len(lengths):
            window = lengths[start : start + budget // max(1, lengths[start])]
            # Padded sizes grow, so those that fit come first.
            count = int(np.count_nonzero(np.arange(1, len(window) + 1) * window <= budget))
            if count >= self.sampler.world_size:
                bounds.append((start, start + count))
            start += count
        return np.array(bounds, np.int64).reshape(-1, 2)
