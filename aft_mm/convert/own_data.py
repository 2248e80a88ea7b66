"""Inspect user data: sets, classes, and the config to train on them."""

import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from typing import TypeVar

import numpy as np

from aft_mm.config.annotations import box_classes, mask_values, read_coco, read_lines
from aft_mm.config.writing import Literal, literal
from aft_mm.errors import UserError
from aft_mm.images import check_image, check_name, image_size, list_images
from aft_mm.packed import MAX_RATIO, read_packed
from aft_mm.progress import progress

#: Names of the folders and lists of a validation set.
VALIDATION = ('val', 'valid', 'validation')
#: Beginnings of the words that name a part.
PARTS = ('train', 'val', 'test')
FOLDERS = ('train', *VALIDATION, 'test')
#: Label of pixels that belong to no class.
IGNORED = 255
#: Least size of a text [bytes]: its validation part, 5 %, is one context.
LEAST_TEXT = 20 * 256

Item = TypeVar('Item')
Parts = dict[str, list[str]]


@dataclass
class OwnData:
    """Data of the user: samples of each part, lines of the config, and files for ``split``."""

    about: list[str]
    counts: Counter[str]
    parts: dict[str, int]
    config: list[str]
    files: dict[str, str] = field(default_factory=dict)


def split_by_label(
    items: Sequence[Item], labels: Sequence[Hashable], share: float, seed: int
) -> dict[str, list[Item]]:
    """Sample the same share of each label for ``'val'``, at least one of two or more; keep the order."""
    rng = np.random.default_rng(seed)
    groups: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    chosen: set[int] = set()
    for ours in groups.values():
        number = min(max(1, round(share * len(ours))), len(ours) - 1)
        chosen.update(rng.permutation(ours)[:number].tolist())
    return {
        part: [item for index, item in enumerate(items) if (index in chosen) == (part == 'val')]
        for part in ('train', 'val')
    }


def split_classes(files: Sequence[str], share: float, seed: int) -> Parts:
    labels = [file.partition('/')[0] for file in files]
    alone = next((name for name, number in Counter(labels).items() if number < 2), None)
    if alone:
        raise UserError(
            f'the class {alone!r} must have at least 2 images, one for each part, got 1'
        )
    return split_by_label(files, labels, share, seed)


def image_sizes(paths: Sequence[Path]) -> str:
    """Read all images, and describe their sizes: ``'64 x 48 to 640 x 480 pixels'``."""

    def size(path: Path) -> tuple[int, int]:
        check_image(str(path), 'data')
        return image_size(path)

    with ThreadPoolExecutor(16) as pool:
        sizes = list(progress(pool.map(size, paths), 'reading images', len(paths)))
    least, most = (
        '{} x {}'.format(*choose(sizes, key=lambda size: size[0] * size[1]))
        for choose in (min, max)
    )
    return f'{least} pixels' if least == most else f'{least} to {most} pixels'


