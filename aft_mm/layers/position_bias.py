"""What w is: the learned position biases of AFT, the only place that defines them.

A bias module holds the parameters, a mixer asks it for w, and an op turns w into ``W = exp(w)``.
Autocast stays out of it: w is an exponent, so its rounding error is the relative error of a weight.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import check_flag, check_int, check_number, refuse
from aft_mm.ops.geometry import near_radius

from .grid import Grid, GridParameters, check_grid

__all__ = [
    'ConvPositionBias',
    'FactorizedPositionBias',
    'FreeLocalPositionBias',
    'FreePositionBias',
    'MemoryPositionBias',
]


# The papers start with N(0, 1e-2). Of u and v it is read as a variance, which trained better than a
# deviation of 0.01 in three runs of three; of a free w as a deviation, which one run of each has
# slightly ahead (docs/configs.md).
FACTOR_STD = 0.1
FREE_STD = 0.01


class FactorizedPositionBias(GridParameters):
    """``w = u vᵀ`` with u, v [T, d'] (arXiv 2105.14103, eq. 7), T = P + prod(grid).

    u and v start as N(0, init_std²), so that w has a standard deviation of init_std² √d'. On
    another grid the factors are interpolated, see :class:`GridParameters`. Raises ValueError for a
    rank below 1, and for an init_std that is not positive: the gradient of each factor is a product
    with the other.
    """

    def __init__(
        self,
        grid: Sequence[int],
        rank: int,
        num_prefix_tokens: int = 0,
        init_std: float = FACTOR_STD,
    ) -> None:
        super().__init__(grid, num_prefix_tokens)
        check_number('init_std', init_std, above=0)
        check_int('rank', rank, 1)
        self.pos_u = nn.Parameter(torch.empty(self.num_tokens, rank))
        self.pos_v = nn.Parameter(torch.empty(self.num_tokens, rank))
        nn.init.normal_(self.pos_u, std=init_std)
        nn.init.normal_(self.pos_v, std=init_std)

    def factors(self, grid: Grid | None = None) -> tuple[Tensor, Tensor]:
        """u and v [T, d'] for the tokens of `grid`."""
        return self.on_grid(self.pos_u, grid), self.on_grid(self.pos_v, grid)

    def forward(self, grid: Grid | None = None, source_grid: Grid | None = None) -> Tensor:
        """w [T, S]; S belongs to `source_grid`, which is `grid` unless given."""
        with torch.autocast(self.pos_u.device.type, enabled=False):
            pos_u = self.on_grid(self.pos_u, grid)
            pos_v = self.on_grid(self.pos_v, grid if source_grid is None else source_grid)
            return pos_u @ pos_v.T


class FreePositionBias(GridParameters):
    """A free matrix w [T, T] (arXiv 2105.14103, eq. 2; the non-factorised ablation).

    Starts as N(0, init_std²), 0 allowed, and is interpolated along both axes for another grid.
    """

    def __init__(
        self, grid: Sequence[int], num_prefix_tokens: int = 0, init_std: float = FREE_STD
    ) -> None:
        super().__init__(grid, num_prefix_tokens)
        check_number('init_std', init_std, 0)
        self.weight = nn.Parameter(torch.empty(self.num_tokens, self.num_tokens))
        nn.init.normal_(self.weight, std=init_std)

    def resize(self, loaded: Tensor, source: Grid) -> Tensor:
        """A matrix of the grid `source` on this grid, targets first, then sources."""
        return super().resize(super().resize(loaded, source).T, source).T

    def forward(self, grid: Grid | None = None, source_grid: Grid | None = None) -> Tensor:
        """w [T, S]; S belongs to `source_grid`, which is `grid` unless given."""
        rows = self.on_grid(self.weight, grid)
        return self.on_grid(rows.T, grid if source_grid is None else source_grid).T


class MemoryPositionBias(GridParameters):
    """A free matrix w [T, S] of tokens over a memory, a coarser or finer picture of the same thing.

    It starts as ``−|p_t − p_s|² / (2 · 0.5²)``, p the centres of the cells and a cell of the source
    grid the unit of length, so that a token reads what lies where it lies. The rows are
    interpolated for another grid of the tokens. Raises ValueError where the two grids have not as
    many dimensions, and for prefix tokens, which lie nowhere.
    """

    def __init__(
        self, grid: Sequence[int], source_grid: Sequence[int], num_prefix_tokens: int = 0
    ) -> None:
        super().__init__(grid)
        source_grid = check_grid(source_grid, 'source_grid')
        if len(source_grid) != len(self.grid) or num_prefix_tokens:
            raise ValueError(
                f'source_grid must have as many dimensions as grid {self.grid}, without prefix '
                f'tokens, got {source_grid} and {num_prefix_tokens} prefix tokens'
            )
        places = (_centres(self.grid, source_grid), _centres(source_grid))
        self.weight = nn.Parameter(-torch.cdist(*places).square() / (2 * 0.5**2))

    def forward(self) -> Tensor:
        """w [T, S]."""
        return self.weight


def _centres(grid: Grid, unit: Grid | None = None) -> Tensor:
    """The centres [T, dims] of the cells of `grid`, in cells of `unit` on the same area."""
    axes = [
        (torch.arange(size) + 0.5) * cells / size
        for size, cells in zip(grid, unit or grid, strict=True)
    ]
    return torch.cartesian_prod(*axes).view(-1, len(grid))


class FreeLocalPositionBias(GridParameters):
    """A free w per token and offset in the window (arXiv 2105.14103, the non-factorised ablation).

    w [T, s] for a causal window s, whose column ``s − 1 + (t' − t)`` is w[t, t'], and [T, 2s − 1]
    otherwise. Starts as N(0, init_std²), 0 allowed; the rows are interpolated for another length.
    Raises ValueError for a grid of more than one dimension, and for a window below 1, which has no
    w.
    """

    def __init__(
        self,
        grid: Sequence[int],
        window: int | Sequence[int],
        causal: bool,
        init_std: float = FREE_STD,
    ) -> None:
        super().__init__(grid)
        check_number('init_std', init_std, 0)
        if len(self.grid) != 1:
            raise ValueError(f'grid must have 1 dimension for a free local bias, got {self.grid}')
        self.reach = near_radius(window, self.grid)
        if self.reach < 0:
            raise ValueError(f'window must be 1 or larger for a free local bias, got {window}')
        offsets = self.reach + 1 if causal else 2 * self.reach + 1
        self.weight = nn.Parameter(torch.empty(self.num_tokens, offsets))
        nn.init.normal_(self.weight, std=init_std)

    def factors(self, grid: Grid | None = None) -> tuple[Tensor, None]:
        """The rows of w for the tokens of `grid`, and None for v, as the op takes them."""
        return self.on_grid(self.weight, grid), None

    def forward(self) -> Tensor:
        """w [T, T], 0 where there is none."""
        token = torch.arange(self.num_tokens, device=self.weight.device)
        column = self.reach + token - token[:, None]
        last = self.weight.shape[1] - 1
        dense = self.weight.gather(1, column.clamp(0, last))
        return dense.masked_fill((column < 0) | (column > last), 0)


class _Kept(NamedTuple):
    """A kernel and the parameters it was made of: their storage, alive, and its version."""

    kernel: Tensor
    parameters: list[Tensor]
    versions: list[int]
    autocast: bool

    def holds(self, parameters: list[Tensor], autocast: bool) -> bool:
        """Whether these parameters are the same storage, and nobody wrote to it."""
        same = all(
            old.data_ptr() == new.data_ptr() and old.dtype == new.dtype and version == new._version
            for old, new, version in zip(self.parameters, parameters, self.versions, strict=True)
        )
        return same and autocast == self.autocast


class ConvPositionBias(nn.Module):
    """A kernel of biases per head, w [h, *kernel] (arXiv 2105.14103, eq. 6, 8 and 10).

    With `reparameterize` the bias is ``γ (w − mean(w)) / std(w) + β`` with one γ and β per head, 0
    at the start: the model starts as AFT-simple. In the first step only γ and β have a gradient,
    and w gets one as soon as γ ≠ 0. Without `reparameterize` it is w. w starts as N(0, init_std²);
    reparameterised, init_std only sets how fast w turns, and may not be 0.

    With a temperature `tau` each head keeps one position: the bias becomes ``p ⊙ w``. In evaluation
    p is 1 at the largest bias and 0 elsewhere, so that ``exp(w) − 1``, what the kernel adds to
    AFT-simple, is left at one position only; in training p is the Gumbel-softmax sample
    ``softmax((w + noise) / τ)``, a new one in every forward pass.

    Raises ValueError for an even kernel, and for a `tau` that is not positive and finite.
    """

    def __init__(
        self,
        num_heads: int,
        kernel_size: Sequence[int],
        reparameterize: bool = True,
        tau: float | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if any(size % 2 == 0 for size in kernel_size):
            refuse('kernel_size', 'odd', kernel_size)
        check_flag('reparameterize', reparameterize)
        if reparameterize:
            check_number('init_std', init_std, above=0)
        else:
            check_number('init_std', init_std, 0)
        if tau is not None:
            check_number('tau', tau, above=0)
        self.tau = tau
        self.weight = nn.Parameter(torch.empty(num_heads, *kernel_size))
        nn.init.normal_(self.weight, std=init_std)
        self.register_parameter('gamma', None)
        self.register_parameter('beta', None)
        if reparameterize:
            self.gamma = nn.Parameter(torch.zeros(num_heads))
            self.beta = nn.Parameter(torch.zeros(num_heads))
        self._kept: _Kept | None = None

    def train(self, mode: bool = True) -> 'ConvPositionBias':
        """As `nn.Module.train`; the kernel of :meth:`kept` is made anew."""
        self._kept = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_kept': None}

    def kept(self) -> Tensor:
        """w [h, *kernel] as evaluation uses it, kept between calls in evaluation without gradient.

        It is made anew after a call of `train` or `eval`, and where a parameter is another tensor
        or was written to. What torch does not count is not seen: a write through `parameter.data`
        needs a call of `eval` before the next forward pass, as mmengine's loops do it.
        """
        parameters = [p for p in (self.weight, self.gamma, self.beta) if p is not None]
        if not self._may_keep(parameters):
            return self()
        autocast = torch.is_autocast_enabled(self.weight.device.type)
        if self._kept is None or not self._kept.holds(parameters, autocast):
            if self.weight.is_cuda and torch.cuda.is_current_stream_capturing():
                return self()  # nothing is computed before the graph is replayed
            with torch.inference_mode(False), torch.no_grad():
                kernel = ops.mark_constant(self().clone())
                self._kept = _Kept(
                    kernel,
                    [p.detach() for p in parameters],
                    [p._version for p in parameters],
                    autocast,
                )
        return self._kept.kernel

    def _may_keep(self, parameters: list[Tensor]) -> bool:
        if self.training or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return False
        # Not of fake tensors, nor of what torch.func puts in the place of parameters.
        real = all(type(p) is nn.Parameter and not p.is_inference() for p in parameters)
        return real and not self.weight.is_meta and not torch.jit.is_tracing()

    def forward(self, sample: bool = False) -> Tensor:
        """w [h, *kernel] as the op takes it; `sample` draws p instead of choosing the largest."""
        bias = self.reparameterized()
        if self.tau is not None:
            if sample:
                chosen = F.gumbel_softmax(bias, tau=self.tau)
            else:
                chosen = F.one_hot(bias.argmax(1), bias.shape[1])
            bias = bias * chosen
        return bias.view_as(self.weight)

    def reparameterized(self) -> Tensor:
        """w [h, prod(kernel)] before a position is chosen."""
        weight = self.weight.flatten(1)
        if self.gamma is None:
            return weight
        normalized = F.layer_norm(weight, weight.shape[1:], eps=1e-12)
        return self.gamma[:, None] * normalized + self.beta[:, None]

    def entropy(self) -> Tensor:
        """``Σ_i entropy(softmax(w^i))`` over the heads i, in nats, a scalar (eq. 9)."""
        log_p = self.reparameterized().log_softmax(1)
        return -(log_p.exp() * log_p).sum()
