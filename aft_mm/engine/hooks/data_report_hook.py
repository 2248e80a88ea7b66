"""Which files could not be used, and what was done to the unusual ones."""

from collections import Counter
from typing import Any

from mmengine.dist import all_gather_object
from mmengine.hooks import Hook
from mmengine.runner import Runner

from aft_mm.registry import HOOKS


@HOOKS.register_module()
class DataReportHook(Hook):
    """Report what the data sets noted on their samples, over all ranks.

    - ``skipped``: at the end of every epoch, how many files could not be used, so that others took
      their place, and each of them with its reason.
    - ``remarks``: each sentence once in a run, with the first file that it is about.
    """

    def __init__(self) -> None:
        # Of this epoch and rank.
        self.skipped: Counter[str] = Counter()
        self.remarks: dict[str, str] = {}
        # Of the run.
        self.said: set[str] = set()

    # mmengine's hook calls this and the next method for training, validation and test.
    def _after_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None,
                    outputs: Any = None, mode: str = 'train') -> None:
        """Take down the notes on a batch."""
        for sample in data_batch['data_samples']:
            self.skipped.update(sample.get('skipped', ()))
            self.remarks = {**sample.get('remarks', {}), **self.remarks}

    def _after_epoch(self, runner: Runner, mode: str = 'train') -> None:
        """Log the notes of all ranks."""
        skipped: Counter[str] = Counter()
        remarks: dict[str, str] = {}
        for of_rank in all_gather_object((self.skipped, self.remarks)):
            skipped.update(of_rank[0])
            remarks = {**of_rank[1], **remarks}
        self.skipped, self.remarks = Counter(), {}
        if skipped:
            lines = [f'\n  {sentence} ({count} x)' for sentence, count in sorted(skipped.items())]
            runner.logger.warning(
                f'{mode} epoch {runner.epoch + 1}: {len(skipped)} file(s) cannot be used, drawn '
                f'{skipped.total()} x, others took their place:{"".join(lines)}')
        for sentence in sorted(remarks.keys() - self.said):
            runner.logger.warning(f'{sentence}, the first one is {remarks[sentence]!r}')
        self.said |= remarks.keys()
