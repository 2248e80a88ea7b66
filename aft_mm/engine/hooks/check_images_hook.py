"""Damaged images, found before the first iteration."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mmengine.hooks import Hook
from mmengine.runner import Runner
from PIL import Image
from torch.utils.data import DataLoader

from aft_mm.checks import check_int
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

# By the first bytes of a file, whatever its name says: JPEG's last marker, PNG's last chunk.
_ENDS: Mapping[bytes, bytes] = {
    b'\xff\xd8': b'\xff\xd9',
    b'\x89PNG': b'IEND\xaeB`\x82',
}
# What Pillow raises on damaged files, on such as are none, and on those of too many pixels.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError)


@HOOKS.register_module()
class CheckImagesHook(Hook):
    """Look for image files that cannot be read, of every set that a run reads, before it starts.

    OpenCV decodes a truncated JPEG without complaint and fills the rest with grey, and a damaged
    image of the validation set is met after an epoch only. The header and the end of each file are
    read; a file that is no JPEG or PNG, or does not end as one, zero bytes after the end aside, is
    decoded to be sure. Each rank looks at its share of the files.

    Args:
        num_threads: Files read at the same time.
    """

    def __init__(self, num_threads: int = 16) -> None:
        check_int('num_threads of CheckImagesHook', num_threads, 1)
        self.num_threads = num_threads

    def before_train(self, runner: Runner) -> None:
        """Check every file that ``img_path`` of the training and the validation set names.

        Raises:
            UserError: an image is missing, empty, truncated or none that can be read.
        """
        self._check(runner, 'training', runner.train_dataloader)
        if runner.val_loop is not None:
            self._check(runner, 'validation', runner.val_loop.dataloader)

    def before_test(self, runner: Runner) -> None:
        """The same for a test."""
        self._check(runner, 'test', runner.test_loop.dataloader)

    def _check(self, runner: Runner, name: str, loader: DataLoader) -> None:
        dataset = loader.dataset
        if not hasattr(dataset, 'get_data_info'):  # not one of mmengine's, names no files
            return
        infos = map(dataset.get_data_info, range(runner.rank, len(dataset), runner.world_size))
        paths = [info['img_path'] for info in infos if 'img_path' in info]
        if not paths:  # images of one file, such as CIFAR's
            return
        runner.logger.info(
            f'CheckImagesHook: this rank checks {len(paths)} image files of the {name} set'
        )
        with ThreadPoolExecutor(self.num_threads) as pool:
            for _ in pool.map(partial(check_image, name=name), paths):
                pass


def check_image(path: str, name: str = 'training') -> None:
    """Raise a :class:`UserError` if an image of the set ``name`` cannot be read as a whole."""
    what = f'image {path!r} of the {name} set'
    try:
        with open(path, 'rb') as file:
            start = file.read(8)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            tail = file.read().rstrip(b'\0')
    except OSError as error:
        raise UserError(f'{what} cannot be read: {error}') from error
    if size == 0:
        raise UserError(f'{what} is empty')
    end = next((_ENDS[magic] for magic in _ENDS if start.startswith(magic)), None)
    try:
        with Image.open(path) as image:
            mode = image.mode
            if end is None or not tail.endswith(end):
                image.load()
    except _DAMAGE as error:
        raise UserError(f'{what} is truncated, no image or of too many pixels: {error}') from error
    if mode == 'F':
        raise UserError(
            f'{what} has real values of an unknown range; save it with 8 or 16 bits a value'
        )
