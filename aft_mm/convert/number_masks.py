"""Turn masks in colours or grey levels into masks of class numbers."""

import argparse
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from aft_mm.errors import UserError, user_errors
from aft_mm.images import IMAGE_FORMATS, read_rgb
from aft_mm.progress import progress

MOST = 255  # classes; 255 is the label of ignored pixels
WIDE = 1 << 24  # added to values of more than 8 bits, which are no colours


def colours_of(path: Path) -> np.ndarray:
    """Return the colour of each pixel as 0xrrggbb, of 16 or 32 bits the value + WIDE, [H, W]."""
    with suppress(OSError), Image.open(path, formats=IMAGE_FORMATS) as mask:  # read_rgb refuses it
        if mask.mode.startswith('I'):
            return WIDE + np.asarray(mask).astype(np.int64)
    red, green, blue = np.moveaxis(read_rgb(path)[0].astype(np.int64), -1, 0)
    return red << 16 | green << 8 | blue


def count_colours(paths: Sequence[Path]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for path in progress(paths, 'counting colours'):
        colours, pixels = np.unique(colours_of(path), return_counts=True)
        counts.update(dict(zip(colours.tolist(), pixels.tolist(), strict=True)))
        if len(counts) > MOST:
            raise UserError(
                f'masks must have at most {MOST} colours, one for each class, got more at '
                f'{str(path)!r}; save masks without smoothing and not as JPEG'
            )
    return counts


def run(args: argparse.Namespace) -> None:
    with user_errors(ValueError, OSError):
        paths = sorted(
            path
            for path in args.source.rglob('*.*')
            if path.is_file() and not path.name.startswith('.')
        )
        if not paths:
            raise UserError(f'the folder {str(args.source)!r} must hold masks, got none')
        names = args.out.parent / 'classes.txt'
        for path in (args.out, names):
            if path.exists():
                raise UserError(f'{str(path)!r} exists already')
        targets = [args.out / path.relative_to(args.source).with_suffix('.png') for path in paths]
        twice = next((path for path, number in Counter(targets).items() if number > 1), None)
        if twice:
            raise UserError(
                f'masks must have names that differ in more than the suffix, got two for {twice}'
            )
        counts = count_colours(paths)
        ordered = sorted(counts, key=lambda colour: (-counts[colour], colour))
        known = np.sort(ordered)
        numbers = np.argsort(ordered).astype(np.uint8)
        for path, target in progress(list(zip(paths, targets, strict=True)), 'writing masks'):
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numbers[np.searchsorted(known, colours_of(path))]).save(target)
        named = [f'#{c:06x}' if 0 <= c < WIDE else str(c - WIDE) for c in ordered]
        names.write_text(''.join(f'{name}\n' for name in named), encoding='utf-8')
    total = counts.total()
    for number, (colour, name) in enumerate(zip(ordered, named, strict=True)):
        print(f'{number:3} {name} {100 * counts[colour] / total:6.2f} % of the pixels')
    print(f'{len(paths)} masks in {args.out}, classes in {names}')
