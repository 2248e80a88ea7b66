"""What the tools share."""

import argparse
import importlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, ConfigDict
from mmengine.runner import Runner
from torch import nn

from aft_mm.checkpoint import latest_checkpoint
from aft_mm.checks import check_int
from aft_mm.engine.distributed import start_distributed
from aft_mm.engine.hooks import RegularizationHook
from aft_mm.errors import UserError

from .config_checks import check_boxes, check_images, check_keys, check_settings
from .config_files import find_config
from .library_warnings import pass_over

#: What goes wrong when a config with a mistake is turned into objects.
CONFIG_ERRORS = (TypeError, ValueError, KeyError, AssertionError, OSError, SyntaxError)
#: The libraries, as scopes, that come with `make downstream` only.
DOWNSTREAM = ('mmdet', 'mmseg')
#: What goes wrong when a data set is built; mmpretrain says with a RuntimeError that it is empty.
DATA_ERRORS = (*CONFIG_ERRORS, RuntimeError, EOFError)


def configured(args: argparse.Namespace) -> Config:
    """The config of ``args.config`` with ``args.cfg_options``.

    Raises:
        UserError: it cannot be read, an entry is misspelt, or an option changes nothing.
    """
    cfg = read_config(args.config)
    try:
        check_keys(cfg, args.cfg_options)
        cfg.merge_from_dict(args.cfg_options)
    except (AttributeError, KeyError, TypeError, AssertionError, IndexError) as error:
        raise UserError(f'--cfg-options do not fit {args.config!r}: {error}') from error
    return cfg


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of ``AutoregressiveModel.generate`` among the arguments."""
    options = {
        name: getattr(args, name) for name in ('temperature', 'top_k', 'top_p', 'greedy', 'seed')
    }
    return {**options, 'compiled': args.compile}


def load_sampled_config(args: argparse.Namespace) -> Config:
    """The config of a tool that draws from a model, with ``--cfg-options``.

    Raises:
        UserError: config or checkpoint do not exist.
    """
    config = configured(args)
    check_checkpoint(args.checkpoint)
    return config


def numbered(path: str, num: int) -> list[str]:
    """Names of ``num`` files: ``path`` itself for one, ``a-1.png``, ``a-2.png``, … for several."""
    stem, suffix = os.path.splitext(path)
    return [path] if num == 1 else [f'{stem}-{i + 1}{suffix}' for i in range(num)]


def check_torchvision() -> None:
    """Import torchvision, which fails beside a torch that it was not built for.

    Raises:
        UserError: the installed pair does not work.
    """
    try:
        importlib.import_module('torchvision')
    except (ImportError, RuntimeError) as error:
        version = next((found.version for found in distributions(name='torchvision')), '(none)')
        raise UserError(
            f'torch {torch.__version__} and torchvision {version} do not work together ({error}); '
            'install a matching pair, such as torch 2.11.0 with torchvision 0.26.0'
        ) from error


def load_config(args: argparse.Namespace) -> Config:
    """Read ``args.config``, apply the shared arguments and start the process group.

    Raises:
        UserError: the config file does not exist, or what it is written for is missing.
    """
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = configured(args)
    check_settings(cfg)
    cfg.launcher = args.launcher
    cfg.work_dir = (
        args.work_dir or cfg.get('work_dir') or os.path.join('work_dirs', Path(cfg.filename).stem)
    )
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        if cfg.get(name) and cfg[name].get('num_workers') == 0:
            cfg[name].persistent_workers = False  # torch refuses the pair
    start_distributed(cfg)
    return cfg


def protect(cfg: Config) -> None:
    """Have every training write its checkpoints whole and stop before a loss that is no number.

    mmengine's CheckpointHook, which is also the one of a config that names none, becomes
    SafeCheckpointHook with the same options.
    """
    if cfg.get('default_hooks') is None:
        cfg.default_hooks = {}
    hooks = cfg.default_hooks
    if 'checkpoint' not in hooks:
        hooks.checkpoint = dict(type='CheckpointHook', interval=1)
    if hooks.checkpoint and hooks.checkpoint.type in ('CheckpointHook', 'mmengine.CheckpointHook'):
        hooks.checkpoint.type = 'aft_mm.SafeCheckpointHook'
    finite = 'aft_mm.FiniteLossHook'
    if not any(
        hook and hook.get('type') == finite
        for hook in (*hooks.values(), *cfg.get('custom_hooks', []))
    ):
        hooks.finite_loss = dict(type=finite)


def choose_checkpoint(cfg: Config) -> str:
    """For ``--resume`` without a name write the newest whole checkpoint of the work dir into
    ``cfg``.

    Returns:
        A sentence for the log if it is not the one that ``last_checkpoint`` names, or '' .

    Raises:
        UserError: there are no checkpoints, or none is whole.
    """
    if not cfg.get('resume') or cfg.get('load_from'):
        return ''
    cfg.load_from, remark = latest_checkpoint(cfg.work_dir)
    if cfg.load_from is None:
        raise UserError(
            f'--resume finds no checkpoint in {str(cfg.work_dir)!r}; name the '
            '--work-dir of the run, or train without --resume to begin'
        )
    return remark


def read_config(path: str) -> Config:
    """A config file, or one of ours by its name, as it is, which is a program.

    Raises:
        UserError: ``path`` is no Python file, it is written for mmdet or mmseg and they are
            missing, or it fails as it is read.
    """
    path = find_config(path)
    pass_over()
    try:
        with _quotable_data_folder():
            cfg = Config.fromfile(path)
        if cfg.get('default_scope') in DOWNSTREAM:  # else a type would only be called unknown
            importlib.import_module(f'{cfg.default_scope}.models')
    except ImportError as error:
        if not any(name in str(error) for name in (*DOWNSTREAM, 'mmcv')):
            raise UserError(
                f'config {path!r} imports what is missing: {error.__cause__ or error}'
            ) from error
        raise UserError(
            f'config {path!r} needs mmdet and mmseg with the compiled mmcv ({error}), which '
            '`make downstream` installs'
        ) from error
    except RecursionError as error:
        raise UserError(f'config {path!r} has itself among its _base_') from error
    except Exception as error:  # a config is a program, and may raise anything
        reason = ' '.join(str(error).split())
        raise UserError(
            f'config {path!r} cannot be read ({type(error).__name__}: {reason})'
        ) from error
    return cfg


@contextmanager
def _quotable_data_folder() -> Iterator[None]:
    """AFT_MM_DATA as it has to stand between quotes, where mmengine pastes it into the program.

    It pastes as ``re.sub`` does, for which every backslash is written twice.
    """
    folder = os.environ.get('AFT_MM_DATA')
    if folder is None:
        yield
        return
    escaped = re.sub(r'([\\\'"])', r'\\\1', folder).replace('\n', '\\n')
    os.environ['AFT_MM_DATA'] = escaped.replace('\\', '\\\\')
    try:
        yield
    finally:
        os.environ['AFT_MM_DATA'] = folder


def check_widths(model: nn.Module) -> None:
    """Refuse a neck of another width than AFTViT, or heads of such where there is no neck.

    Raises:
        UserError: its ``in_channels`` are others.
    """
    model = getattr(model, 'module', model)  # the one that a distributed run wraps
    backbone = getattr(model, 'backbone', None)
    if type(backbone).__name__ != 'AFTViT':  # other backbones have a width per stage
        return
    neck = getattr(model, 'neck', None)
    if backbone.out_type == 'featmap' and neck is None and hasattr(model, 'head'):
        raise UserError(
            "model.backbone.out_type must be 'avg_featmap' or 'cls_token' for a "
            "classifier without a neck, got 'featmap'"
        )
    heads = [name for name, _ in model.named_children() if name.endswith('head')]
    for name in ['neck'] if neck else heads:
        given = getattr(getattr(model, name), 'in_channels', backbone.embed_dims)
        if set(given if isinstance(given, Sequence) else [given]) != {backbone.embed_dims}:
            raise UserError(
                f'{name}.in_channels must be {backbone.embed_dims}, the width of the '
                f'backbone, got {given}'
            )


def check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint file that is not there, before anything is built.

    Raises:
        UserError: ``path`` is neither a file nor an address.
    """
    if path and '://' not in path and not os.path.isfile(os.path.expanduser(path)):
        raise UserError(f'checkpoint {path!r} does not exist')


