from collections.abc import Iterator, Sequence

import numpy as np
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner

from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.openmmlab import warn
from aft_mm.registry import HOOKS
from aft_mm.visualization import (
    check_image_shape,
    check_points,
    check_super_resolution,
    check_up,
    complete_images,
    draw_completions,
    draw_point_clouds,
    draw_samples,
    draw_super_resolution,
    sample_images,
    sample_points,
    super_resolve,
)

from ..runner import task_model


class SampleVisualizationHook(Hook):
    """Add :meth:`pictures` to the visual backends every ``interval`` epochs, in the first rank.

    Args:
        interval: Epochs between pictures, which the last epoch also has; 0 for none.
        temperature: Divides the logits.
        seed: Seed of the samples, the same in every epoch.
    """

    priority = 'LOWEST'  # after the checkpoint has been written

    def __init__(self, interval: int = 10, temperature: float = 1.0, seed: int = 0) -> None:
        check_int('interval of a picture', interval, 0)
        check_number('temperature', temperature, above=0)
        check_int('seed', seed, 0)
        self.interval = interval
        self.options = dict(temperature=temperature, seed=seed, progress=True)

    @master_only
    def after_train_epoch(self, runner: Runner) -> None:
        last = self.interval and self.is_last_train_epoch(runner)
        if last or self.every_n_epochs(runner, self.interval):
            epoch = runner.epoch + 1
            print_log(f'{type(self).__name__} samples the pictures of epoch {epoch}', 'current')
            for name, picture in self.pictures(runner):
                runner.visualizer.add_image(name, picture, step=epoch)

    def pictures(self, runner: Runner) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names and pictures, uint8 ``[H, W, 3]``."""
        raise NotImplementedError


def validation_samples(runner: Runner, num: int) -> list[dict]:
    dataset = runner.val_loop.dataloader.dataset
    return [dataset[i] for i in range(min(num, len(dataset)))]


@HOOKS.register_module()
class SampleHook(SampleVisualizationHook):
    """Show samples, and completions of the upper halves of validation images.

    Args:
        image_shape: ``(H, W, C)`` of the images.
        num_samples: Unconditional samples; 0 omits the picture.
        num_images: First validation images to complete; 0 omits the picture.
        num_completions: Completions of each.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        interval: int = 10,
        num_samples: int = 16,
        num_images: int = 4,
        num_completions: int = 3,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(interval, temperature, seed)
        check_int('num_samples', num_samples, 0)
        check_int('num_images', num_images, 0)
        check_int('num_completions', num_completions, 1)
        self.image_shape = tuple(image_shape)
        self.num_samples = num_samples
        self.num_images = num_images
        self.num_completions = num_completions

    def before_train(self, runner: Runner) -> None:
        check_image_shape(task_model(runner), self.image_shape)
        if self.num_images and runner.val_loop is None:
            warn('SampleHook adds no completions, because the run has no validation images')

    def pictures(self, runner: Runner) -> Iterator[tuple[str, np.ndarray]]:
        model = task_model(runner)
        if self.num_samples:
            samples = sample_images(model, self.image_shape, self.num_samples, **self.options)
            yield 'samples', draw_samples(samples)
        if self.num_images and runner.val_loop is not None:
            pairs = validation_samples(runner, self.num_images)
            images = np.stack([pair['inputs'].numpy().reshape(self.image_shape) for pair in pairs])
            num_given_rows = self.image_shape[0] // 2
            completions = complete_images(
                model, images.repeat(self.num_completions, axis=0), num_given_rows, **self.options
            )
            completions = completions.reshape(len(images), self.num_completions, *self.image_shape)
            yield 'completions', draw_completions(images, completions, num_given_rows)


@HOOKS.register_module()
class PointCloudHook(SampleVisualizationHook):
    """Show the picture ``point_clouds`` of unconditional samples.

    Args:
        num_bits: Bits of a coordinate, as in the data.
        up: Vertical axis, ``'x'``, ``'y'`` or ``'z'``.
    """

    def __init__(
        self,
        num_bits: int = 8,
        up: str = 'z',
        interval: int = 10,
        num_samples: int = 8,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(interval, temperature, seed)
        check_up(up)
        check_int('num_bits', num_bits, 1, 8)
        check_int('num_samples', num_samples, 1)
        self.num_bits = num_bits
        self.up = up
        self.num_samples = num_samples

    def before_train(self, runner: Runner) -> None:
        model = task_model(runner)
        check_points(model, self.num_bits)
        length = len(runner.train_loop.dataloader.dataset[0]['inputs'])
        if length != model.decoder.max_length:
            raise UserError(
                f'the first training sample has {length} tokens, 3 for each of the num_points of '
                f'its pipeline, but the grid of the decoder holds {model.decoder.max_length}'
            )

    def pictures(self, runner: Runner) -> Iterator[tuple[str, np.ndarray]]:
        clouds = sample_points(task_model(runner), self.num_samples, self.num_bits, **self.options)
        yield 'point_clouds', draw_point_clouds(clouds, self.up, columns=min(4, len(clouds)))


@HOOKS.register_module()
class SuperResolutionHook(SampleVisualizationHook):
    """Show the picture ``super_resolution``: input, bicubic, samples and original side by side.

    Args:
        image_shape, source_shape: ``(H, W, C)`` of the images, ``(h, w, C)`` of the inputs.
        num_images: Number of first validation images.
        num_samples: Samples of each.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        source_shape: Sequence[int],
        interval: int = 10,
        num_images: int = 8,
        num_samples: int = 3,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        super().__init__(interval, temperature, seed)
        check_int('num_images', num_images, 1)
        check_int('num_samples', num_samples, 1)
        self.image_shape = tuple(image_shape)
        self.source_shape = tuple(source_shape)
        self.num_images = num_images
        self.num_samples = num_samples

    def before_train(self, runner: Runner) -> None:
        check_super_resolution(task_model(runner), self.image_shape, self.source_shape)
        if runner.val_loop is None:
            warn('SuperResolutionHook adds no pictures, because the run has no validation images')

    def pictures(self, runner: Runner) -> Iterator[tuple[str, np.ndarray]]:
        if runner.val_loop is None:
            return
        pairs = validation_samples(runner, self.num_images)
        targets = np.stack([pair['inputs'].numpy().reshape(self.image_shape) for pair in pairs])
        sources = np.stack(
            [pair['data_samples'].source.numpy().reshape(self.source_shape) for pair in pairs]
        )
        samples = super_resolve(
            task_model(runner), sources, self.image_shape, self.num_samples, **self.options
        )
        yield 'super_resolution', draw_super_resolution(sources, samples, targets)
