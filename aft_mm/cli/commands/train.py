import argparse
import io
import logging
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.hooks import CheckpointHook
from mmengine.runner import IterBasedTrainLoop, Runner

from aft_mm.analysis.collect_runs import origin
from aft_mm.analysis.networks import has_one_label
from aft_mm.analysis.run_logs import read_scalars, trained, validated_metrics
from aft_mm.analysis.training_summary import SHARES, Summary, class_lines, summarize
from aft_mm.apis.loading import COMMANDS, task_of
from aft_mm.checkpoint import load_from_local
from aft_mm.checks import counted
from aft_mm.cli.arguments import LATEST
from aft_mm.cli.main import main
from aft_mm.config.finding import check_checkpoint, configs_by_name
from aft_mm.config.reading import DOWNSTREAM, check_data
from aft_mm.config.texts import type_name
from aft_mm.engine import (
    CheckpointCompatibilityHook,
    ResumeCheckHook,
    Stopped,
    ValidateFirstHook,
    apply_safe_defaults,
    build_runner,
    load_run_config,
    run_guard,
)
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.engine.by_class import add_by_class
from aft_mm.engine.denormals import denormals_as_zero
from aft_mm.engine.preflight import TRAIN_CHECKS, check_start, check_torchvision, choose_checkpoint
from aft_mm.engine.run_guard import FILE_ONLY, Run, without_options
from aft_mm.engine.runner import task_model
from aft_mm.errors import CONFIG_ERRORS, DATA_ERRORS, UserError, user_errors
from aft_mm.hosts import quiet_pycocotools
from aft_mm.ops.dispatch import BackendError, requested_backends
from aft_mm.visualization.figures import literal_text

#: Words for the units in the names of checkpoints.
UNITS = dict(epoch='epoch', iter='iteration')
#: Options that do not change the result.
OF_ONE_RUN = ('--resume', '--work-dir', '--launcher', '--local-rank', '--local_rank')
#: Entries of a config that matter to the training only.
OF_TRAINING = frozenset(
    {
        *('train_cfg', 'train_dataloader', 'val_cfg', 'val_dataloader', 'val_evaluator'),
        *('optim_wrapper', 'param_scheduler'),
        *('default_hooks', 'custom_hooks', 'randomness', 'env_cfg', 'auto_scale_lr', 'compile'),
        *('load_from', 'resume', 'work_dir', 'log_level', 'visualizer', 'experiment_name'),
    }
)
#: Size of a validation set up to which its confusion matrix is plotted.
MOST_CLASSIFIED = 10_000


def apply_args(cfg: Config, args: argparse.Namespace) -> None:
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    wrapper = cfg.get('optim_wrapper') or {}
    if args.amp:
        if 'optimizer' not in wrapper:
            raise UserError(
                'optim_wrapper must have one optimizer with --amp, which sets the type of its wrapper, '
                f'got {", ".join(wrapper) or "none"}'
            )
        cfg.optim_wrapper.type = 'aft_mm.AutocastOptimWrapper'
    elif type_name(wrapper.get('type')).endswith('AmpOptimWrapper'):
        if get_device() in ('cpu', 'mps'):
            raise UserError(
                f'optim_wrapper.type must be OptimWrapper on {get_device()}, or be set by --amp, which '
                f'computes in bfloat16 on any device, got {type_name(cfg.optim_wrapper.type)!r}, which needs CUDA'
            )
    if args.resume is not None:
        cfg.resume = 'auto' if args.resume == 'auto' else True
        if args.resume != 'auto':
            cfg.load_from = None if args.resume == LATEST else args.resume
    if args.auto_scale_lr:
        if not (cfg.get('auto_scale_lr') or {}).get('base_batch_size'):
            raise UserError(f'--auto-scale-lr needs auto_scale_lr.base_batch_size in {args.config}')
        cfg.auto_scale_lr.enable = True


