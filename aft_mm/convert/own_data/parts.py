"""What all kinds of user data share: sets, splits and the lines of a config."""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b, file_digest
from pathlib import Path
from pprint import pformat
from typing import TypeVar

import numpy as np

from aft_mm.checks import counted
from aft_mm.config.texts import Literal, read_lines
from aft_mm.errors import UnusableFile, UserError, quoted
from aft_mm.images import check_image, stored_size
from aft_mm.progress import progress

#: Names of the folders and lists of each part, which begins the words that name it.
NAMES = {
    'train': ('train', 'training'),
    'val': ('val', 'valid', 'validation'),
    'test': ('test', 'testing'),
}
PARTS = tuple(NAMES)
FOLDERS = {name: part for part, names in NAMES.items() for name in names}

# Images that a message names.
_MOST_NAMED = 3

Item = TypeVar('Item')
Parts = dict[str, list[str]]


@dataclass
class OwnData:
    """Data of the user: samples of each part, lines of the config, and files for ``split``.

    Args:
        about: What the data are, and the sizes of the images.
        counts: Samples by class.
        parts: Number of samples of ``'train'``, ``'val'`` and perhaps ``'test'``.
        config: Lines of the config.
        files: Contents of the files for ``split``, by name.
        notes: What is not used, and other surprises, one sentence each.
        given: The parts are those of the user.
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

    @property
    def is_sampled(self) -> bool:
        """Whether the validation samples were sampled from all."""
        return bool(self.files or self.links) and not self.given


def split_by_label(
    items: Sequence[Item],
    labels: Sequence[Hashable],
    share: float,
    seed: int,
    groups: Sequence[Hashable] | None = None,
) -> dict[str, list[Item]]:
    """Sample the same share of each label for ``'val'``, at least one of two or more.

    Args:
        items, labels: Samples and the label of each.
        share, seed: Share of ``'val'``, and seed of the sampling.
        groups: Group of each item; one part gets all items of a group.
    """
    rng = np.random.default_rng(seed)
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index in range(len(items)):
        members[index if groups is None else groups[index]].append(index)
    by_label: dict[Hashable, list[list[int]]] = defaultdict(list)
    for group in members.values():
        by_label[labels[group[0]]].append(group)
    chosen: set[int] = set()
    for ours in by_label.values():
        total = sum(map(len, ours))
        room = min(max(1, round(share * total)), total - 1)
        ours = [ours[index] for index in rng.permutation(len(ours))]
        fitting = []
        for group in ours:
            if len(group) <= room:
                fitting.append(group)
                room -= len(group)
        if not fitting and len(ours) > 1:
            fitting = [min(ours, key=len)]
        chosen.update(index for group in fitting for index in group)
    if groups is not None and not chosen:  # all are copies of one file
        return split_by_label(items, labels, share, seed)
    return {
        part: [item for index, item in enumerate(items) if (index in chosen) == (part == 'val')]
        for part in ('train', 'val')
    }


def copies(paths: Sequence[Path]) -> list[int]:
    """Return for each file the index of the first one with the same bytes."""
    sizes = [path.stat().st_size for path in paths]
    number = Counter(sizes)
    same = [index for index, size in enumerate(sizes) if number[size] > 1]
    keys: dict[int, int | bytes] = dict(enumerate(sizes))
    with ThreadPoolExecutor(16) as pool:
        hashes = pool.map(_hash, [paths[index] for index in same])
        keys.update(zip(same, progress(hashes, 'comparing images', len(same)), strict=True))
    first: dict[int | bytes, int] = {}
    return [first.setdefault(key, index) for index, key in keys.items()]


def _hash(path: Path) -> bytes:
    with path.open('rb', buffering=0) as file:
        return file_digest(file, blake2b).digest()


def copy_notes(
    names: Sequence[str],
    first: Sequence[int],
    labels: Sequence[Hashable] | None = None,
    parts: Sequence[str] | None = None,
    sampled: bool = True,
) -> Iterator[str]:
    labels = labels or [None] * len(names)
    parts = parts or ['all'] * len(names)
    pairs = [(copy, other) for copy, other in enumerate(first) if copy != other]
    for what, where, chosen in (
        (
            'files of another class',
            'one of the labels is wrong; both are used',
            [pair for pair in pairs if labels[pair[0]] != labels[pair[1]]],
        ),
        (
            'files of another part',
            'the metrics do not tell how the model does on new data',
            [pair for pair in pairs if parts[pair[0]] != parts[pair[1]]],
        ),
        (
            'others',
            'the copies of a file come to one part',
            [pair for pair in pairs if sampled and parts[pair[0]] == parts[pair[1]]],
        ),
    ):
        if chosen:
            files = '1 file is a copy' if len(chosen) == 1 else f'{len(chosen):,} files are copies'
            copy, other = (names[index] for index in chosen[0])
            original = '' if copy == other else f' of {other!r}'
            yield f'{files} of {what}, first {copy!r}{original}; {where}'


def rarest(labels: Sequence[Sequence[Hashable]]) -> list[Hashable]:
    """Return the label of each image that fewest images have, None without labels."""
    counts = Counter(label for there in labels for label in set(there))
    return [
        min(there, key=lambda label: (counts[label], str(label)), default=None) for there in labels
    ]


def _part_named(path: Path) -> str:
    # instances_train2017.json, train.txt, valid/_annotations.coco.json
    folder = path.parent.name.lower()
    words = re.split('[^a-z]+', path.stem.lower()) + [folder] * (folder in FOLDERS)
    return next((p for word in words for p in PARTS if word.startswith(p)), 'all')


def parts_of(paths: Sequence[Path], what: str, optional: bool = False) -> dict[str, Path]:
    """Return the files of ``'train'`` and ``'val'`` by their names, or the only one as ``'all'``.

    That of ``'test'`` is the last, if there is one.
    """
    by_part: dict[str, list[Path]] = {}
    for path in paths:
        by_part.setdefault(_part_named(path), []).append(path)
    chosen: dict[str, Path] = {}
    for part, ours in by_part.items():
        if len(ours) > 1 and part != 'all':  # VOC has trainval.txt and train.txt
            ours = [path for path in ours if path.stem == part]
        if len(ours) == 1:
            chosen[part] = ours[0]
    tests = by_part.pop('test', [])
    test = {part: chosen.pop(part) for part in ('test',) if part in chosen}
    if tests and not test:
        names = ', '.join(path.name for path in tests[:4])
        raise UserError(f'{what} must be one with test in its name, or none, got {names}')
    if len(chosen) == len(by_part) == 1:
        return {'all': next(iter(chosen.values())), **test}
    if {'train', 'val'} <= set(chosen):
        return {'train': chosen['train'], 'val': chosen['val'], **test}
    if optional and not by_part:
        return test
    raise UserError(
        f'{what} must be one, or one with train and one with val in its name, got '
        + (', '.join(path.name for path in paths[:4]) or 'none')
    )


def test_note(number: int) -> str:
    return f'{counted(number, "image")} of the test part: for `aft_mm test` only'


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
    return described_sizes(stored_sizes(paths))


def stored_sizes(paths: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Read all images; return width and height of the stored pixels, and EXIF orientation."""
    bad: dict[Path, UnusableFile] = {}

    def size(path: Path) -> tuple[int, int, int]:
        try:
            check_image(str(path), 'data')
            return stored_size(path)
        except UnusableFile as error:
            bad[path] = error
            return 0, 0, 0

    with ThreadPoolExecutor(16) as pool:
        sizes = list(progress(pool.map(size, paths), 'reading images', len(paths)))
    if not bad:
        return sizes
    first, *more = sorted(bad)
    if not more:
        raise UnusableFile(
            f'{bad[first]}; move or delete it, or replace it by one that can be read'
        )
    names = ', '.join(quoted(str(path)) for path in [first, *more][:_MOST_NAMED])
    rest = f' and {len(bad) - _MOST_NAMED:,} more' if len(bad) > _MOST_NAMED else ''
    raise UnusableFile(
        f'{len(bad):,} images cannot be read: {names}{rest}; the first: {bad[first]}; '
        'move or delete them, or replace them by some that can be read'
    )


def described_sizes(stored: Sequence[tuple[int, int, int]]) -> str:
    sizes = [(h, w) if orientation > 4 else (w, h) for w, h, orientation in stored]
    least, most = (
        '{} x {}'.format(*choose(sizes, key=lambda size: (size[0] * size[1], size)))
        for choose in (min, max)
    )
    return f'{least} pixels' if least == most else f'{least} to {most} pixels'
