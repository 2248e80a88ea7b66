import math
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset

from aft_mm.checks import check_choice, check_path
from aft_mm.openmmlab import warn
from aft_mm.packed import MAX_RATIO, read_packed
from aft_mm.registry import DATASETS

SMALL = 2**26  # bytes of content that any .gz file may have


@DATASETS.register_module()
class MNISTIdx(BaseDataset):
    """MNIST as its four original files, gzipped or not.

    A sample is ``dict(img=uint8 [28, 28], gt_label=int)``.

    Args:
        data_root: Folder of ``train-images-idx3-ubyte.gz`` and the others.
        split: ``'train'`` or ``'test'``.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the split is unknown or a file damaged.
    """

    METAINFO = dict(classes=tuple('0123456789'))
    FILES = dict(train='train', test='t10k')
    IMAGES = dict(train=60_000, test=10_000)

    def __init__(self, data_root: str, split: str = 'train', **kwargs: Any) -> None:
        check_path('data_root', data_root)
        check_choice('split', split, self.FILES)
        self.split = split
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict]:
        folder, prefix = Path(self.data_root), self.FILES[self.split]
        images = read_idx(folder / f'{prefix}-images-idx3-ubyte', num_axes=3)
        labels = read_idx(folder / f'{prefix}-labels-idx1-ubyte', num_axes=1)
        if len(images) != len(labels):
            raise ValueError(
                f'{folder} must have one label per image in its {self.split} split, got '
                f'{len(images)} images and {len(labels)} labels'
            )
        if labels.max(initial=0) > 9:
            raise ValueError(f'labels of {folder} must be 0 to 9, got {labels.max()}')
        if not len(images):
            raise ValueError(f'{folder} has no image in its {self.split} split')
        if len(images) != self.IMAGES[self.split]:
            warn(
                f'{folder} has {len(images):,} images in its {self.split} split, not the '
                f'{self.IMAGES[self.split]:,} of MNIST'
            )
        return [
            dict(img=image, gt_label=int(label))
            for image, label in zip(images, labels, strict=True)
        ]


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """Read an idx file of bytes, ``path`` itself or ``<path>.gz``."""
    packed = path.with_name(f'{path.name}.gz')
    if not path.is_file() and not packed.is_file():
        raise FileNotFoundError(
            f'{packed} of MNIST does not exist: point data_root (or '
            'AFT_MM_DATA) at the folder that contains it'
        )
    if path.is_file():
        data = path.read_bytes()
    else:
        path = packed
        data = read_packed(path, max(SMALL, MAX_RATIO * packed.stat().st_size), 'MNIST file')
    header = 4 + 4 * num_axes
    if data[:4] != bytes([0, 0, 8, num_axes]) or len(data) < header:
        raise ValueError(f'{path} is not an idx file of bytes with {num_axes} axes')
    shape = np.frombuffer(data, '>u4', num_axes, offset=4).tolist()
    size = header + math.prod(shape)
    if len(data) != size:
        raise ValueError(f'{path} must have {size} bytes by its header, got {len(data)}')
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
