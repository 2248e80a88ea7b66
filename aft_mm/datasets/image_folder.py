"""Any folder of images."""

from pathlib import Path

from aft_mm.checks import check_path
from aft_mm.registry import DATASETS

from .file_dataset import FileDataset
from .image_files import IMAGE_SUFFIXES


@DATASETS.register_module()
class ImageFolder(FileDataset):
    """Every image file below a folder, in the order of their paths.

    A sample is ``dict(img_path)``.

    Args:
        data_root: The folder; images may lie in folders below it.
        **kwargs: Those of :class:`mmengine.dataset.BaseDataset`, such as ``pipeline``;
            ``test_mode=True`` belongs to validation and test.

    Raises:
        FileNotFoundError: ``data_root`` does not exist.
        ValueError: It holds no image file.
    """

    def __init__(self, data_root: str, **kwargs) -> None:
        check_path('data_root', data_root)
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict]:
        """One ``dict(img_path)`` per image."""
        root = Path(self.data_root)
        if not root.is_dir():
            raise FileNotFoundError(f'data_root {str(root)!r} is no folder.')
        paths = sorted(
            path
            for path in root.rglob('*')
            if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
        )
        if not paths:
            raise ValueError(
                f'data_root {str(root)!r} holds no image file ({", ".join(IMAGE_SUFFIXES)}).'
            )
        return [dict(img_path=str(path)) for path in paths]
