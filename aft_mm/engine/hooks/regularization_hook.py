"""A penalty that layers name themselves."""

from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from aft_mm.checks import check_number
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from .task_model import task_model


@HOOKS.register_module()
class RegularizationHook(Hook):
    """Add ``weight * sum of layer.regularization_loss()`` to the losses, over layers that have one.

    A layer has none if it lacks the method or if the method returns None.
    ``AFTConv(sparsity='entropy')`` has one, the entropy of its position biases in nats, summed over
    the heads; the paper trains it with weight 0.001 (arXiv 2105.14103, eq. 9).

    Args:
        weight: Factor of the summed penalty, dimensionless.
    """

    def __init__(self, weight: float) -> None:
        check_number('weight of RegularizationHook', weight, 0)
        self.weight = weight

    def before_train(self, runner: Runner) -> None:
        """Extend the loss dict of the model by ``loss_regularization``.

        Raises:
            UserError: no layer of the model has a ``regularization_loss``.
        """
        model = task_model(runner)
        layers = [
            layer
            for layer in model.modules()
            if hasattr(layer, 'regularization_loss') and layer.regularization_loss() is not None
        ]
        if not layers:
            raise UserError(
                f'RegularizationHook(weight={self.weight}) needs a layer with a '
                "regularization_loss, such as AFTConv(sparsity='entropy'), but the "
                'model has none'
            )

        def add_penalty(module: nn.Module, args: tuple, kwargs: dict, output: dict) -> None:
            if kwargs.get('mode') == 'loss':
                output['loss_regularization'] = self.weight * sum(
                    layer.regularization_loss() for layer in layers
                )

        # Inside the forward of the model, so that DistributedDataParallel sees the gradients.
        model.register_forward_hook(add_penalty, with_kwargs=True)
