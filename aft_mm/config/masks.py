"""Masks of class numbers, checked before a run."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from aft_mm.errors import UserError
from aft_mm.images import IMAGE_FORMATS, image_size

from .lists import read_lines

if TYPE_CHECKING:  # mmengine imports torch, which takes seconds
    from mmengine.config import ConfigDict

#: Pillow's modes with one number per pixel that mmseg reads without a change.
ONE_NUMBER = ('L', 'P', '1')


def check_masks(key: str, root: str, dataset: 'ConfigDict') -> None:
    """Refuse masks of an mmseg BaseSegDataset of another size or format, or with other class numbers."""
    prefix = dataset.get('data_prefix') or {}
    if not prefix.get('seg_map_path'):
        return
    classes = (dataset.get('metainfo') or {}).get('classes') or ()
    ignored = dataset.get('ignore_index', 255)
    suffix, mask_suffix = dataset.get('img_suffix', '.jpg'), dataset.get('seg_map_suffix', '.png')
    images, masks = (Path(root, prefix.get(name, '')) for name in ('img_path', 'seg_map_path'))
    if dataset.get('ann_file'):
        names = read_lines(os.path.join(root, dataset.ann_file))
    else:
        files = (path.relative_to(images).as_posix() for path in images.rglob(f'*{suffix}'))
        names = sorted(name.removesuffix(suffix) for name in files)
    if not names:
        raise UserError(f'{key} reads {str(images)!r}, which has no file that ends in {suffix}')
    more = 1 if dataset.get('reduce_zero_label') else 0  # 0 is then no class, and 1 the first

    def check(name: str) -> None:
        path = masks / f'{name}{mask_suffix}'
        values = mask_values(path, images / f'{name}{suffix}')
        wrong = [value for value in values if value >= len(classes) + more and value != ignored]
        if classes and wrong:
            raise UserError(
                f'mask {str(path)!r} has the value {wrong[0]}, which must be 0 to '
                f'{len(classes) + more - 1}, the number of a class, or {ignored}, which is '
                f'ignored; add a class to metainfo, or set ignore_index to {wrong[0]}'
            )

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(check, names):
            pass


def mask_values(path: Path, image: Path) -> list[int]:
    """Return the values of a mask in increasing order, or raise a UserError if it does not fit."""
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as mask:
            mode, size = mask.mode, mask.size
            values = np.unique(np.asarray(mask)) if mode in ONE_NUMBER else np.zeros(0)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())
        source = getattr(error, 'filename', None) or path
        raise UserError(f'mask {str(source)!r} cannot be read: {reason:.200}') from error
    expected = image_size(image)
    if mode not in ONE_NUMBER:
        raise UserError(
            f'mask {str(path)!r} must have one class number of 8 bits per pixel, got mode {mode!r}; '
            '`aft_mm number-masks` writes numbers for colours'
        )
    if size != expected:
        raise UserError(
            f'mask {str(path)!r} must have the size of its image, {expected[0]} x {expected[1]}, '
            f'got {size[0]} x {size[1]}'
        )
    return [int(value) for value in values]
