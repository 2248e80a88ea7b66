"""Draw the learned position biases of a checkpoint, exp(w) - 1 or exp(w), per layer and head.

    python tools/analysis_tools/plot_position_bias.py CONFIG CHECKPOINT --heads first:16 --out a.png
    python tools/analysis_tools/plot_position_bias.py CONFIG CHECKPOINT --view matrix \
        --quantity exp --out a.png
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import add_choice_arguments, add_picture_arguments
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='path of the config')
    parser.add_argument(
        'checkpoint',
        nargs='?',
        help='path of the checkpoint, as tools/train.py writes it; else random weights',
    )
    add_picture_arguments(parser)
    add_choice_arguments(parser)
    parser.add_argument(
        '--queries',
        default='even:12',
        help='tokens of the grid whose row of a dense bias is drawn, in the same words, or '
        "'prefix' for the class token; %(default)s",
    )
    parser.add_argument(
        '--view',
        choices=('queries', 'matrix'),
        default='queries',
        help='draw a dense bias on a grid by queries, or as T x T with the class token',
    )
    parser.add_argument(
        '--quantity', choices=('exp-1', 'exp'), default='exp-1', help='exp(w) - 1 or exp(w)'
    )
    parser.add_argument(
        '--scale',
        choices=('layer', 'all'),
        default='layer',
        help='a colour scale per layer, or one for all layers',
    )
    parser.add_argument(
        '--csv',
        help='write share of the mass in the largest places, entropy, centre and width of '
        'every layer and head to this file',
    )
    parser.add_argument('--top', type=int, default=5, help='how many places are the largest')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from aft_mm.apis import load_model
from aft_mm.checks import check_int
from aft_mm.cli.pictures import check_picture, footer, save, write_csv
from aft_mm.errors import CONFIG_ERRORS
from aft_mm.visualization import (
    choose,
    draw_position_bias,
    mixers_with_bias,
    position_bias_table,
)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*CONFIG_ERRORS):
        check_picture(args)
        check_int('--top', args.top, 1)
        _, model = load_model(args.config, args.checkpoint, device='cpu')
        mixers = list(mixers_with_bias(model).values())
        if not mixers:
            raise UserError(f'the model of {args.config} has no token mixer with a position bias')
        biases = {
            f'layer {i}': mixers[i].position_bias()
            for i in choose('--layers', args.layers, len(mixers))
        }
        place = dict(grid=mixers[0].grid, num_prefix_tokens=mixers[0].num_prefix_tokens)
        figure = draw_position_bias(
            biases,
            **place,
            heads=args.heads,
            queries=args.queries,
            view=args.view,
            quantity=args.quantity,
            scale=args.scale,
            footer=footer(args.config, args.checkpoint),
        )
        save(figure, args)
        if args.csv:
            write_csv(
                args.csv,
                position_bias_table(biases, **place, causal=mixers[0].causal, top=args.top),
            )
    print(f'{len(biases)} of {len(mixers)} layers drawn to {args.out}{left_out(biases, args)}')


def left_out(biases: dict, args: argparse.Namespace) -> str:
    """How many heads are not in the picture."""
    w = next(iter(biases.values()))
    kernel = w.dim() != 3 or len(w) > 1
    drawn = len(choose('--heads', args.heads, len(w)))
    rest = len(w) - drawn
    return f'; {drawn} heads of each, {rest} left out' if kernel and rest else ''


if __name__ == '__main__':
    main()
