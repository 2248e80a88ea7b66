"""`aft_mm new`: the config for own data, and the data that it refuses."""

import json
import os
from collections import Counter

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image

from aft_mm.cli.main import main
from aft_mm.config.reading import check_data, read_config
from aft_mm.convert import own_data
from aft_mm.errors import UserError

from ..errors import stops

pytestmark = pytest.mark.usefixtures('here')
RNG = np.random.default_rng(0)
COUNTS = {'cat': 5, 'dog é': 10, 'wombat': 20}


def save(path, shape=(6, 8, 3), high=256):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, high, shape, dtype=np.uint8)).save(path)


@pytest.fixture
def photos(here):
    for name, number in COUNTS.items():
        for index in range(number):
            save(here / f'photos/{name}/in side/{index} a.jpg')
    save(here / 'photos/.hidden/1.jpg')
    return here / 'photos'


def boxes(folder, names=('cat', 'dog'), number=10):
    """Write images with one box each, every third one of the first class."""
    for index in range(number):
        save(folder / f'images/{index}.png')
    box = dict(bbox=[1, 1, 4, 3], area=12, iscrowd=0)
    sizes = dict(width=8, height=6, license=1)
    content = dict(
        images=[dict(sizes, id=i, file_name=f'{i}.png') for i in range(number)],
        annotations=[
            dict(box, id=i, image_id=i, category_id=int(i % 3 > 0)) for i in range(number)
        ],
        categories=[dict(id=i, name=name) for i, name in enumerate([*names, 'not there'])],
    )
    (folder / 'all.json').write_text(json.dumps(content))
    return content


def samples(config, part):
    dataset = config[f'{part}_dataloader'].dataset
    with DefaultScope.overwrite_default_scope(config.default_scope):
        built = DATASETS.build({**dataset, 'pipeline': []})
    return built, [os.path.relpath(built.get_data_info(i)['img_path']) for i in range(len(built))]


def test_a_folder_without_parts_is_split_by_class(photos, capsys):
    main(['new', 'image-folder', 'photos/', '--val', '0.2'])
    shown = capsys.readouterr().out
    assert 'photos/: 35 images of 3 classes, 8 x 6 pixels\n  cat: 5 images\n' in shown
    assert 'training 28 images, validation 7, sampled with seed 0 into photos_split/' in shown
    assert (
        shown.endswith('next: aft_mm train photos.py\n') and 'fewer than 20 of cat, dog é' in shown
    )
    assert '\na validation of fewer than 20 images says almost nothing: add images\n' in shown
    assert len(open('photos.py').read().splitlines()) < 16

    config = read_config('photos.py', {})
    check_data(config, 'train', 'val')
    (train, first), (val, second) = (samples(config, part) for part in ('train', 'val'))
    assert not {*first} & {*second} and all(map(os.path.isfile, [*first, *second]))
    assert Counter(path.split('/')[1] for path in first + second) == COUNTS
    assert [path.split('/')[1] for path in second] == ['cat', 'dog é', 'dog é', *['wombat'] * 4]
    assert train.metainfo['classes'] == val.metainfo['classes'] == tuple(COUNTS)
    assert config.model.head.num_classes == config.data_preprocessor.num_classes == 3
    assert config.model.head.in_channels == 96  # of the base

    texts = [open('photos_split/val.txt').read()]
    for seed in ('0', '1'):
        main(['new', 'image-folder', 'photos', '--out', f'{seed}.py', '--seed', seed])
        texts.append(open(f'{seed}_split/val.txt').read())
    assert texts[0] == texts[1] != texts[2]


def test_a_text(here, capsys):
    (here / 'a b.txt').write_bytes('Glück ist das.\r\n'.encode() * 400)
    main(['new', 'text', 'a b.txt'])
    shown = capsys.readouterr().out
    assert 'a b.txt: 6,800 bytes, 6,400 characters, lines end in CRLF' in shown
    assert shown.endswith("next: aft_mm train 'a b.py'\n")
    config = read_config('a b.py', {})
    for part in ('train', 'val', 'test'):
        assert config[f'{part}_dataloader'].dataset.data_file == str(here / 'a b.txt')


