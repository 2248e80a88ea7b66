"""The grid of tokens: checking one, and carrying what is learned on one over to another."""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_int, check_sizes

__all__ = ['GridParameters', 'check_grid', 'interpolate']

Grid = tuple[int, ...]
_MODES = {1: 'linear', 2: 'bicubic', 3: 'trilinear'}


def check_grid(grid: Sequence[int], name: str = 'grid') -> Grid:
    """The grid as a tuple; raises ValueError unless it is 1 to 3 positive ints."""
    check_sizes(name, grid, (1, 2, 3))
    return tuple(grid)


def is_same(a: Grid, b: Grid) -> bool:
    """Whether two grids are known to be equal; one of any size, in an exported graph, is not."""
    return all(isinstance(n, int) for n in (*a, *b)) and a == b


def interpolate(x: Tensor, source: Grid, target: Grid, num_prefix_tokens: int = 0) -> Tensor:
    """Resample rows that lie on a grid: ``[P + prod(source), C] -> [P + prod(target), C]``.

    Linear, bicubic or trilinear by the number of dimensions, corners not aligned; the P rows of
    prefix tokens come first and stay as they are. A constant stays constant, and the same grid
    gives `x` itself.
    """
    if is_same(source, target):
        return x
    prefix, rows = x[:num_prefix_tokens], x[num_prefix_tokens:]
    image = rows.float().T.unflatten(1, source).unsqueeze(0)
    image = F.interpolate(image, size=target, mode=_MODES[len(source)], align_corners=False)
    return torch.cat([prefix, image.squeeze(0).flatten(1).T.to(x.dtype)])


def infer_grid(num_tokens: int, like: Grid) -> Grid | None:
    """The grid behind `num_tokens` positions of a checkpoint, which does not store it, or None.

    The same number of tokens is taken for the same grid; else a grid of equal sides, else one in
    the proportions of `like`.
    """
    if num_tokens < 1:
        return None
    sides = num_tokens ** (1 / len(like))
    scale = sides / prod(like) ** (1 / len(like))
    guesses = [like, (round(sides),) * len(like), tuple(round(n * scale) for n in like)]
    return next((guess for guess in guesses if prod(guess) == num_tokens), None)


class GridParameters(nn.Module):
    """Parameters with one row per token, ``[P + prod(grid), C]``; the parent of what is resized.

    A checkpoint of another grid is interpolated as it is loaded. One that cannot be, since its
    number of rows fits no grid or its C differs, raises ValueError: mmengine's loader would only
    log the mismatch and go on with random weights.
    """

    def __init__(self, grid: Sequence[int], num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.grid = check_grid(grid)
        check_int('num_prefix_tokens', num_prefix_tokens, 0)
        self.num_prefix_tokens = num_prefix_tokens
        self.num_tokens = num_prefix_tokens + prod(self.grid)

    def on_grid(self, rows: Tensor, grid: Grid | None) -> Tensor:
        """`rows` of this grid for tokens on `grid`; None stands for this grid.

        A shorter sequence (1-d) has the first rows, a picture or volume has them interpolated.
        """
        if grid is None or is_same(grid, self.grid):
            return rows
        if len(grid) != len(self.grid) or (len(grid) == 1 and grid > self.grid):
            raise ValueError(f'grid {grid} does not fit positions learned on grid {self.grid}')
        if len(grid) == 1:
            return rows[: self.num_prefix_tokens + grid[0]]
        return interpolate(rows, self.grid, grid, self.num_prefix_tokens)

    def resize(self, loaded: Tensor, source: Grid) -> Tensor:
        """A parameter of the grid `source` on this grid."""
        return interpolate(loaded, source, self.grid, self.num_prefix_tokens)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            loaded = state_dict.get(prefix + name)
            if loaded is None or loaded.shape == parameter.shape:
                continue
            source = infer_grid(len(loaded) - self.num_prefix_tokens, self.grid)
            resized = None if source is None else self.resize(loaded, source)
            if resized is None or resized.shape != parameter.shape:
                raise ValueError(
                    f'{prefix}{name} of the checkpoint is {list(loaded.shape)}, which cannot be '
                    f'interpolated to {list(parameter.shape)} on grid {self.grid} with '
                    f'{self.num_prefix_tokens} prefix tokens'
                )
            state_dict[prefix + name] = resized
        super()._load_from_state_dict(state_dict, prefix, *args)
