from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
from mmengine.dataset import BaseDataset

from aft_mm.checks import check_int, check_number
from aft_mm.registry import DATASETS

from .generated_sequences import SPLITS, check_generated

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
