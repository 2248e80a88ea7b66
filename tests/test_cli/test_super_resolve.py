"""`aft_mm super-resolve`: files and rejected arguments."""

import re

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from PIL import Image

from aft_mm.apis import SuperResolver
from aft_mm.visualization import draw_super_resolution

from ..errors import stops
from ..helpers import picture


@pytest.fixture
def module(tool):
    return tool('super_resolve')


@pytest.fixture
def enlarge(module, tmp_path, monkeypatch, untrained):
    monkeypatch.chdir(tmp_path)
    for name, shape in (
        ('small.png', (4, 4, 3)),
        ('large.png', (6, 9, 3)),
        ('tiny.png', (3, 9, 3)),
        ('grey.png', (4, 4)),
    ):
        Image.fromarray(image_of(shape)).save(name)
    files = untrained['tiny_super_resolution']
    return lambda *words: module.main([*files, *map(str, words), '--device', 'cpu'])


def image_of(shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(
    ('words', 'options'),
    [
        (
            ['--seed', 3, '--temperature', 0.3, '--top-k', 9, '--top-p', 0.7],
            dict(seed=3, temperature=0.3, top_k=9, top_p=0.7),
        ),
        (['--greedy'], dict(greedy=True)),
    ],
)
def test_the_sample_equals_that_of_the_resolver(enlarge, resolver, capsys, words, options):
    enlarge('small.png', 'new/a.png', *words)
    assert capsys.readouterr().out.endswith('written to new/a.png\n')
    expected = resolver(image_of((4, 4, 3)), **options)
    np.testing.assert_array_equal(picture('new/a.png'), expected[0])


def test_several_samples_are_numbered_or_in_one_picture(enlarge, resolver, tmp_path, capsys):
    image = image_of((4, 4, 3))
    expected = resolver(image, 3, seed=0)
    enlarge('small.png', 'a.png', '--num', 3)
    assert capsys.readouterr().out.endswith('written to a-1.png, a-2.png, a-3.png\n')
    np.testing.assert_array_equal([picture(f'a-{i}.png') for i in (1, 2, 3)], expected)
    assert not (tmp_path / 'a.png').exists()
    enlarge('small.png', 'a.png', '--num', 3, '--picture')
    drawn = draw_super_resolution(image[None], expected[None])
    np.testing.assert_array_equal(picture('a.png'), drawn)


def test_the_number_of_tiles_and_their_time_are_reported(enlarge, capsys, monkeypatch):
    monkeypatch.setattr('aft_mm.apis.super_resolver.TILES_AT_ONCE', 5)
    enlarge('large.png', 'a.png', '--tile', 2, '--num', 3)
    out, err = capsys.readouterr()
    assert out.startswith('8 tiles (2 x 4) to sample, 3 times each\n')
    assert 'tiles 1 to 5 of 8\n' in err
    assert re.search(r'tiles 6 to 8 of 8, about 0:\d\d:\d\d left\n', err)


@pytest.mark.parametrize('words', [[], ['--picture']])
def test_an_unwritable_out_is_rejected_before_loading(
    enlarge, module, tmp_path, monkeypatch, words
):
    monkeypatch.setattr(module, 'SuperResolver', None)
    (tmp_path / 'dir.png').mkdir()
    (tmp_path / 'dir-2.png').mkdir()
    monkeypatch.chdir(tmp_path)
    for out, wrong in [('dir.png', 'dir.png'), ('small.png/a.png', 'small.png/a')]:
        with pytest.raises(SystemExit, match=f"^Error: OUT '{wrong}.* cannot be written: "):
            enlarge('small.png', out, *words)
    with pytest.raises(SystemExit, match="^Error: OUT 'dir-2.png' cannot be written: Is a dir"):
        enlarge('small.png', 'dir.png', '--num', 2)
    assert not (tmp_path / 'dir-1.png').exists()


def test_larger_images_are_fitted_or_tiled(enlarge, resolver):
    image = image_of((6, 9, 3))
    for words, expected in [
        (['--fit'], resolver(resolver.fit(image), seed=0)),
        (['--fit', 5], resolver(resolver.fit(image, 5), seed=0)),
        (['--tile', 1], resolver.tile(image, overlap=1, seed=0)),
    ]:
        enlarge('large.png', 'a.png', *words)
        np.testing.assert_array_equal(picture('a.png'), expected[0])
    enlarge('large.png', 'a.png', '--tile', '--picture')
    expected = draw_super_resolution(image[None], resolver.tile(image, seed=0)[None])
    np.testing.assert_array_equal(picture('a.png'), expected)


def test_a_grey_image_is_converted_with_a_message(enlarge, resolver, capsys):
    enlarge('grey.png', 'a.png')
    assert 'grey.png: a grey image is read as three equal channels\n' in capsys.readouterr().out
    image = image_of((4, 4))[..., None].repeat(3, -1)
    np.testing.assert_array_equal(picture('a.png'), resolver(image, seed=0)[0])


def test_a_model_of_one_channel_reads_grey(enlarge, module, untrained, tmp_path, capsys):
    config = Config.fromfile(untrained['tiny_super_resolution'][0])
    channels = ('head', 'encoder.embedding', 'decoder.embedding')
    config.merge_from_dict({f'model.{part}.num_channels': 1 for part in channels})
    config.merge_from_dict(dict(image_shape=(8, 8, 1), source_shape=(4, 4, 1)))
    config.dump('grey.py')
    model = MODELS.build(dict(config.model, type='aft_mm.AutoregressiveModel'))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    torch.save(dict(state_dict=model.state_dict(), meta={}), 'grey.pth')
    resolver = SuperResolver('grey.py', 'grey.pth', 'cpu')
    with Image.open('small.png') as file:
        colours = np.asarray(file.convert('L'))
    for name, image in (('grey.png', image_of((4, 4))), ('small.png', colours)):
        module.main(['grey.py', 'grey.pth', name, 'a.png', '--device', 'cpu'])
        printed = capsys.readouterr().out
        converted = 'small.png: a colour image is converted to grey\n' in printed
        assert converted == (name == 'small.png')
        assert 'three equal channels' not in printed
        expected = resolver(image[..., None], seed=0)[0]
        assert picture('a.png').shape == (8, 8)
        np.testing.assert_array_equal(picture('a.png'), expected[..., 0])
    module.main(['grey.py', 'grey.pth', 'small.png', 'a.png', '--picture', '--device', 'cpu'])
    found = draw_super_resolution(image[None, ..., None], expected[None, None])
    np.testing.assert_array_equal(picture('a.png'), found)


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (
            'large.png a.png',
            r"'large.png': image must be 4 x 4 pixels \(height x width\), got "
            '6 x 9; --fit .*--tile',
        ),
        ('tiny.png a.png --fit', "'tiny.png': image must have at least 4 x 4 .* got 3 x 9"),
        ('tiny.png a.png --tile', "'tiny.png': image must have at least 4 x 4 .* got 3 x 9"),
        ('large.png a.png --fit 0', r'crop_size \(--fit\) must be 4 to 6 pixels, .* got 0'),
        ('large.png a.png --tile 4', r'overlap \(--tile\) must be an int, 0 to 3, got 4'),
        ('small.png small.png', "OUT must not replace data, got 'small.png', a file"),
        ('small.png a.jpg', "OUT must end in .png, got 'a.jpg'"),
        ('small.png a.png --num 0', '--num must be an int, 1 or larger, got 0'),
        ('no.png a.png', "image 'no.png' cannot be read"),
        ('broken.png a.png', "image 'broken.png' cannot be read"),
        ('small.png a.png --cfg-options model.decoder.num_layers=3', 'does not fit'),
        (
            'small.png a.png --cfg-options source_shape=(2,8,3)',
            r'image_shape must be source_shape \(2, 8, 3\)',
        ),
    ],
)
def test_bad_arguments_give_a_one_line_message(enlarge, tmp_path, words, message):
    (tmp_path / 'broken.png').write_bytes((tmp_path / 'small.png').read_bytes()[:50])
    stops(rf'Error: (?!.*\.py:).*{message}', enlarge, *words.split())
    assert not list(tmp_path.glob('a*'))


def test_fit_and_tile_exclude_each_other(enlarge, capsys):
    with pytest.raises(SystemExit):
        enlarge('large.png', 'a.png', '--fit', '--tile')
    assert 'not allowed with argument --fit' in capsys.readouterr().err


def test_other_models_are_refused(module, untrained):
    tasks = dict(pixels='ImageGenerator', clouds='PointCloudGenerator', text='TextGenerator')
    for name, task in tasks.items():
        match = rf'tiny_{name}.py is a config for {task} \(`aft_mm sample`\), not for SuperResolver'
        words = [*untrained[f'tiny_{name}'], *'no.png a.jpg --device cpu'.split()]
        stops(match, module.main, words)