@denormals_as_zero()
def train(args: argparse.Namespace, run: Run) -> None:
    with user_errors(*CONFIG_ERRORS):
        requested_backends()
        keep_freed_memory()
        check_torchvision()
        cfg = load_run_config(args)
        apply_args(cfg, args)
        apply_safe_defaults(cfg)
        warning = choose_checkpoint(cfg) or check_start(cfg)
        check_checkpoint(cfg.get('load_from'))
        check_data(cfg, 'train', 'val')
        if cfg.get('default_scope') == 'mmdet':
            quiet_pycocotools()
        run.claim(cfg.work_dir, cfg.launcher)
        runner = build_runner(cfg)
        # In every checkpoint, for published weights.
        runner.message_hub.update_info('command', command_of(args))
    with user_errors(*DATA_ERRORS):
        for check in TRAIN_CHECKS:
            check(cfg, runner)
        add_by_class(runner.val_loop)
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
        runner.logger.info(origin(), extra=FILE_ONLY)
        try:
            with literal_text():  # in the pictures of hooks
                runner.train()
        except Stopped:
            report(runner, args, stopped=True)
            raise
    report(runner, args, stopped=run.signals.received is not None)


def command_of(args: argparse.Namespace) -> str:
    """Return the command with the options that change the result, and the config's file name."""
    words = without_options(args.argv, *OF_ONE_RUN)
    name = Path(args.config).name
    words = [name.removesuffix('.py') if Path(word).name == name else word for word in words]
    return shlex.join(['aft_mm', 'train', *words])


def whole_config(runner: Runner) -> str:
    """Return the path of the config in the work dir, which has the options of the command."""
    return os.path.relpath(os.path.join(runner.work_dir, os.path.basename(runner.cfg.filename)))


def report(runner: Runner, args: argparse.Namespace, stopped: bool = False) -> None:
    """Judge the training, plot it unless it was stopped, and name its checkpoint and the next command."""
    hook: Any = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
    names = getattr(hook, 'key_indicators', [])
    if several := len(names) > 1:  # the first metric of save_best counts
        best = hook.best_ckpt_path_dict.get(names[0])
    else:
        best = getattr(hook, 'best_ckpt_path', None)
    checkpoint = best or runner.message_hub.get_info('last_ckpt')
    if not checkpoint or runner.rank:
        return
    lines, metric = {}, ''
    try:
        records = read_scalars(runner.work_dir)
    except UserError:  # no visual backend writes one
        records = []
    losses = trained(records, 'loss')
    curves = ['--group', '/'.join(Path(runner.work_dir).parts[-2:]), runner.work_dir]
    score = runner.message_hub.get_info(f'best_score_{names[0]}' if several else 'best_score', None)
    if best and score is not None:
        # Not with any filename_tmpl; a name has _ instead of /.
        named = re.search(r'best_(.+)_(epoch|iter)_(\d+)\.pth$', str(best))
        when = f' at {UNITS[named[2]]} {named[3]}' if named else ''
        metric = names[0]
        if metric != 'auto':  # which a resumed run without a validation has not replaced
            shown = [metric] if metric.startswith('bits_per_') or not losses else [metric, 'loss']
            curves += [word for name in shown for word in ('--metric', name)]
        elif named:
            metric = named[1]
        lines['best'] = f'{metric} {float(score):.4g}{when}'
    lines['checkpoint'] = os.path.relpath(checkpoint)
    summary = summary_of(runner, records, hook, metric)
    lines |= summary.sentences
    scope = runner.cfg.get('default_scope')
    if scope in DOWNSTREAM:
        # The last validation is not that of the best checkpoint.
        hub = load_from_local(best).get('message_hub') or {} if best else {}
        lines |= class_lines(hub.get('runtime_info') or runner.message_hub.runtime_info)
    if not stopped:
        if len(losses) > 1 or sum('iter' not in record for record in records) > 1:  # else a dot
            lines['curves'] = plot('curves', *curves, out=f'{runner.work_dir}/curves.png')
        classifies = scope == 'mmpretrain' and has_one_label(task_model(runner))
        if classifies and runner.val_loop is not None:
            if len(runner.val_loop.dataloader.dataset) <= MOST_CLASSIFIED:
                lines['confusion'] = plot(
                    *('confusion', whole_config(runner), checkpoint, '--split', 'val'),
                    out=f'{runner.work_dir}/confusion.png',
                )
        ours = configs_by_name().get(Path(args.config).stem) == Path(args.config)
        config = Path(args.config).stem if ours else args.config
        if summary.step:
            lines['advice'] = advice(summary.step, runner, config)
        use, more = next_command(runner.cfg)
        if {key.partition('.')[0] for key in args.cfg_options or {}} - OF_TRAINING:
            config = whole_config(runner)
        lines['next'] = (
            f'{shlex.join(["aft_mm", use, config, lines["checkpoint"]])} {more}'.rstrip()
        )
    in_all = 'in all ' * bool(runner.cfg.get('resume'))
    early = f'of {runner.max_iters} ' * (runner.iter < runner.max_iters)
    title = f' trained {counted(runner.iter, "iteration")} {early}{in_all}'
    print(f'{title:─^80}')
    for name, line in lines.items():
        print(f'{name:11}{line}')
    print('─' * 80)


