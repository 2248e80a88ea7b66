"""Compare groups of runs that differ by their seed only: means and differences with 95 % intervals.

python tools/analysis_tools/compare_seeds.py --metric bits_per_char --out seeds.png
    --group AFT-local local_seed*.json --group transformer transformer_seed*.json
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from aft_mm.cli.arguments import MOST_DPI, PICTURES, check_output, check_writable
from aft_mm.errors import UserError, one_sentence


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--group',
        nargs='+',
        action='append',
        required=True,
        metavar=('LABEL', 'FILE'),
        help='runs of one kind, a file of tools/test.py --out for each seed; the first group is '
        'what the others are compared with',
    )
    parser.add_argument('--metric', required=True, help='which number of the files')
    parser.add_argument('--label', help='what it is called, with its unit, such as bits/char')
    parser.add_argument('--out', metavar='PNG', help='where the picture goes')
    parser.add_argument('--table', metavar='MD', help='where the table goes too')
    parser.add_argument(
        '--numbers',
        metavar='TITLE',
        help='the labels are numbers: draw them on a logarithmic axis of this title',
    )
    parser.add_argument(
        '--expect',
        nargs='+',
        default=[],
        metavar='LABEL=SIGN',
        help='the expected sign of the difference of a group to the first one, + or -; adds a '
        'column with "same sign here", "opposite sign here" or "not decidable"',
    )
    parser.add_argument('--dpi', type=int, default=150)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from verdicts import verdict_table

from aft_mm.checks import check_int
from aft_mm.visualization import draw_seeds


def read_metric(path: Path, metric: str) -> float:
    """A number out of a file of ``tools/test.py --out``.

    Raises:
        UserError: the file cannot be read, or does not hold it as a finite number.
    """
    try:
        metrics = json.loads(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise UserError(f'{str(path)!r} cannot be read: {error.strerror}') from error
    except ValueError as error:  # neither text nor JSON
        raise UserError(f'{str(path)!r} is damaged or not JSON: {error}') from error
    if not isinstance(metrics, dict):
        raise UserError(
            f'{str(path)!r} needs metrics as written by tools/test.py --out, but holds '
            f'a {type(metrics).__name__}'
        )
    if metric not in metrics:
        raise UserError(
            f'{str(path)!r} has no metric {metric!r}; it holds '
            f'{", ".join(metrics) or "none at all"}'
        )
    value = metrics[metric]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f'{metric} of {str(path)!r} must be a finite number, got {value!r}')
    return value


def read_groups(arguments: Sequence[Sequence[str]], metric: str) -> dict[str, list[float]]:
    """Label to the values of its files, in the order of the command line.

    Raises:
        UserError: a label is a file or comes twice, a group has no file or a file comes twice.
    """
    groups: dict[str, list[float]] = {}
    seen: set[Path] = set()
    for label, *files in arguments:
        # Without its label a group would lose a run to it.
        if Path(label).is_file() or not files:
            raise UserError(f'--group needs LABEL FILE [FILE ...], got {" ".join([label, *files])}')
        if label in groups:
            raise UserError(f'--group needs labels that differ, got {label!r} twice')
        for file in files:
            path = Path(file).resolve()
            if path in seen:
                raise UserError(f'--group needs a file for every run, got {file!r} twice')
            seen.add(path)
        groups[label] = [read_metric(Path(file), metric) for file in files]
    return groups


def read_signs(arguments: Sequence[str]) -> dict[str, str]:
    """Label to the expected sign of its difference.

    Raises:
        UserError: An argument is not LABEL=+ or LABEL=-.
    """
    signs = {}
    for argument in arguments:
        label, _, sign = argument.rpartition('=')
        if not label or sign not in ('+', '-'):
            raise UserError(f'--expect must be LABEL=+ or LABEL=-, got {argument!r}')
        signs[label] = sign
    return signs


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with one_sentence(ValueError, OSError):
        if args.out:
            check_output('--out', args.out, PICTURES)
        check_writable('--table', [args.table] if args.table else [])
        check_int('--dpi', args.dpi, 1, MOST_DPI)
        groups = read_groups(args.group, args.metric)
        label = args.label or args.metric.replace('_per_', '/')
        table = verdict_table(groups, label, read_signs(args.expect))
        if args.out:
            draw_seeds(groups, label, args.numbers).savefig(args.out, dpi=args.dpi)
        if args.table:
            Path(args.table).write_text(table, encoding='utf-8')
    print(table, end='')


if __name__ == '__main__':
    main()
