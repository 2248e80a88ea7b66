"""How much of what was said was recognised."""

from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import BaseMetric

from aft_mm.checks import check_choice
from aft_mm.registry import METRICS

PER = ('phoneme', 'character', 'word')
SPACE = '\u2423'  # which is a character, too, but no word of jiwer's


@METRICS.register_module()
class ErrorRate(BaseMetric):
    """Errors of recognition per phoneme, character or word, in percent of those of the transcripts.

    ``100 · (S + D + I) / N``, the least substitutions, deletions and insertions that make the
    recognised text of the transcript, summed over all utterances, over their units N. jiwer counts.
    Where much is inserted the rate is above 100. What is unknown to the data set is the unit
    ``<unk>`` of the transcript.

    Args:
        per: ``'phoneme'`` or ``'character'``, the units of the data set, spaces included, or
            ``'word'``, what stands between spaces, for a data set of characters.
        collect_device: See :class:`aft_mm.evaluation.Likelihood`.
        **kwargs: Those of :class:`mmengine.evaluator.BaseMetric`, such as ``prefix``.

    Raises:
        ValueError: ``per`` is unknown, the data set tells no units, or its transcripts are empty.
    """

    default_prefix = ''  # without one mmengine warns in every run

    def __init__(self, per: str, collect_device: str = 'gpu', **kwargs) -> None:
        check_choice('per', per, PER)
        self.per = per
        super().__init__(collect_device=collect_device, **kwargs)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep the transcript and what was recognised, as texts of words that jiwer compares."""
        names = (self.dataset_meta or {}).get('units')
        if names is None:
            raise ValueError(
                'ErrorRate needs a data set whose metainfo tells its units, such as '
                'aft_mm.SpeechFolder'
            )
        self.results += [
            tuple(self._text(names, units) for units in (sample['units'], sample['recognized']))
            for sample in data_samples
        ]

    def compute_metrics(self, results: list) -> dict:
        """``{'phoneme_error_rate': ..., 'percent_deletions': ..., ...}`` of all samples."""
        import jiwer

        references, hypotheses = (list(column) for column in zip(*results, strict=True))
        total = sum(len(reference.split()) for reference in references)
        if not total:
            raise ValueError(
                f'ErrorRate needs a {self.per} at least, but all {len(references)} '
                'transcripts are empty'
            )
        counts = jiwer.process_words(references, hypotheses)
        errors = dict(
            substitutions=counts.substitutions,
            deletions=counts.deletions,
            insertions=counts.insertions,
        )
        kinds = {f'{self.per}_{kind}': 100 * number / total for kind, number in errors.items()}
        return {f'{self.per}_error_rate': 100 * sum(errors.values()) / total, **kinds}

    def _text(self, names: Sequence[str], units: Sequence[int]) -> str:
        """Units as words with spaces between them."""
        if self.per == 'word':
            return ''.join(names[unit] for unit in units)
        return ' '.join(names[unit].replace(' ', SPACE) for unit in units)
