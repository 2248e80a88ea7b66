"""Image files of every kind are listed, checked, measured and read by the same rules, by mmcv too."""

import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import mmcv
import numpy as np
import pytest
import torch
from mmcv.transforms import LoadImageFromFile
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from aft_mm.datasets import LoadRGBImage
from aft_mm.errors import UnusableFile
from aft_mm.images import (
    ALPHA,
    COLOUR,
    GREY,
    check_image,
    enlarge_bicubic,
    image_size,
    list_images,
    read_image,
    read_rgb,
    rgb_of,
)

from .errors import refuses_input

HEIGHT, WIDTH = 41, 31
NOISE = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
RGB, GRAY, DEEP = (
    NOISE[..., :3],
    NOISE[..., 0],
    NOISE[..., 0].astype(np.uint16) << 8 | NOISE[..., 1],
)
# Blocks, for codecs with losses.
BLOCKS = np.kron(RGB[:3, :2], np.ones((16, 16, 1), np.uint8))
PALETTE = Image.fromarray(RGB).quantize(16)
INDEX = np.asarray(PALETTE)
COLOURS = np.asarray(PALETTE.convert('RGB'))
# Orientations of EXIF.
TURNS = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: np.rot90,
}


def on_white(pixels, alpha):
    share = alpha[..., None] / 255
    return np.broadcast_to(pixels, (*alpha.shape, 3)) * share + 255 * (1 - share)


def three(grey):
    return np.dstack([grey] * 3)


def oriented(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    return dict(exif=exif)


def kinds():
    """Map the name of a file to what Pillow saves, with which options, and to the image it is."""
    lossless = dict(lossless=True, exact=True)
    kinds = {
        'grey.png': (GRAY, {}, three(GRAY), [GREY]),
        'bits.png': (GRAY > 100, {}, three(np.where(GRAY > 100, 255, 0)), [GREY]),
        'fax.tif': (GRAY > 100, dict(compression='group4'), three((GRAY > 100) * 255), [GREY]),
        'palette.png': (PALETTE, {}, COLOURS, []),
        'palette.gif': (PALETTE, {}, COLOURS, []),
        'palette.bmp': (PALETTE, {}, COLOURS, []),
        **{f'deep.{x}': (DEEP, {}, three(GRAY), [GREY]) for x in ('png', 'tif', 'pgm')},
        'a.ppm': (RGB, {}, RGB, []),
        'a.bmp': (RGB, {}, RGB, []),
        'ink.tif': (Image.fromarray(255 - NOISE[..., [0, 1, 2]]).convert('CMYK'), {}, 255 - RGB, []),
        'ink.jpg': (Image.fromarray(BLOCKS).convert('CMYK'), dict(quality=100), BLOCKS, []),
        # Transparency: a channel, a colour, a share per colour; and one that hides nothing.
        **{
            f'clear.{x}': (NOISE, options, on_white(RGB, NOISE[..., 3]), [ALPHA])
            for x, options in dict(png={}, webp=lossless, tif={}).items()
        },
        **{
            f'grey.clear.{x}': (NOISE[..., 2:], {}, on_white(NOISE[..., 2:3], NOISE[..., 3]), [GREY, ALPHA])
            for x in ('png', 'tif')
        },
        **{
            f'colour.{x}': (PALETTE, dict(transparency=3), np.where((INDEX == 3)[..., None], 255, COLOURS), [ALPHA])
            for x in ('png', 'gif')
        },
        'shares.png': (
            PALETTE,
            dict(transparency=bytes(range(0, 256, 16))),
            on_white(COLOURS, INDEX.astype(int) * 16),
            [ALPHA],
        ),
        'png.jpg': (RGB, dict(format='PNG'), RGB, []),  # as some data sets have them
        'opaque.png': (np.dstack([RGB, GRAY * 0 + 255]), {}, RGB, []),
        'grey.opaque.png': (np.dstack([GRAY, GRAY * 0 + 255]), {}, three(GRAY), [GREY]),
    }  # fmt: skip
    for turn, turned in TURNS.items():
        options = oriented(turn)
        kinds[f'turned{turn}.png'] = RGB, options, turned(RGB), []
        kinds[f'turned{turn}.jpg'] = (
            BLOCKS,
            dict(options, quality=100, subsampling=0),
            turned(BLOCKS),
            [],
        )
        kinds[f'turned{turn}.webp'] = RGB, {**options, **lossless}, turned(RGB), []
        kinds[f'turned{turn}.tif'] = RGB, options, turned(RGB), []
        # Pillow maps these into memory.
        kinds[f'grey.turned{turn}.tif'] = GRAY, options, turned(three(GRAY)), [GREY]
        kinds[f'clear.turned{turn}.tif'] = (
            NOISE,
            options,
            turned(on_white(RGB, NOISE[..., 3])),
            [ALPHA],
        )
    # As OpenCV, which does not turn by XMP.
    packet = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    text = PngInfo()
    text.add_itxt('XML:com.adobe.xmp', packet.decode())
    kinds['xmp.png'] = RGB, dict(pnginfo=text), RGB, []
    kinds['xmp.webp'] = RGB, dict(lossless, xmp=packet), RGB, []
    kinds['xmp.jpg'] = BLOCKS, dict(quality=100, subsampling=0, xmp=packet), BLOCKS, []
    exif = Image.Exif()
    exif[0x010F] = 'maker'  # and no orientation
    options = dict(quality=100, subsampling=0, xmp=packet, exif=exif)
    kinds['xmp.exif.jpg'] = BLOCKS, options, BLOCKS, []
    options = dict(quality=100, subsampling=0)
    for number, damaged in enumerate((bytes(20), b'II*\x00')):
        exif = dict(exif=b'Exif\0\0' + damaged)
        kinds[f'damaged.exif{number}.jpg'] = BLOCKS, {**options, **exif}, BLOCKS, []
    kinds['xmp.tif'] = RGB, dict(tiffinfo={700: packet}), RGB, []
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (30, 200)]
    for kind in ('png', 'webp', 'tif', 'gif'):
        options = dict(save_all=True, append_images=frames[1:])
        options |= lossless if kind == 'webp' else {}
        kinds[f'frames.{kind}'] = frames[0], options, np.asarray(frames[0]), []
    return kinds


