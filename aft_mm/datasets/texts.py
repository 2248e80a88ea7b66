"""Texts: a file as a sequence of bytes, and sentences with their translations."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import Dataset

from aft_mm.checks import check_choice, check_flag, check_int, check_number, check_path, refuse
from aft_mm.openmmlab import warn
from aft_mm.packed import MAX_RATIO, packed_as, read_packed
from aft_mm.registry import DATASETS
from aft_mm.structures import SequenceSample
from aft_mm.tokenizers import Subwords, split_lines

from .file_dataset import read_arrays, write_arrays
from .utterances import first_of

SPLITS = ('train', 'val', 'test')


@DATASETS.register_module()
class TextFile(Dataset):
    """The bytes of one file: the first part for training, then validation and test.

    The default split is Transformer-XL's for enwik8. A sample is ``dict(inputs=uint8 [T],
    data_samples=SequenceSample(length=T, num_context))``.

    Args:
        data_file: Path of the file, plain, gzip or xz; ``<data_file>.gz`` is tried too.
        split: ``'train'``, random crops, ``'val'`` or ``'test'``.
        context_length: Bytes T of a context.
        evaluation: ``'blocks'``, consecutive contexts, or ``'strided'``, contexts of which, after
            the first, only the last ``stride`` bytes are predicted (``num_context``).
        stride: Step of a strided evaluation [bytes], 1 to ``context_length``.
        split_ratio: Shares of train, val and test.
        samples_per_epoch: Crops per epoch; by default as many as fit.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If an argument is out of range, the file is packed otherwise or UTF-16, or the
            split is shorter than one context.
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
    """Return the bytes of a plain file, unread, or of a gzip or xz file, uint8 [N]."""
    path = Path(data_file)
    if not path.is_file():
        path = path.with_name(f'{path.name}.gz')
    if not path.is_file():
        raise FileNotFoundError(
            f'data_file {data_file!r} does not exist, and neither does {path.name}'
        )
    if packed_as(path, 'data_file') is None:
        if path.stat().st_size == 0:
            raise ValueError(f'data_file {data_file!r} is empty')
        return PlainFile(path)
    data = read_packed(path, MAX_RATIO * path.stat().st_size, 'data_file')
    return np.frombuffer(data, dtype=np.uint8)


CHUNK = 100_000  # lines at once
# With attributes or an address: a sentence may begin with a placeholder such as <url>.
_MARKUP = re.compile(
    rb'(?:\xef\xbb\xbf)?\s*'
    rb'(?:(<(?:\?xml|!doctype|(?:src|ref|tst)set|tmx|doc|seg))\s|(<url>)\s*http)',
    re.IGNORECASE,
)


