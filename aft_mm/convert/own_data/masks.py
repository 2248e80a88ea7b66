"""Inspect images with masks of class numbers, in the layouts of common tools."""

import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from aft_mm.checks import counted
from aft_mm.config.masks import IGNORED, Mask, differing_palettes, read_mask
from aft_mm.config.texts import literal, nfc
from aft_mm.errors import UserError
from aft_mm.images import is_hidden, list_images
from aft_mm.progress import progress

from .parts import (
    NAMES,
    OwnData,
    Parts,
    class_lines,
    copies,
    copy_notes,
    described_sizes,
    filled_lines,
    part_lists,
    parts_of,
    rarest,
    split_by_label,
    stored_sizes,
    test_note,
)

# Folders by tool: VOC and CVAT, Supervisely, ADE20K; the case of letters is ignored.
IMAGES = ('images', 'image', 'imgs', 'img', 'jpegimages')
MASKS = (
    *('masks', 'mask', 'segmentationclass', 'masks_machine', 'annotations'),
    *('labels', 'label', 'gt', 'colours', 'colors'),
)
# Ends of the folder next to train: CamVid has trainannot and train_labels.
ENDS = (
    *('_masks', '_mask', '_labels', '_label', '_annotations', '_annot', 'annot', '_gt'),
    *('_colours', '_colors'),
)
LISTS = 'ImageSets/Segmentation'
MASK_SUFFIXES = ('.bmp', '.gif', '.png', '.tif', '.tiff')
# What a mask adds to the name of its image without ending: .png, _mask.png, .jpg.png
_END = re.compile(r'(?:[._ -][a-z]\w*)*(?:\.bmp|\.gif|\.png|\.tiff?)', re.I)
LAYOUTS = (
    'images/ and masks/, or train/, train_masks/, val/ and val_masks/, or both folders in train/ and '
    'in val/, or train/ and val/ in both, or JPEGImages/ and SegmentationClass/, or train/ and val/ '
    'with a mask NAME_mask.png next to each image'
)


@dataclass
class Pairs:
    """Images and masks of a part: files relative to two folders, and what is left out."""

    images: Path
    masks: Path
    files: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def endings(self) -> set[tuple[str, str]]:
        """Return the endings of images, and what their masks have in their place."""
        parts = ((os.path.splitext(image), mask) for image, mask in self.files.items())
        return {(end, mask[len(stem) :]) for (stem, end), mask in parts}


def some(names: Sequence[str], most: int = 5) -> str:
    rest = len(names) - most
    shown = (name if name.isprintable() else repr(name) for name in names[:most])
    return ', '.join(shown) + (f' and {rest} more' if rest > 0 else '')


def find_masks(root: Path) -> dict[str, Pairs]:
    """Return the pairs of ``'train'`` and ``'val'``, or of ``'all'``, {} if there is no mask.

    Raises:
        UserError: If a folder is missing, or images and masks cannot be matched.
    """
    folders = _folders(root)
    found = {part: _pairs(*pair) for part, pair in folders.items()}
    if not any(pairs.files for pairs in found.values()):
        return {}
    test = found.pop('test', None)
    if 'val' in found and 'train' not in found:
        raise UserError(f'folder {str(root)!r} must hold {LAYOUTS}; train/ is missing')
    for pairs in found.values():
        if not pairs.files:
            raise UserError(
                f'folder {str(root)!r} must hold {LAYOUTS}; the masks of {pairs.images} are missing'
            )
    if 'val' not in found:
        (only,) = found.values()
        found = _listed(root, only)
    if test is not None and test.files:
        found['test'] = test
    elif test is not None:  # it may be an unlabelled set
        next(iter(found.values())).notes.append(f'{test.images} has no masks and is not used')
    return found


def missing_masks(root: Path) -> UserError:
    children = _children(root)
    if any(name in children for name in NAMES['train']):
        missing = 'train_masks/'
    else:
        missing = 'masks/' if any(name in children for name in IMAGES) else 'images/'
    jpeg = jpeg_mask(root)
    reason = f'{missing} is missing' if jpeg is None else f'masks must not be JPEG, got {jpeg}'
    return UserError(f'folder {str(root)!r} must hold {LAYOUTS}; {reason}')


def jpeg_mask(root: Path) -> Path | None:
    """Return the first file of a folder of masks that is a JPEG, which changes values."""
    return next((path for path in sorted(root.rglob('*')) if _is_jpeg_mask(path)), None)


