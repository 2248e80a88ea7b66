from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import refuse
from aft_mm.ops.geometry import kernel_index, kernel_reach
from aft_mm.ops.state import StepState, check_state, new_state, push, slot_tokens, use_up
from aft_mm.registry import MODELS

from ..grid import Grid, check_kernel
from .base import AFTMixer

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class KernelMixer(AFTMixer):
    """Base class of the controls: AFT-conv with weights that do not depend on the tokens.

    ``y_t = proj(g(q_t) ⊙ Σ_t' K[t' − t] ⊙ v_t')``, 0 outside the grid; causal, up to the centre of
    K in raster order.

    Args:
        kernel_size: Odd sizes, an int for all dimensions or one per dimension.
        **kwargs: See :class:`AFTMixer`. Without a grid, `kernel_size` sets the dimensions.
    """

    normalized = False
    #: Whether the sum is divided by the number of visible tokens.
    average: ClassVar[bool] = False

    def __init__(self, embed_dims: int, kernel_size: int | Sequence[int], **kwargs: Any) -> None:
        super().__init__(embed_dims, **kwargs)
        self.kernel_size = check_kernel(kernel_size, self.grid)
        self.key = nn.Identity()

    def kernel(self) -> Tensor:
        """Return K ``[D, *kernel]`` or, shared by all channels, ``[1, *kernel]``; by default 1."""
        return torch.ones(1, *self.kernel_size, device=self._device)

    def _visible_kernel(self) -> Tensor:
        kernel = self.kernel()
        if not self.causal:
            return kernel
        entries = prod(self.kernel_size)  # in raster order; the centre is the last of a past
        past = torch.arange(entries, device=kernel.device) <= entries // 2
        return kernel * past.view(self.kernel_size)

    def _convolve(self, x: Tensor, kernel: Tensor, grid: Grid) -> Tensor:
        channels = x.shape[-1]
        kernel = kernel.expand(channels, *self.kernel_size).unsqueeze(1).to(x.dtype)
        if len(grid) == 1:  # of sequences, torch's convolution is several times slower
            grid, kernel = (1, *grid), kernel.unsqueeze(2)
        padding = tuple(size // 2 for size in kernel.shape[2:])
        maps = x.transpose(1, 2).unflatten(2, grid)
        return _CONV[len(grid)](maps, kernel, padding=padding, groups=channels).flatten(2).mT

    def _mix(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        if len(grid) != len(self.kernel_size):
            refuse('grid', f'{len(self.kernel_size)} sizes for kernel {self.kernel_size}', grid)
        visible = torch.ones_like(value[..., :1])
        if key_mask is not None:
            visible = key_mask.unsqueeze(-1).to(value.dtype)
            value = value.masked_fill(~key_mask.unsqueeze(-1), 0)
        kernel = self._visible_kernel()
        mixed = self._convolve(value, kernel, grid)
        if self.average:
            mixed = mixed / self._convolve(visible, kernel, grid).clamp_min(1)
        return ops.apply_gate(query, mixed, self.gate)

    def _step_grid(self) -> Grid:
        # A sequence may continue beyond the grid (T,).
        sequence = len(self.kernel_size) == 1
        return (2**62,) if sequence else self._required_grid(' to take steps')

    def _init_state(self, batch_size: int) -> StepState:
        grid = self._step_grid()
        size = kernel_reach(self.kernel_size, grid) + 1
        return new_state(batch_size, self.embed_dims, size, heads=1, **self._state_options)

    def _prefill(self, state: StepState, key: Tensor, value: Tensor, lengths: Tensor) -> StepState:
        return ops.prefill(state, value[..., :1], value, lengths)

    def _mix_step(
        self, query: Tensor | None, key: Tensor, value: Tensor, state: StepState
    ) -> tuple[Tensor, StepState]:
        grid = self._step_grid()
        check_state(state, None if len(grid) == 1 else prod(grid))
        target = state.position[:, None]
        tokens = slot_tokens(state.position, state.keys.shape[1])
        index = kernel_index(target, tokens, self.kernel_size, grid)
        used, state = state, push(state, value[:, :1], value, update_sums=False)
        use_up(used.position)
        visible = ((index >= 0) & (tokens >= 0)).unsqueeze(-1)
        # Both round the weights alike.
        kernel = self._visible_kernel().flatten(1).mT.to(value.dtype)
        weights = kernel[index.clamp_min(0)] * visible
        mixed = (weights * state.values).sum(1)
        if self.average:
            mixed = mixed / weights.sum(1).clamp_min(1)
        return ops.apply_gate(query, mixed.to(value.dtype), self.gate), state


@MODELS.register_module()
class DepthwiseConv(KernelMixer):
    """A gated depthwise convolution, a control for AFT-conv with the same kernel, learned per
    channel.
    """

    example = dict(kernel_size=3)

    def __init__(self, embed_dims: int, kernel_size: int | Sequence[int], **kwargs: Any) -> None:
        super().__init__(embed_dims, kernel_size, **kwargs)
        bound = prod(self.kernel_size) ** -0.5
        self.weight = nn.Parameter(torch.empty(embed_dims, *self.kernel_size))
        nn.init.uniform_(self.weight, -bound, bound)

    def kernel(self) -> Tensor:
        return self.weight
