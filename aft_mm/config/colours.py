from functools import cache

import numpy as np

#: The first colours, which people of most kinds of colour vision can tell apart.
COLOURS = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (204, 121, 167),
    (0, 114, 178),
    (213, 94, 0),
    (240, 228, 66),
    (153, 153, 153),
)
_GREYISH = 64  # smallest range of the channels of further colours


@cache
def class_colours(number: int) -> np.ndarray:
    """Return different colours, uint8 [number, 3]: each the farthest from those before it."""
    grid = np.stack(np.meshgrid(*[np.linspace(0, 255, 8)] * 3), axis=-1).reshape(-1, 3)
    grid = grid[np.ptp(grid, axis=1) >= _GREYISH]
    colours = np.array(COLOURS, float)
    nearest = np.linalg.norm(grid[:, None] - colours, axis=-1).min(1)
    while len(colours) < number:
        colour = grid[nearest.argmax()]
        colours = np.vstack([colours, colour])
        nearest = np.minimum(nearest, np.linalg.norm(grid - colour, axis=-1))
    return colours[:number].astype(np.uint8)
