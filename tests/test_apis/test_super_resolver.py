"""SuperResolver: images of the exact size, larger images, rejected images."""

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image

from aft_mm.apis import SuperResolver
from aft_mm.datasets import SuperResolutionPair
from aft_mm.engine import derived_seed
from aft_mm.visualization import super_resolve

from ..errors import refuses, refuses_input


def random_image(height=4, width=4, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class TestExactSize:
    def test_samples_equal_those_of_the_model(self, resolver):
        image = random_image()
        samples = resolver(image, num=3, seed=0)
        options = dict(seed=0, temperature=0.8)
        (expected,) = super_resolve(resolver.model, image[None], (8, 8, 3), 3, **options)
        assert samples.shape == (3, 8, 8, 3) and samples.dtype == np.uint8
        np.testing.assert_array_equal(samples, expected)

    def test_options_and_image_change_the_samples(self, resolver, capsys):
        image = random_image()
        first = resolver(image, seed=0)
        assert '100%' in capsys.readouterr().err
        np.testing.assert_array_equal(resolver(image, seed=0, progress=False), first)
        assert not capsys.readouterr().err
        for options in (dict(seed=1), dict(seed=0, temperature=0.05), dict(seed=0, greedy=True)):
            assert (resolver(image, **options) != first).any()
        assert (resolver(255 - image, seed=0) != first).any()


class TestFit:
    @pytest.mark.parametrize(('height', 'width'), [(4, 4), (8, 9), (13, 30), (218, 178)])
    def test_the_middle_is_shrunk_by_area(self, resolver, height, width):
        image = random_image(height, width)
        edge = min(height, width)
        top, left = (height - edge) // 2, (width - edge) // 2
        square = image[top : top + edge, left : left + edge]
        expected = cv2.resize(square, (4, 4), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(resolver.fit(image), expected)

    def test_the_square_can_be_chosen(self, resolver):
        image = random_image(9, 15)
        np.testing.assert_array_equal(resolver.fit(image, 4), image[2:6, 5:9])
        assert (resolver.fit(image, 8) != resolver.fit(image)).any()

    def test_inputs_equal_those_of_training_except_for_rounding(self, resolver):
        image = random_image(24, 40)
        trained = SuperResolutionPair(size=8, scale_factor=2)(dict(img=image))['source']
        difference = np.abs(resolver.fit(image).astype(int) - trained)
        assert difference.max() == 1

    def test_a_model_of_other_than_squares_is_named(self, untrained):
        config = Config.fromfile(untrained['tiny_super_resolution'][0])
        config.update(source_shape=(2, 8, 3), image_shape=(4, 16, 3))
        wide = SuperResolver(config, untrained['tiny_super_resolution'][1], 'cpu')
        message = r'fit \(--fit\) needs a model with square inputs, got one with 2 x 8 pixels'
        refuses_input(message, wide.fit, random_image(9, 15))
        assert [len(starts) for starts in wide.tile_starts(random_image(9, 15), 0)] == [5, 2]

    @pytest.mark.parametrize('crop_size', [3, 10, 0])
    def test_bad_input_is_named(self, resolver, crop_size):
        message = f'--fit.* must be 4 to 9 .* got {crop_size}'
        refuses_input(message, resolver.fit, random_image(9, 15), crop_size)


class TestTile:
    def test_one_tile_is_one_sample(self, resolver):
        image = random_image()
        expected = resolver(image, num=2, seed=derived_seed(7, 0))
        np.testing.assert_array_equal(resolver.tile(image, num=2, seed=7), expected)

    def test_a_tile_is_unchanged_outside_the_overlap(self, resolver):
        """5 x 6 pixels are four tiles of 4 x 4: rows 0 and 1, columns 0 and 2."""
        image = random_image(5, 6)
        found = resolver.tile(image, num=2, overlap=2, seed=7)
        tiles = np.stack([image[y : y + 4, x : x + 4] for y in (0, 1) for x in (0, 2)])
        options = dict(seed=derived_seed(7, 0), temperature=0.8)
        tiles = super_resolve(resolver.model, tiles, (8, 8, 3), 2, **options)
        assert found.shape == (2, 10, 12, 3) and found.dtype == np.uint8
        np.testing.assert_array_equal(found[:, :2, :4], tiles[0, :, :2, :4])
        np.testing.assert_array_equal(found[:, -2:, -4:], tiles[3, :, -2:, -4:])
        # In columns 4 to 8 the left tile fades into the right one.
        right = np.array([1, 3, 5, 7])[:, None] / 8
        mixed = tiles[0, :, :2, 4:] * (1 - right) + tiles[1, :, :2, :4] * right
        np.testing.assert_array_equal(found[:, :2, 4:8], mixed.round())

    def test_overlap_and_seed_change_the_image(self, resolver):
        image = random_image(4, 12)
        first = resolver.tile(image, seed=0)
        np.testing.assert_array_equal(resolver.tile(image, seed=0, overlap=2), first)
        assert (resolver.tile(image, seed=0, overlap=1) != first).any()
        assert (resolver.tile(image, seed=1) != first).any()
        assert (resolver.tile(image) != resolver.tile(image)).any()

    def test_batches_of_tiles_have_different_noise(self, resolver, capsys):
        image = np.full((40, 28, 3), 99, np.uint8)
        large = resolver.tile(image, overlap=0, seed=0)[0]
        tiles = large.reshape(10, 8, 7, 8, 3).swapaxes(1, 2).reshape(70, -1)
        assert len(np.unique(tiles, axis=0)) == 70
        lines = capsys.readouterr().err
        assert 'tiles 1 to 64 of 70\n' in lines and 'tiles 65 to 70 of 70, about ' in lines
        resolver.tile(image[:4], progress=False)
        assert not capsys.readouterr().err


@pytest.mark.parametrize('method', ['__call__', 'fit', 'tile'])
def test_other_images_are_named(resolver, method):
    draw = getattr(resolver, method)
    for wrong in (random_image()[None], random_image() / 255, None, random_image(0, 0)):
        refuses_input('image must be a path, .* got', draw, wrong)
    for height, width in ((3, 9), (9, 3)):
        message = f'least 4 x 4 pixels .* got {height} x {width}'
        refuses_input(message, draw, random_image(height, width))


@pytest.mark.parametrize('method', ['__call__', 'fit', 'tile'])
def test_files_and_pictures_are_as_arrays(resolver, method, tmp_path):
    draw = getattr(resolver, method)
    image = random_image()
    Image.fromarray(image).save(tmp_path / 'a.png')
    options = {} if method == 'fit' else dict(greedy=True, progress=False)
    for given in (tmp_path / 'a.png', Image.fromarray(image)):
        np.testing.assert_array_equal(draw(given, **options), draw(image, **options))


@pytest.mark.parametrize('method', ['__call__', 'tile'])
def test_bad_options_are_named(resolver, method):
    draw = getattr(resolver, method)
    refuses('num must be an int, 1 or larger, got 0', draw, random_image(), num=0)
    refuses(r'seed must be an int, 0 to 2\^63 − 1, got -1', draw, random_image(), seed=-1)
    refuses('temperature must be a finite number above 0', draw, random_image(), temperature=0)
    for name in ('length', 'source', 'end_token', 'seeed'):
        refuses_input(f'options must be among .* got {name}=5', draw, random_image(), **{name: 5})
