"""Inspect images with masks of class numbers."""

import os
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aft_mm.config.masks import read_mask
from aft_mm.config.writing import literal
from aft_mm.errors import UserError
from aft_mm.images import list_images
from aft_mm.progress import progress

from .mask_layouts import Pairs, class_names, find_masks, missing_masks, some
from .parts import (
    OwnData,
    Parts,
    class_lines,
    copies,
    copy_notes,
    image_sizes,
    part_lists,
    rarest,
    split_by_label,
    test_note,
)

#: Label of pixels that belong to no class.
IGNORED = 255
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
    """Inspect images and their masks in one of the layouts of ``mask_layouts``."""
    parts = find_masks(root)
    if not parts:
        raise missing_masks(root)
    files = {
        (pairs.images / image, pairs.masks / mask): part
        for part, pairs in parts.items()
        for image, mask in pairs.files.items()
    }

    def read(pair: tuple[Path, Path]) -> tuple[Counter[int], tuple[int, int]]:
        return read_mask(pair[1], pair[0])

    with ThreadPoolExecutor(8) as pool:
        found = list(progress(pool.map(read, files), 'reading masks', len(files)))
    pixels = [there for there, _ in found]
    totals = sum(pixels, Counter())
    classes = _mask_classes(root, parts, totals, sum(IGNORED in there for there in pixels))
    for (_, mask), there in zip(files, pixels, strict=True):
        wrong = [value for value in there if value >= len(classes) and value != IGNORED]
        if wrong:
            raise UserError(
                f'mask {str(mask)!r} has the value {wrong[0]}, which must be '
                f'0 to {len(classes) - 1}, the number of a class, or {IGNORED}, which is ignored'
            )
    kinds = [[value for value in there if value != IGNORED] for there in pixels]
    of_part = list(zip(files.values(), kinds, strict=True))
    learnable = [there for part, there in of_part if part != 'test']
    counts = Counter(value for there in learnable for value in there)
    images = [image for image, _ in files]
    first = copies(images)
    given = 'all' not in parts
    if not given:
        pairs = parts.pop('all')
        number = len(pairs.files)  # the first ones
        labels = rarest(kinds[:number])
        chosen = split_by_label(list(pairs.files), labels, share, seed, first[:number])
        sampled = {
            part: Pairs(pairs.images, pairs.masks, {name: pairs.files[name] for name in names})
            for part, names in chosen.items()
        }
        sampled['train'].notes += pairs.notes
        parts = sampled | parts
    notes = [note for pairs in parts.values() for note in pairs.notes]
    if 'test' in parts:
        notes.append(test_note(len(parts['test'].files)))
    if given:
        for part in parts:
            seen = {value for where, there in of_part if where == part for value in there}
            lacks = [classes[value] for value in sorted(counts.keys() - seen)]
            if lacks:
                notes.append(f'classes without a pixel in {part}: {some(lacks)}')
    part_of = {pairs.images / image: part for part, pairs in parts.items() for image in pairs.files}
    roles = [part_of[image] for image in images]
    notes = [
        *notes,
        *copy_notes(list(map(str, images)), first, parts=roles, sampled=not given),
    ]
    if totals[IGNORED]:
        number = sum(IGNORED in there for there in pixels)
        notes.append(
            f'{IGNORED} is ignored: {100 * totals[IGNORED] / totals.total():.1f} % of the pixels, in '
            f'{number:,} of {len(pixels):,} masks'
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
    scale = image_scale([size for _, size in found])
    notes.append(f'images are scaled to fit {scale[0]} x {scale[1]} pixels (scale)')
    return OwnData(
        about=[
            f'{len(learnable):,} images with masks of {len(classes)} classes, {image_sizes(images)}'
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


def _mask_classes(
    root: Path, parts: Mapping[str, Pairs], pixels: Counter[int], with_ignored: int
) -> list[str]:
    values = sorted(pixels.keys() - {IGNORED})
    hint = '`aft_mm number-masks` writes numbers for grey levels and colours'
    if with_ignored:
        to = f'{root.name}_numbers'
        hint = (
            f'{IGNORED}, in {with_ignored:,} masks, is ignored; if it is a class, `aft_mm number-masks '
            f'{shlex.quote(str(root))} {shlex.quote(to)}` writes numbers for {len(pixels)} classes'
        )
    found = class_names(root, parts)
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
