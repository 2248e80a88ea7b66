"""Boxes in the formats of COCO and VOC: what they must be, and which of them mmdet uses."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from xml.etree.ElementTree import Element, ParseError, parse

from aft_mm.checks import described, is_int
from aft_mm.errors import UnusableFile, UserError
from aft_mm.images import image_size

from .texts import nfc, read_json, read_lines, type_name

if TYPE_CHECKING:  # mmengine imports torch, which takes seconds
    from mmengine.config import ConfigDict

#: Ends of the types of mmdet's data sets in the formats of COCO and VOC.
BOXES = ('CocoDataset', 'VOCDataset', 'XMLDataset')
#: Pixels of an image (Pillow's bound is 179 million), and a coordinate [px].
MAX_PIXELS = 2**28
MAX_COORDINATE = 10**5
#: What marks a box as ignored in training and evaluation.
MARKS = ('iscrowd', 'ignore', 'difficult')
#: Formats of boxes that are often taken for COCO's, by an entry of the first dict in the file.
OTHER_FORMATS = {
    '_via_img_metadata': 'VIA',
    'asset': 'VoTT',
    'regions': 'VIA',
    'shapes': 'LabelMe',
    'samples': 'FiftyOne',
    'data': 'Label Studio',
    'objects': 'Supervisely',
    'image': 'CreateML',
    'labels': 'BDD100K',
}


@dataclass(slots=True)
class Box:
    """A box as a file gives it, with x, y, width and height [px] and what marks it as ignored."""

    number: Any
    label: str
    place: list[float]
    area: float | None = None
    mark: str = ''


@dataclass(slots=True)
class Annotated:
    """The boxes of an image, its json or xml file, and its path and size as the file gives them."""

    source: str
    name: str
    size: tuple[int, int] | None
    boxes: list[Box] = field(default_factory=list)


class Unused:
    def __init__(self) -> None:
        self.total = 0
        self.reasons: Counter[str] = Counter()
        self.first = ''

    def add(self, reason: str, source: str, number: Any) -> None:
        self.reasons[reason] += 1
        self.first = self.first or f'first in {source!r}, box {described(number)}'

    def __str__(self) -> str:
        """``'7 of 12 boxes are not used: area 0 (5), …, first in FILE, box ID'``, or ''."""
        if not self.reasons:
            return ''
        reasons = ', '.join(f'{reason} ({n:,})' for reason, n in self.reasons.most_common())
        number = self.reasons.total()
        is_or_are = 'is' if number == 1 and self.total > 1 else 'are'
        return f'{number:,} of {self.total:,} boxes {is_or_are} not used: {reasons}, {self.first}'

    def check(self) -> None:
        if self.total and self.reasons.total() == self.total:
            raise UserError(str(self))


def unused_reason(box: Box, source: str, size: tuple[int, int]) -> str:
    """Return why mmdet's CocoDataset does not train on a box, or ''; refuse one without sense."""
    x, y, width, height = box.place
    problem = ''
    if width < 0 or height < 0:
        problem = 'must have no negative width or height, in VOC xmin above xmax,'
    elif width * height > 0:
        if min(size) > 2 and 0 <= x < 1 and 0 <= y < 1 and max(width, height) <= 1:
            problem = 'must be in pixels, not in fractions of the image,'
        elif min(x + width, size[0]) <= max(x, 0) or min(y + height, size[1]) <= max(y, 0):
            problem = f'must be inside of its image of {size[0]} x {size[1]} pixels,'
    if problem:
        refuse(source, box.number, f'{problem} got x, y, width, height {described(box.place)}')
    if box.mark:
        return box.mark
    if width * height == 0 or (box.area is not None and box.area <= 0):
        return 'area 0'
    return 'smaller than 1 pixel' if min(width, height) < 1 else ''


def refuse(source: str, number: Any, reason: str) -> NoReturn:
    raise UserError(f'box {described(number)} of {source!r} {reason}')


