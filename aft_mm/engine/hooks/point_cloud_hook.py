"""Point clouds that a model draws while it learns."""

from collections.abc import Iterator

import numpy as np
from mmengine.runner import Runner

from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS
from aft_mm.visualization import check_points, check_up, draw_point_clouds, sample_points

from .picture_hook import PictureHook
from .task_model import task_model


@HOOKS.register_module()
class PointCloudHook(PictureHook):
    """Draw the picture ``point_clouds``, clouds from nothing.

    Args:
        num_bits: Of a coordinate, as in the data.
        up: The axis of the height, ``'x'``, ``'y'`` or ``'z'``.
        interval: As for :class:`PictureHook`.
        num_samples: Clouds to draw.
        temperature: Divides the logits; below 1 the likely values become likelier.
        seed: Of the samples, the same in every epoch.

    Raises:
        ValueError: an argument is out of range.
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
        super().__init__(interval)
        check_up(up)
        check_int('num_bits', num_bits, 1, 8)
        check_int('num_samples', num_samples, 1)
        check_number('temperature', temperature, above=0)
        check_int('seed', seed, 0)
        self.num_bits = num_bits
        self.up = up
        self.num_samples = num_samples
        self.options = dict(temperature=temperature, seed=seed, progress=True)

    def before_train(self, runner: Runner) -> None:
        """Look at model and data before the first epoch is spent.

        Raises:
            UserError: the model is made for other tokens, or for clouds of another size than it
                learns: it would draw points beyond those that it has seen.
        """
        model = task_model(runner)
        check_points(model, self.num_bits)
        length = len(runner.train_loop.dataloader.dataset[0]['inputs'])
        if length != model.decoder.max_length:
            raise UserError(
                f'the first training sample has {length} tokens, 3 for each of the num_points of '
                f'its pipeline, but the grid of the decoder holds {model.decoder.max_length}'
            )

    def pictures(self, runner: Runner) -> Iterator[tuple[str, np.ndarray]]:
        """The one picture."""
        clouds = sample_points(task_model(runner), self.num_samples, self.num_bits, **self.options)
        yield 'point_clouds', draw_point_clouds(clouds, self.up, columns=min(4, len(clouds)))
