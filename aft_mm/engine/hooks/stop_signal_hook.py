"""Stop a run at a signal, so that it can go on later."""

import signal
from typing import Any

import torch
from mmengine.dist import all_reduce
from mmengine.runner import Runner

from ..stop_signals import StopSignals
from .stop_hook import StopHook

#: For ``extra`` of a log message that the console gets otherwise.
FILE_ONLY = dict(file_only=True)


class StopSignalHook(StopHook):
    """Ends the training after the iteration in which SIGTERM or SIGINT arrived.

    One process of a distributed run that gets a signal stops all of them. ``tools/train.py``
    registers it. During a validation nothing waits: the checkpoint of the epoch is written before.

    Args:
        signals: That keeps the signal.
        command: That goes on with the run, for the sentence.
    """

    def __init__(self, signals: StopSignals, command: str = 'train with --resume') -> None:
        super().__init__()
        self.command = command
        self.signals = signals
        self.sentence = ''

    def before_train(self, runner: Runner) -> None:
        """From here on a signal waits for the end of an iteration."""
        super().before_train(runner)
        self.signals.patient = runner.distributed
        self.signals.can_wait = True

    def before_val(self, runner: Runner) -> None:
        """A validation may take long, and what was trained is saved."""
        self.signals.can_wait = False

    def after_val(self, runner: Runner) -> None:
        """Training goes on."""
        self.signals.can_wait = runner.train_loop is not None

    def after_train(self, runner: Runner) -> None:
        """The last iteration is done."""
        self.signals.can_wait = False

    def is_time(self, runner: Runner) -> bool:
        """Whether any process got a signal."""
        received = torch.tensor(self.signals.received or 0)
        if runner.distributed:
            all_reduce(received, 'max')
        self.signals.received = int(received) or None
        return self.signals.received is not None

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Stop the loop, which would go on to validate; what sent the signal may not wait for it."""
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        if self.is_up and runner.train_loop.stop_training:
            runner.train_loop.val_begin = runner.max_iters + 1

    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        """Keep what there is to say as the last line of the run."""
        name = signal.Signals(self.signals.received or signal.SIGTERM).name
        self.sentence = (
            f'{name} stopped the run after iteration {iteration}; the checkpoint is '
            f'{checkpoint}; to go on, {self.command}'
        )
        # On the console it is the last line, by what ends the program.
        runner.logger.info(self.sentence, extra=FILE_ONLY)
