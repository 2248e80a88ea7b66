"""Can this run go on from this checkpoint?"""

import logging
import math
from typing import Any

from mmengine.hooks import EMAHook, Hook
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import Tensor

from aft_mm.checkpoint import HUB_KEYS
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from .safe_checkpoint_hook import RUN, description
from .stop_hook import INSIDE_EPOCH
from .time_budget_hook import META as TIME_BUDGET

# Settings of torch's optimizers that came with later versions of torch or with a schedule.
_NEW_SETTINGS = {
    'initial_lr',
    'maximize',
    'foreach',
    'capturable',
    'differentiable',
    'fused',
    'decoupled_weight_decay',
    'param_names',
}


@HOOKS.register_module()
class ResumeCheckHook(Hook):
    """Refuse to resume where the run would go on otherwise than it began, before it trains.

    Refused are checkpoints without training state, those of another optimizer or schedule, those
    with averaged weights where the run averages none, and a number of iterations that does not
    make whole epochs of this run, because it had another number of processes, another batch size,
    or stopped inside an epoch. Another number of processes with epochs of the same length, and an
    average that begins here, are said in the log.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Compare the checkpoint with the run.

        Raises:
            UserError: the run cannot go on from it.
        """
        try:
            self._check(runner, checkpoint)
        except UserError:
            raise
        except Exception as error:  # of values of other kinds than any run has written
            raise UserError(
                'the training state of the checkpoint is not as mmengine writes it '
                f'({type(error).__name__}: {error})'
            ) from error

    def _check(self, runner: Runner, checkpoint: dict) -> None:
        missing = {'meta', 'message_hub', 'optimizer'} - checkpoint.keys()
        missing = missing or {*HUB_KEYS} - checkpoint['message_hub'].keys()
        if missing:
            raise UserError(
                f'a run cannot be resumed from a checkpoint without {", ".join(sorted(missing))}, '
                'such as that of the best weights or a published one; start a new one with '
                'load_from=CHECKPOINT and without --resume'
            )
        meta = checkpoint['meta']
        check_numbers(meta)
        saved = meta.get(RUN, {})
        self._check_average(runner, checkpoint)
        check_optimizer(runner, checkpoint['optimizer'], saved.get('optimizer'))
        check_schedules(runner, checkpoint)
        self._check_progress(runner, meta, saved)

    def _check_average(self, runner: Runner, checkpoint: dict) -> None:
        averages = any(isinstance(hook, EMAHook) for hook in runner.hooks)
        if 'ema_state_dict' in checkpoint and not averages:
            raise UserError(
                'the checkpoint holds averaged weights, and a run without EMAHook would go on from '
                'these; resume with the EMAHook of before among custom_hooks, or start a new run '
                'with load_from=CHECKPOINT'
            )
        if averages and 'ema_state_dict' not in checkpoint:
            warn('the checkpoint holds no averaged weights: the average of EMAHook begins here')

    def _check_progress(self, runner: Runner, meta: dict, saved: dict) -> None:
        loop, epoch, iteration = runner.train_loop, meta['epoch'], meta['iter']
        now = description(runner)
        before = saved.get('num_processes', now['num_processes'])
        if isinstance(loop, EpochBasedTrainLoop):
            length = now['epoch_length']
            inside = meta.get(INSIDE_EPOCH, {}).get('num_done', 0)
            if iteration != epoch * length + inside:
                raise UserError(
                    f'the checkpoint is of iteration {iteration} in {epoch} epochs, but an epoch '
                    f'of this run has {length} iterations with {now["num_processes"]} processes; '
                    'resume with the batch size, the data and the number of processes of before '
                    f'({before} processes), from a checkpoint at the end of an epoch'
                )
        if before != now['num_processes']:
            warn(
                f'the checkpoint was written by {before} processes and goes on with '
                f'{now["num_processes"]}: samples are dealt out otherwise, so that the weights '
                'will not be those of a run that was never stopped'
            )
        unit, done, end = (
            ('epoch', epoch, runner.max_epochs)
            if isinstance(loop, EpochBasedTrainLoop)
            else ('iteration', iteration, runner.max_iters)
        )
        if done >= end:
            warn(
                f'the run is finished ({unit} {done} of {end}): nothing is left to train; a '
                f'longer one needs a larger train_cfg.max_{unit.removesuffix("ation")}s'
            )


