"""A file, such as enwik8, as a sequence of bytes."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from aft_mm.checks import check_choice, check_int, check_number, check_path, refuse
from aft_mm.packed import MAX_RATIO, read_packed
from aft_mm.registry import DATASETS
from aft_mm.structures import SequenceSample

SPLITS = ('train', 'val', 'test')


@DATASETS.register_module()
class TextFile(Dataset):
    """The bytes of one file: the first part for training, then validation and test.

    The default split is Transformer-XL's for enwik8. A sample is ``dict(inputs=uint8 [T],
    data_samples=SequenceSample(length=T, num_context))``.

    Args:
        data_file: Path of the file; ``<data_file>.gz`` is tried too.
        split: ``'train'``, random crops, ``'val'`` or ``'test'``.
        context_length: Bytes T of a context.
        evaluation: ``'blocks'``, consecutive contexts, or ``'strided'``, contexts of which, after
            the first, only the last ``stride`` bytes are predicted (``num_context``).
        stride: Step of a strided evaluation [bytes], 1 to ``context_length``.
        split_ratio: Shares of train, val and test.
        samples_per_epoch: Crops per epoch; by default as many as fit.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If an argument is out of range, or the split is shorter than one context.
    """

    def __init__(
        self,
        data_file: str,
        split: str = 'train',
        context_length: int = 1024,
        evaluation: str = 'blocks',
        stride: int | None = None,
        split_ratio: Sequence[float] = (0.9, 0.05, 0.05),
        samples_per_epoch: int | None = None,
    ) -> None:
        check_path('data_file', data_file)
        check_choice('split', split, SPLITS)
        check_int('context_length', context_length, 1)
        check_choice('evaluation', evaluation, ('blocks', 'strided'))
        if stride is not None:
            check_int('stride', stride, 1)
        if samples_per_epoch is not None:
            check_int('samples_per_epoch', samples_per_epoch, 1)
        for share in split_ratio if isinstance(split_ratio, Sequence) else [split_ratio]:
            check_number('split_ratio', share, 0, 1)
        if (evaluation == 'strided') != (stride is not None) or (stride or 1) > context_length:
            raise ValueError(
                "stride must be 1 to context_length with evaluation='strided' and None with "
                f"'blocks', got {stride!r} with {evaluation!r} and a context_length of "
                f'{context_length}'
            )
        three = isinstance(split_ratio, Sequence) and len(split_ratio) == 3
        if not three or abs(sum(split_ratio) - 1) > 1e-6:
            refuse(
                'split_ratio', 'three shares that sum to 1, for train, val and test', split_ratio
            )
        self.split = split
        self.context_length = context_length
        self.stride = stride or context_length
        self.data = take_split(open_text(data_file), split, split_ratio)
        if len(self.data) < context_length:
            raise ValueError(
                f'the {split} split of {data_file!r} has {len(self.data)} bytes, '
                f'which is shorter than one context of {context_length} bytes'
            )
        windows = 1 + -(-(len(self.data) - context_length) // self.stride)
        crops = samples_per_epoch or len(self.data) // context_length
        self.num_samples = crops if split == 'train' else windows

    @property
    def metainfo(self) -> dict:
        return dict(vocab_size=256, split=self.split, context_length=self.context_length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self.num_samples:
            raise IndexError(f'index must be 0 to {self.num_samples - 1}, got {index}')
        if self.split == 'train':
            start = np.random.randint(len(self.data) - self.context_length + 1)
            num_context = 0
        else:
            start = index * self.stride
            num_context = self.context_length - self.stride if index else 0
        tokens = torch.from_numpy(np.array(self.data[start : start + self.context_length]))
        sample = SequenceSample(metainfo=dict(length=len(tokens), num_context=num_context))
        return dict(inputs=tokens, data_samples=sample)


class PlainFile:
    """The bytes of a file from `start` to `stop`, read slice by slice.

    A memory map of a file that is truncated would end the process.
    """

    def __init__(self, path: str | Path, start: int = 0, stop: int | None = None) -> None:
        self.path = os.fspath(path)
        self.start = start
        self.stop = os.stat(path).st_size if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> 'PlainFile':
        return PlainFile(self.path, self.start + start, self.start + stop)

    def __getitem__(self, index: slice) -> np.ndarray:
        """Return bytes, uint8 [N]; a ValueError if the file is shorter now."""
        start, stop, _ = index.indices(len(self))
        try:
            data = np.fromfile(self.path, np.uint8, max(0, stop - start), offset=self.start + start)
        except OSError as error:
            raise ValueError(f'data_file {self.path!r} cannot be read: {error.strerror}') from error
        if len(data) < stop - start:
            raise ValueError(f'data_file {self.path!r} has become shorter since it was opened')
        return data


def take_split(
    data: np.ndarray | PlainFile, split: str, ratio: Sequence[float]
) -> np.ndarray | PlainFile:
    position = SPLITS.index(split)
    start, stop = (round(len(data) * sum(ratio[:i])) for i in (position, position + 1))
    return data.part(start, stop) if isinstance(data, PlainFile) else data[start:stop]


def open_text(data_file: str) -> np.ndarray | PlainFile:
    """Return the bytes of a plain file, unread, or of a ``.gz`` file, uint8 [N]."""
    path = Path(data_file)
    if not path.is_file():
        path = path.with_name(f'{path.name}.gz')
    if not path.is_file():
        raise FileNotFoundError(
            f'data_file {data_file!r} does not exist, and neither does {path.name}'
        )
    if path.suffix != '.gz':
        if path.stat().st_size == 0:
            raise ValueError(f'data_file {data_file!r} is empty')
        return PlainFile(path)
    data = read_packed(path, MAX_RATIO * path.stat().st_size, 'data_file')
    return np.frombuffer(data, dtype=np.uint8)
