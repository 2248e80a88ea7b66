"""Automatic mixed precision on CPU and CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.device import get_device
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from torch import nn

from aft_mm.checks import check_choice
from aft_mm.registry import OPTIM_WRAPPERS


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(AmpOptimWrapper):
    """mmengine's ``AmpOptimWrapper`` with ``torch.autocast``: works on a CPU and under compilation.

    bfloat16 has the range of float32 and needs no loss scaling; with float16 the loss is scaled
    and the scale is part of ``state_dict()``.

    Args:
        dtype: ``'bfloat16'`` (default) or, on CUDA, ``'float16'``.
        loss_scale: ``'dynamic'``, a float (the constant scale) or a dict of arguments for
            ``torch.amp.GradScaler``; only for float16.
        **kwargs: Those of ``mmengine.optim.OptimWrapper``.

    Raises:
        ValueError: ``dtype`` is not available on this device.
    """

    def __init__(
        self, dtype: str = 'bfloat16', loss_scale: str | float | dict = 'dynamic', **kwargs
    ) -> None:
        # AmpOptimWrapper's own constructor refuses a CPU and builds a deprecated scaler.
        OptimWrapper.__init__(self, **kwargs)
        device = torch.device(get_device()).type
        allowed = ('bfloat16', 'float16') if device == 'cuda' else ('bfloat16',)
        check_choice(f'dtype of AutocastOptimWrapper on {device}', dtype, allowed)
        scaler_args = loss_scale if isinstance(loss_scale, dict) else {}
        self._scale_update_param = None
        if isinstance(loss_scale, float):
            self._scale_update_param = loss_scale
            scaler_args = dict(init_scale=loss_scale)
        self.loss_scaler = torch.amp.GradScaler(device, enabled=dtype == 'float16', **scaler_args)
        self.device_type = device
        self.cast_dtype = getattr(torch, dtype)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Autocast, and hold back gradient synchronisation while gradients accumulate."""
        with (
            OptimWrapper.optim_context(self, model),
            torch.autocast(self.device_type, self.cast_dtype),
        ):
            yield