def check_data(cfg: Config, *splits: str) -> None:
    """Look for the folders and files that the data sets of ``splits`` are read from.

    Raises:
        UserError: one is missing or an empty folder, or a batch is no number of samples.
    """
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        if loader:
            _check_dataset(loader.dataset, f'{split}_dataloader.dataset')
            if 'batch_size' in loader:
                check_int(f'{split}_dataloader.batch_size', loader.batch_size, 1)


def _check_dataset(dataset: ConfigDict, key: str) -> None:
    if 'dataset' in dataset:  # a wrapper, such as RepeatDataset
        _check_dataset(dataset.dataset, f'{key}.dataset')
    for index, part in enumerate(dataset.get('datasets', ())):
        _check_dataset(part, f'{key}.datasets.{index}')
    if dataset.get('download'):
        return
    root = dataset.get('data_root') or ''
    prefix = dataset.get('data_prefix') or ''
    if not prefix and dataset.type.endswith('ImageNet'):
        prefix = dataset.get('split') or ''
    prefixes = prefix.values() if isinstance(prefix, dict) else [prefix]
    files = [dataset.get(name) or '' for name in ('data_file', 'source_file', 'target_file')]
    # A text that is compressed is read in place of the file.
    files = [
        f'{path}.gz' if path and not os.path.exists(path) and os.path.exists(f'{path}.gz') else path
        for path in files
    ]
    for place in [
        root,
        *(os.path.join(root, path) for path in prefixes),
        os.path.join(root, dataset.get('ann_file') or ''),
        *files,
    ]:
        if not place or '://' in place:
            continue
        missing = not os.path.exists(place)
        if missing or (os.path.isdir(place) and not os.listdir(place)):
            raise UserError(
                f'{key} reads {place!r}, which {"does not exist" if missing else "is empty"}; put '
                'the data there or set AFT_MM_DATA '
                f'(now {os.environ.get("AFT_MM_DATA", "data")!r}) to the folder that holds the '
                'data sets'
            )
    if isinstance(prefix, str):
        check_images(key, os.path.join(root, prefix), dataset)
    check_boxes(key, root, dataset)


