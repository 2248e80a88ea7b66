"""Batches of sequences that are about equally long."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from aft_mm.checks import check_int
from aft_mm.registry import DATA_SAMPLERS


@DATA_SAMPLERS.register_module()
class LengthBatchSampler(Sampler):
    """Batches of sequences of like length, a ``batch_sampler`` of mmengine's data loaders.

    The data set is sorted by length and cut into buckets of equally many sequences. Every epoch
    shuffles the sequences of a bucket, cuts them into batches of about equally many, and shuffles
    the batches. A batch has `batch_size` sequences, or fewer where the bucket's longest would take
    more than `max_length` places with padding. With several processes each takes every n-th
    sequence of a batch that is n times as large, so that they step together with lengths alike.

    Every sequence is drawn once in an epoch, by one process. Seed and epoch of `sampler` decide
    all, and epochs have equally many batches. A batch may be larger than it should by less than two
    sequences per process where otherwise a process would have none.

    Args:
        sampler: mmengine's ``DefaultSampler``, of which data set, seed, epoch, processes and
            `shuffle` are taken; its data set has ``lengths``, int [N].
        batch_size: Sequences of a process's batch at most.
        max_length: Places of a process's batch at most, padding included; None for no limit.
        num_buckets: How many; with fewer, batches differ more from epoch to epoch and hold more
            padding.

    Raises:
        ValueError: An argument is out of range, a sequence alone is longer than `max_length`, the
            data set tells no lengths or has fewer sequences than there are processes.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        max_length: int | None = None,
        num_buckets: int = 10,
    ) -> None:
        check_int('batch_size of LengthBatchSampler', batch_size, 1)
        check_int('num_buckets of LengthBatchSampler', num_buckets, 1)
        self.sampler = sampler
        lengths = getattr(sampler.dataset, 'lengths', None)
        if lengths is None:
            raise ValueError(
                'LengthBatchSampler needs a data set with lengths, got '
                f'{type(sampler.dataset).__name__}'
            )
        lengths = np.asarray(lengths)
        processes = sampler.world_size
        if len(lengths) < processes:
            raise ValueError(
                f'the data set must have a sequence for each of {processes} '
                f'processes, got {len(lengths)}'
            )
        if max_length is not None:
            check_int('max_length of LengthBatchSampler', max_length, int(lengths.max()))
        order = np.argsort(lengths, kind='stable')
        # Sequences of each bucket, and into how many batches they are cut.
        self.buckets: list[tuple[np.ndarray, int]] = []
        for bucket in np.array_split(order, min(num_buckets, len(order) // processes)):
            size = batch_size
            if max_length is not None:
                size = min(size, max_length // int(lengths[bucket].max()))
            batches = -(-len(bucket) // (size * processes))
            self.buckets.append((bucket, min(batches, len(bucket) // processes)))

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this process."""
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
        """The batches of an epoch."""
        return sum(number for _, number in self.buckets)
