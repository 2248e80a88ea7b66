"""What `aft_mm new` and the check before a run say of boxes is what mmdet and pycocotools do."""

import json
import re

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.registry import DATASETS, METRICS, DefaultScope
from PIL import Image

from aft_mm.cli.main import main
from aft_mm.config.boxes import check_boxes
from aft_mm.config.reading import check_data, read_config

from ..helpers import nightly

pytestmark = pytest.mark.usefixtures('here')
RNG = np.random.default_rng(0)
SIZE = WIDTH, HEIGHT = 96, 80
LOAD = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)]


def save(path, pixels=None, orientation=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8) if pixels is None else pixels
    image = Image.fromarray(pixels)
    exif = image.getexif()
    if orientation:
        exif[274] = orientation
    image.save(path, exif=exif)


def coco(root, number=8):
    """Return a COCO json of images with a cat and a dog each."""
    content = dict(images=[], annotations=[], categories=[dict(id=3, name='cat')])
    content['categories'].append(dict(id=1, name='dog'))
    for i in range(number):
        save(root / f'images/{i}.jpg')
        content['images'].append(dict(id=i + 1, file_name=f'{i}.jpg', width=WIDTH, height=HEIGHT))
        content['annotations'] += [
            dict(id=2 * i + k + 1, image_id=i + 1, category_id=3 - 2 * k, area=1200, iscrowd=0)
            | dict(bbox=[10 + 20 * k, 12, 30, 40])
            for k in range(2)
        ]
    return content


def voc(root, boxes, stem, name='.jpg', size=SIZE, extra='<difficult>0</difficult>'):
    """Write an image with boxes (xmax, xmin, ymin, ymax) of a cat, a dog, a cat, …"""
    objects = ''
    for k, box in enumerate(boxes):
        corners = ''.join(
            f'<{side}>{value}</{side}>'
            for side, value in zip(('xmax', 'xmin', 'ymin', 'ymax'), box, strict=True)
        )
        label = f'<name>\n  {("cat", "dog")[k % 2]}\n</name>'
        objects += f'<object><bndbox>{corners}</bndbox>{label}{extra}</object>'
    sides = '' if size is None else f'<width>{size[0]}</width><height>{size[1]}</height>'
    save(root / f'JPEGImages/{stem}{name}')
    path = root / f'Annotations/{stem}.xml'
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'<annotation><filename>{stem}{name}</filename><size>{sides}</size>{objects}</annotation>'
    )


def built(config, part, pipeline=None):
    dataset = config[f'{part}_dataloader'].dataset
    with DefaultScope.overwrite_default_scope('mmdet'):
        return DATASETS.build(dataset if pipeline is None else {**dataset, 'pipeline': pipeline})


def instances(dataset):
    infos = map(dataset.get_data_info, range(len(dataset)))
    return [one for info in infos for one in info['instances']]


def perfect(config):
    """Return the metric of detections that are the annotations of the validation set."""
    data = built(config, 'val')
    with DefaultScope.overwrite_default_scope('mmdet'):
        metric = METRICS.build(config.val_evaluator)
    metric.dataset_meta = data.metainfo
    for index in range(len(data)):
        sample = data[index]['data_samples'].to_dict()
        found = [one for one in data.get_data_info(index)['instances'] if not one['ignore_flag']]
        sample['pred_instances'] = dict(
            bboxes=torch.tensor([one['bbox'] for one in found], dtype=torch.float).reshape(-1, 4),
            labels=torch.tensor([one['bbox_label'] for one in found], dtype=torch.int64),
            scores=torch.ones(len(found)),
        )
        metric.process({}, [sample])
    return next(value for key, value in metric.evaluate(len(data)).items() if key.endswith('mAP'))


def new(kind, capsys, *words):
    """Return what `aft_mm new` says, the boxes that it counts, and its config."""
    main(['new', kind, 'data', *words])
    shown = capsys.readouterr().out
    config = read_config('data.py', {})
    check_data(config, 'train', 'val')
    return shown, int(re.search(r'with ([\d,]+) boxes', shown)[1]), config


def each_box(**changes):
    def change(content):
        for box in content['annotations']:
            box.update(changes)

    return change


def without(*keys):
    def change(content):
        for box in content['annotations']:
            for key in keys:
                del box[key]

    return change


def repeated_row(content):
    content['categories'].insert(0, dict(id=0, name='cat', supercategory='none'))
    content['categories'].append(dict(id=7, name='dog '))
    content['annotations'][5]['category_id'] = 7


def ids_from_0(content):
    for number, box in enumerate(content['annotations']):
        box['id'] = number


def listed_twice(content):
    content['images'] += [dict(image, id=f'again {image["id"]}') for image in content['images']]
    for box in content['annotations'][::2]:
        box['image_id'] = f'again {box["image_id"]}'


def partly_unused(content):
    boxes = content['annotations']
    boxes[0]['bbox'] = [10, 10, 0.5, 20]
    boxes[3]['bbox'] = [10, 10, 0, 0]
    boxes[4]['image_id'] = 99
    boxes[7]['iscrowd'] = 1
    boxes[9]['ignore'] = True


