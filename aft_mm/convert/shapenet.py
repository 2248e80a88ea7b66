import argparse
import csv
import hashlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mmengine.utils import track_progress_rich

from aft_mm.datasets.point_clouds import MESH_SUFFIXES, SHAPE_ERROR, class_folder
from aft_mm.datasets.shape_files import problem_of
from aft_mm.errors import UnusableFile, UserError, import_from_extra, reason_of, user_errors
from aft_mm.images import not_read
from aft_mm.outputs import check_writable, write_whole

NUM_POINTS = 15_000
SPLITS = ('train', 'val', 'test')
# Meshes and archives that are not read.
OTHER_MESHES = tuple(
    '.3ds .3mf .blend .dae .fbx .gltf .gz .iges .igs .step .stp .usd .usdz .wrl .x3d .zip'.split()
)
SHAPENET_MODEL = ('models', 'model_normalized')  # the end of every path in ShapeNetCore v2


class Mesh(NamedTuple):
    path: Path
    folder: str
    name: str
    split: str | None  # None if the path does not contain it

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(f'{self.folder}/{self.name}'.encode()).digest()


def find_meshes(root: Path, classes: Sequence[str] | None) -> tuple[list[Mesh], str]:
    """Return the meshes, and a message on others that are not read, '' without."""
    if not root.is_dir():
        raise UserError(f'the folder of meshes {str(root)!r} does not exist')
    names = sorted(path.name for path in root.iterdir() if path.is_dir())
    meshes = []
    others: dict[str, str] = {}
    for name in names if classes is None else classes:
        folder = class_folder(name, names)
        if folder is None:
            raise UserError(
                f'class {name!r} has no folder in {str(root)!r}, which has '
                f'{", ".join(names) or "none"}'
            )
        for path in sorted((root / folder).rglob('*')):
            suffix = path.suffix.lower()
            if suffix in OTHER_MESHES:
                others[str(path.relative_to(root))] = suffix
            if suffix not in MESH_SUFFIXES:
                continue
            parts = path.relative_to(root / folder).with_suffix('').parts
            split = parts[0] if len(parts) > 1 and parts[0] in SPLITS else None
            parts = parts[split is not None :]
            if len(parts) > 2 and parts[-2:] == SHAPENET_MODEL:
                parts = parts[:-2]
            meshes.append(Mesh(path, folder, '-'.join(parts), split))
    kinds = ', '.join(MESH_SUFFIXES)
    passed_over = not_read(others, f'unpack or convert to one of {kinds}')
    if not meshes:
        raise UserError(
            f'{str(root)!r} has no mesh ({kinds}) in the folder of a class'
            + (passed_over and f': {passed_over}')
        )
    return meshes, passed_over


def read_splits(path: Path) -> dict[tuple[str, str], str]:
    if not path.is_file():
        raise UserError(f'--splits {str(path)!r} does not exist')
    with path.open(newline='', errors='replace') as file:
        try:
            rows = list(csv.DictReader(file))
        except csv.Error:  # a zero byte, or a field of more than 128 kB
            rows = []
    splits: dict[Any, Any] = {
        (row.get('synsetId'), row.get('modelId')): row.get('split') for row in rows
    }
    if not rows or any(None in key for key in splits) or not {*splits.values()} <= {*SPLITS}:
        raise UserError(
            f'--splits {str(path)!r} must be a table with the columns synsetId, '
            f'modelId and split ({", ".join(SPLITS)}) like the all.csv of ShapeNet'
        )
    return splits


def split_by_hash(mesh: Mesh, ratio: Sequence[float]) -> str:
    position = int.from_bytes(mesh.digest[:8], 'big') / 2**64 * sum(ratio)
    bounds = np.cumsum(ratio)
    return SPLITS[min(int(np.searchsorted(bounds, position, side='right')), 2)]


def find_targets(meshes: Sequence[Mesh], args: argparse.Namespace) -> dict[Path, Mesh]:
    official = None if args.splits is None else read_splits(args.splits)
    targets: dict[Path, Mesh] = {}
    for mesh in meshes:
        if mesh.split is None and official is not None:
            split = official.get((mesh.folder, mesh.name))
        else:
            split = mesh.split or split_by_hash(mesh, args.ratio)
        if split is None:
            continue
        other = targets.setdefault(args.out / mesh.folder / split / f'{mesh.name}.npy', mesh)
        if other is not mesh:
            raise UserError(
                f'{str(other.path)!r} and {str(mesh.path)!r} are both model '
                f'{mesh.name!r} of class {mesh.folder!r} in the {split} split; remove '
                'one of them'
            )
    return targets


def sample(mesh: Mesh, target: Path) -> str | None:
    """Write the points; return the reason if a mesh cannot be sampled."""
    trimesh = import_module('trimesh')
    try:
        if problem := problem_of(mesh.path):
            raise UnusableFile(problem)
        # Missing materials would only cause warnings.
        surface = trimesh.load_mesh(mesh.path, process=False, skip_materials=True)
        if not 0 < surface.area < np.inf:  # also false for NaN
            raise UnusableFile('it has no surface')
        seed = int.from_bytes(mesh.digest[8:16], 'big')
        points, _ = trimesh.sample.sample_surface(surface, NUM_POINTS, seed=seed)
        single = points.astype(np.float32)
        if np.abs(single - points).max() > SHAPE_ERROR * np.ptp(points, axis=0).max():
            raise UnusableFile('it is too far from the origin to keep its shape in float32')
    except UnusableFile as error:
        return f'{str(mesh.path)!r}: {error}'
    except Exception as error:  # parsers raise anything on damaged files
        return f'{str(mesh.path)!r}: {reason_of(error)}'
    with write_whole(target) as file:
        np.save(file, single)
    return None


def convert(args: argparse.Namespace) -> tuple[str, int]:
    """Convert, and return a report and the number of damaged meshes."""
    if min(args.ratio) < 0 or not sum(args.ratio) > 0:
        raise UserError(f'--ratio must be three shares, got {args.ratio}')
    if args.jobs < 1:
        raise UserError(f'--jobs must be at least 1, got {args.jobs}')
    import_from_extra('trimesh', 'clouds', 'meshes need')
    meshes, passed_over = find_meshes(args.meshes, args.classes)
    targets = find_targets(meshes, args)
    tasks = [(mesh, target) for target, mesh in targets.items() if not target.exists()]
    counts = {
        f'not in {args.splits}': len(meshes) - len(targets),
        'there already': len(targets) - len(tasks),
    }
    probes = {target.parent: str(target) for _, target in tasks}  # one file per folder
    check_writable('OUT', list(probes.values()))
    damaged = []
    if tasks:  # the progress bar does not accept an empty list
        results = track_progress_rich(sample, tasks, nproc=args.jobs, description='sampling')
        damaged = [reason for reason in results if reason is not None]
    written = len(tasks) - len(damaged)
    if not written and not counts['there already']:
        reason = f'; the first error is {damaged[0]}' if damaged else ''
        raise UserError(f'no mesh below {str(args.meshes)!r} could be sampled{reason}')
    others = ''.join(f', {count} {what}' for what, count in counts.items() if count)
    lines = [f'{args.out}: {written} written{others}', *filter(None, [passed_over])]
    if damaged:
        lines += [f'{len(damaged)} damaged:', *(f'  {reason}' for reason in damaged)]
    return '\n'.join(lines), len(damaged)


def run(args: argparse.Namespace) -> None:
    with user_errors(OSError):
        report, damaged = convert(args)
    print(report)
    if damaged:
        raise SystemExit(1)
