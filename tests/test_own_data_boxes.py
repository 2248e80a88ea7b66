"""Boxes that `aft_mm new` reads, refuses or reports, and where their images may be."""

import json
import re
import unicodedata

import numpy as np
import pytest

from aft_mm.cli.main import main
from aft_mm.convert import own_data

from .errors import refuses_input, stops
from .helpers import save_picture

pytestmark = pytest.mark.usefixtures('here')
RNG = np.random.default_rng(0)
SIZE = dict(width=96, height=80)
XML = """<annotation><filename>{name}</filename><size><width>96</width><height>80</height></size>
<object><name>{label}</name><bndbox><xmin>11</xmin><ymin>13</ymin><xmax>41</xmax><ymax>53</ymax>
</bndbox></object></annotation>"""
BOX = '<xmin>11</xmin><ymin>13</ymin><xmax>41</xmax><ymax>53</ymax>'


def save(path):
    save_picture(path, RNG.integers(0, 256, (80, 96, 3)))


def coco(path, images, names=('cat', 'dog')):
    """Write a COCO json with a box of each image, of all classes in turn; return its content."""
    content = dict(
        images=[dict(SIZE, id=i, file_name=name) for i, name in enumerate(images)],
        annotations=[
            dict(id=i + 1, image_id=i, category_id=i % len(names), bbox=[10, 12, 30, 40])
            for i in range(len(images))
        ],
        categories=[dict(id=i, name=name) for i, name in enumerate(names)],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return content


def found_files(found):
    """Return the images of both parts, relative to the folder of data."""
    (folder,) = re.findall(r"img='.*?/data/?(.*)'", '\n'.join(found.config))
    names = [
        [image['file_name'] for image in json.loads(found.files[f'{part}.json'])['images']]
        for part in ('train', 'val')
    ]
    return [sorted(f'{folder}/{name}'.lstrip('/') for name in part) for part in names]


LAYOUTS = {
    # What lies where: json files or lists by part, images as they are named there, and their folder.
    'next to the images': {'ann.json': ('', ['1.jpg', '2.png'])},
    'CVAT': {'annotations/instances_default.json': ('images', ['1.jpg', 'sub/2.png'])},
    'CVAT, subsets': {
        'annotations/instances_train.json': ('images/train', ['1.jpg', '2.png']),
        'annotations/instances_val.json': ('images/val', ['1.jpg', '2.png']),
    },
    'COCO': {
        'annotations/instances_train2017.json': ('train2017', ['1.jpg', '2.png']),
        'annotations/instances_val2017.json': ('val2017', ['1.jpg', '3.png']),
    },
    'Roboflow': {
        'train/_annotations.coco.json': ('train', ['1.jpg', '2.png']),
        'valid/_annotations.coco.json': ('valid', ['1.jpg', '3.png']),
        'test/_annotations.coco.json': ('test', ['1.jpg', '3.png']),
    },
    'Label Studio': {'result.json': ('', ['images/1.jpg', 'images/2.png'])},
    'Label Studio on Windows': {'result.json': ('', ['images\\1.jpg', 'images\\2.png'])},
    'Datumaro': {
        'train/annotations/instances_default.json': ('train/images', ['1.jpg', '2.png']),
        'val/annotations/instances_default.json': ('val/images', ['1.jpg', '3.png']),
    },
    'FiftyOne': {'labels.json': ('data', ['1.jpg', '2.png'])},
    'LabelMe': {'annotations.json': ('', ['JPEGImages/1.jpg', 'JPEGImages/2.png'])},
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_layouts_of_coco(name, here):
    expected = {}
    for path, (folder, images) in LAYOUTS[name].items():
        coco(here / 'data' / path, images)
        files = [f'{folder}/{image}'.lstrip('/').replace('\\', '/') for image in images]
        for file in files:
            save(here / 'data' / file)
        expected[path] = sorted(files)
    coco(here / 'data/.git/ann.json', ['3.jpg'])  # hidden
    (here / 'data/info.json').write_text('{"version": 1}')
    found = own_data.coco(here / 'data', 0.5, 0)
    train, val = found_files(found)
    parts = list(expected.values())
    assert [train, val] == parts[:2] if len(parts) > 1 else sorted(train + val) == parts[0]
    assert found.counts == dict(cat=len(parts[:2]), dog=len(parts[:2]))
    assert found.given == (len(parts) > 1)


VOC_LAYOUTS = {
    'VOC': ('JPEGImages', 'Annotations'),
    'VOC in a folder': ('VOCdevkit/VOC2012/JPEGImages', 'VOCdevkit/VOC2012/Annotations'),
    'LabelImg': ('', ''),
    'Label Studio': ('images', 'Annotations'),
    'FiftyOne': ('data', 'labels'),
    'nested': ('images/a', 'annotations/a'),
}


@pytest.mark.parametrize('name', VOC_LAYOUTS)
def test_layouts_of_voc(name, here):
    images, annotations = VOC_LAYOUTS[name]
    for i, suffix in enumerate(['.jpg', '.png', '.JPG', '.jpeg']):
        save(here / f'data/{images}/{i}{suffix}')
        save(here / f'data/SegmentationClass/{i}.bmp')
        path = here / f'data/{annotations}/{i}.xml'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(XML.format(name=f'{i}{suffix}', label='cat' if i % 2 else 'dog'))
    save(here / 'data/.cache/0.jpg')
    found = own_data.voc(here / 'data', 0.5, 0)
    train, val = found_files(found)
    names = ['0.jpg', '1.png', '2.JPG', '3.jpeg']
    assert sorted(train + val) == [f'{images}/{name}'.lstrip('/') for name in names]
    assert found.parts == dict(train=2, val=2) and found.counts == dict(cat=2, dog=2)


def test_parts_of_voc_are_folders_or_lists(here):
    """Roboflow writes folders; CVAT writes lists whose lines may have folders."""
    for i, part in enumerate(['train', 'train', 'valid', 'test']):
        save(here / f'data/{part}/{i}.jpg')
        path = here / f'data/{part}/{i}.xml'
        path.write_text(XML.format(name='of another tool', label='cat'))
    found = own_data.voc(here / 'data', 0.5, 0)
    assert found_files(found) == [['train/0.jpg', 'train/1.jpg'], ['valid/2.jpg']]
    assert found.given
    for part, lines in dict(train='valid/2\n0.jpg\n', val='3\n').items():
        path = here / f'data/ImageSets/Main/{part}.txt'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines)
    found = own_data.voc(here / 'data', 0.5, 0)
    assert found_files(found) == [['train/0.jpg', 'valid/2.jpg'], ['test/3.jpg']]


def test_classes_in_two_unicode_forms_are_one(here):
    """macOS decomposes the letters of names."""
    for part, form in (('train', 'NFC'), ('val', 'NFD')):
        label = unicodedata.normalize(form, 'Äpfel')
        coco(here / f'data/{part}.json', [f'{part}.jpg'], [label])
        save(here / f'data/{part}.jpg')
        (here / f'data/{part}.xml').write_text(XML.format(name=f'{part}.jpg', label=label))
    for inspect in (own_data.coco, own_data.voc):
        assert inspect(here / 'data', 0.5, 0).counts == {'\xc4pfel': 2}


def change(key, value, number=3):
    def write(content):
        content['annotations'][number - 1][key] = value

    return write


def corners(content):
    for box in content['annotations'][::2]:
        box['bbox'] = [50, 40, 80, 70]


def corners_inside(content):
    for box in content['annotations']:
        box.update(bbox=[10, 12, 40, 52], area=1200)


def windows(content):
    content['images'][0]['file_name'] = 'C:\\me\\images\\0.jpg'


def again(content):
    content['images'].append(dict(content['images'][0], file_name='1.jpg'))


@pytest.mark.parametrize(
    ('edit', 'message'),
    [
        (change('bbox', [40, 52, -30, -40]), 'box 3 of .* must have no negative width or height'),
        (change('bbox', [0.1, 0.2, 0.3, 0.5]), 'box 3 of .* in pixels, not in fractions'),
        (change('bbox', [96, 12, 30, 40]), 'box 3 of .* inside of its image of 96 x 80 pixels'),
        (change('bbox', [-30, 12, 30, 40]), 'box 3 of .* inside of its image of 96 x 80 pixels'),
        (change('bbox', [10, 12, float('nan'), 40]), 'box 3 of .* box of four numbers'),
        (change('bbox', ['10', '12', '30', '40']), 'box 3 of .* box of four numbers'),
        (change('bbox', None), 'box 3 of .* box of four numbers .* got None'),
        (change('category_id', 9), 'box 3 of .* the id of a category, got 9'),
        (change('image_id', 1.0), 'box 3 of .* the id of an image, got 1.0'),
        (corners, 'boxes of .* must be x, y, width, height, but are two corners'),
        (corners_inside, 'boxes of .* must be x, y, width, height, but are two corners'),
        (windows, 'does not exist in .*data. or its folders'),
        (again, 'image 0 of .* must have an id of its own'),
        (lambda c: c['categories'][1].update(id=0), 'category 0 of .* must have an id of its own'),
        (lambda c: c['categories'][1].update(name=' '), 'category 1 of .* has no name'),
        (lambda c: c['images'][2].update(width=960), "'2.jpg' of .* has 96 x 80 .*, not 960 x 80;"),
        (
            lambda c: c['images'][2].update(width=80, height=96),
            '; its width and height are exchanged',
        ),
        (
            lambda c: c['images'][2].update(id=2.0),
            "image '2.jpg' of .* an integer or a text as id, got 2.0",
        ),
        (
            lambda c: c['images'].append(dict(SIZE, id=99, file_name='2.jpg', width=192)),
            "'2.jpg', which '.*' lists again, must have the same width and height, got .96, 80. and",
        ),
        (
            lambda c: [box.update(image_id=99) for box in c['annotations']],
            '8 of 8 boxes are not used: of images that the file does not list',
        ),
        (
            lambda c: [box.update(iscrowd=1) for box in c['annotations']],
            r'8 of 8 boxes are not used: iscrowd \(8\), first in .*ann.json., box 1',
        ),
    ],
)
def test_boxes_of_coco_without_sense_are_refused(edit, message, here):
    names = [f'{i}.jpg' for i in range(8)]
    for name in names:
        save(here / f'data/images/{name}')
    content = coco(here / 'data/ann.json', names)
    edit(content)
    (here / 'data/ann.json').write_text(json.dumps(content))
    stops(message, main, ['new', 'coco', 'data'])
    assert not (here / 'data.py').exists()


@pytest.mark.parametrize(
    ('old', 'new', 'message'),
    [
        ('<xmin>11', '<xmin>51', '0.xml. must have no negative width or height'),
        (BOX, BOX.replace('>', '>0.').replace('>0.<', '><'), '0.xml. must be in pixels, not in fr'),
        ('<xmin>11', '<xmin>eleven', "0.xml. must have the numbers xmin, .* got .'eleven', '13'"),
        ('<xmin>11', '<xmin>nan', '0.xml. must have the numbers xmin'),
        ('<ymax>53</ymax>', '', '0.xml. must have the numbers xmin'),
        (
            '<xmin>11</xmin><ymin>13</ymin><xmax>41',
            '<xmin>99</xmin><ymin>13</ymin><xmax>141',
            'insi',
        ),
        ('<xmax>41', '<xmax>11', r'4 of 4 boxes are not used: area 0 \(4\)'),
        ('bndbox', 'polygon', r'4 of 4 boxes are not used: without a bndbox \(4\)'),
        ('<name>cat</name>', '', r'4 of 4 boxes are not used: without a name \(4\)'),
        (
            '<width>96',
            '<width>80',
            "image 'JPEGImages/0.jpg' of .*0.xml' has 96 x 80 pixels, not 80 x 80",
        ),
        ('annotation>', 'annotations>', "must be an annotation of VOC, got 'annotations'"),
    ],
)
def test_boxes_of_voc_without_sense_are_refused(old, new, message, here):
    for i in range(4):
        save(here / f'data/JPEGImages/{i}.jpg')
        path = here / f'data/Annotations/{i}.xml'
        path.parent.mkdir(exist_ok=True)
        text = XML.replace('\n', '').format(name=f'{i}.jpg', label='cat')
        assert old in text
        path.write_text(text.replace(old, new))
    stops(message, main, ['new', 'voc', 'data'])


@pytest.mark.parametrize(
    ('kind', 'file', 'text', 'message'),
    [
        ('coco', 'labels/1.txt', '0 0.5 0.5 0.2 0.2\n', "the boxes of YOLO in 'labels/1.txt'"),
        ('voc', 'labels/1.txt', '0 0.5 0.5 0.2 0.2\n', "the boxes of YOLO in 'labels/1.txt'"),
        ('coco', '1.csv', 'image,xmin\n', "a table in '1.csv'"),
        ('coco', '1.xml', '<annotation/>', "got '1.xml'; try `aft_mm new voc`"),
        ('voc', '1.json', '{}', "got '1.json'; try `aft_mm new coco`"),
        ('coco', '1.json', '{"shapes": [], "imagePath": "1.jpg"}', 'those of LabelMe'),
        ('coco', '1.json', '{"a": {"filename": "1.jpg", "regions": []}}', 'those of VIA'),
        ('coco', '1.json', '[{"image": "1.jpg", "annotations": []}]', 'those of CreateML'),
        ('coco', '1.json', '[{"id": 1, "annotations": [], "data": {}}]', 'those of Label Studio'),
    ],
)
def test_formats_of_other_tools_are_named(kind, file, text, message, here):
    for i in (1, 2):
        path = here / 'data' / file.replace('1', str(i))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        save(here / f'data/images/{i}.jpg')
    stops(message, main, ['new', kind, 'data'])


def test_an_image_in_two_folders_is_refused(here):
    coco(here / 'data/ann.json', ['1.jpg', '2.jpg'])
    for folder in ('a', 'b'):
        for i in (1, 2):
            save(here / f'data/{folder}/{i}.jpg')
    message = "image of 'ann.json' must be one file, got 'a/1.jpg' and 'b/1.jpg'"
    refuses_input(message, own_data.coco, here / 'data', 0.5, 0)


@pytest.mark.parametrize('kind', ['coco', 'voc'])
def test_a_missing_image_is_not_that_of_another_part(kind, here):
    for part in ('train', 'valid'):
        for name in ('1.jpg', '2.jpg'):
            save(here / f'data/{part}/{name}')
        if kind == 'coco':
            coco(here / f'data/{part}/_annotations.coco.json', ['1.jpg', '2.jpg'])
        for name in ('1', '2') if kind == 'voc' else ():
            xml = XML.format(name=f'{name}.jpg', label='cat')
            (here / f'data/{part}/{name}.xml').write_text(xml)
    read = getattr(own_data, kind)
    assert read(here / 'data', 0.5, 0).parts == dict(train=2, val=2)
    (here / 'data/train/2.jpg').unlink()
    message = "image '2.jpg' of '.*' does not exist in a folder of train; '.*valid/2.jpg' is that"
    refuses_input(message, read, here / 'data', 0.5, 0)


def test_images_may_be_in_the_folder_of_another_part(here):
    for name in ('1.jpg', '2.jpg', '3.jpg', '4.jpg'):
        save(here / f'data/train/{name}')
        save(here / f'other/{name}')  # not those of this data
    for part, names in (('train', ['1.jpg', '2.jpg']), ('valid', ['3.jpg', '4.jpg'])):
        coco(here / f'data/{part}/_annotations.coco.json', names)
    found = own_data.coco(here / 'data', 0.5, 0)
    assert found_files(found) == [['train/1.jpg', 'train/2.jpg'], ['train/3.jpg', 'train/4.jpg']]
    assert 'another part' not in ' '.join(found.notes)
    save(here / 'data/val2017/5.jpg')
    coco(here / 'data/train/_annotations.coco.json', ['1.jpg', '2.jpg', '5.jpg'])
    found = own_data.coco(here / 'data', 0.5, 0)
    assert '1 of 3 images for train are in a folder of another part, first' in ' '.join(found.notes)


def test_an_image_of_two_parts_is_said(here):
    for name in ('1.jpg', '2.jpg', '3.jpg'):
        save(here / f'data/images/{name}')
    coco(here / 'data/train.json', ['1.jpg', '2.jpg'])
    coco(here / 'data/val.json', ['2.jpg', '3.jpg'])
    notes = '\n'.join(own_data.coco(here / 'data', 0.5, 0).notes)
    assert re.search("1 file is a copy of files of another part, first '.*/2.jpg'; the metr", notes)
    lists = here / 'data/ImageSets/Main'
    lists.mkdir(parents=True)
    for number in range(1, 4):
        (here / f'data/{number}.xml').write_text(XML.format(name='', label='cat'))
    for part in ('train', 'val'):
        (lists / f'cat_{part}.txt').write_text('1 -1\n2 1\n')  # of a class, as VOC has
    found = own_data.voc(here / 'data', 0.5, 0)
    assert sum(found.parts.values()) == 3 and 'cat_train.txt, cat_val.txt' in '\n'.join(found.notes)
    for part, names in (('train', '1\n2\n'), ('val', '2\n3\n')):
        (lists / f'{part}.txt').write_text(names)
    found = own_data.voc(here / 'data', 0.5, 0)
    assert found.given and found.parts == dict(train=2, val=2)
    assert '1 file is a copy of files of another part' in '\n'.join(found.notes)


def test_what_xml_files_leave_open_is_said(here):
    for number in range(3):
        save(here / f'data/{number}.jpg')
        xml = XML.format(name=f'{(number + 1) % 3}.jpg', label='cat')
        (here / f'data/{number}.xml').write_text(xml.replace('<xmin>11', '<xmin>0'))
    notes = '\n'.join(own_data.voc(here / 'data', 0.5, 0).notes)
    message = r"filename of 3 xml files names .*: '0.xml' has '1.jpg', .* as those of '0.jpg'"
    assert re.search(message, notes)
    assert '3 boxes with xmin or ymin 0: coordinates of VOC count from 1' in notes


def test_images_without_boxes_and_unknown_classes_are_said(here):
    for i in range(6):
        save(here / f'data/images/{i}.jpg')
    content = coco(here / 'data/train.json', [f'{i}.jpg' for i in range(4)])
    content['annotations'] = content['annotations'][:1] + content['annotations'][2:3]
    (here / 'data/train.json').write_text(json.dumps(content))
    coco(here / 'data/val.json', ['4.jpg', '5.jpg'])
    found = own_data.coco(here / 'data', 0.5, 0)
    assert found.parts == dict(train=2, val=2)
    assert found.notes == [
        '2 training images without boxes are not used',
        "no box for training of 'dog'",
    ]


def test_boxes_beyond_their_image_are_said(here):
    for i in range(4):
        save(here / f'data/{i}.jpg')
        text = XML.format(name='', label='cat').replace('41', '97' if i else '140')
        (here / f'data/{i}.xml').write_text(text)
    found = own_data.voc(here / 'data', 0.5, 0)
    (note,) = found.notes
    assert note.startswith('1 of 4 boxes reach beyond their image, first in ')
    assert note.endswith("/data/0.xml', box 1")


def test_many_thin_classes_are_counted(here, capsys):
    names = [f'{i}.jpg' for i in range(110)]
    for name in names:
        save(here / f'data/{name}')
    coco(here / 'data/ann.json', names, [f'kind {i}' for i in range(55)])
    main(['new', 'coco', 'data'])
    shown = capsys.readouterr().out
    assert '  kind 19: 2 boxes\n  and 35 more\n' in shown and 'kind 20' not in shown
    assert '\n55 of 55 classes have fewer than 20 boxes: expect a poor model of these\n' in shown


def test_options_of_boxes_without_effect_are_refused(here):
    (here / 'a.txt').write_text('words ' * 2000)
    stops('--scale-boxes is for boxes', main, ['new', 'text', 'a.txt', '--scale-boxes'])
    save(here / 'data/1.jpg')
    save(here / 'data/2.jpg')
    coco(here / 'data/ann.json', ['1.jpg', '2.jpg'], ['cat'])
    stops('--scale-boxes has no effect', main, ['new', 'coco', 'data', '--scale-boxes'])
