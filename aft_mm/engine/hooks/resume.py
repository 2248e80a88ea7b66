"""Resume a run as if it had not been interrupted, or refuse to."""

import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from mmengine.device import get_device
from mmengine.hooks import EMAHook, Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner, set_random_seed
from torch import Tensor

from aft_mm.checkpoint import CONFIG_TEXT, HUB_KEYS
from aft_mm.config.texts import entry
from aft_mm.config.trained import differences, options
from aft_mm.errors import UserError
from aft_mm.openmmlab import warn
from aft_mm.registry import HOOKS

from ..loops import make_resumable
from ..runner import fix_sum_order, task_model, wrappers_of
from .checkpointing import INSIDE_EPOCH, RUN, TIME_BUDGET, run_properties, waiting_gradients

#: Entry of a checkpoint's meta: whether it was written after its validation.
VALIDATED = 'validated'
#: Entry of a checkpoint's meta with the state of the random generators.
RANDOM_STATE = 'random_state'
#: Entry of a checkpoint's meta with the number of updates of each optimizer, also accumulated ones.
UPDATES = 'updates'
#: Entry of a checkpoint with accumulated gradients.
GRADIENTS = 'gradients'
_ORDER = 'samples are distributed differently, so the weights will not be'
_SUMS = 'sums are rounded differently, so the weights will not be bit for bit'
#: Properties of a run, their names in a message, and what follows from another value.
CHANGES = (
    ('num_processes', 'processes', _ORDER),
    ('batch_size', 'batch_size', _ORDER),
    ('workers', 'workers', 'random transforms differ, so the weights will not be'),
    ('num_threads', 'OMP_NUM_THREADS', _SUMS),
    ('backends', 'AFT_MM_BACKEND', _SUMS),
)
# Settings that newer versions of torch or a schedule add.
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
class ExactResumeHook(Hook):
    """Make a run that resumes at any iteration bit-identical to an uninterrupted one.

    - Every epoch is seeded from (seed, iteration, rank), in a distributed run every iteration.
    - A checkpoint holds the state of the generators and gradients that wait for a step.
    - Workers of the training data loader seed every batch from (seed, rank, number of the batch).
    - A validation leaves the generators as they were.

    On a GPU, operations without a deterministic algorithm can differ; the log says so.
    """

    priority = 'VERY_HIGH'  # other hooks may use random numbers

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.before_validation: dict[str, Any] | None = None

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Keep the random state for a resume.

        Raises:
            UserError: The state is damaged.
        """
        self.loaded = {key: checkpoint[key] for key in (GRADIENTS,) if key in checkpoint}
        meta = checkpoint.get('meta', {})
        self.loaded[UPDATES] = meta.get(UPDATES)
        state = meta.get(RANDOM_STATE)
        if state is not None:
            try:
                check_random_state(state)
            except Exception as error:
                raise UserError(
                    f'the random state of the checkpoint cannot be used ({error})'
                ) from error
            self.loaded[RANDOM_STATE] = state

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        is_seeded = runner.distributed or runner.train_dataloader.num_workers > 0
        make_resumable(loop, (runner.seed, runner.rank) if is_seeded else ())
        # The sum of two numbers does not depend on their order.
        has_fixed_sums = runner.world_size <= 2 or fix_sum_order(runner.model)
        if not runner.iter:  # only weights were loaded
            self.loaded = {}
            return
        owner = getattr(loop, 'dataloader_iterator', loop)
        owner.restore = partial(self._restore, runner)
        updates = self.loaded.get(UPDATES)
        for name, wrapper in wrappers_of(runner.optim_wrapper).items():
            # mmengine starts each of several at 0.
            if isinstance(updates, dict) and type(updates.get(name)) is int:
                wrapper._inner_count = updates[name]
        parameters = dict(task_model(runner).named_parameters())
        rows = self.loaded.get(GRADIENTS, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UserError('gradients of the checkpoint must be a list of one dict per process')
        # With another number of processes bits differ anyway.
        for name, gradient in rows[runner.rank % len(rows)].items() if rows else ():
            parameter = parameters.get(name)
            if (
                parameter is None
                or not isinstance(gradient, Tensor)
                or gradient.shape != parameter.shape
            ):
                raise UserError(f'the model has no parameter for the gradient {name!r:.100}')
            parameter.grad = gradient.to(parameter)
        if not has_fixed_sums:
            runner.logger.info(
                f'the sums of gradients over {runner.world_size} processes may be rounded '
                'differently from those of an uninterrupted run'
            )
        if get_device() != 'cpu' and not torch.are_deterministic_algorithms_enabled():
            runner.logger.info(
                'the resumed run equals an uninterrupted one except for operations of the GPU '
                'without a deterministic algorithm'
            )

    def before_train_epoch(self, runner: Runner) -> None:
        begin = getattr(runner.train_loop, 'begin', (0, runner.iter))[1]
        if isinstance(runner.train_loop, IterBasedTrainLoop):
            begin = 0
        self._seed(runner, begin)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self.loaded = {}
        if runner.distributed:
            self._seed(runner, runner.iter)

    def before_val(self, runner: Runner) -> None:
        if RANDOM_STATE in self.loaded:  # before the first iteration after a resume
            set_random_state(self.loaded[RANDOM_STATE])
        self.before_validation = random_state()
        if runner.distributed:
            self._seed(runner, runner.iter)

    def after_val(self, runner: Runner) -> None:
        if self.before_validation is not None:
            set_random_state(self.before_validation)
            self.before_validation = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if 'optimizer' not in checkpoint:
            return
        wrappers = wrappers_of(runner.optim_wrapper).items()
        checkpoint['meta'][UPDATES] = {
            name: wrapper._inner_count
            for name, wrapper in wrappers
            if hasattr(wrapper, '_inner_count')
        }
        if runner.distributed:  # SafeCheckpointHook gathers them in all processes
            rows = getattr(runner, 'waiting_gradients', [])
        else:
            # A validation that finds the best weights writes a checkpoint.
            checkpoint['meta'][RANDOM_STATE] = self.before_validation or random_state()
            rows = waiting_gradients(runner)
        if rows:
            checkpoint[GRADIENTS] = rows

    def _seed(self, runner: Runner, iteration: int) -> None:
        numbers = [runner.seed, iteration, runner.rank]
        set_random_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))

    def _restore(self, runner: Runner) -> None:
        if RANDOM_STATE in self.loaded:
            set_random_state(self.loaded[RANDOM_STATE])
        elif not runner.distributed:
            runner.logger.warning(
                'the checkpoint holds no random state: dropout and augmentation of the resumed run '
                'will differ from those of an uninterrupted one'
            )


def random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, key, *others = cast(Sequence[Any], np.random.get_state())
    state = dict(
        python=[version, torch.tensor(numbers), gauss],
        numpy=[name, torch.from_numpy(key.astype(np.int64)), *others],
        torch=torch.get_rng_state(),
    )
    if torch.cuda.is_initialized():
        state['cuda'] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    _set_generators(state, random, np.random, torch.default_generator)
    if 'cuda' in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state['cuda'].cpu())


def check_random_state(state: dict[str, Any]) -> None:
    """Raise an error of any type if :func:`set_random_state` would fail."""
    _set_generators(state, random.Random(), np.random.RandomState(), torch.Generator())


def _set_generators(state: dict[str, Any], python: Any, numpy: Any, of_torch: Any) -> None:
    version, numbers, gauss = state['python']
    name, key, *others = state['numpy']
    python.setstate((version, tuple(numbers.tolist()), gauss))
    numpy.set_state((name, key.cpu().numpy().astype(np.uint32), *others))
    of_torch.set_state(state['torch'].cpu())


@HOOKS.register_module()
class ResumeCheckHook(Hook):
    """Refuse to resume a run under other conditions than it started with.

    These are its optimizer, schedule, averaged weights and the length of an epoch.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        try:
            self._check(runner, checkpoint)
        except UserError:
            raise
        except Exception as error:
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
        _check_numbers(meta)
        saved = meta.get(RUN, {})
        averages = any(isinstance(hook, EMAHook) for hook in runner.hooks)
        if 'ema_state_dict' in checkpoint and not averages:
            raise UserError(
                'the checkpoint holds averaged weights, from which a run without EMAHook would '
                'resume; resume with the previous EMAHook among custom_hooks, or start a new run '
                'with load_from=CHECKPOINT'
            )
        if averages and 'ema_state_dict' not in checkpoint:
            warn('the checkpoint holds no averaged weights: the average of EMAHook starts here')
        _check_optimizers(runner, checkpoint['optimizer'], saved.get('optimizer'))
        _check_schedules(runner, checkpoint)
        _warn_of_kept(runner, meta)
        self._check_progress(runner, checkpoint, saved)

    def _check_progress(self, runner: Runner, checkpoint: dict, saved: dict) -> None:
        meta = checkpoint['meta']
        loop, epoch, iteration = runner.train_loop, meta['epoch'], meta['iter']
        now = run_properties(runner)
        before = saved.get('num_processes', now['num_processes'])
        unit, done, end = 'iter', iteration, runner.max_iters
        if isinstance(loop, EpochBasedTrainLoop):
            unit, done, end = 'epoch', epoch, runner.max_epochs
            length = len(loop.dataloader)
            inside = meta.get(INSIDE_EPOCH, {}).get('num_done', 0)
            if iteration != epoch * length + inside:
                raise UserError(
                    f'the checkpoint is of iteration {iteration} in {epoch} epochs, but an epoch '
                    f'of this run has {length} iterations with {now["num_processes"]} processes; '
                    'resume with the previous batch size, data and number of processes '
                    f'({before} processes), from a checkpoint at the end of an epoch'
                )
        for key, name, consequence in CHANGES:
            was = saved.get(key, now[key])
            if was != now[key] and (key != 'num_threads' or get_device() == 'cpu'):
                warn(
                    f'the checkpoint was written with {name}={was!r} and the run resumes with '
                    f'{name}={now[key]!r}: {consequence} those of an uninterrupted run'
                )
        if done >= end:
            warn(
                f'the run is finished ({unit} {done} of {end}): nothing is left to train; a '
                f'longer one needs a larger train_cfg.max_{unit}s'
            )
            return
        schedules = checkpoint.get('param_schedulers')
        before = entry(meta.get(CONFIG_TEXT, ''), 'train_cfg').get(f'max_{unit}s')
        if isinstance(schedules, list) and isinstance(before, int) and end > before:
            # The last step of each part, as a share of the longer run.
            ends = [
                min(part['end'], part['begin'] + part.get('T_max', math.inf))
                / (runner.max_epochs if part.get('by_epoch', True) else runner.max_iters)
                for part in schedules
                if {'begin', 'end'} <= part.keys()
            ]
            if ends and before / end <= max(ends) < 1:  # a warm-up alone ends earlier
                warn(
                    f'train_cfg.max_{unit}s is {end}, but the schedule of the checkpoint is that of '
                    f'{before}; for a longer one start a new run, with load_from=CHECKPOINT and '
                    'without --resume'
                )


