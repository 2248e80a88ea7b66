"""Which files could not be used, and what was done to the unusual ones."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mmengine.dist import all_gather_object
from mmengine.hooks import Hook
from mmengine.runner import Runner

from aft_mm.registry import HOOKS


@dataclass
class Notes:
    """What the samples of one epoch say."""

    skipped: Counter[str] = field(default_factory=Counter)  # sentence: how often
    remarks: dict[str, str] = field(default_factory=dict)  # sentence: first file

    def add(self, other: 'Notes') -> None:
        """Take over the notes of another batch or rank."""
        self.skipped.update(other.skipped)
        self.remarks = {**other.remarks, **self.remarks}


@HOOKS.register_module()
class DataReportHook(Hook):
    """Report what the data sets noted on their samples, over all ranks.

    - ``skipped``: at the end of every epoch, how many files could not be used, so that others took
      their place, and each of them with its reason.
    - ``remarks``: each sentence once in a run, with the first file that it is about.
    """

    def __init__(self) -> None:
        # By mode, of this rank: a loop of iterations validates in the middle of a training epoch.
        self.notes: dict[str, Notes] = {}
        self.said: set[str] = set()  # remarks of the run

    # mmengine's hook calls this and the next method for training, validation and test.
    def _after_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = 'train',
    ) -> None:
        """Take down the notes on a batch."""
        notes = self.notes.setdefault(mode, Notes())
        for sample in data_batch['data_samples']:
            notes.add(Notes(Counter(sample.get('skipped', ())), sample.get('remarks', {})))

    def _after_epoch(self, runner: Runner, mode: str = 'train') -> None:
        """Log the notes of all ranks on this mode."""
        notes = Notes()
        for of_rank in all_gather_object(self.notes.pop(mode, Notes())):
            notes.add(of_rank)
        if notes.skipped:
            # A sentence ends in front of its count.
            lines = [
                f'\n  {sentence.removesuffix(".")} ({count} x)'
                for sentence, count in sorted(notes.skipped.items())
            ]
            runner.logger.warning(
                f'{_title(runner, mode)}: {len(notes.skipped)} file(s) cannot be used, drawn '
                f'{notes.skipped.total()} x, others took their place:{"".join(lines)}'
            )
        for sentence in sorted(notes.remarks.keys() - self.said):
            runner.logger.warning(f'{sentence}, the first one is {notes.remarks[sentence]!r}')
        self.said |= notes.remarks.keys()


def _title(runner: Runner, mode: str) -> str:
    """What has ended. mmengine counts an epoch as done before it is validated, counts none in a
    loop of iterations, and writes a warning once only: each has to say which one it is.
    """
    if mode == 'train':
        return f'train epoch {runner.epoch + 1}'
    if mode == 'val' and runner.iter:
        return f'val epoch {runner.epoch}' if runner.epoch else f'val iteration {runner.iter}'
    return mode
