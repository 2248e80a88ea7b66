"""Plot the mean relative attention of a softmax ViT, figures 1 (left) and 5 of arXiv 2105.14103."""

import argparse
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from aft_mm.checks import check_int, refuse
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.progress import progress
from aft_mm.visualization import choose
from aft_mm.visualization.figures import MOST_PANELS, Choice, new_figure

from .networks import batches_for, load_network
from .pictures import footer, write_csv
from .recording import RecordAttention, grid_of


def mean_relative_attention(
    attention: Tensor, grid: Sequence[int], num_prefix_tokens: int = 0
) -> Tensor:
    """Average attention ``[B, h, T, T]`` by offset to the source: ``[h, 2H − 1, 2W − 1]``.

    The mean is over images and over the queries of the grid with a token at the offset. As in the
    paper, prefix tokens are dropped.
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
            # The grid in a map with the query at its centre.
            rows = slice(height - 1 - row, 2 * height - 1 - row)
            columns = slice(width - 1 - column, 2 * width - 1 - column)
            total[:, rows, columns] += inner[:, row, column]
            count[rows, columns] += 1
    return total / count


def draw_relative_attention(
    attention: Mapping[str, Tensor], heads: Choice = 'even:12', footer: str = ''
) -> Figure:
    """Draw the maps of :func:`mean_relative_attention`, one row per layer, one column per head.

    Each panel has its own colour scale from 0 to its maximum, in per cent of a query's attention.
    """
    chosen = choose('heads', heads, min(map(len, attention.values())), MOST_PANELS)
    title = 'Mean relative attention; one colour scale per panel, 0 to its maximum'
    figure = new_figure(1.25 * len(chosen) + 0.6, 1.6 * len(attention) + 0.7, title, footer)
    axes = figure.subplots(len(attention), len(chosen), squeeze=False)
    for row, (name, maps) in zip(axes, attention.items(), strict=True):
        for axis, head in zip(row, chosen, strict=True):
            values = maps[head].numpy()
            reach_y, reach_x = values.shape[0] / 2, values.shape[1] / 2
            most = float(values.max())
            style = dict(cmap='cividis', norm=Normalize(0, most), interpolation='nearest')
            axis.imshow(values, extent=(-reach_x, reach_x, reach_y, -reach_y), **style)
            axis.set_title(f'head {head}, max {100 * most:.2g} %', fontsize=6)
            axis.set_xlabel('column offset', fontsize=6)
            axis.tick_params(labelsize=5)
            axis.locator_params(integer=True)
        row[0].set_ylabel(f'{name}\nrow offset', fontsize=7)
    return figure


class MeanAttention:
    """Mean relative attention of each layer over batches.

    ``take`` is called for each layer in order, :meth:`next_batch` before each batch.
    """

    def __init__(self, image_size: Sequence[int], num_prefix_tokens: int) -> None:
        self.image_size, self.num_prefix_tokens = tuple(image_size), num_prefix_tokens
        self.sums: list[Tensor] = []
        self.layer = self.batch = self.images = 0

    def take(self, attention: Tensor) -> None:
        tokens = attention.shape[-1] - self.num_prefix_tokens
        grid = grid_of(tokens, self.image_size)
        if grid is None or len(attention) != self.batch:
            raise UserError(
                f'attention must be over {self.batch} whole images of {self.image_size} pixels, '
                f'got {len(attention)} x {tokens} tokens'
            )
        mean = mean_relative_attention(attention, grid, self.num_prefix_tokens)
        if self.layer == len(self.sums):
            self.sums.append(torch.zeros_like(mean))
        self.sums[self.layer] += mean * len(attention)
        self.layer += 1

    def next_batch(self, size: int) -> None:
        self.batch = size
        self.images += size
        self.layer = 0

    def means(self) -> dict[str, Tensor]:
        return {f'layer {i}': (total / self.images).cpu() for i, total in enumerate(self.sums)}


def mean_attention_distance(relative: Tensor) -> np.ndarray:
    """Return the attention-weighted mean distance [tokens] of the sources per head.

    ``Σ n a |offset| / Σ n a`` for the attention a at an offset and the number n of its queries.
    """
    rows, columns = (torch.arange(size) - size // 2 for size in relative.shape[1:])
    distance = torch.hypot(rows[:, None].double(), columns[None].double())
    count = (len(rows) // 2 + 1 - rows.abs())[:, None] * (len(columns) // 2 + 1 - columns.abs())
    read = relative * count
    return ((read * distance).sum((1, 2)) / read.sum((1, 2))).numpy()


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        check_int('--batch-size', args.batch_size, 1)
        network = load_network(args.network, args.checkpoint)
        batches = batches_for(network, args.images, args.num, args.batch_size)
        mean = MeanAttention(batches[0].shape[2:], network.num_prefix_tokens)
        with torch.no_grad(), RecordAttention(mean.take):
            for batch in progress(batches, 'attention'):
                mean.next_batch(len(batch))
                network.run(batch)
        layers = list(mean.means().items())
        if not layers:
            raise UserError(
                f"{args.network} has no layer that calls torch's scaled_dot_product_attention"
            )
        chosen = dict(layers[i] for i in choose('--layers', args.layers, len(layers)))
        small = f'{footer(args.network, args.checkpoint)} · {mean.images} images'
        figure = draw_relative_attention(chosen, args.heads, small)
        figure.savefig(args.out, dpi=args.dpi)
        if args.csv:
            rows = [
                dict(layer=name, head=head, distance_tokens=float(distance))
                for name, maps in chosen.items()
                for head, distance in enumerate(mean_attention_distance(maps))
            ]
            write_csv(args.csv, rows)
    print(
        f'\nplotted {len(chosen)} of {len(layers)} layers over {mean.images} images to {args.out}'
    )
