"""Metrics of translations and transcripts."""

import re
from collections.abc import Sequence
from typing import Any

from aft_mm.checks import check_choice, check_flag
from aft_mm.errors import import_from_extra
from aft_mm.openmmlab import print_log, warn
from aft_mm.registry import METRICS

from .base import Metric

#: Letters of a word, in the mean, above which text has no spaces between words.
LONGEST_WORD = 6
# Letters of scripts without spaces between words: Thai to Tibetan and Myanmar, Khmer, kana, Chinese.
_UNSPACED = re.compile(
    '[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]'
)


@METRICS.register_module()
class BLEU(Metric):
    """Corpus BLEU by sacrebleu, of detokenised text with one reference each, 0 to 100.

    ``bleu_length_ratio`` is the length relative to the references.

    Args:
        tokenize: Tokenizer of sacrebleu. That of a language without spaces is its own, such as
            ``'zh'``, or ``'char'``.
        lowercase: Whether upper and lower case are the same.
        **kwargs: See :class:`Metric`.

    Raises:
        ValueError: If samples have no ``translation`` or ``reference``, or sacrebleu is missing.
    """

    def __init__(self, tokenize: str = '13a', lowercase: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        bleu = import_from_extra('sacrebleu', 'text', 'BLEU needs').BLEU
        # Others download a vocabulary.
        kinds = [name for name in bleu.TOKENIZERS if not name.startswith(('flores', 'spm'))]
        check_choice('tokenize', tokenize, tuple(kinds))
        check_flag('lowercase', lowercase)
        self.tokenize = tokenize
        try:
            self.score = bleu(tokenize=tokenize, lowercase=lowercase)
        except (ImportError, RuntimeError) as error:  # a missing dictionary of Japanese or Korean
            reason = ' '.join(str(error).split())
            raise ValueError(f'tokenize={tokenize!r} is not possible: {reason}') from error

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
        text = ' '.join(references)
        letters = len(_UNSPACED.findall(text))
        has_spaces = letters < LONGEST_WORD * len(text.split())
        if self.tokenize in ('13a', 'intl', 'none') and 2 * letters > len(text) and not has_spaces:
            warn(
                f'BLEU divides text at spaces, which the references have not: set tokenize, got '
                f'{self.tokenize!r}'
            )
        score = self.score.corpus_score(translations, [references])
        print_log(score.format(signature=str(self.score.get_signature())), 'current')
        return dict(bleu=score.score, bleu_length_ratio=score.sys_len / max(1, score.ref_len))


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
        kinds = 'substitutions', 'deletions', 'insertions'
        shares = {f'{self.per}_{kind}': 100 * getattr(counts, kind) / total for kind in kinds}
        return {f'{self.per}_error_rate': 100 * counts.wer, **shares}

    def _text(self, names: Sequence[str], units: Sequence[int]) -> str:
        text = [names[unit] for unit in units]
        if self.per == 'word':
            return (' ' if self.dataset_meta.get('in_words') else '').join(text)
        if self.per == 'character':
            # jiwer ignores spaces at both ends.
            spoken = [n for n, unit in enumerate(text) if unit != ' ']
            text = text[spoken[0] : spoken[-1] + 1] if spoken else []
        return ' '.join(unit.replace(' ', SPACE) for unit in text)
