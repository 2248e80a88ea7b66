from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import check_int, check_sizes, per_dimension, refuse

from .resetting import Resettable

Grid = tuple[int, ...]
_MODES = {1: 'linear', 2: 'bicubic', 3: 'trilinear'}


def check_grid(grid: Sequence[int], name: str = 'grid') -> Grid:
    """Return the grid as a tuple; ValueError unless it is 1 to 3 positive ints."""
    check_sizes(name, grid, (1, 2, 3))
    return tuple(grid)


def check_kernel(kernel_size: int | Sequence[int], grid: Grid | None) -> Grid:
    """Return the odd kernel size of each dimension of the grid, or without one as given."""
    if grid is not None:
        dims = len(grid)
    else:
        dims = len(kernel_size) if isinstance(kernel_size, Sequence) else 1
    if dims > 3:
        refuse('kernel_size', '1 to 3 ints', kernel_size)
    kernel = per_dimension('kernel_size', kernel_size, dims)
    if any(size % 2 == 0 for size in kernel):
        refuse('kernel_size', 'odd', kernel)
    return kernel


def is_same(a: Grid, b: Grid) -> bool:
    """Return whether two grids are known to be equal; symbolic sizes never are."""
    return all(isinstance(n, int) for n in (*a, *b)) and a == b


def interpolate(x: Tensor, source: Grid, target: Grid, num_prefix_tokens: int = 0) -> Tensor:
    """Resample rows on a grid, ``[P + prod(source), C] -> [P + prod(target), C]``.

    Linear, bicubic or trilinear; the P rows of prefix tokens are copied.
    """
    if is_same(source, target):
        return x
    prefix, rows = x[:num_prefix_tokens], x[num_prefix_tokens:]
    image = rows.to(torch.promote_types(x.dtype, torch.float32)).T.unflatten(1, source).unsqueeze(0)
    image = F.interpolate(image, size=target, mode=_MODES[len(source)], align_corners=False)
    return torch.cat([prefix, image.squeeze(0).flatten(1).T.to(x.dtype)])


def infer_grid(num_tokens: int, like: Grid) -> Grid | None:
    """Guess the grid of a checkpoint from its number of positions.

    Tries `like`, equal sides, and the proportions of `like`; else None.
    """
    if num_tokens < 1:
        return None
    sides = num_tokens ** (1 / len(like))
    scale = sides / prod(like) ** (1 / len(like))
    guesses = [like, (round(sides),) * len(like), tuple(round(n * scale) for n in like)]
    return next((guess for guess in guesses if prod(guess) == num_tokens), None)


class GridParameters(Resettable):
    """Base class of parameters with one row per token, interpolated for other grids.

    Args:
        grid: Sizes of the token grid, 1 to 3 dimensions.
        num_prefix_tokens: Class tokens P in front of the grid, T = P + prod(grid).
        stretched: Tokens, at least, to which the rows of a sequence are interpolated.

    Raises:
        ValueError: On loading, if the number of rows fits no grid, or C differs.
    """

    def __init__(
        self, grid: Sequence[int], num_prefix_tokens: int = 0, stretched: int | None = None
    ) -> None:
        super().__init__()
        self.grid = check_grid(grid)
        self.stretched = stretched
        check_int('num_prefix_tokens', num_prefix_tokens, 0)
        self.num_prefix_tokens = num_prefix_tokens
        self.num_tokens = num_prefix_tokens + prod(self.grid)

    def on_grid(self, rows: Tensor, grid: Grid | None) -> Tensor:
        """Return `rows` for tokens on `grid`: the first of a sequence, else interpolated."""
        if self.stretched is not None and grid is not None:
            length = max(self.stretched, *grid)
            return interpolate(rows, self.grid, (length,))[: grid[0]]
        if grid is None or is_same(grid, self.grid):
            return rows
        if len(grid) != len(self.grid) or (len(grid) == 1 and grid > self.grid):
            hint = "; give the layer a longer grid, or AFTFull or AFTLocal longer='interpolate'"
            hint *= len(grid) == len(self.grid)
            raise ValueError(
                f'grid must fit positions learned on grid {self.grid}, got {grid}{hint}'
            )
        if len(grid) == 1:
            return rows[: self.num_prefix_tokens + grid[0]]
        return interpolate(rows, self.grid, grid, self.num_prefix_tokens)

    def resize(self, loaded: Tensor, source: Grid) -> Tensor:
        return interpolate(loaded, source, self.grid, self.num_prefix_tokens)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            loaded = state_dict.get(prefix + name)
            if loaded is None or loaded.shape == parameter.shape:
                continue
            source = infer_grid(len(loaded) - self.num_prefix_tokens, self.grid)
            resized = None if source is None else self.resize(loaded, source)
            if resized is None or resized.shape != parameter.shape:
                raise ValueError(
                    f'{prefix}{name} of the checkpoint must be interpolable to '
                    f'{list(parameter.shape)} on grid {self.grid} with {self.num_prefix_tokens} '
                    f'prefix tokens, got {list(loaded.shape)}'
                )
            state_dict[prefix + name] = resized
        super()._load_from_state_dict(state_dict, prefix, *args)
