from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aft_mm.checks import check_path, check_text, is_int
from aft_mm.registry import DATASETS

from .file_dataset import FileDataset
from .point_files import MESH_SUFFIXES, POINT_SUFFIXES
from .shapenet import CLASS_NAMES, class_folder


@DATASETS.register_module()
class PointClouds(FileDataset):
    """Point clouds as ``<class>/<split>/*.npy`` (or .pcd, .ply, .pts, .xyz).

    The layout of ModelNet and ShapeNetCore.v2.PC15k. A sample is ``dict(points_path, class_name)``.

    Args:
        data_root: Folder that contains the class folders.
        classes: Names of folders or of ShapeNetCore v2 classes; ``'all'`` for every folder with the
            split.
        split: Folder in each class, such as ``'train'``.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`; ``test_mode`` defaults to True except
            for ``'train'``.
    """

    def __init__(
        self,
        data_root: str,
        classes: str | Sequence[str | int] = 'all',
        split: str = 'train',
        **kwargs: Any,
    ) -> None:
        check_path('data_root', data_root)
        check_text('split', split)
        if classes != 'all':
            classes = [classes] if isinstance(classes, (str, int)) else classes
            # --cfg-options reads names of digits as int; the synset 02954340 has eight of them.
            classes = [
                str(name).zfill(8 if name >= 10**6 else 1) if is_int(name) else name
                for name in classes
            ]
            for name in classes:
                check_text('classes', name)
        self.classes: Any = classes
        self.split = split
        kwargs.setdefault('test_mode', split != 'train')
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self) -> list[dict]:
        root = Path(self.data_root)
        if not root.is_dir():
            raise FileNotFoundError(f'data_root {str(root)!r} is not a folder')
        there = sorted(path.name for path in root.iterdir() if path.is_dir())
        if self.classes == 'all':
            classes: Sequence[str] = [name for name in there if (root / name / self.split).is_dir()]
        else:
            classes = self.classes
        if not classes:
            raise ValueError(f'data_root {str(root)!r} has no folder <class>/{self.split}')
        return [
            dict(points_path=str(path), class_name=CLASS_NAMES.get(name, name))
            for name in classes
            for path in self._files(root, name, there)
        ]

    def _files(self, root: Path, name: str, there: list[str]) -> list[Path]:
        folder = class_folder(name, there)
        if folder is None:
            raise FileNotFoundError(
                f'class {name!r} has no folder in data_root {str(root)!r}, '
                f'which has {", ".join(there) or "none"}'
            )
        directory = root / folder / self.split
        files = sorted(directory.glob('*'))
        clouds = [path for path in files if path.suffix.lower() in POINT_SUFFIXES]
        if not clouds:
            meshes = any(path.suffix.lower() in MESH_SUFFIXES for path in files)
            hint = '; it has meshes, which `aft_mm convert shapenet` samples' if meshes else ''
            raise ValueError(
                f'class {name!r} has no point cloud ({", ".join(POINT_SUFFIXES)}) in '
                f'{str(directory)!r}{hint}'
            )
        return clouds