KINDS = kinds()


def save(folder, array, name='a.png', **options):
    image = Image.fromarray(array) if isinstance(array, np.ndarray) else array
    image.save(folder / name, **options)
    return str(folder / name)


@pytest.mark.parametrize('name', KINDS)
def test_every_reader_gives_the_same_image(name, tmp_path):
    saved, options, expected, warnings = KINDS[name]
    path = save(tmp_path, saved, name, **options)
    check_image(path)
    image, found = read_rgb(path)
    assert image.dtype == np.uint8 and found == warnings
    assert image_size(path) == image.shape[1::-1]
    # The losses of JPEG, and rounding of transparency.
    np.testing.assert_allclose(image, expected, atol=2 if name.endswith('jpg') else 1)
    with Image.open(BytesIO(Path(path).read_bytes())) as opened:
        before = dict(opened.info)
        plain = isinstance(saved, np.ndarray) and saved.dtype != bool and not options
        for given in [opened, saved] if plain else [opened]:
            of_object, found = rgb_of(given)
            assert found == warnings
            if name != 'xmp.tif':  # which Pillow turns when it is loaded
                np.testing.assert_array_equal(of_object, image)
                assert before == {key: opened.info[key] for key in before}
    results = LoadRGBImage()(dict(img_path=path))
    np.testing.assert_array_equal(results['img'], image)
    assert results.get('warnings', {}) == dict.fromkeys(warnings, path)
    for order in ('rgb', 'bgr'):  # the decoders of a JPEG differ by 1
        theirs = mmcv.imread(path, channel_order=order)[..., :: 1 if order == 'rgb' else -1]
        np.testing.assert_allclose(theirs.astype(int), image, atol=1)
    loaded = LoadImageFromFile()(dict(img_path=path))
    np.testing.assert_array_equal(loaded['img'], theirs[..., ::-1])
    assert loaded['img_shape'] == image.shape[:2]
    grey, found = read_image(path, 1)
    np.testing.assert_allclose(grey[..., 0], image @ [0.299, 0.587, 0.114], atol=1)
    assert found == (
        [x for x in warnings if x != GREY] if GREY in warnings else [*warnings, COLOUR]
    )
    theirs = mmcv.imread(path, 'grayscale')
    np.testing.assert_allclose(theirs.astype(int), grey[..., 0], atol=1)


def test_other_objects_than_images_are_named(tmp_path):
    wrong = [np.zeros((8, 8, 5), np.uint8), np.zeros((0, 8, 3), np.uint8), np.zeros(8, np.uint8)]
    for given in [*wrong, RGB / 255, RGB.astype(np.int64), GRAY > 100, 3, None, b'a', RGB.tolist()]:
        refuses_input('image must be a path, a PIL image or an array uint8 .* got ', rgb_of, given)
    for mode in 'IF':
        refuses_input('image has values of 32 bits', rgb_of, Image.new(mode, (3, 3)))
    content = Path(save(tmp_path, RGB, 'a.jpg')).read_bytes()
    refuses_input('image cannot be read: ', rgb_of, Image.open(BytesIO(content[:900])))
    closed = Image.open(BytesIO(content))
    closed.close()
    refuses_input('image cannot be read: ', rgb_of, closed)
    np.testing.assert_array_equal(rgb_of(torch.from_numpy(RGB))[0], RGB)


@pytest.mark.parametrize('order', ['mmcv, aft_mm.registry', 'aft_mm.registry, mmcv'])
def test_mmcv_is_adapted_whenever_it_is_imported(order, tmp_path):
    path = save(tmp_path, np.zeros((2, 2, 4), np.uint8))
    code = f'import {order}\nassert mmcv.imread({path!r}).min() == 255, "hidden colours"'
    subprocess.run([sys.executable, '-c', code], check=True)