def _is_jpeg_mask(path: Path) -> bool:
    folder = path.parent.name.lower()
    return path.suffix.lower() in ('.jpg', '.jpeg') and (
        folder in MASKS or folder.endswith(ENDS) and folder.startswith(('train', *NAMES['val']))
    )


def _children(folder: Path) -> dict[str, Path]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name.lower(): path for path in paths if path.is_dir() and not is_hidden(path.name)}


def _first(children: Mapping[str, Path], names: Iterable[str]) -> Path | None:
    return next((children[name] for name in names if name in children), None)


def _folders(root: Path) -> dict[str, tuple[Path, Path]]:
    children = _children(root)
    found = {}
    for part, names in NAMES.items():
        folder = _first(children, names)
        if folder:
            inner = _children(folder)
            images, masks = _first(inner, IMAGES), _first(inner, MASKS)
            beside = _first(children, (f'{folder.name.lower()}{end}' for end in ENDS))
            found[part] = (images, masks) if images and masks else (folder, beside or folder)
    if found.keys() - {'test'}:
        return found
    images, masks = _first(children, IMAGES), _first(children, MASKS)
    if not images or not masks:
        return {} if images or masks else {'all': (root, root)}
    inside = {}
    for part, names in NAMES.items():
        pair = _first(_children(images), names), _first(_children(masks), names)
        if pair[0] and pair[1]:
            inside[part] = pair[0], pair[1]
    return inside if {'train', 'val'} <= inside.keys() else {'all': (images, masks), **found}


def list_masks(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in sorted(folder.rglob('*')) if path.is_file())
    return [
        path.as_posix()
        for path in paths
        if path.suffix.lower() in MASK_SUFFIXES and not any(map(is_hidden, path.parts))
    ]


def _pairs(images: Path, masks: Path) -> Pairs:
    files = list_images(images)
    candidates = dict.fromkeys(list_masks(masks))
    by_stem: dict[str, list[str]] = {}
    for file in files:
        by_stem.setdefault(os.path.splitext(file)[0], []).append(file)
    ends: Counter[str] = Counter()
    owned: dict[str, list[str]] = {}
    for mask in candidates:
        cuts = [match.start() for match in re.finditer('[._ -]', mask)]
        for cut in reversed(cuts):  # a.b.png is the mask of a.b, if there is one, and not of a
            stem, end = mask[:cut], mask[cut:]
            others = by_stem.get(stem, [])
            if images == masks and end == os.path.splitext(mask)[1]:
                # Of a.png and a.tif, either may be the mask.
                others = [file for file in others if not file.lower().endswith(MASK_SUFFIXES)]
            if others and _END.fullmatch(end):
                owned.setdefault(stem, []).append(mask)
                ends[end] += 1
                break
    chosen: dict[str, str] = {}
    for stem, theirs in owned.items():
        mask = max(theirs, key=lambda mask: ends[mask[len(stem) :]])
        there = [file for file in by_stem[stem] if images != masks or file != mask]
        if len(there) > 1:
            raise UserError(
                f'{str(masks / mask)!r} is the mask of {there[0]} and {there[1]}; images must have '
                'names that differ in more than the ending'
            )
        chosen[there[0]] = mask
    used = set(chosen.values())
    if images == masks:  # a mask of a mask is none
        chosen = {image: mask for image, mask in chosen.items() if image not in used}
        files = [file for file in files if file not in used]
    pairs = Pairs(images, masks, dict(sorted(chosen.items())))
    pairs.notes += _unusual(chosen)
    bare = [file for file in files if file not in chosen]
    if bare:
        pairs.notes.append(
            f'{len(bare)} of {len(files)} images in {images} have no mask and are left out: '
            + some(bare)
        )
    lone = [] if images == masks else [mask for mask in candidates if mask not in used]
    if lone:
        pairs.notes.append(
            f'{len(lone)} of {len(candidates)} masks in {masks} are not used: {some(lone)}'
        )
    return pairs


def _unusual(masks: Mapping[str, str]) -> Iterator[str]:
    """Say that few masks add another word to the name of their image than most, such as _mask."""
    words = {}
    for image, mask in masks.items():
        stem, ending = os.path.splitext(image)
        word = os.path.splitext(mask[len(stem) :])[0]
        words[image] = '' if word.lower() == ending.lower() else word
    usual, number = Counter(words.values()).most_common(1)[0] if words else ('', 0)
    others = [image for image, word in words.items() if word != usual]
    if others and number >= len(others):
        yield (
            f'{len(others)} of {len(masks)} masks have another ending than most, first '
            f'{masks[others[0]]!r}, which is taken for that of {others[0]!r}'
        )


