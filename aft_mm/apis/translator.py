from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from mmengine.config import Config

from aft_mm.checks import check_encodable, check_int, described
from aft_mm.engine import derived_seed
from aft_mm.errors import UserError
from aft_mm.models import beam_search, default_length
from aft_mm.models.decoding import check_sampling
from aft_mm.openmmlab import warn
from aft_mm.tokenizers import Subwords

from .loading import Checkpoint, ConfigSource, Device, as_list, check_options, load_model

#: Defaults of a beam search where `test_cfg` has no value.
BEAM = dict(beam_size=4, length_penalty=0.6)


class Translation(NamedTuple):
    """A translation and its score, see :func:`aft_mm.models.beam_search`."""

    text: str
    score: float


def beam_options(config: Config) -> dict[str, float]:
    """Return the beam size and the length penalty with which a config tests."""
    test = config.get('test_cfg') or {}
    return {name: test.get(name, default) for name, default in BEAM.items()}


class Translator:
    """Translate sentences.

    Args:
        config: Config of a translation model with the entry ``subwords``, or its path.

    Raises:
        UserError: As for :func:`load_model`, or the model was trained with another vocabulary.
    """

    def __init__(self, config: ConfigSource, checkpoint: Checkpoint, device: Device = None) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'Translator')
        self.subwords = Subwords(self.config.subwords)
        self.beam = beam_options(self.config)
        #: Number of the first text of a call, in warnings.
        self.first_number = 1
        values = self.model.head.num_values
        trained = self.model.dataset_meta.get('subwords', self.subwords.fingerprint)
        if self.subwords.vocab_size != values or trained != self.subwords.fingerprint:
            raise UserError(
                f'subwords {self.subwords.path!r} must be those that the model was trained with, '
                f'got {self.subwords.vocab_size} subwords of fingerprint '
                f'{self.subwords.fingerprint} for a model of {values} and {trained}'
            )

    def __call__(
        self, text: str | Sequence[str], batch_size: int = 32, **options: Any
    ) -> str | list[str]:
        """Translate one sentence or a list of sentences.

        Args:
            text: A sentence, or a list. One that is longer than the position table is truncated
                with a warning.
            **options: Those of :func:`aft_mm.models.beam_search`; the defaults of ``beam_size`` and
                ``length_penalty`` are those of the config's ``test_cfg``.

        Returns:
            The translation; a list for a list of sentences.
        """
        check_options(options, ('num_best',), beam_search)
        best = self.n_best(as_list(text), 1, batch_size, **options)
        texts = [found.text for (found,) in best]
        return texts[0] if isinstance(text, str) else texts

    def n_best(
        self, texts: Sequence[str], num_best: int, batch_size: int = 32, **options: Any
    ) -> list[list[Translation]]:
        """Return at most ``num_best`` translations of each sentence, best first.

        See :meth:`__call__`; ``beam_size`` must be at least ``num_best``.
        """
        check_options(options, (), beam_search)

        def search(sources: list[torch.Tensor]) -> list[list[Translation]]:
            beams = self.model.beam_search(
                sources, self.subwords.end, num_best=num_best, **{**self.beam, **options}
            )
            return [
                [
                    Translation(self.subwords.decode(one.tokens.tolist()), one.score)
                    for one in hypotheses
                ]
                for hypotheses in beams
            ]

        return self._in_batches(texts, batch_size, search)

    def sample(self, texts: Sequence[str], batch_size: int = 32, **options: Any) -> list[str]:
        """Sample a translation of each sentence.

        Args:
            batch_size: Sentences per batch; samples depend on it.
            **options: Those of :func:`aft_mm.models.generate`.
        """
        check_options(options)
        seed, batches = options.pop('seed', None), count()
        check_sampling(seed=seed)

        def sample(sources: list[torch.Tensor]) -> list[list[Translation]]:
            limits = [default_length(self.model, len(source)) for source in sources]
            noise = None if seed is None else derived_seed(seed, next(batches))
            rows = self.model.generate(
                max(limits), source=sources, end_token=self.subwords.end, seed=noise, **options
            )
            # The last token is the end, as in a beam.
            return [
                [Translation(self.subwords.decode(row[: limit - 1].tolist()), 0.0)]
                for row, limit in zip(rows, limits, strict=True)
            ]

        return [sampled.text for (sampled,) in self._in_batches(texts, batch_size, sample)]

    def _in_batches(
        self,
        texts: Sequence[str],
        batch_size: int,
        translate: Callable[[list[torch.Tensor]], list[list[Translation]]],
    ) -> list[list[Translation]]:
        check_int('batch_size', batch_size, 1)
        whole, texts = texts, as_list(texts)
        if isinstance(whole, str) or not all(isinstance(text, str) for text in texts):
            raise UserError(f'text must be a str or a list of str, got {described(whole)}')
        for number, text in enumerate(texts, self.first_number):
            check_encodable(f'text {number}', text)
            if unknown := self.subwords.unknown(text):
                warn(
                    f'text {number} has characters without a subword, {unknown[:40]!r}, which the '
                    f'translation ignores or misreads: {text[:40]!r}'
                )
        results = [[Translation('', 0.0)] for _ in texts]
        given = [i for i, text in enumerate(texts) if text.strip()]
        sources = dict(zip(given, self._sources([texts[i] for i in given]), strict=True))
        order = sorted(given, key=lambda i: len(sources[i]), reverse=True)
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            translated = translate([sources[i] for i in batch])
            for i, translations in zip(batch, translated, strict=True):
                results[i] = translations
        return results

    def _sources(self, texts: list[str]) -> list[torch.Tensor]:
        limit = self.model.encoder.max_length
        sources = []
        for text, tokens in zip(texts, self.subwords.encode(texts), strict=True):
            if len(tokens) > limit:
                warn(
                    f'truncated a sentence of {len(tokens)} subwords to {limit}, the size of the '
                    f'{self.model.encoder.limited_by}: {text[:40]!r}…'
                )
                tokens = [*tokens[: limit - 1], self.subwords.end]
            sources.append(torch.tensor(tokens))
        return sources
