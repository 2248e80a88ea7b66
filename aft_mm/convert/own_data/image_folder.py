import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import log
from pathlib import Path
from statistics import median
from typing import NamedTuple, NoReturn

from aft_mm.config.texts import literal, nfc
from aft_mm.errors import UserError
from aft_mm.images import IMAGE_SUFFIXES, find_images, is_hidden, not_read

from .masks import IMAGES, MASKS
from .parts import FOLDERS, PARTS, OwnData, copies, copy_notes, image_sizes, split_by_label

# Words in the names of folders that hold a part, in lower case.
_PARTS = {
    **FOLDERS,
    **dict.fromkeys(('trainset', 'trn'), 'train'),
    **dict.fromkeys(('valset', 'dev', 'eval'), 'val'),
    **dict.fromkeys(('testset', 'tst'), 'test'),
}
# Folder of FiftyOne for images without a label.
_UNLABELLED = '_unlabeled'
# Folders of masks and boxes, which are no classes.
_ANNOTATIONS = {'annotation', 'annotations', 'label', 'labels', 'mask', 'masks'}
_ARCHIVES = ('.7z', '.gz', '.rar', '.tar', '.tgz', '.tm', '.zip')
_TEXT_TABLES = ('.csv', '.tsv')
_TABLES = (*_TEXT_TABLES, '.parquet', '.xlsx', '.json', '.jsonl')
_DECIMAL = re.compile(r'[-+]?\d*[.,]\d+(e[-+]?\d+)?', re.I)
# Rows of a table that are read, and different decimals in them above which they are no classes.
_ROWS_READ, _MOST_CLASSES = 1000, 20
# The largest class is that many times the median of the others in imbalanced data.
_IMBALANCED = 5

# Accuracy of 10 classes in percent, by photos of each: from random weights of the validation set and of other
# photos (docs/results/photos_per_class.json), and from START of other photos (photos_from_start.json).
_MEASURED = {10: (32, 27, 79), 30: (41, 36, 86), 90: (48, 51, 92)}
START = 'vit-small-14'

Folders = dict[str, list[str]]


class Labelled(NamedTuple):
    """An image of a class, in ``'train'``, ``'val'``, ``'test'``, or in ``'all'`` to be sampled."""

    path: str
    part: str
    label: str
    name: str


class Layout(NamedTuple):
    """Images, the folders of the parts that are given, by part, and what is not used."""

    images: list[Labelled]
    parts: dict[str, str]
    notes: list[str]


def image_folder(root: Path, share: float, seed: int, start: str | None = None) -> OwnData:
    """Inspect a folder with a folder of images per class, or train/ and val/ of such folders."""
    images, parts, notes = find_classes(root)
    sizes = image_sizes([root / image.path for image in images])  # all can be read
    first = copies([root / image.path for image in images])
    paths, labels = [image.path for image in images], [image.label for image in images]
    given = 'val' in parts
    sampled = split_classes(images, share, seed, first) if not given else {}
    of_part = {
        part: sampled.get(part) or [image for image in images if image.part == part]
        for part in PARTS
    }
    roles = [image.part for image in images]
    notes += copy_notes(paths, first, labels, roles if len(set(roles)) > 1 else None, not given)
    counts = Counter(image.label for image in [*of_part['train'], *of_part['val']])
    numbers = {label: number for number, label in enumerate(sorted(counts))}
    counts = Counter({label: counts[label] for label in numbers})
    lists = {}
    if given and _lists_alike(root, images, parts, numbers):
        prefixes = {part: f'data_prefix={literal(name)}' for part, name in parts.items()}
        settings = 'data_root=data_root'
    else:
        prefixes = {part: f"ann_file=f'{{split}}/{part}.txt'" for part in of_part if of_part[part]}
        settings = "data_root=data_root, data_prefix='', classes=f'{split}/classes.txt'"
        for part in prefixes:
            # mmpretrain strips each line.
            lists[f'{part}.txt'] = ''.join(
                f'{"./" * path[:1].isspace()}{path} {numbers[label]}\n'
                for path, _, label, _ in of_part[part]
            )
        lists['classes.txt'] = ''.join(f'{label}\n' for label in numbers)
    loaders = {
        part: f'dict(dataset=dict(**dataset, {prefix}))' for part, prefix in prefixes.items()
    }
    if of_part['test']:
        notes.append(
            f'the {len(of_part["test"]):,} images of {parts["test"]}/ are for `aft_mm test` only'
        )
    notes += [*_imbalance(counts, start), *_expectation(counts, start)]
    return OwnData(
        about=[f'{counts.total():,} images of {len(counts)} classes, {sizes}'],
        counts=counts,
        parts={part: len(of_part[part]) for part in ('train', 'val')},
        config=[
            f'data_root = {literal(root)}',
            f'dataset = dict({settings})',
            f'num_classes = {len(counts)}',
            '',
            'model = dict(head=dict(num_classes=num_classes))',
            'data_preprocessor = dict(num_classes=num_classes)',
            f'train_dataloader = {loaders["train"]}',
            f'val_dataloader = {loaders["val"]}',
            f'test_dataloader = {loaders.get("test", "val_dataloader")}',
        ],
        files=lists,
        notes=notes,
        given=given,
    )


