"""Stop before a loss that is not a number reaches the weights."""

import math
from functools import partial
from typing import Any

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor, nn

from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from .task_model import task_model


@HOOKS.register_module()
class FiniteLossHook(Hook):
    """Stop the run at a non-finite loss or gradient, before the optimizer steps.

    The weights stay those of the step before, and so does the last checkpoint. Gradients are looked
    at before they are clipped, because clipping by a norm that is not finite spoils all of them.
    Under float16 a step with infinite gradients is left out by the loss scaler, as it should be;
    only a non-finite loss stops the run there.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None  # of the iteration, until it is checked
        self.gradients: dict[str, Tensor] = {}  # largest absolute value of each parameter's
        self.largest_before = 'none'

    def before_train(self, runner: Runner) -> None:
        """Watch the losses and the gradients of the model and the steps of the optimizer."""
        model = task_model(runner)

        def keep_loss(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if kwargs.get('mode') == 'loss':
                self.loss = model.parse_losses(output)[0].detach()

        def keep_gradient(name: str, parameter: nn.Parameter) -> None:
            self.gradients[name] = torch.linalg.vector_norm(
                parameter.grad, math.inf, dtype=torch.float32
            )

        model.register_forward_hook(keep_loss, with_kwargs=True)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(keep_gradient, name))
        runner.optim_wrapper.optimizer.register_step_pre_hook(
            lambda *_: self._check(runner, self.gradients)
        )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Look at the loss of an iteration without a step, one that accumulates or is left out."""
        if self.loss is not None:
            self._check(runner, {})

    def _check(self, runner: Runner, gradients: dict[str, Tensor]) -> None:
        """Raise a :class:`UserError` in every process if one of them met a non-finite number."""
        values = torch.stack([self.loss.float(), *gradients.values()])
        bad = (~values.isfinite().all()).int()
        all_reduce(bad, 'max')
        if not bad:
            self.loss = None
            if gradients:
                self.largest_before = largest(gradients)
            return
        lr = max(group['lr'] for group in runner.optim_wrapper.optimizer.param_groups)
        raise UserError(
            f'the loss of iteration {runner.iter + 1} is {self.loss.item():.6g} at a learning rate '
            f'of {lr:.6g}; its largest gradient is {largest(self.gradients)}, that of the step '
            f'before was {self.largest_before}; the weights were left as they were before it and '
            f'the last checkpoint is {runner.message_hub.get_info("last_ckpt", "none yet")}'
        )


def largest(gradients: dict[str, Tensor]) -> str:
    """The largest gradient and its parameter in words; what is not a number counts as largest."""
    if not gradients:
        return 'none'
    value, index = torch.stack(list(gradients.values())).max(0)
    return f'{value.item():.6g} of {list(gradients)[int(index)]}'