@pytest.mark.parametrize(
    ('content', 'note'),
    [
        (b'\xef\xbb\xbf' + b'words ' * 1000, ', begins with a byte order mark, which the model'),
        (b'words\r' * 1000, ', lines end in CR alone, without LF'),
        (b'a' * 6000, ", 'a' alone, of which nothing can be learned"),
    ],
)
def test_unusual_texts_are_described(here, capsys, content, note):
    (here / 'a.txt').write_bytes(content)
    main(['new', 'text', 'a.txt'])
    assert f'characters{note}' in capsys.readouterr().out


def test_the_config_has_the_whole_name_of_the_text(here):
    for name in ('Kap.1.txt', 'Kap.2.txt', 'Kap.2.txt.gz', '.txt'):
        (here / name).write_text('some words ' * 1000)
    for name, config in {
        'Kap.1.txt': 'Kap_1.py',
        'Kap.2.txt': 'Kap_2.py',
        '.txt': 'txt.py',
    }.items():
        main(['new', 'text', name])
        assert read_config(config, {}).data_file == str(here / name)
    stops("'Kap_2.py' exists already", main, ['new', 'text', 'Kap.2.txt.gz'])


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['a.txt', '--out', 'a.txt'], "--out must end in .py, got 'a.txt'"),
        (['a.py'], "--out must not replace data, got 'a.py', a file that the command reads"),
        (['a.py', '--out', './a.py'], "--out must not replace data, got 'a.py'"),
    ],
)
def test_the_data_are_not_called_a_config_to_delete(here, words, message):
    for name in ('a.txt', 'a.py'):
        (here / name).write_text('some words ' * 1000)
    stops(f'^Error: {message}', main, ['new', 'text', *words])
    assert (here / 'a.txt').read_text() == (here / 'a.py').read_text() == 'some words ' * 1000


def test_the_same_share_of_every_label_is_sampled():
    labels = RNG.permutation(['a'] * 50 + ['b'] * 10 + ['c'] * 2 + ['d']).tolist()
    parts = own_data.split_by_label(range(63), labels, 0.3, 0)
    assert sorted(parts['train'] + parts['val']) == list(range(63))
    assert parts['train'] == sorted(parts['train'])
    assert Counter(labels[i] for i in parts['val']) == dict(a=15, b=3, c=1)
    parts = own_data.split_by_label(range(63), labels, 0.9, 0)
    assert Counter(labels[i] for i in parts['val']) == dict(a=45, b=9, c=1)


def test_boxes_of_one_json_are_split(here):
    content = boxes(here / 'mine')
    content['annotations'].reverse()  # begins with a dog
    (here / 'mine/all.json').write_text(json.dumps(content))
    found = own_data.coco(here / 'mine', 0.3, 0)
    parts = [json.loads(found.files[f'{part}.json']) for part in ('train', 'val')]
    assert sorted(i['id'] for p in parts for i in p['images']) == list(range(10))
    for part in parts:
        assert {i['id'] for i in part['images']} == {a['image_id'] for a in part['annotations']}
        assert part['categories'] == content['categories']
    # Of four images of cats and six of dogs.
    assert Counter(box['category_id'] for box in parts[1]['annotations']) == {0: 1, 1: 2}
    assert list(found.counts.items()) == [('cat', 4), ('dog', 6)]
    assert "classes = ['cat', 'dog']  #" in found.config[0]


