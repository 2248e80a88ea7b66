"""SampleHook, SuperResolutionHook and PointCloudHook, and the sampling of images."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from mmengine.visualization import Visualizer
from PIL import Image

from aft_mm.datasets import PackSequence
from aft_mm.engine import PointCloudHook, SampleHook, SuperResolutionHook
from aft_mm.engine.hooks import pictures
from aft_mm.errors import UserError
from aft_mm.structures import SequenceSample
from aft_mm.visualization import (
    complete_images,
    draw_completions,
    draw_point_clouds,
    draw_samples,
    draw_super_resolution,
    sample_images,
    sample_points,
    super_resolve,
)

from ..generation_models import IMAGE, SOURCE, points_model, stack, super_resolution_model

# Image shape, tokens of PackSequence, grid: every way to lay out an image.
LAYOUTS = dict(
    grey=((6, 4, 1), 'subpixels', (24,)),
    grey_pixels=((6, 4, 1), 'pixels', (6, 4)),
    subpixels=((6, 4, 3), 'subpixels', (6, 12)),
    pixels=((6, 4, 3), 'pixels', (24,)),
)


def build(layout):
    shape, tokens, grid = LAYOUTS[layout]
    embedding = dict(type='aft_mm.TokenEmbedding', vocab_size=256, num_kinds=shape[2])
    head = dict(type='aft_mm.CategoricalHead', num_classes=256)
    if tokens == 'pixels':
        embedding = dict(type='aft_mm.PixelEmbedding', num_channels=shape[2])
        head = dict(type='aft_mm.LogisticMixtureHead', num_channels=shape[2])
    torch.manual_seed(0)
    model = MODELS.build(
        dict(
            type='aft_mm.AutoregressiveModel',
            decoder=stack('SequenceDecoder', grid=grid, embedding=embedding),
            head=dict(head, embed_dims=8),
        )
    )
    for parameter in model.parameters():  # else what is given hardly changes what is drawn
        torch.nn.init.normal_(parameter)
    return model, shape, PackSequence(image_shape=shape, tokens=tokens)


def images_of(shape, count=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def pairs():
    """Images, their sources, and both as validation data."""
    images, sources = images_of(IMAGE), images_of(SOURCE, seed=1)
    pack = PackSequence(image_shape=IMAGE, tokens='pixels')
    samples = [SequenceSample(source=torch.from_numpy(one).reshape(-1, 3)) for one in sources]
    inputs = [pack(dict(img=image))['inputs'] for image in images]
    data = [dict(inputs=x, data_samples=y) for x, y in zip(inputs, samples, strict=True)]
    return images, sources, data


class Album:
    def __init__(self):
        self.pictures = {}

    def add_image(self, name, image, step):
        self.pictures[name, step] = image


def make_runner(model, dataset=None, visualizer=None, epoch=1, length=15):
    def loop(dataset):
        return SimpleNamespace(dataloader=SimpleNamespace(dataset=dataset))

    return SimpleNamespace(
        model=model,
        train_loop=loop([dict(inputs=torch.zeros(length))]),
        val_loop=None if dataset is None else loop(dataset),
        visualizer=visualizer or Album(),
        epoch=epoch,
        max_epochs=7,
    )


def draw(hook, runner):
    hook.before_train(runner)
    hook.after_train_epoch(runner)
    return runner.visualizer.pictures


@pytest.mark.parametrize('layout', LAYOUTS)
class TestImageSampling:
    def test_samples_are_the_tokens_in_the_order_of_the_data(self, layout):
        model, shape, pack = build(layout)
        options = dict(seed=3, temperature=0.8, top_k=9)
        tokens = model.generate(model.decoder.max_length, batch_size=2, **options)
        samples = sample_images(model, shape, 2, **options)
        assert samples.shape == (2, *shape) and samples.dtype == np.uint8
        for image, expected in zip(samples, tokens, strict=True):
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
            with pytest.raises(UserError, match=f'num_given_rows must be 1 to 5 .* got {rows}'):
                complete_images(model, images_of(shape), rows)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_samples_and_completions_are_those_of_the_model(layout, capfd):
    model, shape, pack = build(layout)
    images, options = images_of(shape), dict(temperature=3.0, seed=4)
    hook = SampleHook(shape, interval=1, num_samples=5, num_images=2, num_completions=3, **options)
    found = draw(hook, make_runner(model, [pack(dict(img=image)) for image in images]))
    assert list(found) == [('samples', 2), ('completions', 2)]
    expected = draw_samples(sample_images(model, shape, 5, **options))
    np.testing.assert_array_equal(found['samples', 2], expected)
    completed = complete_images(model, images[:2].repeat(3, 0), 3, **options)
    completed = completed.reshape(2, 3, *shape)
    assert (completed[:, 0] != completed[:, 1]).any()
    expected = draw_completions(images[:2], completed, 3)
    np.testing.assert_array_equal(found['completions', 2], expected)
    assert capfd.readouterr().err.count('tokens') == 2


@pytest.mark.parametrize(
    'options', [{}, dict(num_images=2, num_samples=1, temperature=0.1, seed=3)]
)
def test_super_resolution_of_validation_images(options):
    images, sources, data = pairs()
    model = super_resolution_model()
    hook = SuperResolutionHook(IMAGE, SOURCE, interval=1, **options)
    found = draw(hook, make_runner(model, data))
    settings = dict(num_images=3, num_samples=3, temperature=0.8, seed=0) | options
    shown = settings.pop('num_images')
    samples = super_resolve(model, sources[:shown], IMAGE, settings.pop('num_samples'), **settings)
    expected = draw_super_resolution(sources[:shown], samples, images[:shown])
    assert list(found) == [('super_resolution', 2)]
    np.testing.assert_array_equal(found['super_resolution', 2], expected)


@pytest.mark.parametrize('options', [{}, dict(num_samples=5, up='y', temperature=0.1, seed=3)])
def test_clouds_from_nothing(options):
    model = points_model()
    found = draw(PointCloudHook(num_bits=5, interval=1, **options), make_runner(model))
    settings = dict(num_samples=8, up='z', temperature=1.0, seed=0) | options
    up, number = settings.pop('up'), settings.pop('num_samples')
    expected = draw_point_clouds(sample_points(model, number, 5, **settings), up, columns=4)
    assert list(found) == [('point_clouds', 2)]
    np.testing.assert_array_equal(found['point_clouds', 2], expected)


def test_sampling_does_not_change_the_run():
    grey, shape, pack = build('grey')
    for hook, model, data in (
        (SampleHook(shape, interval=1), grey, [pack(dict(img=images_of(shape)[0]))]),
        (SuperResolutionHook(IMAGE, SOURCE, interval=1), super_resolution_model(), pairs()[2]),
    ):
        runner = make_runner(model.train(), data)
        state = torch.get_rng_state(), np.random.get_state()[1].copy()
        assert draw(hook, runner)
        assert model.training and torch.equal(torch.get_rng_state(), state[0])
        assert (np.random.get_state()[1] == state[1]).all()
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_sampled_every_interval_and_at_the_end():
    for interval, expected in ((3, [3, 6, 7]), (0, [])):
        hook, steps = PointCloudHook(num_bits=5, interval=interval, num_samples=1), []
        for epoch in range(7):
            steps += [step for _, step in draw(hook, make_runner(points_model(), epoch=epoch))]
        assert steps == expected


def test_pictures_can_be_left_out():
    model, shape, pack = build('grey')
    dataset = [pack(dict(img=image)) for image in images_of(shape)]
    for options, expected in (
        (dict(num_samples=0), ['completions']),
        (dict(num_images=0), ['samples']),
    ):
        found = draw(SampleHook(shape, interval=1, **options), make_runner(model, dataset))
        assert [name for name, _ in found] == expected
    hook = SuperResolutionHook(IMAGE, SOURCE, interval=1)
    assert draw(hook, make_runner(super_resolution_model())) == {}  # no validation images


def test_pictures_that_need_validation_images_are_announced_as_missing(monkeypatch):
    said = []
    monkeypatch.setattr(pictures, 'warn', said.append)
    model, shape, _ = build('grey')
    for options in (dict(num_images=0), dict()):
        SampleHook(shape, **options).before_train(make_runner(model))
    SuperResolutionHook(IMAGE, SOURCE).before_train(make_runner(super_resolution_model()))
    assert [line.partition(', because')[0] for line in said] == [
        'SampleHook adds no completions',
        'SuperResolutionHook adds no pictures',
    ]


def test_runs_that_cannot_sample_stop_before_training():
    for hook, model, message in (
        (SampleHook((8, 8, 1)), build('grey')[0], r'H·W·C = 24, .* got \(8, 8, 1\)'),
        (
            SuperResolutionHook(IMAGE, IMAGE),
            super_resolution_model(),
            r'source_shape must be .* h·w·C = 18',
        ),
        (PointCloudHook(), points_model(), 'point clouds with num_bits=8 needs 256 values'),
        (
            PointCloudHook(num_bits=5),
            points_model(),
            'sample has 12 tokens, 3 for .* decoder holds 15',
        ),
    ):
        with pytest.raises(UserError, match=message):
            hook.before_train(make_runner(model, length=12))
    with pytest.raises(ValueError, match="up of a point cloud must be one of .* z, got 'w'"):
        PointCloudHook(up='w')


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
