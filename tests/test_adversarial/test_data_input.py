"""Damaged images, clouds and data sets are named before a run reads them."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from aft_mm.datasets import (
    MNISTIdx,
    PackSequence,
    RandomValueShift,
    SuperResolutionPair,
    TextFile,
    UnusableFile,
    read_points,
)
from aft_mm.engine import CheckImagesHook

from ..errors import refuses, refuses_input

pytestmark = pytest.mark.adversarial


def image(path):
    noise = np.random.default_rng(0).integers(256, size=(9, 7, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def cut(path):
    image(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class Images(list):
    def get_data_info(self, index):
        return dict(img_path=str(self[index]))


def test_validation_and_test_images_are_looked_at_too(tmp_path):
    good, bad = image(tmp_path / 'a.png'), tmp_path / 'bad.png'
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
    refuses_input("bad.png' of the validation set is truncated", hook.before_train, runner)
    refuses_input("bad.png' of the test set is truncated", hook.before_test, runner)
    runner.val_loop = None
    hook.before_train(runner)


def test_a_text_ply_holds_what_it_announces(tmp_path):
    points, path = np.random.default_rng(0).normal(size=(4, 3)), tmp_path / 'a.ply'
    axes = [f'property float {axis}' for axis in 'xyz']
    lines = ['ply', 'format ascii 1.0', 'element vertex 4', *axes, 'end_header']
    lines += [' '.join(f'{value:.6f}' for value in point) for point in points]
    path.write_text('\n'.join(lines) + '\n')
    np.testing.assert_allclose(read_points(path), points, atol=1e-6)
    for missing in (1, 2):
        path.write_text('\n'.join(lines[:-missing]) + '\n')
        with pytest.raises(UnusableFile, match='4 rows announced'):
            read_points(path)


def test_mnist_without_an_image(tmp_path):
    for name, axes in (('images-idx3', (0, 28, 28)), ('labels-idx1', (0,))):
        header = bytes([0, 0, 8, len(axes)]) + np.array(axes, '>i4').tobytes()
        (tmp_path / f'train-{name}-ubyte').write_bytes(header)
    refuses('has no image in its train split', MNISTIdx, str(tmp_path))


# Those of the right type but out of range are in tests/test_datasets.
ARGUMENTS = [
    *[(lambda path=path: MNISTIdx(path), 'data_root') for path in (None, '', 5)],
    (lambda: MNISTIdx('.', split=['train']), 'split'),
    (lambda: TextFile('a', context_length='9'), 'context_length'),
    *[(lambda n=n: TextFile('a', split_ratio=n), 'split_ratio') for n in (0.5, ('a', 1, 0))],
    (lambda: TextFile(5), 'data_file'),
    (lambda: RandomValueShift(1.5), 'max_shift'),
    *[(lambda n=n: PackSequence(n), 'image_shape') for n in (8, (8, 8), '883', (8, 8, 3.0))],
    (lambda: PackSequence((8, 8, 3), 5), 'tokens'),
    (lambda: SuperResolutionPair(size=32.0), 'size'),
    (lambda: SuperResolutionPair(crop_size='a'), 'crop_size'),
]


@pytest.mark.parametrize('call, name', ARGUMENTS)
def test_arguments_of_data_sets_and_steps(call, name):
    refuses(f'^{name}.* must be ', call)