def test_masks_and_voc_are_split(here):
    for index in range(10):
        save(here / f'masks/images/{index}.bmp')
        save(here / f'masks/masks/{index}.png', (6, 8), 3 if index < 3 else 2)
    found = own_data.masks(here / 'masks', 0.34, 0)
    # The three images with class 2, and the other seven.
    assert found.parts == dict(train=7, val=3)
    assert sorted((found.files['train.txt'] + found.files['val.txt']).split()) == list('0123456789')
    assert sum(int(stem) < 3 for stem in found.files['val.txt'].split()) == 1
    (here / 'masks/classes.txt').write_text('\ufeffsky\r\nroad\r\ncar\r\nnever there\r\n')
    names = ['sky', 'road', 'car', 'never there']
    assert list(own_data.masks(here / 'masks', 0.3, 0).counts) == names
    voc = here / 'voc'
    for index in range(6):
        save(voc / f'JPEGImages/{index}.jpg')
        (voc / 'Annotations').mkdir(exist_ok=True)
        (voc / f'Annotations/{index}.xml').write_text(
            f'<annotation><object><name>{"cat" if index % 2 else "a dog"}</name><bndbox><xmin>1</xmin>'
            '<ymin>1</ymin><xmax>4</xmax><ymax>5</ymax></bndbox></object></annotation>'
        )
    found = own_data.voc(voc, 0.3, 0)
    assert found.counts == {'cat': 3, 'a dog': 3} and found.parts == dict(train=4, val=2)
    (voc / 'ImageSets/Main').mkdir(parents=True)
    parts = dict(train='0\n1\n2\n', val='3\n', trainval='0\n', cat_val='')
    for part, text in parts.items():
        (voc / f'ImageSets/Main/{part}.txt').write_text(text)
    assert own_data.voc(voc, 0.3, 0).parts == dict(train=3, val=1)
    for part in ('train', 'val'):
        (voc / f'ImageSets/Main/{part}.txt').unlink()
    (voc / 'ImageSets/Main/trainval.txt').write_text('0\n1\n2\n3\n')  # 4 and 5 are the test's
    found = own_data.voc(voc, 0.5, 0)
    listed = [json.loads(found.files[f'{part}.json'])['images'] for part in ('train', 'val')]
    listed = [image['file_name'] for image in sum(listed, [])]
    assert sorted(listed) == ['0.jpg', '1.jpg', '2.jpg', '3.jpg'] and found.parts == dict(
        train=2, val=2
    )


def test_masks_in_colours_are_numbered(here, capsys):
    colours = np.array([[0, 0, 0], [255, 0, 0], [128, 64, 128]], np.uint8)
    numbers = {}
    for name in ('a', 'sub/b'):
        save(here / f'data/images/{name}.jpg', (6, 8, 3))
        numbers[name] = RNG.choice(3, (6, 8), p=[0.2, 0.7, 0.1])
        path = here / f'data/colours/{name}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colours[numbers[name]]).save(path)
    main(['number-masks', 'data/colours', 'data/masks'])
    assert open('data/classes.txt').read() == '#ff0000\n#000000\n#804080\n'
    for name, expected in numbers.items():
        found = np.asarray(Image.open(here / f'data/masks/{name}.png'))
        np.testing.assert_array_equal(found, np.array([1, 0, 2])[expected])
    assert '  0 #ff0000' in capsys.readouterr().out
    assert own_data.masks(here / 'data', 0.5, 0).parts == dict(train=1, val=1)
    stops("'data/masks' exists already", main, ['number-masks', 'data/colours', 'data/masks'])
    # Numbers above 255 are no colours.
    wide = np.repeat(np.array([7, 300, 1, 65_535], np.uint16), 12).reshape(6, 8)
    (here / 'wide').mkdir()
    Image.fromarray(wide).save(here / 'wide/a.png')
    main(['number-masks', 'wide', 'narrow/masks'])
    assert open('narrow/classes.txt').read() == '1\n7\n300\n65535\n'
    narrow = np.asarray(Image.open(here / 'narrow/masks/a.png'))
    np.testing.assert_array_equal(narrow, np.select([wide == n for n in (1, 7, 300)], [0, 1, 2], 3))
    Image.fromarray(wide).save(here / 'wide/a.tif')
    stops('two for other/masks/a.png', main, ['number-masks', 'wide', 'other/masks'])
    save(here / 'photo/a.png', (40, 40, 3))
    message = "at most 255 colours.*, got more at 'photo/a.png'"
    stops(message, main, ['number-masks', 'photo', 'out/masks'])


