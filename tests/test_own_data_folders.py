"""Folders of images as people have them: what `aft_mm new` counts is what mmpretrain reads."""

import csv
import os
import re
import shutil
import sys
import unicodedata
from importlib.machinery import ModuleSpec
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import mmcv
import numpy as np
import pytest
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image, ImageFile, features

from aft_mm import images as image_files
from aft_mm.apis import ImageClassifier
from aft_mm.cli.commands.predict import image_files as image_files_of
from aft_mm.cli.main import main
from aft_mm.config.reading import check_data, read_config
from aft_mm.convert.own_data import split_by_label
from aft_mm.convert.own_data.image_folder import Labelled, split_classes
from aft_mm.convert.own_data.parts import copies, copy_notes
from aft_mm.datasets import ImageFolder
from aft_mm.errors import UnusableFile, UserError
from aft_mm.images import check_image, find_images, image_size, not_read, read_rgb

from .errors import refuses_input, stops

pytestmark = pytest.mark.usefixtures('here')
RNG = np.random.default_rng(0)
HEIC = b'\0\0\0\x18ftypheic\0\0\0\0mif1heic' + bytes(400)
NEEDS_AVIF = pytest.mark.skipif(
    'avif' not in features.modules or not features.check('avif'), reason='this Pillow has no AVIF'
)


def encoded(kind='JPEG', **options):
    file = BytesIO()
    Image.fromarray(RNG.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(file, kind, **options)
    return file.getvalue()


def moving(kind):
    frame = Image.fromarray(RNG.integers(0, 256, (20, 24, 3), dtype=np.uint8))
    return encoded(kind, save_all=True, append_images=[frame])


def write(*paths, content=None):
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded() if content is None else content)


def folder(root, classes, number=4):
    write(*(f'{root}/{name}/{index}.jpg' for name in classes for index in range(number)))


def listed(name='photos', parts=('train', 'val')):
    """Return the images with their classes, by part, of mmpretrain's data sets for a config."""
    config = read_config(f'{name}.py', {})
    check_data(config, *parts)
    found = {}
    for part in parts:
        dataset = config[f'{part}_dataloader'].dataset
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            built = DATASETS.build({**dataset, 'pipeline': []})
        infos = [built.get_data_info(index) for index in range(len(built))]
        found[part] = sorted(
            (os.path.relpath(info['img_path']), built.metainfo['classes'][info['gt_label']])
            for info in infos
        )
        assert config.model.head.num_classes == len(built.metainfo['classes'])
    return found


def of_classes(*classes, number=4, root='photos/{}', ending='.jpg'):
    return sorted(
        (f'{root.format(name)}/{index}{ending}', name)
        for name in classes
        for index in range(number)
    )


#: Contents of images that other programs name in their own way.
ODD = {
    'old.jfif': encoded(),
    'old.JPE': encoded(),
    'no ending': encoded('PNG'),
    'from a phone.HEIC': encoded(),
    'sent.image': encoded('WebP'),
    'page': encoded('TIFF'),
    'moving.gif': moving('GIF'),
    'moving.apng': moving('PNG'),
    'moving.webp': moving('WEBP'),
    'two.mpo': moving('MPO'),
    'window.dib': encoded('DIB'),
    'bits.pbm': b'P4\n24 20\n' + bytes(60),
}


@pytest.mark.parametrize('root', ['photos/{}', 'photos/train/{}'])
def test_images_under_any_ending_are_counted_trained_on_and_predicted(here, root, capsys):
    for name in ('cat', 'dog'):
        for ending, content in ODD.items():
            write(f'{root.format(name)}/{ending}', content=content)
        folder(root.format('').rstrip('/'), [name], 8)
        if 'train' in root:
            write(f'photos/val/{name}/1.jpg')
    main(['new', 'image-folder', 'photos'])
    found = listed()
    total = 40 + 2 * ('train' in root)
    assert f'photos: {total} images of 2 classes' in capsys.readouterr().out
    assert len({path for part in found.values() for path, _ in part}) == total
    assert all(path.split('/')[-2] == label for part in found.values() for path, label in part)
    options = 'train_cfg.max_epochs=1 train_cfg.val_interval=1'
    options += (
        ' train_dataloader.batch_size=8 train_dataloader.num_workers=0 val_dataloader.num_workers=0'
    )
    options += ' val_dataloader.persistent_workers=False'
    main(['train', 'photos.py', '--work-dir', 'work', '--cfg-options', *options.split()])
    write('photos/cat/7.cr2', content=b'II*\0\x10\0\0\0CR')
    capsys.readouterr()
    checkpoint = next(Path('work').glob('best_*.pth'))
    main(['predict', 'work/photos.py', str(checkpoint), root.format('cat'), '--out', 'found'])
    said = capsys.readouterr().out
    with open('found/predictions.csv', newline='') as file:
        predicted = {row['path'] for row in csv.DictReader(file)}
    assert predicted == {
        f'{root.format("cat")}/{name}' for name in os.listdir(root.format('cat'))
    } - {'photos/cat/7.cr2'}
    assert ("1 file was not read: camera RAW (1), first 'photos/cat/7.cr2'" in said) == (
        'train' not in root
    )


