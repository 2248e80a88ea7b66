from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from mmengine.dataset import BaseDataset
from PIL import Image

from aft_mm.checks import check_int, check_path, check_text
from aft_mm.errors import UnusableFile, reason_of
from aft_mm.images import IMAGE_FORMATS, IMAGE_SUFFIXES, image_size
from aft_mm.registry import DATASETS

# In the order of the labels; 11 is unlabelled.
COLOURS = dict(
    sky=(128, 128, 128),
    building=(128, 0, 0),
    pole=(192, 192, 128),
    road=(128, 64, 128),
    pavement=(60, 40, 222),
    tree=(128, 128, 0),
    sign=(192, 128, 128),
    fence=(64, 64, 128),
    car=(64, 0, 128),
    pedestrian=(64, 64, 0),
    bicyclist=(0, 128, 192),
)
LABELS = tuple(COLOURS)
UNLABELLED = len(LABELS)


@DATASETS.register_module()
class CamVidObjects(BaseDataset):
    """CamVid in SegNet's layout as boxes and masks, in the sample format of mmdet.

    An object is an 8-connected region of one class, so cars that touch are one. A sample is
    ``dict(img_path, img_id, height, width, instances)``, an instance
    ``dict(bbox, bbox_label, ignore_flag, mask)``. Boxes are ``x1, y1, x2, y2`` [px], the far ones
    exclusive; masks are run-length encoded.

    Args:
        data_root: Folder with ``<split>/*`` and ``<split>annot/*.png``.
        split: ``'train'``, ``'val'``, ``'test'`` or another pair of folders.
        min_area: Smaller regions [px] get ``ignore_flag=1``.
        metainfo: ``classes``, by default car, pedestrian and bicyclist, and ``palette``.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`.
    """

    def __init__(
        self,
        data_root: str,
        split: str = 'train',
        min_area: int = 150,
        metainfo: Mapping | None = None,
        **kwargs: Any,
    ) -> None:
        check_path('data_root', data_root)
        check_text('split', split)
        check_int('min_area', min_area, 0)
        self.split = split
        self.min_area = min_area
        metainfo = {'classes': ('car', 'pedestrian', 'bicyclist'), **(metainfo or {})}
        unknown = sorted(set(metainfo['classes']) - set(LABELS))
        if unknown:
            raise ValueError(
                f'classes of metainfo must be among {", ".join(LABELS)}, got {", ".join(unknown)}'
            )
        metainfo.setdefault('palette', [COLOURS[name] for name in metainfo['classes']])
        super().__init__(data_root=data_root, metainfo=metainfo, **kwargs)

    def load_data_list(self) -> list[dict]:
        frames = Path(self.data_root) / self.split
        folder = Path(self.data_root) / f'{self.split}annot'
        for path in (frames, folder):
            if not path.is_dir():
                raise FileNotFoundError(
                    f'{path} of CamVid does not exist: point data_root (or '
                    'AFT_MM_DATA) at the folder that contains it, and name one of '
                    'its splits'
                )
        samples: list[dict] = []
        for frame in sorted(frames.iterdir()):
            if frame.suffix.lower() not in IMAGE_SUFFIXES:
                continue
            labels = _read_labels(folder / f'{frame.stem}.png', frame)
            height, width = labels.shape
            info = dict(img_path=str(frame), img_id=len(samples), height=height, width=width)
            samples.append({**info, 'instances': list(self._objects(labels))})
        if not samples:
            raise ValueError(
                f'{frames} of CamVid contains no image file ({", ".join(IMAGE_SUFFIXES)})'
            )
        return samples

    def _objects(self, labels: np.ndarray) -> Iterator[dict]:
        # Installed with mmdet.
        from pycocotools import mask as run_lengths

        for index, name in enumerate(self.metainfo['classes']):
            is_class = (labels == LABELS.index(name)).astype(np.uint8)
            count, regions, stats, _ = cv2.connectedComponentsWithStats(is_class, connectivity=8)
            for region in range(1, count):  # 0 is the rest
                x, y, width, height, area = stats[region].tolist()
                mask = run_lengths.encode(np.asfortranarray(regions == region, dtype=np.uint8))
                mask['counts'] = mask['counts'].decode()
                yield dict(
                    bbox=[x, y, x + width, y + height],
                    bbox_label=index,
                    ignore_flag=int(area < self.min_area),
                    mask=mask,
                )


def _read_labels(path: Path, frame: Path) -> np.ndarray:
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist: every frame of CamVid needs a label file')
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as file:
            labels = np.array(file)
        size = image_size(frame)
    except (OSError, SyntaxError, UnusableFile) as error:
        raise ValueError(
            f'{path} or {frame} of CamVid cannot be read: {reason_of(error)}'
        ) from error
    if labels.ndim != 2 or labels.max() > UNLABELLED:
        raise ValueError(
            f'{path} must contain one label per pixel, 0 to {UNLABELLED}, got '
            f'shape {labels.shape} and values up to {labels.max()}'
        )
    if labels.shape != size[::-1]:
        raise ValueError(
            f'{path} must have the size of {frame}, {size[0]} x {size[1]}, got '
            f'{labels.shape[1]} x {labels.shape[0]}'
        )
    return labels
