"""Inspect images with boxes, in the formats of COCO and VOC, and write them as mmdet reads them."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from aft_mm.checks import counted, described
from aft_mm.config.boxes import (
    MARKS,
    Annotated,
    Unused,
    coco_images,
    other_format,
    read_coco,
    read_voc,
    unused_reason,
)
from aft_mm.config.texts import literal, nfc, read_json
from aft_mm.errors import UserError
from aft_mm.images import IMAGE_SUFFIXES, check_name, is_hidden
from aft_mm.progress import progress

from .parts import (
    FOLDERS,
    PARTS,
    OwnData,
    class_lines,
    copies,
    copy_notes,
    described_sizes,
    filled_lines,
    parts_of,
    rarest,
    split_by_label,
    stored_sizes,
    test_note,
)

#: Most json files that are read to find those of COCO.
MOST_READ = 20
#: Where boxes can be, for messages.
LAYOUTS = {
    'coco': 'a COCO json next to the images or to a folder of them, or one for each part',
    'voc': 'an xml file of VOC for each image, in Annotations/ or next to it',
}


class Files:
    """The files below a folder that are not hidden, found by the ends of their paths."""

    def __init__(self, root: Path, depth: int | None = None) -> None:
        self.root = root
        self.paths = list(_visible(root, depth))
        self.by_name: dict[str, list[str]] = {}
        for path in self.paths:
            self.by_name.setdefault(path.rpartition('/')[2], []).append(path)

    def ending(self, name: str) -> list[str]:
        """Return the paths that end in a name, which may have folders and backslashes."""
        for written in dict.fromkeys((name, name.replace('\\', '/'))):
            written = os.path.normpath(written)
            candidates = self.by_name.get(written.rpartition('/')[2], ())
            found = [path for path in candidates if f'/{path}'.endswith(f'/{written}')]
            if found:
                return found
        return []

    def with_suffix(self, suffix: str) -> list[str]:
        return [path for path in self.paths if path.lower().endswith(suffix)]


def _visible(root: Path, depth: int | None) -> Iterator[str]:
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        inside = os.path.relpath(folder, root)
        level = 0 if inside == '.' else inside.count('/') + 1
        real = os.path.realpath(folder)
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        if real in seen or depth == level:  # a link to a folder above would never end
            folders.clear()
        if real not in seen:
            seen.add(real)
            for name in sorted(names):
                if not is_hidden(name):
                    yield name if inside == '.' else f'{inside}/{name}'


def part_of(path: str) -> str:
    """Return the part that a folder of a path names, such as ``'val'`` for ``'a/valid/1.xml'``."""
    for folder in path.lower().split('/')[:-1]:
        if folder in FOLDERS:
            return FOLDERS[folder]
    return ''


def folder_part(path: str) -> str:
    """Return the part that the innermost folder with such a name has: ``'val'`` for ``val2017``."""
    words = [re.split('[^a-z]+', folder) for folder in path.lower().split('/')[:-1]]
    named = (
        p for folder in reversed(words) for word in folder for p in PARTS if word.startswith(p)
    )
    return next(named, '')


def nearest(paths: list[str], near: str, part: str = '') -> str:
    """Return the one of several paths in the part and closest to a file; refuse two equally close."""

    def distance(path: str) -> tuple[int, ...]:
        folders, others = path.split('/')[:-1], near.split('/')[:-1]
        common = os.path.commonprefix([folders, others])
        is_other = bool(part) and folder_part(path) not in ('', part)
        return is_other, -len(common), -len({*folders} & {*others}), len(folders)

    first, *others = sorted(paths, key=distance)
    if others and distance(others[0]) == distance(first):
        raise UserError(f'image of {near!r} must be one file, got {first!r} and {others[0]!r}')
    return first


def coco_files(root: Path) -> dict[str, Path]:
    if root.is_file():
        return {'all': root}
    files = Files(root)
    paths = [root / path for path in files.with_suffix('.json')]
    # COCO also has files of captions and keypoints.
    paths = [path for path in paths if path.name.startswith('instances_')] or paths
    if not paths:
        refuse_other_format('coco', files)
    try:
        return parts_of(paths, f'{root}: json files')
    except UserError:
        found = []
        for path in paths[:MOST_READ]:
            content = read_json(path, 'annotations ')
            other = other_format(content)
            if other:
                raise UserError(
                    f'annotations {str(path)!r} are those of {other}; export them as COCO json'
                ) from None
            if isinstance(content, dict) and {'images', 'annotations'} <= content.keys():
                found.append(path)
        folders = [part_of(path.relative_to(root).as_posix()) for path in found]
        if sorted(folders) in (['train', 'val'], ['test', 'train', 'val']):
            parts = dict(zip(folders, found, strict=True))
            return {part: parts[part] for part in PARTS if part in parts}
        return parts_of(found or paths, f'{root}: json files')


def refuse_other_format(kind: str, files: Files) -> None:
    other, suffix = ('voc', '.xml') if kind == 'coco' else ('coco', '.json')
    rule = f'folder {str(files.root)!r} must hold {LAYOUTS[kind]}, got'
    for path in files.with_suffix(suffix)[:1]:
        raise UserError(f'{rule} {path!r}; try `aft_mm new {other}`')
    texts = [path for path in files.with_suffix('.txt')[:MOST_READ] if _is_yolo(files.root / path)]
    for path in [*texts, *files.with_suffix('.csv')][:1]:
        name = 'the boxes of YOLO' if texts else 'a table'
        raise UserError(f'{rule} {name} in {path!r}; export the boxes as COCO json')


def _is_yolo(path: Path) -> bool:
    words = (filled_lines(path) or [''])[0].split()
    try:
        values = [float(word) for word in words]
    except ValueError:
        return False
    return len(values) > 4 and values[0].is_integer() and 0 <= min(values) <= max(values[1:]) <= 1


#: Share of boxes beyond their image above which they are not x, y, width, height.
MOST_BEYOND = 0.25
Images = dict[Path, Annotated]
Stored = tuple[int, int, int]


def coco(root: Path, share: float, seed: int, scale: bool = False) -> OwnData:
    """Inspect one COCO json file, or one for each part, and the images."""
    unused, notes = Unused(), []
    classes: dict[str, None] = {}
    parts: dict[str, Images] = {}
    for part, path in coco_files(root).items():
        content = read_coco(str(path))
        if not content.get('images') or not content.get('annotations'):
            if part == 'test':  # COCO's have no boxes
                notes.append(f'{str(path)!r} is not used: it holds no boxes')
                continue
            raise UserError(f'annotations {str(path)!r} must hold images and boxes, got none')
        given = {category['id']: category['name'] for category in content.get('categories', ())}
        names = {key: nfc(' '.join(name.split())) for key, name in given.items()}
        classes.update(dict.fromkeys(names.values()))
        for name, number in Counter(names.values()).items():
            same = [given[key] for key in names if names[key] == name]
            if number > 1:
                notes.append(f'categories {described(same)} of {str(path)!r} are read as one class')
        images = list(coco_images(str(path), content, names, unused).values())
        parts[part] = {}
        for image, file in zip(images, _files_of(images, path, root, part), strict=True):
            first = parts[part].setdefault(file, image)
            if first is not image:
                first.size = first.size or image.size
                if image.size and first.size != image.size:
                    raise UserError(
                        f'image {image.name!r}, which {str(path)!r} lists again, must have the same '
                        f'width and height, got {described(first.size)} and {described(image.size)}'
                    )
                first.boxes += image.boxes
        if len(parts[part]) < len(images):
            more = len(images) - len(parts[part])
            notes.append(
                f'{str(path)!r} lists {counted(more, "image")} again, whose boxes are put together'
            )
    return _own_data('coco', root, parts, list(classes), unused, notes, share, seed, scale)


def voc(root: Path, share: float, seed: int, scale: bool = False) -> OwnData:
    """Inspect images and an xml file for each, perhaps with lists of the parts."""
    files = Files(root)
    texts = [root / path for path in files.with_suffix('.txt') if '/ImageSets/Main/' in f'/{path}']
    paths = [path for path in texts if '_' not in path.stem]  # cat_train.txt is that of a class
    lists = parts_of(paths, f'{root}/ImageSets/Main: lists', optional=True)
    sources: dict[str, list[str]] = {}
    notes = []
    if texts and not paths:
        names = ', '.join(path.name for path in texts[:4])
        notes.append(f'lists of a class are not used, only train.txt and val.txt: {names}')
    for part, given in lists.items():
        lines = dict.fromkeys(filled_lines(given))
        try:
            sources[part] = [_listed(line, given, files) for line in lines]
        except UserError as error:
            if part != 'test':  # whose boxes VOC has in another archive
                raise
            notes.append(f'{str(given)!r} is not used: {error}')
    if not lists.keys() - {'test'}:
        # GDAL writes .aux.xml.
        every = [path for path in files.with_suffix('.xml') if not path.endswith('.aux.xml')]
        found: dict[str, list[str]] = {}
        for path in every:
            found.setdefault(part_of(path), []).append(path)
        test = {part: found.pop(part) for part in ('test',) if part in found}
        if {'train', 'val'} <= found.keys():
            outside = len(found.pop('', ()))
            if outside:
                notes.append(f'{outside:,} xml files outside of train and val are not used')
            found = {part: found[part] for part in ('train', 'val')}
        else:
            found = {'all': [path for paths in found.values() for path in paths]}
        sources = found | test | sources
    if not any(sources.values()):
        refuse_other_format('voc', files)
        raise UserError(f'folder {str(root)!r} must hold {LAYOUTS["voc"]}, got none')
    by_stem: dict[str, list[str]] = {}
    for path in files.paths:
        if path.lower().endswith(IMAGE_SUFFIXES):
            by_stem.setdefault(Path(path).stem, []).append(path)
    parts: dict[str, Images] = {part: {} for part in sources}
    renamed = []
    total = sum(map(len, sources.values()))
    pairs = ((part, path) for part, paths in sources.items() for path in paths)
    for part, path in progress(pairs, 'reading xml', total):
        image = read_voc(root / path)
        name = image.name.replace('\\', '/').rpartition('/')[2]
        stem = Path(path).stem
        named = files.ending(name) if name else []
        pictures = by_stem.get(stem) or files.ending(stem) or named
        for better in (
            [other for other in pictures if Path(other).name == name],
            [other for other in pictures if {'JPEGImages', 'images'} & {*other.split('/')}],
        ):
            pictures = better or pictures
        if not pictures:
            raise UserError(
                f'image of {str(root / path)!r} does not exist: no image below {str(root)!r} is '
                f'named {stem!r}'
            )
        image.name = nearest(pictures, path)
        if named and image.name not in named:
            renamed.append((path, image.name, named[0]))
        first = parts[part].setdefault(root / image.name, image)
        if first is not image:
            raise UserError(
                f'image {image.name!r} must have one xml file, got {first.source!r} and '
                f'{image.source!r}'
            )
    every_box = [box for images in parts.values() for i in images.values() for box in i.boxes]
    from_0 = [box for box in every_box if min(box.place[:2]) == -1 and box.place[2] > 0]
    if from_0:
        notes.append(
            f'{counted(len(from_0), "box")} with xmin or ymin 0: coordinates of VOC count from 1, so 1 px '
            'is subtracted; if these count from 0, convert them to COCO json'
        )
    if renamed:
        path, used, other = renamed[0]
        notes.append(
            f'filename of {counted(len(renamed), "xml file")} names an image other than that of the '
            f'same name, which is used: {path!r} has {other!r}, the boxes are read as those of {used!r}'
        )
    classes = sorted({box.label for box in every_box} - {''})
    return _own_data('voc', root, parts, classes, Unused(), notes, share, seed, scale)


def _listed(line: str, path: Path, files: Files) -> str:
    stem, suffix = os.path.splitext(line)
    found = files.ending(f'{line}.xml')
    if not found and suffix.lower() in IMAGE_SUFFIXES:
        found = files.ending(f'{stem}.xml')
    if not found:
        raise UserError(f'boxes {f"{line}.xml"!r}, listed in {str(path)!r}, do not exist')
    return nearest(found, path.relative_to(files.root).as_posix())


def _files_of(images: Sequence[Annotated], path: Path, root: Path, part: str) -> Iterable[Path]:
    base = root if root.is_dir() else root.parent
    places = [(base, None if root.is_dir() else 2), (base.parent, 2)]
    below: list[Files] = []
    folder = ''
    for image in images:
        direct = path.parent / image.name
        if direct.is_file():
            yield Path(os.path.normpath(direct))
            continue
        found = below[-1].ending(image.name) if below else []
        while not found and not folder and places:
            below.append(Files(*places.pop(0)))
            found = below[-1].ending(image.name)
        if not found:
            raise UserError(
                f'image {str(Path(folder, image.name))!r} of {str(path)!r} does not exist'
                + ('' if folder else f' in {str(base)!r} or its folders')
            )
        near = os.path.relpath(path, below[-1].root)
        file = below[-1].root / nearest(found, near, '' if part == 'all' else part)
        folder = folder or str(file)[: -len(image.name) - 1]
        yield file


def _own_data(
    kind: str,
    root: Path,
    parts: dict[str, Images],
    classes: list[str],
    unused: Unused,
    notes: list[str],
    share: float,
    seed: int,
    scale: bool,
) -> OwnData:
    if {'all', 'test'} <= parts.keys():
        rest = {file: image for file, image in parts['all'].items() if file not in parts['test']}
        parts = {'all': rest, 'test': parts['test']}
    notes += _strays(root, parts)
    files = [file for images in parts.values() for file in images]
    every = [image for images in parts.values() for image in images.values()]
    for file in files:
        check_name(str(file))
    notes += _not_annotated(files)
    stored = stored_sizes(files)
    sizes = [(h, w) if orientation > 4 else (w, h) for w, h, orientation in stored]
    notes += _fit(every, stored, scale)
    _drop_unused(every, sizes, unused)
    unused.check()
    if str(unused):
        notes.append(str(unused))
    notes += _beyond(every, sizes, kind == 'coco')
    tested = parts.get('test', {})
    learnable = [image for part in parts if part != 'test' for image in parts[part].values()]
    counts = Counter(_labels(learnable))
    if others := sorted(set(_labels(tested.values())) - counts.keys()):
        names = ', '.join(map(repr, others[:5]))
        notes.append(f'boxes of classes of the test part only are not used, such as {names}')
    first = copies(files)
    facts = {file: (number, *sizes[number]) for number, file in enumerate(files)}
    given = 'all' not in parts
    roles = [part for part, images in parts.items() for _ in images]
    if not given:
        images = parts.pop('all')  # the first files
        labels = [[*_labels([image])] for image in images.values()]
        groups = first[: len(images)]
        chosen = split_by_label(list(images), rarest(labels), share, seed, groups)
        sampled = {file: part for part in chosen for file in chosen[part]}
        roles = [sampled.get(file, role) for file, role in zip(files, roles, strict=True)]
        parts = {part: {file: images[file] for file in chosen[part]} for part in chosen} | parts
    notes += copy_notes(list(map(str, files)), first, parts=roles, sampled=not given)
    trained = [image for image in parts['train'].values() if image.boxes]
    if empty := len(parts['train']) - len(trained):
        is_or_are = 'is' if empty == 1 else 'are'
        notes.append(f'{counted(empty, "training image")} without boxes {is_or_are} not used')
    if tested:
        notes.append(test_note(len(tested)))
    for part, images in parts.items():
        if images and not [*_labels(images.values())]:
            raise UserError(f'{str(root)!r} must hold boxes for {part}, got none that can be used')
    known = [name for name in classes if counts[name]]
    learned = set(_labels(trained))
    if alone := [name for name in known if name not in learned]:
        more = f' and {len(alone) - 5:,} more' if len(alone) > 5 else ''
        notes.append(f'no box for training of {", ".join(map(repr, alone[:5]))}{more}')
    folder = os.path.commonpath({str(file.parent) for file in files})
    return OwnData(
        about=[
            f'{len(learnable):,} images with {counts.total():,} boxes of {len(known)} classes',
            described_sizes(stored),
        ],
        counts=Counter({name: counts[name] for name in known}),
        parts={part: len(images) for part, images in parts.items()} | {'train': len(trained)},
        config=_config(kind, root, folder, known, 'test' in parts),
        files={
            f'{part}.json': json.dumps(_content(parts[part], folder, facts, classes))
            for part in parts
        },
        notes=notes,
        given=given,
    )


def _labels(images: Iterable[Annotated]) -> Iterator[str]:
    return (box.label for image in images for box in image.boxes if not box.mark)


def _config(kind: str, root: Path, images: str, classes: list[str], has_test: bool) -> list[str]:
    base = root if root.is_dir() else root.parent
    lines = [
        *class_lines(
            root,
            classes,
            'spelling and order of the json' if kind == 'coco' else 'spelling of the xml files',
        ),
        f"dataset = dict(\n    type='CocoDataset',\n    data_root={literal(base)},\n"
        f'    data_prefix=dict(img={literal(images)}),\n    metainfo=dict(classes=classes),\n)',
        '',
        'model = dict(bbox_head=dict(num_classes=len(classes)))',
    ]
    for part in ('train', 'val', 'test'):
        lines.append(
            f"{part}_dataloader = dict(dataset=dict(**dataset, ann_file=f'{{split}}/{part}.json'))"
            if part != 'test' or has_test
            else 'test_dataloader = val_dataloader'
        )
    if kind == 'coco':
        lines.append("val_evaluator = dict(ann_file=f'{split}/val.json')")
        lines.append(
            "test_evaluator = dict(ann_file=f'{split}/test.json')"
            if has_test
            else 'test_evaluator = val_evaluator'
        )
    return lines


def _strays(root: Path, parts: Mapping[str, Images]) -> Iterator[str]:
    """Name images in a folder of another part, if others are in that of their own.

    Raises:
        UserError: The other part has such an image, too; that of its own is missing.
    """
    for part, images in parts.items():
        places = {file: folder_part(os.path.relpath(file, root)) for file in images}
        strays = [file for file, place in places.items() if place not in ('', part)]
        if not strays or part not in places.values():
            continue
        for file in strays:
            if any(file in others for name, others in parts.items() if name != part):
                raise UserError(
                    f'image {file.name!r} of {images[file].source!r} does not exist in a folder of '
                    f'{part}; {str(file)!r} is that of another part'
                )
        yield (
            f'{len(strays):,} of {len(images):,} images for {part} are in a folder of another part, '
            f'first {str(strays[0])!r}'
        )


def _not_annotated(files: Sequence[Path]) -> Iterator[str]:
    used = set(files)
    others = [
        path
        for folder in dict.fromkeys(file.parent for file in files)
        for path in map(Path, sorted(os.scandir(folder), key=os.fspath))
        if path.suffix.lower() in IMAGE_SUFFIXES and not is_hidden(path.name) and path not in used
    ]
    if others:
        yield (
            f'{len(others):,} images next to these have no annotation for train or val and are not '
            f'used, first {str(others[0])!r}'
        )


def _fit(images: Sequence[Annotated], stored: Sequence[Stored], scale: bool) -> list[str]:
    """Move boxes to where their objects are in the image as it is read; say what changed."""
    notes, unclear = [], []
    num_scaled, readings = 0, {'stored': 0, 'turned': 0}
    for image, (width, height, orientation) in zip(images, stored, strict=True):
        is_across = orientation > 4
        shown = (height, width) if is_across else (width, height)
        given = image.size
        if given and given != shown and not (is_across and given == (width, height)):
            if not scale or given == shown[::-1]:
                advice = '--scale-boxes scales its boxes'
                if given == shown[::-1]:
                    advice = (
                        'its width and height are exchanged there, or the photo was turned later'
                    )
                raise UserError(
                    f'image {described(image.name)} of {image.source!r} has {shown[0]} x {shown[1]} '
                    f'pixels, not {given[0]} x {given[1]}; {advice}'
                )
            is_stored = is_across and (given[0] > given[1]) == (width > height) and width != height
            given = (width, height) if is_stored else shown
            factors = [to / of for to, of in zip(given, image.size or given, strict=True)] * 2
            for box in image.boxes:
                box.place = [v * factor for v, factor in zip(box.place, factors, strict=True)]
                box.area = box.area and box.area * factors[0] * factors[1]
            num_scaled += 1
        if orientation == 1 or not image.boxes:
            continue
        if not given or not is_across or width == height:
            unclear.append((image, (width, height, orientation)))
        elif given == shown:
            readings['turned'] += 1
        else:
            readings['stored'] += 1
            _turn(image, (width, height, orientation))
    if scale and not num_scaled:
        raise UserError('--scale-boxes has no effect: the annotations give the sizes of the images')
    if num_scaled:
        notes.append(f'boxes of {num_scaled:,} images are scaled to the size of their image')
    if readings['stored']:
        notes.append(
            f'{readings["stored"]:,} photos are turned by EXIF, and their boxes with them, because '
            'the annotations give the size of the stored photo'
        )
    if unclear:
        is_stored = readings['stored'] > 0 == readings['turned']
        for image, size in unclear if is_stored else ():
            _turn(image, size)
        notes.append(
            f'{len(unclear):,} photos with boxes are turned by EXIF, such as '
            f'{described(unclear[0][0].name)}, and their size does not show whether their boxes are: the boxes are read as those of '
            f'the {"stored photo, like the others" if is_stored else "photo as it is displayed"}'
        )
    return notes


def _turn(image: Annotated, stored: Stored) -> None:
    width, height, orientation = stored
    for box in image.boxes:
        x, y, w, h = box.place
        if orientation in (2, 3, 7, 8):
            x = width - x - w
        if orientation in (3, 4, 6, 7):
            y = height - y - h
        box.place = [y, x, h, w] if orientation > 4 else [x, y, w, h]


def _drop_unused(
    images: Sequence[Annotated], sizes: Sequence[tuple[int, int]], unused: Unused
) -> None:
    for image, size in zip(images, sizes, strict=True):
        kept = []
        for box in image.boxes:
            if box.area is not None and box.area <= 0:
                box.area = None  # the area of the box is written
            unused.total += 1
            reason = unused_reason(box, image.source, size)
            if reason:
                unused.add(reason, image.source, box.number)
            if not reason or (reason in MARKS and min(box.place[2:]) >= 1):
                kept.append(box)
        image.boxes = kept


def _beyond(
    images: Sequence[Annotated], sizes: Sequence[tuple[int, int]], may_be_corners: bool
) -> list[str]:
    """Say how many boxes reach beyond their image; refuse those whose size is a second corner."""
    beyond, total, first = 0, 0, ''
    fit_as_corners, have_area_of_corners, have_own_area = True, True, True
    for image, (width, height) in zip(images, sizes, strict=True):
        for box in image.boxes:
            x, y, w, h = box.place
            fit_as_corners &= x < w <= width and y < h <= height
            area = box.area or w * h
            have_area_of_corners &= math.isclose(area, (w - x) * (h - y), rel_tol=0.01)
            have_own_area &= math.isclose(area, w * h, rel_tol=0.01)
            total += 1
            if min(x, y) < -1 or x + w > width + 1 or y + h > height + 1:
                beyond += 1
                first = first or f'first in {image.source!r}, box {described(box.number)}'
    if may_be_corners and fit_as_corners:
        if beyond > MOST_BEYOND * total or (have_area_of_corners and not have_own_area):
            raise UserError(
                f'boxes of {images[0].source!r} must be x, y, width, height, but are two corners, as '
                'they reach beyond their images or have another area'
            )
    return [f'{beyond:,} of {total:,} boxes reach beyond their image, {first}'] if beyond else []


def _content(
    images: Images,
    folder: str,
    facts: dict[Path, tuple[int, int, int]],
    classes: Sequence[str],
) -> dict:
    """Return annotations of COCO; pycocotools takes the id 0 of a box for no match."""
    labels = {name: number for number, name in enumerate(classes)}
    content: dict[str, list[dict]] = {
        'images': [],
        'annotations': [],
        'categories': [dict(id=number, name=name) for name, number in labels.items()],
    }
    for file, image in images.items():
        number, width, height = facts[file]
        name = os.path.relpath(file, folder)
        content['images'].append(dict(id=number, file_name=name, width=width, height=height))
        content['annotations'] += [
            dict(
                id=index,
                image_id=number,
                category_id=labels[box.label],
                bbox=box.place,
                area=box.area or box.place[2] * box.place[3],
                iscrowd=int(bool(box.mark)),
            )
            for index, box in enumerate(image.boxes, len(content['annotations']) + 1)
        ]
    return content
