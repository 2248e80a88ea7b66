from collections.abc import Sequence
from typing import Any

from aft_mm.checks import check_choice, check_flag
from aft_mm.errors import import_from_extra
from aft_mm.registry import METRICS

from .base import Metric

PER = ('phoneme', 'character', 'word')
SPACE = '\u2423'  # jiwer would not count a space as a character


@METRICS.register_module()
class ErrorRate(Metric):
    """Phoneme, character or word error rate in percent, by jiwer.

    ``100 · (S + D + I) / N``: the fewest substitutions, deletions and insertions over the units N.

    Args:
        per: ``'phoneme'``, ``'character'`` (also spaces inside) or ``'word'``.
        lexicon: Whether to measure the transcripts of the lexicon; `prefix` is then ``'lexicon'``.
        **kwargs: See :class:`Metric`.

    Raises:
        ValueError: If ``per`` is unknown, the dataset has no units, or its transcripts are empty.
    """

    def __init__(self, per: str, lexicon: bool = False, **kwargs: Any) -> None:
        check_choice('per', per, PER)
        check_flag('lexicon', lexicon)
        self.per = per
        self.recognized = 'in_lexicon' if lexicon else 'recognized'
        if lexicon:
            kwargs.setdefault('prefix', 'lexicon')
        super().__init__(**kwargs)
        import_from_extra('jiwer', 'speech', 'ErrorRate needs')

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        names = (self.dataset_meta or {}).get('units')
        if names is None:
            raise ValueError(
                'ErrorRate needs a dataset with units in its metainfo, such as aft_mm.SpeechFolder'
            )
        if any(self.recognized not in sample for sample in data_samples):
            raise ValueError(
                f'ErrorRate needs samples with {self.recognized}, which a CTCModel gives, with '
                'lexicon for in_lexicon, got one without'
            )
        self.results += [
            tuple(self._text(names, units) for units in (sample['units'], sample[self.recognized]))
            for sample in data_samples
        ]

    def compute_metrics(self, results: list) -> dict:
        import jiwer

        references, hypotheses = (list(column) for column in zip(*results, strict=True))
        total = sum(len(reference.split()) for reference in references)
        if not total:
            raise ValueError(
                f'ErrorRate needs at least one {self.per}, but all {len(references)} '
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
        text = [names[unit] for unit in units]
        if self.per == 'word':
            return (' ' if self.dataset_meta.get('in_words') else '').join(text)
        if self.per == 'character':
            # jiwer ignores spaces at both ends.
            spoken = [n for n, unit in enumerate(text) if unit != ' ']
            text = text[spoken[0] : spoken[-1] + 1] if spoken else []
        return ' '.join(unit.replace(' ', SPACE) for unit in text)
