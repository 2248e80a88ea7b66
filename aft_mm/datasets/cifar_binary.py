"""CIFAR-10 from its binary distribution."""

from pathlib import Path

import numpy as np
from mmengine.dataset import BaseDataset

from aft_mm.checks import check_choice, check_path
from aft_mm.registry import DATASETS

RECORD_BYTES = 1 + 3 * 32 * 32  # the label, then R, G and B, each row by row


@DATASETS.register_module()
class CIFAR10Binary(BaseDataset):
    """CIFAR-10 as ``<data_root>/cifar-10-batches-bin/*.bin``.

    A sample is ``dict(img=uint8 [32, 32, 3] in RGB order, gt_label=int)``.

    Args:
        data_root: Folder that contains ``cifar-10-batches-bin``.
        split: ``'train'`` (``data_batch_1.bin`` to ``data_batch_5.bin``) or ``'test'``
            (``test_batch.bin``).
        **kwargs: See :class:`mmengine.dataset.BaseDataset`.

    Raises:
        FileNotFoundError: If a file of the split is missing.
        ValueError: If ``split`` is unknown or a file is damaged.
    """

    METAINFO = dict(
        classes=(
            'airplane',
            'automobile',
            'bird',
            'cat',
            'deer',
            'dog',
            'frog',
            'horse',
            'ship',
            'truck',
        )
    )
    FILES = dict(train=tuple(f'data_batch_{i}.bin' for i in range(1, 6)), test=('test_batch.bin',))

    def __init__(self, data_root: str, split: str = 'train', **kwargs) -> None:
        check_path('data_root', data_root)
        check_choice('split', split, self.FILES)
        self.split = split
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict]:
        """Return one ``dict(img, gt_label)`` per record, in the order of the files."""
        folder = Path(self.data_root) / 'cifar-10-batches-bin'
        records = np.concatenate([self._read(folder / name) for name in self.FILES[self.split]])
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return [
            dict(img=np.ascontiguousarray(image), gt_label=int(label))
            for image, label in zip(images, records[:, 0], strict=True)
        ]

    def _read(self, path: Path) -> np.ndarray:
        if not path.is_file():
            raise FileNotFoundError(
                f'{path} of the CIFAR-10 {self.split} split does not exist: point data_root '
                '(or AFT_MM_DATA) at the folder that contains cifar-10-batches-bin'
            )
        data = np.fromfile(path, dtype=np.uint8)
        if data.size == 0 or data.size % RECORD_BYTES:
            raise ValueError(
                f'{path} must be a whole number of CIFAR-10 records of {RECORD_BYTES} bytes, '
                f'got {data.size} bytes: it is truncated'
            )
        records = data.reshape(-1, RECORD_BYTES)
        if records[:, 0].max() > 9:
            raise ValueError(
                f'labels of {path} must be 0 to 9, got {records[:, 0].max()}: it is not a '
                'CIFAR-10 file'
            )
        return records