@pytest.mark.parametrize(
    ('change', 'unused', 'words'),
    [
        (lambda content: None, 0, ''),
        (each_box(area=0), 0, ''),
        (each_box(area=float('nan')), 0, ''),
        (each_box(id=5), 0, ''),
        (without('area', 'iscrowd', 'id'), 0, ''),
        (ids_from_0, 0, ''),
        (listed_twice, 0, 'lists 8 images again'),
        (
            repeated_row,
            0,
            r"categories \['cat', 'cat'\] of .* read as one class\ncategories \['dog', 'dog '\] of",
        ),
        (
            partly_unused,
            5,
            r'5 of 16 boxes are not used: .*smaller than 1 pixel \(1\), area 0 \(1\), .*, first in '
            r"'.*ann.json', box 5\n",
        ),
    ],
)
def test_boxes_of_coco_are_counted_repaired_and_found(change, unused, words, here, capsys):
    content = coco(here / 'data')
    change(content)
    (here / 'data/ann.json').write_text(json.dumps(content))
    shown, counted, config = new('coco', capsys)
    kept = [one for part in ('train', 'val') for one in instances(built(config, part))]
    assert counted == sum(not one['ignore_flag'] for one in kept) == 16 - unused
    assert sum(one['ignore_flag'] for one in kept) == (2 if unused else 0)
    assert re.search(words, shown) and ('not used' in shown) == bool(unused)
    assert perfect(config) == 1


def test_given_parts_are_repaired(here, capsys):
    """With other ids of the same classes, from 0 in each part as Roboflow writes them."""
    for part, order in (('train', 1), ('valid', -1)):
        content = coco(here / f'data/{part}', 4)
        ids_from_0(content)
        content['categories'].reverse()
        for image in content['images']:
            image['file_name'] = f'images/{image["file_name"]}'
        for category in content['categories'][::order]:
            category['id'] += 10 * order
        for box in content['annotations']:
            box['category_id'] += 10 * order
        (here / f'data/{part}/_annotations.coco.json').write_text(json.dumps(content))
    shown, counted, config = new('coco', capsys)
    assert counted == 16 and 'validation 4, boxes copied into data_split/' in shown
    for part in ('train', 'val'):
        data = built(config, part)
        assert list(data.metainfo['classes']) == ['dog', 'cat'] and len(data) == 4
        assert [one['bbox_label'] for one in instances(data)] == [1, 0] * 4
    assert perfect(config) == 1


def test_boxes_of_voc_are_read_in_all_forms(here, capsys):
    forms = [
        dict(),
        dict(extra=''),
        dict(extra='<difficult/>'),
        dict(extra='<difficult>Unspecified</difficult><pose>Left</pose>'),
        dict(name='.png'),
        dict(name='.JPG'),
        dict(name='.jpeg'),
        dict(size=None),
        dict(size=(0, 0)),
        dict(size=('96.0', '80.0')),
    ]
    for number, form in enumerate(forms):
        voc(here / 'data', [(40.5, 10.25, 12, 52), (60, 30, 12, 52)], number, **form)
    shown, counted, config = new('voc', capsys)
    kept = [one for part in ('train', 'val') for one in instances(built(config, part))]
    assert counted == len(kept) == 20 and 'not used' not in shown
    assert [one['bbox'] for one in kept] == [[9.25, 11, 39.5, 51], [29, 11, 59, 51]] * 10
    assert [one['bbox_label'] for one in kept] == [0, 1] * 10
    assert [one['img'].shape for one in built(config, 'train', LOAD)] == [(80, 96, 3)] * 8
    assert perfect(config) == 1


def test_difficult_boxes_are_ignored(here, capsys):
    for stem in range(4):
        voc(here / 'data', [(40, 10, 12, 52), (60, 30, 12, 52)], stem)
    for stem in (0, 2):
        path = here / f'data/Annotations/{stem}.xml'
        path.write_text(path.read_text().replace('ult>0<', 'ult>1<', 1))
    shown, counted, config = new('voc', capsys)
    kept = [one for part in ('train', 'val') for one in instances(built(config, part))]
    assert counted == 6 and sum(one['ignore_flag'] for one in kept) == 2
    assert '2 of 8 boxes are not used: difficult (2), first in' in shown
    assert perfect(config) == 1