def image_folder(root: Path, share: float, seed: int) -> OwnData:
    """Inspect a folder with a folder of images for each class, or train/ and val/ of such folders."""
    validation = next((name for name in VALIDATION if (root / name).is_dir()), '')
    given = (root / 'train').is_dir() and validation != ''
    names = {'train': 'train', 'val': validation} if given else {'': ''}
    images = {part: list_images(root / name) for part, name in names.items()}
    counts: dict[str, Counter[str]] = {}
    for part, files in images.items():
        folder = root / names[part]
        outside = [file for file in files if '/' not in file]
        if not files or outside:
            raise UserError(
                f'folder {str(folder)!r} must hold a folder of images for each class, got '
                + (f'the image {outside[0]!r}' if outside else 'no image in any')
            )
        counts[part] = Counter(file.partition('/')[0] for file in files)
        if len(counts[part]) < 2:
            raise UserError(
                f'folder {str(folder)!r} must hold at least 2 classes, got {next(iter(counts[part]))!r}'
            )
        empty = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
        empty = [name for name in empty if name not in counts[part]]
        if given and empty:  # mmpretrain counts every folder as a class
            raise UserError(f'folder {str(folder / empty[0])!r} must hold images, got none')
    if not given and {name.lower() for name in counts['']} <= set(FOLDERS):
        raise UserError(
            f'folder {str(root)!r} must hold train/ and val/, or a folder of images for each '
            f'class, got {", ".join(sorted(counts[""]))}'
        )
    if given:
        differing = sorted(counts['train'].keys() ^ counts['val'].keys())
        if differing:
            raise UserError(f'class {differing[0]!r} must have images in train and {validation}')
        parts, lists = images, {}
    else:
        parts = split_classes(images[''], share, seed)
        numbers = {name: number for number, name in enumerate(sorted(counts['']))}
        lists = {
            f'{part}.txt': ''.join(
                f'{file} {numbers[file.partition("/")[0]]}\n' for file in parts[part]
            )
            for part in ('train', 'val')
        }
        lists['classes.txt'] = ''.join(f'{name}\n' for name in numbers)
    total = sum(counts.values(), Counter())
    sizes = image_sizes([root / names[part] / file for part in names for file in images[part]])
    settings = (
        ['dataset = dict(data_root=data_root)']
        if given
        else ["dataset = dict(data_root=data_root, data_prefix='', classes=f'{split}/classes.txt')"]
    )
    extra = {
        part: f", data_prefix='{names[part]}'" if given else f", ann_file=f'{{split}}/{part}.txt'"
        for part in ('train', 'val')
    }
    return OwnData(
        about=[f'{total.total():,} images of {len(total)} classes, {sizes}'],
        counts=total,
        parts={part: len(parts[part]) for part in ('train', 'val')},
        config=[
            f'data_root = {literal(root)}',
            *settings,
            f'num_classes = {len(total)}',
            '',
            'model = dict(head=dict(num_classes=num_classes))',
            'data_preprocessor = dict(num_classes=num_classes)',
            f'train_dataloader = dict(dataset=dict(**dataset{extra["train"]}))',
            f'val_dataloader = dict(dataset=dict(**dataset{extra["val"]}))',
            'test_dataloader = val_dataloader',
        ],
        files=lists,
    )


def coco(root: Path, share: float, seed: int) -> OwnData:
    """Inspect one COCO json file, or one for each part, and the images."""
    given = [root] if root.is_file() else sorted(root.rglob('*.json'))
    # COCO also has files of captions and keypoints.
    instances = [path for path in given if path.name.startswith('instances_')]
    files = _parts_of(instances or given, f'{root}: json files')
    contents = {part: read_coco(str(path)) for part, path in files.items()}
    folders: dict[str, Path] = {}
    paths: list[Path] = []
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}
    for part, path in files.items():
        content = contents[part]
        if not content.get('images') or not content.get('annotations'):
            raise UserError(f'annotations {str(path)!r} must hold images and boxes, got none')
        names = {category.get('id'): category['name'] for category in content.get('categories', ())}
        unknown = [box for box in content['annotations'] if box.get('category_id') not in names]
        if unknown:
            raise UserError(
                f'annotation {unknown[0].get("id")} of {str(path)!r} must have the id of a category, '
                f'got {unknown[0].get("category_id")!r}'
            )
        file_names = [image['file_name'] for image in content['images']]
        around = [path.parent, path.parent.parent] if root.is_dir() else [path.parent]
        folders[part] = _image_folder(file_names[0], around, path)
        missing = next((name for name in file_names if not (folders[part] / name).is_file()), None)
        if missing:
            raise UserError(
                f'image {str(folders[part] / missing)!r} of {str(path)!r} does not exist'
            )
        paths += [folders[part] / name for name in file_names]
        counts.update(names[box['category_id']] for box in content['annotations'])
    lists = (content.get('categories', ()) for content in contents.values())
    if len({tuple(category['name'] for category in one) for one in lists}) > 1:
        raise UserError(
            f'annotations {" and ".join(map(str, files.values()))} differ in categories'
        )
    classes = [name for name in dict.fromkeys(names.values()) if counts[name]]
    if 'all' in files:
        content = contents.pop('all')
        boxes: dict[int, list[int]] = {image['id']: [] for image in content['images']}
        for box in content['annotations']:
            boxes.setdefault(box['image_id'], []).append(box['category_id'])
        labels = _rarest([boxes[image['id']] for image in content['images']])
        parts = split_by_label(content['images'], labels, share, seed)
        for part, chosen_images in parts.items():
            chosen = {image['id'] for image in chosen_images}
            kept = [box for box in content['annotations'] if box['image_id'] in chosen]
            contents[part] = {**content, 'images': chosen_images, 'annotations': kept}
        written = {f'{part}.json': json.dumps(contents[part]) for part in ('train', 'val')}
        annotations = {part: f"f'{{split}}/{part}.json'" for part in ('train', 'val')}
        folders = dict.fromkeys(('train', 'val'), folders['all'])
    else:
        written = {}
        annotations = {part: literal(path) for part, path in files.items()}
    prefixes = {part: f'data_prefix=dict(img={literal(folders[part])})' for part in folders}
    shared = prefixes['train'] == prefixes['val']
    datasets = {
        part: f'dict(\n    dataset=dict(**dataset, ann_file={annotations[part]}'
        + ('' if shared else f', {prefixes[part]}')
        + ')\n)'
        for part in ('train', 'val')
    }
    return OwnData(
        about=[_boxes(paths, counts), image_sizes(paths)],
        counts=Counter({name: counts[name] for name in classes}),
        parts={part: len(contents[part]['images']) for part in ('train', 'val')},
        config=[
            *_classes(root, classes, 'spelling and order of the json'),
            "dataset = dict(\n    data_root='',\n    metainfo=dict(classes=classes),"
            + (f'\n    {prefixes["train"]},' if shared else '')
            + '\n)',
            '',
            'model = dict(bbox_head=dict(num_classes=len(classes)))',
            f'train_dataloader = {datasets["train"]}',
            f'val_dataloader = {datasets["val"]}',
            'test_dataloader = val_dataloader',
            f'val_evaluator = dict(ann_file={annotations["val"]})',
            'test_evaluator = val_evaluator',
        ],
        files=written,
    )


