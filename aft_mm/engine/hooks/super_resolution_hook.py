"""What a super-resolution model makes of validation images while it learns."""

from collections.abc import Iterator, Sequence

import numpy as np
from mmengine.runner import Runner

from aft_mm.checks import check_int, check_number, check_sizes
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS
from aft_mm.visualization import check_super_resolution, draw_super_resolution, super_resolve

from .picture_hook import PictureHook, validation_samples
from .task_model import task_model


@HOOKS.register_module()
class SuperResolutionHook(PictureHook):
    """Draw the picture ``super_resolution``: input, bicubic, samples and original side by side.

    Args:
        image_shape: ``(H, W, C)`` of the images.
        source_shape: ``(h, w, C)`` of the inputs.
        interval: As for :class:`PictureHook`.
        num_images: Validation images, the first ones.
        num_samples: Samples of each.
        temperature: Divides the logits; below 1 the likely values become likelier.
        seed: Of the samples, the same in every epoch.
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
        super().__init__(interval)
        check_sizes('image_shape (H, W, C)', image_shape, (3,))
        check_sizes('source_shape (h, w, C)', source_shape, (3,))
        check_int('num_images', num_images, 1)
        check_int('num_samples', num_samples, 1)
        check_number('temperature', temperature, above=0)
        check_int('seed', seed, 0)
        self.image_shape = tuple(image_shape)
        self.source_shape = tuple(source_shape)
        self.num_images = num_images
        self.num_samples = num_samples
        self.options = dict(temperature=temperature, seed=seed, progress=True)

    def before_train(self, runner: Runner) -> None:
        """Look at model and run before the first epoch is spent.

        Raises:
            UserError: the model is made for other shapes, or the run has no validation.
        """
        check_super_resolution(task_model(runner), self.image_shape, self.source_shape)
        if runner.val_loop is None:
            raise UserError(
                'SuperResolutionHook draws what the model makes of validation images, '
                'but the run has no val_dataloader'
            )

    def pictures(self, runner: Runner) -> Iterator[tuple[str, np.ndarray]]:
        """The one picture."""
        pairs = validation_samples(runner, self.num_images)
        targets = np.stack([pair['inputs'].numpy().reshape(self.image_shape) for pair in pairs])
        sources = np.stack(
            [pair['data_samples'].source.numpy().reshape(self.source_shape) for pair in pairs]
        )
        samples = super_resolve(
            task_model(runner), sources, self.image_shape, self.num_samples, **self.options
        )
        yield 'super_resolution', draw_super_resolution(sources, samples, targets)
