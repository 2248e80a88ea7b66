"""Does a checkpoint belong to this model?"""

from mmengine.hooks import Hook
from mmengine.runner import Runner

from aft_mm.registry import HOOKS

from ..errors import UserError
from .task_model import task_model


@HOOKS.register_module()
class CheckpointFitHook(Hook):
    """Refuse a checkpoint of another architecture, which mmengine loads with a mere warning.

    Args:
        strict: True wants every tensor of the model and no other, as a test and a resume need.
            False, for fine-tuning, leaves the decision to the model's own loading.
    """

    priority = 'VERY_HIGH'

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Load on trial, before mmengine loads.

        Raises:
            UserError: the checkpoint does not fit.
        """
        model = task_model(runner)
        weights = checkpoint.get('state_dict', checkpoint)
        weights = {name.removeprefix('module.'): value for name, value in weights.items()}
        reshaped = 0
        # Torch's loading decides, because a layer may resize, rename or refuse on the way in.
        try:
            missing, unexpected = model.load_state_dict(weights, strict=False)
        except ValueError as error:
            raise UserError(str(error)) from error
        except RuntimeError as error:
            own = model.state_dict()
            missing, unexpected = own.keys() - weights.keys(), weights.keys() - own.keys()
            reshaped = str(error).count('size mismatch for ')
        if self.strict and (missing or unexpected or reshaped):
            source = checkpoint.get('meta', {}).get('experiment_name', 'an unnamed run')
            raise UserError(
                f'the checkpoint (from {source}) does not fit the model of this config '
                f'({runner.experiment_name}): {len(missing)} tensors are missing, '
                f'{len(unexpected)} unexpected and {reshaped} of another shape')
