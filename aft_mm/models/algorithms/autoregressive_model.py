"""The one model of every autoregressive task."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.dist import all_reduce, get_world_size
from mmengine.model import BaseModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aft_mm.checks import check_choice, check_config, refuse
from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample

from ..decoding import Hypothesis, beam_search, generate

MODES = ('tensor', 'loss', 'predict')


@MODELS.register_module()
class AutoregressiveModel(BaseModel):
    """``p(x) = Π_t p(x_t | x_<t)``, with an encoder ``p(x | source)``.

    Args:
        decoder: config, such as :class:`SequenceDecoder`'s.
        head: config of :class:`CategoricalHead` or :class:`LogisticMixtureHead`.
        encoder: config of what reads the ``source`` of the samples; the decoder then needs a cross
            mixer. With ``embedding=None`` it shares that of the decoder.
        data_preprocessor: config, :class:`SequencePreprocessor` unless given.
        init_cfg: see mmengine's BaseModule; the parts already initialise themselves.

    Raises ValueError where head and decoder differ in channels, in the number of values or in the
    shape of a token, and where stacks that share an embedding differ in channels.
    """

    def __init__(
        self,
        decoder: dict[str, Any],
        head: dict[str, Any],
        encoder: dict[str, Any] | None = None,
        data_preprocessor: dict[str, Any] | None = None,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        check_config('decoder', decoder)
        check_config('head', head)
        if encoder is not None:
            check_config('encoder', encoder)
        super().__init__(data_preprocessor or dict(type='aft_mm.SequencePreprocessor'), init_cfg)
        self.encoder = None if encoder is None else MODELS.build(encoder)
        self.decoder = MODELS.build(decoder)
        if self.encoder is not None and self.encoder.embedding is None:
            self._check_shared()
            self.encoder.share_embedding(self.decoder.embedding)
        self.head = MODELS.build(head)
        if getattr(self.head, 'tied', False):
            self.head.tie(self.decoder.embedding)
        self._check_head()

    def forward(
        self,
        inputs: Tensor,
        data_samples: list[SequenceSample] | None = None,
        mode: str = 'tensor',
    ) -> Tensor | dict[str, Tensor] | list[SequenceSample]:
        """inputs int64 [B, T] or [B, T, C], padded as :class:`SequencePreprocessor` does.

        'tensor' gives hidden [B, T, D]; 'loss' ``dict(loss=…)``, the mean of nats per dimension
        over all predicted tokens, of all processes if there are several; 'predict' the samples
        with their ``nats`` and ``num_dims``, computed in float64 from the logits on, and of a
        categorical head ``num_correct``. Raises ValueError for another mode, for another number of
        samples than sequences, for a token outside the vocabulary and for a sequence longer than
        the position table.
        """
        check_choice('mode', mode, MODES)
        if not isinstance(inputs, Tensor) or inputs.dim() < 2:
            refuse('inputs', 'a tensor of ints [B, T] or [B, T, C]', inputs)
        samples = [SequenceSample() for _ in inputs] if data_samples is None else data_samples
        if len(samples) != len(inputs):
            raise ValueError(
                f'data_samples must be one per sequence, got {len(samples)} for {len(inputs)}'
            )
        hidden = self.decoder(inputs, *self.encode([sample.get('source') for sample in samples]))
        if mode == 'tensor':
            return hidden
        counted = _counted(inputs, samples)
        num_dims = counted.sum(1) * self.head.dims_per_token
        if mode == 'loss':
            nats = self.head.loss(hidden, inputs).masked_fill(~counted, 0)
            # Tokens weigh the same on every process, however many it has.
            total = num_dims.sum()
            all_reduce(total)
            return dict(loss=nats.sum() * get_world_size() / total)
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
        """Sample sequences of `length` tokens, [B, length] or [B, length, C]; see
        :func:`aft_mm.models.decoding.generation.generate`.
        """
        return generate(self, length, *args, **kwargs)

    def beam_search(
        self, source: Sequence[Tensor], end_token: int, **options: Any
    ) -> list[list[Hypothesis]]:
        """The most probable sequences for each source; see
        :func:`aft_mm.models.decoding.generation.beam_search`.
        """
        return beam_search(self, source, end_token, **options)

    def encode(self, sources: list[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """The memory [B, S, D] of the source tokens and its mask [B, S]; None without an encoder.

        Raises ValueError for a source that is missing or has no use.
        """
        missing = [source is None for source in sources]
        if any(missing) if self.encoder is not None else not all(missing):
            need = 'for every sample' if self.encoder is not None else 'only to an encoder'
            raise ValueError(
                f'a source must be given {need}, got one for {missing.count(False)} of '
                f'{len(missing)} samples'
            )
        if self.encoder is None:
            return None, None
        device = next(self.parameters()).device
        sources = [torch.as_tensor(source) for source in sources]
        lengths = torch.tensor([len(source) for source in sources], device=device)
        tokens = pad_sequence(sources, batch_first=True).to(device)
        mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        return self.encoder(tokens, mask), mask

    def _check_shared(self) -> None:
        if self.encoder.embed_dims != self.decoder.embed_dims:
            raise ValueError(
                'encoder and decoder that share an embedding must have the same embed_dims, got '
                f'{self.encoder.embed_dims} and {self.decoder.embed_dims}'
            )

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
    """Which tokens are predicted, bool [B, T]: neither context nor padding."""
    spans = [(s.get('num_context', 0), s.get('length', inputs.shape[1])) for s in samples]
    first, end = torch.tensor(spans, device=inputs.device).unsqueeze(-1).unbind(1)
    token = torch.arange(inputs.shape[1], device=inputs.device)
    return (token >= first) & (token < end)