def check_boxes(key: str, root: str, dataset: 'ConfigDict') -> str:
    """Refuse damaged annotations of an mmdet data set, and classes that differ from theirs.

    mmdet numbers COCO's classes by the order in the json file, and skips VOC boxes of other classes.

    Returns:
        Which boxes are not used, or ''.
    """
    classes = (dataset.get('metainfo') or {}).get('classes') or ()
    path = os.path.join(root, dataset.get('ann_file') or '')
    if not dataset.get('ann_file') or not os.path.isfile(path):
        return ''
    is_coco = type_name(dataset.type).endswith('CocoDataset')
    content = read_coco(path) if is_coco else {}
    names = {category['id']: category['name'] for category in content.get('categories', ())}
    defaults = _default_classes(dataset.type) if names and not classes else ()
    if defaults and not set(names.values()).intersection(defaults):
        raise UserError(
            f'{key} has the classes of {type_name(dataset.type)}, none of which is a category of {path!r}: '
            f'set metainfo=dict(classes={described(tuple(names.values()))})'
        )
    known = set(defaults) if isinstance(classes, str) or not classes else set(classes)
    listed = f'{key}.metainfo.classes lists {", ".join(map(str, classes))}'
    prefix = dataset.get('data_prefix') or {}
    unused = Unused()
    if is_coco:
        if not isinstance(classes, str) and classes:
            inside = [name for name in names.values() if name in known]
            if inside != list(classes):
                raise UserError(
                    f'{listed}, which must be categories of {path!r} in its order, as mmdet numbers '
                    f'them by that: {", ".join(names.values()) or "it has none"}'
                )
        _check_entries(path, content, bool(dataset.get('test_mode')))
        images = list(coco_images(path, content, names, unused).values())
        files = [os.path.join(root, prefix.get('img', ''), image.name) for image in images]
    else:
        folder = Path(root, prefix.get('sub_data_root', ''))
        pictures = folder / dataset.get('img_subdir', 'JPEGImages')
        stems = [stem for stem in read_lines(path) if stem]
        annotations = folder / dataset.get('ann_subdir', 'Annotations')
        images = [read_voc(annotations / f'{stem}.xml', as_mmdet=True) for stem in stems]
        files = [str(pictures / f'{stem}.jpg') for stem in stems]
        labels = {box.label for image in images for box in image.boxes}
        if known and not labels & known:
            raise UserError(
                f'{listed}, but the boxes of {path!r} are of other classes: '
                f'{", ".join(sorted(labels)) or "there are none"}'
            )
    with ThreadPoolExecutor(8) as pool:
        for image, size in zip(images, pool.map(_size_of_file, files), strict=True):
            if size and image.size and size != image.size:
                raise UserError(
                    f'image {described(image.name)} has {size[0]} x {size[1]} pixels, which '
                    f'{image.source!r} must give, got {image.size[0]} x {image.size[1]}; `aft_mm new` turns boxes as '
                    'EXIF turns a photo, and --scale-boxes scales them'
                )
            _count_unused(image, size or image.size, known, unused, is_coco)
    unused.check()
    return str(unused)


def _count_unused(
    image: Annotated,
    size: tuple[int, int] | None,
    known: set[str],
    unused: Unused,
    is_coco: bool,
) -> None:
    for box in image.boxes:
        unused.total += 1
        reason = unused_reason(box, image.source, size or (MAX_COORDINATE, MAX_COORDINATE))
        if not is_coco and reason and reason != box.mark:  # mmdet passes them to the loss
            refuse(image.source, box.number, f'must have at least 1 pixel, got {reason}')
        if known and box.label not in known:
            reason = 'of other classes'
        if reason:
            unused.add(reason, image.source, box.number)


def _size_of_file(path: str) -> tuple[int, int] | None:
    try:
        return image_size(path) if os.path.isfile(path) else None
    except UnusableFile:  # CheckImagesHook says so
        return None


def _default_classes(kind: str | type) -> Sequence[str]:
    from mmengine.registry import DATASETS  # imports torch, which takes seconds

    if isinstance(kind, str):
        kind = DATASETS.get(kind if '.' in kind else f'mmdet.{kind}')
    return getattr(kind, 'METAINFO', {}).get('classes', ())


