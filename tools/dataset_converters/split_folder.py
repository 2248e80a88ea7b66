"""Split a folder of class folders into a training and a validation set.

    python tools/dataset_converters/split_folder.py photos data/my_images --val 0.2

turns photos/cat/1.jpg into data/my_images/train/cat/1.jpg or data/my_images/val/cat/1.jpg, with the
same share of each class chosen at random for validation. Files are hard links if both folders are
on the same disk, and copies otherwise.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from aft_mm.cli.arguments import tool_parser
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('source', type=Path, help='folder with one folder per class')
    parser.add_argument('out', type=Path, help='output folder of train/ and val/')
    parser.add_argument(
        '--val', type=float, default=0.2, help='share of validation images; default %(default)s'
    )
    parser.add_argument('--seed', type=int, default=0, help='random seed; default %(default)s')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # before the slow imports

from aft_mm.checks import check_int, check_number
from aft_mm.cli.own_data import split_classes
from aft_mm.cli.progress import progress
from aft_mm.images import IMAGE_SUFFIXES, list_images


def split(source: Path, share: float, seed: int) -> dict[str, list[str]]:
    if not source.is_dir():
        raise UserError(f'the folder {str(source)!r} does not exist')
    files = [file for file in list_images(source) if '/' in file]
    if not files:
        raise UserError(
            f'the folder {str(source)!r} must hold a folder of images for each class, '
            f'got no file that ends in {", ".join(IMAGE_SUFFIXES)}'
        )
    return split_classes(files, share, seed)


def place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(ValueError, OSError):
        check_number('--val', args.val, above=0, most=0.9)
        check_int('--seed', args.seed, 0)
        for part in ('train', 'val'):
            if (args.out / part).exists():
                raise UserError(f'{str(args.out / part)!r} exists already')
        parts = split(args.source, args.val, args.seed)
        for part, files in parts.items():
            for path in progress(files, part):
                place(args.source / path, args.out / part / path)
    classes = len({file.partition('/')[0] for file in parts['val']})
    print(
        f'{args.out}: {classes} classes, {len(parts["train"])} images for training and '
        f'{len(parts["val"])} for validation'
    )


if __name__ == '__main__':
    main()
