"""Find the images of boxes in the folders that annotation tools write."""

import os
from collections.abc import Iterator
from pathlib import Path

from aft_mm.config.boxes import other_format
from aft_mm.config.lists import read_json
from aft_mm.errors import UserError
from aft_mm.images import is_hidden

from .parts import FOLDERS, PARTS, filled_lines, parts_of

#: Most json files that are read to find those of COCO.
MOST_READ = 20
#: Where boxes can be, for messages.
LAYOUTS = {
    'coco': 'a COCO json next to the images or to a folder of them, or one for each part',
    'voc': 'an xml file of VOC for each image, in Annotations/ or next to it',
}


class Files:
    """The files below a folder that are not hidden, found by the ends of their paths."""

    def __init__(self, root: Path, depth: int | None = None) -> None:
        self.root = root
        self.paths = list(_visible(root, depth))
        self.by_name: dict[str, list[str]] = {}
        for path in self.paths:
            self.by_name.setdefault(path.rpartition('/')[2], []).append(path)

    def ending(self, name: str) -> list[str]:
        """Return the paths that end in a name, which may have folders and backslashes."""
        for written in dict.fromkeys((name, name.replace('\\', '/'))):
            written = os.path.normpath(written)
            candidates = self.by_name.get(written.rpartition('/')[2], ())
            found = [path for path in candidates if f'/{path}'.endswith(f'/{written}')]
            if found:
                return found
        return []

    def with_suffix(self, suffix: str) -> list[str]:
        return [path for path in self.paths if path.lower().endswith(suffix)]


def _visible(root: Path, depth: int | None) -> Iterator[str]:
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        inside = os.path.relpath(folder, root)
        level = 0 if inside == '.' else inside.count('/') + 1
        real = os.path.realpath(folder)
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        if real in seen or depth == level:  # a link to a folder above would never end
            folders.clear()
        if real not in seen:
            seen.add(real)
            for name in sorted(names):
                if not is_hidden(name):
                    yield name if inside == '.' else f'{inside}/{name}'


def part_of(path: str) -> str:
    """Return the part that a folder of a path names, such as ``'val'`` for ``'a/valid/1.xml'``."""
    for folder in path.lower().split('/')[:-1]:
        if folder in FOLDERS:
            return FOLDERS[folder]
    return ''


def nearest(paths: list[str], near: str, part: str = '') -> str:
    """Return the one of several paths in the part and closest to a file; refuse two equally close."""

    def distance(path: str) -> tuple[int, ...]:
        folders, others = path.split('/')[:-1], near.split('/')[:-1]
        common = os.path.commonprefix([folders, others])
        parts = {p for p in PARTS for name in folders if name.lower().startswith(p)}
        is_other = bool(part and parts and part not in parts)
        return is_other, -len(common), -len({*folders} & {*others}), len(folders)

    first, *others = sorted(paths, key=distance)
    if others and distance(others[0]) == distance(first):
        raise UserError(f'image of {near!r} must be one file, got {first!r} and {others[0]!r}')
    return first


def coco_files(root: Path) -> dict[str, Path]:
    if root.is_file():
        return {'all': root}
    files = Files(root)
    paths = [root / path for path in files.with_suffix('.json')]
    # COCO also has files of captions and keypoints.
    paths = [path for path in paths if path.name.startswith('instances_')] or paths
    if not paths:
        refuse_other_format('coco', files)
    try:
        return parts_of(paths, f'{root}: json files')
    except UserError:
        found = []
        for path in paths[:MOST_READ]:
            content = read_json(path, 'annotations ')
            other = other_format(content)
            if other:
                raise UserError(
                    f'annotations {str(path)!r} are those of {other}; export them as COCO json'
                ) from None
            if isinstance(content, dict) and {'images', 'annotations'} <= content.keys():
                found.append(path)
        folders = [part_of(path.relative_to(root).as_posix()) for path in found]
        if sorted(folders) in (['train', 'val'], ['test', 'train', 'val']):
            parts = dict(zip(folders, found, strict=True))
            return {part: parts[part] for part in PARTS if part in parts}
        return parts_of(found or paths, f'{root}: json files')


def refuse_other_format(kind: str, files: Files) -> None:
    other, suffix = ('voc', '.xml') if kind == 'coco' else ('coco', '.json')
    rule = f'folder {str(files.root)!r} must hold {LAYOUTS[kind]}, got'
    for path in files.with_suffix(suffix)[:1]:
        raise UserError(f'{rule} {path!r}; try `aft_mm new {other}`')
    texts = [path for path in files.with_suffix('.txt')[:MOST_READ] if _is_yolo(files.root / path)]
    for path in [*texts, *files.with_suffix('.csv')][:1]:
        name = 'the boxes of YOLO' if texts else 'a table'
        raise UserError(f'{rule} {name} in {path!r}; export the boxes as COCO json')


def _is_yolo(path: Path) -> bool:
    words = (filled_lines(path) or [''])[0].split()
    try:
        values = [float(word) for word in words]
    except ValueError:
        return False
    return len(values) > 4 and values[0].is_integer() and 0 <= min(values) <= max(values[1:]) <= 1
