from pathlib import Path
from typing import Any

from aft_mm.checks import check_path
from aft_mm.images import IMAGE_SUFFIXES, find_images, not_read
from aft_mm.openmmlab import warn
from aft_mm.registry import DATASETS

from .file_dataset import FileDataset


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
