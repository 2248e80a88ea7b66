"""Build the runner of a config: its process group, a short console log and safe default hooks."""

import argparse
import atexit
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import all_gather_object
from mmengine.hooks import CheckpointHook, LoggerHook
from mmengine.logging import MMLogger
from mmengine.logging.logger import MMFormatter
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import RUNNERS
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, LogProcessor, Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aft_mm.checks import check_number
from aft_mm.config.reading import DOWNSTREAM, check_settings, read_config
from aft_mm.config.texts import type_name
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors

_POLL_SECONDS = 1
_GRACE_SECONDS = 30  # between SIGTERM and exit, as torchrun's
_RANK_VARIABLES = {
    'pytorch': ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'),
    'slurm': ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID'),
    'mpi': ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
}


def start_distributed(cfg: Config) -> None:
    """Set torch's environment variables from the launcher's; on a CPU, join a gloo group.

    The process ends with its launcher.

    Raises:
        UserError: The launcher did not set its environment variables, or the port is taken.
    """
    if cfg.launcher == 'none':
        return
    _export_environment(cfg.launcher)
    threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()
    if get_device() != 'cpu':
        return
    with _joining():
        dist.init_process_group('gloo')
    atexit.register(_leave_gloo)
    wrapper = dict(type='MMDistributedDataParallel', broadcast_buffers=False)
    wrapper['find_unused_parameters'] = cfg.get('find_unused_parameters', False)
    cfg.setdefault('model_wrapper_cfg', wrapper)
    cfg.model_wrapper_cfg.setdefault('device_ids', None)


def fix_sum_order(model: nn.Module) -> bool:
    """Make every iteration add up the gradients of several processes in the same order.

    DistributedDataParallel changes its buckets, on which the order depends, after the first
    backward pass: a resumed run would round its first step differently. A backward pass without
    data makes it choose the final ones.

    Returns:
        False if the model is not a DistributedDataParallel with the usual buckets.
    """
    if not (isinstance(model, DistributedDataParallel) and hasattr(model, 'reducer')):
        return False
    if model.static_graph or any(getattr(module, 'sparse', False) for module in model.modules()):
        return False
    if not model.find_unused_parameters:  # else the first buckets are the final ones
        model.reducer.prepare_for_backward([])
        # As in a model, gradients of the first parameters come last.
        sums = [value.sum() for value in model.parameters() if value.requires_grad]
        torch.autograd.backward(sums)
        model.zero_grad()
    return True


def _export_environment(launcher: str) -> None:
    for target, source in zip(_RANK_VARIABLES['pytorch'], _RANK_VARIABLES[launcher], strict=True):
        if source not in os.environ:
            raise UserError(
                f'launcher={launcher!r} needs the environment variable {source}, which '
                'is not set; start through tools/dist_train.sh, srun or mpirun'
            )
        _check_integer(source)
        os.environ[target] = os.environ[source]
    if launcher == 'slurm' and 'MASTER_ADDR' not in os.environ:
        os.environ['MASTER_ADDR'] = _first_host()
    os.environ.setdefault('MASTER_ADDR', '127.0.0.1')
    os.environ.setdefault('MASTER_PORT', str(_port_of_job()))
    _check_integer('MASTER_PORT')


def _check_integer(name: str) -> None:
    if not os.environ[name].isdecimal():
        raise UserError(f'{name} must be an integer of at least 0, got {os.environ[name]!r}')


def _first_host() -> str:
    nodes = os.environ.get('SLURM_NODELIST', '')
    command = ['scontrol', 'show', 'hostnames', nodes]
    try:
        hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, 'stderr', None) or getattr(error, 'strerror', None) or str(error)
        hosts, problem = [], ' '.join(reason.split())
    else:
        problem = 'no host'
    if not hosts:
        raise UserError(
            f'scontrol must give the hosts of SLURM_NODELIST={nodes!r}, got {problem}; or set '
            'MASTER_ADDR to the first host'
        )
    return hosts[0]