def _imbalance(counts: Mapping[str, int], start: str | None) -> Iterator[str]:
    number, label = max((number, label) for label, number in counts.items())
    others = [counts[other] for other in counts if other != label]
    if number >= _IMBALANCED * median(others):
        advice = (
            'set head.loss to a CrossEntropyLoss with class_weight, and'
            if start is None
            else 'the head weights all classes alike;'
        )
        yield (
            f'imbalanced classes: {100 * number / sum(counts.values()):.0f} % of the images are of '
            f'{label!r}, which is the accuracy of a model that finds no other; {advice} check the '
            'recall of each class (docs/other_data.md)'
        )


def _expectation(counts: Mapping[str, int], start: str | None) -> Iterator[str]:
    number = median(counts.values())
    if number < 3 * max(_MEASURED):
        nearest = min(_MEASURED, key=lambda measured: abs(log(measured / number)))
        validated, others, reached = _MEASURED[nearest]
        if start is None:
            yield (
                f'expect little from random weights; for comparison, Imagenette: 10 classes of {nearest} '
                f'photos each reached {others} % on other photos, {validated} % on the validation set; '
                f'--start {START} reached {reached} % on other photos'
            )
        elif start == START:
            yield (
                f'for comparison, Imagenette: 10 classes of {nearest} photos each reached {reached} % '
                f'on other photos from {START}, {others} % from random weights'
            )


def find_classes(root: Path) -> Layout:
    """Find the images of each class, and refuse a folder that does not hold two classes."""
    files, others = find_images(root)
    if not files:
        entries = root.iterdir() if root.is_dir() else [root]
        archives = sorted(path.name for path in entries if path.suffix.lower() in _ARCHIVES)
        packed = f'the archive {archives[0]!r}, which must be unpacked' if archives else ''
        _refuse(root, not_read(others) or packed or 'no image in any')
    folder, folders = _descend([*files, *others], '', others)
    names = {name.lower() for name in folders}
    if len(names) == 2 and names & {*IMAGES} and names & {*MASKS}:
        _refuse(root, f'{" and ".join(folders)}; try `aft_mm new masks`')
    given = _find_parts(root, folder, folders)
    images: list[Labelled] = []
    notes: list[str] = []
    parts: dict[str, str] = {}
    for part, name in (given or {'all': ''}).items():
        inside, classes = folder, folders
        if given:
            inside, classes = _descend(folders[name], f'{folder}{name}/', others)
            if part == 'test' and '' in classes:
                notes.append(f'{folder}{name}/ holds images outside of class folders: not used')
                continue
            parts[part] = f'{folder}{name}'
        role = 'all' if part == 'train' and 'val' not in given else part
        images += _labelled(root, inside, classes, others, role, notes)
    rest = [name for name in folders if given and name not in given.values()]
    if rest:
        notes.append(
            f'the parts are {", ".join(parts.values())}: {", ".join(rest[:5])} '
            f'{"is" if len(rest) == 1 else "are"} not used'
        )
    if others:
        notes.append(not_read(others))
    _check_classes(root, images, parts, others)
    used = [image for image in images if image.path not in others]
    return Layout(used, parts, list(dict.fromkeys(notes)))


def _refuse(folder: Path, reason: str) -> NoReturn:
    raise UserError(
        f'folder {str(folder)!r} must hold a folder of images for each class, got {reason}'
    )


