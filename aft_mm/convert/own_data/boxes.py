"""Inspect images with boxes, in the formats of COCO and VOC."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from aft_mm.config.boxes import box_classes, read_coco
from aft_mm.config.writing import literal
from aft_mm.errors import UserError
from aft_mm.images import check_name

from .parts import (
    OwnData,
    class_lines,
    filled_lines,
    image_sizes,
    part_lists,
    parts_of,
    rarest,
    split_by_label,
)


def coco(root: Path, share: float, seed: int) -> OwnData:
    """Inspect one COCO json file, or one for each part, and the images."""
    given = [root] if root.is_file() else sorted(root.rglob('*.json'))
    # COCO also has files of captions and keypoints.
    instances = [path for path in given if path.name.startswith('instances_')]
    files = parts_of(instances or given, f'{root}: json files')
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
        labels = rarest([boxes[image['id']] for image in content['images']])
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
        about=[_counted(paths, counts), image_sizes(paths)],
        counts=Counter({name: counts[name] for name in classes}),
        parts={part: len(contents[part]['images']) for part in ('train', 'val')},
        config=[
            *class_lines(root, classes, 'spelling and order of the json'),
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


def voc(root: Path, share: float, seed: int) -> OwnData:
    for name in ('JPEGImages', 'Annotations'):
        if not (root / name).is_dir():
            raise UserError(f'folder {str(root)!r} must hold {name}/, got none')
    lists = parts_of(
        [path for path in sorted((root / 'ImageSets/Main').glob('*.txt')) if '_' not in path.stem],
        f'{root}/ImageSets/Main: lists',
        optional=True,
    )
    folder = root / 'Annotations'
    if lists:
        stems = {part: filled_lines(path) for part, path in lists.items()}
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
        parts = split_by_label(every, rarest([classes[stem] for stem in every]), share, seed)
        lists_of = {part: f"f'{{split}}/{part}.txt'" for part in ('train', 'val')}
    return OwnData(
        about=[_counted(images, counts), image_sizes(images)],
        counts=counts,
        parts={part: len(parts[part]) for part in ('train', 'val')},
        config=[
            *class_lines(root, sorted(counts), 'spelling of the xml files'),
            f'dataset = dict(data_root={literal(root)}, metainfo=dict(classes=classes))',
            '',
            'model = dict(bbox_head=dict(num_classes=len(classes)))',
            f'train_dataloader = dict(dataset=dict(**dataset, ann_file={lists_of["train"]}))',
            f'val_dataloader = dict(dataset=dict(**dataset, ann_file={lists_of["val"]}))',
            'test_dataloader = val_dataloader',
        ],
        files={} if given else part_lists(parts),
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


def _counted(images: Sequence[Path], counts: Counter[str]) -> str:
    return f'{len(images):,} images with {counts.total():,} boxes of {len(counts)} classes'