def _warn_of_kept(runner: Runner, meta: dict) -> None:
    trained = meta.get(CONFIG_TEXT, '')
    wrapper = entry(trained, 'optim_wrapper')
    if not wrapper:
        return
    schedules = entry(trained, 'param_scheduler') or entry(trained, 'param_scheduler', list)
    before = _kept(wrapper, schedules)
    now = _kept(runner.cfg.get('optim_wrapper'), runner.cfg.get('param_scheduler'))
    ignored = differences(now, before, '{}={} (was {})')
    if ignored:
        warn(
            'a resumed run keeps the optimizer and schedule of its checkpoint, so this is ignored: '
            f'{ignored}; a new run with load_from=CHECKPOINT uses it'
        )


def _kept(wrapper: Mapping | None, schedules: Any) -> dict[str, Any]:
    """Return the settings, by place, that a resume takes from its checkpoint."""
    parts = {
        f'optim_wrapper.{name}': (wrapper or {}).get(name) or {}
        for name in ('optimizer', 'paramwise_cfg')
    }
    return dict(options({**parts, 'param_scheduler': schedules or []}))


def _check_numbers(meta: dict) -> None:
    inside = meta.get(INSIDE_EPOCH, {'num_done': 0})
    seconds = meta.get(TIME_BUDGET, {}).get('seconds', 0.0)
    counts = [meta.get('epoch'), meta.get('iter'), meta.get('seed') or 0]
    counts += [inside.get('num_done'), inside.get('sampler_seed') or 0]
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts) or not (
        isinstance(seconds, int | float) and 0 <= seconds < math.inf
    ):
        raise UserError(
            'meta of the checkpoint must count epochs, iterations and seconds, got '
            f'{ {key: meta.get(key) for key in ("epoch", "iter", "seed")}!r:.200}'
        )


