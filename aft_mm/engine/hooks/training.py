"""Change or measure training: compilation, seeds, timing, penalties, loss in bits."""

import math
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from mmengine.dataset import worker_init_fn
from mmengine.hooks import Hook
from mmengine.runner import Runner, set_random_seed
from torch import nn

from aft_mm.checks import check_number, check_text
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from ..runner import task_model

MAX_GRAPHS = 2**20  # in effect no limit


@HOOKS.register_module()
class CompileHook(Hook):
    """Compile one part of the model before a run, with no graph breaks.

    mmengine's ``cfg.compile`` compiles the training step, with a graph break at every backward and
    optimizer call. This hook compiles a part in place: state dict keys do not change, and a copy
    such as the EMA model stays uncompiled.

    Args:
        module: Attribute of the model to compile.
        **kwargs: Those of ``torch.compile``, such as ``backend`` or ``mode``. By default
            ``fullgraph`` is True, so a graph break is an error, and ``dynamic`` is False, one graph
            per image size: torch 2.11 cannot trace ``torch.cond`` with a symbolic size.
    """

    def __init__(self, module: str = 'backbone', **kwargs) -> None:
        check_text('module of CompileHook', module)
        self.module = module
        self.kwargs = {'fullgraph': True, 'dynamic': False, **kwargs}

    def before_run(self, runner: Runner) -> None:
        """Compile before anything else; weights are loaded in place later."""
        # By default torch gives up after 8 sizes, which is an error with fullgraph.
        limits = torch._dynamo.config
        limits.cache_size_limit = max(limits.cache_size_limit, MAX_GRAPHS)
        limits.accumulated_cache_size_limit = max(limits.accumulated_cache_size_limit, MAX_GRAPHS)
        task_model(runner).get_submodule(self.module).compile(**self.kwargs)


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed every epoch from (seed, iteration, rank), so a resumed run equals an uninterrupted one.

    mmengine's checkpoints hold no random state: after a resume, dropout, Mixup and augmentation
    would repeat the random numbers of the first epoch. Workers of the training data loader are
    seeded in every epoch as well, which needs ``persistent_workers=False``.
    """

    def before_train_epoch(self, runner: Runner) -> None:
        """Seed this process and the workers that it will start."""
        seed, worker_seed = np.random.SeedSequence(
            [runner.seed, runner.iter, runner.rank]
        ).generate_state(2)
        set_random_seed(int(seed))
        loader = runner.train_dataloader
        loader.worker_init_fn = partial(
            worker_init_fn, num_workers=loader.num_workers, rank=0, seed=int(worker_seed) >> 1
        )


@HOOKS.register_module()
class EpochTimeHook(Hook):
    """Log the seconds of every training epoch, without checkpoint and validation.

    They are written to the log and, as ``seconds_per_epoch``, to the scalars of the run. An epoch
    that was resumed in the middle is not counted.
    """

    priority = 'VERY_HIGH'  # before other hooks at the end of an epoch

    def __init__(self) -> None:
        self.begin: tuple[float, int] | None = None

    def before_train_epoch(self, runner: Runner) -> None:
        """Start the clock."""
        self.begin = perf_counter(), runner.iter

    def after_train_epoch(self, runner: Runner) -> None:
        """Log the time."""
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

    X is the unit of the validation metric :class:`aft_mm.evaluation.Likelihood`: dim, char, token
    or subword. Nothing is logged if there is no such metric, or if labels are smoothed and the loss
    is not a likelihood.
    """

    priority = 'HIGH'  # before LoggerHook reads the scalars

    def __init__(self) -> None:
        self.per = ''

    def before_train(self, runner: Runner) -> None:
        """Find the unit and log it once."""
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
        """Add the scalar, which is averaged like the loss."""
        if self.per and outputs is not None:
            runner.message_hub.update_scalar(
                f'train/loss_bits_per_{self.per}', outputs['loss'].item() / math.log(2)
            )


def penalised_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model whose ``regularization_loss()`` is not None."""
    return [
        layer
        for layer in model.modules()
        if hasattr(layer, 'regularization_loss') and layer.regularization_loss() is not None
    ]


@HOOKS.register_module()
class RegularizationHook(Hook):
    """Add ``weight * sum of layer.regularization_loss()`` to the losses, over layers that have one.

    A layer has none if it lacks the method or if the method returns None.

    For ``AFTConv(sparsity='entropy')`` that is the entropy of its position biases in nats, summed
    over the heads, which the paper uses with weight 0.001 (arXiv 2105.14103, eq. 9).

    Args:
        weight: Factor of the summed penalty, dimensionless.
    """

    def __init__(self, weight: float) -> None:
        check_number('weight of RegularizationHook', weight, 0)
        self.weight = weight

    def before_train(self, runner: Runner) -> None:
        """Extend the losses of the model by ``loss_regularization``.

        Raises:
            UserError: no layer of the model has a ``regularization_loss``.
        """
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

        # Inside the forward of the model, so that DistributedDataParallel sees the gradients.
        model.register_forward_hook(add_penalty, with_kwargs=True)
