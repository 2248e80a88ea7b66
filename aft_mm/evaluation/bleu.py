from collections.abc import Sequence
from typing import Any

from mmengine.logging import print_log

from aft_mm.errors import import_from_extra
from aft_mm.registry import METRICS

from .base import Metric


@METRICS.register_module()
class BLEU(Metric):
    """Corpus BLEU by sacrebleu, of detokenised text with one reference each, 0 to 100.

    ``bleu`` is sacrebleu's default (cased, ``13a``), ``bleu_length_ratio`` the length relative to
    the references.

    Args:
        **kwargs: See :class:`Metric`.

    Raises:
        ValueError: If samples have no ``translation`` or ``reference``, or sacrebleu is missing.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.score = import_from_extra('sacrebleu', 'text', 'BLEU needs').BLEU()

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            if 'translation' not in sample or 'reference' not in sample:
                raise ValueError(
                    "BLEU needs samples with a translation, which test_cfg=dict(type='aft_mm."
                    "TranslationTestLoop') makes, and a reference, which ParallelText(test_mode="
                    f'True) gives, got {sorted(sample)}'
                )
            self.results.append((sample['translation'], sample['reference']))

    def compute_metrics(self, results: list) -> dict:
        translations, references = zip(*results, strict=True)
        score = self.score.corpus_score(translations, [references])
        print_log(f'{score.format(signature=str(self.score.get_signature()))}', 'current')
        return dict(bleu=score.score, bleu_length_ratio=score.sys_len / max(1, score.ref_len))
