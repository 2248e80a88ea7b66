import math
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import EMAHook, Hook
from mmengine.runner import Runner
from torch import Tensor, nn

from aft_mm.checks import check_number, check_text
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from ..runner import bases_of, task_model

MAX_GRAPHS = 2**20  # in effect no limit
#: Penalty of the ridge regression, and factor of its scores: how sure the probabilities are.
PENALTY, SCALE = 0.3, 10.0
#: Arguments of mmpretrain's CrossEntropyLoss that change what is learned.
LOSS_SETTINGS = ('use_sigmoid', 'use_soft', 'class_weight', 'pos_weight')


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

    def __init__(self, module: str | None = 'backbone', **kwargs: Any) -> None:
        if module is not None:
            check_text('module of CompileHook', module)
        self.module = module
        self.start: float | None = None
        self.kwargs = {'fullgraph': True, 'dynamic': False, **kwargs}

    def before_run(self, runner: Runner) -> None:
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
    parts = dict(model.named_children())
    if 'encoder' in parts:
        return []
    names = [name for name in ('backbone', 'decoder') if name in parts]
    return [name for name in names if type(parts[name]).__module__.startswith('aft_mm.')]


@HOOKS.register_module()
class DiscriminantHeadHook(Hook):
    """Set a linear head to a ridge regression of the classes on frozen features, after each epoch.

    ``W = 10 (T + 0.3 tr(T) / N)⁻¹ (μ − m) / C`` and ``b = −W m`` for the means μ of C classes, their
    mean m, and the covariance T of the features of N images, their mirror images among them. All
    classes count the same; ``head.loss`` is not used.

    Raises:
        UserError: The model has no ``head.fc``, or several labels per image; a layer before it is
            trained, or an EMAHook averages the weights.
    """

    def __init__(self) -> None:
        self.features: list[Tensor] = []
        self.moments: list[Tensor] = []

    def before_train(self, runner: Runner) -> None:
        model = task_model(runner)
        head: Any = getattr(model, 'head', None)
        layer = getattr(head, 'fc', None)
        if not isinstance(layer, nn.Linear) or 'ClsHead' not in bases_of(head):
            raise UserError(
                'DiscriminantHeadHook needs a model with a linear head such as LinearClsHead'
            )
        trained = [n for n, x in model.named_parameters() if x.requires_grad]
        other = next((name for name in trained if not name.startswith('head.fc.')), None)
        if other is not None:
            raise UserError(
                'DiscriminantHeadHook needs a frozen backbone, such as AFTViT with frozen_stages of all '
                f'layers, but {other} is trained'
            )
        if any(isinstance(hook, EMAHook) for hook in runner.hooks):
            raise UserError(
                'custom_hooks must have no EMAHook with DiscriminantHeadHook, which sets the head of '
                'the model and not that of the average'
            )
        loss = head.loss_module
        settings = [name for name in LOSS_SETTINGS if getattr(loss, name, None)]
        if settings or type(loss).__name__ != 'CrossEntropyLoss':
            used = ', '.join(f'{name}={getattr(loss, name)}' for name in settings)
            runner.logger.warning(
                'DiscriminantHeadHook does not use model.head.loss, got '
                f'{type(loss).__name__}({used}); all classes count the same'
            )
        layer.register_forward_pre_hook(lambda layer, inputs: self.features.append(inputs[0]))

    def before_train_epoch(self, runner: Runner) -> None:
        layer = task_model(runner).head.fc
        classes, dims = layer.weight.shape
        shapes = (classes,), (classes, dims), (dims, dims)
        self.moments = [layer.weight.new_zeros(s, dtype=torch.float64) for s in shapes]
        self.features.clear()

    @torch.no_grad()
    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        model = task_model(runner)
        batch = model.data_preprocessor(data_batch, True)
        model(batch['inputs'].flip(-1), mode='tensor')
        labels = torch.cat([sample.gt_label for sample in batch['data_samples']])
        number, total, products = self.moments
        for x in (features.double() for features in self.features):
            number.index_add_(0, labels, torch.ones_like(labels, dtype=number.dtype))
            total.index_add_(0, labels, x)
            products += x.T @ x
        self.features.clear()
        # The loss is that of a head which is not set yet, and the optimizer changes nothing.
        for name in ('loss', 'lr', 'base_lr'):
            runner.message_hub.log_scalars.pop(f'train/{name}', None)

    @torch.no_grad()
    def after_train_epoch(self, runner: Runner) -> None:
        for moment in self.moments:
            all_reduce(moment)
        number, total, products = self.moments
        means = total / number.clamp_min(1)[:, None]
        within = (products - total.T @ means) / number.sum()
        mean = means.mean(0)
        offsets = means - mean
        covariance = within + offsets.T @ offsets / len(means)
        covariance.diagonal().add_(PENALTY * covariance.trace() / number.sum())
        weight = SCALE / len(means) * torch.linalg.solve(covariance, offsets.T).T
        layer = task_model(runner).head.fc
        layer.weight.copy_(weight)
        layer.bias.copy_(-weight @ mean)


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

    X is the unit of the validation metric :class:`aft_mm.evaluation.Likelihood`, without which
    nothing is logged.
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


def penalised_layers(model: nn.Module) -> list[Any]:
    layers: Iterable[Any] = model.modules()
    return [
        layer
        for layer in layers
        if hasattr(layer, 'regularization_loss') and layer.regularization_loss() is not None
    ]


@HOOKS.register_module()
class RegularizationHook(Hook):
    """Add ``weight * sum of layer.regularization_loss()`` to the losses, over layers that have one.

    Of ``AFTConv(sparsity='entropy')`` see arXiv 2105.14103, eq. 9, weight 0.001.

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
