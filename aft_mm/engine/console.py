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
_SEPARATOR = re.compile(r' {2,}| (?=\w*lr: )')  # of learning rates one space
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
