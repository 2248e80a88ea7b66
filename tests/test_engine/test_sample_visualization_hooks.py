"""SuperResolutionHook and PointCloudHook; SampleHook has a file of its own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aft_mm.datasets import PackSequence
from aft_mm.engine import PointCloudHook, SuperResolutionHook
from aft_mm.errors import UserError
from aft_mm.structures import SequenceSample
from aft_mm.visualization import (
    draw_point_clouds,
    draw_super_resolution,
    sample_points,
    super_resolve,
)

from ..generation_models import IMAGE, SOURCE, points_model, super_resolution_model


class Album:
    def __init__(self):
        self.pictures = {}

    def add_image(self, name, image, step):
        self.pictures[name, step] = image


def make_runner(model, dataset=None, epoch=1, length=15):
    def loop(dataset):
        return SimpleNamespace(dataloader=SimpleNamespace(dataset=dataset))

    return SimpleNamespace(
        model=model,
        train_loop=loop([dict(inputs=torch.zeros(length))]),
        val_loop=None if dataset is None else loop(dataset),
        visualizer=Album(),
        epoch=epoch,
        max_epochs=7,
    )


def pairs(images, sources):
    pack = PackSequence(image_shape=IMAGE, tokens='pixels')
    return [
        dict(
            inputs=pack(dict(img=image))['inputs'],
            data_samples=SequenceSample(source=torch.from_numpy(source).reshape(-1, 3)),
        )
        for image, source in zip(images, sources, strict=True)
    ]


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (3, *IMAGE), dtype=np.uint8)


@pytest.fixture
def sources():
    return np.random.default_rng(1).integers(0, 256, (3, *SOURCE), dtype=np.uint8)


def draw(hook, runner):
    hook.before_train(runner)
    hook.after_train_epoch(runner)
    return runner.visualizer.pictures


@pytest.mark.parametrize(
    ('options', 'shown'),
    [
        ({}, 3),
        (dict(num_images=2), 2),
        (dict(num_samples=1), 3),
        (dict(temperature=0.1), 3),
        (dict(seed=3), 3),
    ],
)
def test_super_resolution_of_validation_images(images, sources, options, shown):
    model = super_resolution_model()
    found = draw(
        SuperResolutionHook(IMAGE, SOURCE, interval=1, **options),
        make_runner(model, pairs(images, sources)),
    )
    samples = super_resolve(
        model,
        sources[:shown],
        IMAGE,
        options.get('num_samples', 3),
        seed=options.get('seed', 0),
        temperature=options.get('temperature', 0.8),
    )
    expected = draw_super_resolution(sources[:shown], samples, images[:shown])
    assert list(found) == [('super_resolution', 2)]
    np.testing.assert_array_equal(found['super_resolution', 2], expected)


@pytest.mark.parametrize(
    'options', [{}, dict(num_samples=5), dict(up='y'), dict(temperature=0.1), dict(seed=3)]
)
def test_clouds_from_nothing(options):
    model = points_model()
    found = draw(PointCloudHook(num_bits=5, interval=1, **options), make_runner(model))
    clouds = sample_points(
        model,
        options.get('num_samples', 8),
        5,
        seed=options.get('seed', 0),
        temperature=options.get('temperature', 1.0),
    )
    assert list(found) == [('point_clouds', 2)]
    np.testing.assert_array_equal(
        found['point_clouds', 2], draw_point_clouds(clouds, options.get('up', 'z'), columns=4)
    )


def test_sampled_every_interval_and_at_the_end():
    for interval, expected in ((3, [3, 6, 7]), (0, [])):
        hook, steps = PointCloudHook(num_bits=5, interval=interval, num_samples=1), []
        for epoch in range(7):
            runner = make_runner(points_model(), epoch=epoch)
            hook.after_train_epoch(runner)
            steps += [step for _, step in runner.visualizer.pictures]
        assert steps == expected


def test_super_resolution_without_validation_images_has_no_picture(caplog):
    runner = make_runner(super_resolution_model())
    with caplog.at_level('WARNING'):
        assert draw(SuperResolutionHook(IMAGE, SOURCE, interval=1), runner) == {}


def test_sampling_does_not_change_the_run(images, sources):
    runner = make_runner(super_resolution_model(), pairs(images, sources))
    runner.model.train()
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    draw(SuperResolutionHook(IMAGE, SOURCE, interval=1), runner)
    assert runner.model.training and torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()


def test_runs_that_cannot_sample_stop_before_training(images, sources):
    model = super_resolution_model()
    with pytest.raises(UserError, match=r'source_shape must be .* h·w·C = 18'):
        SuperResolutionHook(IMAGE, IMAGE).before_train(make_runner(model, pairs(images, sources)))
    with pytest.raises(UserError, match='point clouds with num_bits=8 needs 256 values'):
        PointCloudHook().before_train(make_runner(points_model()))
    with pytest.raises(UserError, match='sample has 12 tokens, 3 for .* decoder holds 15'):
        PointCloudHook(num_bits=5).before_train(make_runner(points_model(), length=12))
    with pytest.raises(ValueError, match="up of a point cloud must be one of .* z, got 'w'"):
        PointCloudHook(up='w')
