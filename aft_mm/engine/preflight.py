"""Checks of a run before it starts, called in order after the runner is built."""

import copy
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import distributions
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.hooks import CheckpointHook
from mmengine.runner import IterBasedTrainLoop, Runner
from torch import nn

from aft_mm.checkpoint import checkpoints_in, latest_checkpoint
from aft_mm.config.texts import type_name
from aft_mm.errors import UserError, origin

from .hooks.checkpointing import difference, infos_of, labels
from .hooks.pictures import SampleVisualizationHook
from .hooks.resume import random_state, set_random_state
from .hooks.training import RegularizationHook, penalised_layers
from .runner import bases_of, task_model

#: Base classes of mmdet whose modules place boxes on maps by strides.
STRIDED = {'BaseDenseHead', 'BaseMaskHead', 'BaseRoIExtractor'}
#: Cells by which a level may differ: each halving rounds up or down.
MOST_CELLS = 2


def declared_strides(part: nn.Module) -> list[tuple[float, float]]:
    """Return the strides (y, x) of the maps of a dense head or RoI extractor [px], () of others."""
    if not STRIDED & bases_of(part):
        return []
    generators = (getattr(part, f'{name}_generator', None) for name in ('prior', 'square_anchor'))
    for owner in (*generators, part):
        for name in ('strides', 'featmap_strides'):
            if strides := getattr(owner, name, None):
                pairs = (x if isinstance(x, Sequence) else (x, x) for x in strides)
                return [(y, x) for x, y in pairs]
    return []


def check_strides(config: Config, runner: Runner) -> None:
    """Let the first pass refuse maps whose number, or size times the declared stride, is wrong.

    mmdet's FPN makes levels of equal size from the maps of a plain backbone. A detector trains on
    them without an error, with its boxes in the wrong places.
    """
    model = task_model(runner)
    feeder = 'backbone' if getattr(model, 'neck', None) is None else 'neck'
    feeder = f'model.{feeder} {type(getattr(model, feeder, None)).__name__}'
    hint = 'after a backbone of one scale use the neck aft_mm.SimpleFeaturePyramid'
    if feeder.endswith('SimpleFeaturePyramid'):
        hint = 'set strides and num_outs of the neck'
    image: list[int] = []
    checked: set[str] = set()

    def note_size(backbone: nn.Module, inputs: Any) -> None:
        image[:] = inputs[0].shape[-2:]

    def compare(
        name: str, strides: list[tuple[float, float]], part: nn.Module, inputs: Any
    ) -> None:
        if name in checked:
            return
        checked.add(name)
        maps = getattr(part, 'resize_feats', list)(inputs[0])  # SOLO resizes its maps
        sizes = [level.shape[-2:] for level in maps]
        # The mask head of CondInst declares one stride and reads more maps.
        more = len(sizes) > len(strides) and 'BaseMaskHead' not in bases_of(part)
        differ = any(
            abs(size - side / stride) >= MOST_CELLS
            for level, pair in zip(sizes, strides, strict=False)
            for size, side, stride in zip(level, image, pair, strict=True)
        )
        if more or differ or len(sizes) < len(strides):
            found = ', '.join(f'{image[0] / height:.3g}' for height, _ in sizes)
            declared = ', '.join(f'{stride:.3g}' for stride, _ in strides)
            raise UserError(
                f'{feeder} gives {name} maps of strides {found} px, which must be the strides that '
                f'it declares, {declared}; {hint}'
            )

    for name, part in model.named_modules():
        if name.rpartition('.')[2] == 'backbone':
            part.register_forward_pre_hook(note_size)
        elif strides := declared_strides(part):
            part.register_forward_pre_hook(partial(compare, name, strides))


