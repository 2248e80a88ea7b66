from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import check_choice, check_flag
from aft_mm.ops.checks import check_num_heads
from aft_mm.ops.dispatch import prefers_channel_major
from aft_mm.ops.gates import Gate, in_kernels
from aft_mm.registry import MODELS

from ..grid import Grid, check_kernel
from ..position_bias import ConvPositionBias
from ..projections import (
    FusedLinear,
    fuse_linear,
    is_plain_linear,
    project_channel_major,
    project_tokens,
)
from .base import AFTMixer

SPARSITIES = ('none', 'entropy', 'gumbel')


@MODELS.register_module()
class AFTConv(AFTMixer):
    """AFT with a bias per head that depends on the offset only (arXiv 2105.14103, eq. 6 and 8).

    Accepts any grid of the kernel's number of dimensions. Keys have h channels, one per head.

    Args:
        num_heads: h, a divisor of D.
        kernel_size: Odd sizes, one or one per dimension; may exceed the grid.
        reparameterize: ``γ (w − mean) / std + β`` (eq. 8), or w itself.
        query: False leaves out query and gate.
        global_connectivity: False sets W = 0 outside the kernel (§5.3).
        sparsity: 'entropy' (:meth:`regularization_loss`) or 'gumbel', one position per head (§8).
        tau: Temperature of sparsity='gumbel'; None is the paper's 0.5.
        init_std: Standard deviation of w at initialisation.
        init_peak: Initial bias of one position per head, see :class:`ConvPositionBias`.
        **kwargs: See :class:`AFTMixer`. Without a grid, `kernel_size` sets the dimensions, and
            there are no steps.
    """

    example = dict(num_heads=4, kernel_size=3)
    kernels_per_head: ClassVar[int] = 1

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        kernel_size: int | Sequence[int],
        reparameterize: bool = True,
        query: bool = True,
        global_connectivity: bool = True,
        sparsity: str = 'none',
        tau: float | None = None,
        init_std: float = 0.02,
        init_peak: float = 0.0,
        gate: Gate | dict[str, Any] = 'sigmoid',
        qkv_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        check_flag('query', query)
        if not query and gate != 'sigmoid':
            raise ValueError(f'gate must be left at its default with query=False, got {gate!r}')
        super().__init__(embed_dims, gate=gate if query else 'none', qkv_bias=qkv_bias, **kwargs)
        check_num_heads(num_heads, embed_dims)
        check_choice('sparsity', sparsity, SPARSITIES)
        if sparsity == 'gumbel':
            tau = 0.5 if tau is None else tau
        elif tau is not None:
            raise ValueError(
                f'tau must be left at its default with sparsity={sparsity!r}, got {tau}'
            )
        check_flag('global_connectivity', global_connectivity)
        kernel = check_kernel(kernel_size, self.grid)
        self.num_heads = num_heads
        self.global_connectivity = global_connectivity
        self.sparsity = sparsity
        self.key = nn.Linear(embed_dims, num_heads, bias=qkv_bias)
        self.pos_bias = ConvPositionBias(
            self.kernels_per_head * num_heads,
            kernel,
            reparameterize,
            tau,
            init_std,
            init_peak,
            self.causal,
            num_heads,
        )

    def position_bias(self) -> Tensor | None:
        weight: Tensor = self.pos_bias()
        return weight

    def regularization_loss(self) -> Tensor | None:
        """Return ``Σ_heads entropy(softmax(w))`` in nats for sparsity='entropy', else None (eq. 9)."""
        return self.pos_bias.entropy() if self.sparsity == 'entropy' else None

    def _apply_projection(self, layer: nn.Module | FusedLinear, x: Tensor) -> Tensor:
        # Kernels read the channel-major tokens that one product can write, and would copy others.
        if prefers_channel_major(x, is_product=True):
            if isinstance(layer, FusedLinear) or is_plain_linear(layer):
                return project_channel_major(layer, x)
        return super()._apply_projection(layer, x)

    def _project_output(self, mixed: Tensor) -> Tensor:
        if prefers_channel_major(mixed, is_product=False) and is_plain_linear(self.proj):
            return project_tokens(self.proj, mixed)
        return super()._project_output(mixed)

    def _project_and_mix(
        self, x: Tensor, grid: Grid, key_mask: Tensor | None, **pairs: Tensor | None
    ) -> Tensor:
        fused = None
        if in_kernels(self.gate) and prefers_channel_major(x, is_product=True):
            fused = fuse_linear(self._projections)
        if fused is None:
            return super()._project_and_mix(x, grid, key_mask, **pairs)
        qkv = project_channel_major(fused, x)
        return ops.aft_conv_joined(qkv, self._weight(), **self._conv_options(grid, key_mask))

    def _mix(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        options = self._conv_options(grid, key_mask)
        return ops.aft_conv(query, key, value, self._weight(), **options)

    def _weight(self) -> Tensor | ops.ConvPlan:
        return self.pos_bias(sample=True) if self.training else self.pos_bias.plan()

    def _conv_options(self, grid: Grid, key_mask: Tensor | None) -> dict[str, Any]:
        options = dict(grid=grid, causal=self.causal, key_mask=key_mask, gate=self.gate)
        return dict(options, global_connectivity=self.global_connectivity)

    def _init_state(self, batch_size: int) -> Any:
        return ops.aft_conv_init_state(
            batch_size,
            self.kernels_per_head * self.embed_dims,
            num_heads=self.kernels_per_head * self.num_heads,
            kernel_size=self.pos_bias.weight.shape[1:],
            grid=self._required_grid(' to take steps'),
            **self._state_options,
        )

    def _mix_step(
        self, query: Tensor | None, key: Tensor, value: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        return ops.aft_conv_step(
            state,
            query,
            key,
            value,
            self.pos_bias.plan().weight,
            grid=self._required_grid(' to take steps'),
            global_connectivity=self.global_connectivity,
            gate=self.gate if query is not None else 'none',
        )