def read_voc(path: Path, as_mmdet: bool = False) -> Annotated:
    """Read an xml file of VOC; raise a UserError if it cannot be read.

    as_mmdet: Refuse what mmdet cannot read, and cut coordinates to integers as it does.
    """
    source = str(path)
    if path.exists() and not path.is_file():  # on a pipe, reading would wait for ever
        raise UserError(f'boxes {source[:300]!r} is not a regular file')
    try:
        root = parse(path).getroot()
    except (ParseError, OSError, ValueError, LookupError) as error:
        reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())
        raise UserError(f'boxes {source[:300]!r} cannot be read: {reason}') from error
    if root.tag != 'annotation':  # <annotations> is CVAT's
        raise UserError(
            f'boxes {source[:300]!r} must be an annotation of VOC, got {described(root.tag)}: export '
            'the boxes as PASCAL VOC or COCO'
        )
    sides = [root.findtext(f'size/{side}', '').strip() for side in ('width', 'height')]
    if as_mmdet and root.find('size') is not None and not all(map(str.isdecimal, sides)):
        raise UserError(f'boxes {source!r} must have a size with an integer width and height')
    image = Annotated(source, root.findtext('filename') or '', _size(*sides))
    for number, item in enumerate(root.findall('object'), 1):
        label, corners = item.findtext('name') or '', item.find('bndbox')
        if not as_mmdet:
            label = nfc(' '.join(label.split()))
        difficult = ' '.join((item.findtext('difficult') or '').split()).lower()
        if as_mmdet and (
            not label
            or corners is None
            or (item.find('difficult') is not None and not difficult.isdecimal())
        ):
            refuse(
                source,
                number,
                'must have a name, a bndbox and, if any, an integer difficult, or mmdet cannot '
                'read it; `aft_mm new voc` can',
            )
        is_marked = difficult in ('true', 'yes') or difficult.isdecimal() and difficult.strip('0')
        mark = 'difficult' if is_marked else ''
        if not label or corners is None:
            mark = 'without a bndbox' if label else 'without a name'
            corners = None
        place = [0.0] * 4 if corners is None else _voc_place(source, number, corners, as_mmdet)
        image.boxes.append(Box(number, label, place, mark=mark))
    return image


def _voc_place(source: str, number: int, corners: Element, as_mmdet: bool) -> list[float]:
    texts = [corners.findtext(name) for name in ('xmin', 'ymin', 'xmax', 'ymax')]
    try:
        values = [float(text or '') for text in texts]
    except ValueError:
        values = []
    if not values or not _are_numbers(values):
        refuse(
            source,
            number,
            f'must have the numbers xmin, ymin, xmax and ymax, got {described(texts)}',
        )
    if max(map(abs, values)) <= 1:
        shift = 0.0  # fractions of the image, which are refused
    else:
        shift = 1.0  # VOC counts from 1
        if as_mmdet:
            values = [float(int(value)) for value in values]
    left, top, right, bottom = values
    return [left - shift, top - shift, right - left, bottom - top]


def read_coco(path: str) -> dict:
    """Read annotations of COCO, and raise a UserError unless all ids are present, unique and known."""
    content = read_json(path, 'annotations ')
    parts: list[Any] = [
        content.get(name, []) if isinstance(content, dict) else None
        for name in ('categories', 'images', 'annotations')
    ]
    other = other_format(content)
    for part in parts:
        if (
            not isinstance(part, list)
            or not all(isinstance(entry, dict) for entry in part)
            or other
        ):
            raise UserError(
                f'annotations {path!r} must be a dict with lists of images, annotations and '
                'categories'
                + (f', got those of {other}: export them as COCO json' if other else '')
            )
    categories, images, annotations = parts

    def refuse_entry(kind: str, entry: dict, reason: str) -> NoReturn:
        raise UserError(f'{kind} {described(entry.get("id"))} of {path!r} {reason}')

    for kind, entries in (('category', categories), ('image', images)):
        seen = set()
        for entry in entries:
            if not isinstance(entry.get('id'), int | str):
                name = entry.get('file_name') or entry.get('name')
                reason = f'must have an integer or a text as id, got {described(entry.get("id"))}'
                raise UserError(f'{kind} {described(name)} of {path!r} {reason}')
            if entry['id'] in seen:
                refuse_entry(kind, entry, f'must have an id of its own, which another {kind} has')
            seen.add(entry['id'])
    for category in categories:
        if not isinstance(category.get('name'), str) or not category['name'].strip():
            refuse_entry('category', category, 'has no name')
    for image in images:
        name = image.get('file_name')
        if not isinstance(name, str) or not name or '://' in name or '\0' in name:
            reason = f'must have the name of a local file, got {described(name)}'
            refuse_entry('image', image, reason)
        size = _size(image.get('width'), image.get('height'))
        if size and size[0] * size[1] > MAX_PIXELS:
            refuse_entry('image', image, f'must have a height and width, got {described(size)}')
    image_ids = {image['id'] for image in images}
    category_ids = {category['id'] for category in categories}
    for box in annotations:
        key, category = box.get('image_id'), box.get('category_id')
        if not isinstance(key, int | str):
            refuse_entry('box', box, f'must have the id of an image, got {described(key)}')
        if key not in image_ids:
            continue
        if not isinstance(category, int | str) or category not in category_ids:
            refuse_entry('box', box, f'must have the id of a category, got {described(category)}')
        if not _are_numbers(box.get('bbox')) or len(box['bbox']) != 4:
            refuse_entry(
                'box',
                box,
                f'must have a box of four numbers of at most {MAX_COORDINATE:,}, got '
                f'{described(box.get("bbox"))}',
            )
    return content


