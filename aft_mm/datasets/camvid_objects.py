"""Objects of CamVid with boxes and masks."""

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from mmengine.dataset import BaseDataset
from PIL import Image

from aft_mm.registry import DATASETS

from .image_files import IMAGE_SUFFIXES

# In the order of the labels; 11 is unlabelled.
LABELS = ('sky', 'building', 'pole', 'road', 'pavement', 'tree', 'sign', 'fence', 'car',
          'pedestrian', 'bicyclist')
UNLABELLED = len(LABELS)


@DATASETS.register_module()
class CamVidObjects(BaseDataset):
    """CamVid in the layout of SegNet as boxes and masks, the samples that mmdet's pipelines read.

    CamVid labels pixels, not objects: an object here is a connected region of one class (of the 8
    neighbours), so cars that touch in the picture, as a row of parked ones, are one. A region below
    ``min_area`` has ``ignore_flag`` 1: COCO's metric counts it neither as found nor as missed.

    A sample is ``dict(img_path, img_id, height, width, instances)``, an instance
    ``dict(bbox, bbox_label, ignore_flag, mask)`` with the corners ``x1, y1, x2, y2`` in px, the far
    ones exclusive, and the mask in COCO's run-length form. Frames without an object stay.

    Args:
        data_root: The folder that holds ``<split>/*`` and ``<split>annot/*.png``.
        split: ``'train'``, ``'val'`` or ``'test'``, or another pair of folders.
        min_area: Pixels of the smallest region that is an object.
        **kwargs: Those of :class:`mmengine.dataset.BaseDataset`, such as ``pipeline``; ``classes``
            of ``metainfo`` are some of CamVid's 11, ``('car', 'pedestrian', 'bicyclist')`` unless
            given.

    Raises:
        FileNotFoundError: A folder or the labels of a frame are missing.
        ValueError: A class is not CamVid's, or a file holds other labels than 0 to 11.
    """

    METAINFO = dict(classes=('car', 'pedestrian', 'bicyclist'),
                    palette=[(64, 0, 128), (64, 64, 0), (0, 128, 192)])

    def __init__(self, data_root: str, split: str = 'train', min_area: int = 150, **kwargs) -> None:
        self.split = split
        self.min_area = min_area
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict]:
        """One sample per frame, in the order of their names."""
        unknown = sorted(set(self.metainfo['classes']) - set(LABELS))
        if unknown:
            raise ValueError(f'classes of metainfo must be of {", ".join(LABELS)}, '
                             f'but got {", ".join(unknown)}.')
        frames = Path(self.data_root) / self.split
        folder = Path(self.data_root) / f'{self.split}annot'
        for path in (frames, folder):
            if not path.is_dir():
                raise FileNotFoundError(f'{path} of CamVid does not exist: point data_root (or '
                                        'AFT_MM_DATA) at the folder that holds it.')
        samples: list[dict] = []
        for frame in sorted(frames.iterdir()):
            if frame.suffix.lower() not in IMAGE_SUFFIXES:
                continue
            labels = read_labels(folder / f'{frame.stem}.png')
            height, width = labels.shape
            samples.append(dict(img_path=str(frame), img_id=len(samples), height=height,
                                width=width, instances=list(self._objects(labels))))
        return samples

    def _objects(self, labels: np.ndarray) -> Iterator[dict]:
        # Comes with mmdet, whose pipelines read the samples.
        from pycocotools import mask as run_lengths

        for index, name in enumerate(self.metainfo['classes']):
            is_class = (labels == LABELS.index(name)).astype(np.uint8)
            count, regions, stats, _ = cv2.connectedComponentsWithStats(is_class, connectivity=8)
            for region in range(1, count):  # 0 is the rest of the frame
                x, y, width, height, area = stats[region].tolist()
                mask = run_lengths.encode(np.asfortranarray(regions == region, dtype=np.uint8))
                mask['counts'] = mask['counts'].decode()
                yield dict(bbox=[x, y, x + width, y + height], bbox_label=index,
                           ignore_flag=int(area < self.min_area), mask=mask)


def read_labels(path: Path) -> np.ndarray:
    """The labels of a frame, uint8 [H, W]."""
    if not path.exists():
        raise FileNotFoundError(f'{path}, the labels of a frame of CamVid, does not exist.')
    with Image.open(path) as file:
        labels = np.array(file)
    if labels.ndim != 2 or labels.max() > UNLABELLED:
        raise ValueError(f'{path} must hold one label per pixel, 0 to {UNLABELLED}, but got '
                         f'shape {labels.shape} and values up to {labels.max()}.')
    return labels
