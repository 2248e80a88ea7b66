"""Draw the training curves of runs in bits per prediction, with validations and references."""

import argparse
from collections.abc import Sequence

from aft_mm.checks import check_int
from aft_mm.cli.arguments import MOST_DPI, PICTURES, check_output
from aft_mm.cli.errors import UserError, one_sentence
from aft_mm.visualization import draw_curves, read_scalars


def pair(text: str) -> tuple[str, str]:
    """``LABEL=VALUE`` as a pair; the label may be missing, and hold further equals signs."""
    label, _, value = text.rpartition('=')
    return label or value, value


def by_label(argument: str, texts: list[str]) -> dict[str, str]:
    """``LABEL=VALUE`` texts as a dict; two of one label would hide each other."""
    pairs = [pair(text) for text in texts]
    labels = [label for label, _ in pairs]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f'{argument} needs labels that differ, got {label!r} twice')
    return dict(pairs)


def number(label: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f'--reference needs LABEL=BITS with a number of bits, got '
                        f'{label}={text}') from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'logs', nargs='+', metavar='[LABEL=]LOG',
        help='work dir or file of JSON lines (vis_data/scalars.json) of a run')
    parser.add_argument('--out', required=True, metavar='PNG', help='where the picture goes')
    parser.add_argument('--metric', help='validated metric; by default the first in bits')
    parser.add_argument(
        '--reference', nargs='*', default=[], metavar='LABEL=BITS', help='horizontal lines')
    parser.add_argument('--dpi', type=int, default=150)
    args = parser.parse_args(argv)

    with one_sentence(ValueError, OSError):
        check_output('--out', args.out, PICTURES)
        check_int('--dpi', args.dpi, 1, MOST_DPI)
        logs = by_label('[LABEL=]LOG', args.logs)
        references = by_label('--reference', args.reference)
        figure = draw_curves(
            {label: read_scalars(path) for label, path in logs.items()},
            metric=args.metric,
            references={label: number(label, text) for label, text in references.items()})
        figure.savefig(args.out, dpi=args.dpi)
    print(f'{len(logs)} run{"s" if len(logs) > 1 else ""} drawn to {args.out}')


if __name__ == '__main__':
    main()
