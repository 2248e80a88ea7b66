"""Train a model from a config file."""

import argparse

from mmengine.config import Config

from aft_mm.cli.allocator import keep_freed_memory
from aft_mm.cli.command_line import (
    CONFIG_ERRORS,
    DATA_ERRORS,
    check_batch,
    check_checkpoint,
    check_data,
    check_regularization,
    check_schedule,
    check_torchvision,
    check_widths,
    choose_checkpoint,
    load_config,
    log_backends,
    protect,
)
from aft_mm.cli.config_checks import check_classes, check_same_classes, check_steps
from aft_mm.cli.runs import Run, whole_run
from aft_mm.engine import CheckpointFitHook, ResumeCheckHook, ValidateFirstHook, build_runner
from aft_mm.errors import UserError, one_sentence
from aft_mm.ops.dispatch import BackendError, requested_backends


def apply_args(cfg: Config, args: argparse.Namespace) -> None:
    """Write the arguments of training into the config."""
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.amp:
        cfg.optim_wrapper.type = 'aft_mm.AutocastOptimWrapper'
    if args.resume:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    if args.auto_scale_lr:
        if not (cfg.get('auto_scale_lr') or {}).get('base_batch_size'):
            raise UserError(f'--auto-scale-lr needs auto_scale_lr.base_batch_size in {args.config}')
        cfg.auto_scale_lr.enable = True


def train(args: argparse.Namespace, run: Run) -> None:
    """Check what there is to check, then train; ``run`` ends it when a signal says so."""
    with one_sentence(ValueError):
        requested_backends()
        keep_freed_memory()
    with one_sentence(*CONFIG_ERRORS):
        check_torchvision()
        cfg = load_config(args)
        apply_args(cfg, args)
        protect(cfg)
        remark = choose_checkpoint(cfg)
        check_checkpoint(cfg.get('load_from'))
        check_data(cfg, 'train', 'val')
        runner = build_runner(cfg)
        check_widths(runner.model)
        check_regularization(runner)
        check_steps(runner)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    with one_sentence(*DATA_ERRORS):
        # Builds the data sets.
        trained = runner.train_loop.dataloader.dataset
        check_classes(runner.model, trained, 'training')
        if runner.val_loop is not None:
            validated = runner.val_loop.dataloader.dataset
            check_classes(runner.model, validated, 'validation')
            check_same_classes(trained, validated)
        check_batch(runner)
        check_schedule(runner)
    with one_sentence(BackendError):
        if remark:
            runner.logger.warning(remark)
        resume = cfg.get('resume', False)
        if resume or cfg.get('load_from'):
            runner.register_hook(CheckpointFitHook(strict=resume, resume=resume))
        if resume:
            runner.register_hook(ResumeCheckHook())
            runner.register_hook(ValidateFirstHook())
        run.watch(runner)
        log_backends(runner)
        runner.train()


def main(args: argparse.Namespace) -> None:
    with whole_run(args.words) as run:
        train(args, run)
