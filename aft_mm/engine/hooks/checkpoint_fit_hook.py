"""Does a checkpoint belong to this model?"""

from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

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
        load_fitting(task_model(runner), checkpoint, runner.experiment_name, self.strict)


def load_fitting(model: nn.Module, checkpoint: dict, name: str, strict: bool = True) -> None:
    """Load the weights of a checkpoint into ``model``.

    Args:
        model: What to load into.
        checkpoint: As mmengine's checkpoint loader gives it.
        name: What the model is called in the message.
        strict: As for :class:`CheckpointFitHook`.

    Raises:
        UserError: the checkpoint does not fit.
    """
    weights = checkpoint.get('state_dict', checkpoint)
    weights = {key.removeprefix('module.'): value for key, value in weights.items()}
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
    if strict and (missing or unexpected or reshaped):
        source = checkpoint.get('meta', {}).get('experiment_name', 'an unnamed run')
        raise UserError(
            f'the checkpoint (from {source}) does not fit the model of this config '
            f'({name}): {len(missing)} tensors are missing, '
            f'{len(unexpected)} unexpected and {reshaped} of another shape')
