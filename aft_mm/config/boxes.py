"""Boxes in the formats of COCO and VOC, checked before a run."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from xml.etree.ElementTree import ParseError, parse

from aft_mm.checks import described, is_int
from aft_mm.errors import UserError

from .lists import read_lines, read_text

if TYPE_CHECKING:  # mmengine imports torch, which takes seconds
    from mmengine.config import ConfigDict

#: Ends of the types of mmdet's data sets in the formats of COCO and VOC.
BOXES = ('CocoDataset', 'VOCDataset', 'XMLDataset')
#: Pixels of an image (Pillow's bound is 179 million), and a coordinate [px].
MAX_PIXELS = 2**28
MAX_COORDINATE = 10**5


def check_boxes(key: str, root: str, dataset: 'ConfigDict') -> None:
    """Refuse damaged annotations of an mmdet data set, and classes that differ from theirs.

    mmdet numbers COCO's classes by the order in the json file, and skips VOC boxes of other classes.
    """
    classes = (dataset.get('metainfo') or {}).get('classes') or ()
    path = os.path.join(root, dataset.get('ann_file') or '')
    if not dataset.get('ann_file') or not os.path.isfile(path):
        return
    content = read_coco(path) if dataset.type.endswith('CocoDataset') else {}
    names = [category['name'] for category in content.get('categories', ())]
    defaults = _default_classes(dataset.type) if names and not classes else ()
    if defaults and not set(names).intersection(defaults):
        raise UserError(
            f'{key} has the classes of {dataset.type}, none of which is a category of {path!r}: '
            f'set metainfo=dict(classes={described(tuple(names))})'
        )
    if isinstance(classes, str) or not classes:
        return
    listed = f'{key}.metainfo.classes lists {", ".join(map(str, classes))}'
    if dataset.type.endswith('CocoDataset'):
        if [name for name in names if name in classes] != list(classes):
            raise UserError(
                f'{listed}, which must be categories of {path!r} in its order, as mmdet numbers '
                f'them by that: {", ".join(names) or "it has none"}'
            )
    else:
        prefix = (dataset.get('data_prefix') or {}).get('sub_data_root', '')
        folder = Path(root, prefix, dataset.get('ann_subdir', 'Annotations'))
        others: set[str] = set()
        for image in read_lines(path):
            file = folder / f'{image}.xml'
            if file.exists() and not file.is_file():  # on a pipe, reading would wait for ever
                raise UserError(f'boxes {str(file)[:300]!r} is not a regular file')
            labels = set(box_classes(file))
            if labels.intersection(classes):
                return
            others |= labels
        raise UserError(
            f'{listed}, but the boxes of {path!r} are of other classes: '
            f'{", ".join(sorted(others)) or "there are none"}'
        )


def _default_classes(kind: str) -> Sequence[str]:
    from mmengine.registry import DATASETS  # imports torch, which takes seconds

    dataset = DATASETS.get(kind if '.' in kind else f'mmdet.{kind}')
    return getattr(dataset, 'METAINFO', {}).get('classes', ())


def box_classes(path: Path) -> list[str]:
    """Return the class of every box of a VOC file; raise a UserError if it cannot be read."""
    try:
        return [box.findtext('name', '') for box in parse(path).iter('object')]
    except (ParseError, OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())
        raise UserError(f'boxes {str(path)[:300]!r} cannot be read: {reason}') from error


def read_coco(path: str) -> dict:
    """Read annotations of COCO, and raise a UserError for what mmdet and pycocotools do not check."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = ' '.join(str(error).split())
        raise UserError(f'annotations {path!r} cannot be read: {reason:.200}') from error
    parts: list[Any] = [
        content.get(name, []) if isinstance(content, dict) else None
        for name in ('categories', 'images', 'annotations')
    ]
    for part in parts:
        if not isinstance(part, list) or not all(isinstance(entry, dict) for entry in part):
            raise UserError(
                f'annotations {path!r} must be a dict with lists of images, annotations and '
                'categories'
            )
    categories, images, annotations = parts

    def refuse(kind: str, entry: dict, reason: str) -> NoReturn:
        raise UserError(f'{kind} {described(entry.get("id"))} of {path!r} {reason}')

    for category in categories:
        if not isinstance(category.get('name'), str):
            refuse('category', category, 'has no name')
    sizes = {}
    for image in images:
        name, size = image.get('file_name'), (image.get('height'), image.get('width'))
        if not isinstance(name, str) or not name or '://' in name or '\0' in name:
            refuse('image', image, f'must have the name of a local file, got {described(name)}')
        if not all(is_int(side) and side > 0 for side in size) or size[0] * size[1] > MAX_PIXELS:
            refuse('image', image, f'must have a height and width, got {described(size)}')
        if not isinstance(image.get('id'), int | str):
            refuse('image', image, 'has no id')
        sizes[image['id']] = size
    for annotation in annotations:
        key = annotation.get('image_id')
        if not isinstance(key, int | str):
            refuse('annotation', annotation, f'must have the id of an image, got {described(key)}')
        if key not in sizes or annotation.get('ignore'):  # mmdet skips them too
            continue
        if not isinstance(annotation.get('category_id'), int | str):
            value = described(annotation.get('category_id'))
            refuse('annotation', annotation, f'must have the id of a category, got {value}')
        if not isinstance(annotation.get('area'), int | float):
            refuse('annotation', annotation, 'has no area')
        problem = _box_problem(annotation.get('bbox')) or _mask_problem(
            annotation.get('segmentation') or [], sizes[key]
        )
        if problem:
            refuse('annotation', annotation, problem)
    return content


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) in (int, float) and -MAX_COORDINATE <= value <= MAX_COORDINATE
        for value in values
    )


def _box_problem(box: Any) -> str:
    if _are_numbers(box) and len(box) == 4:
        return ''
    return f'must have a box of four numbers of at most {MAX_COORDINATE:,}, got {described(box)}'


def _mask_problem(mask: Any, size: tuple[int, int]) -> str:
    """Return why a mask, polygons or run lengths, does not fit an image, or ''."""
    if isinstance(mask, list):
        if all(map(_are_numbers, mask)):
            return ''
        return f'must have polygons, lists of numbers of at most {MAX_COORDINATE:,}'
    counts = mask.get('counts') if isinstance(mask, dict) else None
    if not isinstance(counts, str | list):
        return f'must have polygons or run lengths, got {described(mask)}'
    if mask.get('size') != list(size):
        return f'must have run lengths of size {list(size)}, got {described(mask.get("size"))}'
    if isinstance(counts, list) and not (
        all(is_int(count) and count >= 0 for count in counts) and sum(counts) == size[0] * size[1]
    ):
        return f'must have run lengths that sum to {size[0] * size[1]:,}'
    return ''
