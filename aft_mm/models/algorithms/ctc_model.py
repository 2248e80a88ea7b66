from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aft_mm.checks import check_choice, check_config, check_int, refuse
from aft_mm.layers import Resettable
from aft_mm.openmmlab import BaseModel, all_reduce, get_world_size
from aft_mm.registry import MODELS
from aft_mm.structures import UtteranceSample, samples_of
from aft_mm.tokenizers import TextUnits

from ..decoding.ctc import Hypothesis, Lexicon, decode_by_beam, decode_greedily

if TYPE_CHECKING:
    import numpy as np

LEXICON_BEAM = 16
MODES = ('tensor', 'loss', 'predict')


@MODELS.register_module()
class CTCModel(Resettable, BaseModel):
    """Model ``p(units | features)`` of an encoder of frames and CTC (Graves et al. 2006).

    Args:
        encoder: Config of an encoder of frames, such as :class:`BiLSTMEncoder`.
        beam_size: Prefixes of the beam search; 1 decodes greedily.
        lexicon: ``dict(units=…, words=[…])``; 'predict' then adds ``in_lexicon``, the best
            transcript of these words.
        data_preprocessor: Config; :class:`UtterancePreprocessor` by default.
        init_cfg: See mmengine's BaseModel.
    """

    def __init__(
        self,
        encoder: dict[str, Any],
        head: dict[str, Any],
        beam_size: int = 1,
        lexicon: dict[str, Any] | None = None,
        data_preprocessor: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        check_config('encoder', encoder)
        check_config('head', head)
        check_int('beam_size', beam_size, 1)
        super().__init__(data_preprocessor or dict(type='aft_mm.UtterancePreprocessor'), init_cfg)
        self.encoder = MODELS.build(encoder)
        self.head = MODELS.build(head)
        self.beam_size = beam_size
        self.lexicon = None
        if lexicon is not None:
            if not isinstance(lexicon, dict) or lexicon.keys() != {'units', 'words'}:
                refuse('lexicon', 'a dict of units and words', lexicon)
            self.lexicon = Lexicon.of(lexicon['words'], TextUnits(**lexicon['units']))
        if self.head.embed_dims != self.encoder.embed_dims:
            raise ValueError(
                'head and encoder must have the same embed_dims, got '
                f'{self.head.embed_dims} and {self.encoder.embed_dims}'
            )

    def forward(
        self,
        inputs: Tensor,
        data_samples: list[UtteranceSample] | None = None,
        mode: str = 'tensor',
    ) -> Tensor | dict[str, Tensor] | list[UtteranceSample]:
        """Run the model.

        Args:
            inputs: Features [B, T, F], padded by :class:`UtterancePreprocessor`.
            data_samples: With ``length`` and, for the loss, ``units``.

        Returns:
            'tensor': log probabilities [B, T, V] of the blank and the units, arbitrary at padding.
            'loss': ``dict(loss=…)``, ``Σ −log p(units) / Σ units`` in nats over the utterances of
            all processes. 'predict': the samples with ``recognized`` and ``score``.
        """
        check_choice('mode', mode, MODES)
        samples = samples_of(inputs, data_samples, UtteranceSample)
        lengths = [sample.get('length', inputs.shape[1]) for sample in samples]
        frame = torch.arange(inputs.shape[1], device=inputs.device)
        mask = frame < torch.tensor(lengths, device=inputs.device)[:, None]
        log_probs: Tensor = self.head.log_probs(self.encoder(inputs, mask))
        if mode == 'tensor':
            return log_probs
        if mode == 'loss':
            return dict(loss=self._loss(log_probs, lengths, samples))
        for sample, rows, length in zip(samples, log_probs, lengths, strict=True):
            best = self.decode(rows[:length])[0]
            sample.recognized, sample.score = list(best.units), best.score
            if self.lexicon is not None:
                best = self.decode(rows[:length], lexicon=self.lexicon)[0]
                sample.in_lexicon = list(best.units)
        return samples

    def decode(
        self,
        log_probs: 'Tensor | np.ndarray',
        beam_size: int | None = None,
        lexicon: Lexicon | None = None,
    ) -> list[Hypothesis]:
        """Return the best transcripts.

        Args:
            log_probs: [T, V].
            beam_size: The model's by default.
            lexicon: Words that may occur; the beam then has at least 16 prefixes.
        """
        size = self.beam_size if beam_size is None else beam_size
        if lexicon is not None:
            return decode_by_beam(log_probs, max(size, LEXICON_BEAM), lexicon)
        return [decode_greedily(log_probs)] if size == 1 else decode_by_beam(log_probs, size)

    def _loss(
        self, log_probs: Tensor, lengths: list[int], samples: list[UtteranceSample]
    ) -> Tensor:
        targets = [sample.units for sample in samples]
        nats: Tensor = self.head.nats(log_probs, lengths, targets).sum()
        # Gradients are averaged over processes, whose numbers of units differ.
        number = torch.tensor(float(sum(map(len, targets))), device=nats.device)
        all_reduce(number)
        world_size: int = get_world_size()
        return nats * world_size / number.clamp_min(1)
