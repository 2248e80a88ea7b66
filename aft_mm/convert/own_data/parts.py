"""What all kinds of user data share: sets, splits and the lines of a config."""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from typing import TypeVar

import numpy as np

from aft_mm.config.lists import read_lines
from aft_mm.config.writing import Literal
from aft_mm.errors import UserError
from aft_mm.images import check_image, image_size
from aft_mm.progress import progress

#: Names of the folders and lists of a validation set.
VALIDATION = ('val', 'valid', 'validation')
#: Beginnings of the words that name a part.
PARTS = ('train', 'val', 'test')
FOLDERS = ('train', *VALIDATION, 'test')

Item = TypeVar('Item')
Parts = dict[str, list[str]]


@dataclass
class OwnData:
    """Data of the user: samples of each part, lines of the config, and files for ``split``.

    Args:
        about: What the data are, and the sizes of the images.
        counts: Samples by class.
        parts: Number of samples of ``'train'`` and ``'val'``.
        config: Lines of the config.
        files: Contents of the files for ``split``, by name.
        notes: What is not used, and other surprises, one sentence each.
        given: The parts are those of the user, although there are files for ``split``.
        links: Targets of the links for ``split``, by name.
    """

    about: list[str]
    counts: Counter[str]
    parts: dict[str, int]
    config: list[str]
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    given: bool = False
    links: dict[str, Path] = field(default_factory=dict)


def split_by_label(
    items: Sequence[Item], labels: Sequence[Hashable], share: float, seed: int
) -> dict[str, list[Item]]:
    """Sample the same share of each label for ``'val'``, at least one of two or more; keep the order."""
    rng = np.random.default_rng(seed)
    groups: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    chosen: set[int] = set()
    for ours in groups.values():
        number = min(max(1, round(share * len(ours))), len(ours) - 1)
        chosen.update(rng.permutation(ours)[:number].tolist())
    return {
        part: [item for index, item in enumerate(items) if (index in chosen) == (part == 'val')]
        for part in ('train', 'val')
    }


def rarest(labels: Sequence[Sequence[Hashable]]) -> list[Hashable]:
    """Return the label of each image that fewest images have, None without labels."""
    counts = Counter(label for there in labels for label in set(there))
    return [
        min(there, key=lambda label: (counts[label], str(label)), default=None) for there in labels
    ]


def parts_of(paths: Sequence[Path], what: str, optional: bool = False) -> dict[str, Path]:
    """Return the files of ``'train'`` and ``'val'`` by their names, or the only one as ``'all'``."""
    by_part: dict[str, list[Path]] = {}
    for path in paths:
        # instances_train2017.json, train.txt, valid/_annotations.coco.json
        folder = path.parent.name.lower()
        words = re.split('[^a-z]+', path.stem.lower()) + [folder] * (folder in FOLDERS)
        part = next((p for word in words for p in PARTS if word.startswith(p)), 'all')
        if part != 'test':
            by_part.setdefault(part, []).append(path)
    chosen: dict[str, Path] = {}
    for part, ours in by_part.items():
        if len(ours) > 1 and part != 'all':  # VOC has trainval.txt and train.txt
            ours = [path for path in ours if path.stem == part]
        if len(ours) == 1:
            chosen[part] = ours[0]
    if len(chosen) == len(by_part) == 1:
        return {'all': next(iter(chosen.values()))}
    if {'train', 'val'} <= set(chosen):
        return {'train': chosen['train'], 'val': chosen['val']}
    if optional and not by_part:
        return {}
    raise UserError(
        f'{what} must be one, or one with train and one with val in its name, got '
        + (', '.join(path.name for path in paths[:4]) or 'none')
    )


def part_lists(parts: Parts) -> dict[str, str]:
    return {f'{part}.txt': ''.join(f'{stem}\n' for stem in parts[part]) for part in parts}


def filled_lines(path: Path) -> list[str]:
    return [line for line in read_lines(path) if line]


def class_lines(root: Path, names: Sequence[str], comment: str) -> Iterator[str]:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f'the class {name!r} of {str(root)!r} must be in UTF-8') from None
    shown = pformat([*map(Literal, names)], width=88, compact=True)
    yield f'classes = {shown}  # {comment}' if '\n' not in shown else f'classes = {shown}'


def image_sizes(paths: Sequence[Path]) -> str:
    """Read all images, and describe their sizes: ``'64 x 48 to 640 x 480 pixels'``."""

    def size(path: Path) -> tuple[int, int]:
        check_image(str(path), 'data')
        return image_size(path)

    with ThreadPoolExecutor(16) as pool:
        sizes = list(progress(pool.map(size, paths), 'reading images', len(paths)))
    least, most = (
        '{} x {}'.format(*choose(sizes, key=lambda size: size[0] * size[1]))
        for choose in (min, max)
    )
    return f'{least} pixels' if least == most else f'{least} to {most} pixels'
