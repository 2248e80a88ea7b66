"""Point clouds: their files, and data sets by class, with the 55 classes of ShapeNetCore v2."""

import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aft_mm.checks import check_path, check_regular, check_text, described, is_int
from aft_mm.errors import UnusableFile, UserError, import_from_extra, quoted, reason_of
from aft_mm.images import is_hidden, not_read
from aft_mm.openmmlab import warn
from aft_mm.registry import DATASETS
from aft_mm.tokenizers import bounding_cube

from .file_dataset import FileDataset
from .shape_files import are_numbers, problem_of


def read_points(path: str | Path) -> np.ndarray:
    """Read the points of a ``.npy``, ``.pcd``, ``.ply`` or text file (``.pts``, ``.xyz``).

    Returns:
        float64 [N, 3], x, y, z in the unit of the file; float32 loses shapes far from the origin.

    Raises:
        UnusableFile: If the file is missing, damaged, a mesh or of another kind, or the points are
            not finite or have no extent.
        UserError: If the package that reads the file is missing.
    """
    path = Path(path)
    if path.suffix.lower() not in _READERS:
        raise UnusableFile(
            f'point cloud {quoted(path)} must end in one of {", ".join(POINT_SUFFIXES)}'
        )
    try:
        check_regular(path)
        points = np.asarray(_READERS[path.suffix.lower()](path))
    except UserError:
        raise
    except Exception as error:  # parsers raise anything for a damaged file
        raise _unreadable(path, reason_of(error)) from error
    if points.ndim != 2 or points.shape[1] != 3 or points.dtype.kind not in 'fiu':
        raise UnusableFile(
            f'point cloud {quoted(path)} must contain numbers [N, 3], got '
            f'{points.dtype} {list(points.shape)}'
        )
    points = points.astype(np.float64)
    try:
        bounding_cube(points)
    except ValueError as error:
        raise UnusableFile(f'point cloud {quoted(path)} cannot be used: {error}') from error
    return points


def _unreadable(path: Path, reason: str) -> UnusableFile:
    return UnusableFile(f'point cloud {quoted(path)} cannot be read: {reason}')


def _read_pcd(path: Path) -> np.ndarray:
    _check_pcd_header(path)
    cloud = import_from_extra('pypcd4', 'clouds', '.pcd files need').PointCloud.from_path(path)
    if not {*'xyz'} <= {*cloud.fields}:
        raise _unreadable(path, f'it has no x, y and z, but {", ".join(cloud.fields)}')
    if len(cloud.pc_data) != cloud.metadata.points:
        raise _unreadable(
            path, f'{cloud.metadata.points} points announced, {len(cloud.pc_data)} found'
        )
    return cloud.numpy(('x', 'y', 'z'))


def _check_pcd_header(path: Path) -> None:
    header: dict[str, list[str]] = {}
    with path.open('rb') as file:
        for _ in range(_PCD_HEADER_LINES):
            words = file.readline(_PCD_LINE_BYTES).decode(errors='replace').split()
            if words:
                header[words[0].upper()] = words[1:]
            if 'DATA' in header:
                break
    sizes = [int(word) for word in header.get('SIZE', [])]
    counts = [int(word) for word in header.get('COUNT', ['1'] * len(sizes))]
    points = max(int(header.get(key, ['0'])[0]) for key in ('POINTS', 'WIDTH', 'HEIGHT'))
    num_bytes = points * sum(size * count for size, count in zip(sizes, counts, strict=True))
    if (
        min(sizes + counts, default=1) < 1
        or sum(counts) > _PCD_VALUES
        or (num_bytes > _PCD_RATIO * path.stat().st_size)
    ):
        raise _unreadable(path, f'{points} points of {sum(counts)} values do not fit into it')


def _read_ply(path: Path) -> np.ndarray:
    trimesh = import_from_extra('trimesh', 'clouds', '.ply files need')
    cloud = trimesh.load(path)
    if not isinstance(cloud, trimesh.PointCloud):
        raise _unreadable(path, 'it is a mesh, which `aft_mm convert shapenet` samples')
    if problem := problem_of(path):
        raise _unreadable(path, problem)
    return cloud.vertices


def _read_npy(path: Path) -> np.ndarray:
    with path.open('rb') as file:
        array = np.load(file, allow_pickle=False)
        if file.read(1):
            raise _unreadable(path, 'it has more bytes than its header announces')
    return array


def _read_text(path: Path) -> np.ndarray:
    try:
        with warnings.catch_warnings(action='ignore'):  # numpy's, about an empty file
            points = np.loadtxt(path, ndmin=2, encoding='utf-8-sig')
    except ValueError as error:
        if problem := _line_problem(path):
            raise _unreadable(path, problem) from error
        raise
    if not points.size:
        raise _unreadable(path, 'it has no points')
    return points


def _line_problem(path: Path) -> str:
    with path.open(encoding='utf-8-sig') as file:
        for number, line in enumerate(file, 1):
            words = line.partition('#')[0].split()
            if words and not (len(words) == 3 and are_numbers(words)):
                row = described(line.strip())
                return f'line {number} must be three numbers with spaces between, got {row}'
    return ''


_PCD_HEADER_LINES = 64
_PCD_LINE_BYTES = 2**16
_PCD_VALUES = 4096  # per point
_PCD_RATIO = 300  # the highest compression of LZF
_READERS: dict[str, Callable[[Path], np.ndarray]] = {
    '.npy': _read_npy,
    '.pcd': _read_pcd,
    '.ply': _read_ply,
    '.pts': _read_text,
    '.xyz': _read_text,
}
POINT_SUFFIXES = tuple(_READERS)
#: Meshes, which `aft_mm convert shapenet` samples.
MESH_SUFFIXES = ('.glb', '.obj', '.off', '.ply', '.stl')


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
        others: dict[str, str] = {}
        clouds = [
            dict(points_path=str(path), class_name=CLASS_NAMES.get(name, name))
            for name in classes
            for path in self._files(root, name, there, others)
        ]
        if others:
            kinds = f'convert to {", ".join(POINT_SUFFIXES[:-1])} or {POINT_SUFFIXES[-1]}'
            warn(f'data_root {str(root)!r}: {not_read(others, kinds)}')
        return clouds

    def _files(self, root: Path, name: str, there: list[str], others: dict[str, str]) -> list[Path]:
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
        others |= {
            str(path.relative_to(root)): path.suffix.lower() or 'without an ending'
            for path in files
            if path.suffix.lower() not in POINT_SUFFIXES
            and not is_hidden(path.name)
            and path.is_file()
        }
        return clouds
