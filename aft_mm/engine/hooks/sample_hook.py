"""What an image model draws while it learns."""

from collections.abc import Sequence

import numpy as np
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.runner import Runner

from aft_mm.registry import HOOKS
from aft_mm.visualization import draw_completions, draw_samples

from ..image_sampling import check_image_shape, complete_images, sample_images
from .task_model import task_model


@HOOKS.register_module()
class SampleHook(Hook):
    """Draw samples, and completions of validation images, every ``interval`` epochs.

    The pictures ``samples`` and ``completions`` go to the visual backends of the run: PNG files
    (LocalVisBackend) and TensorBoard. A row of ``completions`` shows the upper half of an image,
    what the model made of it, and the image itself. The random numbers of the run are left alone.

    Args:
        image_shape: ``(H, W, C)`` of the images.
        interval: Epochs between pictures; those of the last epoch are drawn always.
        num_samples: Images to draw from nothing; 0 leaves the picture out.
        num_images: Validation images to complete, the first ones; 0 leaves the picture out, as
            does a run without validation.
        num_completions: Completions of each.
        temperature: Divides the logits; below 1 the likely values become likelier.
        seed: Of the samples, the same in every epoch.
    """

    # After the checkpoint has been written.
    priority = 'LOWEST'

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
        self.image_shape = tuple(image_shape)
        self.interval = interval
        self.num_samples = num_samples
        self.num_images = num_images
        self.num_completions = num_completions
        self.options = dict(temperature=temperature, seed=seed)

    def before_train(self, runner: Runner) -> None:
        """Raise a :class:`UserError` if the model is made for images of another shape."""
        check_image_shape(task_model(runner), self.image_shape)

    @master_only
    def after_train_epoch(self, runner: Runner) -> None:
        """Draw, where the interval or the end of the run says so."""
        if not (self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner)):
            return
        step, model = runner.epoch + 1, task_model(runner)
        if self.num_samples:
            samples = sample_images(model, self.image_shape, self.num_samples, **self.options)
            runner.visualizer.add_image('samples', draw_samples(samples), step=step)
        if self.num_images and runner.val_loop is not None:
            dataset = runner.val_loop.dataloader.dataset
            images = np.stack([
                dataset[i]['inputs'].numpy().reshape(self.image_shape)
                for i in range(min(self.num_images, len(dataset)))
            ])
            num_given_rows = self.image_shape[0] // 2
            completions = complete_images(
                model, images.repeat(self.num_completions, axis=0), num_given_rows, **self.options)
            grid = draw_completions(
                images,
                completions.reshape(len(images), self.num_completions, *self.image_shape),
                num_given_rows)
            runner.visualizer.add_image('completions', grid, step=step)