TURNED = ['cat', 'dog', 'emu']
#: Layouts by what wrote them: how to write them, and what is expected of each part, if it is given.
LAYOUTS = {
    'archive of Kaggle': (
        lambda: folder('photos/archive/Dataset', TURNED),
        dict(all=of_classes(*TURNED, root='photos/archive/Dataset/{}')),
    ),
    'Training and Testing': (
        lambda: [folder(f'photos/{part}', TURNED) for part in ('Training', 'Testing')],
        dict(
            all=of_classes(*TURNED, root='photos/Training/{}'),
            test=of_classes(*TURNED, root='photos/Testing/{}'),
        ),
    ),
    'seg_train twice': (
        lambda: [
            [folder(f'photos/seg_{part}/seg_{part}', TURNED) for part in ('train', 'test')],
            write('photos/seg_pred/seg_pred/1.jpg'),
        ],
        dict(
            all=of_classes(*TURNED, root='photos/seg_train/seg_train/{}'),
            test=of_classes(*TURNED, root='photos/seg_test/seg_test/{}'),
        ),
    ),
    'folders of Roboflow': (
        lambda: [
            [folder(f'photos/{part}', TURNED) for part in ('train', 'valid', 'test')],
            write('photos/README.roboflow.txt', content=b'words'),
        ],
        dict(
            train=of_classes(*TURNED, root='photos/train/{}'),
            val=of_classes(*TURNED, root='photos/valid/{}'),
            test=of_classes(*TURNED, root='photos/test/{}'),
        ),
    ),
    'test set without labels': (
        lambda: [
            [folder(f'photos/{part}', TURNED) for part in ('TRAIN', 'dev')],
            write('photos/test/1.jpg'),
        ],
        dict(
            train=of_classes(*TURNED, root='photos/TRAIN/{}'),
            val=of_classes(*TURNED, root='photos/dev/{}'),
        ),
    ),
    'directory tree of FiftyOne': (
        lambda: folder('photos', [*TURNED, '_unlabeled']),
        dict(all=of_classes(*TURNED)),
    ),
    'samples of Teachable Machine': (
        lambda: folder('photos', ['Class 1-samples', 'Class 2-samples']),
        dict(all=of_classes('Class 1-samples', 'Class 2-samples')),
    ),
    'years': (
        lambda: [folder(f'photos/{year}', ['cat', 'dog']) for year in (2023, 2024)],
        dict(
            all=sorted(
                file for year in (2023, 2024) for file in of_classes('cat', 'dog', root=f'photos/{year}/{{}}')
            )
        ),
    ),
    'words of parts as classes': (
        lambda: folder('photos', ['steam train', 'test tube', 'valid']),
        dict(all=of_classes('steam train', 'test tube', 'valid')),
    ),
    'a class called train': (lambda: folder('photos', ['bus', 'train']), dict(all=of_classes('bus', 'train'))),
    'spaces': (
        lambda: folder('photos', [' cat', 'cat', 'cat ', '\u3000cat']),
        dict(all=of_classes(' cat', 'cat', 'cat ', '\u3000cat')),
    ),
    'hidden folders': (
        lambda: [
            folder('photos', TURNED),
            folder('photos/cat', ['.ipynb_checkpoints', '@eaDir', '.thumbnails']),
            folder('photos', ['.ipynb_checkpoints', '__MACOSX', '@eaDir', '#recycle']),
        ],
        dict(all=of_classes(*TURNED)),
    ),
    'hidden folders in parts': (
        lambda: [
            folder(f'photos/{part}', [*TURNED, '.ipynb_checkpoints', 'cat/@eaDir'])
            for part in ('train', 'val')
        ],
        dict(
            train=of_classes(*TURNED, root='photos/train/{}'),
            val=of_classes(*TURNED, root='photos/val/{}'),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', LAYOUTS)
def test_every_layout_is_read_as_it_was_meant(name, capsys):
    write_layout, expected = LAYOUTS[name]
    write_layout()
    main(['new', 'image-folder', 'photos'])
    said = capsys.readouterr().out
    found = listed(parts=('train', 'val', 'test'))
    trained = expected.get('all') or expected['train'] + expected['val']
    assert (
        f'photos: {len(trained)} images of {len({label for _, label in trained})} classes' in said
    )
    if 'all' in expected:
        assert sorted(found['train'] + found['val']) == expected['all']
        assert {label for _, label in found['val']} == {label for _, label in expected['all']}
        assert 'sampled with seed 0' in said
    else:
        assert [found['train'], found['val']] == [expected['train'], expected['val']]
        assert 'sampled' not in said
    assert found['test'] == expected.get('test', found['val'])
    assert ('for `aft_mm test` only' in said) == ('test' in expected)
    unused = {
        'seg_train twice': 'seg_pred is not used',
        'test set without labels': 'test/ holds images outside of class folders: not used',
        'directory tree of FiftyOne': 'the 4 images of _unlabeled/ have no label',
        'years': '2023, 2024 hold the same folders, which are the classes',
    }
    assert unused.get(name, '') in said


def test_new_files_of_a_usual_folder_are_found_without_new(here):
    for part in ('train', 'val'):
        folder(f'photos/{part}', ['cat', 'dog'])
    main(['new', 'image-folder', 'photos'])
    assert not Path('photos_split').exists()
    write('photos/train/cat/new.jpg')
    assert ('photos/train/cat/new.jpg', 'cat') in listed()['train']


@pytest.mark.parametrize(
    ('write_more', 'message'),
    [
        (
            lambda: write('photos/emu/1.HEIC', content=HEIC),
            r"class 'emu' .* must hold images that are read; 1 file was not read: HEIC \(1\), first "
            "'emu/1.HEIC'; install pillow-heif or convert to JPEG or PNG",
        ),
        (lambda: write('photos/emu/1.nef', content=b'MM\0*'), r'camera RAW \(1\), first'),
        (lambda: write('photos/cover.jpg'), "got the image 'cover.jpg'"),
        (
            lambda: write('photos/1.jpg') or write('photos/labels.csv', content=b'1.jpg,cat'),
            "the image '1.jpg'; sort the images into folders by the labels of 'labels.csv'",
        ),
        (
            lambda: [
                shutil.rmtree('photos'),
                *(folder(f'photos/{name}', ['images', 'masks']) for name in ('cat', 'dog')),
            ],
            'got the folders images, masks in all of cat, dog',
        ),
        (
            lambda: [folder(f'photos/{name}', ['a', 'b']) for name in ('train', 'Train', 'val')],
            'must hold one folder for each part, got Train and train',
        ),
        (
            lambda: [folder('photos/train', ['a', 'b']), folder('photos/test', ['a', 'b', 'c'])],
            "class 'c' must have images in train and test",
        ),
        (
            lambda: [shutil.rmtree('photos'), write('photos/cat.zip', content=b'PK')],
            "got the archive 'cat.zip', which must be unpacked",
        ),
        (
            lambda: [shutil.rmtree('photos'), write('photos/cat/1.svg', content=b'<svg>')],
            r'got 1 file was not read: SVG \(1\)',
        ),
    ],
)
def test_folders_without_classes_are_refused(write_more, message, monkeypatch):
    monkeypatch.setattr(image_files, '_opens', lambda kind: False)
    folder('photos', ['cat', 'dog'])
    write_more()
    stops(message, main, ['new', 'image-folder', 'photos'])
    assert not Path('photos.py').exists()


LABELS = {
    'labels.csv': 'file,class\n' + ''.join(f'{i}.jpg,{"ab"[i % 2]}\n' for i in range(40)),
    # Decimals, in one file with decimal commas and a text of each image.
    'y.csv': 'file,y\n' + ''.join(f'{i}.jpg,{1 + i / 7:.3f}\n' for i in range(40)),
    'y.tsv': 'y\tfile\tname\n'
    + ''.join(f'{1 + i / 7:.3f}\t{i}.jpg\tn{i}\n'.replace('.', ',', 1) for i in range(40)),
    # Of classes with weights, and numbers of classes.
    'both.csv': 'file,y,class\n' + ''.join(f'{i}.jpg,{1 + i / 7:.3f},{i % 3}\n' for i in range(40)),
    'numbers.csv': 'file,class\n' + ''.join(f'{i}.jpg,{i % 4}.5\n' for i in range(40)),
}


@pytest.mark.parametrize(
    ('images', 'path', 'table', 'advice'),
    [
        ('images', 'labels.csv', 'labels.csv', "labels of 'labels.csv'"),
        ('images', 'labels/1.CSV', 'labels.csv', "labels of 'labels/1.CSV'"),
        ('a/img', 'a/y.csv', 'y.csv', "'a/y.csv' holds numbers such as 1.000: no config learns"),
        ('.', 'y.tsv', 'y.tsv', "'y.tsv' holds numbers such as 1,000: no config learns"),
        ('train/images', 'train/both.csv', 'both.csv', "labels of 'train/both.csv'"),
        ('images', 'numbers.csv', 'numbers.csv', "labels of 'numbers.csv'"),
    ],
)
def test_a_table_of_labels_is_named_wherever_it_is(images, path, table, advice):
    write(*(f'photos/{images}/{index}.jpg' for index in range(3)))
    write('photos/sidecar.json', 'photos/.hidden/labels.csv', content=b'{}')
    write(f'photos/{path}', content=LABELS[table].encode('utf-16' if '/1' in path else 'utf-8'))
    stops(f'{advice}.*docs/other_data.md', main, ['new', 'image-folder', 'photos'])
    if images == 'images':
        above = advice.replace("'labels", "'../labels").replace("'num", "'../num")
        stops(above, main, ['new', 'image-folder', 'photos/images'])


def test_a_class_in_two_unicode_forms_is_refused():
    composed, decomposed = (unicodedata.normalize(form, 'Äpfel') for form in ('NFC', 'NFD'))
    for root, (one, other) in {
        'parts': ('train', 'val'),
        'years': ('2023', '2024'),
        'one': ('', ''),
    }.items():
        folder(f'{root}/{one}', [composed, 'dog'])
        folder(f'{root}/{other}', [decomposed, 'dog'])
        message = (
            r"must have one Unicode form, got '(\\xc4|A\\u0308)pfel' in .* and '(\\xc4|A\\u0308)pf"
        )
        stops(message, main, ['new', 'image-folder', root])


@pytest.mark.parametrize(
    ('numbers', 'share'), [((45, 4, 4), 85), ((20, 4), 83), ((20, 20, 2), None), ((12, 4), None)]
)
def test_a_strong_imbalance_of_classes_is_named(numbers, share, capsys):
    for name, number in zip('abc', numbers, strict=False):
        folder('photos', [name], number)
    main(['new', 'image-folder', 'photos'])
    notes = [line for line in capsys.readouterr().out.splitlines() if 'imbalanced' in line]
    expected = f"imbalanced classes: {share} % of the images are of 'a', .* class_weight"
    assert [bool(re.match(expected, note)) for note in notes] == [True] * (share is not None)


#: First bytes, endings, and the kind of the picture; images that are read have none.
FILES = {
    'a.heic': (HEIC, 'HEIC'),
    'b': (HEIC, 'HEIC'),
    'c.avif': (b'\0\0\0\x20ftypavif' + bytes(40), 'AVIF'),
    'd.heif': (b'\0\0\0\x20ftypmif1\0\0\0\0mif1avif' + bytes(40), 'AVIF'),
    'e.jxl': (b'\xff\x0a' + bytes(40), 'JPEG XL'),
    'f.jp2': (b'\0\0\0\x0cjP  \r\n\x87\n', 'JPEG 2000'),
    'g.CR2': (b'II*\0\x10\0\0\0CR', 'camera RAW'),
    'h.dng': (encoded('TIFF'), 'camera RAW'),
    'i.psd': (b'8BPS\0\1', 'PSD'),
    'j.svg': (b'<?xml version="1.0"?>\n<svg xmlns="">', 'SVG'),
    'k.dcm': (bytes(128) + b'DICM', 'DICOM'),
    'l.scan': (encoded('TIFF'), 'TIFF as .scan'),
    'm.jpg~': (encoded(), 'JPEG as .jpg~'),
    'n.jpg.crdownload': (encoded(), 'JPEG as .crdownload'),
    'o.tga': (b'\0\0\2', 'TGA'),
    'p.heic': (b'', 'HEIC'),
    'q': (encoded('BMP'), None),
    'r.png.jpeg': (b'damaged', None),
    's.tga': (encoded('GIF'), None),
}
OTHERS = {
    'README': b'BMW and P6 words',
    'Thumbs.db': b'\xd0\xcf\x11\xe0' + encoded(),
    'labels.xml': b'<?xml version="1.0"?><annotation><svg/></annotation>',
    'film.mp4': b'\0\0\0\x20ftypisom',
    'page.html': b'<!DOCTYPE html><svg>',
    '.hidden': encoded(),
}


def test_pictures_that_are_not_read_are_counted_and_named(here, monkeypatch, capsys):
    monkeypatch.setattr(image_files, '_opens', lambda kind: False)
    for name, (content, _) in FILES.items():
        write(f'a/{name}', content=content)
    for name, content in OTHERS.items():
        write(f'a/{name}', content=content)
    os.mkfifo('a/pipe')
    found, others = find_images(Path('a'))
    assert found == [name for name, (_, kind) in FILES.items() if kind is None]
    assert others == {name: kind for name, (_, kind) in FILES.items() if kind}
    said = not_read(others)
    assert said.startswith(
        '16 files were not read: HEIC (3), AVIF (2), camera RAW (2), JPEG XL (1)'
    )
    advice = 'install Pillow 11.3 or later or install pillow-heif or convert to JPEG or PNG'
    assert said.endswith(f"first 'a.heic'; {advice}")
    with pytest.raises(
        UnusableFile, match="'a/b' cannot be read: it is HEIC; install pillow-heif or"
    ):
        read_rgb('a/b')
    with pytest.raises(
        UnusableFile, match="'a/i.psd' of the data set cannot be read: it is PSD; conv"
    ):
        check_image('a/i.psd', 'data')
    ImageFolder('a')
    assert "data_root 'a': 16 files were not read: HEIC (3)" in ''.join(capsys.readouterr())


def test_a_class_that_mmpretrain_passes_over_stops_a_training(here, monkeypatch, capsys):
    monkeypatch.setattr(image_files, '_opens', lambda kind: False)
    for part in ('train', 'val'):
        folder(f'photos/{part}', ['cat', 'dog'])
    main(['new', 'image-folder', 'photos'])
    write('photos/train/cat/1.HEIC', content=HEIC)
    write('photos/train/cat/no ending')
    listed()
    expected = "2 files were not read: HEIC (1), without an ending (1), first 'cat/1.HEIC'"
    assert expected in ''.join(capsys.readouterr())
    write('photos/train/emu/1.HEIC', content=HEIC)
    message = (
        "train_dataloader.dataset reads .*train', which must hold images of 'emu' that are read"
    )
    stops(message, main, ['train', 'photos.py'])


class Heif(ImageFile.ImageFile):
    """The pixels after the first 32 bytes, as a stand-in for libheif."""

    format = 'HEIF'

    def _open(self):
        self._mode, self._size = 'RGB', (24, 20)
        self.tile = [('raw', (0, 0, 24, 20), 32, ('RGB', 0, 1))]


def test_heic_is_read_where_pillow_heif_is_installed(here, monkeypatch):
    opener = SimpleNamespace(register_heif_opener=lambda: Image.register_open('HEIF', Heif))
    monkeypatch.setitem(sys.modules, 'pillow_heif', opener)
    opener.__spec__ = ModuleSpec('pillow_heif', None)
    image_files._opens.cache_clear()
    monkeypatch.setattr(Image, 'OPEN', dict(Image.OPEN))
    pixels = RNG.integers(0, 256, (20, 24, 3), dtype=np.uint8)
    for name in ('cat/1.HEIC', 'cat/2', 'dog/1.heif', 'dog/2.jpg'):
        # Copies are in no other part.
        write(f'photos/{name}', content=HEIC[:32] + pixels.tobytes() + name.encode())
        check_image(f'photos/{name}')
        assert image_size(f'photos/{name}') == (24, 20)
        for image in (read_rgb(f'photos/{name}')[0], mmcv.imread(f'photos/{name}')[..., ::-1]):
            np.testing.assert_array_equal(image, pixels)
    main(['new', 'image-folder', 'photos'])
    assert sum(map(len, listed().values())) == 4
    # Its bounds are those of the other formats.
    monkeypatch.setattr(image_files, '_PIXELS', 100)
    monkeypatch.setattr(image_files, '_PIXELS_PER_BYTE', 0)
    with pytest.raises(UnusableFile, match='has 24 x 20 pixels in a file that is too small'):
        check_image('photos/cat/2')
    image_files._opens.cache_clear()


@NEEDS_AVIF
@pytest.mark.parametrize('turn', range(1, 9))
def test_avif_is_read_alike_and_turned(here, turn):
    pixels = np.kron(
        RNG.integers(0, 256, (3, 2, 3), dtype=np.uint8), np.ones((16, 16, 1), np.uint8)
    )
    for name, options in {'a.png': {}, 'a.avif': dict(quality=100, subsampling='4:4:4')}.items():
        exif = Image.Exif()
        exif[0x0112] = turn
        Image.fromarray(pixels).save(name, exif=exif, **options)
    expected = read_rgb('a.png')[0]
    found = read_rgb('a.avif')[0]
    np.testing.assert_allclose(found.astype(int), expected, atol=6)
    assert image_size('a.avif') == image_size('a.png')
    np.testing.assert_array_equal(mmcv.imread('a.avif')[..., ::-1], found)
    check_image('a.avif')
    Path('a.avif').rename('a')
    Path('a.png').unlink()
    assert find_images(Path()) == (['a'], {})


def test_copies_are_found_by_their_bytes(here):
    long = RNG.bytes(40_000)
    contents = [b'a', b'b', b'a', b'', b'', long, long[:-1] + b'x', long, long + b'a', encoded()]
    for index, content in enumerate(contents):
        write(f'{index}', content=content)
    paths = [Path(str(index)) for index in range(len(contents))]
    assert copies(paths) == [contents.index(content) for content in contents]
    assert copies([]) == []


def test_copies_come_to_one_part_and_the_share_stays():
    labels = np.repeat(['a', 'b', 'c'], [60, 40, 2]).tolist()
    groups = [index // 2 if index < 100 else index for index in range(102)]
    groups[60] = groups[0]  # of another label, with its first item
    for seed in range(20):
        parts = split_by_label(range(102), labels, 0.3, seed, groups)
        assert sorted(parts['train'] + parts['val']) == list(range(102))
        assert not {groups[i] for i in parts['train']} & {groups[i] for i in parts['val']}
        number = [sum(labels[i] == label for i in parts['val']) for label in 'abc']
        assert 16 <= number[0] <= 19 and 11 <= number[1] <= 13 and number[2] == 1
    # One that is most of a label stays in training; alone it is split.
    parts = split_by_label('abcde', [0] * 5, 0.2, 0, [1, 1, 1, 2, 1])
    assert parts == {'train': [*'abce'], 'val': ['d']}
    assert len(split_by_label('ab', [0, 0], 0.5, 0, [1, 1])['val']) == 1


def test_copies_are_named_and_stay_out_of_the_validation(here, capsys):
    folder('photos', ['cat', 'dog'], 10)
    for name in ('cat', 'dog'):
        for index in range(10):
            shutil.copy(f'photos/{name}/{index}.jpg', f'photos/{name}/{index} (copy).jpg')
    shutil.copy('photos/dog/3.jpg', 'photos/cat/3 too.jpg')
    main(['new', 'image-folder', 'photos'])
    said = capsys.readouterr().out
    assert "21 files are copies of others, first 'cat/0.jpg' of 'cat/0 (copy).jpg'" in said
    expected = (
        "2 files are copies of files of another class, first 'dog/3 (copy).jpg' of 'cat/3 too.jpg'"
    )
    assert f'{expected}; one of the labels is wrong; both are used' in said
    assert 'random weights; for comparison, Imagenette: 10 classes of 30 photos each' in said
    content = {
        part: {Path(path).read_bytes() for path, _ in found} for part, found in listed().items()
    }
    assert not content['train'] & content['val'] and len(content['val']) == 4
    main(['split', 'photos', 'parts'])
    assert '21 files are copies of others' in capsys.readouterr().out
    content = [
        {path.read_bytes() for path in Path('parts', part).rglob('*.*')}
        for part in ('train', 'val')
    ]
    assert not content[0] & content[1] and len(content[0] | content[1]) == 20
    shutil.copy('parts/train/cat/0.jpg', 'parts/val/cat/again.jpg')
    main(['new', 'image-folder', 'parts'])
    assert (
        "file is a copy of files of another part, first 'val/cat/again.jpg'"
        in capsys.readouterr().out
    )
    for name in ('cat', 'dog', 'emu'):
        for index in range(4):
            write(f'same/{name}/{index}.jpg', content=Path(f'photos/cat/{index}.jpg').read_bytes())
    main(['new', 'image-folder', 'same'])
    assert '8 files are copies of files of another class' in capsys.readouterr().out
    found = listed('same')
    assert [len(found[part]) for part in ('train', 'val')] == [9, 3]
    write('few/cat/1.jpg', 'few/cat/2.jpg', content=encoded())
    folder('few', ['dog'])
    message = "class 'cat' must have at least 2 images that differ, one for each part, got 1"
    stops(message, main, ['new', 'image-folder', 'few'])


def test_no_class_is_lost_to_the_validation():
    labels = [*'aaaaab', 'b']
    images = [Labelled(str(index), 'all', label, '') for index, label in enumerate(labels)]
    outcomes = set()
    for seed in range(100):
        try:
            parts = split_classes(images, 0.5, seed, [0, 1, 2, 3, 4, 0, 1])
            outcomes.add(''.join(sorted({image.label for image in parts['train']})))
        except UserError as error:
            outcomes.add(str(error)[:40])
    assert outcomes == {'ab', "the class 'b' must keep images for train"}


def test_copies_of_boxes_and_masks_have_no_label():
    assert list(copy_notes('abc', [0, 0, 2])) == [
        "1 file is a copy of others, first 'b' of 'a'; the copies of a file come to one part"
    ]
    assert not list(copy_notes('abc', [0, 1, 2], [1, 2, 3], ['train', 'val', 'val']))


def test_a_folder_is_split_by_its_classes_whatever_is_around_them(here):
    folder('data/archive', ['cat', 'dog'])
    write('data/archive/cat/no ending', content=encoded('PNG'))
    write('data/archive/cat/.ipynb_checkpoints/1.jpg')
    main(['split', 'data', 'parts'])
    files = {str(path.relative_to('parts')).split('/', 1)[1] for path in Path('parts').rglob('*.*')}
    assert files == {f'{name}/{i}.jpg' for name in ('cat', 'dog') for i in range(4)} | {
        'cat/no ending.jpg'
    }
    folder('data/archive/train', ['a'])
    stops(
        'must hold a folder of images for each class',
        main,
        ['split', 'parts/val/cat', 'x'],
    )
    stops(
        'must hold no parts, got train and val; `aft_mm new image-folder` reads them',
        main,
        ['split', 'parts', 'again'],
    )


def test_predictors_say_what_they_pass_over(here, monkeypatch, capsys):
    monkeypatch.setattr(image_files, '_opens', lambda kind: False)
    write('a/1.HEIC', content=HEIC)
    message = r"PATH 'a' must hold images, got 1 file was not read: HEIC \(1\), first 'a/1.HEIC'; "
    refuses_input(message, image_files_of, ['a'])
    refuses_input(r'must be folders with images .*HEIC \(1\)', ImageClassifier._as_list, None, 'a')
    write('a/2.jpg')
    assert ImageClassifier._as_list(None, 'a') == [Path('a/2.jpg')]
    assert "folder 'a': 1 file was not read: HEIC (1)" in ''.join(capsys.readouterr())