def _part_lists(parts: Parts) -> dict[str, str]:
    return {f'{part}.txt': ''.join(f'{stem}\n' for stem in parts[part]) for part in parts}


def voc(root: Path, share: float, seed: int) -> OwnData:
    for name in ('JPEGImages', 'Annotations'):
        if not (root / name).is_dir():
            raise UserError(f'folder {str(root)!r} must hold {name}/, got none')
    lists = _parts_of(
        [path for path in sorted((root / 'ImageSets/Main').glob('*.txt')) if '_' not in path.stem],
        f'{root}/ImageSets/Main: lists',
        optional=True,
    )
    folder = root / 'Annotations'
    if lists:
        stems = {part: _filled_lines(path) for part, path in lists.items()}
    else:
        stems = {'all': sorted(path.stem for path in folder.glob('*.xml'))}
    every = [stem for part in stems.values() for stem in part]
    if not every:
        raise UserError(f'folder {str(folder)!r} must hold xml files, got none')
    classes = {stem: box_classes(folder / f'{stem}.xml') for stem in every}
    counts = Counter(name for names in classes.values() for name in names)
    if not counts:
        raise UserError(f'the xml files of {str(folder)!r} must hold boxes, got none')
    images = [root / 'JPEGImages' / f'{stem}.jpg' for stem in every]
    for path in images:
        check_name(str(path))
    missing = next((path for path in images if not path.is_file()), None)
    if missing:
        raise UserError(f'image {str(missing)!r} of an xml file does not exist; mmdet reads .jpg')
    given = 'all' not in stems
    if given:
        parts = stems
        lists_of = {part: literal(path) for part, path in lists.items()}
    else:
        parts = split_by_label(every, _rarest([classes[stem] for stem in every]), share, seed)
        lists_of = {part: f"f'{{split}}/{part}.txt'" for part in ('train', 'val')}
    return OwnData(
        about=[_boxes(images, counts), image_sizes(images)],
        counts=counts,
        parts={part: len(parts[part]) for part in ('train', 'val')},
        config=[
            *_classes(root, sorted(counts), 'spelling of the xml files'),
            f'dataset = dict(data_root={literal(root)}, metainfo=dict(classes=classes))',
            '',
            'model = dict(bbox_head=dict(num_classes=len(classes)))',
            f'train_dataloader = dict(dataset=dict(**dataset, ann_file={lists_of["train"]}))',
            f'val_dataloader = dict(dataset=dict(**dataset, ann_file={lists_of["val"]}))',
            'test_dataloader = val_dataloader',
        ],
        files={} if given else _part_lists(parts),
    )


