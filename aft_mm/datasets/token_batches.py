"""Batches that are counted in tokens."""

from collections.abc import Iterator

import numpy as np
from mmengine.dataset import DefaultSampler
from torch.utils.data import Sampler

from aft_mm.checks import check_int
from aft_mm.registry import DATA_SAMPLERS


@DATA_SAMPLERS.register_module()
class TokenBatchSampler(Sampler):
    """Batches of samples of similar length with at most ``batch_size`` tokens per process.

    The length of a sample is that of its longest side; ``number of samples · longest length`` of a
    batch is at most ``batch_size``, the padding thus included. Every epoch shuffles the samples of
    each length, cuts all of them into batches from short to long, and shuffles the batches.

    Every process cuts the same batches of ``batch_size · processes`` tokens by the seed and the
    epoch of the sampler, and takes every n-th sample of each. So all have as many batches, which
    together are those of one process with a batch n times as large, and an epoch has the same
    number of batches whatever its order. Only a last batch with fewer samples than there are
    processes is left out.

    Args:
        sampler: mmengine's DefaultSampler of a data set with ``lengths`` [N] or [N, sides]; it says
            the seed, the epoch, and whether to shuffle.
        batch_size: Tokens of a batch at most, on every process.

    Raises:
        ValueError: The sampler or its data set is of another kind, or the longest sample does not
            fit into a batch.
    """

    def __init__(self, sampler: DefaultSampler, batch_size: int) -> None:
        check_int('batch_size in tokens', batch_size, 1)
        lengths = getattr(getattr(sampler, 'dataset', None), 'lengths', None)
        if not isinstance(sampler, DefaultSampler) or lengths is None:
            raise ValueError(
                'TokenBatchSampler needs a DefaultSampler over a data set that has '
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
        """The batches of this process."""
        order, batches = np.arange(len(self.lengths)), np.arange(len(self))
        if self.sampler.shuffle:
            rng = np.random.default_rng([self.sampler.seed, self.sampler.epoch])
            rng.shuffle(order)
            rng.shuffle(batches)
        order = order[np.argsort(self.lengths[order], kind='stable')]
        for start, end in self.bounds[batches]:
            yield order[start + self.sampler.rank : end : self.sampler.world_size].tolist()

    def _cut(self, lengths: np.ndarray, budget: int) -> np.ndarray:
        """Beginnings and ends [N, 2] of batches of ascending lengths."""
        start, bounds = 0, []
        while start < len(lengths):
            window = lengths[start : start + budget // max(1, lengths[start])]
            # Padded tokens of a batch grow with every sample: those that fit come first.
            count = int(np.count_nonzero(np.arange(1, len(window) + 1) * window <= budget))
            if count >= self.sampler.world_size:
                bounds.append((start, start + count))
            start += count
        return np.array(bounds, np.int64).reshape(-1, 2)
