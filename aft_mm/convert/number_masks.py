import argparse
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from aft_mm.config.masks import IGNORED, ONE_NUMBER, differing_palettes, used_palette
from aft_mm.errors import UserError, user_errors
from aft_mm.images import IMAGE_FORMATS, read_rgb, turned
from aft_mm.progress import progress

from .own_data.masks import Pairs, find_masks, jpeg_mask, some, split_colour
from .own_data.parts import filled_lines

MOST = IGNORED  # classes
WIDE = 1 << 24  # added to values of more than 8 bits, which are no colours
GREY = 0x010101  # colour of the grey level 1
WHITE = 0xFFFFFF
NOTHING = -1  # replaces an ignored colour


@dataclass
class Source:
    """A folder of masks: where each is written, links to images, and the pixels of each colour."""

    name: str
    targets: dict[Path, Path]
    links: dict[Path, Path] = field(default_factory=dict)
    colours: Counter[int] = field(default_factory=Counter)
    numbers: Counter[int] = field(default_factory=Counter)
    palettes: dict[Path, dict[int, tuple[int, ...]]] = field(default_factory=dict)


def colours_of(path: Path, ignored: Sequence[str] = (), by_number: bool = False) -> np.ndarray:
    """Return the colour of each pixel as 0xrrggbb, of 16 or 32 bits the value + WIDE, [H, W].

    by_number: Whether the value of a palette counts as a grey level.
    """
    values = None
    with suppress(OSError), Image.open(path, formats=IMAGE_FORMATS) as mask:  # read_rgb refuses it
        if mask.mode.startswith('I'):
            values = WIDE + np.asarray(turned(mask)).astype(np.int64)
        elif mask.mode in ONE_NUMBER:
            values = GREY * np.asarray(turned(mask)).astype(np.int64)
            by_number |= mask.mode == 'L'
    if values is not None and (by_number or values.max(initial=0) >= WIDE):
        colours = values
    else:
        red, green, blue = np.moveaxis(read_rgb(path)[0].astype(np.int64), -1, 0)
        colours = red << 16 | green << 8 | blue
    if ignored:
        shown = [int(text[1:], 16) for text in ignored if text[0] == '#']
        stored = [kind for text in ignored if text[0] != '#' for kind in _kinds(int(text))]
        there = np.isin(colours if values is None else values, stored)
        colours = np.where(there | np.isin(colours, shown), NOTHING, colours)
    return colours


def _kinds(value: int) -> tuple[int, int]:
    return (GREY * value if value <= 255 else WIDE + value), WIDE + value


def name_of(colour: int) -> str:
    return f'#{colour:06x}' if colour < WIDE else str(colour - WIDE)


def find_sources(folders: Sequence[Path], out: Path) -> tuple[list[Source], Path]:
    if len(folders) == 1:
        layout = find_masks(folders[0])
        if layout:
            return [_of_pairs(*item, out) for item in layout.items()], out / 'classes.txt'
        jpeg = jpeg_mask(folders[0])
        if jpeg:
            raise UserError(f'masks must not be JPEG, which changes colours, got {str(jpeg)!r}')
        return [_of_folder(folders[0], out)], out.parent / 'classes.txt'
    names = Counter(folder.name for folder in folders)
    twice = next((name for name, number in names.items() if number > 1), None)
    if twice:
        raise UserError(f'SOURCE must be folders of different names, got {twice!r} twice')
    return [_of_folder(folder, out / folder.name) for folder in folders], out / 'classes.txt'


def _of_folder(source: Path, out: Path) -> Source:
    paths = sorted(
        path for path in source.rglob('*.*') if path.is_file() and not path.name.startswith('.')
    )
    if not paths:
        raise UserError(f'the folder {str(source)!r} must hold masks, got none')
    targets = {path: out / path.relative_to(source).with_suffix('.png') for path in paths}
    twice = next((path for path, number in Counter(targets.values()).items() if number > 1), None)
    if twice:
        raise UserError(
            f'masks must have names that differ in more than the suffix, got two for {twice}'
        )
    return Source(str(source), targets)


def _of_pairs(part: str, pairs: Pairs, out: Path) -> Source:
    names = ('images', 'masks') if part == 'all' else (part, f'{part}_masks')
    images, masks = (out / name for name in names)
    for note in pairs.notes:
        print(note)
    return Source(
        str(pairs.masks),
        {
            pairs.masks / mask: masks / f'{os.path.splitext(image)[0]}.png'
            for image, mask in pairs.files.items()
        },
        {images / image: (pairs.images / image).absolute() for image in pairs.files},
    )