#: Largest data set whose files are compared with those of the validation.
MOST_COMPARED = 200_000
MOST_AGAIN = 0.05  # share of the pairs of a validation text
#: Tokens on which a causal mixer is tried, without a grid and at most.
FEW_TOKENS, MOST_TRIED = 8, 4096
TRIED_ERROR = 0.01  # of the largest output
#: Entries of a sample that name its file.
PATHS = ('img_path', 'path', 'points_path')
SAMPLING_LOOPS = ('GenerationTestLoop', 'TranslationTestLoop')

Check = Callable[[Config, Runner], None]


def check_torchvision() -> None:
    try:
        importlib.import_module('torchvision')
    except (ImportError, RuntimeError) as error:
        version = next((package.version for package in distributions(name='torchvision')), '(none)')
        raise UserError(
            f'torch {torch.__version__} and torchvision {version} do not work together ({error}); '
            'install a matching pair, such as torch 2.11.0 with torchvision 0.26.0'
        ) from error


def choose_checkpoint(cfg: Config) -> str:
    """For ``--resume`` without a path, set ``load_from`` to the newest complete checkpoint.

    Returns:
        A warning if ``last_checkpoint`` names another one, else ''.
    """
    is_auto = cfg.get('resume') == 'auto'
    if not cfg.get('resume') or cfg.get('load_from') and not is_auto:
        return ''
    checkpoint, warning = latest_checkpoint(cfg.work_dir)
    if checkpoint is None and not is_auto:
        earlier = bool(checkpoints_in(cfg.work_dir))
        raise UserError(
            f'--resume finds no checkpoint {"of the last run " * earlier}in {str(cfg.work_dir)!r}; '
            f'name {"one of an earlier run" if earlier else "the --work-dir of the run"}, '
            'or train without --resume to start'
        )
    cfg.resume = checkpoint is not None
    if checkpoint is not None:
        cfg.load_from = checkpoint
    return warning


def check_start(cfg: Config) -> str:
    """Refuse a new run in the work dir of its ``load_from``, which it could overwrite.

    Returns:
        A warning if the work dir has checkpoints of an earlier run, else ''.
    """
    start = cfg.get('load_from') or ''
    if cfg.get('resume'):
        return ''
    if (
        start
        and '://' not in start
        and Path(start).resolve().parent == Path(cfg.work_dir).resolve()
    ):
        raise UserError(
            f'load_from {start!r} must be outside the work dir of the new run, which could '
            'overwrite it; name another one by --work-dir'
        )
    earlier = checkpoints_in(cfg.work_dir)
    if not earlier:
        return ''
    return (
        f'work_dir {str(cfg.work_dir)!r} has checkpoints of an earlier run; this new one replaces '
        'those of the same names; --work-dir DIR keeps them, and --resume with one of them, such '
        f'as {str(earlier[0])!r}, continues that run'
    )


def takes_maps(neck: nn.Module) -> bool:
    return any(type(part).__name__.endswith(('2d', 'Pooling')) for part in neck.modules())


def check_widths(config: Config, runner: Runner) -> None:
    """Refuse a neck, or else a head, that does not fit the outputs of an AFTViT backbone."""
    model = task_model(runner)
    backbone: Any = getattr(model, 'backbone', None)
    if type(backbone).__name__ != 'AFTViT':  # other backbones have a width per stage
        return
    neck = getattr(model, 'neck', None)
    if backbone.out_type == 'featmap' and neck is None and hasattr(model, 'head'):
        raise UserError(
            "model.backbone.out_type must be 'avg_featmap' or 'cls_token' for a "
            "classifier without a neck, got 'featmap'"
        )
    if backbone.out_type != 'featmap' and neck is not None and takes_maps(neck):
        raise UserError(
            f'model.neck must be None for model.backbone.out_type={backbone.out_type!r}, which '
            f"gives no maps as 'featmap' does, got {type(neck).__name__}"
        )
    heads = [name for name, _ in model.named_children() if name.endswith('head')]
    outputs = len(backbone.out_indices)
    for name in ['neck'] if neck else heads:
        given = getattr(getattr(model, name), 'in_channels', backbone.embed_dims)
        if set(given if isinstance(given, Sequence) else [given]) != {backbone.embed_dims}:
            raise UserError(
                f'{name}.in_channels must be {backbone.embed_dims}, the width of the '
                f'backbone, got {given}'
            )
        if neck and isinstance(given, Sequence) and len(given) != outputs:
            raise UserError(
                f'neck.in_channels must have one entry for each of the {outputs} out_indices of the '
                f'backbone, got {given}'
            )
    maps = getattr(neck, 'num_outs', np.inf) if neck else outputs
    for name in heads:
        index = getattr(getattr(model, name), 'in_index', 0)  # of mmseg's heads
        if not -maps <= np.max(index) < maps:
            raise UserError(
                f'model.{name}.in_index must be below {maps}, the number of maps of the '
                f'{"neck" if neck else "backbone"}, got {index}'
            )


