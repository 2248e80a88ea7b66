import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from aft_mm.checks import FEWEST_VALIDATED, check_int, check_number, counted
from aft_mm.cli.arguments import refuse_given
from aft_mm.config.finding import install_command
from aft_mm.config.texts import literal
from aft_mm.convert import own_data
from aft_mm.convert.own_data import OwnData
from aft_mm.convert.packages import MANY, SIZE_OF_MANY, STARTS
from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import check_kept, check_suffix
from aft_mm.progress import progress

from .list_configs import NEEDS, missing


class Kind(NamedTuple):
    inspect: Callable[..., OwnData]
    base: str
    task: str
    batch_size: int
    seconds: float  # of an iteration, one CPU thread
    iterations: int  # of a training of few images
    unit: str = ''  # of the counts of the classes
    pixels: int = 0  # of an image for a frozen backbone, whose time comes on top


class Plan(NamedTuple):
    """A config and what its training needs."""

    config: str
    iterations: int
    seconds: float  # on one CPU thread


KINDS = {
    'image-folder': Kind(own_data.image_folder, 'image-folder', '', 50, 0.5, 800, 'image'),
    'coco': Kind(own_data.coco, 'coco-json', 'detection', 4, 1.5, 840, 'box'),
    'voc': Kind(own_data.voc, 'voc-xml', 'detection', 4, 1.5, 840, 'box'),
    'masks': Kind(own_data.masks, 'mask-png', 'segmentation', 4, 0.75, 1200, 'image'),
    'text': Kind(own_data.text, 'text-file', '', 16, 0.5, 3000),
}
#: Training from a start.
FROM_START = {
    'image-folder': KINDS['image-folder']._replace(base='frozen', seconds=0.1),
    'coco': KINDS['coco']._replace(seconds=1.3, iterations=420, pixels=384 * 288),
    'voc': KINDS['voc']._replace(seconds=1.3, iterations=420, pixels=384 * 288),
    'masks': KINDS['masks']._replace(seconds=0.35, iterations=600, pixels=256**2),
}
BOXES = 'coco', 'voc'
BY_EPOCH = 'image-folder', *BOXES
#: Classes that are listed, and thin ones.
MOST_LISTED, MOST_THIN = 20, 5
#: Images of a class below which results are poor, and from a start (docs/tasks/own_data.md).
FEW, FEW_FROM_START = 20, 10


def printable(name: str) -> str:
    """Return a name without control characters, which a terminal would obey."""
    return name if name.isprintable() else repr(name)


def default_name(root: Path) -> str:
    """Return a name for the config that shadows no module of Python."""
    whole = root.resolve().name
    # Without the ending of a file; another dot would end the name of a module.
    stem = Path(whole.removesuffix('.gz').removesuffix('.xz')).stem if root.is_file() else whole
    name = stem.strip('.').replace('.', '_') or 'data'
    return f'{name}_config.py' if name in sys.stdlib_module_names else f'{name}.py'


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')


