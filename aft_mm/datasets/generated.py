"""Generated tasks: copying, recall and ListOps, and paths in images."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.dataset import BaseDataset
from torch.utils.data import Dataset

from aft_mm.checks import check_choice, check_int, check_number, refuse
from aft_mm.registry import DATASETS
from aft_mm.structures import SequenceSample

SPLITS = ('train', 'val', 'test')


def check_generated(split: str, num_samples: int, seed: int) -> None:
    check_choice('split', split, SPLITS)
    check_int('num_samples', num_samples, 1)
    check_int('seed', seed, 0)


class GeneratedSequences(Dataset):
    """Base class: a sample is ``dict(inputs=uint8 [T], data_samples=SequenceSample)``.

    ``train`` makes new sequences in every epoch; ``val`` and ``test`` are fixed. A subclass
    implements :meth:`make`.

    Args:
        split: ``'train'``, ``'val'`` or ``'test'``.
        num_samples: Sequences per epoch.
        seed: Seed of ``val`` and ``test``.
    """

    #: Number of different tokens.
    vocab_size: int
    #: Largest number of tokens.
    max_length: int

    def __init__(self, split: str = 'train', num_samples: int = 64_000, seed: int = 0) -> None:
        check_generated(split, num_samples, seed)
        self.split = split
        self.num_samples = num_samples
        self.seed = seed

    def make(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens [T] of a sequence, and which of them are predicted, bool [T]."""
        raise NotImplementedError

    @property
    def metainfo(self) -> dict:
        return dict(vocab_size=self.vocab_size, split=self.split, max_length=self.max_length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self.num_samples:
            raise IndexError(f'index must be 0 to {self.num_samples - 1}, got {index}')
        key: Any = [self.seed, SPLITS.index(self.split), index]
        if self.split == 'train':  # the run seeds it in every epoch
            key = np.random.randint(2**31)
        tokens, predicted = self.make(np.random.default_rng(key))
        first = int(predicted.argmax())
        sample = SequenceSample(metainfo=dict(length=len(tokens), num_context=first))
        if not predicted[first:].all():
            sample.predicted = torch.from_numpy(predicted)
        return dict(inputs=torch.from_numpy(tokens.astype(np.uint8)), data_samples=sample)


# Of random lists, of which one must have an allowed length.
MOST_TRIES = 10_000


@DATASETS.register_module()
class CopyTask(GeneratedSequences):
    """Random symbols, a separator, and the same symbols again (arXiv 2006.16236, §4.1.1).

    2·n + 1 tokens: n uniform in 1 … (max_length − 1) // 2. Only the copy is predicted.

    Args:
        max_length: Largest number of tokens, 3 or more.
        num_symbols: Number of symbols without the separator, 1 to 255.
    """

    def __init__(
        self, split: str = 'train', max_length: int = 128, num_symbols: int = 10, **kwargs: Any
    ) -> None:
        super().__init__(split, **kwargs)
        check_int('max_length', max_length, 3)
        check_int('num_symbols', num_symbols, 1, 255)
        self.max_length = max_length
        self.num_symbols = num_symbols
        self.vocab_size = num_symbols + 1

    def make(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        number = rng.integers(1, (self.max_length - 1) // 2, endpoint=True)
        symbols = rng.integers(1, self.num_symbols, number, endpoint=True, dtype=np.uint8)
        tokens = np.concatenate((symbols, [np.uint8(0)], symbols))
        return tokens, np.arange(len(tokens)) > number


@DATASETS.register_module()
class AssociativeRecall(GeneratedSequences):
    """Multi-query associative recall (arXiv 2312.04927, all keys asked, no filler).

    ``k₁ v₁ … k_n v_n``, then every key in random order, followed by its value, which is predicted.

    Args:
        num_pairs: Pairs n of a sequence, whose length is 4·n.
        num_keys: Number of different keys, and of values, num_pairs to 128.
    """

    def __init__(
        self, split: str = 'train', num_pairs: int = 16, num_keys: int = 64, **kwargs: Any
    ) -> None:
        super().__init__(split, **kwargs)
        check_int('num_pairs', num_pairs, 1)
        check_int('num_keys', num_keys, num_pairs, 128)
        self.num_pairs = num_pairs
        self.num_keys = num_keys
        self.vocab_size = 2 * num_keys
        self.max_length = 4 * num_pairs

    def make(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        keys = rng.permutation(self.num_keys)[: self.num_pairs]
        values = self.num_keys + rng.integers(0, self.num_keys, self.num_pairs)
        pairs = np.stack((keys, values), 1)
        tokens = np.concatenate((pairs, rng.permutation(pairs))).reshape(-1)
        index = np.arange(len(tokens))
        return tokens, (index >= 2 * self.num_pairs) & (index % 2 == 1)


@DATASETS.register_module()
class ListOps(GeneratedSequences):
    """Nested lists of digits with an operation each, and the digit that they evaluate to.

    ``[MAX 4 [MED 1 9 2 ] 0 ] = 4`` (arXiv 1804.06028, as in arXiv 2011.04006), also with MIN and
    SM, the sum modulo 10. Only the last digit is predicted. Tokens are the digits, 10 to 13 for
    MAX, MIN, MED and SM, 14 for ``]`` and 15 for ``=``.

    Args:
        max_length: Largest number of tokens, 6 or more.
        min_length: Smallest number of tokens.
        max_depth: Largest number of nested lists.
        max_args: Largest number of elements of a list, 2 or more.
    """

    OPERATIONS = (max, min, lambda values: int(median(values)), lambda values: sum(values) % 10)
    CLOSE, EQUALS = 14, 15
    vocab_size = 16

    def __init__(
        self,
        split: str = 'train',
        max_length: int = 128,
        min_length: int = 32,
        max_depth: int = 5,
        max_args: int = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(split, **kwargs)
        check_int('max_length', max_length, 6)
        check_int('min_length', min_length, 1, max_length // 2)
        check_int('max_depth', max_depth, 1)
        check_int('max_args', max_args, 2)
        if (max_args + 2) * max_args ** (max_depth - 1) < min_length:
            refuse('min_length', f'reachable by {max_depth} lists of {max_args}', min_length)
        self.max_length = max_length
        self.min_length = min_length
        self.max_depth = max_depth
        self.max_args = max_args

    def make(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        for _ in range(MOST_TRIES):
            tokens, value = self._list(rng, self.max_depth)
            if self.min_length <= len(tokens) + 2 <= self.max_length:
                tokens += [self.EQUALS, value]
                return np.array(tokens), np.arange(len(tokens)) == len(tokens) - 1
        raise ValueError(
            f'max_length must fit to lists of max_depth={self.max_depth} and '
            f'max_args={self.max_args}, got {self.max_length}: none of {MOST_TRIES:,} lists has '
            f'{self.min_length} to {self.max_length} tokens'
        )

    def _list(self, rng: np.random.Generator, depth: int) -> tuple[list[int], int]:
        operation = int(rng.integers(len(self.OPERATIONS)))
        tokens, values = [10 + operation], []
        for _ in range(rng.integers(2, self.max_args, endpoint=True)):
            if depth > 1 and rng.random() < 0.4:
                part, value = self._list(rng, depth - 1)
            else:
                value = int(rng.integers(10))
                part = [value]
            tokens += part
            values.append(value)
            if len(tokens) > 4 * self.max_length:  # a rest of any size would be in vain
                break
        return [*tokens, self.CLOSE], self.OPERATIONS[operation](values)


# Of 8,192 candidates each, without a pair of paths.
MOST_ROUNDS = 50


@DATASETS.register_module()
class Pathfinder(BaseDataset):
    """Images of two dashed paths with a dot at two of their four ends.

    Class 1 if the dots are on one path, else 0 (after arXiv 1808.08750). A sample is
    ``dict(img=uint8 [size, size, 1], gt_label=int)``.

    Args:
        split: ``'train'``, ``'val'`` or ``'test'``.
        size: Height and width [px].
        num_steps: Dashes of a path.
        shortest, longest: Lengths of paths, in sides of the image.
    """

    METAINFO = dict(classes=('apart', 'connected'))

    def __init__(
        self,
        split: str = 'train',
        num_samples: int = 20_000,
        size: int = 32,
        num_steps: int = 3,
        shortest: float = 0.25,
        longest: float = 0.75,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        check_generated(split, num_samples, seed)
        check_int('size', size, 16)
        check_int('num_steps', num_steps, 2)
        check_number('shortest', shortest, above=0, most=1)
        check_number('longest', longest, least=shortest, most=1)
        self.split, self.num_samples, self.size = split, num_samples, size
        self.num_steps, self.seed = num_steps, seed
        self.shortest, self.longest = shortest, longest
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split)])
        images: list[dict] = []
        missed = 0
        while len(images) < self.num_samples:
            pairs = [self._sample(*pair, int(rng.integers(2))) for pair in self._pairs(rng)]
            images += pairs
            missed = 0 if pairs else missed + 1
            if missed == MOST_ROUNDS:
                raise ValueError(
                    f'shortest and longest must leave room for two paths in {self.size} px, got '
                    f'{self.shortest} and {self.longest}'
                )
        return images[: self.num_samples]

    def _sample(self, path: np.ndarray, other: np.ndarray, label: int) -> dict:
        image = np.zeros((self.size, self.size), np.uint8)
        for points in (path, other):
            for start, end in zip(points[:-1], points[1:], strict=True):
                middle, half = (start + end) / 2, (end - start) * 0.25
                # In cv2's fixed-point coordinates.
                first, last = (np.rint(16 * x).astype(int) for x in (middle - half, middle + half))
                cv2.line(image, first.tolist(), last.tolist(), 160, 1, cv2.LINE_AA, 4)
        for dot in (path[0], path[-1] if label else other[-1]):
            cv2.circle(image, np.rint(dot).astype(int).tolist(), 1, 255, -1)
        return dict(img=image[..., None], gt_label=label)

    def _pairs(self, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        margin, candidates = 2, 8192
        length = self.size * rng.uniform(self.shortest, self.longest, (candidates, 1))
        step = length / self.num_steps
        start = rng.uniform(margin, self.size - 1 - margin, (candidates, 1, 2))
        turns = rng.normal(0, 0.5, (candidates, self.num_steps))
        turns[:, 0] = rng.uniform(0, 2 * np.pi, candidates)
        angle = turns.cumsum(1)
        steps = np.stack((step * np.cos(angle), step * np.sin(angle)), -1)
        paths = np.concatenate((start, start + steps.cumsum(1)), 1)
        # Inside the image and not back to itself.
        later, earlier = np.triu_indices(self.num_steps + 1, 2)
        distance = np.linalg.norm(paths[:, later] - paths[:, earlier], axis=-1)
        inside = ((paths > margin) & (paths < self.size - margin)).all((1, 2))
        kept = inside & (distance > 0.8 * step).all(1)
        paths, gaps = paths[kept], np.maximum(0.8 * step[kept, 0], self.size / 8)
        for i in range(0, len(paths) - 1, 2):
            one, other = paths[i : i + 2]
            if np.linalg.norm(one[:, None] - other, axis=-1).min() > gaps[i : i + 2].max():
                yield one, other
