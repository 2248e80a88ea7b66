import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.optim import (
    AmpOptimWrapper,
    DefaultOptimWrapperConstructor,
    ExponentialLR,
    OptimWrapper,
)
from torch import nn

from aft_mm.checks import check_choice, check_int, check_number
from aft_mm.errors import UserError
from aft_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, PARAM_SCHEDULERS


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(AmpOptimWrapper):
    """mmengine's ``AmpOptimWrapper`` with ``torch.autocast``: works on a CPU and under compilation.

    Args:
        dtype: ``'bfloat16'``, without loss scaling, or, on CUDA, ``'float16'``.
        loss_scale: For float16 only: ``'dynamic'``, a float or arguments of
            ``torch.amp.GradScaler``.
        **kwargs: Those of ``mmengine.optim.OptimWrapper``.
    """

    def __init__(
        self, dtype: str = 'bfloat16', loss_scale: str | float | dict = 'dynamic', **kwargs: Any
    ) -> None:
        # AmpOptimWrapper's constructor refuses a CPU and builds a deprecated scaler.
        OptimWrapper.__init__(self, **kwargs)
        device = torch.device(get_device()).type
        allowed = ('bfloat16', 'float16') if device == 'cuda' else ('bfloat16',)
        check_choice(f'dtype of AutocastOptimWrapper on {device}', dtype, allowed)
        scaler_args = loss_scale if isinstance(loss_scale, dict) else {}
        self._scale_update_param = None
        if not isinstance(loss_scale, dict) and loss_scale != 'dynamic':
            check_number('loss_scale of AutocastOptimWrapper', loss_scale, above=0)
            self._scale_update_param = float(loss_scale)
            scaler_args = dict(init_scale=float(loss_scale))
        self.loss_scaler = torch.amp.GradScaler(device, enabled=dtype == 'float16', **scaler_args)
        self.device_type = device
        self.cast_dtype = getattr(torch, dtype)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with (
            OptimWrapper.optim_context(self, model),
            torch.autocast(self.device_type, self.cast_dtype),
        ):
            yield


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """mmengine's default constructor with layer-wise decay of the learning rate.

    The rate is ``lr · decay_rate^(n − 1 − i)`` at depth i of n, see ``backbone.get_layer_depth``.

    Args:
        optim_wrapper_cfg: Config of the wrapper, with optimizer.lr.
        paramwise_cfg: ``decay_rate`` in (0, 1], and options of the default constructor.

    Raises:
        UserError: The optimizer has no lr, or the backbone no get_layer_depth.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        rate = self.paramwise_cfg.get('decay_rate')
        check_number('paramwise_cfg.decay_rate', rate, above=0, most=1)
        if self.base_lr is None:
            raise UserError('paramwise_cfg.decay_rate needs optimizer.lr, but it is not given')

    def add_params(
        self,
        params: list[dict],
        module: nn.Module,
        prefix: str = '',
        is_dcn_module: int | float | None = None,
    ) -> None:
        super().add_params(params, module, prefix, is_dcn_module)
        if prefix:  # the default implementation calls it for every child
            return
        backbone: Any = getattr(module, 'backbone', None)
        if not hasattr(backbone, 'get_layer_depth'):
            raise UserError(
                'paramwise_cfg.decay_rate needs a model whose backbone has get_layer_depth, such '
                f'as aft_mm.AFTViT, got {type(module).__name__} with a backbone of type '
                f'{type(backbone).__name__}'
            )
        names = {parameter: name for name, parameter in module.named_parameters()}
        for group in params:
            name = names[group['params'][0]]
            depth, num_depths = backbone.get_layer_depth(name, 'backbone.')
            scale = self.paramwise_cfg['decay_rate'] ** (num_depths - 1 - depth)
            group['lr'] = group.get('lr', self.base_lr) * scale
            print_log(f'paramwise_options -- {name}:lr={group["lr"]}', logger='current')


@PARAM_SCHEDULERS.register_module()
class InverseSqrtLR(ExponentialLR):
    """Learning rate ``peak · sqrt(begin / t)`` after a warm-up (arXiv 1706.03762, §5.3).

    Args:
        begin: First t of the decay, 1 or larger.
        by_epoch: Whether t counts epochs, not iterations.
        **kwargs: ``end``, ``last_step`` and ``verbose`` of mmengine's schedulers.
    """

    def __init__(self, optimizer: Any, begin: int, by_epoch: bool = True, **kwargs: Any) -> None:
        check_int('begin of InverseSqrtLR', begin, 1)
        super().__init__(optimizer, gamma=1.0, begin=begin, by_epoch=by_epoch, **kwargs)

    def _get_value(self) -> list[float]:
        # Schedulers are products: each step is a factor on the previous rate.
        self.gamma = math.sqrt(1 - 1 / (self.begin + self.last_step))
        return super()._get_value()