def _folders(files: Sequence[str], inside: str, others: Collection[str]) -> Folders:
    found: Folders = {}
    for file in files:
        name, slash, _ = file[len(inside) :].partition('/')
        if slash or file not in others:
            found.setdefault(name if slash else '', []).append(file)
    return dict(sorted(found.items())) or {'': list(files)}


def _descend(files: Sequence[str], inside: str, others: Collection[str]) -> tuple[str, Folders]:
    while True:
        folders = _folders(files, inside, others)
        names = list(folders)
        if names[1:] or names == [''] or '' in _folders(files, f'{inside}{names[0]}/', others):
            return inside, folders
        inside += f'{names[0]}/'


def _find_parts(root: Path, inside: str, folders: Folders) -> dict[str, str]:
    ranks: dict[str, tuple[int, str]] = {}
    for name, files in folders.items():
        # Training, training_set, seg_train, TrainImages
        words = re.findall('[a-z]+', re.sub('([a-z])([A-Z])', r'\1 \2', name).lower())
        kinds = {_PARTS[word] for word in words if word in _PARTS}
        has_images = any('/' not in file[len(f'{inside}{name}/') :] for file in files)
        if len(kinds) == 1 and (len(words) == 1 or not has_images):
            ranks[name] = 0 if name.lower() in _PARTS else len(words), kinds.pop()
    for most in sorted({rank for rank, _ in ranks.values()}):
        named: dict[str, list[str]] = {}
        for name, (rank, part) in ranks.items():
            if rank <= most:
                named.setdefault(part, []).append(name)
        if 'train' in named and len(named) > 1:
            double = next((names for names in named.values() if names[1:]), None)
            if double:
                raise UserError(
                    f'folder {str(root / inside)!r} must hold one folder for each part, '
                    f'got {" and ".join(double)}'
                )
            return {part: named[part][0] for part in PARTS if part in named}
    if all(name in ranks and ranks[name][0] <= 1 for name in folders):
        raise UserError(
            f'folder {str(root / inside)!r} must hold train/ and val/, or a folder of images for each '
            f'class, got {", ".join(folders)}'
        )
    return {}


def _labelled(
    root: Path,
    inside: str,
    classes: Folders,
    others: Collection[str],
    role: str,
    notes: list[str],
) -> Iterator[Labelled]:
    if '' in classes:
        _refuse(root / inside, f'the image {classes[""][0][len(inside) :]!r}{_table_advice(root)}')
    inner = {name: _folders(files, f'{inside}{name}/', others) for name, files in classes.items()}
    shared, *more = {frozenset(map(nfc, folders)) for folders in inner.values()}
    if len(classes) > 1 and len(shared) > 1 and not more and '' not in shared:
        names, found = ', '.join(list(classes)[:3]), ', '.join(sorted(shared)[:5])
        if _ANNOTATIONS.intersection(map(str.lower, shared)):
            _refuse(root / inside, f'the folders {found} in all of {names}')
        notes.append(
            f'{names} hold the same folders, which are the classes; if they are classes '
            'themselves, move the images out of the inner folders'
        )
    else:
        shared = frozenset()
    for name, files in classes.items():
        if name == _UNLABELLED:
            notes.append(f'the {len(files):,} images of {inside}{name}/ have no label: not used')
            continue
        for file in files:
            outer, _, below = file[len(inside) :].partition('/')
            label, _, rest = below.partition('/') if shared else (outer, '', below)
            yield Labelled(file, role, label, f'{outer}/{rest}' if shared else rest)
    folder = root / inside
    empty = [path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)]
    empty = sorted(name for name in empty if name not in classes)
    if empty:
        notes.append(f'{inside}{empty[0]}/ holds no image and is no class')


def _table_advice(root: Path) -> str:
    """Return what to do with a table of labels in or next to the folder of the images, '' without."""
    paths = [*root.rglob('*')]
    if root.name.lower() in IMAGES:
        paths += [*root.parent.glob('*'), *root.parent.glob('[Ll]abel*/*')]
    tables = [
        ('.json' in path.suffix.lower(), inside.count('/'), inside)
        for path in paths
        if path.suffix.lower() in _TABLES and path.is_file()
        for inside in [os.path.relpath(path, root)]
        if not any(is_hidden(name) for name in inside.split('/') if name != '..')
    ]
    if not tables:
        return ''
    *_, table = min(tables)
    number = _decimal_in(root / table)
    if number:
        return (
            f'; {table!r} holds numbers such as {number}: no config learns a number per image, see '
            'docs/other_data.md'
        )
    return (
        f'; sort the images into folders by the labels of {table!r}, or see docs/other_data.md if '
        'an image has several'
    )


