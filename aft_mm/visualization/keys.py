"""Keys over the image, figures 9 to 12 of arXiv 2105.14103."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from .figures import MOST_PANELS, Choice, choose, new_figure, ratio_norm


def key_maps(key: Tensor, grid: tuple[int, int], num_prefix_tokens: int = 0) -> Tensor:
    """``e^k`` over its mean on the grid, [T, h] to [h, H, W].

    A constant added to a key channel changes nothing in AFT; in this measure neither, and 1 is a
    token that counts as an average one does (before the position bias). With as many key channels
    as heads, as in AFT-conv, a map is a head; else a channel.

    Raises:
        ValueError: T is not ``num_prefix_tokens`` + H·W.
    """
    inner = key[num_prefix_tokens:]
    if key.dim() != 2 or len(inner) != grid[0] * grid[1]:
        raise ValueError(
            f'key must be [{num_prefix_tokens + grid[0] * grid[1]}, h] for the grid '
            f'{tuple(grid)} and {num_prefix_tokens} prefix tokens, got '
            f'{list(key.shape)}'
        )
    return (inner.double().softmax(0) * len(inner)).T.unflatten(1, grid)


def draw_key_maps(
    image: np.ndarray,
    keys: Mapping[str, Tensor],
    heads: Choice = 'even:12',
    footer: str = '',
) -> Figure:
    """Draw an image and its key maps, one row per layer, one column per head.

    White is 1, a token that counts as much as the mean one; red counts more, blue less. A
    logarithmic colour scale per layer, of the heads that are drawn.

    Args:
        image: uint8 [H, W, 3].
        keys: Layer name to the maps [h, H', W'] of :func:`key_maps`.
        heads: Which heads to draw, see :func:`choose`.
        footer: Small print below the figure.

    Raises:
        ValueError: there is no layer, or a head is not there.
    """
    if not keys:
        raise ValueError('keys must hold at least one layer, but it is empty.')
    chosen = choose('heads', heads, min(map(len, keys.values())), MOST_PANELS)
    figure = new_figure(
        1.15 * (len(chosen) + 1) + 1.2,
        1.4 * len(keys) + 0.7,
        'Keys: exp(k) over its mean on the image; a colour scale per layer',
        footer,
    )
    axes = figure.subplots(len(keys), len(chosen) + 1, squeeze=False)
    for row, (name, maps) in zip(axes, keys.items(), strict=True):
        drawn = maps[chosen].detach().cpu().numpy()
        norm = ratio_norm([drawn])
        row[0].imshow(image)
        row[0].set_title('image', fontsize=7)
        row[0].set_ylabel(name, fontsize=7)
        for axis, head, values in zip(row[1:], chosen, drawn, strict=True):
            picture = axis.imshow(values, cmap='RdBu_r', norm=norm, interpolation='nearest')
            axis.set_title(f'head {head}', fontsize=7)
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
        bar = figure.colorbar(picture, ax=list(row), fraction=0.04, pad=0.01)
        ticks = [1 / norm.vmax, 1, norm.vmax]
        bar.set_ticks(ticks, labels=[f'{ratio:.3g}' for ratio in ticks])
        bar.ax.minorticks_off()
        bar.ax.tick_params(labelsize=6)
        bar.set_label('exp(k) / mean', fontsize=6)
    return figure
