"""What AFT-conv computes from w alone: which form is exact for it, and the kernels of the forms."""

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .checks import ENVIRONMENT_VARIABLE
from .export_paths import export_stage
from .gates import Gate
from .geometry import crop_kernel
from .online_softmax import FAST_BIAS_RANGE
from .tracing import only_computes
from .values import guard_tensors

# The difference form loses a factor e^−w of precision: w ≥ −3 keeps 5 of 7 digits.
DIFFERENCE_LOWEST_BIAS = -3.0
Made = TypeVar('Made')


def is_range_exact(weight: Tensor, difference: bool) -> Tensor:
    """Return whether float32 sums with one shift per column are exact to tolerance for any keys.

    Only if every row sees the largest key: not causal, with global connectivity.
    """
    weight = weight.detach()
    # One number: a compiler computes the condition again wherever it is used.
    is_exact = weight.amax().clamp_min(0) - weight.clamp_max(0) <= FAST_BIAS_RANGE
    if difference:
        is_exact = is_exact & (weight >= DIFFERENCE_LOWEST_BIAS)
    return is_exact.all()


def exponents_of_bias(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight.amax().clamp_min(0) - weight.amin().clamp_max(0)


def cancels(weight: Tensor) -> Tensor:
    """Return whether the difference form cancels for w, which then needs the additive one."""
    return (weight < DIFFERENCE_LOWEST_BIAS).any()


class ConvPlan:
    """w of :func:`aft_mm.ops.aft_conv`, in place of which the op takes it, for any grid and dtype.

    Args:
        weight: w ``[h, *kernel]``.
        constant: Whether w never changes, so that what is computed from it is kept.
        form: 'difference', 'additive' or 'exact', for a compiled graph, which cannot choose.
    """

    def __init__(self, weight: Tensor, constant: bool = False, form: str | None = None) -> None:
        self.weight = weight
        self.form = form
        self._call: RepeatedCall | None = None
        self._kept: dict[Hashable, Any] | None = {} if constant else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_call': None}  # guards of torch cannot be copied

    @property
    def is_constant(self) -> bool:
        return self._kept is not None

    def fastest_form(self) -> str:
        """Return the fastest form that is exact for w on any grid, by reading values."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        for form in ('difference', 'additive'):
            if is_range_exact(weight, form == 'difference'):
                return form
        return 'exact'

    def cropped(self, grid: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return w in the dtype of sums, without the entries that the grid does not reach."""
        return crop_kernel(self.weight.to(torch.promote_types(dtype, torch.float32)), grid)

    def once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """Return ``make()``, which depends on w and `name`; of a constant w it is kept."""
        if self._kept is None or not only_computes():
            return make()
        if name not in self._kept:
            with torch.inference_mode(False), torch.no_grad():
                self._kept[name] = make()
        kept: Made = self._kept[name]
        return kept

    def is_exact(self, cropped: Tensor, difference: bool) -> Tensor | bool:
        """Return :func:`is_range_exact` of the cropped w, as a bool where it is known."""
        if self.form is not None and torch.compiler.is_compiling():
            return self.form == 'difference' or (self.form == 'additive' and not difference)
        if self._kept is None or not only_computes():
            return is_range_exact(cropped, difference)
        name = 'exact', difference, cropped.shape
        return self.once(name, lambda: bool(is_range_exact(cropped, difference)))

    def may_repeat(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        may = self.is_constant and not torch.is_grad_enabled()
        return may and value.is_cpu and only_computes()

    def keep_call(
        self,
        run: Callable[..., Tensor | None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grid: Sequence[int],
        gate: str,
    ) -> None:
        """Keep ``run(query, key, value)``, the op with this w, for other values of these tokens."""
        self._call = RepeatedCall(run, (query, key, value), grid, gate)

    def repeat(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Sequence[int], gate: Gate
    ) -> Tensor | None:
        """Return the result of the kept call, None if this is another one."""
        return None if self._call is None else self._call(query, key, value, grid, gate)


class RepeatedCall:
    """A call without a gradient and a mask, for other values of its tokens.

    Two guards of torch compare what the call depends on, :func:`guard_tensors` and that of the
    global state, which sees gradients, autocast and the number of threads.
    """

    def __init__(
        self,
        run: Callable[..., Tensor | None],
        tokens: Sequence[Tensor],
        grid: Sequence[int],
        gate: str,
    ) -> None:
        self._tokens = guard_tensors(tokens)
        self._state: Any = torch._C._dynamo.guards.GlobalStateGuard()
        self._backends = os.environ.get(ENVIRONMENT_VARIABLE)
        self._run, self._grid, self._gate = run, grid, gate

    def __call__(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Sequence[int], gate: Gate
    ) -> Tensor | None:
        if not self._tokens.check(query, key, value) or not self._state.check():
            return None
        if gate != self._gate or grid != self._grid:
            return None
        if forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack():
            return None
        if export_stage() or os.environ.get(ENVIRONMENT_VARIABLE) != self._backends:
            return None
        return self._run(query, key, value)


def plan_conv(weight: Tensor) -> ConvPlan:
    """Return a plan of w ``[h, *kernel]`` as it is now, to pass to :func:`aft_conv` in its place.

    Later writes to `weight` do not change it, and no gradient flows to `weight`.
    """
    with torch.inference_mode(False), torch.no_grad():
        return ConvPlan(weight.detach().clone(), constant=True)
