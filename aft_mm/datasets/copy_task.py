"""The copy task: sequences that repeat themselves."""

import numpy as np
import torch
from torch.utils.data import Dataset

from aft_mm.registry import DATASETS
from aft_mm.structures import SequenceSample

SPLITS = ('train', 'val', 'test')


@DATASETS.register_module()
class CopyTask(Dataset):
    """Random symbols, a separator, and the same symbols again (arXiv 2006.16236, section 4.1.1).

    A sample is ``dict(inputs=uint8 [2·n + 1], data_samples=SequenceSample(num_context=n + 1))``,
    n drawn from 1 … (max_length − 1) // 2 and the symbols from 1 … num_symbols; the separator is 0.
    Only the copy is predicted: what comes before it is chance. ``train`` draws from numpy's
    generator whenever it is asked, ``val`` and ``test`` hold the same sequences always.

    Args:
        split: ``'train'``, ``'val'`` or ``'test'``.
        max_length: Tokens of a sequence at most, 3 or more.
        num_symbols: Symbols beside the separator, 1 to 255.
        num_samples: Sequences of an epoch.
        seed: That of the sequences of ``val`` and ``test``.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        split: str = 'train',
        max_length: int = 128,
        num_symbols: int = 10,
        num_samples: int = 64_000,
        seed: int = 0,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f'split must be one of {SPLITS}, but got {split!r}.')
        if max_length < 3:
            raise ValueError(f'max_length must be 3 or larger, but got {max_length}.')
        if not 1 <= num_symbols <= 255:
            raise ValueError(f'num_symbols must be 1 to 255, but got {num_symbols}.')
        if num_samples < 1 or seed < 0:
            raise ValueError(
                'num_samples must be 1 or larger and seed 0 or larger, but got '
                f'{num_samples} and {seed}.'
            )
        self.split = split
        self.max_length = max_length
        self.num_symbols = num_symbols
        self.num_samples = num_samples
        self.seed = seed

    @property
    def metainfo(self) -> dict:
        """What the log and the checkpoint say about the data."""
        return dict(vocab_size=self.num_symbols + 1, split=self.split, max_length=self.max_length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict:
        """Sequence ``index``, in training a new one."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f'index must be 0 to {self.num_samples - 1}, but got {index}.')
        key = [self.seed, SPLITS.index(self.split), index]
        if self.split == 'train':  # the run's generator, which its seed and its epoch set
            key = np.random.randint(2**31)
        rng = np.random.default_rng(key)
        number = rng.integers(1, (self.max_length - 1) // 2, endpoint=True)
        symbols = rng.integers(1, self.num_symbols, number, endpoint=True, dtype=np.uint8)
        tokens = torch.from_numpy(np.concatenate((symbols, [np.uint8(0)], symbols)))
        sample = SequenceSample(metainfo=dict(length=len(tokens), num_context=int(number) + 1))
        return dict(inputs=tokens, data_samples=sample)
