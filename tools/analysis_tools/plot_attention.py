"""Draw the mean relative attention of a softmax ViT, figures 1 (left) and 5 of arXiv 2105.14103.

The attention of NETWORK must be torch's scaled_dot_product_attention, as in the ViT and DeiT of
mmpretrain and timm. The paper takes 256 images. --csv has the mean distance per layer and head.

    python tools/analysis_tools/plot_attention.py NETWORK CHECKPOINT --num 256 --out attention.png
    python tools/analysis_tools/plot_attention.py NETWORK CHECKPOINT --layers 0,2,4 --out a.png
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import add_choice_arguments, add_network_arguments
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_network_arguments(parser, num=64)
    add_choice_arguments(parser)
    parser.add_argument('--batch-size', type=int, default=16)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import torch

from aft_mm.apis import batches_for, load_network
from aft_mm.checks import check_int
from aft_mm.cli.pictures import check_picture, footer, save, write_csv
from aft_mm.cli.progress import progress
from aft_mm.errors import DATA_ERRORS
from aft_mm.visualization import (
    MeanAttention,
    RecordAttention,
    choose,
    draw_relative_attention,
    mean_attention_distance,
)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_picture(args)
        check_int('--batch-size', args.batch_size, 1)
        network = load_network(args.config, args.checkpoint)
        batches = batches_for(network, args.images, args.num, args.batch_size)
        mean = MeanAttention(batches[0].shape[2:], network.num_prefix_tokens)
        with torch.no_grad(), RecordAttention(mean.take):
            for batch in progress(batches, 'attention'):
                mean.next_batch(len(batch))
                network.run(batch)
        layers = list(mean.means().items())
        if not layers:
            raise UserError(
                f"{args.config} has no layer that calls torch's scaled_dot_product_attention"
            )
        drawn = dict(layers[i] for i in choose('--layers', args.layers, len(layers)))
        save(
            draw_relative_attention(
                drawn, args.heads, f'{footer(args.config, args.checkpoint)} · {mean.images} images'
            ),
            args,
        )
        distances = [
            (name, head, float(distance))
            for name, maps in drawn.items()
            for head, distance in enumerate(mean_attention_distance(maps))
        ]
        if args.csv:
            write_csv(
                args.csv,
                [
                    dict(zip(('layer', 'head', 'distance_tokens'), row, strict=True))
                    for row in distances
                ],
            )
    print(f'\n{len(drawn)} of {len(layers)} layers over {mean.images} images drawn to {args.out}')


if __name__ == '__main__':
    main()