@DATASETS.register_module()
class ParallelText(Dataset):
    """Two files with one sentence per line; line n of one translates line n of the other.

    A sample is ``dict(inputs=int32 [T], data_samples=SequenceSample(length=T, source=int32 [S]))``.

    Training leaves out and logs pairs with an empty side or longer than ``max_length``. A test uses
    all, with the target text as ``reference``.

    Args:
        source_file: The sentences, plain, gzip or xz; ``<path>.gz`` is tried too.
        target_file: Their translations.
        subwords: Path of the :class:`Subwords` of both languages.
        max_length: Largest number of subwords per side.
        test_mode: Whether the pairs are for a test.
        cache_dir: Folder for the encoded text.

    Attributes:
        lengths: Subwords of source and target of each pair, int64 [N, 2].
        subwords: The vocabulary.

    Raises:
        ValueError: If the numbers of lines differ, no pair is left, or a test has a longer one.
    """

    def __init__(
        self,
        source_file: str,
        target_file: str,
        subwords: str,
        max_length: int = 256,
        test_mode: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        check_int('max_length', max_length, 1)
        check_flag('test_mode', test_mode)
        if cache_dir is not None:
            check_path('cache_dir', cache_dir)
        self.subwords = Subwords(subwords)
        self.max_length = max_length
        self.test_mode = test_mode
        self.files = source_file, target_file
        texts = [read_lines(path) for path in self.files]
        if len(texts[0]) != len(texts[1]):
            raise ValueError(
                f'source_file and target_file must have equally many lines, '
                f'got {len(texts[0]):,} of {source_file!r} and {len(texts[1]):,} of '
                f'{target_file!r}'
            )
        if texts[0] == texts[1]:
            warn(f'source_file {source_file!r} and target_file {target_file!r} have the same text')
        self.tokens, lengths = zip(
            *(encode_cached(text, self.subwords, cache_dir) for text in texts), strict=True
        )
        self.starts = [np.cumsum(length) - length for length in lengths]
        for side in zip(self.files, texts, self.tokens, self.starts, strict=True):
            report_unknown(self.subwords, *side)
        lengths = np.stack(lengths, axis=1)
        self.rows = self._usable(texts, lengths)
        self.lengths = lengths[self.rows]
        self.references = texts[1] if test_mode else None

    @property
    def metainfo(self) -> dict:
        return dict(vocab_size=self.subwords.vocab_size, subwords=self.subwords.fingerprint)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(f'index must be 0 to {len(self) - 1}, got {index}')
        row = self.rows[index]
        source, target = (
            torch.from_numpy(tokens[start[row] : start[row] + length].astype(np.int32))
            for tokens, start, length in zip(
                self.tokens, self.starts, self.lengths[index], strict=True
            )
        )
        sample = SequenceSample(metainfo=dict(length=len(target), num_context=0), source=source)
        if self.references is not None:
            sample.set_metainfo(dict(reference=self.references[row]))
        return dict(inputs=target, data_samples=sample)

    def pairs(self) -> set[tuple[bytes, ...]]:
        """Return the tokens of every pair, to compare two data sets."""
        return {
            tuple(
                tokens[start[row] : start[row] + length].tobytes()
                for tokens, start, length in zip(self.tokens, self.starts, lengths, strict=True)
            )
            for row, lengths in zip(self.rows, self.lengths, strict=True)
        }

    def _usable(self, texts: Sequence[list[str]], lengths: np.ndarray) -> np.ndarray:
        pairs = zip(*texts, strict=True)
        empty = ~np.array([bool(a.strip() and b.strip()) for a, b in pairs], bool)
        long = lengths.max(axis=1, initial=0) > self.max_length
        too_long = f'longer than {self.max_length} subwords ({named(long)})'
        if self.test_mode:
            if long.any():
                raise ValueError(
                    f'max_length must be large enough for all pairs of a test set, got {long.sum()} '
                    f'of {" and ".join(self.files)} {too_long}; raise it and the grids of the model'
                )
            return np.arange(len(lengths))
        long &= ~empty
        left_out = [
            f'{mask.sum():,} {reason}'
            for mask, reason in ((empty, f'with an empty side ({named(empty)})'), (long, too_long))
            if mask.any()
        ]
        rows = np.flatnonzero(~(empty | long))
        if left_out:
            warn(
                f'of the {len(lengths):,} pairs of {" and ".join(self.files)} '
                f'{" and ".join(left_out)} are left out'
            )
        if not len(rows):
            raise ValueError(f'{" and ".join(self.files)} have no pair that can be used')
        return rows


def named(mask: np.ndarray) -> str:
    return named_lines((np.flatnonzero(mask) + 1).tolist())


def named_lines(numbers: Sequence[int]) -> str:
    """Format the first line numbers as ``line 3`` or ``lines 3, 7, …``."""
    return f'line{"s" * (len(numbers) != 1)} {first_of(numbers)}'


def read_lines(path: str) -> list[str]:
    """Return the lines of a plain, gzip or xz file; invalid UTF-8 is a warning.

    Raises:
        ValueError: If it has zero bytes, as UTF-16 has, or begins with a tag of SGML or XML.
    """
    content = open_text(path)[:].tobytes()
    found = 'zero bytes, as in UTF-16' if b'\0' in content else ''
    if tag := _MARKUP.match(content):
        found = f'markup, {(tag[1] or tag[2]).decode()} …'
    if found:
        raise ValueError(f'{path!r} must be sentences in UTF-8, one per line, got {found}')
    lines, invalid = split_lines(content)
    if invalid:
        warn(
            f'{path!r} is not valid UTF-8 in {named_lines(invalid)}, {len(invalid):,} in '
            'all; invalid bytes became U+FFFD'
        )
    return lines


def report_unknown(
    subwords: Subwords, path: str, lines: list[str], tokens: np.ndarray, starts: np.ndarray
) -> None:
    """Warn of characters without a subword; those of the first such lines are named."""
    places = np.flatnonzero(tokens == subwords.unknown_token)
    rows = np.unique(np.searchsorted(starts, places, side='right') - 1)
    if len(rows):
        unknown = ''.join(dict.fromkeys(''.join(subwords.unknown(lines[i]) for i in rows[:100])))
        warn(
            f'{path!r} has characters without a subword, {unknown[:40]!r}, in '
            f'{named_lines((rows + 1).tolist())}, {len(rows):,} in all; they become <unk>'
        )


def encode(lines: list[str], subwords: Subwords) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all lines in the smallest dtype, and their number per line, int64 [N]."""
    dtype = np.min_scalar_type(subwords.vocab_size - 1)
    tokens: list[np.ndarray] = [np.zeros(0, dtype)]
    lengths: list[int] = []
    for first in range(0, len(lines), CHUNK):
        rows = subwords.encode(lines[first : first + CHUNK])
        lengths += map(len, rows)
        tokens.append(np.concatenate([np.array(row, dtype) for row in rows]))
    return np.concatenate(tokens), np.array(lengths, np.int64)


def encode_cached(
    lines: list[str], subwords: Subwords, cache_dir: str | None
) -> tuple[np.ndarray, np.ndarray]:
    if cache_dir is None:
        return encode(lines, subwords)
    digest = hashlib.sha256(subwords.fingerprint.encode())
    for line in lines:
        digest.update(f'{line}\n'.encode())
    path = Path(cache_dir, f'{digest.hexdigest()}.npz')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f'{path}.lock'):
            arrays = read_arrays(path, 'tokens', 'lengths')
            if arrays is None:
                arrays = [*encode(lines, subwords)]
                write_arrays(path, tokens=arrays[0], lengths=arrays[1])
            return arrays[0], arrays[1]
    except OSError as error:
        warn(f'cache_dir {cache_dir!r} cannot be used, so every process encodes the text: {error}')
        return encode(lines, subwords)
