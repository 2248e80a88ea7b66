"""Does a checkpoint belong to this model?"""

from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import Runner

from aft_mm.registry import HOOKS

from ..errors import UserError


@HOOKS.register_module()
class CheckpointFitHook(Hook):
    """Refuse a checkpoint of another architecture, which mmengine loads with a mere warning.

    Args:
        strict: True wants every tensor of the model and no other; False, for fine-tuning, wants at
            least one weight matrix with the name and the shape of the model's.
    """

    priority = 'VERY_HIGH'

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Compare before mmengine loads.

        Raises:
            UserError: the checkpoint does not fit.
        """
        model = runner.model
        while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
            model = model.module
        weights = checkpoint.get('state_dict', checkpoint)
        weights = {name.removeprefix('module.'): value for name, value in weights.items()}
        if self.strict:
            self._check_all(runner, model, weights, checkpoint)
        else:
            own = model.state_dict()
            if not any(value.ndim > 1 and name in own and own[name].shape == value.shape
                       for name, value in weights.items()):
                raise UserError(self._sentence(runner, checkpoint, 'no weight matrix fits'))

    def _check_all(self, runner, model, weights: dict, checkpoint: dict) -> None:
        # Torch's own loading decides, because a layer may resize or rename on the way in.
        try:
            missing, unexpected = model.load_state_dict(weights, strict=False)
            reshaped = 0
        except RuntimeError as error:
            own = model.state_dict()
            missing, unexpected = own.keys() - weights.keys(), weights.keys() - own.keys()
            reshaped = str(error).count('size mismatch for ')
        if missing or unexpected or reshaped:
            raise UserError(self._sentence(
                runner, checkpoint, f'{len(missing)} tensors are missing, {len(unexpected)} '
                f'unexpected and {reshaped} of another shape'))

    def _sentence(self, runner, checkpoint: dict, reason: str) -> str:
        source = checkpoint.get('meta', {}).get('experiment_name', 'an unnamed run')
        return (f'the checkpoint (from {source}) does not fit the model of this config '
                f'({runner.experiment_name}): {reason}')
