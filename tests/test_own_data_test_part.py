"""`aft_mm new` of boxes and masks whose test part is tested on, and of no other."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config

from aft_mm.cli.main import main

from .errors import stops
from .helpers import nightly, save_picture

pytestmark = pytest.mark.usefixtures('here')
XML = """<annotation><size><width>96</width><height>64</height></size><object><name>{}</name>
<bndbox><xmin>9</xmin><ymin>5</ymin><xmax>50</xmax><ymax>44</ymax></bndbox></object></annotation>"""
RNG = np.random.default_rng(0)


def write(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def image(path):
    save_picture(path, RNG.integers(0, 256, (64, 96, 3)))


def coco(part, numbers, with_boxes=True):
    size = dict(width=96, height=64)
    box = dict(bbox=[8, 4, 41, 39], area=41 * 39, iscrowd=0)
    content = dict(
        images=[dict(size, id=i, file_name=f'{i}.png') for i in numbers],
        annotations=[
            dict(box, id=i + 1, image_id=i, category_id=1 + i % 2) for i in numbers if with_boxes
        ],
        categories=[dict(id=1, name='cat'), dict(id=2, name='dog')],
    )
    for number in numbers:
        image(f'data/images/{number}.png')
    write(f'data/{part}.json', json.dumps(content))


def voc(lists, annotated=range(12)):
    for number in range(12):
        image(f'data/JPEGImages/{number}.png')
        if number in annotated:
            write(f'data/Annotations/{number}.xml', XML.format(['cat', 'dog'][number % 2]))
    for part, numbers in lists.items():
        write(f'data/ImageSets/Main/{part}.txt', '\n'.join(map(str, numbers)))


def masks(images, targets, numbers):
    for number in numbers:
        image(f'data/{images}/{number}.png')
        if targets:
            save_picture(f'data/{targets}/{number}.png', RNG.integers(0, 3, (64, 96)))


def of_json(part):
    listed = json.loads(Path(f'data_split/{part}.json').read_text())['images']
    return {Path(one['file_name']).stem for one in listed}


def of_masks(part):
    dataset = Config.fromfile('data.py')[f'{part}_dataloader'].dataset
    if dataset.get('ann_file'):
        return {*Path(dataset.ann_file).read_text().split()}
    return {path.stem for path in Path(dataset.data_root, dataset.data_prefix.img_path).iterdir()}


def given(*parts):
    return lambda: [coco(part, range(4 * i, 4 * i + 4)) for i, part in enumerate(parts)]


LAYOUTS = {
    'json files': ('coco', given('train', 'val', 'test'), {'8', '9', '10', '11'}),
    'one json and a test': ('coco', given('all', 'test'), {'4', '5', '6', '7'}),
    'the test is in both': (
        'coco',
        lambda: [coco('all', range(8)), coco('test', range(2, 4))],
        {'2', '3'},
    ),
    'lists': (
        'voc',
        lambda: voc(dict(train=range(6), val=range(6, 10), test=[10, 11])),
        {'10', '11'},
    ),
    'a list of the test': ('voc', lambda: voc(dict(test=[10, 11])), {'10', '11'}),
    'folders next to each other': (
        'masks',
        lambda: [
            masks(part, f'{part}_masks', range(3 * i, 3 * i + 3))
            for i, part in enumerate(('train', 'val', 'test'))
        ],
        {'6', '7', '8'},
    ),
    'folders in images and masks': (
        'masks',
        lambda: [
            masks(f'images/{part}', f'masks/{part}', range(3 * i, 3 * i + 3))
            for i, part in enumerate(('train', 'val', 'test'))
        ],
        {'6', '7', '8'},
    ),
    'a test next to images and masks': (
        'masks',
        lambda: [
            masks('images', 'masks', range(8)),
            masks('test/images', 'test/masks', [8, 9]),
        ],
        {'8', '9'},
    ),
    'a list of the test of masks': (
        'masks',
        lambda: [
            masks('JPEGImages', 'SegmentationClass', range(8)),
            write('data/ImageSets/Segmentation/test.txt', '6\n7\n'),
        ],
        {'6', '7'},
    ),
}


MORE = (
    'one json and a test',
    'lists',
    'folders in images and masks',
    'a test next to images and masks',
)


@pytest.mark.parametrize('name', nightly(LAYOUTS, MORE))
def test_a_test_part_is_tested_on_and_nothing_else(name, capsys):
    kind, make, expected = LAYOUTS[name]
    make()
    main(['new', kind, 'data'])
    number = len(expected)
    assert f'{number} images of the test part: for `aft_mm test` only' in capsys.readouterr().out
    config = Config.fromfile('data.py')
    if kind == 'masks':
        found = {part: of_masks(part) for part in ('train', 'val', 'test')}
    else:
        found = {part: of_json(part) for part in ('train', 'val', 'test')}
        assert config.test_dataloader.dataset.ann_file.endswith('data_split/test.json')
        assert config.val_dataloader.dataset.ann_file.endswith('data_split/val.json')
        if kind == 'coco':
            assert config.test_evaluator.ann_file == config.test_dataloader.dataset.ann_file
    assert found['test'] == expected
    assert found['train'] and found['val'] and not found['train'] & found['val']
    assert not (found['train'] | found['val']) & expected


UNLABELLED = {
    'coco': (
        lambda: [coco('train', range(4)), coco('val', range(4, 8)), coco('test', [8], False)],
        "test.json' is not used: it holds no boxes",
    ),
    'voc': (
        lambda: voc(dict(train=range(6), val=range(6, 10), test=[10, 11]), range(10)),
        "test.txt' is not used: boxes '10.xml'.* do not exist",
    ),
    'masks': (
        lambda: [
            masks('train', 'train_masks', range(3)),
            masks('val', 'val_masks', range(3, 6)),
            masks('test', '', range(6, 8)),
        ],
        'data/test has no masks and is not used',
    ),
}


@pytest.mark.parametrize('kind', UNLABELLED)
def test_a_test_part_without_labels_is_named(kind, capsys):
    make, message = UNLABELLED[kind]
    make()
    main(['new', kind, 'data'])
    assert re.search(message, capsys.readouterr().out)
    config = Config.fromfile('data.py')
    assert config.test_dataloader.dataset == config.val_dataloader.dataset


def test_a_class_of_the_test_part_only_is_named(capsys):
    coco('all', range(0, 8, 2))  # of one class
    coco('test', range(9, 13))
    main(['new', 'coco', 'data'])
    shown = capsys.readouterr().out
    assert "boxes of classes of the test part only are not used, such as 'dog'\n" in shown
    assert shown.startswith('data: 4 images with 4 boxes of 1 classes')
    assert Config.fromfile('data.py').classes == ['cat']


def test_several_test_parts_are_refused():
    for part, first in (('train', 0), ('val', 4), ('test_a', 8), ('test_b', 12)):
        coco(part, range(first, first + 4))
    message = 'json files must be one with test in its name, or none, got test_a.json, test_b.json'
    stops(message, main, ['new', 'coco', 'data'])
