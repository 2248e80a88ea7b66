"""Mean relative attention of a softmax model, figures 1 (left) and 5 of arXiv 2105.14103."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from aft_mm.checks import refuse

from .figures import MOST_PANELS, Choice, choose, new_figure
from .recording import grid_of


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
        raise ValueError('attention must hold at least one layer, but it is empty.')
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
            raise ValueError(
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