def summary_of(
    runner: Runner, records: Sequence[dict], hook: CheckpointHook | None, metric: str
) -> Summary:
    """Judge the log of a run by a metric, by default the first of its validations."""
    # The file of the best checkpoint has _ instead of /.
    names = [name for name in validated_metrics(records) if metric in ('', name.replace('/', '_'))]
    if runner.val_loop is None or not (metric or names):
        return Summary({}, '')
    name = names[0] if names else metric
    rules = dict(zip(getattr(hook, 'key_indicators', ()), getattr(hook, 'rules', ()), strict=False))
    rule = rules.get(name) or ''
    if hook is not None and not rule:
        keys = dict(greater_keys=hook.greater_keys, less_keys=hook.less_keys)
        with suppress(ValueError):  # the better values are unknown
            (rule,) = CheckpointHook(save_best=name, **keys).rules
    loader: Any = runner.val_loop.dataloader
    # mmengine cuts the data set for num_batch_per_epoch, but not its labels.
    number, commonest = len(loader.dataset), 0.0
    if SHARES.search(name) and hasattr(loader.dataset, 'get_gt_labels') and number:
        labels = loader.dataset.get_gt_labels()[:number]
        commonest = 100 * np.bincount(labels).max() / number
    if loader.drop_last and loader.batch_size:
        number -= number % loader.batch_size
    return summarize(records, name, number, rule, commonest)


def advice(step: str, runner: Runner, config: str) -> str:
    train_again = f'aft_mm train {shlex.quote(config)} --work-dir DIR --cfg-options'
    by_epoch = not isinstance(runner.train_loop, IterBasedTrainLoop)
    length = (
        f'max_epochs={2 * runner.max_epochs}' if by_epoch else f'max_iters={2 * runner.max_iters}'
    )
    schedules = runner.cfg.get('param_scheduler')
    if isinstance(schedules, list) and schedules:
        number, last = len(schedules) - 1, schedules[-1]
        more = runner.max_epochs if last.get('by_epoch', True) else runner.max_iters
        for key in ('end', 'T_max', 'total_steps'):
            value = last.get(key)
            if value in (more, more - last.get('begin', 0)):  # else it does not end with the run
                length += f' param_scheduler.{number}.{key}={value + more}'
    lr = (runner.cfg.optim_wrapper.get('optimizer') or {}).get('lr')
    return {
        'look': f'check the pictures and classes: aft_mm browse {shlex.quote(config)} --out samples.png',
        'data': f'add data, or start from a checkpoint: {train_again} load_from=CHECKPOINT',
        'rate': f'lower the learning rate: {train_again} optim_wrapper.optimizer.lr={(lr or 1e-3) / 3:.2g}',
        'longer': f'train longer: {train_again} train_cfg.{length}',
    }[step]


def next_command(cfg: Config) -> tuple[str, str]:
    """Return the command that uses a trained model, and what follows config and checkpoint."""
    if cfg.get('default_scope') in ('mmpretrain', 'mmdet', 'mmseg'):
        return 'predict', 'PATH --out predictions'
    task = task_of(cfg)
    if task == 'TextGenerator' and 'data_file' not in cfg.train_dataloader.dataset:
        return 'test', ''
    return COMMANDS[task]


def plot(*words: str, out: str) -> str:
    """Plot to a file and return its path, or why there is none; a plot never fails a training."""
    try:
        with redirect_stdout(io.StringIO()):
            main(['plot', *words, '--out', out])
    except SystemExit as error:
        return f'none ({error})'
    return os.path.relpath(out)


def log_backends(runner: Runner) -> None:
    ops = logging.getLogger('aft_mm.ops')
    ops.setLevel(logging.INFO)
    ops.handlers = list(runner.logger.handlers)


def run(args: argparse.Namespace) -> None:
    with run_guard(args.argv) as run:
        train(args, run)
