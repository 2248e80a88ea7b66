"""Does a checkpoint belong to this model?"""

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch import Tensor, nn

from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from .stop_hook import INSIDE_EPOCH, StopHook
from .task_model import task_model


@HOOKS.register_module()
class CheckpointFitHook(Hook):
    """Refuse a checkpoint of another architecture, which mmengine loads with a mere warning.

    Args:
        strict: True wants every tensor of the model and no other, as a test and a resume need.
            False, for fine-tuning, leaves the decision to the model's own loading.
        resume: True refuses positions of another length as well, which the state of an optimizer
            cannot follow, and what was stopped inside an epoch where no StopHook goes on
            there: mmengine's loop would begin the epoch again and count its iterations twice.

    Strict, it refuses weights that were trained with other subwords than those of the data, too: a
    token would stand for another text.
    """

    priority = 'VERY_HIGH'

    def __init__(self, strict: bool = True, resume: bool = False) -> None:
        self.strict = strict
        self.resume = resume

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Load on trial, before mmengine loads.

        Raises:
            UserError: the checkpoint does not fit.
        """
        inside_epoch = checkpoint.get('meta', {}).get(INSIDE_EPOCH, {}).get('num_done')
        if (
            self.resume
            and inside_epoch
            and not any(isinstance(hook, StopHook) for hook in runner.hooks)
        ):
            raise UserError(
                'a run that was stopped inside an epoch goes on there with '
                "dict(type='aft_mm.TimeBudgetHook', ...) among its hooks only"
            )
        if self.strict:
            check_subwords(runner, checkpoint.get('meta', {}), self.resume)
        resized = load_fitting(task_model(runner), checkpoint, runner.experiment_name, self.strict)
        if resized and self.resume:
            raise UserError(
                f'a run cannot be resumed with {resized[0]} of another size, to which '
                'the state of the optimizer does not fit; start a new one with '
                'load_from=CHECKPOINT and without --resume'
            )


def check_subwords(runner: Runner, meta: dict, resume: bool) -> None:
    """Compare the subwords of a checkpoint with those of the data set that it goes on with.

    Raises:
        UserError: they are others.
    """
    saved = (meta.get('dataset_meta') or {}).get('subwords')
    if saved is None:
        return
    loop = runner.train_loop if resume else runner.test_loop
    own = (getattr(loop.dataloader.dataset, 'metainfo', None) or {}).get('subwords')
    if own != saved:
        raise UserError(
            f'the checkpoint was trained with subwords of fingerprint {saved}, but '
            f'those of the data have {own}; use the file of before'
        )


def without_prefix(weights: Mapping) -> OrderedDict:
    """A state dict without the ``module.`` of a wrapper, and the versions of its layers likewise.

    Torch keeps the versions in an attribute, by which a layer refuses weights of another meaning.
    """
    state = OrderedDict((key.removeprefix('module.'), value) for key, value in weights.items())
    versions = getattr(weights, '_metadata', None)
    if versions is not None:
        state._metadata = OrderedDict(  # type: ignore[attr-defined]
            ('' if key == 'module' else key.removeprefix('module.'), value)
            for key, value in versions.items()
        )
    return state


def load_fitting(model: nn.Module, checkpoint: dict, name: str, strict: bool = True) -> list[str]:
    """Load the weights of a checkpoint into ``model``.

    Returns the names of what was interpolated on the way, such as positions of another length;
    a warning in the log says so, and also what begins anew because its shape is another, such as a
    head of other classes, and how many weights are not finite.

    Args:
        model: What to load into.
        checkpoint: As mmengine's checkpoint loader gives it.
        name: What the model is called in the message.
        strict: As for :class:`CheckpointFitHook`.

    Raises:
        UserError: the checkpoint does not fit.
    """
    weights = checkpoint.get('state_dict', checkpoint)
    if not isinstance(weights, Mapping) or not all(isinstance(key, str) for key in weights):
        raise UserError(
            f'state_dict of the checkpoint must hold tensors by their names, but is a '
            f'{type(weights).__name__} of something else'
        )
    weights = without_prefix(weights)
    missing, unexpected, reshaped, uncopied = _copy(model, weights)
    if strict and (missing or unexpected or reshaped or uncopied):
        source = checkpoint.get('meta', {}).get('experiment_name', 'an unnamed run')
        raise UserError(
            f'the checkpoint (from {source}) does not fit the model of this config '
            f'({name}): {len(missing)} tensors are missing, '
            f'{len(unexpected)} unexpected and {len(reshaped)} of another shape'
            + (f'; {uncopied} cannot be copied' if uncopied else '')
        )
    own = model.state_dict()
    if reshaped:
        _warn_of_new_beginnings(weights, own, reshaped)
    _warn_of_non_finite(weights)
    # mmengine's own loading follows, with a word on each tensor that does not fit.
    resized = (
        []
        if reshaped or uncopied
        else sorted(
            key for key in own.keys() & weights.keys() if own[key].shape != weights[key].shape
        )
    )
    if resized:
        _warn_of_interpolation(weights, own, resized)
    return resized


def _copy(model: nn.Module, weights: Mapping) -> tuple:
    """Copy what fits; the names that are missing, unexpected and of another shape, and how many
    tensors cannot be copied.
    """
    own = model.state_dict()
    reshaped: list[str] = []
    uncopied = 0
    # Torch's loading decides, because a layer may resize, rename or refuse on the way in.
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except ValueError as error:
        raise UserError(str(error)) from error
    except RuntimeError as error:
        missing, unexpected = own.keys() - weights.keys(), weights.keys() - own.keys()
        reshaped = re.findall(r'size mismatch for (\S+):', str(error))
        uncopied = str(error).count('\n\t') - len(reshaped)
    # Torch would leave out the imaginary part.
    uncopied += sum(
        weights[key].is_complex() != own[key].is_complex()
        for key in own.keys() & weights.keys()
        if isinstance(weights[key], Tensor)
    )
    return missing, unexpected, reshaped, uncopied


def _warn_of_new_beginnings(weights: Mapping, own: Mapping, reshaped: list[str]) -> None:
    """Name what keeps the weights of this model."""
    shapes = ', '.join(
        f'{key} {list(weights[key].shape)} -> {list(own[key].shape)}' for key in reshaped[:2]
    )
    more = f' and {len(reshaped) - 2} more' if len(reshaped) > 2 else ''
    print_log(
        'of another shape in the checkpoint, so that the weights of this model begin anew: '
        + shapes
        + more,
        logger='current',
        level=logging.WARNING,
    )


def _warn_of_interpolation(weights: Mapping, own: Mapping, resized: list[str]) -> None:
    """Name the first tensor whose size was changed, and how many were."""
    first = resized[0]
    print_log(
        f'the checkpoint is interpolated to the sizes of this model: {first} from '
        f'{list(weights[first].shape)} to {list(own[first].shape)}, {len(resized)} in all',
        logger='current',
        level=logging.WARNING,
    )


def _warn_of_non_finite(weights: Mapping) -> None:
    """Say how many tensors hold NaN or inf, which every prediction of the model then is."""
    bad = [
        key
        for key, value in weights.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype.itemsize > 1
        and not value.isfinite().all()
    ]
    if bad:
        print_log(
            f'{len(bad)} of the {len(weights)} tensors of the checkpoint hold NaN or inf, the '
            f'first is {bad[0]}',
            logger='current',
            level=logging.WARNING,
        )