def write_links(folder: Path, links: Mapping[str, Path]) -> None:
    if links:
        for name, target in progress(links.items(), 'writing links', len(links)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(target)


def run(args: argparse.Namespace) -> None:
    with user_errors(OSError):
        root = Path(args.path)
        out = Path(args.out or default_name(root))
        folder = out.with_name(f'{out.stem}_split')
        check_args(args, root, out, folder)
        data = inspect(args, root)
        start = None
        if args.start is not None:
            # After all checks of the data: it imports torch, which takes seconds, and writes weights.
            start = import_module('aft_mm.convert.starts').read_start(args.start, out, args.kind)
        plan = plan_training(args, data, start, folder)
        for name, content in data.files.items():
            write(folder / name, content)
        write_links(folder, data.links)
        write(out, plan.config)
    print_data(args, data, folder)
    if start:
        print(f'weights of the start: {start.weights}')
    print(
        f'{out}: {counted(plan.iterations, "iteration")}, about {max(1, round(plan.seconds / 60))} '
        'min on one CPU thread'
    )
    task = KINDS[args.kind].task
    if missing(task):
        print(f'first: {install_command(NEEDS[task][1])}')
    print(f'next: aft_mm train {shlex.quote(os.fspath(out))}')


def check_args(args: argparse.Namespace, root: Path, out: Path, folder: Path) -> None:
    if args.val is not None:
        check_number('--val', args.val, above=0, most=0.9)
    check_int('--seed', args.seed or 0, 0)
    check_suffix('--out', out, ('.py',))
    check_kept('--out', [out], [root] if root.is_file() else [])
    if existing := [repr(str(path)) for path in (out, folder) if path.exists()]:
        raise UserError(
            f'{" and ".join(existing)} exist{"s" * (len(existing) == 1)} already; delete '
            'to make anew, or name another file with --out'
        )
    if args.kind == 'text':
        refuse_given(args, ['start'], 'is for images')
    elif args.start is not None and args.start not in STARTS and not os.path.isfile(args.start):
        names = ' or '.join(STARTS)
        raise UserError(f'--start must be {names}, or a checkpoint, got {args.start!r}')
    if args.kind not in BOXES:
        refuse_given(args, ['scale_boxes'], 'is for boxes, coco or voc')


def inspect(args: argparse.Namespace, root: Path) -> OwnData:
    options: dict[str, Any] = {}
    if args.kind in BOXES:
        options['scale'] = args.scale_boxes
    from_features = args.kind == 'image-folder' and args.start is not None
    if from_features:
        options['start'] = args.start
    # The head on features is no choice among epochs.
    default = 0.1 if from_features else 0.2
    share = default if args.val is None else args.val
    data = KINDS[args.kind].inspect(root.absolute(), share, args.seed or 0, **options)
    for part in ('train', 'val'):
        if not data.parts[part]:
            raise UserError(f'{args.path!r} must hold samples for {part}, got none')
    if not data.is_sampled:
        reason = f'has no effect: no validation images are sampled from {args.path!r}'
        refuse_given(args, ('val', 'seed'), reason)
    return data


def plan_training(args: argparse.Namespace, data: OwnData, start: Any, folder: Path) -> Plan:
    kind = FROM_START[args.kind] if start else KINDS[args.kind]
    lines = [f'# {data.about[0]}.', f"_base_ = 'aft_mm::own_data/{kind.base}'", '']
    if data.files or data.links:
        lines.append(f'split = {literal(folder.absolute())}  # files of each part')
    lines += data.config
    iterations, by_epoch = kind.iterations, []
    if args.kind in BY_EPOCH:
        length = -(-data.parts['train'] // kind.batch_size)
        epochs = 1 if kind.base == 'frozen' else min(100, max(12, -(-iterations // length)))
        iterations, by_epoch = epochs * length, [f'train_cfg = dict(max_epochs={epochs})']
    seconds = iterations * kind.seconds
    if start:
        size = start.size
        if kind.base == 'frozen' and args.start in STARTS:
            size, note = size_of_photos(data, size)
            data.notes.append(note)
        lines.append(start.text(size=size))
        # The features of each photo, its mirror image if it is for training, are computed once.
        once = 2 * data.parts['train'] + data.parts['val']
        images = once if kind.base == 'frozen' else iterations * kind.batch_size
        seconds += images * start.seconds(kind.pixels or size**2)
    return Plan('\n'.join([*lines, *by_epoch, '']), iterations, seconds)


def size_of_photos(data: OwnData, size: int) -> tuple[int, str]:
    """Return the size [px] of photos for a frozen backbone, and a note with the reason."""
    is_many = data.parts['train'] / len(data.counts) >= MANY
    size = SIZE_OF_MANY if is_many else size
    number = 'at least' if is_many else 'fewer than'
    return size, f'images are scaled to {size} px: {number} {MANY} training photos per class'


def print_data(args: argparse.Namespace, data: OwnData, folder: Path) -> None:
    unit = KINDS[args.kind].unit
    print(f'{args.path}: {", ".join(data.about)}')
    for name, number in list(data.counts.items())[:MOST_LISTED]:
        print(f'  {printable(name)}: {counted(number, unit)}')
    if len(data.counts) > MOST_LISTED:
        print(f'  and {len(data.counts) - MOST_LISTED:,} more')
    photos = args.kind == 'image-folder'
    least = FEW_FROM_START if args.start and photos else FEW
    few = [printable(name) for name, number in data.counts.items() if number < least]
    if len(few) > MOST_THIN:
        thin = f'{len(few):,} of {len(data.counts):,} classes have fewer than'
        print(f'{thin} {counted(least, unit)}: expect a poor model of these')
    elif few:
        print(f'fewer than {least} of {", ".join(few)}: expect a poor model of these')
    for note in data.notes:
        print(printable(note))
    written = ''
    if data.is_sampled:
        written = f', sampled with seed {args.seed or 0} into {folder}/'
    elif data.files or data.links:
        written = f', {"boxes copied" if args.kind in BOXES else "lists written"} into {folder}/'
    samples = counted(data.parts['train'], 'byte' if args.kind == 'text' else 'image')
    print(f'training {samples}, validation {data.parts["val"]:,}{written}')
    if photos and data.parts['val'] < FEWEST_VALIDATED:
        print(
            f'a validation of fewer than {FEWEST_VALIDATED} images says almost nothing: add images'
        )