def check_regularization(config: Config, runner: Runner) -> None:
    penalised = penalised_layers(runner.model)
    if penalised and not any(isinstance(hook, RegularizationHook) for hook in runner.hooks):
        raise UserError(
            "the model has a regularization_loss, as AFTConv(sparsity='entropy') does, but "
            "custom_hooks has no dict(type='aft_mm.RegularizationHook', weight=...) that adds it "
            'to the losses'
        )


def causal_mixers(runner: Runner) -> list[Any]:
    modules: Iterator[Any] = runner.model.modules()
    return [module for module in modules if hasattr(module, 'has_steps') and module.causal]


def check_steps(config: Config, runner: Runner) -> None:
    """Refuse a causal mixer without single steps, or warn if nothing samples."""
    causal = causal_mixers(runner)
    without = next((type(mixer).__name__ for mixer in causal if not mixer.has_steps), None)
    if without is None:
        return
    loop = type_name((runner.cfg.get('test_cfg') or {}).get('type'))
    samplers = [
        type(hook).__name__ for hook in runner.hooks if isinstance(hook, SampleVisualizationHook)
    ]
    samplers += [name for name in SAMPLING_LOOPS if name in loop]
    problem = f'{without} has no _init_state and _mix_step: the model cannot be sampled from'
    if samplers:
        raise UserError(f'{problem}, as {samplers[0]} of the config would')
    runner.logger.warning(problem)


def check_causal(config: Config, runner: Runner) -> None:
    """Refuse a causal mixer of the user that sees later tokens, or whose steps differ."""
    for kind, mixer in {type(mixer): mixer for mixer in causal_mixers(runner)}.items():
        if kind.__module__.startswith('aft_mm.'):
            continue
        state = random_state()
        try:
            problem = causal_problem(mixer, runner.seed or 0)
        except Exception as error:  # it may need other inputs than this trial gives
            reason = ' '.join(str(error).split())
            runner.logger.info(f'the mixer {kind.__name__} was not tried as causal: {reason:.200}')
            continue
        finally:
            set_random_state(state)
        if problem:
            raise UserError(
                f'the mixer {kind.__name__} must be causal with causal=True, {problem}; the '
                'tests of aft_mm.testing.MixerContract show more'
            )


