"""Masks of the user: layouts, numbers, sizes and what is ignored."""

import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from mmengine.registry import DATASETS, init_default_scope
from PIL import Image

from aft_mm.analysis.browse_dataset import draw_segments
from aft_mm.analysis.compare_runs import costs
from aft_mm.analysis.model_complexity import analyse_config
from aft_mm.apis.images import palette_of
from aft_mm.cli.main import main
from aft_mm.config.masks import check_masks, input_size
from aft_mm.config.reading import check_data, read_config
from aft_mm.convert import own_data
from aft_mm.images import read_rgb
from aft_mm.visualization.figures import class_colours

from .errors import stops
from .helpers import command, nightly, save_picture

pytestmark = pytest.mark.usefixtures('here')
RNG = np.random.default_rng(0)
number_masks = command('number-masks')


def save(images, masks, values=(0, 1), number=6, size=(64, 96)):
    """Save images that differ and are bright where their masks are not of the first value or colour."""
    for index in range(number):
        stripes = np.repeat(np.arange(size[1])[:, None] // 8, size[0], axis=1)
        places = (stripes + index) % len(values)
        for path, pixels in (
            (images.format(index), np.dstack([(255 - 8 * index) * (places > 0)] * 3)),
            (masks.format(index), np.array(values)[places]),
        ):
            save_picture(path, pixels)


def read():
    pytest.importorskip('mmseg')
    return read_config('data.py')


def data_set(config, part):
    init_default_scope('mmseg')
    return DATASETS.build(config[f'{part}_dataloader'].dataset)


def matching(config, part):
    """Return how many samples of a part there are, having checked that masks fit images."""
    dataset = data_set(config, part)
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        shown = np.asarray(Image.open(info['img_path']).convert('L')) > 127
        mask = np.asarray(Image.open(info['seg_map_path']))
        np.testing.assert_array_equal(shown, mask > 0)
        assert dataset[index]['inputs'].shape[0] == 3
    return len(dataset)


RED, GREEN, BLACK, WHITE, VOID = (
    *((255, 0, 0), (0, 128, 0), (0, 0, 0), (255, 255, 255), (224, 224, 192)),
)
LAYOUTS = {
    'plain': ('images/{}.jpg', 'masks/{}.png'),
    'same endings': ('images/{}.png', 'masks/{}.png'),
    'Supervisely': ('img/{}.jpg', 'masks_machine/{}.jpg.png'),
    'VOC': ('JPEGImages/a {}.jpg', 'SegmentationClass/a {}.png'),
    'Carvana': ('train/{}.jpg', 'train_masks/{}_mask.gif'),
    'Roboflow': ('PART/{}_jpg.rf.a1.jpg', 'PART/{}_jpg.rf.a1_mask.png'),
    'next to each other': ('PART/x/{}.png', 'PART/x/{}_mask.png'),
    'SegNet': ('PART/{}.JPG', 'PARTannot/{}.png'),
    'CamVid': ('PART/{}.png', 'PART_labels/{}_L.png'),
    'ADE20K': ('images/PART/{}.jpg', 'annotations/PART/{}.png'),
    'folders in parts': ('PART/images/{}.tif', 'PART/masks/{}.tif'),
}


FIRST = 'plain', 'VOC', 'Roboflow', 'CamVid', 'ADE20K'


@pytest.mark.parametrize('name', nightly(LAYOUTS, lambda name: name not in FIRST))
def test_layouts_of_common_tools_are_found(name, capsys):
    images, masks = (f'data/{path}' for path in LAYOUTS[name])
    given = 'PART' in images
    for part in ('train', 'valid') if given else ('',):
        save(images.replace('PART', part), masks.replace('PART', part))
    # One more, without a mask.
    image = images.replace('PART', 'train').format(9)
    save(image, 'mask.png', number=1)
    main(['new', 'masks', 'data'])
    config = read()
    check_data(config, 'train', 'val')
    assert [matching(config, part) for part in ('train', 'val')] == ([6, 6] if given else [5, 1])
    shown = capsys.readouterr().out
    assert '1 of 7 images in' in shown and f'left out: {Path(image).name}' in shown.replace(
        'x/', ''
    )
    assert ('sampled with seed' in shown) is not given


def test_each_image_has_one_mask(here):
    """A mask belongs to the longest name; others of an image, such as coloured ones, are not used."""
    for name in ('a', 'a.b', 'c'):
        save(f'data/images/{name}.jpg', f'data/masks/{name}.png', number=1)
        save('other.jpg', f'data/masks/{name}_color.png', (BLACK, RED), number=1)
    Path('data/masks/a.png').unlink()
    Path('data/masks/a_color.png').unlink()
    found = own_data.masks(here / 'data', 0.5, 0)
    assert sorted((found.files['train.txt'] + found.files['val.txt']).split()) == ['a.b', 'c']
    notes = '\n'.join(found.notes)
    assert '1 of 3 images' in notes and 'left out: a.jpg' in notes
    assert '2 of 4 masks' in notes and 'not used: a.b_color.png, c_color.png' in notes


def test_smoothed_masks_are_noticed(capsys):
    save('a/{}.jpg', 'colours/{}.png', (BLACK, RED), number=1, size=(640, 640))
    pixels = numbers('colours/0.png').copy()
    pixels[0, :40] = np.arange(120).reshape(40, 3)
    Image.fromarray(pixels).save('colours/0.png')
    number_masks(['colours', 'out/masks'])
    assert '40 of 42 colours have less than 0.1 % of the pixels' in capsys.readouterr().out


def test_lists_of_voc_divide_the_masks(capsys):
    save('data/JPEGImages/{}.jpg', 'data/SegmentationClass/{}.png', (0, 1, 255))
    lists = Path('data/ImageSets/Segmentation')
    lists.mkdir(parents=True)
    for part, names in dict(train='0 1 2 9', val='3 4', trainval='0 1 2 3 4').items():
        (lists / f'{part}.txt').write_text('\n'.join(names.split()))
    main(['new', 'masks', 'data'])
    config = read()
    assert [len(data_set(config, part)) for part in ('train', 'val')] == [3, 2]
    assert '1 of 4 images of' in capsys.readouterr().out


def test_names_of_classes_are_found_with_the_masks(here):
    for part in ('train', 'valid'):
        save(f'data/{part}/{{}}.jpg', f'data/{part}/{{}}_mask.png', (0, 1, 2))
        names = 'Pixel Value, Class\n0, background\n1, cat\n2, dog\n'
        Path(f'data/{part}/_classes.csv').write_text(names)
    assert list(own_data.masks(here / 'data', 0.2, 0).counts) == ['background', 'cat', 'dog']
    for part, form in (('train', 'NFC'), ('valid', 'NFD')):  # macOS decomposes letters
        text = unicodedata.normalize(form, names.replace('dog', 'Äpfel'))
        Path(f'data/{part}/_classes.csv').write_text(text, encoding='utf-8')
    assert [*own_data.masks(here / 'data', 0.2, 0).counts][2:] == ['\xc4pfel']
    Path('data/valid/_classes.csv').write_text(names.replace('cat', 'cow'))
    stops("_classes.csv' and '.*_classes.csv' must have the same", main, ['new', 'masks', 'data'])


def test_a_class_of_one_part_is_reported(here):
    save('data/train/{}.jpg', 'data/train_masks/{}.png', (0, 1))
    save('data/val/{}.jpg', 'data/val_masks/{}.png', (1, 2))
    notes = own_data.masks(here / 'data', 0.2, 0).notes
    assert 'classes without a pixel in train: class_2' in notes
    assert 'classes without a pixel in val: class_0' in notes


def test_several_endings_are_linked_under_one(capsys):
    for number, ending in enumerate(('jpg', 'JPG', 'png', 'jpg', 'webp', 'bmp')):
        save(f'data/images/sub/{number}.{ending}', f'data/masks/sub/{number}.png', number=1)
    main(['new', 'masks', 'data', '--val', '0.3'])
    config = read()
    check_data(config, 'train', 'val')
    assert [matching(config, part) for part in ('train', 'val')] == [4, 2]
    assert 'files end in .JPG, .bmp, .jpg, .png, .webp' in capsys.readouterr().out
    save('data/images/sub/0.webp', 'data/masks/sub/0.png', number=1)
    message = 'sub/0.png. is the mask of sub/0.jpg and sub/0.webp; images must have names'
    stops(message, main, ['new', 'masks', 'data', '--out', 'b.py'])


@pytest.mark.parametrize(
    ('sizes', 'scale'),
    [
        ([(1920, 1440)] * 6, (480, 360)),
        *nightly(
            [
                ([(1440, 1920)] * 4 + [(1920, 1440)] * 2, (360, 480)),
                ([(300, 290)] * 6, (300, 290)),
                ([(2000, 200)] * 6, (1310, 131)),
            ]
        ),
        ([(20, 20)] * 6, (256, 256)),
        ([(8, 3000)] * 6, (13, 4875)),
    ],
)
def test_training_and_test_scale_images_alike(sizes, scale, capsys):
    for number, size in enumerate(sizes):
        save(f'data/images/{number}.png', f'data/masks/{number}.png', number=1, size=size)
    main(['new', 'masks', 'data'])
    config = read()
    assert input_size(config) == scale[::-1]
    assert f'scaled to fit {scale[0]} x {scale[1]} pixels' in capsys.readouterr().out
    if min(scale) < 100:
        return
    training, test = data_set(config, 'train'), data_set(config, 'val')
    for index in range(len(test)):
        sample = test[index]
        assert {*sample['inputs'].shape[1:]} == {*scale}
        # The annotations, and so the predictions, keep their size.
        path = test.get_data_info(index)['seg_map_path']
        assert sample['data_samples'].gt_sem_seg.shape == Image.open(path).size[::-1]
    for index in range(len(training)):
        info = training.get_data_info(index)
        for step in training.pipeline.transforms[:3]:
            info = step(info)
        assert 0.74 < max(info['img_shape']) / max(scale) < 1.51


def test_of_white_and_black_neither_is_ignored_in_silence(here, capsys):
    save('data/images/{}.jpg', 'data/masks/{}.png', (0, 255))
    words = ['new', 'masks', 'data']
    advice = 'number-masks .*data data_numbers` writes numbers for 2 classes'
    stops(f'got 0; 255, in 6 masks, is ignored.*{advice}', main, words)
    # With two names, all of the second class would be ignored.
    Path('data/classes.txt').write_text('background\ncat\n')
    stops(f'numbers of 2 classes, got 0; 255, in 6 masks.*{advice}', main, words)
    save('data/images/{}.jpg', 'data/masks/{}.png', (0, 1, 255))
    main(words)
    assert '255 is ignored: 33.3 % of the pixels, in 6 of 6 masks' in capsys.readouterr().out
    Path('data/classes.txt').write_text(''.join(f'class {n}\n' for n in range(256)))
    stops("classes.txt' must name at most 255 classes.* got 256", main, [*words, '--out', 'b.py'])


@pytest.mark.parametrize(
    ('change', 'values', 'warning'),
    [
        ({}, (0, 1, 2, 255), ''),
        (dict(ignore_index=1), (0, 1, 2), "33.3 % .* are 1, .* as ignore_index.* class 'b'"),
        (dict(reduce_zero_label=True), (0, 1, 2, 3), '25.0 % .* are 0, .* by reduce_zero_label'),
        ({}, (0, 255), '50.0 % .* are 255, .* all others are of one class'),
    ],
)
def test_an_ignored_class_is_reported_before_a_training(change, values, warning, here):
    save('data/images/{}.jpg', 'data/masks/{}.png', values)
    dataset = dict(
        data_prefix=dict(img_path='images', seg_map_path='masks'),
        metainfo=dict(classes=('a', 'b', 'c')),
        **change,
    )
    found = check_masks('train', str(here / 'data'), dataset)
    assert re.search(warning, found) if warning else found == ''


def numbers(path):
    return np.asarray(Image.open(path))


def test_masks_of_several_folders_get_the_same_numbers(capsys):
    save('a/{}.jpg', 'train/{}.png', (BLACK, RED, RED, GREEN))
    save('a/{}.jpg', 'val/{}.png', (GREEN, RED))
    number_masks(['train', 'val', 'out'])
    assert Path('out/classes.txt').read_text() == '#ff0000\n#008000\n#000000\n'
    shown = capsys.readouterr().out
    assert 'val lacks 1 of 3: #000000' in shown and 'train lacks' not in shown
    for part in ('train', 'val'):
        for path in Path(part).iterdir():
            expected = np.select(
                [(numbers(path) == colour).all(-1) for colour in (RED, GREEN)], [0, 1], 2
            )
            np.testing.assert_array_equal(numbers(f'out/{part}/{path.name}'), expected)
    # Converted apart, the second reads the classes of the first, also with names.
    number_masks(['train', 'apart/train_masks'])
    text = '#ff0000 cat\n#008000 grass\n#000000\n'
    Path('apart/classes.txt').write_text(text)
    number_masks(['val', 'apart/val_masks'])
    assert Path('apart/classes.txt').read_text() == text
    number_masks(['val', 'other/val', '--classes', 'apart/classes.txt'])
    for folder in ('apart/val_masks', 'other/val'):
        np.testing.assert_array_equal(numbers(f'{folder}/0.png'), numbers('out/val/0.png'))
    assert Path('other/classes.txt').read_text() == text
    save('a/{}.jpg', 'new/{}.png', (GREEN, VOID), number=1)
    message = "'new/0.png' has the colour #e0e0c0, which 'apart/classes.txt' does not list; add"
    stops(message, number_masks, ['new', 'apart/new_masks'])
    number_masks(['new', 'apart/new_masks', '--ignore', '#E0E0C0'])
    assert set(np.unique(numbers('apart/new_masks/0.png'))) == {1, 255}
    assert not Path('apart/new').exists()


@pytest.mark.parametrize('mode', ['L', 'P', 'RGB'])
def test_numbers_from_0_are_kept(mode, capsys):
    save('a/{}.jpg', 'grey/{}.png', (0, 1, 1, 1, 2, 255))
    colours = RNG.integers(0, 256, 768, np.uint8).tobytes()
    for path in Path('grey').iterdir():
        if mode == 'P':
            Image.open(path).convert('P').save(path)  # a palette of greys
            palette = Image.fromarray(numbers(path))
            palette.putpalette(colours)
            palette.save(path)
        else:
            Image.open(path).convert(mode).save(path)
    before = numbers('grey/3.png') if mode != 'RGB' else numbers('grey/3.png')[..., 0]
    number_masks(['grey', 'out/masks'])
    np.testing.assert_array_equal(numbers('out/masks/3.png'), before)
    assert 'have class numbers already' in capsys.readouterr().out
    assert Path('out/classes.txt').read_text() == 'class_0\nclass_1\nclass_2\n'
    # With names and no colours, white is no class in silence.
    save('a/{}.jpg', 'white/{}.png', (0, 255))
    Path('named').mkdir()
    Path('named/classes.txt').write_text('background\ncat\n')
    message = (
        r"colour #ffffff \(value 255\), which 'named/classes.txt' does not list; add a line such"
    )
    stops(message, number_masks, ['white', 'named/masks'])


def test_masks_with_a_palette_each_go_by_colour(capsys):
    save('data/images/{}.jpg', 'data/masks/{}.png', (BLACK, RED, GREEN))
    for path in Path('data/masks').iterdir():
        order = np.roll([BLACK, RED, GREEN], int(path.stem), axis=0)
        index = (numbers(path)[:, :, None] == order).all(-1).argmax(-1).astype(np.uint8)
        mask = Image.fromarray(index, 'P')
        mask.putpalette(order.flatten().tolist())
        mask.save(path)
    before = {
        path.name: np.asarray(Image.open(path).convert('RGB'))
        for path in Path('data/masks').iterdir()
    }
    message = "masks must have one palette, or .*, got two colours of the value 0 in '.*0.png' and"
    stops(message, main, ['new', 'masks', 'data'])
    number_masks(['data', 'numbers'])
    assert 'have class numbers already' not in capsys.readouterr().out
    colours = Path('numbers/classes.txt').read_text().split()
    assert len(colours) == 3
    for name, pixels in before.items():
        found = np.array([list(bytes.fromhex(colour[1:])) for colour in colours])
        np.testing.assert_array_equal(found[numbers(f'numbers/masks/{name}')], pixels)
    # With names, the values count, as those of two masks do that differ in what is ignored.
    Path('data/classes.txt').write_text('a\nb\nc\n')
    main(['new', 'masks', 'data', '--out', 'named.py'])
    Path('data/classes.txt').write_text('#ff0000 a\n#000000 b\n#008000 c\n')
    message = "mask '.*0.png' must have the colour #ff0000 of '.*classes.txt' for the value 0, got"
    stops(message, main, ['new', 'masks', 'data'])
    Path('data/classes.txt').unlink()
    for path in Path('data/masks').iterdir():
        mask = Image.fromarray(np.arange(96 * 64, dtype=np.uint8).reshape(96, 64) % 4, 'P')
        mask = mask.point([0, 1, 2, 255] + [0] * 252)
        palette = [*BLACK, *RED, *GREEN, *([VOID, WHITE][int(path.stem) % 2] * 253)]
        mask.putpalette(palette)
        (mask if path.stem != '4' else Image.fromarray(np.asarray(mask)).convert('P')).save(path)
    main(['new', 'masks', 'data', '--out', 'values.py'])


@pytest.mark.parametrize('turn', [1, 3, 6])
def test_masks_that_exif_turns_are_turned(turn, capsys):
    save('data/images/{}.png', 'data/masks/{}.png', (0, 1, 2))
    exif = Image.Exif()
    exif[0x0112] = turn
    for path in Path('data').glob('*/*.png'):
        pixels = np.random.default_rng(0).integers(0, 3, (96, 64), np.uint8)
        if path.parent.name == 'images':
            pixels = np.dstack([100 * pixels] * 3)
        Image.fromarray(pixels).save(path, exif=exif)
    if turn > 1:
        message = f'must not be turned by EXIF, got orientation {turn}; `aft_mm number-masks'
        stops(message, main, ['new', 'masks', 'data'])
    number_masks(['data', 'numbers'])
    main(['new', 'masks', 'numbers', '--out', 'data.py'])
    shown = capsys.readouterr().out
    assert ('EXIF turns 6 photos, such as' in shown) == (turn == 3)
    dataset = data_set(read(), 'train')
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        image, mask = read_rgb(info['img_path'])[0], numbers(info['seg_map_path'])
        np.testing.assert_array_equal(image[..., 0], 100 * mask)


def test_transparent_masks_are_laid_on_white_if_nothing_else_is_white(capsys):
    save('a/{}.jpg', 'clear/{}.png', ((0, 0, 0, 0), (*RED, 255)), number=2)
    number_masks(['clear', 'out/masks'])
    assert sorted(Path('out/classes.txt').read_text().split()) == ['#ff0000', '#ffffff']
    save('a/{}.jpg', 'white/{}.png', ((0, 0, 0, 0), (*WHITE, 255)), number=1)
    save('a/{}.jpg', 'clear/white{}.png', (RED, WHITE), number=1)
    message = 'masks must not have transparent pixels, which become white, and white ones, got'
    for name in ('white', 'clear'):
        stops(message, number_masks, [name, f'other/{name}'])


def test_doubtful_pairs_of_images_and_masks_are_said(here, capsys):
    save('data/images/{}.jpg', 'data/masks/{}.png', (0, 1))
    Path('data/masks/2.png').rename('data/masks/2_east.png')
    Path('data/classes.txt').write_text('cat\ncat\n')
    notes = '\n'.join(own_data.masks(here / 'data', 0.2, 0).notes)
    message = "1 of 6 masks have another ending than most, first '2_east.png', which is taken for"
    assert message in notes
    assert 'classes of equal names stay apart: cat' in notes
    Path('data/masks/2_east.png').rename('data/masks/2.png')
    lists = Path('data/ImageSets/Segmentation')
    lists.mkdir(parents=True)
    for part, names in dict(train='0 1 2 3', val='3 4 5').items():
        (lists / f'{part}.txt').write_text('\n'.join(names.split()))
    found = own_data.masks(here / 'data', 0.2, 0)
    assert found.parts == dict(train=4, val=3)
    assert "1 file is a copy of files of another part, first '" in '\n'.join(found.notes)
    for options in (dict(format='JPEG'), dict(format='TIFF', compression='jpeg')):
        Image.fromarray(numbers('data/masks/0.png')).save('data/masks/1.png', **options)
        stops("mask '.*/1.png' must not be a JPEG, which", main, ['new', 'masks', 'data'])


def test_a_value_or_a_colour_is_ignored(capsys):
    save('a/{}.jpg', 'grey/{}.png', (0, 0, 7, 200))
    number_masks(['grey', 'out/masks', '--ignore', '200'])
    np.testing.assert_array_equal(
        np.unique(numbers('out/masks/0.png'), return_counts=True),
        [[0, 1, 255], [3072, 1536, 1536]],
    )
    assert '255 ignored  25.00 %' in capsys.readouterr().out
    stops('--ignore must be a colour', number_masks, ['grey', 'b', '--ignore', 'void'])


@pytest.mark.parametrize('parts', [('',), ('train', 'val')])
def test_data_in_colours_become_data_for_new(parts, capsys):
    for part in parts:
        images, masks = (part, f'{part}_masks') if part else ('images', 'masks')
        save(f'data/{images}/{{}}.jpg', f'data/{masks}/{{}}.png', (BLACK, WHITE))
    stops("got mode 'RGB'; `aft_mm number-masks", main, ['new', 'masks', 'data'])
    number_masks(['data', 'my numbers'])
    assert "next: aft_mm new masks 'my numbers'" in capsys.readouterr().out
    main(['new', 'masks', 'my numbers', '--out', 'data.py'])
    config = read()
    check_data(config, 'train', 'val')
    assert config.classes == ['#000000', '#ffffff']
    assert [matching(config, part) for part in ('train', 'val')] == ([6, 6] if parts[0] else [5, 1])


def test_the_label_map_of_cvat_gives_numbers_and_names(here):
    save('data/JPEGImages/{}.jpg', 'data/SegmentationClass/{}.png', (BLACK, RED, RED))
    Path('data/labelmap.txt').write_text(
        '# label:color_rgb:parts:actions\nbackground:0,0,0::\ncat:255,0,0::\ncow:0,128,0::\n'
    )
    number_masks(['data', 'out'])
    assert Path('out/classes.txt').read_text().splitlines()[1] == '#ff0000 cat'
    found = own_data.masks(here / 'out', 0.2, 0)
    assert found.counts == dict(background=6, cat=6, cow=0)


def test_the_size_of_a_test_is_that_of_its_images():
    save('data/images/{}.jpg', 'data/masks/{}.png', size=(70, 50))
    main(['new', 'masks', 'data'])
    config = read()
    assert input_size(config) == (216, 302)
    config.test_dataloader.dataset.pipeline.pop(1)  # the Resize
    assert input_size(config) == (50, 70)
    config.test_dataloader.dataset.data_root = 'elsewhere'
    assert input_size(config) == (256, 256)


def test_flops_are_those_of_the_size_of_a_test():
    save('data/images/{}.jpg', 'data/masks/{}.png', size=(70, 50))
    main(['new', 'masks', 'data'])
    found = costs('run', 'data.py', read())
    counted = analyse_config('data.py', (216, 302))
    assert found['FLOPs [G] at 216 x 302'] == [counted['flops'] / 1e9]


def test_colours_that_mmseg_makes_up_are_replaced():
    save('data/images/{}.jpg', 'data/masks/{}.png', (0, 1, 2))
    main(['new', 'masks', 'data'])
    palette = data_set(read(), 'train').metainfo['palette']
    ours = [*map(tuple, class_colours(3).tolist())]
    assert palette_of(palette, 3) == palette_of(None, 3) == ours
    assert palette_of([[1, 2, 3]] * 3, 3) == [(1, 2, 3)] * 3


def test_classes_have_colours_that_differ():
    for number in (8, 55, 255):
        colours = class_colours(number).astype(float)
        distances = np.linalg.norm(colours[:, None] - colours, axis=-1)
        assert len(colours) == number
        assert distances[~np.eye(number, dtype=bool)].min() > (60 if number < 60 else 30)
    labels = np.arange(64).reshape(8, 8)
    picture = draw_segments(np.zeros((8, 8, 3), np.uint8), labels)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) == 64
