"""The learned position biases w of AFT; ops compute ``W = exp(w)``.

Autocast is disabled here: the rounding error of w is the relative error of W.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import check_flag, check_int, check_number
from aft_mm.ops.eager.conv import KnownForm, read_form
from aft_mm.ops.geometry import near_radius
from aft_mm.ops.online_softmax import no_autocast
from aft_mm.ops.path_choice import Snapshot
from aft_mm.ops.tracing import compiling_not_exporting

from .grid import Grid, GridParameters, check_grid, check_kernel

__all__ = [
    'ConvPositionBias',
    'FactorizedPositionBias',
    'FreeLocalPositionBias',
    'FreePositionBias',
    'MemoryPositionBias',
]


# The papers' N(0, 1e-2), read as a variance for u and v, and as a standard deviation for a free w
# (docs/configs.md).
FACTOR_STD = 0.1
FREE_STD = 0.01


class FactorizedPositionBias(GridParameters):
    """Factorised bias ``w = u vᵀ`` with u, v [T, d'] (arXiv 2105.14103, eq. 7).

    Args:
        grid, num_prefix_tokens: See :class:`GridParameters`.
        rank: d'.
        init_std: Standard deviation of u and v at initialisation, not 0, as gradients would be 0.
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
        """Return u and v [T, d'] for the tokens of `grid`."""
        return self.on_grid(self.pos_u, grid), self.on_grid(self.pos_v, grid)

    def forward(self, grid: Grid | None = None, source_grid: Grid | None = None) -> Tensor:
        """Return w [T, S] for targets on `grid` and sources on `source_grid` (default: `grid`)."""
        with no_autocast(self.pos_u):
            pos_u = self.on_grid(self.pos_u, grid)
            pos_v = self.on_grid(self.pos_v, grid if source_grid is None else source_grid)
            return pos_u @ pos_v.T


class FreePositionBias(GridParameters):
    """Free matrix w [T, T] (arXiv 2105.14103, eq. 2; the non-factorised ablation).

    Args:
        grid, num_prefix_tokens: See :class:`GridParameters`; both axes are interpolated.
        init_std: w is initialised from N(0, init_std²), 0 allowed.
    """

    def __init__(
        self, grid: Sequence[int], num_prefix_tokens: int = 0, init_std: float = FREE_STD
    ) -> None:
        super().__init__(grid, num_prefix_tokens)
        check_number('init_std', init_std, 0)
        self.weight = nn.Parameter(torch.empty(self.num_tokens, self.num_tokens))
        nn.init.normal_(self.weight, std=init_std)

    def resize(self, loaded: Tensor, source: Grid) -> Tensor:
        """Return a matrix of the grid `source` for this grid."""
        return super().resize(super().resize(loaded, source).T, source).T

    def forward(self, grid: Grid | None = None, source_grid: Grid | None = None) -> Tensor:
        """Return w [T, S] for targets on `grid` and sources on `source_grid` (default: `grid`)."""
        rows = self.on_grid(self.weight, grid)
        return self.on_grid(rows.T, grid if source_grid is None else source_grid).T


class MemoryPositionBias(GridParameters):
    """Free matrix w [T, S] over a memory that covers the same area on another grid.

    Initialised to ``−|p_t − p_s|² / (2 · 0.5²)``, p the cell centres in units of source cells. Rows
    are interpolated for another grid.

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
    w[t, t']. Rows are interpolated for another length.

    Args:
        grid: (T,).
        window: s, 1 or larger.
        causal: Whether the window only covers earlier tokens.
        init_std: w is initialised from N(0, init_std²), 0 allowed.
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
        """Return the rows of w for `grid`, and None for v, as the op expects."""
        return self.on_grid(self.weight, grid), None

    def forward(self) -> Tensor:
        """Return w [T, T], 0 outside the window."""
        token = torch.arange(self.num_tokens, device=self.weight.device)
        column = self.reach + token - token[:, None]
        last = self.weight.shape[1] - 1
        dense = self.weight.gather(1, column.clamp(0, last))
        return dense.masked_fill((column < 0) | (column > last), 0)


class _CachedKernel(NamedTuple):
    kernel: Tensor
    parameters: Snapshot
    autocast: bool
    call: Callable[..., Tensor | None] | None = None

    def is_valid(self, parameters: Sequence[Tensor], autocast: bool) -> bool:
        return self.parameters.is_valid(parameters) and autocast == self.autocast


@torch.no_grad()
def _update_form(bias: 'ConvPositionBias', *args: Any) -> None:
    """Read which form of AFT-conv is exact; a hook of loading."""
    parameters = bias._parameters_of_kernel()
    bias._form = bias._parameters_of_form = None
    if bias._may_cache(parameters) and not _is_capturing(bias.weight):
        bias._form, bias._parameters_of_form = read_form(bias(), parameters)


def _is_capturing(x: Tensor) -> bool:
    # A captured tensor has no values yet.
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class ConvPositionBias(nn.Module):
    """Kernel of biases per head, w [h, *kernel] (arXiv 2105.14103, eq. 6, 8 and 10).

    With `reparameterize` the bias is ``γ (w − mean(w)) / std(w) + β`` with one γ and β per head.
    Both start at 0, so the model starts as AFT-simple, unless `init_peak` is given.

    With a temperature `tau` each head uses one position: the bias is ``p ⊙ w``. In evaluation p is
    1 at the largest bias, else 0; in training it is a Gumbel-softmax sample, ``softmax((w + noise)
    / τ)``.

    Args:
        num_heads: h.
        kernel_size: Odd sizes, one per dimension.
        reparameterize: False uses w itself as the bias.
        tau: τ, positive, or None for the whole kernel.
        init_std: Standard deviation of w at initialisation. With `reparameterize` it only scales
            the learning rate of w's direction, and must not be 0.
        init_peak: Initial bias of the i-th nearest position in head i [nats]; others start near 0.
        causal: Choose the positions of `init_peak` among the past ones.
    """

    _form: str | None = None
    _parameters_of_form: Snapshot | None = None

    def __init__(
        self,
        num_heads: int,
        kernel_size: Sequence[int],
        reparameterize: bool = True,
        tau: float | None = None,
        init_std: float = 0.02,
        init_peak: float = 0.0,
        causal: bool = False,
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
            self._set_peaks(init_peak, causal)
        self._cached: _CachedKernel | None = None
        self.register_load_state_dict_post_hook(_update_form)

    @torch.no_grad()
    def _set_peaks(self, peak: float, causal: bool) -> None:
        """Set the bias of one position per head to about `peak`, others to about 0."""
        num_heads, *kernel = self.weight.shape
        # A model on the meta device has no values to sort.
        ranges = [torch.arange(k, device='cpu') - k // 2 for k in kernel]
        offsets = torch.cartesian_prod(*ranges)
        number = len(offsets)
        nearest = (offsets.view(number, -1) ** 2).sum(1).sort(stable=True).indices
        if causal:  # the first half of the kernel is the past
            nearest = nearest[nearest <= number // 2]
        heads = torch.arange(num_heads, device='cpu')
        chosen = (heads, nearest[heads % len(nearest)])
        if self.gamma is None or self.beta is None:
            self.weight.flatten(1)[chosen] += peak
        else:
            # Normalised, the peak is sqrt(n - 1).
            self.weight.flatten(1)[chosen] += number * (self.weight.std() if number > 1 else 1)
            self.gamma.fill_(peak * (number - 1) ** 0.5 / number)
            self.beta.fill_(peak / number)

    def train(self, mode: bool = True) -> 'ConvPositionBias':
        """Set the training mode, and drop the kernel of :meth:`cached`."""
        self._cached = None
        super().train(mode)
        _update_form(self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_cached': None, '_form': None, '_parameters_of_form': None}

    def cached(self) -> Tensor:
        """Return w [h, *kernel] as evaluation uses it, cached between calls without gradient.

        It is computed again after ``train``, ``eval``, and a write to a parameter, except through
        ``parameter.data``: then call ``eval``, as mmengine's loops do.
        """
        parameters = self._parameters_of_kernel()
        if not self._may_cache(parameters):
            return self()
        autocast = torch.is_autocast_enabled(self.weight.device.type)
        cached = self._cached  # another thread may drop it
        if cached is None or not cached.is_valid(parameters, autocast):
            if _is_capturing(self.weight):
                return self()
            with torch.inference_mode(False), torch.no_grad():
                cached = self._cached = _CachedKernel(
                    ops.mark_constant(self().clone()), Snapshot(parameters), autocast
                )
        return cached.kernel

    def keep_call(self, kernel: Tensor, call: Callable[..., Tensor | None]) -> None:
        """Keep a call of the op with this kernel, if it is that of :meth:`cached`."""
        cached = self._cached
        if cached is not None and cached.kernel is kernel:
            self._cached = cached._replace(call=call)

    def repeat_call(self, *args: Any) -> Tensor | None:
        """Return the result of the kept call, None if it is not valid for these arguments."""
        cached = self._cached
        if cached is None or cached.call is None:
            return None
        parameters = self._parameters.values()
        for x in parameters:
            # Fake tensors and those of torch.func have no address.
            if type(x) is not nn.Parameter and x is not None:
                return None
        return cached.call(*args) if cached.parameters.is_valid(parameters) else None

    def known_form(self) -> KnownForm | None:
        """Return the form of AFT-conv for :meth:`cached`, if torch.compile traces an evaluation.

        ``eval`` and ``load_state_dict`` read the form, and the next call compiles again if it
        changed. Other writes are detected as by :meth:`cached`, except by a replayed CUDA graph.
        """
        if self.training or torch.is_grad_enabled() or not compiling_not_exporting():
            return None
        parameters = self._parameters_of_kernel()
        if self._form is None or not all(type(p) is nn.Parameter for p in parameters):
            return None
        return KnownForm(self._form, parameters)

    def _parameters_of_kernel(self) -> list[Tensor]:
        return [p for p in self._parameters.values() if p is not None]

    def _may_cache(self, parameters: Sequence[Tensor]) -> bool:
        if self.training or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return False
        # A parametrized or pruned weight depends on what a snapshot does not see.
        if self._parameters.keys() != {'weight', 'gamma', 'beta'}:
            return False
        # Not for fake tensors, nor for those of torch.func.
        real = all(type(p) is nn.Parameter and not p.is_inference() for p in parameters)
        return real and not self.weight.is_meta and not torch.jit.is_tracing()

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
        log_p = self().flatten(1).log_softmax(1)
        return -(log_p.exp() * log_p).sum()
