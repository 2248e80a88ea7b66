"""Pictures of learned position biases, after figures 1 and 6 of arXiv 2105.14103."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure

from aft_mm.checks import check_int


def draw_position_bias(
    biases: Mapping[str, torch.Tensor],
    grid: tuple[int, ...] | None = None,
    num_prefix_tokens: int = 0,
    max_columns: int = 12,
) -> Figure:
    """Draw ``exp(w) - 1``, one row per layer, one column per head or per query token.

    White is W = exp(w) = 1, where a source token counts as it would without a bias; red counts
    more, blue less. Every layer has its own colour scale, symmetric around 0, linear up to 1 and
    logarithmic beyond: exp(w) − 1 ends at −1 on one side and nowhere on the other.

    What a row shows depends on the shape of its w:

    - ``[h, kernel_h, kernel_w]``: the kernel of each head, the axes are offsets to the source
      token; of ``[h, kernel_d, kernel_h, kernel_w]`` the plane in the middle;
    - ``[h, kernel]``: one panel, heads by offsets;
    - ``[1, T, T]`` on a 2-d grid: for some query tokens the row of w, folded onto the grid, the
      query marked by a cross; on any other grid one panel, target tokens by source tokens, or by
      their offset (source − target) where w is 0 outside a band narrower than a quarter of T.

    Args:
        biases: Layer name to position bias w, as a mixer's ``position_bias()`` gives it.
        grid: The grid of the tokens, needed for ``[1, T, T]`` only.
        num_prefix_tokens: Tokens before those of the grid (class tokens); they are left out.
        max_columns: At most so many heads or queries, spread evenly, are drawn.

    Returns:
        A figure with an Agg canvas of its own: ``figure.savefig(path)`` needs no display and
        leaves the backend of ``pyplot`` as it is.

    Raises:
        ValueError: ``biases`` is empty, or a w has a shape other than those above.
    """
    check_int('max_columns', max_columns, 1)
    if not biases:
        raise ValueError('biases must hold at least one layer, but it is empty.')
    rows = {
        name: _panels(name, w.detach().float().cpu(), grid, num_prefix_tokens, max_columns)
        for name, w in biases.items()
    }
    num_columns = max(map(len, rows.values()))
    panel = 1.15 if num_columns > 2 else 2.6  # inches
    figure = Figure(
        figsize=(panel * num_columns + 1.6, (panel + 0.3) * len(rows) + 0.6), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), num_columns, squeeze=False)
    for row, (name, panels) in zip(axes, rows.items(), strict=True):
        limit = max(1e-6, *(float(np.nanmax(np.abs(panel['values']))) for panel in panels))
        norm = (
            Normalize(-limit, limit) if limit <= 1 else
            SymLogNorm(linthresh=1, vmin=-limit, vmax=limit))
        for axis, panel in zip(row, panels, strict=False):
            image = _draw_panel(axis, panel, norm)
        for axis in row[len(panels):]:
            axis.set_axis_off()
        row[0].set_ylabel(f"{name}\n{panels[0]['ylabel']}", fontsize=7)
        bar = figure.colorbar(image, ax=list(row), fraction=0.04, pad=0.01)
        bar.ax.tick_params(labelsize=6)
    figure.suptitle('Learned position bias, exp(w) − 1', fontsize=10)
    return figure


def _spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` of ``range(count)``, evenly spread, the ends among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, limit)).round().astype(int).tolist()))


def _panels(name: str, w: torch.Tensor, grid: tuple[int, ...] | None, num_prefix_tokens: int,
            max_columns: int) -> list[dict[str, Any]]:
    """What to draw in the row of one layer: values, title, labels and extent of each panel."""
    values = torch.expm1(w).numpy()
    if grid is not None and values.shape == (1, *2 * (num_prefix_tokens + int(np.prod(grid)), )):
        return _dense_panels(values[0, num_prefix_tokens:, num_prefix_tokens:], grid, max_columns)
    if values.ndim == 2:
        reach = values.shape[1] / 2
        return [
            dict(
                values=values,
                title='all heads',
                stretch=True,
                xlabel='offset',
                ylabel='head',
                extent=(-reach, reach, len(values) - 0.5, -0.5))
        ]
    if values.ndim not in (3, 4):
        raise ValueError(f'the position bias of {name} must be [h, *kernel] with 1 to 3 kernel '
                         f'dimensions or [1, T, T] of the grid {grid}, got '
                         f'{list(values.shape)}.')
    if values.ndim == 4:
        values = values[:, values.shape[1] // 2]
    reach_y, reach_x = values.shape[1] / 2, values.shape[2] / 2
    return [
        dict(
            values=values[head],
            title=f'head {head}',
            xlabel='column offset',
            ylabel='row offset',
            extent=(-reach_x, reach_x, reach_y, -reach_y))
        for head in _spread(len(values), max_columns)
    ]


def _dense_panels(values: np.ndarray, grid: tuple[int, ...],
                  max_columns: int) -> list[dict[str, Any]]:
    """Panels of a dense bias: exp(w) - 1, ``[T, T]``, targets by sources."""
    if len(grid) != 2:
        return [_band(values)]
    return [
        dict(
            values=values[query].reshape(grid),
            title='query ({}, {})'.format(*divmod(query, grid[1])),
            xlabel='column',
            ylabel='row',
            mark=divmod(query, grid[1])) for query in _spread(len(values), max_columns)
    ]


def _band(values: np.ndarray) -> dict[str, Any]:
    """The panel of ``[T, T]`` by source tokens, or by offset: a window is a thin line otherwise."""
    target, source = values.nonzero()
    offset = source - target
    if not len(offset) or 4 * (np.ptp(offset) + 1) >= len(values):
        return dict(values=values, title='all tokens', xlabel='source token',
                    ylabel='target token')
    first, last = offset.min(), offset.max()
    band = np.full((len(values), last - first + 1), np.nan)  # no source before the first token
    for column, diagonal in enumerate(range(first, last + 1)):
        rows = slice(max(0, -diagonal), len(values) - max(0, diagonal))
        band[rows, column] = values.diagonal(diagonal)
    return dict(
        values=band,
        title='all tokens',
        xlabel='offset, source − target [tokens]',
        ylabel='target token',
        stretch=True,
        extent=(first - 0.5, last + 0.5, len(values) - 0.5, -0.5))


def _draw_panel(axis: Any, panel: dict[str, Any], norm: Normalize) -> Any:
    """Draw one panel; gives the image that the colour bar explains."""
    image = axis.imshow(
        panel['values'],
        cmap='RdBu_r',
        norm=norm,
        extent=panel.get('extent'),
        aspect='auto' if panel.get('stretch') else 'equal',
        interpolation='nearest')
    if 'mark' in panel:
        axis.plot(panel['mark'][1], panel['mark'][0], 'x', color='black', markersize=4)
    axis.set_title(panel['title'], fontsize=7)
    axis.set_xlabel(panel['xlabel'], fontsize=6)
    axis.tick_params(labelsize=5)
    axis.locator_params(integer=True)
    return image