@torch.no_grad()
def causal_problem(mixer: Any, seed: int) -> str:
    """Try a copy of a causal mixer on random tokens, and return what is wrong, if anything."""
    mixer = copy.deepcopy(mixer).float().eval()
    count = mixer.num_prefix_tokens + prod(mixer.grid or (FEW_TOKENS,))
    if not 1 < count <= MOST_TRIED:
        return ''
    torch.manual_seed(seed)
    for parameter in mixer.parameters():  # a 0 would hide an error
        nn.init.normal_(parameter, std=mixer.embed_dims**-0.5 if parameter.dim() > 1 else 0.5)
    device = next(mixer.parameters()).device
    x, other = torch.randn(2, 1, count, mixer.embed_dims).to(device)
    half = count // 2
    other[:, :half] = x[:, :half]

    def seeded(run: Callable[..., Any], *inputs: Any) -> Any:
        torch.manual_seed(seed)  # for mixers with random features
        return run(*inputs)

    y = seeded(mixer, x)
    most = TRIED_ERROR * float(y.abs().max())
    if float((seeded(mixer, other) - y)[:, :half].abs().max()) > most:
        return 'but later tokens change what it returns for earlier ones'
    if not mixer.has_steps:
        return ''
    # Without a prompt, an error is that of _mix_step.
    for length, methods in ((0, '_init_state and _mix_step'), (half, '_prefill')):
        lengths = torch.tensor([length], device=device)
        state = seeded(mixer.prefill, x[:, : length or 1], lengths)[1]
        y_t = seeded(mixer.step, x[:, length], state)[0]
        if float((y_t - y[:, length]).abs().max()) > most:
            return f'but a step after {length} tokens differs from the forward: see {methods}'
    return ''


def build_optimizer(config: Config, runner: Runner) -> None:
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)


def check_classes(config: Config, runner: Runner) -> None:
    trained = runner.train_loop.dataloader.dataset
    check_num_classes(task_model(runner), trained, 'training')
    if runner.val_loop is not None:
        validated = runner.val_loop.dataloader.dataset
        check_num_classes(task_model(runner), validated, 'validation')
        check_same_classes(trained, validated)
        check_topk(task_model(runner), runner.val_loop.evaluator, 'val')
        check_metrics(runner.val_loop.evaluator, 'val')


def check_test_classes(config: Config, runner: Runner) -> None:
    check_topk(task_model(runner), runner.test_loop.evaluator, 'test')
    check_metrics(runner.test_loop.evaluator, 'test')
    check_num_classes(task_model(runner), runner.test_loop.dataloader.dataset, 'test')


def check_num_classes(model: torch.nn.Module, dataset: Any, split: str) -> None:
    # ConcatDataset has the classes of its first data set.
    found = (info.get('classes') or info.get('units') or () for info in infos_of(dataset))
    classes = max(found, key=len)
    for name in ('head', 'bbox_head', 'decode_head', 'auxiliary_head', 'roi_head.bbox_head'):
        head: Any = model
        for part in name.split('.'):
            head = getattr(head, part, None)
        number = getattr(head, 'num_classes', None)
        if isinstance(number, int) and number < len(classes):
            raise UserError(
                f'model.{name}.num_classes must be at least {len(classes)}, the number '
                f'of classes of the {split} set, got {number}'
            )


def score_count(head: Any) -> int:
    """Return the number of scores of a head: many of mmdet have one for the background, too."""
    for layer in ('fc_cls', 'cls_embed'):
        if isinstance(number := getattr(getattr(head, layer, None), 'out_features', None), int):
            return number
    if 'BaseDecodeHead' in bases_of(head):
        return int(head.out_channels) + hasattr(head, 'match_masks')  # of SAN
    return int(getattr(head, 'cls_out_channels', head.num_classes))


def check_class_weights(config: Config, runner: Runner) -> None:
    """Refuse weights in the loss of a head that are not one for each score."""
    parts = dict(task_model(runner).named_modules())
    heads = [
        name
        for name, part in parts.items()
        if isinstance(getattr(part, 'num_classes', None), int)
        and not type(part).__name__.endswith('Loss')
    ]
    for name, loss in parts.items():
        head = next((head for head in reversed(heads) if name.startswith(f'{head}.')), None)
        if head is None or getattr(loss, 'use_mask', False):  # which weighs pixels
            continue
        number = score_count(parts[head])
        background = ' and one for the background' if number > parts[head].num_classes else ''
        for key in ('class_weight', 'pos_weight'):
            weights: Any = getattr(loss, key, None)
            given = np.shape(weights)
            is_one = given == (1,) and getattr(loss, 'use_sigmoid', False)
            if given and given != (number,) and not is_one:
                raise UserError(
                    f'{key} of {type(loss).__name__} in model.{head} must have {number} values, one '
                    f'per class{background}, got {given[0]}'
                )


