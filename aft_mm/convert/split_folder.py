import argparse
import os
import shutil
from pathlib import Path

from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError, user_errors
from aft_mm.images import IMAGE_SUFFIXES
from aft_mm.progress import progress

from .own_data.image_folder import Labelled, find_classes, split_classes
from .own_data.parts import copies, copy_notes


def split(source: Path, share: float, seed: int) -> tuple[dict[str, list[Labelled]], list[str]]:
    if not source.is_dir():
        raise UserError(f'the folder {str(source)!r} does not exist')
    images, parts, notes = find_classes(source)
    if parts:
        raise UserError(
            f'the folder {str(source)!r} must hold no parts, got {" and ".join(parts.values())}; '
            '`aft_mm new image-folder` reads them'
        )
    paths, _, labels, _ = zip(*images, strict=True)
    first = copies([source / path for path in paths])
    return split_classes(images, share, seed, first), [*notes, *copy_notes(paths, first, labels)]


def target(image: Labelled) -> str:
    """Return the path of an image below a part; mmpretrain lists files by their endings."""
    ending = '' if image.name.lower().endswith(IMAGE_SUFFIXES) else '.jpg'
    return f'{image.label}/{image.name}{ending}'


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
        parts, notes = split(args.source, args.val, args.seed)
        for part, images in parts.items():
            for image in progress(images, part):
                link(args.source / image.path, args.out / part / target(image))
    classes = len({image.label for image in parts['val']})
    for note in notes:
        print(note)
    print(
        f'{args.out}: {classes} classes, {len(parts["train"])} images for training and '
        f'{len(parts["val"])} for validation'
    )