def test_the_check_before_a_run_counts_as_the_host(here):
    """Random boxes, of which the host leaves out some."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        content = coco(here / 'data', number=16)
        content['categories'].append(dict(id=2, name='bird'))
        for box in content['annotations']:
            box['bbox'] = [*rng.uniform(-5, 70, 2), *rng.choice([0, 0.4, 1, 9, 40], 2)]
            box['area'] = int(rng.choice([0, 5, 1200], p=[0.1, 0.1, 0.8]))
            box['iscrowd'] = int(rng.choice(2, p=[0.9, 0.1]))
            box['ignore'] = int(rng.choice(2, p=[0.9, 0.1]))
            box['category_id'] = int(rng.choice([1, 2, 3]))
            box['image_id'] = int(rng.integers(1, 20))
            x, y, width, height = box['bbox']
            if width * height and (x + width <= 0 or y + height <= 0):
                box['bbox'][:2] = [2, 2]
        (here / 'data/ann.json').write_text(json.dumps(content))
        config = dict(
            type='CocoDataset', ann_file='data/ann.json', data_prefix=dict(img='data/images')
        )
        config = ConfigDict(config, metainfo=dict(classes=('cat', 'dog')))
        warning = check_boxes('dataset', '', config)
        unused, total = re.match(r'(\d+) of (\d+) boxes are not used', warning).groups()
        with DefaultScope.overwrite_default_scope('mmdet'):
            kept = instances(DATASETS.build(dict(config, pipeline=[], test_mode=True)))
        assert int(total) == 32
        assert 32 - int(unused) == sum(not one['ignore_flag'] for one in kept)


def photo(path, orientation, square):
    """Save a black photo with a white object; return its box [x, y, w, h] as stored and as shown."""
    pixels = np.zeros((80, 80 if square else 120, 3), np.uint8)
    pixels[12:52, 10:40] = 255
    save(path, pixels, orientation)
    rows, columns = np.nonzero(np.asarray(transposed(pixels, orientation))[..., 0])
    shown = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
    return [10, 12, 30, 40], [int(value) for value in shown]


def transposed(pixels, orientation):
    """Return an image as EXIF's table defines the eight orientations."""
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    rows, columns = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}.get(
        orientation, (1, 1)
    )
    return pixels[::rows, ::columns]


SHOWN = 'photos with boxes are .* as those of the photo as it is displayed'
TURNED = [
    (False, 'stored', ['4 photos are turned .* their boxes with them', '3 photos .* like the ot']),
    (False, 'shown', [f'3 {SHOWN}']),
    (True, 'shown', [f'7 {SHOWN}']),
]


@pytest.mark.parametrize('kind', ['coco', 'voc'])
@pytest.mark.parametrize(
    'square, reading, words',
    nightly(TURNED, lambda square, reading, words: reading == 'shown' and not square),
)
def test_boxes_lie_on_the_objects_of_turned_photos(kind, square, reading, words, here, capsys):
    content = dict(images=[], annotations=[], categories=[dict(id=1, name='cat')])
    for orientation in range(1, 9):
        stem = f'{orientation}.jpg'
        stored, shown = photo(here / f'data/JPEGImages/{stem}', orientation, square)
        x, y, width, height = box = stored if reading == 'stored' else shown
        size = [80 if square else 120, 80][:: -1 if reading == 'shown' and orientation > 4 else 1]
        content['images'].append(
            dict(id=orientation, file_name=stem, width=size[0], height=size[1])
        )
        content['annotations'].append(dict(image_id=orientation, category_id=1, bbox=box))
        if kind == 'voc':
            (here / 'data/Annotations').mkdir(exist_ok=True)
            (here / f'data/Annotations/{orientation}.xml').write_text(
                f'<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>'
                f'<object><name>cat</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>'
                f'<xmax>{x + width + 1}</xmax><ymax>{y + height + 1}</ymax></bndbox></object>'
                '</annotation>'
            )
    if kind == 'coco':
        (here / 'data/ann.json').write_text(json.dumps(content))
    shown, counted, config = new(kind, capsys)
    assert counted == 8 and shown.count('EXIF') == len(words)
    assert all(re.search(one, shown) for one in words)
    for part in ('train', 'val'):
        for sample in built(config, part, LOAD):
            ((x1, y1, x2, y2),) = sample['gt_bboxes'].tensor.int().tolist()
            image = sample['img'] > 127  # as compressed
            assert image[y1:y2, x1:x2].mean() > 0.99 and abs(image.sum() / 3600 - 1) < 0.01
    assert perfect(config) == 1


def test_boxes_are_scaled_to_the_size_of_the_image(here, capsys):
    content = coco(here / 'data')
    for image in content['images']:
        image.update(width=WIDTH * 10, height=HEIGHT * 5)
    for box in content['annotations']:
        x, y, width, height = box['bbox']
        box['bbox'] = [x * 10, y * 5, width * 10, height * 5]
    (here / 'data/ann.json').write_text(json.dumps(content))
    shown, counted, config = new('coco', capsys, '--scale-boxes')
    assert counted == 16 and 'boxes of 8 images are scaled' in shown
    places = [one['bbox'] for one in instances(built(config, 'train'))]
    assert places[:2] == [[10, 12, 40, 52], [30, 12, 60, 52]]


@pytest.mark.parametrize('kind', ['coco-json', 'voc-xml'])
def test_the_configs_flip_horizontally_only(kind):
    pipeline = read_config(f'own_data/{kind}').train_dataloader.dataset.pipeline
    assert [one for one in pipeline if 'Flip' in one.type] == [dict(type='RandomFlip', prob=0.5)]
