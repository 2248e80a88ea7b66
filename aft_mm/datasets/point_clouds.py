"""Point clouds: their files, and data sets by class, with the 55 classes of ShapeNetCore v2."""

import re
import warnings
from collections.abc import Callable, Collection, Sequence
from io import BytesIO
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
from .shape_files import are_numbers, ply_problem

#: Largest error of a coordinate in float32 [longest edges].
SHAPE_ERROR = 1e-4


def read_points(path: str | Path) -> np.ndarray:
    """Read the points of a ``.npy``, ``.pcd``, ``.ply`` or text file (``.pts``, ``.xyz``).

    Returns:
        float64 [N, 3], x, y, z in the unit of the file.

    Raises:
        UnusableFile: If the file is missing, damaged, a mesh or of another kind, or the points are
            not finite, have no extent, or have lost their shape in float32 far from the origin.
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
    single = points.dtype == np.float32
    points = points.astype(np.float64)
    try:
        _, side = bounding_cube(points)
    except ValueError as error:
        raise UnusableFile(f'point cloud {quoted(path)} cannot be used: {error}') from error
    if single and np.spacing(np.float32(np.abs(points).max())) / 2 > SHAPE_ERROR * side:
        raise UnusableFile(
            f'point cloud {quoted(path)} must be near the origin to keep its shape in float32, got '
            f'coordinates up to {np.abs(points).max():.7g} with a longest edge of {side:.4g}'
        )
    return points


def _unreadable(path: Path, reason: str) -> UnusableFile:
    return UnusableFile(f'point cloud {quoted(path)} cannot be read: {reason}')


def _read_pcd(path: Path) -> np.ndarray:
    header = _check_pcd_header(path)
    pypcd4 = import_from_extra('pypcd4', 'clouds', '.pcd files need')
    content = path.read_bytes()
    if header.get('DATA') == ['ascii']:
        # Text has more digits than the float32 in which its size would be read.
        kinds = zip(header.get('SIZE', []), header.get('TYPE', []), strict=True)
        sizes = ' '.join('8' if kind == 'F' else size for size, kind in kinds)
        content = re.sub(rb'(?mi)^[ \t]*SIZE[ \t].*$', f'SIZE {sizes}'.encode(), content, count=1)
    cloud = pypcd4.PointCloud.from_fileobj(BytesIO(content))
    if not {*'xyz'} <= {*cloud.fields}:
        raise _unreadable(path, f'it has no x, y and z, but {", ".join(cloud.fields)}')
    if len(cloud.pc_data) != cloud.metadata.points:
        raise _unreadable(
            path, f'{cloud.metadata.points} points announced, {len(cloud.pc_data)} found'
        )
    return cloud.numpy(('x', 'y', 'z'))


def _check_pcd_header(path: Path) -> dict[str, list[str]]:
    header: dict[str, list[str]] = {}
    with path.open('rb') as file:
        for _ in range(_PCD_HEADER_LINES):
            words = file.readline(_PCD_LINE_BYTES).decode(errors='replace').split()
            if words:
                header[words[0].upper()] = words[1:]
            if 'DATA' in header:
                break
        begin = file.tell()
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
    if header.get('DATA') == ['binary'] and 'POINTS' in header:
        with path.open('rb') as file:
            file.seek(begin + num_bytes)
            if file.read().strip(b'\0 \r\n'):  # PCL fills up with zeros
                raise _unreadable(path, 'it has more bytes than its header announces')
    return header


def _read_ply(path: Path) -> np.ndarray:
    trimesh = import_from_extra('trimesh', 'clouds', '.ply files need')
    content = path.read_bytes()
    header, end, body = content.partition(b'end_header')
    if re.search(rb'(?m)^format[ \t]+ascii\b', header):
        header = _SINGLE.sub(rb'\1double\2', header)  # as for .pcd
    cloud = trimesh.load(BytesIO(header + end + body), file_type='ply')
    if not isinstance(cloud, trimesh.PointCloud):
        raise _unreadable(path, 'it is a mesh, which `aft_mm convert shapenet` samples')
    if problem := ply_problem(content):
        raise _unreadable(path, problem)
    # trimesh makes float64 of them.
    return cloud.vertices.astype(np.float32) if _SINGLE.search(header) else cloud.vertices


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


_SINGLE = re.compile(rb'(?m)^(property[ \t]+)float(?:32)?([ \t]+[xyz]\b)')
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
    entry.split('=')
    for entry in """
    airplane=02691156 bag=02773838 basket=02801938 bathtub=02808440 bed=02818832 bench=02828884
    birdhouse=02843684 bookshelf=02871439 bottle=02876657 bowl=02880940 bus=02924116
    cabinet=02933112 camera=02942699 cap=02954340 car=02958343 cellphone=02992529 chair=03001627
    clock=03046257 dishwasher=03207941 earphone=03261776 faucet=03325088 file=03337140
    guitar=03467517 helmet=03513137 jar=03593526 keyboard=03085013 knife=03624134 lamp=03636649
    laptop=03642806 mailbox=03710193 microphone=03759954 microwave=03761084 monitor=03211117
    motorbike=03790512 mug=03797390 piano=03928116 pillow=03938244 pistol=03948459 pot=03991062
    printer=04004475 remote_control=04074963 rifle=04090263 rocket=04099429 skateboard=04225987
    sofa=04256520 speaker=03691459 stove=04330267 table=04379243 telephone=04401088 tin_can=02946921
    tower=04460130 train=04468005 trash_bin=02747177 vessel=04530566 washer=04554684
    """.split()
)
#: Class of each synset.
CLASS_NAMES = {synset: name for name, synset in SYNSETS.items()}


def class_folder(name: str, there: Collection[str]) -> str | None:
    """Return the existing folder of a class, its name or its synset, or None.

    Raises:
        UserError: Both exist, of which one would be left out.
    """
    folders = [folder for folder in (name, SYNSETS.get(name)) if folder in there]
    if len(folders) > 1:
        raise UserError(
            f'class {name!r} must have one folder, got {folders[0]!r} and {folders[1]!r}: '
            'put the files of both into one'
        )
    return folders[0] if folders else None


@DATASETS.register_module()
class PointClouds(FileDataset):
    """Point clouds as ``<class>/<split>/*.npy`` (or .pcd, .ply, .pts, .xyz).

    The layout of ModelNet and ShapeNetCore.v2.PC15k. A sample is ``dict(points_path, class_name)``.

    Args:
        data_root: Folder that contains the class folders.
        classes: Names of folders or of ShapeNetCore v2 classes; ``'all'`` for every folder with the
            split.
        split: Folder in each class, such as ``'train'``; a cloud is one file in it.
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
        with_split = [name for name in there if (root / name / self.split).is_dir()]
        classes: Sequence[str] = with_split if self.classes == 'all' else self.classes
        if not classes:
            raise ValueError(f'data_root {str(root)!r} has no folder <class>/{self.split}')
        others: dict[str, str] = {}
        folders: dict[str, str] = {}
        for name in classes:
            folder = class_folder(name, with_split) or class_folder(name, there)
            if folder is None:
                raise FileNotFoundError(
                    f'class {name!r} has no folder in data_root {str(root)!r}, '
                    f'which has {", ".join(there) or "none"}'
                )
            if folder in folders:
                raise ValueError(
                    f'classes must have folders that differ, got {folders[folder]!r} and {name!r}, '
                    f'both of {folder!r}'
                )
            folders[folder] = name
        clouds = [
            dict(points_path=str(path), class_name=CLASS_NAMES.get(name, name))
            for folder, name in folders.items()
            for path in self._files(root / folder / self.split, name, others)
        ]
        if others:
            kinds = f'convert to {", ".join(POINT_SUFFIXES[:-1])} or {POINT_SUFFIXES[-1]}'
            warn(f'data_root {str(root)!r}: {not_read(others, kinds)}')
        return clouds

    def _files(self, directory: Path, name: str, others: dict[str, str]) -> list[Path]:
        files = sorted(directory.glob('*'))
        clouds = [path for path in files if path.suffix.lower() in POINT_SUFFIXES]
        if not clouds:
            meshes = any(path.suffix.lower() in MESH_SUFFIXES for path in files)
            hint = '; it has meshes, which `aft_mm convert shapenet` samples' if meshes else ''
            raise ValueError(
                f'class {name!r} has no point cloud ({", ".join(POINT_SUFFIXES)}) in '
                f'{str(directory)!r}{hint}'
            )
        stems: dict[str, Path] = {}
        for path in clouds:
            other = stems.setdefault(path.stem, path)
            if other is not path:
                raise ValueError(
                    f'cloud {path.stem!r} of class {name!r} must be one file, got {str(other)!r} and '
                    f'{path.name}'
                )
        others |= {
            str(path.relative_to(self.data_root)): path.suffix.lower() or 'without an ending'
            for path in files
            if path.suffix.lower() not in POINT_SUFFIXES
            and not is_hidden(path.name)
            and path.is_file()
        }
        return clouds