def test_masks_keep_their_hidden_values(tmp_path):
    path = save(tmp_path, NOISE)
    for backend in ('cv2', 'pillow'):
        found = mmcv.imread(path, 'unchanged', backend=backend)
        np.testing.assert_array_equal(found, NOISE[..., [2, 1, 0, 3]])


@pytest.mark.parametrize('name', ['a.jpg', 'a.png', 'a.webp', 'a.tiff', 'a.bmp'])
@pytest.mark.parametrize(
    'damage',
    [
        lambda data: data[:9],
        lambda data: data[: len(data) // 2],
        lambda data: b'\0' * 20 + data[20:],
    ],
    ids=['beginning', 'half', 'header'],
)
def test_a_damaged_image_is_named_in_one_sentence(tmp_path, name, damage):
    path = tmp_path / name
    save(tmp_path, RGB, name)
    path.write_bytes(damage(path.read_bytes()))
    for read in (read_rgb, lambda path: LoadRGBImage()(dict(img_path=path))):
        with pytest.raises(UnusableFile, match=f"^image '{path}' cannot be read: ") as error:
            read(str(path))
        assert str(error.value).endswith(
            'read: it is damaged or of another kind than its name says'
        )
    refuses_input(f"^image '{path}' of the training set is truncated, ", check_image, str(path))


REFUSED = {
    'no.jpg': (lambda path: None, 'cannot be read: it does not exist$'),
    'empty.png': (lambda path: path.touch(), 'is empty$'),
    'folder.png': (lambda path: path.mkdir(), 'cannot be read: Is a directory$'),
    'pipe.png': (os.mkfifo, 'cannot be read: it is not a regular file$'),
    'float.tiff': (lambda path: Image.fromarray(np.float32(GRAY)).save(path), 'has values of 32 bits'),
    'int.tiff': (lambda path: Image.fromarray(np.int32(GRAY)).save(path), 'has values of 32 bits'),
}  # fmt: skip


@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_be_read_is_refused_by_all_readers(tmp_path, name):
    damage, message = REFUSED[name]
    damage(tmp_path / name)
    for read in (read_rgb, image_size, check_image):
        with pytest.raises(UnusableFile, match=f"^image '.*{name}'.* {message}"):
            read(str(tmp_path / name))


def test_white_images_pass_all_readers_and_bombs_none(tmp_path, monkeypatch):
    white = save(tmp_path, Image.new('RGB', (5000, 5000), 'white'))
    assert os.path.getsize(white) * 250 < 5000**2
    check_image(white)
    assert read_rgb(white)[0].shape == (5000, 5000, 3) and image_size(white) == (5000, 5000)
    bomb = save(tmp_path, Image.new('1', (9000, 9000)), 'bomb.png')
    for read in (check_image, read_rgb, image_size, mmcv.imread):
        refuses_input('has 9000 x 9000 pixels in a file that is too small', read, bomb)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 500)
    noise = save(tmp_path, NOISE)
    for read in (check_image, read_rgb, image_size):
        with pytest.raises(UnusableFile, match="a.png'.* has more pixels than Pillow reads"):
            read(noise)


def test_postscript_is_not_run_whatever_its_name(tmp_path):
    path = tmp_path / 'a.png'
    Image.fromarray(RGB).save(path, 'EPS')
    for read in (read_rgb, image_size, check_image):
        with pytest.raises(UnusableFile, match="a.png'.* (another kind|not an image)"):
            read(str(path))


def test_lists_are_sorted_and_leave_out_hidden_and_other_files(tmp_path):
    for name in ('b/2.PNG', 'b/1.jpg', 'a.tif', '.hidden/3.png', 'b/._4.png', 'b/notes.txt'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list_images(tmp_path) == ['a.tif', 'b/1.jpg', 'b/2.PNG']
    (tmp_path / 'b/5.png').symlink_to('missing.png')
    assert list_images(tmp_path)[-1] == 'b/5.png'  # its reader says what is wrong
    with pytest.raises(UnusableFile, match="b/5.png'.* it is a link to a missing file"):
        check_image(str(tmp_path / 'b/5.png'))
    (tmp_path / 'b/loop').symlink_to('..')
    refuses_input("folder '.*/b/loop' is a link to a folder that contains", list_images, tmp_path)


@pytest.mark.parametrize('channels', [1, 3])
def test_enlarging_keeps_a_plane_and_its_channels(channels):
    y, x = np.mgrid[:10, :12]
    image = (10 * x + 8 * y)[..., None] + np.arange(channels)
    large = enlarge_bicubic(image.astype(np.uint8), (40, 48))
    assert large.shape == (40, 48, channels) and large.dtype == np.uint8
    y, x = (np.mgrid[:40, :48] + 0.5) / 4 - 0.5
    inside = np.s_[10:-10, 10:-10]
    np.testing.assert_allclose(
        large[inside], ((10 * x + 8 * y)[..., None] + np.arange(channels))[inside], atol=1.01
    )
