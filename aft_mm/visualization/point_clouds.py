from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from aft_mm.checks import check_choice, check_int
from aft_mm.errors import UserError
from aft_mm.tokenizers import decode_points

PANEL = 2.4  # inches
DPI = 100
# Plotted order of the columns x, y, z for each up axis; cyclic, so that nothing is mirrored.
AXES = dict(x=(1, 2, 0), y=(2, 0, 1), z=(0, 1, 2))


def check_settings(settings: Any) -> None:
    """Check ``point_cloud`` of a config: num_points, num_bits and up."""
    missing = [
        name
        for name in ('num_points', 'num_bits', 'up')
        if not isinstance(settings, dict) or name not in settings
    ]
    if missing:
        raise UserError(
            'point_cloud of the config must be dict(num_points=..., num_bits=..., '
            f'up=...), got one without {", ".join(missing)}'
        )
    check_int('num_points of point_cloud', settings['num_points'], 1)
    check_int('num_bits of point_cloud', settings['num_bits'], 1, 8)
    check_up(settings['up'])


def check_up(up: str) -> None:
    check_choice('up of a point cloud', up, AXES)


def check_points(model: Any, num_bits: int, num_points: int | None = None) -> None:
    """Raise a UserError unless ``model`` was built for the tokens of a point cloud."""
    length, head = model.decoder.max_length, model.head
    fits = model.encoder is None and head.token_shape == () and length % 3 == 0
    if not fits or head.num_values != 2**num_bits:
        raise UserError(
            f'a model of point clouds with num_bits={num_bits} needs {2**num_bits} values per '
            f'token, a length of 3 tokens per point and no encoder, but has {head.num_values} '
            f'values, {length} tokens and {"no" if model.encoder is None else "an"} encoder'
        )
    if num_points not in (None, length // 3):
        raise UserError(
            f'num_points must be {length // 3}, a third of the {length} tokens of the '
            f"model's position table, got {num_points!r}"
        )


def sample_points(model: Any, num: int, num_bits: int = 8, **options: Any) -> np.ndarray:
    """Sample point clouds.

    Args:
        model: An autoregressive model without an encoder; its position table holds P points.
        **options: Passed to ``model.generate``.

    Returns:
        float32 ``[num, P, 3]``, columns x, y, z, in the cube of side 1 around 0, the bounding cube of
        a cloud.

    Raises:
        UserError: The model was built for other tokens.
    """
    check_points(model, num_bits)
    check_int('num', num, 1)
    tokens = model.generate(model.decoder.max_length, batch_size=num, **options)
    return decode_points(tokens.cpu().numpy(), num_bits).astype(np.float32)


def draw_point_clouds(
    clouds: np.ndarray | Sequence[np.ndarray], up: str = 'z', columns: int | None = None
) -> np.ndarray:
    """Draw each cloud in its own panel; colour is height, from violet (lowest) to light green.

    Args:
        clouds: Clouds ``[P, 3]`` with columns x, y, z; P may differ.
        up: The vertical axis, ``'x'``, ``'y'`` or ``'z'``.
        columns: Clouds per row; by default the grid is as square as possible.

    Returns:
        uint8 ``[H', W', 3]``, RGB on white.
    """
    check_choice('up', up, AXES)
    if columns is not None:
        check_int('columns', columns, 1)
    if not len(clouds):
        raise ValueError('clouds must hold at least one cloud, got none')
    columns = columns or int(np.ceil(np.sqrt(len(clouds))))
    rows = -(-len(clouds) // columns)
    figure = Figure(figsize=(PANEL * columns, PANEL * rows), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    no_gaps = dict(left=0, right=1, bottom=0, top=1, wspace=0, hspace=0)
    projection = dict(projection='3d')
    axes = figure.subplots(
        rows, columns, squeeze=False, subplot_kw=projection, gridspec_kw=no_gaps
    ).ravel()
    for axis in axes:
        axis.set_axis_off()
    for index, (axis, cloud) in enumerate(zip(axes, clouds, strict=False)):
        points = np.asarray(cloud, dtype=np.float64)
        if points.shape[1:] != (3,) or not len(points) or not np.isfinite(points).all():
            raise ValueError(
                f'clouds[{index}] must be [P, 3] of finite numbers, got {list(points.shape)}'
                + (' with others' if points.shape[1:] == (3,) else '')
            )
        _draw_cloud(axis, points[:, AXES[up]])
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_cloud(axis: Any, points: np.ndarray) -> None:
    low, high = points.min(0), points.max(0)
    centre, reach = (low + high) / 2, max(1e-6, (high - low).max() / 2)
    # In points² of 1/72 inch.
    size = np.clip(4000 / len(points), 1.5, 12)
    height = (points[:, 2] - low[2]) / max(1e-6, high[2] - low[2])
    # The yellow end of the colour map is invisible on white.
    axis.scatter(*points.T, c=height, cmap='viridis', vmin=0, vmax=1.15, s=size, linewidths=0)
    for name, middle in zip('xyz', centre, strict=True):
        getattr(axis, f'set_{name}lim')(middle - reach, middle + reach)
    axis.set_proj_type('ortho')
    axis.set_box_aspect((1, 1, 1), zoom=1.05)
    axis.view_init(elev=22, azim=-60)