def _check_optimizers(runner: Runner, state: Any, name: str | None) -> None:
    optimizers = {
        key: wrapper.optimizer for key, wrapper in wrappers_of(runner.optim_wrapper).items()
    }
    states = {'': state} if not isinstance(state, dict) or 'param_groups' in state else state
    current = ', '.join(type(optimizer).__name__ for optimizer in optimizers.values())
    if name == 'OptimWrapperDict':  # of several optimizers, without their names
        name = None
    if (name or current) != current or states.keys() != optimizers.keys():
        raise _other_optimizer(name, current)
    for key, optimizer in optimizers.items():
        _check_optimizer(optimizer, states[key], name)


def _other_optimizer(name: str | None, current: str) -> UserError:
    return UserError(
        f'the checkpoint holds the state of {name or "another optimizer"}, but the run has '
        f'{current}; resume with the previous optimizer, or start a new run with '
        'load_from=CHECKPOINT and without --resume'
    )


def _check_optimizer(optimizer: Any, state: Any, name: str | None) -> None:
    groups, current_groups = state['param_groups'], optimizer.param_groups
    if _settings(groups) != _settings(current_groups):
        raise _other_optimizer(name, type(optimizer).__name__)
    sizes = [[len(group['params']) for group in part] for part in (groups, current_groups)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f'the optimizer of the checkpoint has groups of {sizes[0]} parameters, but that of the '
            f'run has groups of {sizes[1]}; resume with the previous paramwise_cfg '
            'and frozen parameters'
        )
    for saved, group in zip(groups, current_groups, strict=True):
        _check_types('the optimizer', saved, group)
    parameters = [parameter for group in current_groups for parameter in group['params']]
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
    return set.intersection(*map(set, groups)) - _NEW_SETTINGS if groups else set()


