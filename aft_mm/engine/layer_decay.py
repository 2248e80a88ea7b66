"""Layer-wise decay of the learning rate."""

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn

from aft_mm.checks import check_number
from aft_mm.errors import UserError
from aft_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """mmengine's default constructor, with a learning rate that falls from the last layer down.

    A parameter of depth i of the n depths that ``model.backbone.get_layer_depth`` tells has the
    rate ``lr · decay_rate^(n − 1 − i)``: the head, the neck and the last norm have lr itself, the
    last layer decay_rate times that, the embeddings least. For classifiers, detectors and
    segmentors alike.

    Args:
        optim_wrapper_cfg: config of the wrapper, with optimizer.lr.
        paramwise_cfg: ``decay_rate``, above 0 and at most 1, and what the default constructor
            takes, such as ``norm_decay_mult`` and ``custom_keys``; an ``lr_mult`` there comes on
            top.

    Raises :class:`UserError` for another decay_rate, for an optimizer without lr, and for a
    backbone without get_layer_depth.
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
        """The default groups, one per parameter, and for the whole model the decay on top."""
        super().add_params(params, module, prefix, is_dcn_module)
        # The default implementation calls this one for every child.
        if not prefix:
            self._decay(params, module)

    def _decay(self, params: list[dict], model: nn.Module) -> None:
        backbone = getattr(model, 'backbone', None)
        if not hasattr(backbone, 'get_layer_depth'):
            raise UserError(
                'paramwise_cfg.decay_rate needs a model whose backbone has get_layer_depth, such '
                f'as aft_mm.AFTViT, got {type(model).__name__} with a backbone of type '
                f'{type(backbone).__name__}'
            )
        names = {parameter: name for name, parameter in model.named_parameters()}
        for group in params:
            name = names[group['params'][0]]
            depth, num_depths = backbone.get_layer_depth(name, 'backbone.')
            scale = self.paramwise_cfg['decay_rate'] ** (num_depths - 1 - depth)
            group['lr'] = group.get('lr', self.base_lr) * scale
            print_log(f'paramwise_options -- {name}:lr={group["lr"]}', logger='current')
