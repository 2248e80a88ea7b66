"""The learned position biases w of AFT; ops compute ``W = exp(w)``.

Autocast is disabled here: the rounding error of w is the relative error of W.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import check_choice, check_flag, check_int, check_number
from aft_mm.ops.geometry import near_radius, neighbours, split
from aft_mm.ops.tracing import compiling_not_exporting, no_autocast, only_computes
from aft_mm.ops.values import Values

from .grid import Grid, GridParameters, check_grid, check_kernel
from .resetting import Resettable

# Choices of `longer` that keep a learned table, and those that replace it by a function.
TABLES = ('nearest', 'interpolate')
FUNCTIONS = ('linear', 'log')


def learned_grid(
    grid: Grid, longer: str | None, trained_length: int | None, choices: Sequence[str]
) -> Grid:
    if longer is not None:
        check_choice('longer', longer, choices)
        if len(grid) > 1:
            raise ValueError(
                f'longer must be None on a grid of {len(grid)} dimensions, got {longer!r}'
            )
    if trained_length is None:
        return grid
    check_int('trained_length', trained_length, 1)
    if longer not in TABLES or trained_length > grid[0]:
        raise ValueError(
            "trained_length must be at most T of the grid, with longer='nearest' or 'interpolate', "
            f'got {trained_length} with grid {grid} and longer={longer!r}'
        )
    return (trained_length,)


def nearest_pairs(bias: Tensor, targets: int, sources: int) -> Tensor:
    """Return w [T, S] from the learned w [n, n]: that of the nearest pair at the same distance.

    Of distances that were not learned it is w of the largest distance.
    """
    target, source = _nearest(_range(bias, targets)[:, None], _range(bias, sources), len(bias))
    return bias[target, source]


def nearest_band(band: Tensor, reach: int, length: int) -> Tensor:
    """Return :func:`nearest_pairs` in a window: rows [T, K] from the learned rows [n, K].

    Column ``reach + (t' − t)`` of row t is w[t, t'].
    """
    target = _range(band, length)[:, None]
    column = _range(band, band.shape[1])
    target, source = _nearest(target, target + column - reach, len(band))
    return band[target, reach + source - target]


def _range(like: Tensor, end: int) -> Tensor:
    return torch.arange(end, device=like.device)


def _nearest(target: Tensor, source: Tensor, learned: int) -> tuple[Tensor, Tensor]:
    back = (torch.maximum(target, source) - (learned - 1)).clamp_min(0)
    return (target - back).clamp_min(0), (source - back).clamp_min(0)


def factor_band(pos_u: Tensor, pos_v: Tensor, reach: int, causal: bool) -> Tensor:
    """Return the rows [n, K] of :func:`nearest_band` of ``w = u vᵀ``, in O(n·K) memory."""
    block, columns = reach + 1, reach + 1 if causal else 2 * reach + 1
    with no_autocast(pos_u):
        around = neighbours(pos_v, block, 1, 0 if causal else 1)
        tiles = torch.bmm(split(pos_u, block), around.mT)
    # Row i of a block starts at its token i − reach, a block after the first column of the tile.
    index = _range(pos_u, block)[:, None] + 1 + _range(pos_u, columns)
    return tiles.gather(2, index.expand(len(tiles), -1, -1)).flatten(0, 1)[: len(pos_u)]


def decreasing_slopes(count: int) -> Tensor:
    """Return the slopes ``2^(−8 i / n)`` for i = 1 … n (arXiv 2108.12409), from steep to flat."""
    return torch.exp2(-8 * torch.arange(1, count + 1) / count)


class DistancePositionBias(Resettable):
    """Bias that falls with the distance, ``w = −m |t − t'|`` or ``−m ln(1 + |t − t'|)``.

    The slope m > 0 of each head is learned. It starts as in :func:`decreasing_slopes`, with
    kind='log' eight times as steep. Any length is possible.

    Args:
        num_heads: h.
        kind: 'linear' or 'log'.
    """

    def __init__(self, num_heads: int, kind: str) -> None:
        super().__init__()
        check_int('num_heads', num_heads, 1)
        check_choice('kind', kind, FUNCTIONS)
        self.kind = kind
        slope = decreasing_slopes(num_heads) * (8 if kind == 'log' else 1)
        self.log_slope = nn.Parameter(slope.log())

    def forward(
        self, grid: Grid, source_grid: Grid | None = None, by_offset: bool = False
    ) -> Tensor:
        """Return w [h, T, S] for targets on `grid` and sources on `source_grid`.

        With `by_offset` it is [h, 2T − 1], ``t' − t = 0`` in the middle.
        """
        length = grid[0]
        if by_offset:
            return self._at(_range(self.log_slope, 2 * length - 1) - (length - 1))
        target = _range(self.log_slope, length)[:, None]
        return self._at(target - _range(self.log_slope, (source_grid or grid)[0]))

    def _at(self, offset: Tensor) -> Tensor:
        distance = offset.abs().to(self.log_slope.dtype)
        if self.kind == 'log':
            distance = distance.log1p()
        return -self.log_slope.exp().view(-1, *[1] * offset.dim()) * distance


# The papers' N(0, 1e-2), read as a variance for u and v, and as a standard deviation for a free w
# (docs/configs.md).
FACTOR_STD = 0.1
FREE_STD = 0.01
# Of ConvPositionBias.
PARAMETERS = {'weight', 'gamma', 'beta'}


class FactorizedPositionBias(GridParameters):
    """Factorised bias ``w = u vᵀ`` with u, v [T, d'] (arXiv 2105.14103, eq. 7).

    Args:
        grid, num_prefix_tokens, stretched: See :class:`GridParameters`.
        rank: d'.
        init_std: Standard deviation of u and v at initialisation, not 0, as gradients would be 0.
    """

    def __init__(
        self,
        grid: Sequence[int],
        rank: int,
        num_prefix_tokens: int = 0,
        init_std: float = FACTOR_STD,
        stretched: int | None = None,
    ) -> None:
        super().__init__(grid, num_prefix_tokens, stretched)
        check_number('init_std', init_std, above=0)
        check_int('rank', rank, 1)
        self.pos_u = nn.Parameter(torch.empty(self.num_tokens, rank))
        self.pos_v = nn.Parameter(torch.empty(self.num_tokens, rank))
        nn.init.normal_(self.pos_u, std=init_std)
        nn.init.normal_(self.pos_v, std=init_std)

    def forward(
        self,
        grid: Grid | None = None,
        source_grid: Grid | None = None,
        as_operands: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return w [T, S] for targets on `grid` and sources on `source_grid` (default: `grid`).

        With `as_operands` it is u and v [T, d'] for the tokens of `grid`, as the op takes them.
        """
        if as_operands:
            return self.on_grid(self.pos_u, grid), self.on_grid(self.pos_v, grid)
        with no_autocast(self.pos_u):
            pos_u = self.on_grid(self.pos_u, grid)
            pos_v = self.on_grid(self.pos_v, grid if source_grid is None else source_grid)
            return pos_u @ pos_v.T


class FreePositionBias(GridParameters):
    """Free matrix w [T, T] (arXiv 2105.14103, eq. 2; the non-factorised ablation).

    Args:
        grid, num_prefix_tokens, stretched: See :class:`GridParameters`; both axes are interpolated.
        init_std: w is initialised from N(0, init_std²), 0 allowed.
    """

    def __init__(
        self,
        grid: Sequence[int],
        num_prefix_tokens: int = 0,
        init_std: float = FREE_STD,
        stretched: int | None = None,
    ) -> None:
        super().__init__(grid, num_prefix_tokens, stretched)
        check_number('init_std', init_std, 0)
        self.weight = nn.Parameter(torch.empty(self.num_tokens, self.num_tokens))
        nn.init.normal_(self.weight, std=init_std)

    def resize(self, loaded: Tensor, source: Grid) -> Tensor:
        return super().resize(super().resize(loaded, source).T, source).T

    def forward(self, grid: Grid | None = None, source_grid: Grid | None = None) -> Tensor:
        """Return w [T, S] for targets on `grid` and sources on `source_grid` (default: `grid`)."""
        rows = self.on_grid(self.weight, grid)
        return self.on_grid(rows.T, grid if source_grid is None else source_grid).T


class MemoryPositionBias(GridParameters):
    """Free matrix w [T, S] over a memory that covers the same area on another grid.

    Initialised to ``−|p_t − p_s|² / (2 · 0.5²)``, p the cell centres in units of source cells.

    Args:
        grid: Sizes of the grid of the T tokens.
        source_grid: Sizes of the grid of the S tokens of the memory, of as many dimensions.
        num_prefix_tokens: Must be 0.
    """

    def __init__(
        self, grid: Sequence[int], source_grid: Sequence[int], num_prefix_tokens: int = 0
    ) -> None:
        super().__init__(grid)
        source_grid = check_grid(source_grid, 'source_grid')
        if len(source_grid) != len(self.grid) or num_prefix_tokens:
            raise ValueError(
                f'source_grid must have as many dimensions as grid {self.grid}, and no prefix '
                f'tokens, got {source_grid} and {num_prefix_tokens} prefix tokens'
            )
        places = (_centres(self.grid, source_grid), _centres(source_grid))
        self.weight = nn.Parameter(-torch.cdist(*places).square() / (2 * 0.5**2))

    def forward(self) -> Tensor:
        return self.weight


def _centres(grid: Grid, unit: Grid | None = None) -> Tensor:
    """Return the cell centres [T, dims] of `grid`, in cells of `unit`."""
    axes = [
        (torch.arange(size) + 0.5) * cells / size
        for size, cells in zip(grid, unit or grid, strict=True)
    ]
    return torch.cartesian_prod(*axes).view(-1, len(grid))


class FreeLocalPositionBias(GridParameters):
    """Free w per token and offset in a 1-d window (arXiv 2105.14103, non-factorised ablation).

    The parameter is [T, s] for a causal window s, else [T, 2s − 1]; column ``s − 1 + (t' − t)`` is
    w[t, t'].

    Args:
        grid: (T,).
        window: s, 1 or larger.
        causal: Whether the window only covers earlier tokens.
        init_std: w is initialised from N(0, init_std²), 0 allowed.
        stretched: See :class:`GridParameters`.
    """

    def __init__(
        self,
        grid: Sequence[int],
        window: int | Sequence[int],
        causal: bool,
        init_std: float = FREE_STD,
        stretched: int | None = None,
    ) -> None:
        super().__init__(grid, stretched=stretched)
        check_number('init_std', init_std, 0)
        if len(self.grid) != 1:
            raise ValueError(f'grid must have 1 dimension for a free local bias, got {self.grid}')
        self.reach = near_radius(window, self.grid)
        if self.reach < 0:
            raise ValueError(f'window must be 1 or larger for a free local bias, got {window}')
        offsets = self.reach + 1 if causal else 2 * self.reach + 1
        self.weight = nn.Parameter(torch.empty(self.num_tokens, offsets))
        nn.init.normal_(self.weight, std=init_std)

    def forward(
        self, grid: Grid | None = None, as_operands: bool = False
    ) -> Tensor | tuple[Tensor, None]:
        """Return w [T, T], 0 outside the window.

        With `as_operands` it is the rows of w for `grid`, and None for v, as the op takes them.
        """
        if as_operands:
            return self.on_grid(self.weight, grid), None
        token = torch.arange(self.num_tokens, device=self.weight.device)
        column = self.reach + token - token[:, None]
        last = self.weight.shape[1] - 1
        dense = self.weight.gather(1, column.clamp(0, last))
        return dense.masked_fill((column < 0) | (column > last), 0)


class _KeptPlan(NamedTuple):
    plan: ops.ConvPlan
    tau: float | None
    autocast: bool
    parameters: Values | None

    def fits(self, bias: 'ConvPositionBias') -> bool:
        if self.parameters is None or bias.training or bias.tau != self.tau or _is_hooked(bias):
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled('cpu') != self.autocast:
            return False
        return self.parameters.equal([x for x in bias._parameters.values() if x is not None])

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a parametrized module is copied without ``__getstate__``."""


def _is_hooked(bias: 'ConvPositionBias') -> bool:
    if type(bias) is not ConvPositionBias or bias._forward_hooks or bias._forward_pre_hooks:
        return True
    return bool(torch.nn.modules.module._has_any_global_hook())


@torch.no_grad()
def _update_form(bias: 'ConvPositionBias', *args: Any) -> None:
    bias._form = None
    if bias._may_plan() and not _is_capturing(bias.weight):
        bias._form = ops.ConvPlan(bias()).fastest_form()


def _is_capturing(x: Tensor) -> bool:
    # A captured tensor has no values yet.
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class ConvPositionBias(Resettable):
    """Kernel of biases per head, w [h, *kernel] (arXiv 2105.14103, eq. 6, 8 and 10).

    With `reparameterize` the bias is ``γ (w − mean(w)) / std(w) + β`` with γ and β per head, which
    start at 0, as AFT-simple.

    With a temperature `tau` each head uses one position: the bias is ``p ⊙ w``. In evaluation p is
    1 at the largest bias, else 0; in training it is a Gumbel-softmax sample, ``softmax((w + noise)
    / τ)``.

    Args:
        num_heads: h.
        kernel_size: Odd sizes, one per dimension.
        tau: τ, positive, or None for the whole kernel.
        init_std: Standard deviation of w at initialisation, with `reparameterize` not 0.
        init_peak: Initial bias of the i-th nearest position in head i [nats]; others start near 0.
        causal: Choose the positions of `init_peak` among the past ones.
        num_peaks: Number of heads, the first ones, with `init_peak`; None is all.
    """

    _form: str | None = None
    _kept: _KeptPlan | None = None

    def __init__(
        self,
        num_heads: int,
        kernel_size: Sequence[int],
        reparameterize: bool = True,
        tau: float | None = None,
        init_std: float = 0.02,
        init_peak: float = 0.0,
        causal: bool = False,
        num_peaks: int | None = None,
    ) -> None:
        super().__init__()
        kernel_size = check_kernel(kernel_size, None)
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
        check_number('init_peak', init_peak, 0)
        if init_peak:
            self._set_peaks(init_peak, causal, num_heads if num_peaks is None else num_peaks)
        self.register_load_state_dict_post_hook(_update_form)

    @torch.no_grad()
    def _set_peaks(self, peak: float, causal: bool, num_peaks: int) -> None:
        kernel = self.weight.shape[1:]
        # A model on the meta device has no values to sort.
        ranges = [torch.arange(k, device='cpu') - k // 2 for k in kernel]
        offsets = torch.cartesian_prod(*ranges)
        number = len(offsets)
        nearest = (offsets.view(number, -1) ** 2).sum(1).sort(stable=True).indices
        if causal:  # the first half of the kernel is the past
            nearest = nearest[nearest <= number // 2]
        heads = torch.arange(num_peaks, device='cpu')
        chosen = (heads, nearest[heads % len(nearest)])
        if self.gamma is None or self.beta is None:
            self.weight.flatten(1)[chosen] += peak
        else:
            # Normalised, the peak is sqrt(n - 1).
            self.weight.flatten(1)[chosen] += number * (self.weight.std() if number > 1 else 1)
            self.gamma[:num_peaks] = peak * (number - 1) ** 0.5 / number
            self.beta[:num_peaks] = peak / number

    def train(self, mode: bool = True) -> 'ConvPositionBias':
        """Set the training mode, and drop the plan of :meth:`plan`."""
        self._kept = None
        super().train(mode)
        _update_form(self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_kept': None, '_form': None}

    def plan(self) -> ops.ConvPlan:
        """Return w [h, *kernel] as evaluation uses it, with what the op computes from it.

        Without a gradient a CPU keeps the plan while `tau` and the values of the parameters are the
        same; other devices, which would wait for a comparison, only for the capture of a CUDA graph.
        A graph of torch.compile computes the form that ``eval`` or ``load_state_dict`` read, and
        checks it. With hooks or a parametrization nothing is kept.
        """
        # A kept plan is read once, as another thread may drop it, and never in a graph, which would
        # be compiled again for another one.
        kept = None if torch.compiler.is_compiling() else self._kept
        if kept is not None and kept.fits(self):
            return kept.plan
        if not self._may_plan():
            return ops.ConvPlan(self(), form=self._known_form())
        if _is_capturing(self.weight):
            return ops.ConvPlan(self()) if kept is None else kept.plan
        given = [x for x in self._parameters.values() if x is not None]
        autocast = torch.is_autocast_enabled(self.weight.device.type)
        # First, so that the next call sees a write while w is computed.
        parameters = Values(given) if self.weight.is_cpu else None
        with torch.inference_mode(False), torch.no_grad():
            kept = self._kept = _KeptPlan(ops.plan_conv(self()), self.tau, autocast, parameters)
        return kept.plan

    def _known_form(self) -> str | None:
        if self.training or torch.is_grad_enabled() or not compiling_not_exporting():
            return None
        real = all(p is None or type(p) is nn.Parameter for p in self._parameters.values())
        return self._form if real else None

    def _may_plan(self) -> bool:
        """Return whether w depends on `tau` and on parameters alone, which are real numbers."""
        if not only_computes() or self.training or torch.is_grad_enabled():
            return False
        parameters = self._parameters
        if _is_hooked(self) or parameters.keys() != PARAMETERS:
            return False
        for x in parameters.values():
            # Fake tensors and those of torch.func have no values.
            if x is not None and (type(x) is not nn.Parameter or x.is_meta):
                return False
        return True

    def forward(self, sample: bool = False) -> Tensor:
        """Return w [h, *kernel] for the op (eq. 8); with `tau` and `sample`, p is a Gumbel sample."""
        bias = self.weight.flatten(1)
        if self.gamma is not None and self.beta is not None:
            bias = F.layer_norm(bias, bias.shape[1:], eps=1e-12)
            bias = self.gamma[:, None] * bias + self.beta[:, None]
        if self.tau is not None:
            if sample:
                chosen = F.gumbel_softmax(bias, tau=self.tau)
            else:
                chosen = F.one_hot(bias.argmax(1), bias.shape[1])
            bias = bias * chosen
        return bias.view_as(self.weight)

    def entropy(self) -> Tensor:
        """Return ``Σ_i entropy(softmax(w^i))`` over the heads i in nats, a scalar (eq. 9)."""
        weight: Tensor = self()
        log_p = weight.flatten(1).log_softmax(1)
        return -(log_p.exp() * log_p).sum()