def log_backends(runner: Runner) -> None:
    """Let the log of the run say which backend serves which op: once each, on the first rank."""
    ops = logging.getLogger('aft_mm.ops')
    ops.setLevel(logging.INFO)
    ops.handlers = list(runner.logger.handlers)


def check_batch(runner: Runner) -> None:
    """Refuse a batch that the training set cannot fill; ``runner`` has its train loop.

    Raises:
        UserError: the training set has samples, but an epoch has no iteration.
    """
    loader = runner.train_loop.dataloader
    samples = len(loader.dataset)
    if samples and not len(loader):
        size = runner.cfg.train_dataloader.get('batch_size')
        raise UserError(
            f'train_dataloader.batch_size must be small enough for one batch of the {samples} '
            f'samples of the training set on every process, as drop_last leaves out the rest, but '
            f'got {size}'
        )


def check_schedule(runner: Runner) -> None:
    """Refuse a schedule that would begin when the run has ended; ``runner`` has its train loop.

    Raises:
        UserError: an entry of ``param_scheduler`` begins at its end or later.
    """
    schedules = runner.param_schedulers or []
    for schedule in [schedules] if isinstance(schedules, dict) else schedules:
        by_epoch = schedule.get('by_epoch', True)
        length = runner.max_epochs if by_epoch else runner.max_iters
        begin, end = schedule.get('begin', 0), schedule.get('end', length)
        if begin >= end:
            unit = 'epoch' if by_epoch else 'iteration'
            raise UserError(
                f'{schedule.get("type")} of param_scheduler begins at {unit} {begin} and ends at '
                f'{unit} {end}, which is where the run ends unless it is given; train longer, or '
                'at a constant rate with --cfg-options param_scheduler=None'
            )


def check_regularization(runner: Runner) -> None:
    """Refuse a penalty that a layer has and nobody adds to the loss.

    Raises:
        UserError: the model has a ``regularization_loss``, but there is no RegularizationHook.
    """
    penalised = any(
        hasattr(layer, 'regularization_loss') and layer.regularization_loss() is not None
        for layer in runner.model.modules()
    )
    if penalised and not any(isinstance(hook, RegularizationHook) for hook in runner.hooks):
        raise UserError(
            "the model has a regularization_loss, as AFTConv(sparsity='entropy') does, but "
            "custom_hooks has no dict(type='aft_mm.RegularizationHook', weight=...) that adds it "
            'to the losses'
        )