def images(*names, size=(6, 8, 3)):
    return lambda here: [save(here / f'data/{name}.jpg', size) for name in names]


ONE_CLASS, ONE_IMAGE = images('cat/1'), images('cat/1', 'cat/2', 'dog/1')


def truncated(here):
    images('cat/1', 'cat/2', 'dog/1', 'dog/2', size=(40, 40, 3))(here)
    path = here / 'data/dog/2.jpg'
    path.write_bytes(path.read_bytes()[:-50])


def dead_link(here):
    ONE_IMAGE(here)
    (here / 'data/dog/2.jpg').symlink_to('nothing')


def no_boxes(here):
    content = boxes(here / 'data')
    (here / 'data/all.json').write_text(json.dumps({**content, 'annotations': []}))


def no_image(here):
    boxes(here / 'data')
    (here / 'data/images/7.png').unlink()


def masks(shape, high, classes=None):
    def write(here):
        for index in range(3):
            save(here / f'data/images/{index}.png')
            save(here / f'data/masks/{index}.png', shape, high)
        if classes is not None:
            (here / 'data/classes.txt').write_text(classes)

    return write


def no_unicode(here):
    images('cat/1', 'cat/2', 'dog/1')(here)
    (here / 'data/dog/1.jpg').rename(os.fsdecode(os.fsencode(here) + b'/data/dog/\xff.jpg'))


def two_files(here):
    boxes(here / 'data')
    (here / 'data/part_b.json').write_bytes((here / 'data/all.json').read_bytes())


def a_list_as_category(here):
    content = boxes(here / 'data')
    content['annotations'][3]['category_id'] = [1]
    (here / 'data/all.json').write_text(json.dumps(content))


def latin_1(here):
    masks((6, 8), 2)(here)
    (here / 'data/classes.txt').write_bytes('Himmel\nStraße\n'.encode('latin-1'))


def bytes_of(data):
    return lambda here: (here / 'data').write_bytes(data)


@pytest.mark.parametrize(
    ('kind', 'write', 'message'),
    [
        ('image-folder', lambda here: None, "PATH 'data' does not exist"),
        ('image-folder', lambda here: (here / 'data').mkdir(), 'a folder of images for each class'),
        ('image-folder', ONE_CLASS, "at least 2 classes, got 'cat'"),
        ('image-folder', ONE_IMAGE, "class 'dog' must have at least 2 images"),
        ('image-folder', truncated, "'.*/data/dog/2.jpg' .*truncated"),
        ('image-folder', images('cat/1\n2'), r"1\\n2.jpg' must have a name without a line break"),
        ('image-folder', no_unicode, 'udcff.jpg. must have a name in UTF-8'),
        ('image-folder', dead_link, "'.*/dog/2.jpg' .*it is a link to a missing file"),
        (
            'image-folder',
            images('train/cat/1', 'train/dog/1', 'val/cat/1', 'val/bird/1'),
            "class 'bird' must have images in train and val",
        ),
        ('coco', no_boxes, "'.*/all.json' must hold images and boxes"),
        ('coco', no_image, "'.*images/7.png' of '.*all.json' does not exist"),
        ('coco', two_files, 'json files must be one, .*, got all.json, part_b.json'),
        (
            'coco',
            lambda here: boxes(here / 'data', number=1),
            'must hold samples for val, got none',
        ),
        ('coco', a_list_as_category, r'3 of .* must have the id of a category, got \[1\]'),
        ('coco', bytes_of(b'{'), "annotations '.*/data' is damaged or not JSON: Expecting"),
        ('coco', ONE_CLASS, 'json files must be one, .*, got none'),
        (
            'voc',
            ONE_CLASS,
            'must hold an xml file of VOC for each image, in Annotations/ .* got none',
        ),
        ('masks', ONE_CLASS, 'must hold images/ and masks/.*; images/ is missing'),
        ('masks', masks((6, 8), 3, 'a\nb\n'), 'has the value 2, which must be 0 to 1, .*, or 255'),
        ('masks', latin_1, "classes.txt' is not valid UTF-8 in byte 11"),
        ('masks', masks((3, 4), 2), 'must have the size of its image, 8 x 6, got 4 x 3'),
        ('text', ONE_CLASS, "text '.*' must be one file"),
        ('text', bytes_of(b'a' * 9000 + b'\xff'), 'must be UTF-8, which byte 9000 is not'),
        ('text', bytes_of(b'a\0' * 9000), 'must be a text, got a zero byte'),
        ('text', bytes_of(b'PK\3\4' * 9000), 'or packed as gzip or xz, got zip'),
        ('text', bytes_of(b'abc'), 'must have at least 5,120 bytes, got 3'),
    ],
)
def test_unusable_data_are_refused_and_nothing_is_written(kind, write, message, here):
    write(here)
    before = sorted(here.iterdir())
    stops(message, main, ['new', kind, 'data', '--out', 'new/my.py'])
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize('words', [['--val', '0.2'], ['--seed', '0']])
def test_options_of_the_split_are_refused_where_nothing_is_split(words, here):
    (here / 'data.txt').write_text('words ' * 2000)
    message = f"{words[0]} has no effect: no validation images are sampled from 'data.txt'"
    stops(message, main, ['new', 'text', 'data.txt', *words])
    assert not (here / 'data.py').exists()


