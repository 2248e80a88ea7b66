"""Point clouds by class, and the 55 classes of ShapeNetCore v2."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from aft_mm.checks import check_path, check_text, is_int
from aft_mm.registry import DATASETS

from .file_dataset import FileDataset
from .point_files import MESH_SUFFIXES, POINT_SUFFIXES

#: WordNet synset of each class, the name of its folder.
SYNSETS = dict(
    airplane='02691156',
    bag='02773838',
    basket='02801938',
    bathtub='02808440',
    bed='02818832',
    bench='02828884',
    birdhouse='02843684',
    bookshelf='02871439',
    bottle='02876657',
    bowl='02880940',
    bus='02924116',
    cabinet='02933112',
    camera='02942699',
    cap='02954340',
    car='02958343',
    cellphone='02992529',
    chair='03001627',
    clock='03046257',
    dishwasher='03207941',
    earphone='03261776',
    faucet='03325088',
    file='03337140',
    guitar='03467517',
    helmet='03513137',
    jar='03593526',
    keyboard='03085013',
    knife='03624134',
    lamp='03636649',
    laptop='03642806',
    mailbox='03710193',
    microphone='03759954',
    microwave='03761084',
    monitor='03211117',
    motorbike='03790512',
    mug='03797390',
    piano='03928116',
    pillow='03938244',
    pistol='03948459',
    pot='03991062',
    printer='04004475',
    remote_control='04074963',
    rifle='04090263',
    rocket='04099429',
    skateboard='04225987',
    sofa='04256520',
    speaker='03691459',
    stove='04330267',
    table='04379243',
    telephone='04401088',
    tin_can='02946921',
    tower='04460130',
    train='04468005',
    trash_bin='02747177',
    vessel='04530566',
    washer='04554684',
)
#: Class of each synset.
CLASS_NAMES = {synset: name for name, synset in SYNSETS.items()}


def class_folder(name: str, there: Collection[str]) -> str | None:
    """Return the existing folder of a class, its name or its synset, or None."""
    return next((folder for folder in (name, SYNSETS.get(name)) if folder in there), None)


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

    Raises:
        FileNotFoundError: If a folder is missing.
        ValueError: If a class has no point cloud in the split.
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
