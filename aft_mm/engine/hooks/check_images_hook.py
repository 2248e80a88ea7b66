"""Damaged images, found before the first iteration."""

import os
from concurrent.futures import ThreadPoolExecutor

from mmengine.hooks import Hook
from mmengine.runner import Runner
from PIL import Image

from aft_mm.checks import check_int
from aft_mm.cli.errors import UserError
from aft_mm.registry import HOOKS

_END_OF_IMAGE = b'\xff\xd9'  # JPEG's last marker


@HOOKS.register_module()
class CheckImagesHook(Hook):
    """Look for empty and truncated image files of the training set before training starts.

    OpenCV decodes a truncated JPEG without complaint and fills the rest with grey. Only the end of
    each file is read; a JPEG (.jpg, .jpeg) that does not end with the end marker, zero bytes after
    it aside, is decoded to be sure. Files of other types need only be there and not be empty. Each
    rank looks at its share of the files.

    Args:
        num_threads: Files read at the same time.
    """

    def __init__(self, num_threads: int = 16) -> None:
        check_int('num_threads of CheckImagesHook', num_threads, 1)
        self.num_threads = num_threads

    def before_train(self, runner: Runner) -> None:
        """Check every file that ``img_path`` of the training set names.

        Raises:
            UserError: an image is missing, empty or truncated.
        """
        dataset = runner.train_dataloader.dataset
        if not hasattr(dataset, 'get_data_info'):  # not one of mmengine's, names no files
            return
        infos = map(dataset.get_data_info, range(runner.rank, len(dataset), runner.world_size))
        paths = [info['img_path'] for info in infos if 'img_path' in info]
        runner.logger.info(
            f'CheckImagesHook: this rank checks {len(paths)} image files of the training set')
        with ThreadPoolExecutor(self.num_threads) as pool:
            for _ in pool.map(check_image, paths):
                pass


def check_image(path: str) -> None:
    """Raise a :class:`UserError` that names ``path`` if the file is missing, empty or truncated."""
    try:
        with open(path, 'rb') as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            tail = file.read()
    except OSError as error:
        raise UserError(f'image {path!r} of the training set cannot be read: {error}') from error
    if size == 0:
        raise UserError(f'image {path!r} of the training set is empty')
    if path.lower().endswith(('.jpg', '.jpeg')) and not tail.rstrip(b'\0').endswith(_END_OF_IMAGE):
        try:
            with Image.open(path) as image:
                image.load()
        except OSError as error:
            raise UserError(f'image {path!r} of the training set is truncated: {error}') from error
