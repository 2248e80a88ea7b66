"""Draw the mean relative attention of a softmax ViT, figures 1 (left) and 5 of arXiv 2105.14103.

The attention of NETWORK must be torch's scaled_dot_product_attention, as in the ViT and DeiT of
mmpretrain and timm. The paper takes 256 images. --csv has the mean distance per layer and head.

    python tools/analysis_tools/plot_attention.py NETWORK CHECKPOINT --num 256 --out attention.png
    python tools/analysis_tools/plot_attention.py NETWORK CHECKPOINT --layers 0,2,4 --out a.png
"""

import argparse
from collections.abc import Mapping, Sequence

from aft_mm.cli.arguments import add_choice_arguments, add_network_arguments
from aft_mm.errors import UserError, one_sentence


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


import numpy as np
import torch
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from networks import batches_for, load_network
from recording import RecordAttention, grid_of
from torch import Tensor

from aft_mm.checks import check_int, refuse
from aft_mm.cli.command_line import DATA_ERRORS
from aft_mm.cli.pictures import check_picture, footer, save, write_csv
from aft_mm.cli.progress import with_bar
from aft_mm.visualization import choose
from aft_mm.visualization.figures import MOST_PANELS, Choice, new_figure


def mean_relative_attention(
    attention: Tensor, grid: Sequence[int], num_prefix_tokens: int = 0
) -> Tensor:
    """Attention by offset to the source, ``[B, h, T, T]`` to ``[h, 2H − 1, 2W − 1]``.

    The mean over images and over those queries of the grid that have a token at this offset. As in
    the paper prefix tokens are dropped, so that a query's weights sum to one less what it reads
    from them. The centre is the query itself; the row above it lies above.

    Raises:
        ValueError: T is not ``num_prefix_tokens`` + H·W.
    """
    height, width = grid
    tokens = num_prefix_tokens + height * width
    if attention.dim() != 4 or attention.shape[-2:] != (tokens, tokens):
        refuse(
            'attention',
            f'[B, h, {tokens}, {tokens}] for the grid {tuple(grid)} and '
            f'{num_prefix_tokens} prefix tokens',
            attention,
        )
    inner = attention[..., num_prefix_tokens:, num_prefix_tokens:].double().mean(0)
    inner = inner.reshape(-1, height, width, height, width)
    shape = (2 * height - 1, 2 * width - 1)
    total, count = inner.new_zeros(len(inner), *shape), inner.new_zeros(shape)
    for row in range(height):
        for column in range(width):
            # The query in the middle of a (2H − 1) x (2W − 1) picture: where the grid lies in it.
            rows = slice(height - 1 - row, 2 * height - 1 - row)
            columns = slice(width - 1 - column, 2 * width - 1 - column)
            total[:, rows, columns] += inner[:, row, column]
            count[rows, columns] += 1
    return total / count


def draw_relative_attention(
    attention: Mapping[str, Tensor],
    heads: Choice = 'even:12',
    footer: str = '',
) -> Figure:
    """Draw mean relative attention, one row per layer, one column per head.

    Every panel has its own colour scale from 0 (dark) to its maximum (light), which its title
    names in per cent of a query's attention: a head that looks at one place would hide the others.

    Args:
        attention: Layer name to ``[h, 2H − 1, 2W − 1]`` of :func:`mean_relative_attention`.
        heads: Which heads to draw, see :func:`choose`.
        footer: Small print below the figure.

    Raises:
        ValueError: there is no layer, or a head is not there.
    """
    if not attention:
        raise UserError('attention must hold at least one layer, but it is empty.')
    chosen = choose('heads', heads, min(map(len, attention.values())), MOST_PANELS)
    title = 'Mean relative attention; a colour scale per panel, 0 to its maximum'
    figure = new_figure(1.25 * len(chosen) + 0.6, 1.6 * len(attention) + 0.7, title, footer)
    axes = figure.subplots(len(attention), len(chosen), squeeze=False)
    for row, (name, maps) in zip(axes, attention.items(), strict=True):
        for axis, head in zip(row, chosen, strict=True):
            values = maps[head].numpy()
            reach_y, reach_x = values.shape[0] / 2, values.shape[1] / 2
            most = float(values.max())
            axis.imshow(
                values,
                cmap='cividis',
                norm=Normalize(0, most),
                extent=(-reach_x, reach_x, reach_y, -reach_y),
                interpolation='nearest',
            )
            axis.set_title(f'head {head}, max {100 * most:.2g} %', fontsize=6)
            axis.set_xlabel('column offset', fontsize=6)
            axis.tick_params(labelsize=5)
            axis.locator_params(integer=True)
        row[0].set_ylabel(f'{name}\nrow offset', fontsize=7)
    return figure


