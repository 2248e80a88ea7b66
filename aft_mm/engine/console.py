"""What a run prints: its messages without date and logger, and its numbers as words."""

import logging
import re

from mmengine.logging import MMLogger
from mmengine.logging.logger import MMFormatter

#: Beginnings of messages that are the same in every run, for the log file only.
DETAILS = (
    f'\n{"-" * 60}\nSystem environment:',
    'Config:\n',
    'Hooks will be executed in the following order:',
    'paramwise_options -- ',
    'Exp name: ',
    'Distributed training is not used, all SyncBatchNorm',
    'Because batch augmentations are enabled, ',
    'The prefix is not set in metric class IoUMetric',
    'Resumed iteration number is not divisible by',  # ExactResumeHook restores the gradients
)
# A line of mmengine's LogProcessor: Epoch(train)  [3][20/23]  lr: 1e-3  eta: 0:00:05  loss: 0.1
_PROGRESS = re.compile(
    r'(?:Epoch|Iter)\((train|val|test)\) ( *)(?:\[(\d+)\])?\[( *\d+/\d+)\]\s*(.*)', re.DOTALL
)
_WORDS = {'val': 'validation', 'test': 'test'}


def is_for_the_console(record: logging.LogRecord) -> bool:
    return not (getattr(record, 'file_only', False) or record.getMessage().startswith(DETAILS))


class ConsoleFormatter(MMFormatter):
    """mmengine's formatter without date, logger and place, and with :func:`readable` lines."""

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
    # Learning rates are separated by one space.
    values = dict(re.findall(r'(\S+): (.*?)(?= \S+lr: | lr: |  |$)', rest, re.DOTALL))
    head = f'epoch {space}{epoch}, ' if epoch else 'iteration ' * (mode == 'train')
    head += f'{_WORDS.get(mode, "")} {place}'.lstrip()
    first = []
    for name, form in (
        ('loss', 'loss {}'),
        ('lr', 'rate {}'),
        ('time', '{} s'),
        ('eta', '{} left'),
        ('memory', '{} MB'),
    ):
        if name in values:
            first.append(form.format(values.pop(name)))
    values = {name: value for name, value in values.items() if name not in ('data_time', 'base_lr')}
    if mode != 'train' and values:  # its result; the times are means of a batch
        first = []
    return '   '.join([head, *first, *(f'{name} {value}' for name, value in values.items())])