def check_topk(model: torch.nn.Module, evaluator: Any, split: str) -> None:
    number = getattr(getattr(model, 'head', None), 'num_classes', None)
    for metric in evaluator.metrics:
        topk = getattr(metric, 'topk', None) or 0  # an int of multi-label metrics
        most = max(topk) if isinstance(topk, Sequence) else topk
        if isinstance(number, int) and most > number:
            raise UserError(
                f'topk of {type(metric).__name__} in {split}_evaluator must be at most {number}, '
                f'the number of classes, got {most}'
            )


def check_metrics(evaluator: Any, split: str) -> None:
    """Let the first batch refuse metrics of another task."""

    def first(
        metric: Any, process: Callable[..., None], data_batch: Any, data_samples: Any
    ) -> None:
        metric.process = process
        try:
            process(data_batch, data_samples)
        except UserError:
            raise
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            message, file, line = origin(error)
            reason = f'needs {message!r}' if isinstance(error, KeyError) else f'fails: {message}'
            sample = (
                data_samples[0] if isinstance(data_samples, list) and data_samples else 'nothing'
            )
            held = ', '.join(sorted(sample)) if isinstance(sample, dict) else sample
            raise UserError(
                f'{split}_evaluator must have metrics of samples with {held!s:.300}, got '
                f'{type(metric).__name__}, which {" ".join(reason.split())} ({file}:{line})'
            ) from error

    for metric in evaluator.metrics:
        metric.process = partial(first, metric, metric.process)


def check_same_classes(trained: Any, validated: Any) -> None:
    ours, theirs = (labels(infos_of(dataset)[0].get('classes')) for dataset in (trained, validated))
    if ours and theirs and ours != theirs:
        raise UserError(
            f'the training set has {len(ours)} classes and the validation set '
            f'{len(theirs)}, which must be the same in the same order: {difference(ours, theirs)}'
        )


def check_overlap(config: Config, runner: Runner) -> None:
    if runner.val_loop is None:
        return
    trained, tested = (loop.dataloader.dataset for loop in (runner.train_loop, runner.val_loop))
    if hasattr(trained, 'pairs') and hasattr(tested, 'pairs'):
        if max(len(trained), len(tested)) > MOST_COMPARED:
            return
        pairs = tested.pairs()
        again = len(pairs & trained.pairs())
        if again > MOST_AGAIN * len(pairs):  # short sentences come again in any text
            runner.logger.warning(
                f'{again:,} of the {len(pairs):,} pairs of the validation set are also in the training '
                'set: its metrics do not tell how the model does on new data'
            )
        return
    validated = sample_paths(tested)
    if not validated:
        return
    if both := sorted(validated & sample_paths(trained)):
        runner.logger.warning(
            f'{len(both)} of the {len(validated)} files of the validation set are also in the '
            f'training set, such as {both[0]!r}: its metrics do not tell how the model does on new data'
        )


def sample_paths(dataset: Any) -> set[str]:
    if not isinstance(dataset, BaseDataset) or not 0 < len(dataset) <= MOST_COMPARED:
        return set()
    # Samples that hold an image itself take longer to read.
    key = next((key for key in PATHS if key in dataset.get_data_info(0)), None)
    return {dataset.get_data_info(index)[key] for index in range(len(dataset))} if key else set()


def check_batch(config: Config, runner: Runner) -> None:
    loader = runner.train_loop.dataloader
    samples = len(loader.dataset)
    if samples and not len(loader):
        size = runner.cfg.train_dataloader.get('batch_size')
        raise UserError(
            f'train_dataloader.batch_size must be small enough for one batch of the {samples} '
            f'samples of the training set on every process, as drop_last leaves out the rest, '
            f'got {size}'
        )


