"""Images that a model draws while it learns."""

from collections.abc import Iterator, Sequence

import numpy as np
from mmengine.runner import Runner

from aft_mm.checks import check_int, check_number, check_sizes
from aft_mm.registry import HOOKS
from aft_mm.visualization import (
    check_image_shape,
    complete_images,
    draw_completions,
    draw_samples,
    sample_images,
)

from .picture_hook import PictureHook, validation_samples
from .task_model import task_model


@HOOKS.register_module()
class SampleHook(PictureHook):
    """Draw samples, and completions of validation images, every ``interval`` epochs.

    The pictures are ``samples`` and ``completions``. A row of ``completions`` shows the upper half
    of an image, what the model made of it, and the image itself.

    Args:
        image_shape: ``(H, W, C)`` of the images.
        interval: As for :class:`PictureHook`.
        num_samples: Images to draw from nothing; 0 leaves the picture out.
        num_images: Validation images to complete, the first ones; 0 leaves the picture out, as
            does a run without validation.
        num_completions: Completions of each.
        temperature: Divides the logits; below 1 the likely values become likelier.
        seed: Of the samples, the same in every epoch.
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
        super().__init__(interval)
        check_sizes('image_shape (H, W, C)', image_shape, (3,))
        check_int('num_samples', num_samples, 0)
        check_int('num_images', num_images, 0)
        check_int('num_completions', num_completions, 1)
        check_number('temperature', temperature, above=0)
        check_int('seed', seed, 0)
        self.image_shape = tuple(image_shape)
        self.num_samples = num_samples
        self.num_images = num_images
        self.num_completions = num_completions
        self.options = dict(temperature=temperature, seed=seed, progress=True)

    def before_train(self, runner: Runner) -> None:
        """Raise a :class:`UserError` if the model is made for images of another shape."""
        check_image_shape(task_model(runner), self.image_shape)

    def pictures(self, runner: Runner) -> Iterator[tuple[str, np.ndarray]]:
        """``samples`` and ``completions``, unless left out."""
        model = task_model(runner)
        if self.num_samples:
            samples = sample_images(model, self.image_shape, self.num_samples, **self.options)
            yield 'samples', draw_samples(samples)
        if self.num_images and runner.val_loop is not None:
            images = np.stack(
                [
                    sample['inputs'].numpy().reshape(self.image_shape)
                    for sample in validation_samples(runner, self.num_images)
                ]
            )
            num_given_rows = self.image_shape[0] // 2
            completions = complete_images(
                model, images.repeat(self.num_completions, axis=0), num_given_rows, **self.options
            )
            yield (
                'completions',
                draw_completions(
                    images,
                    completions.reshape(len(images), self.num_completions, *self.image_shape),
                    num_given_rows,
                ),
            )