def check_numbers(meta: dict) -> None:
    """Refuse a meta whose numbers are none.

    Raises:
        UserError: ``epoch``, ``iter``, the seed or what hooks keep there cannot be used.
    """
    inside = meta.get(INSIDE_EPOCH, {'num_done': 0})
    seconds = meta.get(TIME_BUDGET, {}).get('seconds', 0.0)
    counts = [
        meta.get('epoch'),
        meta.get('iter'),
        meta.get('seed') or 0,
        inside.get('num_done'),
        inside.get('sampler_seed') or 0,
    ]
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts) or not (
        isinstance(seconds, int | float) and 0 <= seconds < math.inf
    ):
        raise UserError(
            'meta of the checkpoint must count epochs, iterations and seconds, got '
            f'{ {key: meta.get(key) for key in ("epoch", "iter", "seed")}!r:.200}'
        )


def check_optimizer(runner: Runner, state: Any, name: str | None) -> None:
    """Refuse the state of another optimizer, which torch loads and fails with, or worse, steps.

    Raises:
        UserError: its name, its settings, its groups or the shapes of its state differ.
    """
    groups = state.get('param_groups') if isinstance(state, dict) else None
    if not isinstance(groups, list) or not isinstance(state.get('state'), dict):
        return  # of several optimizers, which mmengine compares by name
    optimizer = runner.optim_wrapper.optimizer
    own_name = type(optimizer).__name__
    own = optimizer.param_groups
    if (name or own_name) != own_name or _settings(groups) != _settings(own):
        raise UserError(
            f'the checkpoint holds the state of {name or "another optimizer"}, but the run has '
            f'{own_name}; resume with the optimizer of before, or start a new run with '
            'load_from=CHECKPOINT and without --resume'
        )
    sizes = [[len(group['params']) for group in part] for part in (groups, own)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f'the optimizer of the checkpoint has groups of {sizes[0]} parameters, but that of the '
            f'run has groups of {sizes[1]}; resume with the paramwise_cfg and the frozen '
            'parameters of before'
        )
    for saved, group in zip(groups, own, strict=True):
        check_kinds('the optimizer', saved, group)
    parameters = [parameter for group in own for parameter in group['params']]
    indices = [index for group in groups for index in group['params']]
    for index, parameter in zip(indices, parameters, strict=True):
        for key, value in state['state'].get(index, {}).items():
            shape = getattr(value, 'shape', ())
            if math.prod(shape) != 1 and shape != parameter.shape and key != 'step':
                raise UserError(
                    f'{key} of the optimizer of the checkpoint is of shape {list(shape)}, but its '
                    f'parameter is of {list(parameter.shape)}'
                )


def _settings(groups: list[dict]) -> set[str]:
    """The settings that every group of an optimizer has; some have more of their own."""
    return set.intersection(*map(set, groups)) - _NEW_SETTINGS if groups else set()


def check_schedules(runner: Runner, checkpoint: dict) -> None:
    """Refuse the state of other schedules; mmengine leaves out what has no counterpart.

    Raises:
        UserError: there is another number of them, or one is of another kind.
    """
    saved, own = checkpoint.get('param_schedulers', []), runner.param_schedulers or []
    if not (isinstance(saved, list) and isinstance(own, list)):
        return  # of several optimizers, which mmengine compares by name
    states = [schedule.state_dict() for schedule in own]
    if [set(one) for one in saved] != [set(one) for one in states]:
        raise UserError(
            f'the checkpoint holds the state of {len(saved)} schedules, which are not of the kinds '
            f'of the {len(own)} of param_scheduler; resume with those of before'
        )

    for one, state in zip(saved, states, strict=True):
        check_kinds('a schedule', one, state)


def check_kinds(owner: str, saved: dict, own: dict) -> None:
    """Refuse text and other things in the place of numbers.

    Raises:
        UserError: a number of ``own`` is none in ``saved``.
    """
    for key, value in own.items():
        if isinstance(value, int | float) and not isinstance(
            saved.get(key, value), int | float | Tensor | None
        ):
            raise UserError(
                f'{key} of {owner} in the checkpoint must be a number, but is {saved[key]!r:.100}'
            )


def warn(sentence: str) -> None:
    print_log(sentence, logger='current', level=logging.WARNING)