class MeanAttention:
    """The mean relative attention of each layer over batches, to be given to RecordAttention.

    ``take`` is called once per layer and batch, in the order of the layers; :meth:`next_batch`
    before each batch.

    Args:
        image_size: (H, W) in pixels, from which the grid of a layer's tokens follows.
        num_prefix_tokens: class tokens in front of the grid's.
    """

    def __init__(self, image_size: Sequence[int], num_prefix_tokens: int) -> None:
        self.image_size, self.num_prefix_tokens = tuple(image_size), num_prefix_tokens
        self.sums: list[Tensor] = []
        self.layer = self.batch = self.images = 0

    def take(self, attention: Tensor) -> None:
        """Add the attention [B, h, T, T] of the next layer.

        Raises:
            ValueError: its tokens do not lie on a grid, as those of windows do not.
        """
        tokens = attention.shape[-1] - self.num_prefix_tokens
        grid = grid_of(tokens, self.image_size)
        if grid is None or len(attention) != self.batch:
            raise UserError(
                f'attention must be over whole images, but that of {len(attention)} x '
                f'{tokens} tokens is not over {self.batch} images of '
                f'{self.image_size} pixels'
            )
        mean = mean_relative_attention(attention, grid, self.num_prefix_tokens)
        if self.layer == len(self.sums):
            self.sums.append(torch.zeros_like(mean))
        self.sums[self.layer] += mean * len(attention)
        self.layer += 1

    def next_batch(self, size: int) -> None:
        """So many images follow; the next call of ``take`` is that of the first layer."""
        self.batch = size
        self.images += size
        self.layer = 0

    def means(self) -> dict[str, Tensor]:
        """Layer name to ``[h, 2H − 1, 2W − 1]``; empty where no attention was seen."""
        return {f'layer {i}': (total / self.images).cpu() for i, total in enumerate(self.sums)}


def mean_attention_distance(relative: Tensor) -> np.ndarray:
    """Mean distance [tokens] of what the queries of a grid read, per head: ``[h]``.

    ``Σ n a |offset| / Σ n a`` of the maps a ``[h, 2H − 1, 2W − 1]`` of
    :func:`mean_relative_attention`, n the queries that have a token at the offset.
    """
    rows, columns = (torch.arange(size) - size // 2 for size in relative.shape[1:])
    distance = torch.hypot(rows[:, None].double(), columns[None].double())
    count = (len(rows) // 2 + 1 - rows.abs())[:, None] * (len(columns) // 2 + 1 - columns.abs())
    read = relative * count
    return ((read * distance).sum((1, 2)) / read.sum((1, 2))).numpy()


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with one_sentence(*DATA_ERRORS):
        check_picture(args)
        check_int('--batch-size', args.batch_size, 1)
        network = load_network(args.config, args.checkpoint)
        batches = batches_for(network, args.images, args.num, args.batch_size)
        mean = MeanAttention(batches[0].shape[2:], network.num_prefix_tokens)
        with torch.no_grad(), RecordAttention(mean.take):
            for batch in with_bar(batches, 'attention'):
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
