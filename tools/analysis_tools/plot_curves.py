"""Draw the training curves of runs: any metric, over iterations, epochs or time.

python tools/analysis_tools/plot_curves.py AFT=work_dirs/aft DeiT=work_dirs/deit --out a.png
python tools/analysis_tools/plot_curves.py --group AFT aft_seed0 aft_seed1 aft_seed2 --out a.png
    --metric accuracy/top1 --over time
"""

import argparse
import math
from collections.abc import Sequence

from aft_mm.cli.arguments import MAX_DPI, PICTURES, add_runs, check_output
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_runs(parser, 'work dir or file of JSON lines (vis_data/scalars.json)')
    parser.add_argument('--out', required=True, metavar='PNG', help='where the picture goes')
    parser.add_argument(
        '--metric',
        action='append',
        metavar='NAME',
        help='number of training or validation, on an axis of its own each time it is given; by '
        'default the first validated in bits, or else the loss and the first one validated',
    )
    parser.add_argument(
        '--over', choices=('iteration', 'epoch', 'time'), default='iteration', help='the axis below'
    )
    parser.add_argument(
        '--reference',
        nargs='*',
        default=[],
        metavar='LABEL=VALUE',
        help='horizontal lines at values of the (last) metric',
    )
    parser.add_argument('--dpi', type=int, default=150)
    return parser.parse_intermixed_args(argv)  # logs may stand behind options


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from aft_mm.checks import check_int
from aft_mm.visualization import draw_curves, read_scalars


def pair(text: str) -> tuple[str, str]:
    """``LABEL=VALUE`` as a pair; the label may be missing, and hold further equals signs."""
    label, _, value = text.rpartition('=')
    return label or value, value


def by_label(argument: str, pairs: Sequence[tuple]) -> dict:
    """Pairs as a dict; two of one label would hide each other."""
    labels = [label for label, _ in pairs]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f'{argument} needs labels that differ, got {label!r} twice')
    return dict(pairs)


def number(label: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f'--reference needs LABEL=VALUE with a finite number, got {label}={text}')
    return value


def runs_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Label to the logs of its runs.

    Raises:
        UserError: there is none, a label comes twice, or a group has no log or one of them twice.
    """
    pairs = [(label, [path]) for label, path in map(pair, args.logs)]
    for label, *paths in args.group:
        if not paths or len(set(paths)) < len(paths):
            raise UserError(
                '--group needs LABEL LOG [LOG ...] with logs that differ, got '
                f'{" ".join([label, *paths])}'
            )
        pairs.append((label, paths))
    if not pairs:
        raise UserError('[LABEL=]LOG or --group must name at least one log, got none')
    return by_label('[LABEL=]LOG', pairs)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with user_errors(ValueError, OSError):
        check_output('--out', args.out, PICTURES)
        check_int('--dpi', args.dpi, 1, MAX_DPI)
        logs = runs_of(args)
        references = by_label('--reference', [pair(text) for text in args.reference])
        figure = draw_curves(
            {label: [read_scalars(path) for path in paths] for label, paths in logs.items()},
            metric=args.metric,
            references={label: number(label, text) for label, text in references.items()},
            over=args.over,
        )
        figure.savefig(args.out, dpi=args.dpi)
    count = sum(map(len, logs.values()))
    print(f'{count} run{"s" if count > 1 else ""} drawn to {args.out}')


if __name__ == '__main__':
    main()