def test_captions_beside_the_boxes_are_no_boxes(here):
    boxes(here / 'coco')
    for part in ('train', 'val'):
        for name in ('captions', 'instances'):
            path = here / f'coco/annotations/{name}_{part}2017.json'
            path.parent.mkdir(exist_ok=True)
            path.write_bytes((here / 'coco/all.json').read_bytes())
    found = own_data.coco(here / 'coco', 0.2, 0)
    assert found.parts == dict(train=10, val=10) and found.given


def test_the_config_hides_no_module(photos, here):
    photos.rename(here / 'random')
    main(['new', 'image-folder', 'random'])
    assert (here / 'random_config.py').exists() and not (here / 'random.py').exists()


def test_files_are_not_overwritten(photos, here):
    (here / 'photos.py').write_text('mine')
    for words, message in (
        ([], "'photos.py' exists already; delete to make anew, or name another file with --out"),
        (['--out', 'a.py', '--val', '1'], '--val must be .* at most 0.9'),
        (['--out', 'a.py', '--seed', '-1'], '--seed must be an int, 0 or larger, got -1'),
    ):
        stops(message, main, ['new', 'image-folder', 'photos', *words])
    assert (here / 'photos.py').read_text() == 'mine' and not (here / 'photos_split').exists()
    (here / 'photos_split').mkdir()
    stops(
        "'photos.py' and 'photos_split' exist already; del", main, ['new', 'image-folder', 'photos']
    )


def test_bases_of_the_package_are_found_by_mmengine(here):
    (here / 'a.py').write_text("_base_ = 'aft_mm::own_data/image-folder'\nmore = 1\n")
    (here / 'b.py').write_text("_base_ = 'aft_mm::_base_/schedules/mini.py'\n")
    config = Config.fromfile('a.py')
    assert config.more == 1 and config.model.type == 'ImageClassifier'
    assert '_scope_' not in str(config.to_dict())
    assert Config.fromfile('b.py').train_cfg.val_interval == 5
    (here / 'c.py').write_text("_base_ = 'aft_mm::own_data/image-foder'\n")
    with pytest.raises(Exception, match='did you mean'):
        Config.fromfile('c.py')


def test_parts_without_one_to_train_on_are_no_classes(here):
    for part in ('valid', 'test'):
        for name in ('cat', 'dog'):
            save(here / f'photos/{part}/{name}/1.png')
    with pytest.raises(UserError, match='must hold train/ and val/, .* got test, valid'):
        own_data.image_folder(here / 'photos', 0.3, 0)
