"""Test a checkpoint with the metrics of a config file."""

import argparse
import os
from contextlib import ExitStack

import mmengine
from mmengine.config import Config, ConfigDict
from mmengine.evaluator import DumpResults

from aft_mm.analysis.training_summary import class_lines
from aft_mm.checkpoint import averaged
from aft_mm.config.reading import check_data
from aft_mm.engine import CheckpointCompatibilityHook, build_runner, load_run_config, run_guard
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.engine.by_class import add_by_class
from aft_mm.engine.preflight import TEST_CHECKS, check_torchvision
from aft_mm.errors import CONFIG_ERRORS, DATA_ERRORS, UserError, user_errors
from aft_mm.hosts import quiet_pycocotools
from aft_mm.ops.dispatch import BackendError, requested_backends
from aft_mm.outputs import check_output
from aft_mm.visualization.figures import literal_text


def apply_args(cfg: Config, args: argparse.Namespace) -> None:
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
                f'--tta needs tta_model and tta_pipeline in {args.config}, because tasks '
                'allow different augmentations'
            )
        cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
        cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
        # The state_dict holds averaged weights, and mmpretrain's EMAHook cannot load into a wrapper.
        cfg.custom_hooks = [
            hook for hook in cfg.get('custom_hooks') or () if not hook.type.endswith('EMAHook')
        ]


def test(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        requested_backends()
        keep_freed_memory()
        check_torchvision()
        cfg = load_run_config(args)
        if args.work_dir is None:  # a test dumps its config, too
            cfg.work_dir = os.path.join(cfg.work_dir, 'test')
        apply_args(cfg, args)
        check_data(cfg, 'test')
        if cfg.get('default_scope') == 'mmdet':
            quiet_pycocotools()
        runner = build_runner(cfg)
    with user_errors(*DATA_ERRORS):
        for check in TEST_CHECKS:
            check(cfg, runner)
        add_by_class(runner.test_loop)
        if args.dump:
            runner.test_evaluator.metrics.append(DumpResults(out_file_path=args.dump))
    with user_errors(BackendError):
        runner.register_hook(CheckpointCompatibilityHook())
        with literal_text():  # in the pictures of hooks
            metrics = runner.test()
    if runner.rank == 0:
        if args.out:
            mmengine.dump(metrics, args.out)
        for name, line in class_lines(runner.message_hub.runtime_info).items():
            print(f'{name:11}{line}')


def run(args: argparse.Namespace) -> None:
    with run_guard(), ExitStack() as stack:
        with user_errors(*DATA_ERRORS):
            weights = averaged(args.checkpoint, args.average)
            args.checkpoint = stack.enter_context(weights)
        test(args)
