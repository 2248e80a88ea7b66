"""Train a model from a config file."""

import argparse
import logging

from mmengine.config import Config
from mmengine.runner import Runner

from aft_mm.cli.parsers import LATEST
from aft_mm.config.reading import check_checkpoint, check_data
from aft_mm.engine import (
    CheckpointCompatibilityHook,
    ResumeCheckHook,
    ValidateFirstHook,
    apply_safe_defaults,
    build_runner,
    load_run_config,
    run_guard,
)
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.engine.open_files import share_tensors_by_name
from aft_mm.engine.preflight import TRAIN_CHECKS, check_torchvision, choose_checkpoint
from aft_mm.engine.run_guard import Run
from aft_mm.errors import CONFIG_ERRORS, DATA_ERRORS, UserError, user_errors
from aft_mm.ops.dispatch import BackendError, requested_backends


def apply_args(cfg: Config, args: argparse.Namespace) -> None:
    """Apply the arguments of the command to the config."""
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.amp:
        cfg.optim_wrapper.type = 'aft_mm.AutocastOptimWrapper'
    if args.resume:
        cfg.resume = 'auto' if args.resume == 'auto' else True
        if args.resume != 'auto':
            cfg.load_from = None if args.resume == LATEST else args.resume
    if args.auto_scale_lr:
        if not (cfg.get('auto_scale_lr') or {}).get('base_batch_size'):
            raise UserError(f'--auto-scale-lr needs auto_scale_lr.base_batch_size in {args.config}')
        cfg.auto_scale_lr.enable = True


def train(args: argparse.Namespace, run: Run) -> None:
    """Build the runner, check it, then train; ``run`` stops it at a signal."""
    with user_errors(ValueError):
        requested_backends()
        keep_freed_memory()
        share_tensors_by_name()
    with user_errors(*CONFIG_ERRORS):
        check_torchvision()
        cfg = load_run_config(args)
        apply_args(cfg, args)
        apply_safe_defaults(cfg)
        warning = choose_checkpoint(cfg)
        check_checkpoint(cfg.get('load_from'))
        check_data(cfg, 'train', 'val')
        runner = build_runner(cfg)
    with user_errors(*DATA_ERRORS):
        for check in TRAIN_CHECKS:
            check(cfg, runner)
    with user_errors(BackendError):
        if warning:
            runner.logger.warning(warning)
        resume = cfg.get('resume', False)
        if resume or cfg.get('load_from'):
            runner.register_hook(CheckpointCompatibilityHook(strict=resume, resume=resume))
        if resume:
            runner.register_hook(ResumeCheckHook())
        run.watch(runner)
        runner.register_hook(ValidateFirstHook())  # after all hooks that find the position
        log_backends(runner)
        runner.train()


def log_backends(runner: Runner) -> None:
    """Log which backend each op uses: once per op, on the first rank."""
    ops = logging.getLogger('aft_mm.ops')
    ops.setLevel(logging.INFO)
    ops.handlers = list(runner.logger.handlers)


def main(args: argparse.Namespace) -> None:
    with run_guard(args.argv) as run:
        train(args, run)