def shortened_warmup(schedules: Any, iterations: int, epochs: int) -> list[dict] | None:
    """Return a warm-up of a tenth of the iterations if the run would end within it, else None.

    There is none below 20 iterations: mmengine's LinearLR of one iteration keeps its first rate.
    """
    if not isinstance(schedules, list) or len(schedules) != 2:
        return None
    first, then = schedules
    begin = then.get('begin', 0)
    length = epochs if then.get('by_epoch', True) else iterations
    # Numbers in the unit that would change.
    fixed = {'T_max', 'milestones', 'step_size', 'gamma', 'periods', 'total_steps'} & then.keys()
    in_order = first.get('begin', 0) == 0 and first.get('end') == begin and not fixed
    if begin < length or not in_order or iterations < 2:
        return None
    end = iterations // 10 if iterations >= 20 else 0
    parts = []
    for entry, start, stop in ((first, 0, end), (then, end, iterations))[end == 0 :]:
        parts.append({**entry, 'by_epoch': False, 'begin': start, 'end': stop})
        parts[-1].pop('convert_to_iter_based', None)
    return parts


def check_schedule(config: Config, runner: Runner) -> None:
    """Shorten a warm-up that is longer than the run; refuse other schedules after its end."""
    schedules = runner.param_schedulers or []
    shorter = shortened_warmup(schedules, runner.max_iters, runner.max_epochs)
    if shorter is not None:
        runner.param_schedulers = shorter
        runner.logger.warning(
            'the warm-up of param_scheduler is longer than the run; it is shortened to '
            f'{shorter[-1]["begin"]} of {runner.max_iters} iterations'
        )
        return
    if isinstance(schedules, dict):
        parts = [schedules] if 'type' in schedules else schedules.values()  # of several optimizers
        lists = (part if isinstance(part, list) else [part] for part in parts)
        schedules = [*itertools.chain(*lists)]
    for number, schedule in enumerate(schedules, 1):
        kind, by_epoch = type_name(schedule.get('type')), schedule.get('by_epoch', True)
        # ReduceOnPlateau steps after a validation.
        is_stepped = 'ReduceOnPlateau' not in kind
        counts_epochs = by_epoch and not schedule.get('convert_to_iter_based') and is_stepped
        if counts_epochs and isinstance(runner.train_loop, IterBasedTrainLoop):
            raise UserError(
                f'{kind} of param_scheduler must have by_epoch=False, with begin, '
                'end and milestones in iterations, as train_cfg counts iterations'
            )
        length = runner.max_epochs if by_epoch else runner.max_iters
        begin, end = schedule.get('begin', 0), schedule.get('end', length)
        unit = 'epoch' if by_epoch else 'iteration'
        if begin >= end:
            raise UserError(
                f'{kind} of param_scheduler begins at {unit} {begin} and ends at '
                f'{unit} {end}, by default the end of the run; train longer, or '
                'at a constant rate with --cfg-options param_scheduler=None'
            )
        is_warmup = begin == 0 and kind.endswith(('LinearLR', 'ConstantLR'))
        if number == len(schedules) and end != length and not is_warmup:
            runner.logger.warning(
                f'{kind} of param_scheduler ends at {unit} {end}, but the run at '
                f'{length}; its end should change with the length of the run'
            )


def check_checkpoints(cfg: Config, runner: Runner) -> None:
    """Refuse checkpoints after epochs of a loop that counts iterations, whose epoch is the run."""
    if isinstance(runner.train_loop, IterBasedTrainLoop):
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook) and hook.by_epoch:
                raise UserError(
                    'the checkpoint hook must have by_epoch=False, with interval in iterations, '
                    'as train_cfg counts iterations'
                )


TRAIN_CHECKS: Sequence[Check] = (
    check_widths,
    check_strides,
    check_regularization,
    check_steps,
    check_causal,
    build_optimizer,
    check_classes,
    check_class_weights,
    check_overlap,
    check_batch,
    check_schedule,
    check_checkpoints,
)
TEST_CHECKS: Sequence[Check] = (check_widths, check_test_classes)
