"""A Runner whose console shows what a person reads."""

import logging
import os
import tempfile
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from aft_mm.errors import UserError

from .hooks.task_model import task_model

#: How the messages begin that only the log file gets: hundreds of lines, the same in every run of
#: a config, and all of them in front of whatever goes wrong.
DETAILS = (
    f'\n{"-" * 60}\nSystem environment:',
    'Config:\n',
    'Hooks will be executed in the following order:',
    'paramwise_options -- ',
    'Exp name: ',
    'Distributed training is not used, all SyncBatchNorm',
    'Because batch augmentations are enabled, ',
    'The prefix is not set in metric class IoUMetric',
)


def is_for_the_console(record: logging.LogRecord) -> bool:
    """Whether a message is no detail of :data:`DETAILS`, and none that says it is for the file."""
    return not (getattr(record, 'file_only', False) or record.getMessage().startswith(DETAILS))


class ConsoleRunner(Runner):
    """mmengine's Runner, of which the console shows a tenth and the log file everything.

    ``log_level='DEBUG'`` shows everything on the console, too. A line at the start names the model,
    the device and the log file, and another one the position biases that decay, if there are any.
    """

    def build_logger(
        self, log_level: int | str = 'INFO', log_file: str | None = None, **kwargs: Any
    ) -> MMLogger:
        """mmengine's logger, with the details kept from the console."""
        logger = super().build_logger(log_level=log_level, log_file=log_file, **kwargs)
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler) and handler.level > logging.DEBUG:
                handler.addFilter(is_for_the_console)
        return logger

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """mmengine's, with a warning where weight decay pulls position biases to 0."""
        built = super().build_optim_wrapper(optim_wrapper)
        if built is not optim_wrapper and isinstance(built, OptimWrapper):
            remark = decayed_biases(self.model, built)
            if remark:
                self.logger.warning(remark)
        return built

    def train(self) -> torch.nn.Module:
        """Say what is trained, then train it."""
        self._introduce()
        return super().train()

    def test(self) -> dict[str, float]:
        """Say what is tested, then test it."""
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


def build_runner(cfg: Config) -> Runner:
    """The runner of ``cfg``: the one of ``runner_type`` if it names one, else a ConsoleRunner.

    Raises:
        UserError: nothing can be written to ``work_dir``.
    """
    try:
        os.makedirs(cfg.work_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=cfg.work_dir):
            pass
    except OSError as error:
        raise UserError(
            f'work_dir {str(cfg.work_dir)!r} cannot be written: {error.strerror}'
        ) from error
    return RUNNERS.build(cfg) if cfg.get('runner_type') else ConsoleRunner.from_cfg(cfg)


def decayed_biases(model: torch.nn.Module, optim_wrapper: OptimWrapper) -> str:
    """A sentence on the position biases that weight decay pulls to 0; '' if there are none."""
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
