"""Build the runner of a config, with a short console log and safe default hooks."""

import argparse
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from torch import nn

from aft_mm.config.reading import DOWNSTREAM, check_settings, read_config
from aft_mm.errors import UserError

from .console import shorten_console
from .distributed import start_distributed


def load_run_config(args: argparse.Namespace) -> Config:
    """Read and check ``args.config``, apply the arguments and join the process group.

    Raises:
        UserError: The config cannot be read, or the launcher's environment is incomplete.
    """
    if args.launcher != 'none':  # a rank without a group stops other libraries of the process
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    shorten_console(MMLogger.get_current_instance())  # for messages before that of the run is built
    cfg = read_config(args.config, args.cfg_options)
    check_settings(cfg)
    cfg.launcher = args.launcher
    cfg.work_dir = (
        args.work_dir or cfg.get('work_dir') or os.path.join('work_dirs', Path(cfg.filename).stem)
    )
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        if not cfg.get(name):
            continue
        if getattr(args, 'no_persistent_workers', False) or cfg[name].get('num_workers') == 0:
            cfg[name].persistent_workers = False  # torch refuses the combination
        if getattr(args, 'no_pin_memory', False):
            cfg[name].pin_memory = False
    if cfg.launcher != 'none':
        start_distributed(cfg)
    return cfg


def apply_safe_defaults(cfg: Config) -> None:
    """Make training write checkpoints atomically, resume exactly and stop at a non-finite loss.

    On CUDA, training is also compiled unless ``compile`` is in the config.
    """
    if cfg.get('default_hooks') is None:
        cfg.default_hooks = {}
    hooks = cfg.default_hooks
    if 'checkpoint' not in hooks:
        hooks.checkpoint = dict(type='CheckpointHook', interval=1)
    if hooks.checkpoint and hooks.checkpoint.type in ('CheckpointHook', 'mmengine.CheckpointHook'):
        hooks.checkpoint.type = 'aft_mm.SafeCheckpointHook'
    given = [
        hook and hook.get('type') for hook in (*hooks.values(), *(cfg.get('custom_hooks') or ()))
    ]
    for name, hook in (('finite_loss', 'FiniteLossHook'), ('exact_resume', 'ExactResumeHook')):
        if not {hook, f'aft_mm.{hook}'} & {*given}:
            hooks[name] = dict(type=f'aft_mm.{hook}')
    compiled = {'aft_mm.CompileHook', 'CompileHook'} & {*given}
    if cfg.get('compile') is None and not compiled and can_compile(cfg):
        # A layer that breaks the graph must not end a run that did not ask for this.
        hooks['compile'] = dict(type='aft_mm.CompileHook', module=None, fullgraph=False)


def can_compile(cfg: Config) -> bool:
    """Return whether training is compiled by default: on CUDA with Triton and a C compiler.

    Not for detection and segmentation, whose images have many sizes.
    """
    if not torch.cuda.is_available() or cfg.get('default_scope') in DOWNSTREAM:
        return False
    has_compiler = any(map(shutil.which, (os.environ.get('CC', 'gcc'), 'clang')))
    return find_spec('triton') is not None and has_compiler


def build_runner(cfg: Config) -> Runner:
    """Build the runner of ``cfg``, by default a ConsoleRunner."""
    try:
        os.makedirs(cfg.work_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=cfg.work_dir):
            pass
    except OSError as error:
        raise UserError(
            f'work_dir {str(cfg.work_dir)!r} cannot be written: {error.strerror}'
        ) from error
    return RUNNERS.build(cfg) if cfg.get('runner_type') else ConsoleRunner.from_cfg(cfg)


def task_model(runner: Runner) -> Any:
    model = runner.model
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


class ConsoleRunner(Runner):
    """mmengine's Runner with a short console log, unless ``log_level='DEBUG'``."""

    def build_logger(
        self, log_level: int | str = 'INFO', log_file: str | None = None, **kwargs: Any
    ) -> MMLogger:
        logger = super().build_logger(log_level=log_level, log_file=log_file, **kwargs)
        shorten_console(logger)
        return logger

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the wrapper, and warn if weight decay pulls position biases to 0."""
        built = super().build_optim_wrapper(optim_wrapper)
        if built is not optim_wrapper and isinstance(built, OptimWrapper):
            warning = decayed_biases(self.model, built)
            if warning:
                self.logger.warning(warning)
        return built

    def train(self) -> nn.Module:
        self._introduce()
        return super().train()

    def test(self) -> dict[str, float]:
        self._introduce()
        return super().test()

    def _introduce(self) -> None:
        model = task_model(self)
        number = sum(parameter.numel() for parameter in model.parameters())
        device = get_device()
        if device == 'cpu':
            threads = torch.get_num_threads()
            device += f' with {threads} thread{"s" if threads > 1 else ""}'
        self.logger.info(
            f'{type(model).__name__} with {number:,} parameters on {device}, torch '
            f'{torch.__version__}; environment, config and hooks are in '
            f'{self.logger.log_file}'
        )


def decayed_biases(model: nn.Module, optim_wrapper: OptimWrapper) -> str:
    decays = {
        id(parameter): group['weight_decay']
        for group in optim_wrapper.optimizer.param_groups
        if group.get('weight_decay')
        for parameter in group['params']
    }
    names = {
        name: decays[id(parameter)]
        for name, parameter in model.named_parameters()
        if 'pos_bias' in name and id(parameter) in decays
    }
    if not names:
        return ''
    first, decay = next(iter(names.items()))
    return (
        f'weight decay of {decay:g} pulls {len(names)} position biases to 0, such as {first}; '
        'paramwise_cfg.custom_keys=dict(pos_bias=dict(decay_mult=0.)) of optim_wrapper leaves '
        'them alone'
    )