def other_format(content: Any) -> str:
    """Return the name of a known format of boxes that is not COCO's, or ''."""
    while isinstance(content, list) and content:
        content = content[0]
    if not isinstance(content, dict) or 'images' in content:
        return ''
    inner = next(iter(content.values()), None)
    found = [name for key, name in OTHER_FORMATS.items() if key in content]
    if not found and isinstance(inner, dict) and 'regions' in inner:
        found = ['VIA']
    return found[0] if found else ''


def coco_images(
    path: str, content: dict, names: Mapping[int | str, str], unused: Unused
) -> dict[int | str, Annotated]:
    """Return the images of annotations of COCO by id; count the boxes of no image of the file."""
    images = {
        image['id']: Annotated(
            path, image['file_name'], _size(image.get('width'), image.get('height'))
        )
        for image in content.get('images', ())
    }
    for box in content.get('annotations', ()):
        image = images.get(box['image_id'])
        if image is None:
            unused.total += 1
            unused.add('of images that the file does not list', path, box.get('id'))
            continue
        area = box.get('area')
        is_area = type(area) in (int, float) and abs(area) <= MAX_COORDINATE**2
        values = {key: str(box.get(key)).strip().lower() for key in ('iscrowd', 'ignore')}
        mark = next((key for key in values if values[key] in ('1', '1.0', 'true')), '')
        image.boxes.append(
            Box(
                box.get('id'),
                names[box['category_id']],
                box['bbox'],
                area if is_area else None,
                mark,
            )
        )
    return images


def _size(width: Any, height: Any) -> tuple[int, int] | None:
    try:
        size = round(float(width)), round(float(height))
    except (TypeError, ValueError, OverflowError):
        return None
    return size if min(size) > 0 else None


def _check_entries(path: str, content: dict, is_evaluated: bool) -> None:
    def refuse_entry(kind: str, entry: dict, reason: str) -> NoReturn:
        raise UserError(
            f'{kind} {described(entry.get("id"))} of {path!r} {reason}; `aft_mm new coco` repairs it'
        )

    sizes = {}
    for image in content.get('images', ()):
        size = image.get('height'), image.get('width')
        if not all(is_int(side) and side > 0 for side in size):
            refuse_entry('image', image, f'must have a height and width, got {described(size)}')
        sizes[image['id']] = size
    seen = set()
    for box in content.get('annotations', ()):
        number = box.get('id')
        if not is_int(number) or number in seen:
            refuse_entry('box', box, 'must have an integer of its own as id')
        seen.add(number)
        if is_evaluated and number == 0:
            refuse_entry(
                'box', box, 'must have an id above 0, which pycocotools takes for no match'
            )
        if box['image_id'] not in sizes or box.get('ignore'):  # mmdet skips them too
            continue
        if not isinstance(box.get('area'), int | float):
            refuse_entry('box', box, 'has no area')
        if is_evaluated and box.get('iscrowd') not in (0, 1):
            refuse_entry('box', box, 'must have an iscrowd of 0 or 1')
        problem = _mask_problem(box.get('segmentation') or [], sizes[box['image_id']])
        if problem:
            refuse_entry('box', box, problem)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) in (int, float) and -MAX_COORDINATE <= value <= MAX_COORDINATE
        for value in values
    )


def _mask_problem(mask: Any, size: tuple[int, int]) -> str:
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
