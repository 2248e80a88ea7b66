"""Sentences and their translations."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import Dataset

from aft_mm.checks import check_flag, check_int, check_path
from aft_mm.openmmlab import warn
from aft_mm.registry import DATASETS
from aft_mm.structures import SequenceSample
from aft_mm.tokenizers import Subwords, split_lines

from .cached_arrays import read_arrays, write_arrays
from .text_file import open_text
from .transcripts import first_of

CHUNK = 100_000  # lines at once


@DATASETS.register_module()
class ParallelText(Dataset):
    """Two files with one sentence per line; line n of one translates line n of the other.

    A sample is ``dict(inputs=int32 [T], data_samples=SequenceSample(length=T, source=int32 [S]))``.

    Training leaves out and logs pairs with an empty side or longer than ``max_length``. A test uses
    all, with the target text as ``reference``.

    Args:
        source_file: The sentences, plain or gzip; ``<path>.gz`` is tried too.
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
        self.tokens, lengths = zip(
            *(encode_cached(text, self.subwords, cache_dir) for text in texts), strict=True
        )
        self.starts = [np.cumsum(length) - length for length in lengths]
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
    """Return the lines of a plain or gzip file; invalid UTF-8 is a warning."""
    lines, invalid = split_lines(open_text(path)[:].tobytes())
    if invalid:
        warn(
            f'{path!r} is not valid UTF-8 in {named_lines(invalid)}, {len(invalid):,} in '
            'all; invalid bytes became U+FFFD'
        )
    return lines


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
