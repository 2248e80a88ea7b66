from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aft_mm.checks import check_choice, check_config, refuse
from aft_mm.layers import Resettable
from aft_mm.openmmlab import BaseModel, all_reduce, get_world_size
from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample, samples_of

from ..decoding import Hypothesis, beam_search, generate

MODES = ('tensor', 'loss', 'predict')


@MODELS.register_module()
class AutoregressiveModel(Resettable, BaseModel):
    """Autoregressive model, ``p(x) = Π_t p(x_t | x_<t)``, or ``p(x | source)`` with an encoder.

    Args:
        head: Config of :class:`CategoricalHead` or :class:`LogisticMixtureHead`.
        encoder: Config of :class:`SequenceEncoder` for the ``source`` of the samples; the decoder
            then needs a cross mixer.
        data_preprocessor: Config; :class:`SequencePreprocessor` by default.
        init_cfg: See mmengine's BaseModule.
    """

    def __init__(
        self,
        decoder: dict[str, Any],
        head: dict[str, Any],
        encoder: dict[str, Any] | None = None,
        data_preprocessor: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        check_config('decoder', decoder)
        check_config('head', head)
        if encoder is not None:
            check_config('encoder', encoder)
        super().__init__(data_preprocessor or dict(type='aft_mm.SequencePreprocessor'), init_cfg)
        self.encoder = None if encoder is None else MODELS.build(encoder)
        self.decoder = MODELS.build(decoder)
        if self.encoder is not None and self.encoder.embedding is None:
            if self.encoder.embed_dims != self.decoder.embed_dims:
                raise ValueError(
                    'encoder and decoder that share an embedding must have the same embed_dims, '
                    f'got {self.encoder.embed_dims} and {self.decoder.embed_dims}'
                )
            self.encoder.share_embedding(self.decoder.embedding)
        self.head = MODELS.build(head)
        if getattr(self.head, 'tied', False):
            self.head.tie(self.decoder.embedding)
        self._check_head()

    def forward(
        self, inputs: Tensor, data_samples: list[SequenceSample] | None = None, mode: str = 'tensor'
    ) -> Tensor | dict[str, Tensor] | list[SequenceSample]:
        """Run the model.

        Args:
            inputs: Tokens int64 [B, T] or [B, T, C], padded by :class:`SequencePreprocessor`.
            data_samples: With ``length``, ``num_context`` and ``source``.

        Returns:
            'tensor': hidden vectors [B, T, D]. 'loss': ``dict(loss=…)``, the mean nats per
            dimension over the predicted tokens of all processes. 'predict': the samples with
            ``nats``, ``num_dims`` and, for a categorical head, ``num_correct``.
        """
        check_choice('mode', mode, MODES)
        if not isinstance(inputs, Tensor) or inputs.dim() < 2:
            refuse('inputs', 'a tensor of ints [B, T] or [B, T, C]', inputs)
        samples = samples_of(inputs, data_samples, SequenceSample)
        sources = [sample.get('source') for sample in samples]
        hidden: Tensor = self.decoder(inputs, *self.encode(sources))
        if mode == 'tensor':
            return hidden
        counted = _counted(inputs, samples)
        num_dims = counted.sum(1) * self.head.dims_per_token
        if mode == 'loss':
            nats = self.head.loss(hidden, inputs).masked_fill(~counted, 0)
            # Every token has the same weight in all processes.
            total = num_dims.sum()
            all_reduce(total)
            return dict(loss=nats.sum() * get_world_size() / total.clamp_min(1))
        nats = self.head.nats(hidden, inputs, dtype=torch.float64).masked_fill(~counted, 0)
        for sample, total, number in zip(
            samples, nats.sum(1).tolist(), num_dims.tolist(), strict=True
        ):
            sample.nats, sample.num_dims = total, number
        if hasattr(self.head, 'most_likely'):
            correct = (self.head.most_likely(hidden) == inputs) & counted
            for sample, number in zip(samples, correct.sum(1).tolist(), strict=True):
                sample.num_correct = number
        return samples

    def generate(self, length: int, *args: Any, **kwargs: Any) -> Tensor:
        """Sample sequences of `length` tokens, see :func:`aft_mm.models.generate`."""
        return generate(self, length, *args, **kwargs)

    def beam_search(
        self, source: Sequence[Tensor], end_token: int, **options: Any
    ) -> list[list[Hypothesis]]:
        """Search the best sequences for each source, see :func:`aft_mm.models.beam_search`."""
        return beam_search(self, source, end_token, **options)

    def encode(self, sources: list[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """Return the memory [B, S, D] of the samples' sources and its mask [B, S]; None without an
        encoder.
        """
        given = [torch.as_tensor(source) for source in sources if source is not None]
        if len(given) != (0 if self.encoder is None else len(sources)):
            need = 'only to an encoder' if self.encoder is None else 'for every sample'
            raise ValueError(
                f'a source must be given {need}, got one for {len(given)} of {len(sources)} samples'
            )
        if self.encoder is None:
            return None, None
        device = next(self.parameters()).device
        lengths = torch.tensor([len(source) for source in given], device=device)
        tokens = pad_sequence(given, batch_first=True).to(device)
        mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        return self.encoder(tokens, mask), mask

    def _check_head(self) -> None:
        embedding = self.decoder.embedding
        head = (self.head.embed_dims, self.head.num_values, self.head.token_shape)
        decoder = (self.decoder.embed_dims, embedding.num_values, embedding.token_shape)
        for what, ours, theirs in zip(
            ('embed_dims', 'number of values', 'token shape'), head, decoder, strict=True
        ):
            if ours != theirs:
                raise ValueError(
                    f'head and decoder must have the same {what}, got {ours} of '
                    f'{type(self.head).__name__} and {theirs} of {type(self.decoder).__name__} '
                    f'with {type(embedding).__name__}'
                )


def _counted(inputs: Tensor, samples: list[SequenceSample]) -> Tensor:
    """Return which tokens are predicted, bool [B, T]."""
    spans = [(s.get('num_context', 0), s.get('length', inputs.shape[1])) for s in samples]
    first, end = torch.tensor(spans, device=inputs.device).unsqueeze(-1).unbind(1)
    token = torch.arange(inputs.shape[1], device=inputs.device)
    counted = (token >= first) & (token < end)
    for row, sample in zip(counted, samples, strict=True):
        if 'predicted' in sample:
            row[: len(sample.predicted)] &= sample.predicted
    return counted
