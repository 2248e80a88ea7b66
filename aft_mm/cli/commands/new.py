import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
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
#: Classes that are listed, and thin ones.
MOST_LISTED, MOST_THIN = 20, 5
#: Images of a class below which results are poor, and from a start (docs/tasks/own_data.md).
FEW, FEW_FROM_START = 20, 10


def epochs(kind: Kind, samples: int) -> int:
    return min(100, max(12, -(-kind.iterations // -(-samples // kind.batch_size))))


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
        # The head of a start is no choice among epochs.
        default = 0.1 if args.start and args.kind == 'image-folder' else 0.2
        share, seed = default if args.val is None else args.val, args.seed or 0
        check_number('--val', share, above=0, most=0.9)
        check_int('--seed', seed, 0)
        check_suffix('--out', out, ('.py',))
        check_kept('--out', [out], [root] if root.is_file() else [])
        if existing := [repr(str(path)) for path in (out, folder) if path.exists()]:
            raise UserError(
                f'{" and ".join(existing)} exist{"s" * (len(existing) == 1)} already; delete '
                'to make anew, or name another file with --out'
            )
        kind = KINDS[args.kind]
        inspect = kind.inspect
        start: Any = None
        if args.kind == 'text':
            refuse_given(args, ['start'], 'is for images')
        elif args.start is not None:
            if args.start not in STARTS and not os.path.isfile(args.start):
                names = ' or '.join(STARTS)
                raise UserError(f'--start must be {names}, or a checkpoint, got {args.start!r}')
            kind = FROM_START[args.kind]
            if args.kind == 'image-folder':
                inspect = partial(inspect, start=args.start)
        if args.kind in ('coco', 'voc'):
            inspect = partial(inspect, scale=args.scale_boxes)
        else:
            refuse_given(args, ['scale_boxes'], 'is for boxes, coco or voc')
        data = inspect(root.absolute(), share, seed)
        for part in ('train', 'val'):
            if not data.parts[part]:
                raise UserError(f'{args.path!r} must hold samples for {part}, got none')
        is_sampled = bool(data.files or data.links) and not data.given
        if not is_sampled:
            reason = f'has no effect: no validation images are sampled from {args.path!r}'
            refuse_given(args, ('val', 'seed'), reason)
        if args.start is not None:
            # After all checks of the data: it imports torch, which takes seconds, and writes weights.
            start = import_module('aft_mm.convert.starts').read_start(args.start, out, args.kind)
        by_epoch = args.kind in ('image-folder', 'coco', 'voc')
        length = epochs(kind, data.parts['train']) if by_epoch else kind.iterations
        is_frozen = kind.base == 'frozen'
        length = 1 if is_frozen else length
        iterations = length * -(-data.parts['train'] // kind.batch_size) if by_epoch else length
        lines = [f'# {data.about[0]}.', f"_base_ = 'aft_mm::own_data/{kind.base}'", '']
        if data.files or data.links:
            lines.append(f'split = {literal(folder.absolute())}  # files of each part')
        lines += data.config
        seconds = iterations * kind.seconds
        if start:
            size = start.size
            if is_frozen and args.start in STARTS:
                mean = data.parts['train'] / len(data.counts)
                size = SIZE_OF_MANY if mean >= MANY else STARTS[args.start][1]
                fewer = f'{STARTS[args.start][1]} with fewer than {MANY} training photos per class'
                more = f'{SIZE_OF_MANY} from {MANY} training photos per class on'
                other = fewer if mean >= MANY else more
                data.notes.append(f'images are scaled to {size} px ({other})')
            lines.append(start.text(size=size))
            # The features of each image, its mirror image if it is for training, are computed once.
            once = 2 * data.parts['train'] + data.parts['val']
            images = once if is_frozen else iterations * kind.batch_size
            seconds += images * start.seconds(kind.pixels or size**2)
        if by_epoch:
            lines.append(f'train_cfg = dict(max_epochs={length})')
        for name, content in data.files.items():
            write(folder / name, content)
        write_links(folder, data.links)
        write(out, '\n'.join([*lines, '']))
    print(f'{args.path}: {", ".join(data.about)}')
    for name, number in list(data.counts.items())[:MOST_LISTED]:
        print(f'  {printable(name)}: {counted(number, kind.unit)}')
    if len(data.counts) > MOST_LISTED:
        print(f'  and {len(data.counts) - MOST_LISTED:,} more')
    least = FEW_FROM_START if args.start and args.kind == 'image-folder' else FEW
    few = [printable(name) for name, number in data.counts.items() if number < least]
    if len(few) > MOST_THIN:
        thin = f'{len(few):,} of {len(data.counts):,} classes have fewer than'
        print(f'{thin} {counted(least, kind.unit)}: expect a poor model of these')
    elif few:
        print(f'fewer than {least} of {", ".join(few)}: expect a poor model of these')
    for note in data.notes:
        print(printable(note))
    copied = ''
    if data.given and (data.files or data.links):
        copied = f', {"boxes copied" if kind.unit == "box" else "lists written"} into {folder}/'
    unit = 'byte' if args.kind == 'text' else 'image'
    print(
        f'training {counted(data.parts["train"], unit)}, validation {data.parts["val"]:,}'
        + (f', sampled with seed {seed} into {folder}/' if is_sampled else '')
        + copied
    )
    if args.kind == 'image-folder' and data.parts['val'] < FEWEST_VALIDATED:
        print(
            f'a validation of fewer than {FEWEST_VALIDATED} images says almost nothing: add images'
        )
    if start:
        print(f'weights of the start: {start.weights}')
    print(
        f'{out}: {counted(iterations, "iteration")}, about {max(1, round(seconds / 60))} '
        'min on one CPU thread'
    )
    if missing(kind.task):
        print(f'first: {install_command(NEEDS[kind.task][1])}')
    print(f'next: aft_mm train {shlex.quote(os.fspath(out))}')
