"""Masks of class numbers, checked before a run, and the size of the images of a test."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from aft_mm.errors import UserError
from aft_mm.images import IMAGE_FORMATS, image_size, orientation_of

from .texts import read_lines, type_name

if TYPE_CHECKING:  # mmengine imports torch, which takes seconds
    from mmengine.config import Config, ConfigDict

#: Label of pixels that belong to no class.
IGNORED = 255
#: Pillow's modes with one number per pixel that mmseg reads without a change.
ONE_NUMBER = ('L', 'P', '1')


def mask_files(root: str, dataset: 'ConfigDict') -> tuple[Path, Path, list[str]]:
    prefix = dataset.get('data_prefix') or {}
    images, masks = (Path(root, prefix.get(name, '')) for name in ('img_path', 'seg_map_path'))
    if dataset.get('ann_file'):
        return images, masks, read_lines(os.path.join(root, dataset.ann_file))
    suffix = dataset.get('img_suffix', '.jpg')
    files = (path.relative_to(images).as_posix() for path in images.rglob(f'*{suffix}'))
    return images, masks, sorted(name.removesuffix(suffix) for name in files)


def check_masks(key: str, root: str, dataset: 'ConfigDict') -> str:
    """Refuse masks of an mmseg BaseSegDataset of another size or format, or with other class numbers.

    Returns:
        Which pixels of a class are ignored, or ''.
    """
    if not (dataset.get('data_prefix') or {}).get('seg_map_path'):
        return ''
    classes = (dataset.get('metainfo') or {}).get('classes') or ()
    ignored = dataset.get('ignore_index', 255)
    suffix, mask_suffix = dataset.get('img_suffix', '.jpg'), dataset.get('seg_map_suffix', '.png')
    images, masks, names = mask_files(root, dataset)
    if not names:
        raise UserError(f'{key} reads {str(images)!r}, which has no file that ends in {suffix}')
    more = 1 if dataset.get('reduce_zero_label') else 0  # 0 is then no class, and 1 the first

    def check(name: str) -> Counter[int]:
        path = masks / f'{name}{mask_suffix}'
        pixels = read_mask(path, images / f'{name}{suffix}').pixels
        wrong = [value for value in pixels if value >= len(classes) + more and value != ignored]
        if classes and wrong:
            raise UserError(
                f'mask {str(path)!r} has the value {wrong[0]}, which must be 0 to '
                f'{len(classes) + more - 1}, the number of a class, or {ignored}, which is '
                f'ignored; add a class to metainfo, or set ignore_index to {wrong[0]}'
            )
        return pixels

    with ThreadPoolExecutor(8) as pool:
        pixels = sum(pool.map(check, names), Counter())
    reasons = {0: 'by reduce_zero_label'} if more else {}
    if 0 <= ignored < len(classes):
        reasons[ignored + more] = f'as ignore_index, though it is the class {classes[ignored]!r}'
    if len(pixels) == 2 and not reasons:
        reasons[ignored] = 'as ignore_index, and all others are of one class'
    return ', '.join(
        f'{100 * pixels[value] / pixels.total():.1f} % of the pixels are {value}, which is ignored {reason}'
        for value, reason in reasons.items()
        if pixels[value]
    )


class Mask(NamedTuple):
    """The pixels of each value in increasing order, width and height, and the colours of a palette."""

    pixels: Counter[int]
    size: tuple[int, int]
    palette: dict[int, tuple[int, ...]]


def read_mask(path: Path, image: Path) -> Mask:
    """Read a mask of class numbers.

    Raises:
        UserError: If it cannot be read, is a JPEG, turned by EXIF, has several channels or not the
            size of its image.
    """
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as mask:
            mode, size = mask.mode, mask.size
            pixels = mask.histogram() if mode in ONE_NUMBER else []
            palette = used_palette(mask)
            is_jpeg = 'JPEG' in (mask.format, str(mask.info.get('compression')).upper())
            orientation = orientation_of(mask)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())
        source = getattr(error, 'filename', None) or path
        raise UserError(f'mask {str(source)!r} cannot be read: {reason:.200}') from error
    expected = image_size(image)
    if is_jpeg:
        raise UserError(f'mask {str(path)!r} must not be a JPEG, which changes values')
    if mode not in ONE_NUMBER:
        raise UserError(
            f'mask {str(path)!r} must have one class number of 8 bits per pixel, got mode {mode!r}; '
            '`aft_mm number-masks FOLDER OUT` writes numbers for colours'
        )
    if orientation > 1:
        raise UserError(
            f'mask {str(path)!r} must not be turned by EXIF, got orientation {orientation}; '
            '`aft_mm number-masks FOLDER OUT` turns its pixels'
        )
    if size != expected:
        raise UserError(
            f'mask {str(path)!r} must have the size of its image, {expected[0]} x {expected[1]}, '
            f'got {size[0]} x {size[1]}'
        )
    if mode == '1':  # which Pillow counts as 0 and 255
        pixels[1], pixels[255] = pixels[255], 0
    counts = Counter({value: number for value, number in enumerate(pixels) if number})
    return Mask(counts, size, palette)


def used_palette(mask: Image.Image) -> dict[int, tuple[int, ...]]:
    """Return the colours of the values of a mask with a palette, {} without one or if it is grey."""
    colours = mask.getpalette() if mask.mode == 'P' else None
    if not colours:
        return {}
    values = [value for value, number in enumerate(mask.histogram()) if number]
    palette = {value: tuple(colours[3 * value : 3 * value + 3]) for value in values}
    return {} if all(colour == (value,) * 3 for value, colour in palette.items()) else palette


def differing_palettes(
    masks: Sequence[Path], palettes: Iterable[Mapping[int, tuple[int, ...]]]
) -> str:
    """Return which two masks have different colours of one value, or ''."""
    first: dict[int, tuple[tuple[int, ...], Path]] = {}
    for path, palette in zip(masks, palettes, strict=True):
        for value, colour in palette.items():
            if value == IGNORED:
                continue
            other, there = first.setdefault(value, (colour, path))
            if colour != other:
                return f'{value} in {str(there)!r} and {str(path)!r}'
    return ''


def input_size(config: 'Config') -> tuple[int, int] | None:
    """Return the height and width of the images of a test, None if the config does not tell.

    For a classifier these are the ``img_size`` of the backbone, for others the scale to which the
    test resizes, or the size of the first image of a segmentor or of a batch in training.
    """
    size = config.model.backbone.get('img_size')
    if not type_name(config.model.type).endswith('ImageClassifier'):
        dataset = (config.get('test_dataloader') or {}).get('dataset') or {}
        steps = dataset.get('pipeline') or ()
        scales = [step.get('scale') for step in steps if type_name(step['type']).endswith('Resize')]
        scales = [scale for scale in scales if isinstance(scale, list | tuple)]
        prepares = (config.model.get('data_preprocessor') or {}).get('preprocessor') or {}
        size = scales[0][::-1] if scales else _first_size(dataset) or prepares.get('size') or size
    return (size, size) if isinstance(size, int) else size and tuple(size)


def _first_size(dataset: 'ConfigDict') -> tuple[int, int] | None:
    if not type_name(dataset.get('type')).endswith('BaseSegDataset'):
        return None
    try:
        images, _, names = mask_files(dataset.get('data_root') or '', dataset)
        first = f'{names[0]}{dataset.get("img_suffix", ".jpg")}' if names else ''
        return image_size(images / first)[::-1] if first else None
    except (OSError, UserError):  # data of another machine
        return None