def _listed(root: Path, pairs: Pairs) -> dict[str, Pairs]:
    paths = sorted((root / LISTS).glob('*.txt'))
    lists = parts_of(paths, f'lists in {root / LISTS}', optional=True)
    parts: dict[str, Pairs] = {}
    by_stem = {os.path.splitext(image)[0]: image for image in pairs.files}
    for part, path in lists.items():
        names = filled_lines(path)
        images = [by_stem[name] for name in names if name in by_stem]
        if not images and part == 'test':  # VOC's masks of it are in another archive
            note = f'{path} lists no masks and is not used'
            next(iter(parts.values()), pairs).notes.append(note)
            continue
        if not images:
            raise UserError(f'{str(path)!r} must list images of {pairs.images} with masks')
        parts[part] = Pairs(pairs.images, pairs.masks, {i: pairs.files[i] for i in images})
        if len(images) < len(names):
            number = f'{len(names) - len(images)} of {len(names)}'
            parts[part].notes.append(f'{number} images of {path} have no mask and are left out')
    if not parts.keys() - {'test'}:
        tested = parts['test'].files if 'test' in parts else {}
        rest = {image: mask for image, mask in pairs.files.items() if image not in tested}
        parts = {'all': Pairs(pairs.images, pairs.masks, rest, pairs.notes), **parts}
    return parts


def class_names(root: Path, parts: Mapping[str, Pairs]) -> tuple[Path, list[str]] | None:
    near = (place for pairs in parts.values() for place in (pairs.images.parent, pairs.images))
    paths = (
        place / name
        for place in dict.fromkeys([root, *near])
        for name in ('classes.txt', '_classes.csv')
    )
    found = [(path, _names(path)) for path in paths if path.is_file()]
    for path, names in found:
        if names != found[0][1]:
            raise UserError(f'{str(found[0][0])!r} and {str(path)!r} must have the same classes')
    return found[0] if found else None


def _names(path: Path) -> list[str]:
    lines = [*map(nfc, filled_lines(path))]
    if path.suffix == '.txt':
        return [name or colour for colour, name in map(split_colour, lines)]
    # Roboflow's: a header, then rows such as "1, cat".
    rows = [[cell.strip() for cell in line.split(',', 1)] for line in lines[1:]]
    if [row[0] for row in rows] != [str(number) for number in range(len(rows))]:
        raise UserError(f'{str(path)!r} must list the classes 0, 1, … as "0, NAME"')
    return [row[-1] for row in rows]


def split_colour(line: str) -> tuple[str, str]:
    """Divide a line of ``classes.txt``, ``#rrggbb NAME``, of which one may be missing."""
    match = re.fullmatch(r'(#[0-9a-fA-F]{6})(?:\s+(.*))?', line, re.S)
    return (match[1].lower(), match[2] or '') if match else ('', line)


CROP = 256  # edge of the squares of a training [px]
# Bounds of the area of an image in training and test [px], between which its size is kept.
LEAST_AREA, MOST_AREA = CROP**2, 480 * 360
PIPELINES = """scale = {scale}  # images are scaled to fit, in training, test and prediction
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=scale, ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size=({crop}, {crop}), cat_max_ratio=0.75, ignore_index={ignored}),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations'),  # in their size, to which predictions are scaled
    dict(type='PackSegInputs'),
]"""


