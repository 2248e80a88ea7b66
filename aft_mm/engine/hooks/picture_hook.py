"""What a model draws while it learns."""

from collections.abc import Iterator

import numpy as np
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner

from aft_mm.checks import check_int


class PictureHook(Hook):
    """Add :meth:`pictures` to the visual backends of the run every ``interval`` epochs.

    They become PNG files (LocalVisBackend) and appear in TensorBoard. Only the first rank draws,
    and the random numbers of the run are left alone.

    Args:
        interval: Epochs between pictures; those of the last epoch are drawn always.
    """

    # After the checkpoint has been written.
    priority = 'LOWEST'

    def __init__(self, interval: int = 10) -> None:
        check_int('interval of a picture', interval, 1)
        self.interval = interval

    @master_only
    def after_train_epoch(self, runner: Runner) -> None:
        """Draw, where the interval or the end of the run says so."""
        if self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner):
            epoch = runner.epoch + 1
            print_log(f'{type(self).__name__} draws the pictures of epoch {epoch}', 'current')
            for name, picture in self.pictures(runner):
                runner.visualizer.add_image(name, picture, step=epoch)

    def pictures(self, runner: Runner) -> Iterator[tuple[str, np.ndarray]]:
        """Names and pictures, uint8 ``[H, W, 3]``."""
        raise NotImplementedError


def validation_samples(runner: Runner, num: int) -> list[dict]:
    """The first ``num`` samples of the validation set, fewer where it holds fewer."""
    dataset = runner.val_loop.dataloader.dataset
    return [dataset[i] for i in range(min(num, len(dataset)))]
