"""SampleHook, and the sampling of images that it shares with the generators."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from mmengine.visualization import Visualizer
from PIL import Image

from aft_mm.datasets import PackSequence
from aft_mm.engine import SampleHook
from aft_mm.errors import UserError
from aft_mm.visualization import complete_images, draw_completions, draw_samples, sample_images

# Image shape, tokens of PackSequence, grid, embedding, head: every way to lay out an image.
LAYOUTS = dict(
    grey=(
        (6, 4, 1),
        'subpixels',
        (24,),
        dict(type='TokenEmbedding', vocab_size=256),
        dict(type='CategoricalHead', num_classes=256),
    ),
    grey_pixels=(
        (6, 4, 1),
        'pixels',
        (6, 4),
        dict(type='PixelEmbedding', num_channels=1),
        dict(type='LogisticMixtureHead', num_channels=1),
    ),
    subpixels=(
        (6, 4, 3),
        'subpixels',
        (6, 12),
        dict(type='TokenEmbedding', vocab_size=256, num_kinds=3),
        dict(type='CategoricalHead', num_classes=256),
    ),
    pixels=(
        (6, 4, 3),
        'pixels',
        (24,),
        dict(type='PixelEmbedding', num_channels=3),
        dict(type='LogisticMixtureHead', num_channels=3),
    ),
)


def build(layout):
    shape, tokens, grid, embedding, head = LAYOUTS[layout]
    torch.manual_seed(0)
    model = MODELS.build(
        dict(
            type='aft_mm.AutoregressiveModel',
            decoder=dict(
                type='aft_mm.SequenceDecoder',
                embed_dims=8,
                num_layers=1,
                grid=grid,
                embedding={**embedding, 'type': f'aft_mm.{embedding["type"]}'},
                token_mixer=dict(type='aft_mm.AFTSimple'),
            ),
            head={**head, 'type': f'aft_mm.{head["type"]}', 'embed_dims': 8},
        )
    )
    for parameter in model.parameters():  # else what is given hardly changes what is drawn
        torch.nn.init.normal_(parameter)
    return model, shape, PackSequence(image_shape=shape, tokens=tokens)


def images_of(shape, count=3):
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def make_runner(model, dataset=None, visualizer=None, epoch=1, max_epochs=7):
    loop = None if dataset is None else SimpleNamespace(dataloader=SimpleNamespace(dataset=dataset))
    return SimpleNamespace(
        model=model, val_loop=loop, visualizer=visualizer, epoch=epoch, max_epochs=max_epochs
    )


class Album:
    def __init__(self):
        self.pictures = {}

    def add_image(self, name, image, step):
        self.pictures[name, step] = image


@pytest.mark.parametrize('layout', LAYOUTS)
class TestImageSampling:
    def test_samples_follow_the_seed_and_the_options(self, layout):
        model, shape, _ = build(layout)
        samples = sample_images(model, shape, 5, seed=1)
        assert samples.shape == (5, *shape) and samples.dtype == np.uint8
        np.testing.assert_array_equal(sample_images(model, shape, 5, seed=1), samples)
        for other in (dict(seed=2), dict(seed=1, top_k=2), dict(seed=1, greedy=True)):
            assert (sample_images(model, shape, 5, **other) != samples).any()

    def test_samples_are_the_tokens_in_the_order_of_the_data(self, layout):
        model, shape, pack = build(layout)
        tokens = model.generate(model.decoder.max_length, batch_size=2, seed=3)
        for image, expected in zip(sample_images(model, shape, 2, seed=3), tokens, strict=True):
            packed = pack(dict(img=image))['inputs']
            torch.testing.assert_close(packed.long().view(expected.shape), expected)

    @pytest.mark.parametrize('rows', [1, 4, 5])
    def test_completions_keep_the_given_rows_and_see_them(self, layout, rows):
        model, shape, _ = build(layout)
        images = images_of(shape, 20)
        completed = complete_images(model, images, rows, seed=1)
        assert completed.shape == images.shape and completed.dtype == np.uint8
        np.testing.assert_array_equal(completed[:, :rows], images[:, :rows])
        # Where an image ends on other values than in the data, the model has drawn them.
        assert (completed[:, rows:] != images[:, rows:]).any()
        other = complete_images(model, 255 - images, rows, seed=1)
        assert (completed[:, rows:] != other[:, rows:]).any()

    def test_other_shapes_and_halves_are_named(self, layout):
        model, shape, _ = build(layout)
        with pytest.raises(UserError, match=r'image_shape must be \(H, W, C\) with H·W·C = '):
            sample_images(model, (6, 5, shape[2]), 1)
        with pytest.raises(ValueError, match=r'image_shape \(H, W, C\) must be 3 ints'):
            sample_images(model, (6, 4), 1)
        for rows in (0, 6):
            with pytest.raises(
                UserError, match=f'num_given_rows must be 1 to 5 for an image of 6 rows, got {rows}'
            ):
                complete_images(model, images_of(shape), rows)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_pictures_are_those_of_the_model(layout, capfd):
    model, shape, pack = build(layout)
    images = images_of(shape, 3)
    dataset, album = [pack(dict(img=image)) for image in images], Album()
    hook = SampleHook(shape, interval=1, num_samples=5, num_images=2, num_completions=3, seed=4)
    hook.after_train_epoch(make_runner(model, dataset, album))

    assert list(album.pictures) == [('samples', 2), ('completions', 2)]
    expected = draw_samples(sample_images(model, shape, 5, seed=4))
    np.testing.assert_array_equal(album.pictures['samples', 2], expected)
    completed = complete_images(model, images[:2].repeat(3, 0), 3, seed=4).reshape(2, 3, *shape)
    assert (completed[:, 0] != completed[:, 1]).any()
    np.testing.assert_array_equal(
        album.pictures['completions', 2], draw_completions(images[:2], completed, 3)
    )
    assert capfd.readouterr().err.count('tokens') == 2


def test_sampling_does_not_change_the_run():
    model, shape, pack = build('grey')
    model.train()
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    SampleHook(shape, interval=1).after_train_epoch(
        make_runner(model, [pack(dict(img=images_of(shape)[0]))], Album())
    )
    assert model.training and torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_sampled_every_interval_and_at_the_end():
    model, shape, _ = build('grey')
    album = Album()
    hook = SampleHook(shape, interval=3, num_samples=1)
    for epoch in range(7):
        hook.after_train_epoch(make_runner(model, visualizer=album, epoch=epoch))
    assert list(album.pictures) == [('samples', 3), ('samples', 6), ('samples', 7)]


def test_pictures_can_be_left_out():
    model, shape, pack = build('grey')
    dataset = [pack(dict(img=image)) for image in images_of(shape)]
    for options, names in [
        (dict(num_samples=0), ['completions']),
        (dict(num_images=0), ['samples']),
    ]:
        album = Album()
        SampleHook(shape, interval=1, **options).after_train_epoch(
            make_runner(model, dataset, album)
        )
        assert [name for name, _ in album.pictures] == names


def test_temperature_reaches_the_model():
    model, shape, _ = build('grey')
    pictures = []
    for temperature in (1.0, 0.01):
        album = Album()
        SampleHook(shape, interval=1, temperature=temperature).after_train_epoch(
            make_runner(model, visualizer=album)
        )
        pictures.append(album.pictures['samples', 2])
    assert (pictures[0] != pictures[1]).any()


def test_images_of_another_size_stop_before_training():
    model, *_ = build('grey')
    with pytest.raises(UserError, match=r'H·W·C = 24, .* got \(8, 8, 1\)'):
        SampleHook((8, 8, 1)).before_train(make_runner(model))


def test_backends_write_a_png_and_tensorboard(tmp_path):
    pytest.importorskip('tensorboard', reason='TensorBoard is an optional backend')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, shape, _ = build('subpixels')
    visualizer = Visualizer(
        vis_backends=[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')],
        save_dir=str(tmp_path),
    )
    SampleHook(shape, interval=1, num_samples=4).after_train_epoch(
        make_runner(model, visualizer=visualizer)
    )
    visualizer.close()
    expected = draw_samples(sample_images(model, shape, 4, seed=0))
    with Image.open(tmp_path / 'vis_data/vis_image/samples_2.png') as picture:
        np.testing.assert_array_equal(picture, expected)
    events = EventAccumulator(str(tmp_path / 'vis_data')).Reload()
    (event,) = events.Images('samples')
    assert (event.step, event.height, event.width) == (2, *expected.shape[:2])