def masks(root: Path, share: float, seed: int) -> OwnData:
    """Inspect images and their masks in one of the layouts of LAYOUTS."""
    parts = find_masks(root)
    if not parts:
        raise missing_masks(root)
    files = [
        (part, pairs.images / image, pairs.masks / mask)
        for part, pairs in parts.items()
        for image, mask in pairs.files.items()
    ]
    roles, images, masks = zip(*files, strict=True)
    with ThreadPoolExecutor(8) as pool:
        found = list(progress(pool.map(read_mask, masks, images), 'reading masks', len(files)))
    names = class_names(root, parts)
    differ = differing_palettes(masks, [mask.palette for mask in found])
    if differ and not names:
        raise UserError(
            'masks must have one palette, or names in classes.txt if their values count, got two '
            f'colours of the value {differ}; `aft_mm number-masks FOLDER OUT` goes by colour'
        )
    pixels = [mask.pixels for mask in found]
    totals = sum(pixels, Counter())
    with_ignored = sum(IGNORED in there for there in pixels)
    classes = _mask_classes(root, names, totals, with_ignored)
    _check_colours(names, masks, found)
    _check_numbers(masks, pixels, len(classes))
    twice = [name for name, number in Counter(classes).items() if number > 1]
    kinds = [[value for value in there if value != IGNORED] for there in pixels]
    of_part = list(zip(roles, kinds, strict=True))
    learnable = [there for part, there in of_part if part != 'test']
    counts = Counter(value for there in learnable for value in there)
    first = copies(images)
    stored = stored_sizes(images)
    given = 'all' not in parts
    if not given:
        pairs = parts.pop('all')
        number = len(pairs.files)  # the first ones
        labels = rarest(kinds[:number])
        chosen = split_by_label(list(pairs.files), labels, share, seed, first[:number])
        parts = _sampled(pairs, chosen) | parts
        sampled = {name: part for part in chosen for name in chosen[part]}
        roles = *map(sampled.__getitem__, pairs.files), *roles[number:]
    notes = [note for pairs in parts.values() for note in pairs.notes]
    if twice:
        notes.append(f'classes of equal names stay apart: {some(twice)}')
    if 'test' in parts:
        notes.append(test_note(len(parts['test'].files)))
    if given:
        for part in parts:
            seen = {value for where, there in of_part if where == part for value in there}
            lacks = [classes[value] for value in sorted(counts.keys() - seen)]
            if lacks:
                notes.append(f'classes without a pixel in {part}: {some(lacks)}')
    notes += copy_notes(list(map(str, images)), first, parts=roles, sampled=not given)
    if with_ignored:
        notes.append(
            f'{IGNORED} is ignored: {100 * totals[IGNORED] / totals.total():.1f} % of the pixels, in '
            f'{with_ignored:,} of {len(pixels):,} masks'
        )
    absent = [name for number, name in enumerate(classes) if not counts[number]]
    if absent:
        notes.append(f'{len(absent)} of {len(classes)} classes have no pixel: {some(absent)}')
    settings, lists, links = _datasets(root, parts, given)
    if links:
        kinds_of = sorted(
            {end for pairs in parts.values() for pair in pairs.endings() for end in pair}
        )
        notes.append(f'files end in {some(kinds_of)}: the split has links with one ending')
    notes += _turned(images, stored)
    scale = image_scale([mask.size for mask in found])
    notes.append(f'images are scaled to fit {scale[0]} x {scale[1]} pixels (scale)')
    return OwnData(
        about=[
            f'{len(learnable):,} images with masks of {len(classes)} classes, {described_sizes(stored)}'
        ],
        counts=Counter({name: counts[number] for number, name in enumerate(classes)}),
        parts={part: len(pairs.files) for part, pairs in parts.items()},
        config=[
            *class_lines(root, classes, 'of the grey levels 0, 1, 2, …'),
            *PIPELINES.format(scale=scale, crop=CROP, ignored=IGNORED).split('\n'),
            *settings,
            'head = dict(num_classes=len(classes))',
            'model = dict(decode_head=head, auxiliary_head=head)',
        ],
        files=lists,
        notes=notes,
        given=given,
        links=links,
    )


def _check_numbers(masks: Sequence[Path], pixels: Sequence[Counter[int]], most: int) -> None:
    for mask, there in zip(masks, pixels, strict=True):
        for value in there:
            if value >= most and value != IGNORED:
                raise UserError(
                    f'mask {str(mask)!r} has the value {value}, which must be 0 to {most - 1}, the '
                    f'number of a class, or {IGNORED}, which is ignored'
                )


def _check_colours(
    names: tuple[Path, list[str]] | None, masks: Sequence[Path], found: Sequence[Mask]
) -> None:
    """Refuse a palette with other colours than the lines of classes.txt."""
    path, colours = names[0] if names else Path(), []
    if path.suffix == '.txt':
        colours = [split_colour(line)[0] for line in filled_lines(path)]
    for file, mask in zip(masks, found, strict=True):
        for value, colour in mask.palette.items():
            shown = f'#{bytes(colour).hex()}'
            if value < len(colours) and colours[value] not in ('', shown):
                raise UserError(
                    f'mask {str(file)!r} must have the colour {colours[value]} of {str(path)!r} for the '
                    f'value {value}, got {shown}; `aft_mm number-masks FOLDER OUT` goes by colour'
                )


