"""Inspect images with masks of class numbers."""

import os
from collections import Counter
from pathlib import Path

from aft_mm.config.masks import mask_values
from aft_mm.config.writing import literal
from aft_mm.errors import UserError
from aft_mm.images import list_images

from .parts import (
    VALIDATION,
    OwnData,
    Parts,
    class_lines,
    filled_lines,
    image_sizes,
    part_lists,
    rarest,
    split_by_label,
)

#: Label of pixels that belong to no class.
IGNORED = 255


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
        parts = split_by_label(stems['all'], rarest(kinds), share, seed)
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
            *class_lines(root, classes, 'of the grey levels 0, 1, 2, …'),
            f'dataset = dict(\n    data_root={literal(root)},\n    img_suffix={literal(suffix)},\n'
            '    metainfo=dict(classes=classes),\n)',
            '',
            'head = dict(num_classes=len(classes))',
            'model = dict(decode_head=head, auxiliary_head=head)',
            f'train_dataloader = {datasets["train"]}',
            f'val_dataloader = {datasets["val"]}',
            'test_dataloader = val_dataloader',
        ],
        files={} if given else part_lists(parts),
    )


def _mask_classes(root: Path, counts: Counter[int]) -> list[str]:
    listed = root / 'classes.txt'
    if listed.is_file():
        return filled_lines(listed)
    if set(counts) != set(range(len(counts))) or len(counts) < 2:
        values = ', '.join(map(str, sorted(counts)[:8]))
        raise UserError(
            f'masks of {str(root)!r} must have the class numbers 0, 1, … without gaps ({IGNORED} '
            f'is ignored) or names in classes.txt, got {values or "none"}; '
            '`aft_mm number-masks` writes numbers for grey levels and colours'
        )
    return [f'class_{number}' for number in sorted(counts)]