def masks(root: Path, share: float, seed: int) -> OwnData:
    """Inspect images/ and masks/, or train/ and train_masks/, val/ …, and perhaps classes.txt."""
    validation = next((name for name in VALIDATION if (root / name).is_dir()), 'val')
    given = (root / 'train').is_dir()
    names = {'train': 'train', 'val': validation} if given else {'all': 'images'}
    folders = {
        part: (root / name, root / (f'{name}_masks' if given else 'masks'))
        for part, name in names.items()
    }
    images: Parts = {}
    for part, pair in folders.items():
        for folder in pair:
            if not folder.is_dir():
                raise UserError(
                    f'folder {str(root)!r} must hold images/ and masks/, or train/, train_masks/, '
                    f'val/ and val_masks/; {folder.name}/ is missing'
                )
        images[part] = list_images(pair[0])
        if not images[part]:
            raise UserError(f'folder {str(pair[0])!r} must hold images, got none')
    every = [file for files in images.values() for file in files]
    suffixes = sorted({os.path.splitext(file)[1] for file in every})
    if len(suffixes) > 1:
        raise UserError(
            f'images of {str(root)!r} must have one file type, got {" and ".join(suffixes)}'
        )
    (suffix,) = suffixes
    stems = {part: [file.removesuffix(suffix) for file in files] for part, files in images.items()}
    values = {
        (part, stem): mask_values(folders[part][1] / f'{stem}.png', folders[part][0] / file)
        for part in images
        for stem, file in zip(stems[part], images[part], strict=True)
    }
    counts = Counter(value for there in values.values() for value in there if value != IGNORED)
    classes = _mask_classes(root, counts)
    for (part, stem), there in values.items():
        wrong = [value for value in there if value >= len(classes) and value != IGNORED]
        if wrong:
            raise UserError(
                f'mask {str(folders[part][1] / stem)}.png has the value {wrong[0]}, which must be '
                f'0 to {len(classes) - 1}, the number of a class, or {IGNORED}, which is ignored'
            )
    if given:
        parts: Parts = stems
    else:
        kinds = [[v for v in values['all', stem] if v != IGNORED] for stem in stems['all']]
        parts = split_by_label(stems['all'], _rarest(kinds), share, seed)
    pairs = {
        part: [folder.name for folder in folders[part if given else 'all']]
        for part in ('train', 'val')
    }
    datasets = {
        part: f'dict(\n    dataset=dict(\n        **dataset,\n'
        f'        data_prefix=dict(img_path={literal(pair[0])}, seg_map_path={literal(pair[1])}),\n'
        + ('' if given else f"        ann_file=f'{{split}}/{part}.txt',\n")
        + '    )\n)'
        for part, pair in pairs.items()
    }
    return OwnData(
        about=[
            f'{len(every):,} images with masks of {len(classes)} classes, '
            + image_sizes([folders[part][0] / file for part in images for file in images[part]])
        ],
        counts=Counter({name: counts[number] for number, name in enumerate(classes)}),
        parts={part: len(parts[part]) for part in ('train', 'val')},
        config=[
            *_classes(root, classes, 'of the grey levels 0, 1, 2, …'),
            f'dataset = dict(\n    data_root={literal(root)},\n    img_suffix={literal(suffix)},\n'
            '    metainfo=dict(classes=classes),\n)',
            '',
            'head = dict(num_classes=len(classes))',
            'model = dict(decode_head=head, auxiliary_head=head)',
            f'train_dataloader = {datasets["train"]}',
            f'val_dataloader = {datasets["val"]}',
            'test_dataloader = val_dataloader',
        ],
        files={} if given else _part_lists(parts),
    )