def _turned(images: Sequence[Path], stored: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    unclear = [
        image
        for image, (width, height, orientation) in zip(images, stored, strict=True)
        if orientation > 1 and (orientation < 5 or width == height)
    ]
    if unclear:
        yield (
            f'EXIF turns {counted(len(unclear), "photo")}, such as {str(unclear[0])!r}, and the size does '
            'not show whether the mask is turned: it is read as that of the photo as it is displayed'
        )


def _sampled(pairs: Pairs, chosen: Mapping[str, Sequence[str]]) -> dict[str, Pairs]:
    parts = {
        part: Pairs(pairs.images, pairs.masks, {name: pairs.files[name] for name in names})
        for part, names in chosen.items()
    }
    parts['train'].notes += pairs.notes
    return parts


def _mask_classes(
    root: Path, found: tuple[Path, list[str]] | None, pixels: Counter[int], with_ignored: int
) -> list[str]:
    values = sorted(pixels.keys() - {IGNORED})
    hint = '`aft_mm number-masks` writes numbers for grey levels and colours'
    if with_ignored:
        to = f'{root.name}_numbers'
        hint = (
            f'{IGNORED}, in {with_ignored:,} masks, is ignored; if it is a class, `aft_mm number-masks '
            f'{shlex.quote(str(root))} {shlex.quote(to)}` writes numbers for {len(pixels)} classes'
        )
    if found:
        path, names = found
        if len(names) > IGNORED:
            raise UserError(
                f'{str(path)!r} must name at most {IGNORED} classes, as {IGNORED} is ignored, got '
                f'{len(names)}'
            )
        if len(values) < 2 and with_ignored:
            raise UserError(
                f'masks of {str(root)!r} must have the numbers of 2 classes, got '
                f'{", ".join(map(str, values)) or "none"}; {hint}'
            )
        return names
    if values != list(range(len(values))) or len(values) < 2:
        raise UserError(
            f'masks of {str(root)!r} must have the class numbers 0, 1, … without gaps ({IGNORED} '
            f'is ignored) or names in classes.txt, got {some([*map(str, values)], 8) or "none"}; {hint}'
        )
    return [f'class_{number}' for number in values]


def image_scale(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    short, long = (statistics.median(edge) for edge in zip(*map(sorted, sizes), strict=True))
    area = short * long
    least = max(1, round(short * (min(max(area, LEAST_AREA), MOST_AREA) / area) ** 0.5))
    most = round(long * least / short)
    is_portrait = sum(width < height for width, height in sizes) > len(sizes) / 2
    return (least, most) if is_portrait else (most, least)


def _datasets(
    root: Path, parts: Mapping[str, Pairs], given: bool
) -> tuple[list[str], dict[str, str], dict[str, Path]]:
    endings = Counter(end for pairs in parts.values() for end in pairs.endings())
    lists: Parts = {}
    links: dict[str, Path] = {}
    ((suffix, mask_suffix), _), *others = endings.most_common()
    if suffix and not others:
        folders = {
            part: [literal(path.relative_to(root)) for path in (pairs.images, pairs.masks)]
            for part, pairs in parts.items()
        }
        for part, pairs in parts.items():
            there = [file for file in list_images(pairs.images) if file.endswith(suffix)]
            if not given or there != list(pairs.files):  # mmseg would read all
                lists[part] = [file.removesuffix(suffix) for file in pairs.files]
    else:  # mmseg reads one ending
        suffix, mask_suffix = '.jpg', '.png'
        folders = {part: [f"f'{{split}}/{part}{end}'" for end in ('', '_masks')] for part in parts}
        for part, pairs in parts.items():
            for image, mask in pairs.files.items():
                stem = os.path.splitext(image)[0]
                links[f'{part}/{stem}{suffix}'] = pairs.images / image
                links[f'{part}_masks/{stem}{mask_suffix}'] = pairs.masks / mask
    lines = [
        'dataset = dict(',
        f'    data_root={literal(root)},',
        f'    img_suffix={literal(suffix)},',
        f'    seg_map_suffix={literal(mask_suffix)},',
        '    metainfo=dict(classes=classes),',
        ')',
    ]
    for part, (images, masks) in folders.items():
        lines += [
            f'{part}_dataloader = dict(',
            '    dataset=dict(',
            '        **dataset,',
            f'        data_prefix=dict(img_path={images}, seg_map_path={masks}),',
            *([f"        ann_file=f'{{split}}/{part}.txt',"] if part in lists else []),
            f'        pipeline={"train" if part == "train" else "test"}_pipeline,',
            '    )',
            ')',
        ]
    if 'test' not in parts:
        lines.append('test_dataloader = val_dataloader')
    return lines, part_lists(lists), links
