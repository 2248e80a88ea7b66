from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from aft_mm.checks import check_regular
from aft_mm.errors import UnusableFile, UserError, import_from_extra, quoted, reason_of
from aft_mm.tokenizers import bounding_cube

LONGEST_HEADER = 1000  # lines


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
    announced = _announced(path)
    if announced not in (None, len(cloud.vertices)):
        raise _unreadable(path, f'{announced} points announced, {len(cloud.vertices)} found')
    return cloud.vertices


def _announced(path: Path) -> int | None:
    with path.open('rb') as file:
        for line in islice(file, LONGEST_HEADER):
            words = line.split()
            if words[:2] == [b'element', b'vertex']:
                return int(words[2])
            if words == [b'end_header']:
                break
    return None


_PCD_HEADER_LINES = 64
_PCD_LINE_BYTES = 2**16
_PCD_VALUES = 4096  # per point
_PCD_RATIO = 300  # the highest compression of LZF
_READERS: dict[str, Callable[[Path], np.ndarray]] = {
    '.npy': partial(np.load, allow_pickle=False),
    '.pcd': _read_pcd,
    '.ply': _read_ply,
    '.pts': partial(np.loadtxt, ndmin=2),
    '.xyz': partial(np.loadtxt, ndmin=2),
}
POINT_SUFFIXES = tuple(_READERS)
#: Meshes, which `aft_mm convert shapenet` samples.
MESH_SUFFIXES = ('.glb', '.obj', '.off', '.ply', '.stl')
