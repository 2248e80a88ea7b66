"""The copy task: random symbols, then the same symbols again."""

import numpy as np
import torch
from torch.utils.data import Dataset

from aft_mm.checks import check_choice, check_int
from aft_mm.registry import DATASETS
from aft_mm.structures import SequenceSample

SPLITS = ('train', 'val', 'test')


@DATASETS.register_module()
class CopyTask(Dataset):
    """Random symbols, a separator, and the same symbols again (arXiv 2006.16236, section 4.1.1).

    A sample is ``dict(inputs=uint8 [2·n + 1], data_samples=SequenceSample(num_context=n + 1))``
    with n uniform in 1 … (max_length − 1) // 2, symbols uniform in 1 … num_symbols, and 0 as the
    separator. Only the copy is predicted. ``train`` generates new sequences on every access.

    Args:
        split: ``'train'``, ``'val'`` or ``'test'``.
        max_length: Largest number of tokens, 3 or more.
        num_symbols: Number of symbols without the separator, 1 to 255.
        num_samples: Sequences per epoch.
        seed: Seed of ``val`` and ``test``.
    """

    def __init__(
        self,
        split: str = 'train',
        max_length: int = 128,
        num_symbols: int = 10,
        num_samples: int = 64_000,
        seed: int = 0,
    ) -> None:
        check_choice('split', split, SPLITS)
        check_int('max_length', max_length, 3)
        check_int('num_symbols', num_symbols, 1, 255)
        check_int('num_samples', num_samples, 1)
        check_int('seed', seed, 0)
        self.split = split
        self.max_length = max_length
        self.num_symbols = num_symbols
        self.num_samples = num_samples
        self.seed = seed

    @property
    def metainfo(self) -> dict:
        """Facts about the data for the log and the checkpoint."""
        return dict(vocab_size=self.num_symbols + 1, split=self.split, max_length=self.max_length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict:
        """Return sequence ``index``; in training a new one."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f'index must be 0 to {self.num_samples - 1}, got {index}')
        key = [self.seed, SPLITS.index(self.split), index]
        if self.split == 'train':  # the generator that the run seeds in every epoch
            key = np.random.randint(2**31)
        rng = np.random.default_rng(key)
        number = rng.integers(1, (self.max_length - 1) // 2, endpoint=True)
        symbols = rng.integers(1, self.num_symbols, number, endpoint=True, dtype=np.uint8)
        tokens = torch.from_numpy(np.concatenate((symbols, [np.uint8(0)], symbols)))
        sample = SequenceSample(metainfo=dict(length=len(tokens), num_context=int(number) + 1))
        return dict(inputs=tokens, data_samples=sample)