def count_colours(sources: Sequence[Source], ignored: Sequence[str]) -> None:
    paths = [(source, path) for source in sources for path in source.targets]
    clear: list[Path] = []
    white: list[Path] = []
    for source, path in progress(paths, 'counting colours'):
        found = [_counted(path, ignored)]
        palette = _palette_of(path)
        if palette is not None:
            source.palettes[path] = palette
            found.append(_counted(path, ignored, by_number=True))
        is_clear, is_white = _whites(path, found[0])
        clear += [path] * is_clear
        white += [path] * is_white
        if clear and white:
            raise UserError(
                'masks must not have transparent pixels, which become white, and white ones, got '
                f'{str(clear[0])!r} and {str(white[0])!r}'
            )
        source.colours += found[0]
        source.numbers += found[-1]
        if len(source.colours.keys() - {NOTHING}) > MOST:
            raise UserError(
                f'masks must have at most {MOST} colours, one for each class, got more at '
                f'{str(path)!r}; save masks without smoothing and not as JPEG'
            )


def _counted(path: Path, ignored: Sequence[str], by_number: bool = False) -> Counter[int]:
    colours, pixels = np.unique(colours_of(path, ignored, by_number), return_counts=True)
    return Counter(dict(zip(colours.tolist(), pixels.tolist(), strict=True)))


def _whites(path: Path, colours: Counter[int]) -> tuple[bool, bool]:
    """Return whether a mask has transparent pixels, which are laid on white, and white ones."""
    with suppress(OSError), Image.open(path, formats=IMAGE_FORMATS) as mask:
        if mask.mode != 'P' and mask.has_transparency_data:
            pixels = np.asarray(turned(mask).convert('RGBA'))
            return bool((pixels[..., 3] == 0).any()), bool((pixels == 255).all(-1).any())
    return False, WHITE in colours


def _palette_of(path: Path) -> dict[int, tuple[int, ...]] | None:
    """Return the used colours of a mask of indices, None for one of other values."""
    with suppress(OSError), Image.open(path, formats=IMAGE_FORMATS) as mask:
        return used_palette(mask) if mask.mode in ('P', '1') else None
    return None


def values_of(sources: Sequence[Source]) -> set[int]:
    """Return the values of masks as grey levels, without 255 and what is ignored."""
    values = {colour for source in sources for colour in source.numbers}
    return values - {NOTHING, GREY * IGNORED}


def read_classes(path: Path) -> tuple[list[str], list[str]]:
    """Return the lines of ``classes.txt`` or CVAT's ``labelmap.txt``, and the colour of each."""
    lines = filled_lines(path)
    if path.name == 'labelmap.txt':
        rows = [line.split(':') for line in lines if line[0] != '#']
        if not all(len(row) > 1 and re.fullmatch(r'\d+,\d+,\d+', row[1]) for row in rows):
            raise UserError(f'{str(path)!r} must have lines such as "cat:255,0,0::"')
        colours = [tuple(map(int, row[1].split(','))) for row in rows]
        if max(map(max, colours), default=0) > 255:
            raise UserError(f'{str(path)!r} must have colours of 0 to 255')
        lines = [f'#{bytes(c).hex()} {row[0]}' for c, row in zip(colours, rows, strict=True)]
    shown = [split_colour(line)[0] for line in lines]
    if not any(shown):
        values = [re.match(r'\d+(?!\S)', line) for line in lines]
        shown = [match[0] for match in values if match]
        if len(shown) < len(lines):
            return lines, []
    wrong = next((line for line, text in zip(lines, shown, strict=True) if not text), None)
    if wrong is not None:
        raise UserError(
            f'{str(path)!r} must begin every line with a colour, such as "#ff0000 cat", got {wrong!r}'
        )
    twice = next((text for text, number in Counter(shown).items() if number > 1), None)
    if twice:
        raise UserError(f'{str(path)!r} must list a colour once, got {twice} twice')
    return lines, shown


def run(args: argparse.Namespace) -> None:
    with user_errors(ValueError, OSError):
        for text in args.ignore:
            if not re.fullmatch('#[0-9a-fA-F]{6}|[0-9]{1,10}', text):
                raise UserError(
                    f'--ignore must be a colour such as "#e0e0c0" or a value such as 255, got {text!r}'
                )
        if args.out.exists():
            raise UserError(f'{str(args.out)!r} exists already')
        for folder in args.source:
            if not folder.is_dir():
                raise UserError(f'SOURCE must be a folder, got {str(folder)!r}')
        if args.classes and not args.classes.is_file():
            raise UserError(f'--classes must be a file, got {str(args.classes)!r}')
        sources, names = find_sources(args.source, args.out)
        given = _given_classes(args, names)
        lines, shown = read_classes(given) if given else ([], [])
        count_colours(sources, args.ignore)
        table, lines, kept = number(sources, given, lines, shown)
        if len(lines) > MOST:
            raise UserError(f'masks must have at most {MOST} classes, got {len(lines)}')
        write(sources, table, args.ignore, kept)
        if not names.exists():
            names.write_text(''.join(f'{line}\n' for line in lines), encoding='utf-8')
    report(sources, table, lines, kept)
    if given:
        print(f'numbers as in {given}')
    total = sum(len(source.targets) for source in sources)
    print(f'{total} masks in {args.out}, classes in {names}')
    if sources[0].links:
        print(f'next: aft_mm new masks {shlex.quote(str(args.out))}')