def _port_of_job() -> int:
    """Return the default port, which jobs and steps of SLURM on one machine do not share."""
    job, step = (os.environ.get(f'SLURM_{name}_ID', '') for name in ('JOB', 'STEP'))
    if not job.isdecimal():
        return 29500
    return 10000 + (int(job) + 997 * int(step if step.isdecimal() else 0)) % 20000


@contextmanager
def _joining() -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        address = ':'.join(os.environ.get(name, '') for name in ('MASTER_ADDR', 'MASTER_PORT'))
        reason = 'is taken by another run' if 'EADDRINUSE' in str(error) else 'cannot be reached'
        raise UserError(
            f'MASTER_ADDR:MASTER_PORT must be a free port of the first machine, got {address}, which '
            f'{reason}'
        ) from None


def _check_same_run(cfg: Config) -> None:
    """Refuse processes of two runs that met at one port."""
    jobs = [] if 'SLURM_HET_SIZE' in os.environ else ['SLURM_JOB_ID']
    names = (*jobs, 'TORCHELASTIC_RUN_ID')
    identity = (os.path.basename(cfg.filename or ''), *map(os.environ.get, names))
    if len(set(all_gather_object(identity))) > 1:
        raise UserError(
            'all processes of a run must have the same config and job, got several; MASTER_PORT='
            f'{os.environ.get("MASTER_PORT")} may be that of another run'
        )


def _end_with_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    print(
        'the process that launched this one is gone, so this one ends, too',
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)  # it waits for a process that has ended


def _leave_gloo() -> None:
    # A gloo thread that frees tensors at exit aborts the process (pytorch/pytorch#190489).
    time.sleep(0.2)
    if dist.is_initialized():
        dist.destroy_process_group()


#: Beginnings of messages that are the same in every run, for the log file only.
DETAILS = (
    f'\n{"-" * 60}\nSystem environment:',
    'Config:\n',
    'Hooks will be executed in the following order:',
    'paramwise_options -- ',
    'Exp name: ',
    'Checkpoints will be saved to ',  # the summary names one
    'Saving checkpoint at ',
    'The best checkpoint with ',
    'The previous best checkpoint ',
    'Loads checkpoint by ',
    '`save_param_scheduler` is True but ',
    'Evaluating ',
    'Using env variable `AFT_MM_DATA`',
    *('bbox_mAP_copypaste', 'segm_mAP_copypaste'),
    'Distributed training is not used, all SyncBatchNorm',
    'Because batch augmentations are enabled, ',
    'The prefix is not set in metric class IoUMetric',
    'Resumed iteration number is not divisible by',  # ExactResumeHook restores the gradients
)
# A line of mmengine's LogProcessor: Epoch(train)  [3][20/23]  lr: 1e-3  eta: 0:00:05  loss: 0.1
_PROGRESS = re.compile(
    r'(?:Epoch|Iter)\((train|val|test)\) ( *)(?:\[(\d+)\])?\[( *\d+/\d+)\]\s*(.*)', re.DOTALL
)
#: Ends of such messages.
DETAILS_AT_THE_END = ('is skipped since its requires_grad=False',)  # one of each frozen tensor
_SEPARATOR = re.compile(r' {2,}| (?=[\w.]*lr: )')  # of learning rates one space
_WORDS = {'val': 'validation', 'test': 'test'}
# What comes first in training; after a validation or test it is the mean of a batch.
_FIRST = {
    'loss': 'loss {}',
    'lr': 'rate {}',
    'time': '{} s per step',
    'eta': '{} left',
    'memory': '{} MB',
}