def _check_schedules(runner: Runner, checkpoint: dict) -> None:
    """Refuse other schedules, whose state mmengine would partly ignore."""
    saved, schedules = checkpoint.get('param_schedulers', []), runner.param_schedulers or []
    if not (isinstance(saved, list) and isinstance(schedules, list)):
        return
    states = [schedule.state_dict() for schedule in schedules]
    if [set(one) for one in saved] != [set(one) for one in states]:
        raise UserError(
            f'the checkpoint holds the state of {len(saved)} schedules, which are not of the kinds '
            f'of the {len(schedules)} of param_scheduler; resume with the previous ones'
        )
    for one, state in zip(saved, states, strict=True):
        _check_types('a schedule', one, state)


def _check_types(owner: str, saved: dict, current: dict) -> None:
    for key, value in current.items():
        if isinstance(value, int | float) and not isinstance(
            saved.get(key, value), int | float | Tensor | None
        ):
            raise UserError(
                f'{key} of {owner} in the checkpoint must be a number, got {saved[key]!r:.100}'
            )


@HOOKS.register_module()
class ValidateFirstHook(Hook):
    """Run the validation that follows the checkpoint from which a run resumes.

    mmengine saves an epoch before it validates it; a run resumed in between would skip the metrics,
    the best weights and the step of ``ReduceOnPlateauLR``.
    """

    priority = 'LOWEST'  # after the checks of a resume and StopHook's position

    def __init__(self) -> None:
        self.is_validating = False
        self.is_validated = False

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.is_validated = bool(checkpoint.get('meta', {}).get(VALIDATED))

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        if isinstance(loop, EpochBasedTrainLoop):
            done, end = 0 if getattr(loop, 'num_done', 0) else loop.epoch, loop.max_epochs
        elif isinstance(loop, IterBasedTrainLoop):
            done, end = loop.iter, loop.max_iters
        else:
            return
        if not done or self.is_validated or runner.val_loop is None:
            return
        loop._decide_current_val_interval()
        if done >= loop.val_begin and (done % loop.val_interval == 0 or done == end):
            runner.val_loop.run()

    def before_val(self, runner: Runner) -> None:
        self.is_validating = True

    def after_val(self, runner: Runner) -> None:
        self.is_validating = False

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        checkpoint['meta'][VALIDATED] = self.is_validating
