"""Find images and their masks in the layouts of common tools."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aft_mm.errors import UserError
from aft_mm.images import is_hidden, list_images

from .parts import NAMES, filled_lines, parts_of

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
    places = [root, *dict.fromkeys(p for pairs in parts.values() for p in _near(pairs))]
    found = [(path, _names(path)) for place in places for path in _named(place)]
    for path, names in found:
        if names != found[0][1]:
            raise UserError(f'{str(found[0][0])!r} and {str(path)!r} must have the same classes')
    return found[0] if found else None


def _near(pairs: Pairs) -> list[Path]:
    return [pairs.images.parent, pairs.images]


def _named(folder: Path) -> list[Path]:
    paths = (folder / name for name in ('classes.txt', '_classes.csv'))
    return [path for path in paths if path.is_file()]


def _names(path: Path) -> list[str]:
    lines = filled_lines(path)
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