def is_for_the_console(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    is_detail = message.startswith(DETAILS) or message.endswith(DETAILS_AT_THE_END)
    return not (is_detail or getattr(record, 'file_only', False))


class ConsoleFormatter(MMFormatter):
    def __init__(self) -> None:
        super().__init__()
        self.info_format = '%(message)s'
        self.warn_format = f'{self._get_prefix("WARNING", True)} - %(message)s'
        self.err_format = f'{self._get_prefix("ERROR", True)} - %(message)s'

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, of logging
        return readable(super().formatMessage(record))


def shorten_console(logger: MMLogger) -> None:
    """Print the messages of a logger short, unless its level is DEBUG; the log file gets everything."""
    for handler in logger.handlers:
        if not isinstance(handler, logging.FileHandler) and handler.level > logging.DEBUG:
            handler.addFilter(is_for_the_console)
            handler.setFormatter(ConsoleFormatter())


def readable(message: str) -> str:
    """Return a line of mmengine's LogProcessor in words, and other messages as they are."""
    found = _PROGRESS.fullmatch(message)
    if found is None:
        return message
    mode, space, epoch, place, rest = found.groups()
    values = {}
    for pair in _SEPARATOR.split(rest.strip()):
        name, colon, value = pair.partition(': ')
        if not colon:  # a table
            return message
        values[name] = value
    head = f'epoch {space}{epoch}, ' if epoch else 'iteration ' * (mode == 'train')
    head += _WORDS.get(mode, '')
    if 'base_lr' in values:  # lr is that of the first parameter, which may decay or be frozen
        values['lr'] = values.pop('base_lr')
    for name in {'lr', 'time'} & values.keys():
        values[name] = f'{float(values[name]):.3g}'
    first = [form.format(values.pop(name)) for name, form in _FIRST.items() if name in values]
    rest = [f'{name} {value}' for name, value in values.items() if name != 'data_time']
    if mode == 'train' or not rest:
        rest = [*first, *rest]
        head = f'{head} {place}' if mode != 'train' else head + place
    return '   '.join([head, *rest])


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


#: mmengine's hook as configs name it.
CHECKPOINT_HOOKS = (
    *('CheckpointHook', 'mmengine.CheckpointHook', 'mmengine.hooks.CheckpointHook'),
    CheckpointHook,
)


def apply_safe_defaults(cfg: Config) -> None:
    """Make training write checkpoints atomically, resume exactly and stop at a non-finite loss.

    An entry None in ``default_hooks`` disables a hook. On CUDA, training is also compiled unless
    ``compile`` is in the config.
    """
    if cfg.get('default_hooks') is None:
        cfg.default_hooks = {}
    hooks = cfg.default_hooks
    if 'checkpoint' not in hooks:
        hooks.checkpoint = dict(type='CheckpointHook', interval=1)
    if hooks.checkpoint and hooks.checkpoint.type in CHECKPOINT_HOOKS:
        hooks.checkpoint.type = 'aft_mm.SafeCheckpointHook'
    listed = (*hooks.values(), *(cfg.get('custom_hooks') or ()))
    given = {type_name(hook.get('type')) for hook in listed if hook}
    for name, hook in (('finite_loss', 'FiniteLossHook'), ('exact_resume', 'ExactResumeHook')):
        if name in hooks and hooks[name] is None:
            del hooks[name]  # mmengine knows None for its own hooks only
        elif hook not in given:
            hooks[name] = dict(type=f'aft_mm.{hook}')
    if cfg.get('compile') is None and 'CompileHook' not in given and can_compile(cfg):
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


def wrappers_of(optim_wrapper: OptimWrapper) -> dict[str, Any]:
    """Return the wrappers of a run by name; '' is that of the only optimizer."""
    several = isinstance(optim_wrapper, OptimWrapperDict)
    return dict(optim_wrapper.items()) if several else {'': optim_wrapper}


def bases_of(part: Any) -> set[str]:
    return {base.__name__ for base in type(part).__mro__}


class ValidatedLogProcessor(LogProcessor):
    """mmengine's LogProcessor, which would log a validated ``loss`` as the mean of all epochs."""

    mean_pattern: re.Pattern[str]

    def _collect_scalars(
        self, custom_cfg: list, runner: Runner, mode: str, reserve_prefix: bool = False
    ) -> dict:
        pattern = self.mean_pattern
        if mode != 'train':
            self.mean_pattern = re.compile(f'^({mode}/)?(data_)?time$')
        try:
            scalars: dict = super()._collect_scalars(custom_cfg, runner, mode, reserve_prefix)
        finally:
            self.mean_pattern = pattern
        return scalars


class ConsoleRunner(Runner):
    """mmengine's Runner with a short console log, unless ``log_level='DEBUG'``."""

    def setup_env(self, env_cfg: dict) -> None:
        """Join the processes of the run, and refuse those of another."""
        with _joining():
            super().setup_env(env_cfg)
        _check_same_run(self.cfg)

    def build_logger(
        self, log_level: int | str = 'INFO', log_file: str | None = None, **kwargs: Any
    ) -> MMLogger:
        logger = super().build_logger(log_level=log_level, log_file=log_file, **kwargs)
        shorten_console(logger)
        return logger

    def build_log_processor(self, log_processor: Any) -> LogProcessor:
        built = super().build_log_processor(log_processor)
        if type(built) is LogProcessor:
            built.__class__ = ValidatedLogProcessor
        return built

    def build_train_loop(self, loop: Any) -> BaseLoop:
        """Build the loop, and log its unit, which readers of the log expect.

        mmengine would log a validation of a loop that counts iterations as one of epoch 0.
        """
        built = super().build_train_loop(loop)
        if isinstance(built, EpochBasedTrainLoop):
            self.log_processor.by_epoch = True
        elif isinstance(built, IterBasedTrainLoop):
            self.log_processor.by_epoch = False
            for hook in self.hooks:
                if isinstance(hook, LoggerHook):
                    hook.log_metric_by_epoch = False
        return built

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the wrapper; name position biases that decay to 0, and rates of no parameter."""
        built = super().build_optim_wrapper(optim_wrapper)
        if built is not optim_wrapper:
            for wrapper in wrappers_of(built).values():
                if warning := decayed_biases(self.model, wrapper):
                    self.logger.warning(warning)
            # Hosts' configs name parts that not every model has.
            if note := unused_rates(self.model, optim_wrapper.get('paramwise_cfg') or {}):
                self.logger.info(note)
        return built

    def _init_model_weights(self) -> None:
        with user_errors(*CONFIG_ERRORS):  # of init_cfg
            super()._init_model_weights()

    def scale_lr(self, optim_wrapper: Any, auto_scale_lr: dict | None = None) -> None:
        """Scale the rate to the samples of an update, which may be several batches.

        mmengine counts one batch, and logs a ``base_lr`` that is not scaled.
        """
        if not auto_scale_lr or not auto_scale_lr.get('enable'):
            return
        base: Any = auto_scale_lr.get('base_batch_size')
        check_number('auto_scale_lr.base_batch_size', base, above=0)
        wrappers = wrappers_of(optim_wrapper).values()
        counts = {wrapper._accumulative_counts for wrapper in wrappers}
        if len(counts) > 1:
            raise UserError(f'accumulative_counts of all optimizers must be equal, got {counts}')
        batches = counts.pop()
        if batches > 1:
            base /= batches
            self.logger.info(f'an update takes {batches} batches: of each, the base is {base:g}')
        before = [wrapper.optimizer.param_groups[0]['lr'] for wrapper in wrappers]
        super().scale_lr(optim_wrapper, {**auto_scale_lr, 'base_batch_size': base})
        for wrapper, rate in zip(wrappers, before, strict=True):
            if wrapper.base_param_settings is not None and rate:
                ratio = wrapper.optimizer.param_groups[0]['lr'] / rate
                wrapper.base_param_settings['lr'] *= ratio

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


def unused_rates(model: nn.Module, paramwise: dict) -> str:
    keys = [key for key, own in paramwise.get('custom_keys', {}).items() if 'lr_mult' in own]
    names = [name for name, _ in model.named_parameters()]
    unused = [repr(key) for key in keys if not any(key in name for name in names)]
    if not unused:
        return ''
    return (
        f'no parameter of the model has lr_mult of paramwise_cfg.custom_keys: {", ".join(unused)}'
    )
