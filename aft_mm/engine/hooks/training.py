"""Hooks that change or measure training."""

import math
import random
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from mmengine.device import get_device
from mmengine.dist import all_gather_object
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import IterBasedTrainLoop, Runner, set_random_seed
from torch import Tensor, nn

from aft_mm.checks import check_number, check_text
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from ..distributed import fix_sum_order
from ..loops import make_resumable
from ..runner import task_model

#: Entry of a checkpoint's meta with the state of the random generators.
RANDOM_STATE = 'random_state'
#: Entry of a checkpoint with accumulated gradients.
GRADIENTS = 'gradients'
MAX_GRAPHS = 2**20  # in effect no limit


@HOOKS.register_module()
class CompileHook(Hook):
    """Compile one part of the model before a run, with no graph breaks.

    mmengine's ``cfg.compile`` breaks the graph at every backward and optimizer call. State dict
    keys do not change.

    Args:
        module: Attribute of the model, or None for its backbone and decoder of this package. A
            model with an encoder is not compiled.
        **kwargs: Those of ``torch.compile``. By default ``fullgraph`` is True, so a graph break is
            an error, and ``dynamic`` False: torch 2.11 cannot trace ``torch.cond`` with a symbolic
            size.
    """

    def __init__(self, module: str | None = 'backbone', **kwargs) -> None:
        if module is not None:
            check_text('module of CompileHook', module)
        self.module = module
        self.start: float | None = None
        self.kwargs = {'fullgraph': True, 'dynamic': False, **kwargs}

    def before_run(self, runner: Runner) -> None:
        """Compile before weights are loaded in place."""
        # By default torch gives up after 8 sizes.
        limits = torch._dynamo.config
        limits.cache_size_limit = max(limits.cache_size_limit, MAX_GRAPHS)
        limits.accumulated_cache_size_limit = max(limits.accumulated_cache_size_limit, MAX_GRAPHS)
        model = task_model(runner)
        for name in parts_to_compile(model) if self.module is None else [self.module]:
            model.get_submodule(name).compile(**self.kwargs)
            self.start = 0.0

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if self.start == 0.0:
            self.start = perf_counter()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if self.start is not None:
            runner.logger.info(
                f'torch.compile: the first iteration took {perf_counter() - self.start:.0f} s; '
                'each further size of a batch is compiled once; compile=False turns this off'
            )
            self.start = None


def parts_to_compile(model: nn.Module) -> list[str]:
    """Return the names of backbone and decoder of this package; none next to an encoder."""
    parts = dict(model.named_children())
    if 'encoder' in parts:
        return []
    names = [name for name in ('backbone', 'decoder') if name in parts]
    return [name for name in names if type(parts[name]).__module__.startswith('aft_mm.')]


def waiting_gradients(runner: Runner) -> list[dict[str, Tensor]]:
    wrapper = runner.optim_wrapper
    if not isinstance(wrapper, OptimWrapper) or wrapper.should_update():
        return []
    own = {
        name: parameter.grad.cpu()
        for name, parameter in task_model(runner).named_parameters()
        if parameter.grad is not None
    }
    return all_gather_object(own)


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """Make a run that resumes at any iteration bit-identical to an uninterrupted one.

    - Every epoch is seeded from (seed, iteration, rank). A distributed run, where only the first
      process writes the checkpoint, seeds every iteration and validation.
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
        state = checkpoint.get('meta', {}).get(RANDOM_STATE)
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
        parameters = dict(task_model(runner).named_parameters())
        rows = self.loaded.get(GRADIENTS, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UserError('gradients of the checkpoint must be a list of one dict per process')
        # With another number of processes bits differ anyway.
        for name, gradient in rows[runner.rank % len(rows)].items() if rows else ():
            parameter = parameters.get(name)
            fits = parameter is not None and isinstance(gradient, Tensor)
            if not fits or gradient.shape != parameter.shape:
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
    """Return the state of all random generators in tensors and plain types."""
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
class EpochTimeHook(Hook):
    """Log ``seconds_per_epoch`` of training, without checkpoint and validation.

    An epoch that was resumed in the middle is not counted.
    """

    priority = 'VERY_HIGH'  # before other hooks at the end of an epoch

    def __init__(self) -> None:
        self.begin: tuple[float, int] | None = None

    def before_train_epoch(self, runner: Runner) -> None:
        self.begin = perf_counter(), runner.iter

    def after_train_epoch(self, runner: Runner) -> None:
        assert self.begin is not None
        start, first = self.begin
        if runner.iter - first < len(runner.train_loop.dataloader):
            return
        seconds = perf_counter() - start
        runner.logger.info(f'Epoch(train) [{runner.epoch + 1}] took {seconds:.1f} s')
        runner.visualizer.add_scalar('seconds_per_epoch', seconds, step=runner.epoch + 1)


@HOOKS.register_module()
class BitsPerDimHook(Hook):
    """Log ``loss_bits_per_X = loss / ln 2`` in addition to the loss in nats.

    X is the unit of the validation metric :class:`aft_mm.evaluation.Likelihood`, without which, or
    with smoothed labels, nothing is logged.
    """

    priority = 'HIGH'  # before LoggerHook reads the scalars

    def __init__(self) -> None:
        self.per = ''

    def before_train(self, runner: Runner) -> None:
        metrics = runner.val_loop.evaluator.metrics if runner.val_loop is not None else []
        per = next((metric.per for metric in metrics if type(metric).__name__ == 'Likelihood'), '')
        if per and not getattr(task_model(runner).head, 'label_smoothing', 0.0):
            self.per = per
            runner.logger.info(
                f'loss is in nats per {per}; loss_bits_per_{per} is the same in bits, comparable '
                f'with bits_per_{per} of the validation'
            )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        if self.per and outputs is not None:
            runner.message_hub.update_scalar(
                f'train/loss_bits_per_{self.per}', outputs['loss'].item() / math.log(2)
            )


def penalised_layers(model: nn.Module) -> list[nn.Module]:
    return [
        layer
        for layer in model.modules()
        if hasattr(layer, 'regularization_loss') and layer.regularization_loss() is not None
    ]


@HOOKS.register_module()
class RegularizationHook(Hook):
    """Add ``weight * sum of layer.regularization_loss()`` to the losses, over layers that have one.

    For ``AFTConv(sparsity='entropy')`` that is the entropy of its position biases in nats (arXiv
    2105.14103, eq. 9, weight 0.001).

    Args:
        weight: Factor of the sum.
    """

    def __init__(self, weight: float) -> None:
        check_number('weight of RegularizationHook', weight, 0)
        self.weight = weight

    def before_train(self, runner: Runner) -> None:
        """Extend the losses; raise a UserError if no layer has a ``regularization_loss``."""
        model = task_model(runner)
        layers = penalised_layers(model)
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

        # In the forward of the model, so that DistributedDataParallel sees the gradients.
        model.register_forward_hook(add_penalty, with_kwargs=True)
