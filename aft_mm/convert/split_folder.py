"""Split a folder of class folders into a training and a validation set."""

import argparse
import os
import shutil
from pathlib import Path

from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError, user_errors
from aft_mm.images import IMAGE_SUFFIXES, list_images
from aft_mm.progress import progress

from .own_data.image_folder import split_classes


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


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def run(args: argparse.Namespace) -> None:
    with user_errors(ValueError, OSError):
        check_number('--val', args.val, above=0, most=0.9)
        check_int('--seed', args.seed, 0)
        for part in ('train', 'val'):
            if (args.out / part).exists():
                raise UserError(f'{str(args.out / part)!r} exists already')
        parts = split(args.source, args.val, args.seed)
        for part, files in parts.items():
            for path in progress(files, part):
                link(args.source / path, args.out / part / path)
    classes = len({file.partition('/')[0] for file in parts['val']})
    print(
        f'{args.out}: {classes} classes, {len(parts["train"])} images for training and '
        f'{len(parts["val"])} for validation'
    )
