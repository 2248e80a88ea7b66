"""Point clouds side by side."""

from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from aft_mm.checks import check_choice, check_int

PANEL = 2.4  # inches
DPI = 100
# The plotted axes of a cloud whose columns are x, y, z; cyclic, so that nothing is mirrored.
AXES = dict(x=(1, 2, 0), y=(2, 0, 1), z=(0, 1, 2))


def draw_point_clouds(
    clouds: Sequence[np.ndarray], up: str = 'z', columns: int | None = None
) -> np.ndarray:
    """Draw every cloud in a panel of its own, seen from above and the side.

    The axes of a panel are equally long, the longest edge of the cloud's bounding box fills them,
    and the colour of a point is its height, from violet (lowest) to light green.

    Args:
        clouds: Clouds ``[P, 3]`` with columns x, y, z; P may differ.
        up: The axis of the height, ``'x'``, ``'y'`` or ``'z'``.
        columns: Clouds in a row; by default the grid is as square as it can be.

    Returns:
        uint8 ``[H', W', 3]``, RGB on white.

    Raises:
        ValueError: There is no cloud, a cloud is not ``[P, 3]`` of finite numbers, or ``up`` is
            none of the axes.
    """
    check_choice('up', up, AXES)
    if columns is not None:
        check_int('columns', columns, 1)
    if not len(clouds):
        raise ValueError('clouds must hold at least one cloud, but is empty.')
    columns = columns or int(np.ceil(np.sqrt(len(clouds))))
    rows = -(-len(clouds) // columns)
    figure = Figure(figsize=(PANEL * columns, PANEL * rows), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(
        rows,
        columns,
        squeeze=False,
        subplot_kw=dict(projection='3d'),
        gridspec_kw=dict(left=0, right=1, bottom=0, top=1, wspace=0, hspace=0),
    ).ravel()
    for axis in axes:
        axis.set_axis_off()
    for index, (axis, cloud) in enumerate(zip(axes, clouds, strict=False)):
        points = np.asarray(cloud, dtype=np.float64)
        if (
            points.ndim != 2
            or points.shape[1] != 3
            or not np.isfinite(points).all()
            or not len(points)
        ):
            raise ValueError(
                f'clouds[{index}] must be [P, 3] of finite numbers, got '
                f'{list(points.shape)} or holds others.'
            )
        _draw_cloud(axis, points[:, AXES[up]])
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_cloud(axis, points: np.ndarray) -> None:
    """Scatter points ``[P, 3]``, the last column upwards."""
    low, high = points.min(0), points.max(0)
    centre, reach = (low + high) / 2, max(1e-6, (high - low).max() / 2)
    # The fewer the points, the larger; in points² of 1/72 inch.
    size = np.clip(4000 / len(points), 1.5, 12)
    height = (points[:, 2] - low[2]) / max(1e-6, high[2] - low[2])
    # The yellow end of the map cannot be seen on white.
    axis.scatter(*points.T, c=height, cmap='viridis', vmin=0, vmax=1.15, s=size, linewidths=0)
    for name, middle in zip('xyz', centre, strict=True):
        getattr(axis, f'set_{name}lim')(middle - reach, middle + reach)
    axis.set_proj_type('ortho')
    axis.set_box_aspect((1, 1, 1), zoom=1.05)
    axis.view_init(elev=22, azim=-60)
