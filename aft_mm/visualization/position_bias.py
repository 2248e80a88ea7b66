"""Pictures of learned position biases, as in figures 1, 3 and 6 to 8 of arXiv 2105.14103."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from torch import nn

from aft_mm.checks import check_choice

from .figures import MOST_PANELS, Choice, choose, new_figure

QUANTITIES = {'exp-1': 'exp(w) − 1', 'exp': 'exp(w)'}
SCALES = {'layer': 'one colour scale per layer', 'all': 'one colour scale'}
VIEWS = ('queries', 'matrix')
PREFIX = 'prefix'
MOST_IN_A_ROW = 4  # layers with a single panel
# Ratio above which most of a linear scale would be one colour.
LINEAR_RANGE = 100


def draw_position_bias(
    biases: Mapping[str, torch.Tensor],
    grid: tuple[int, ...] | None = None,
    num_prefix_tokens: int = 0,
    heads: Choice = 'even:12',
    queries: Choice = 'even:12',
    view: str = 'queries',
    quantity: str = 'exp-1',
    scale: str = 'layer',
    footer: str = '',
    causal: bool = False,
) -> Figure:
    """Draw ``exp(w) - 1`` or ``exp(w)``, one row per layer, one column per head or query token.

    For ``exp(w) - 1`` white means W = 1, as without a bias. The content of a row depends on w:

    - ``[h, *kernel]``: the kernel of each head over the offset to the source token, of 3 dimensions
      its middle plane; of 1, heads by offsets.
    - ``[1, T, T]`` on a 2-d grid with ``view='queries'``: rows of w, folded onto the grid; a cross
      marks the query.
    - ``[1, T, T]`` otherwise: one panel, target by source tokens; by offset if w is 0 outside a
      narrow band.

    Args:
        biases: Layer name to position bias w, as returned by a mixer's ``position_bias()``.
        grid: Grid of the tokens; needed for ``[1, n, n]``, a matrix or the kernel of one head.
        num_prefix_tokens: Class tokens before those of the grid.
        queries: Query tokens of the grid, in raster order; ``'prefix'`` for the prefix tokens.
        view: ``'queries'`` or ``'matrix'``, for ``[1, T, T]`` on a 2-d grid.
        quantity: ``'exp-1'`` or ``'exp'``.
        scale: ``'layer'`` for one colour scale per layer, ``'all'`` for a common one.
        footer: Small print below the figure.
        causal: Leave out the offsets of a kernel to later tokens.

    Returns:
        A figure, see :func:`.figures.new_figure`.

    Raises:
        ValueError: If a matrix does not fit the grid.
    """
    check_choice('view', view, VIEWS)
    check_choice('quantity', quantity, QUANTITIES)
    check_choice('scale', scale, SCALES)
    if not biases:
        raise ValueError('biases must hold at least one layer, got none')
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, w in biases.items():
        w = w.detach().float().cpu()
        values = (torch.expm1(w) if quantity == 'exp-1' else w.exp()).numpy()
        if grid is not None and values.shape == (1, *2 * (num_prefix_tokens + prod(grid),)):
            if view == 'matrix' or len(grid) != 2:
                rows[name] = [_band(w[0].numpy(), values[0], num_prefix_tokens)]
            else:
                rows[name] = _query_panels(values[0], grid, num_prefix_tokens, queries)
        elif _is_matrix(values.shape, grid):
            raise ValueError(
                f'grid must be that of {name} {list(values.shape)}, n = num_prefix_tokens + '
                'prod(grid), or (H, W) for the kernel of one head, got '
                f'{grid} and num_prefix_tokens={num_prefix_tokens}'
            )
        else:
            rows[name] = _kernel_panels(name, values, grid, causal, heads)
    title = f'Position bias, {QUANTITIES[quantity]}; {SCALES[scale]}'
    return _draw_rows(rows, quantity, scale == 'all', title, footer)


def _is_matrix(shape: tuple[int, ...], grid: tuple[int, ...] | None) -> bool:
    """Return whether a bias of this shape cannot be a kernel, which has odd sides, on the grid."""
    square = len(shape) == 3 and shape[0] == 1 and shape[1] == shape[2]
    return square and (grid is None or len(grid) != 2 or shape[1] % 2 == 0)


def _draw_rows(
    rows: Mapping[str, list[dict[str, Any]]], quantity: str, shared: bool, title: str, footer: str
) -> Figure:
    single = all(len(panels) == 1 for panels in rows.values())
    columns = min(MOST_IN_A_ROW, len(rows)) if single else max(map(len, rows.values()))
    tiled = single and 'tiles' in next(iter(rows.values()))[0]
    if tiled:
        columns = 1
    num_rows = -(-len(rows) // columns) if single else len(rows)
    everything = [panel for panels in rows.values() for panel in panels]
    width, height = (2.6, 2.6) if single else (1.15, 1.45)
    if tiled:
        shapes = [panel['values'].shape for panel in everything]
        width, height = 9.0, max(9 * h / w for h, w in shapes) + 0.35
    figure = new_figure(
        (width + single * 0.6) * columns + 1.2, height * num_rows + 0.7, title, footer
    )
    axes = figure.subplots(num_rows, columns, squeeze=False)
    places = axes.reshape(-1, 1) if single else axes
    for row, (name, panels) in zip(places, rows.items(), strict=False):
        norm = _norm([p['values'] for p in (everything if shared else panels)], quantity)
        for axis, panel in zip(row, panels, strict=False):
            image = _draw_panel(axis, panel, norm, quantity)
        for axis in row[len(panels) :]:
            axis.set_axis_off()
        row[0].set_ylabel(f'{name}\n{panels[0]["ylabel"]}', fontsize=7)
        if not shared:
            _draw_scale(figure, image, list(row), QUANTITIES[quantity])
    if shared:
        _draw_scale(figure, image, list(axes.flat), QUANTITIES[quantity])
    for row in places[len(rows) :]:
        row[0].set_axis_off()
    return figure


def _draw_scale(figure: Figure, image: Any, axes: list[Axes], label: str) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.01)
    if isinstance(image.norm, SymLogNorm):
        _, largest = image.get_clim()
        most = int(np.log10(largest))
        powers = [10.0**power for power in range(0, most + 1, max(1, most // 2))]
        bar.set_ticks([-1, 0, *powers], labels=['−1', '0', *(f'{power:g}' for power in powers)])
        bar.ax.minorticks_off()
        bar.ax.set_ylim(-1, largest)  # exp(w) - 1 is above -1
    bar.ax.tick_params(labelsize=6)
    bar.ax.yaxis.get_offset_text().set_fontsize(6)
    bar.set_label(label, fontsize=6)


def _norm(pictures: list[np.ndarray], quantity: str) -> Normalize:
    known = np.concatenate([picture[np.isfinite(picture)] for picture in pictures])
    if quantity == 'exp-1':
        limit = max(1e-3, float(np.abs(known).max()))
        return (
            Normalize(-limit, limit)
            if limit <= 1
            else SymLogNorm(linthresh=1, vmin=-limit, vmax=limit)
        )
    low, high = float(known.min()), float(known.max())
    high = max(high, low * (1 + 1e-6), 1e-12)
    if low > 0 and high / low <= LINEAR_RANGE:
        return Normalize(low, high)
    return LogNorm(max(low, high * 1e-8), high)


def _kernel_panels(
    name: str, values: np.ndarray, grid: tuple[int, ...] | None, causal: bool, heads: Choice
) -> list[dict[str, Any]]:
    if values.ndim not in (2, 3, 4):
        raise ValueError(
            f'the position bias of {name} must be [h, *kernel] with 1 to 3 kernel '
            f'dimensions or [1, T, T] of the grid {grid}, got {list(values.shape)}'
        )
    chosen = choose('heads', heads, len(values))
    values = values[chosen]
    if causal:  # in raster order, offsets to later tokens follow the centre
        index = np.arange(values[0].size).reshape(values[0].shape)
        values[:, index > values[0].size // 2] = np.nan
    if values.ndim == 2:
        return [_lines(values, causal, chosen)]
    if values.ndim == 4:
        values = values[:, values.shape[1] // 2]
    reach_y, reach_x = values.shape[1] / 2, values.shape[2] / 2
    if len(chosen) > MOST_PANELS:
        columns = int(np.ceil(np.sqrt(6 * len(chosen))))
        size = f'{values.shape[1]} × {values.shape[2]}'
        return [
            dict(
                values=_tile(values, columns),
                tiles=(values.shape[1], [str(head) for head in chosen[::columns]]),
                title=f'{len(chosen)} heads in reading order, {columns} per row',
                xlabel=f'{size} offsets to the source token for each head [tokens]',
                ylabel='first head of the row',
            )
        ]
    return [
        dict(
            values=kernel,
            title=f'head {head}',
            xlabel='column offset',
            ylabel='row offset',
            extent=(-reach_x, reach_x, reach_y, -reach_y),
        )
        for head, kernel in zip(chosen, values, strict=True)
    ]


def _lines(values: np.ndarray, causal: bool, heads: list[int]) -> dict[str, Any]:
    reach = values.shape[1] / 2
    if causal:
        values = values[:, : values.shape[1] // 2 + 1]
    shown = choose('heads', 'even:12', len(heads))
    return dict(
        values=values,
        title=f'{len(heads)} heads',
        stretch=True,
        xlabel='offset, source − target [tokens]',
        ylabel='head',
        yticks=(shown, [str(heads[index]) for index in shown]),
        extent=(-reach, 0.5 if causal else reach, len(values) - 0.5, -0.5),
    )


def _query_panels(
    values: np.ndarray, grid: tuple[int, ...], num_prefix_tokens: int, queries: Choice
) -> list[dict[str, Any]]:
    sources = values[:, num_prefix_tokens:].reshape(-1, *grid)
    labels = dict(xlabel='column', ylabel='row')
    if isinstance(queries, str) and queries == PREFIX:
        if not num_prefix_tokens:
            raise ValueError(
                f'queries must be tokens of the grid without a prefix token, got {queries!r}'
            )
        return [
            dict(
                labels,
                values=sources[i],
                title='class token' if num_prefix_tokens == 1 else f'prefix token {i}',
            )
            for i in range(num_prefix_tokens)
        ]
    return [
        dict(
            labels,
            values=sources[num_prefix_tokens + query],
            title='query ({}, {})'.format(*divmod(query, grid[1])),
            mark=divmod(query, grid[1]),
        )
        for query in choose('queries', queries, prod(grid))
    ]


def _band(w: np.ndarray, values: np.ndarray, num_prefix_tokens: int) -> dict[str, Any]:
    target, source = w.nonzero()
    offset = source - target
    if not len(offset) or 4 * (np.ptp(offset) + 1) >= len(values):
        first = {0: '', 1: ', 0 the class token'}.get(num_prefix_tokens, ', prefix tokens first')
        return dict(
            values=values,
            title='all tokens',
            xlabel=f'source token{first}',
            ylabel=f'target token{first}',
        )
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
        extent=(first - 0.5, last + 0.5, len(values) - 0.5, -0.5),
    )


def _tile(pictures: np.ndarray, columns: int) -> np.ndarray:
    # The tools check first that torchvision matches torch.
    from torchvision.utils import make_grid

    images = torch.from_numpy(pictures)[:, None].double()
    return make_grid(images, columns, padding=1, pad_value=np.nan)[0, 1:-1, 1:-1].numpy()


def _draw_panel(axis: Axes, panel: dict[str, Any], norm: Normalize, quantity: str) -> Any:
    colours: dict[str, Any] = dict(cmap='RdBu_r' if quantity == 'exp-1' else 'cividis', norm=norm)
    shape: dict[str, Any] = dict(
        extent=panel.get('extent'), aspect='auto' if panel.get('stretch') else 'equal'
    )
    image = axis.imshow(panel['values'], interpolation='nearest', **colours, **shape)
    if 'mark' in panel:
        axis.plot(panel['mark'][1], panel['mark'][0], 'x', color='black', markersize=4)
    axis.set_title(panel['title'], fontsize=7)
    axis.set_xlabel(panel['xlabel'], fontsize=6)
    axis.tick_params(labelsize=5)
    if 'tiles' in panel:
        height, first_heads = panel['tiles']
        middles = (height - 1) / 2 + (height + 1) * np.arange(len(first_heads))
        axis.set_yticks(middles, first_heads)
        axis.set_xticks([])
        axis.tick_params(labelsize=6, length=0)
        axis.set_facecolor('dimgrey')  # lines between heads
    else:
        axis.locator_params(integer=True)
    if 'yticks' in panel:
        axis.set_yticks(*panel['yticks'])
    return image


def mixers_with_bias(model: nn.Module) -> dict[str, Any]:
    """Return the token mixers with a position bias over their own tokens, by layer name."""
    found = {
        name: module
        for name, module in model.named_modules()
        # Only token mixers have this attribute.
        if getattr(module, 'biased_memory', None) is False and module.position_bias() is not None
    }
    prefix = 'decoder.' if all(name.startswith('decoder.') for name in found) else ''
    return {name.removeprefix(prefix): module for name, module in found.items()}