def _decimal_in(path: Path) -> str:
    """Return the first decimal of a table that holds decimals and no column of classes, else ''."""
    if path.suffix.lower() not in _TEXT_TABLES:
        return ''
    with path.open(encoding='utf-8-sig', errors='replace') as file:
        lines = [line for line in islice(file, _ROWS_READ) if line.strip()]
    mark = max('\t;,', key=lambda mark: lines[0].count(mark)) if lines else ','
    rows = [[cell.strip(' "\n') for cell in line.split(mark)] for line in lines[1:]]
    first = ''
    for column in zip(*rows, strict=False):
        decimals = [cell for cell in column if _DECIMAL.fullmatch(cell)]
        kinds = len(set(column))
        if len(decimals) > len(rows) / 2 and kinds > min(_MOST_CLASSES, len(rows) / 2):
            first = first or decimals[0]
        elif 1 < kinds <= len(rows) / 2:
            return ''
    return first


def _check_classes(
    root: Path, images: Sequence[Labelled], parts: Mapping[str, str], others: Mapping[str, str]
) -> None:
    found: dict[str, set[str]] = {}
    for image in images:
        if image.path not in others:
            found.setdefault(image.part, set()).add(image.label)
    for image in images:
        if image.label not in found.get(image.part, ()):
            ours = [other.path for other in images if other[1:3] == image[1:3]]
            raise UserError(
                f'class {image.label!r} of {str(root)!r} must hold images that are read; '
                + not_read({path: others[path] for path in ours})
            )
    forms: dict[str, Labelled] = {}
    for image in images:
        other = forms.setdefault(nfc(image.label), image)
        if other.label != image.label:
            raise UserError(
                f'class {image.label!r} of {str(root)!r} must have one Unicode form, got '
                f'{ascii(other.label)} in {other.path!r} and {ascii(image.label)} in {image.path!r}; '
                'rename one of the folders'
            )
    trained = found.get('train') or found.get('all') or set()
    for part, labels in {'train': trained, **found}.items():
        if len(labels) < 2 and part != 'test':
            folder = root / parts.get('train' if part == 'all' else part, '')
            raise UserError(
                f'folder {str(folder)!r} must hold at least 2 classes, got '
                f'{", ".join(map(repr, labels))}{_table_advice(root)}'
            )
        differing = sorted(labels - trained if part == 'test' else labels ^ trained)
        if differing:
            raise UserError(f'class {differing[0]!r} must have images in train and {parts[part]}')


def _lists_alike(
    root: Path, images: Sequence[Labelled], parts: Mapping[str, str], classes: Collection[str]
) -> bool:
    for part in parts.values():
        folders = {path.name for path in (root / part).iterdir() if path.is_dir()}
        if {name for name in folders if not is_hidden(name)} != set(classes):
            return False
    return all(
        image.path.startswith(f'{parts[image.part]}/{image.label}/')
        and image.path.lower().endswith(IMAGE_SUFFIXES)
        for image in images
    )


def split_classes(
    images: Sequence[Labelled], share: float, seed: int, first: Sequence[int]
) -> dict[str, list[Labelled]]:
    """Sample ``'train'`` and ``'val'`` from the images of ``'all'``, see :func:`split_by_label`."""
    pool = [index for index, image in enumerate(images) if image.part == 'all']
    labels = [images[index].label for index in pool]
    differing = Counter(
        label for label, _ in {(images[index].label, first[index]) for index in pool}
    )
    alone = next((label for label in labels if differing[label] < 2), None)
    if alone is not None:
        raise UserError(
            f'the class {alone!r} must have at least 2 images that differ, one for each part, '
            f'got {differing[alone]}'
        )
    ours = [images[index] for index in pool]
    parts = split_by_label(ours, labels, share, seed, [first[index] for index in pool])
    lost = sorted(set(labels).difference(image.label for image in parts['train']))
    if lost:  # with copies in another class, which sampled them
        raise UserError(
            f'the class {lost[0]!r} must keep images for training, but all are copies of sampled '
            'files of other classes; remove copies, or change --seed'
        )
    return parts
