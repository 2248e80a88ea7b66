from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset

from aft_mm.checks import check_choice, check_int, check_path
from aft_mm.openmmlab import warn
from aft_mm.packed import read_packed
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
