"""Draw the learned position biases of a checkpoint, exp(w) - 1 per layer and head."""

import argparse
from collections.abc import Sequence

from torch import nn

from aft_mm.apis import load_model
from aft_mm.checks import check_int
from aft_mm.cli.arguments import MOST_DPI, PICTURES, check_output
from aft_mm.cli.command_line import CONFIG_ERRORS
from aft_mm.cli.errors import UserError, one_sentence
from aft_mm.visualization import draw_position_bias


def mixers_with_bias(model: nn.Module) -> dict[str, nn.Module]:
    """The token mixers of a model that have a position bias over their own tokens, by layer name.

    Of a model with an encoder those of the decoder, which are on one grid.
    """
    return {
        name: module
        for name, module in getattr(model, 'decoder', model).named_modules()
        if callable(getattr(module, 'position_bias', None))
        and module.position_bias() is not None and not module.biased_memory
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path of the checkpoint, as tools/train.py writes it')
    parser.add_argument('--out', required=True, metavar='PNG', help='where the picture goes')
    parser.add_argument(
        '--columns', type=int, default=12, help='heads or query tokens to draw, evenly spread')
    parser.add_argument('--dpi', type=int, default=150)
    args = parser.parse_args(argv)

    with one_sentence(*CONFIG_ERRORS):
        check_output('--out', args.out, PICTURES)
        check_int('--dpi', args.dpi, 1, MOST_DPI)
        check_int('--columns', args.columns, 1)
        _, model = load_model(args.config, args.checkpoint, device='cpu')
        mixers = mixers_with_bias(model)
        if not mixers:
            raise UserError(f'the model of {args.config} has no token mixer with a position bias')
    mixer = next(iter(mixers.values()))
    figure = draw_position_bias(
        {f'layer {i}': mixer.position_bias() for i, mixer in enumerate(mixers.values())},
        grid=mixer.grid,
        num_prefix_tokens=mixer.num_prefix_tokens,
        max_columns=args.columns)
    figure.savefig(args.out, dpi=args.dpi)
    print(f'{len(mixers)} layers drawn to {args.out}')


if __name__ == '__main__':
    main()
