"""Folders of image files."""

import os
from pathlib import Path
from typing import Any

from aft_mm.checks import check_choice, check_path, described
from aft_mm.images import IMAGE_SUFFIXES, find_images, not_read
from aft_mm.openmmlab import warn
from aft_mm.registry import DATASETS

from .file_dataset import FileDataset

SPLITS = ('train', 'val', 'test')  # 0, 1 and 2 in the list


@DATASETS.register_module()
class CelebA(FileDataset):
    """CelebA as ``img_align_celeba/*.jpg`` and ``list_eval_partition.txt``.

    A sample is ``dict(img_path)``.

    Args:
        data_root: Folder that contains both.
        split: ``'train'``, ``'val'`` or ``'test'``.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`; ``test_mode`` defaults to True except
            for ``'train'``.
    """

    def __init__(self, data_root: str, split: str = 'train', **kwargs: Any) -> None:
        check_path('data_root', data_root)
        check_choice('split', split, SPLITS)
        self.split = split
        kwargs.setdefault('test_mode', split != 'train')
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict]:
        root = Path(self.data_root)
        partition, folder = root / 'list_eval_partition.txt', root / 'img_align_celeba'
        for path in (partition, folder):
            if not path.exists():
                raise FileNotFoundError(
                    f'{path} of CelebA does not exist: point data_root (or '
                    'AFT_MM_DATA) at the folder that contains it'
                )
        names = read_partition(partition)[self.split]
        if not names:
            raise ValueError(f'{partition} has no image of the {self.split} split of CelebA')
        there = set(os.listdir(folder))
        missing = [name for name in names if name not in there]
        if missing:
            raise FileNotFoundError(
                f'{folder} lacks {len(missing)} of the {len(names)} images that {partition.name} '
                f'lists in the {self.split} split, the first is {missing[0]}; to use a part of '
                'CelebA, remove the other lines from the list'
            )
        return [dict(img_path=str(folder / name)) for name in names]


def read_partition(path: Path) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    if not path.is_file():
        raise ValueError(f'{path} must be a list of images, but is not a regular file')
    try:
        lines = path.read_text(encoding='utf-8-sig').splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not valid UTF-8 in byte {error.start}') from error
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if len(words) != 2 or words[1] not in ('0', '1', '2'):
            raise ValueError(
                f'line {number} of {path} must be the name of an image and 0, 1 or 2 '
                f'for train, val or test, got {described(line)}'
            )
        names[SPLITS[int(words[1])]].append(words[0])
    return names


@DATASETS.register_module()
class ImageFolder(FileDataset):
    """All image files below a folder, ordered by path; a sample is ``dict(img_path)``.

    Args:
        data_root: The folder; subfolders are searched too.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`; for validation ``test_mode=True``.

    Raises:
        FileNotFoundError: If ``data_root`` does not exist.
        ValueError: If it contains no image file.
    """

    def __init__(self, data_root: str, **kwargs: Any) -> None:
        check_path('data_root', data_root)
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict]:
        root = Path(self.data_root)
        if not root.is_dir():
            raise FileNotFoundError(f'data_root {str(root)!r} is not a folder')
        paths, others = find_images(root)
        passed_over = not_read(others)
        if not paths:
            raise ValueError(
                f'data_root {str(root)!r} contains no image file ({", ".join(IMAGE_SUFFIXES)})'
                + (passed_over and f': {passed_over}')
            )
        if passed_over:
            warn(f'data_root {str(root)!r}: {passed_over}')
        return [dict(img_path=str(root / path)) for path in paths]
