"""Damaged images, clouds and data sets are named before a run reads them."""

import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from aft_mm.datasets import MNISTIdx, TextFile, UnusableFile, read_points
from aft_mm.datasets.transforms import PackSequence, RandomValueShift, SuperResolutionPair
from aft_mm.engine import CheckImagesHook
from aft_mm.engine.hooks.sanity import check_image
from aft_mm.errors import UserError

pytestmark = pytest.mark.adversarial


def png(folder, name='a.png', size=(9, 7)):
    path = folder / name
    image = np.random.default_rng(0).integers(256, size=(*size, 3), dtype=np.uint8)
    Image.fromarray(image).save(path, format='PNG' if name.endswith('png') else None)
    return path


def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))


def bomb(path):
    """A PNG whose header claims 3.6 billion pixels."""
    header = struct.pack('>IIBBBBB', 60000, 60000, 8, 2, 0, 0, 0)
    path.write_bytes(
        b'\x89PNG\r\n\x1a\n'
        + chunk(b'IHDR', header)
        + chunk(b'IDAT', zlib.compress(b''))
        + chunk(b'IEND', b'')
    )


def loop(path):
    path.symlink_to(path)


def cut(path):
    png(path.parent, path.name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    'no.png': lambda path: None,
    'empty.png': lambda path: path.touch(),
    'loop.png': loop,
    'folder.png': lambda path: path.mkdir(),
    'svg.png': lambda path: path.write_text('<svg xmlns="http://www.w3.org/2000/svg"/>'),
    'bomb.png': bomb,
    'bomb.jpg': bomb,
    'cut.png': cut,
    'cut.jpg': cut,
    'float.tif': lambda path: Image.fromarray(np.ones((9, 7), np.float32)).save(path),
}


@pytest.mark.parametrize('name', DAMAGE)
def test_an_image_that_cannot_be_read(tmp_path, name):
    path = tmp_path / name
    DAMAGE[name](path)
    with pytest.raises(UserError, match=f"image '.*{name}' of the validation set") as error:
        check_image(str(path), 'validation')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['a.png', 'a.jpg', 'a.webp', 'a.bmp', 'a.tif', 'png.jpg'])
def test_a_whole_image_passes(tmp_path, name):
    path = png(tmp_path, name)
    if name == 'png.jpg':  # as some data sets have them
        Image.open(path).save(path, format='PNG')
    check_image(str(path))


class Images(list):
    def get_data_info(self, index):
        return dict(img_path=str(self[index]))


def test_validation_and_test_images_are_looked_at_too(tmp_path):
    good, bad = png(tmp_path), tmp_path / 'bad.png'
    cut(bad)

    def loader(*paths):
        return SimpleNamespace(dataset=Images(paths))

    runner = SimpleNamespace(
        rank=0,
        world_size=1,
        logger=SimpleNamespace(info=print),
        train_dataloader=loader(good),
        val_loop=SimpleNamespace(dataloader=loader(good, bad)),
        test_loop=SimpleNamespace(dataloader=loader(bad)),
    )
    hook = CheckImagesHook()
    with pytest.raises(UserError, match="bad.png' of the validation set is truncated"):
        hook.before_train(runner)
    with pytest.raises(UserError, match="bad.png' of the test set is truncated"):
        hook.before_test(runner)
    runner.val_loop = None
    hook.before_train(runner)


@pytest.mark.parametrize('kept, announced', [(4, 4), (3, 4), (2, 4)])
def test_a_text_ply_holds_what_it_announces(tmp_path, kept, announced):
    points = np.random.default_rng(0).normal(size=(kept, 3))
    header = [
        'ply',
        'format ascii 1.0',
        f'element vertex {announced}',
        *[f'property float {axis}' for axis in 'xyz'],
        'end_header',
    ]
    rows = [' '.join(f'{value:.6f}' for value in point) for point in points]
    path = tmp_path / 'a.ply'
    path.write_text('\n'.join([*header, *rows]) + '\n')
    if kept == announced:
        np.testing.assert_allclose(read_points(path), points, atol=1e-6)
    else:
        with pytest.raises(UnusableFile, match='announced|damaged'):
            read_points(path)


def test_mnist_without_an_image(tmp_path):
    for name, axes in (('images-idx3', (0, 28, 28)), ('labels-idx1', (0,))):
        header = bytes([0, 0, 8, len(axes)]) + np.array(axes, '>i4').tobytes()
        (tmp_path / f'train-{name}-ubyte').write_bytes(header)
    with pytest.raises(ValueError, match='has no image in its train split'):
        MNISTIdx(str(tmp_path))


ARGUMENTS = [
    *[(lambda path=path: MNISTIdx(path), 'data_root') for path in (None, '', 5)],
    (lambda: MNISTIdx('.', split=['train']), 'split'),
    *[(lambda n=n: TextFile('a', context_length=n), 'context_length') for n in (0, 1.5, '9', None)],
    (lambda: TextFile('a', split_ratio=0.5), 'split_ratio'),
    (lambda: TextFile('a', split_ratio=('a', 1, 0)), 'split_ratio'),
    (lambda: TextFile(5), 'data_file'),
    *[(lambda n=n: RandomValueShift(n), 'max_shift') for n in (-1, 1.5, '3', 256)],
    *[(lambda n=n: PackSequence(n), 'image_shape') for n in (8, (8, 8), '883', (8, 8, 3.0))],
    (lambda: PackSequence((8, 8, 3), 5), 'tokens'),
    *[(lambda n=n: SuperResolutionPair(size=n), 'size') for n in (0, 30, 32.0, '32')],
    *[(lambda n=n: SuperResolutionPair(crop_size=n), 'crop_size') for n in (31, 64.0, 'a')],
]


@pytest.mark.parametrize('call, name', ARGUMENTS)
def test_arguments_of_data_sets_and_steps(call, name):
    with pytest.raises(ValueError, match=f'^{name}.* must be ') as error:
        call()
    assert '\n' not in str(error.value)
