"""CIFAR-10, MNIST and the digits of scikit-learn, as arrays in memory."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset

from aft_mm.checks import check_choice, check_int, check_path
from aft_mm.openmmlab import warn
from aft_mm.packed import MAX_RATIO, read_packed
from aft_mm.registry import DATASETS

RECORD_BYTES = 1 + 3 * 32 * 32  # the label, then R, G and B, each row by row
MOST_RECORDS = 10_000  # in a file


@DATASETS.register_module()
class CIFAR10Binary(BaseDataset):
    """CIFAR-10 as ``*.bin`` or ``*.bin.xz`` files.

    A sample is ``dict(img=uint8 [32, 32, 3] in RGB order, gt_label=int)``.

    Args:
        data_root: Folder of ``cifar-10-batches-bin`` or of the files.
        split: ``'train'`` or ``'test'``.
        num_batches: Number of training files, 1 to 5.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the split is unknown or a file damaged.
    """

    METAINFO = dict(
        classes=tuple('airplane automobile bird cat deer dog frog horse ship truck'.split())
    )
    SPLITS = ('train', 'test')

    def __init__(
        self, data_root: str, split: str = 'train', num_batches: int = 5, **kwargs: Any
    ) -> None:
        check_path('data_root', data_root)
        check_choice('split', split, self.SPLITS)
        check_int('num_batches', num_batches, 1, 5)
        self.split = split
        self.num_batches = num_batches
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict]:
        folder = Path(self.data_root) / 'cifar-10-batches-bin'
        folder = folder if folder.is_dir() else folder.parent
        names = ['test_batch.bin']
        if self.split == 'train':
            names = [f'data_batch_{i}.bin' for i in range(1, self.num_batches + 1)]
        records = np.concatenate([self._read(folder / name) for name in names])
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return [
            dict(img=np.ascontiguousarray(image), gt_label=int(label))
            for image, label in zip(images, records[:, 0], strict=True)
        ]

    def _read(self, path: Path) -> np.ndarray:
        packed = path.with_suffix('.bin.xz')
        if path.is_file():
            data = np.fromfile(path, dtype=np.uint8)
        elif packed.is_file():
            path = packed
            content = read_packed(path, MOST_RECORDS * RECORD_BYTES, 'CIFAR-10 file')
            data = np.frombuffer(content, dtype=np.uint8)
        else:
            raise FileNotFoundError(
                f'{path} of the CIFAR-10 {self.split} split does not exist, nor {packed.name}: '
                'point data_root (or AFT_MM_DATA) at the folder that contains '
                'cifar-10-batches-bin, and set num_batches if the last files are left out'
            )
        if data.size == 0 or data.size % RECORD_BYTES:
            raise ValueError(
                f'{path} must be a whole number of CIFAR-10 records of {RECORD_BYTES} bytes, '
                f'got {data.size} bytes: it is truncated'
            )
        records = data.reshape(-1, RECORD_BYTES)
        if len(records) != MOST_RECORDS:
            warn(f'{path} has {len(records):,} images, not the {MOST_RECORDS:,} of CIFAR-10')
        if records[:, 0].max() > 9:
            raise ValueError(
                f'labels of {path} must be 0 to 9, got {records[:, 0].max()}: it is not a '
                'CIFAR-10 file'
            )
        return records


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


@DATASETS.register_module()
class Digits(BaseDataset):
    """The 1,797 handwritten digits of 8 x 8 pixels in scikit-learn (UCI optdigits).

    A sample is ``dict(img=uint8 [8, 8, 1], gt_label=int)``, grey levels 0 (paper) to 255 (ink).

    Args:
        split: ``'train'``, or ``'test'``, a fifth of every class.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`.

    Raises:
        ImportError: If scikit-learn is not installed.
        ValueError: If ``split`` is unknown.
    """

    METAINFO = dict(classes=tuple('0123456789'))

    def __init__(self, split: str = 'train', **kwargs: Any) -> None:
        check_choice('split', split, ('train', 'test'))
        self.split = split
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ImportError as error:
            raise ImportError(
                'Digits needs the images of scikit-learn: pip install scikit-learn'
            ) from error

        digits = load_digits()
        chosen = train_test_split(
            np.arange(len(digits.target)), test_size=0.2, stratify=digits.target, random_state=0
        )[self.split == 'test']
        # Ink is 0 to 16.
        images = np.rint(digits.images[..., None] * (255 / 16)).astype(np.uint8)
        return [dict(img=images[i], gt_label=int(digits.target[i])) for i in chosen]
