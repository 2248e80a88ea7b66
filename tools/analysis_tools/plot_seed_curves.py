"""Draw the training loss of groups of runs that differ by their seed, against steps and time.

python tools/analysis_tools/plot_seed_curves.py --out curves.png --bits --label bits/char
    --group AFT-local local_seed*.jsonl --group transformer transformer_seed*.jsonl
    --times iterations.json --top 4.2 --smooth 5
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from aft_mm.cli.arguments import MAX_DPI, PICTURES, check_output
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--group',
        nargs='+',
        action='append',
        required=True,
        metavar=('LABEL', 'LOG'),
        help='runs of one kind, a file of JSON lines for each seed',
    )
    parser.add_argument('--label', required=True, help='what the loss is, with its unit')
    parser.add_argument('--bits', action='store_true', help='of a loss in nats')
    parser.add_argument(
        '--times',
        type=Path,
        metavar='JSON',
        help='of tools/benchmarks/benchmark_iterations.py; logs are named CONFIG_seedN.jsonl then',
    )
    parser.add_argument(
        '--top',
        type=float,
        metavar='LOSS',
        help='where its axis ends, the first losses being far above the others',
    )
    parser.add_argument(
        '--smooth',
        type=int,
        default=1,
        metavar='N',
        help='a loss is the mean of the last N that were logged',
    )
    parser.add_argument('--out', required=True, metavar='PNG', help='where the picture goes')
    parser.add_argument('--dpi', type=int, default=150)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from aft_mm.checks import check_int
from aft_mm.visualization import draw_seed_curves, read_scalars


def read_times(path: Path) -> dict[str, float]:
    """Config to milliseconds of an iteration, of a file of benchmark_iterations.py.

    Raises:
        UserError: the file is not of this tool.
    """
    try:
        rows = json.loads(path.read_text(encoding='utf-8'))['rows']
        return {row['config']: float(row['milliseconds']) for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            '--times needs a JSON of tools/benchmarks/benchmark_iterations.py, but '
            f'{str(path)!r} has no time of each config'
        ) from error


def time_of(files: Sequence[str], times: dict[str, float]) -> float:
    """That of the config that the name of the first file, CONFIG_seedN.jsonl, names.

    Raises:
        UserError: there is none.
    """
    config = Path(files[0]).stem.rpartition('_seed')[0]
    if config not in times:
        raise UserError(f'--times has no config {config!r}, of which {files[0]!r} is a run')
    return times[config]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with user_errors(ValueError, OSError):
        check_output('--out', args.out, PICTURES)
        check_int('--dpi', args.dpi, 1, MAX_DPI)
        for label, *files in args.group:
            if not files:
                raise UserError(f'--group needs LABEL LOG [LOG ...], got {label}')
        groups = {label: [read_scalars(file) for file in files] for label, *files in args.group}
        times = args.times and read_times(args.times)
        figure = draw_seed_curves(
            groups,
            args.label,
            1 / math.log(2) if args.bits else 1.0,
            times and {label: time_of(files, times) for label, *files in args.group},
            args.top,
            args.smooth,
        )
        figure.savefig(args.out, dpi=args.dpi)


if __name__ == '__main__':
    main()
