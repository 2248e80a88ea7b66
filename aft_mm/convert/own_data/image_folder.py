"""Inspect a folder of images for each class."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from aft_mm.config.writing import literal
from aft_mm.errors import UserError
from aft_mm.images import list_images

from .parts import FOLDERS, VALIDATION, OwnData, Parts, image_sizes, split_by_label


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


def split_classes(files: Sequence[str], share: float, seed: int) -> Parts:
    labels = [file.partition('/')[0] for file in files]
    alone = next((name for name, number in Counter(labels).items() if number < 2), None)
    if alone:
        raise UserError(
            f'the class {alone!r} must have at least 2 images, one for each part, got 1'
        )
    return split_by_label(files, labels, share, seed)