def _given_classes(args: argparse.Namespace, names: Path) -> Path | None:
    if args.classes:
        if names.exists() and not names.samefile(args.classes):
            raise UserError(f'{str(names)!r} exists already; leave out --classes to use it')
        return args.classes
    places = [names]
    if len(args.source) == 1:
        places += [args.source[0] / name for name in ('classes.txt', 'labelmap.txt')]
    return next((path for path in places if path.is_file()), None)


def number(
    sources: Sequence[Source], given: Path | None, lines: Sequence[str], shown: Sequence[str]
) -> tuple[dict[int, int], list[str], bool]:
    """Return the number of each colour, the lines of classes.txt, and whether numbers are kept."""
    values = values_of(sources)
    has_numbers = len(values) > 1 and values == {GREY * index for index in range(len(values))}
    palettes = {path: colours for source in sources for path, colours in source.palettes.items()}
    has_numbers &= not differing_palettes([*palettes], palettes.values())
    if lines and not shown or not lines and has_numbers:
        lines = lines or [f'class_{index}' for index in range(len(values))]
        table = {GREY * index: index for index in range(len(lines))}
        if len(values) > 1:  # else 255 may be a class
            table[GREY * IGNORED] = IGNORED
    elif shown:
        table = {
            colour: index
            for index, text in enumerate(shown)
            for colour in ([int(text[1:], 16)] if text[0] == '#' else _kinds(int(text)))
        }
    else:
        counts = sum((source.colours for source in sources), Counter())
        del counts[NOTHING]
        ordered = sorted(counts, key=lambda colour: (-counts[colour], colour))
        return {c: i for i, c in enumerate(ordered)}, [*map(name_of, ordered)], False
    kept = not shown
    for source in sources:
        new = (source.numbers if kept else source.colours).keys() - table.keys() - {NOTHING}
        if new:
            _refuse(source, min(new), kept, given)
    return table, list(lines), kept


def _refuse(source: Source, colour: int, by_number: bool, given: Path | None) -> None:
    path = next(path for path in source.targets if colour in colours_of(path, (), by_number))
    has = f'{name_of(colour)}' + (f' (value {colour // GREY})' if colour % GREY == 0 else '')
    wanted = 'a line such as "#ff0000 cat" for each colour' if by_number else 'such a line'
    raise UserError(
        f'mask {str(path)!r} has the colour {has}, which {str(given)!r} does not list; add {wanted}, '
        f'or --ignore {name_of(colour)!r}'
    )


def write(
    sources: Sequence[Source], table: Mapping[int, int], ignored: Sequence[str], by_number: bool
) -> None:
    known = np.array(sorted({**table, NOTHING: IGNORED}))
    numbers = np.array([table.get(colour, IGNORED) for colour in known], np.uint8)
    targets = [item for source in sources for item in source.targets.items()]
    for path, target in progress(targets, 'writing masks'):
        target.parent.mkdir(parents=True, exist_ok=True)
        colours = colours_of(path, ignored, by_number)
        Image.fromarray(numbers[np.searchsorted(known, colours)]).save(target)
    for source in sources:
        for link, target in source.links.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)


def report(
    sources: Sequence[Source], table: Mapping[int, int], lines: Sequence[str], kept: bool
) -> None:
    pixels = []
    for source in sources:
        counted: Counter[int] = Counter()
        for colour, number in (source.numbers if kept else source.colours).items():
            counted[table.get(colour, IGNORED)] += number
        pixels.append(counted)
    total = sum(pixels, Counter())
    for index, name in enumerate(lines):
        print(f'{index:3} {some([name])} {100 * total[index] / total.total():6.2f} % of the pixels')
    if total[IGNORED]:
        print(f'{IGNORED} ignored {100 * total[IGNORED] / total.total():6.2f} % of the pixels')
    rare = sum(0 < total[index] < total.total() / 1000 for index in range(len(lines)))
    if rare > len(lines) / 2:
        print(
            f'{rare} of {len(lines)} colours have less than 0.1 % of the pixels; save masks without '
            'smoothing and not as JPEG'
        )
    if kept:
        print('the masks have class numbers already, which are kept')
    for source, counted in zip(sources, pixels, strict=True):
        absent = [name for index, name in enumerate(lines) if not counted[index]]
        if absent:
            print(f'{source.name} lacks {len(absent)} of {len(lines)}: {some(absent)}')
