"""Divide a folder of class folders into a training and a validation part.

    python tools/dataset_converters/split_folder.py photos data/my_images --val 0.2

reads photos/cat/1.jpg and writes data/my_images/train/cat/1.jpg or data/my_images/val/cat/1.jpg. Of
every class the same share is held back, drawn with a seed; the files are linked if both folders lie
on one disk and copied elsewhere, and photos stays as it is.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', type=Path, help='the folder with a folder for each class')
    parser.add_argument('out', type=Path, help='where train/ and val/ are made')
    parser.add_argument('--val', type=float, default=0.2, help='share held back of each class')
    parser.add_argument('--seed', type=int, default=0, help='of the draw')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from sklearn.model_selection import train_test_split

from aft_mm.checks import check_number
from aft_mm.cli.progress import progress
from aft_mm.datasets.image_files import IMAGE_SUFFIXES


def split(source: Path, share: float, seed: int) -> dict[str, list[Path]]:
    """The image files of each part, as paths inside of ``source``.

    Raises:
        UserError: there is no such folder, no image, or a class with fewer than two.
    """
    if not source.is_dir():
        raise UserError(f'the folder {str(source)!r} does not exist')
    files = sorted(
        path.relative_to(source)
        for path in source.glob('*/**/*')
        if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES
    )
    if not files:
        raise UserError(
            f'the folder {str(source)!r} must hold a folder of images for each class, '
            f'got none that ends with {", ".join(IMAGE_SUFFIXES)}'
        )
    parts: dict[str, list[Path]] = {'train': [], 'val': []}
    for name in sorted({path.parts[0] for path in files}):
        ours = [path for path in files if path.parts[0] == name]
        if len(ours) < 2:
            raise UserError(
                f'the class {name!r} must have at least 2 images, one for each part, '
                f'got {len(ours)}'
            )
        held = min(max(1, round(share * len(ours))), len(ours) - 1)
        train, val = train_test_split(ours, test_size=held, random_state=seed)
        parts['train'] += sorted(train)
        parts['val'] += sorted(val)
    return parts


def place(source: Path, target: Path) -> None:
    """Link a file, or copy it to another disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(ValueError, OSError):
        check_number('--val', args.val, above=0, most=0.9)
        for part in ('train', 'val'):
            if (args.out / part).exists():
                raise UserError(f'{str(args.out / part)!r} is already there')
        parts = split(args.source, args.val, args.seed)
        for part, files in parts.items():
            for path in progress(files, part):
                place(args.source / path, args.out / part / path)
    classes = len({path.parts[0] for path in parts['val']})
    print(
        f'{args.out}: {classes} classes, {len(parts["train"])} images to train and '
        f'{len(parts["val"])} to validate'
    )


if __name__ == '__main__':
    main()