def text(path: Path, share: float, seed: int) -> OwnData:
    if not path.is_file():
        raise UserError(f'text {str(path)!r} must be one file; join several with `cat`')
    try:
        if path.suffix == '.gz':
            data = read_packed(path, MAX_RATIO * path.stat().st_size, 'text')
        else:
            data = path.read_bytes()
        content = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f'text {str(path)!r} must be UTF-8, which byte {error.start} is not'
        ) from error
    except OSError as error:
        raise UserError(f'text {str(path)!r} cannot be read: {error}') from error
    if '\0' in content:
        raise UserError(f'text {str(path)!r} must be a text, got a zero byte')
    if len(data) < LEAST_TEXT:
        raise UserError(
            f'text {str(path)!r} must have at least {LEAST_TEXT:,} bytes, got {len(data):,}'
        )
    about = [f'{len(data):,} bytes, {len(content):,} characters']
    if '\r\n' in content:
        about.append('lines end in CRLF, which the model learns as two bytes')
    loader = 'dict(dataset=dict(data_file=data_file))'
    return OwnData(
        about=about,
        counts=Counter(),
        parts={'train': len(data) * 9 // 10, 'val': len(data) // 20},
        config=[
            f'data_file = {literal(path)}',
            '',
            *(f'{part}_dataloader = {loader}' for part in ('train', 'val', 'test')),
        ],
    )


def _parts_of(paths: Sequence[Path], what: str, optional: bool = False) -> dict[str, Path]:
    """Return the files of ``'train'`` and ``'val'`` by their names, or the only one as ``'all'``."""
    by_part: dict[str, list[Path]] = {}
    for path in paths:
        # instances_train2017.json, train.txt, valid/_annotations.coco.json
        folder = path.parent.name.lower()
        words = re.split('[^a-z]+', path.stem.lower()) + [folder] * (folder in FOLDERS)
        part = next((p for word in words for p in PARTS if word.startswith(p)), 'all')
        if part != 'test':
            by_part.setdefault(part, []).append(path)
    chosen: dict[str, Path] = {}
    for part, ours in by_part.items():
        if len(ours) > 1 and part != 'all':  # VOC has trainval.txt and train.txt
            ours = [path for path in ours if path.stem == part]
        if len(ours) == 1:
            chosen[part] = ours[0]
    if len(chosen) == len(by_part) == 1:
        return {'all': next(iter(chosen.values()))}
    if {'train', 'val'} <= set(chosen):
        return {'train': chosen['train'], 'val': chosen['val']}
    if optional and not by_part:
        return {}
    raise UserError(
        f'{what} must be one, or one with train and one with val in its name, got '
        + (', '.join(path.name for path in paths[:4]) or 'none')
    )


def _image_folder(name: str, around: Sequence[Path], path: Path) -> Path:
    parts = ('', 'images', 'JPEGImages', 'train', 'val', 'train2017', 'val2017')
    for folder in around:
        for inner in parts:
            if (folder / inner / name).is_file():
                return folder / inner
    raise UserError(
        f'image {name!r} of {str(path)!r} does not exist in {str(around[0])!r} or its folders '
        f'{", ".join(parts[1:])}'
    )


def _filled_lines(path: Path) -> list[str]:
    return [line for line in read_lines(path) if line]


def _mask_classes(root: Path, counts: Counter[int]) -> list[str]:
    listed = root / 'classes.txt'
    if listed.is_file():
        return _filled_lines(listed)
    if set(counts) != set(range(len(counts))) or len(counts) < 2:
        values = ', '.join(map(str, sorted(counts)[:8]))
        raise UserError(
            f'masks of {str(root)!r} must have the class numbers 0, 1, … without gaps ({IGNORED} '
            f'is ignored) or names in classes.txt, got {values or "none"}; '
            '`aft_mm number-masks` writes numbers for grey levels and colours'
        )
    return [f'class_{number}' for number in sorted(counts)]


def _rarest(labels: Sequence[Sequence[Hashable]]) -> list[Hashable]:
    """Return the label of each image that fewest images have, None without labels."""
    counts = Counter(label for there in labels for label in set(there))
    return [
        min(there, key=lambda label: (counts[label], str(label)), default=None) for there in labels
    ]


def _boxes(images: Sequence[Path], counts: Counter[str]) -> str:
    return f'{len(images):,} images with {counts.total():,} boxes of {len(counts)} classes'


def _classes(root: Path, names: Sequence[str], comment: str) -> Iterator[str]:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f'the class {name!r} of {str(root)!r} must be in UTF-8') from None
    shown = pformat([*map(Literal, names)], width=88, compact=True)
    yield f'classes = {shown}  # {comment}' if '\n' not in shown else f'classes = {shown}'
