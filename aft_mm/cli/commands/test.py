"""Test a checkpoint with the metrics of a config file."""

import argparse

import mmengine
from mmengine.config import Config, ConfigDict
from mmengine.evaluator import DumpResults

from aft_mm.cli.allocator import keep_freed_memory
from aft_mm.cli.arguments import check_output
from aft_mm.cli.command_line import (
    CONFIG_ERRORS,
    DATA_ERRORS,
    check_checkpoint,
    check_data,
    check_torchvision,
    check_widths,
    load_config,
)
from aft_mm.cli.config_checks import check_classes
from aft_mm.cli.runs import whole_run
from aft_mm.engine import CheckpointFitHook, build_runner
from aft_mm.errors import UserError, one_sentence
from aft_mm.ops.dispatch import BackendError, requested_backends


def apply_args(cfg: Config, args: argparse.Namespace) -> None:
    """Write the arguments of testing into the config."""
    cfg.load_from = args.checkpoint
    cfg.resume = False
    for option, suffix in (('out', '.json'), ('dump', '.pkl')):
        path = getattr(args, option)
        if path:
            check_output(f'--{option}', path, (suffix,))
    if cfg.get('test_cfg') is None:
        raise UserError(f'testing needs test_cfg, which may be empty, in {args.config}')
    if args.amp:
        cfg.test_cfg.fp16 = True
    if args.tta:
        if not (cfg.get('tta_model') and cfg.get('tta_pipeline')):
            raise UserError(
                f'--tta needs tta_model and tta_pipeline in {args.config}, because not '
                'every task allows the same augmentation'
            )
        cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
        cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
        # A checkpoint's state_dict already holds the averaged weights, and mmpretrain's EMAHook
        # cannot load into a model that is wrapped for augmentation.
        cfg.custom_hooks = [
            hook for hook in cfg.get('custom_hooks', []) if not hook.type.endswith('EMAHook')
        ]


def test(args: argparse.Namespace) -> None:
    """Check what there is to check, then test."""
    with one_sentence(ValueError):
        requested_backends()
        keep_freed_memory()
    with one_sentence(*CONFIG_ERRORS):
        check_torchvision()
        cfg = load_config(args)
        apply_args(cfg, args)
        check_checkpoint(args.checkpoint)
        check_data(cfg, 'test')
        runner = build_runner(cfg)
        check_widths(runner.model)
    with one_sentence(*DATA_ERRORS):
        check_classes(runner.model, runner.test_loop.dataloader.dataset, 'test')
        if args.dump:
            runner.test_evaluator.metrics.append(DumpResults(out_file_path=args.dump))
    with one_sentence(BackendError):
        runner.register_hook(CheckpointFitHook())
        metrics = runner.test()
    if args.out and runner.rank == 0:
        mmengine.dump(metrics, args.out)


def main(args: argparse.Namespace) -> None:
    with whole_run():
        test(args)
