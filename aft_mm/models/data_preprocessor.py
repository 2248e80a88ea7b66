from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aft_mm.checks import refuse
from aft_mm.openmmlab import BaseDataPreprocessor
from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample, UtteranceSample, samples_of


@MODELS.register_module()
class MaskedDataPreprocessor(BaseDataPreprocessor):
    """Append a mask channel to the batch of another preprocessor, 1 inside each image.

    ``[B, C, H, W] -> [B, C + 1, H, W]``, for AFTViT(with_mask_channel=True): detectors and
    segmentors only pass the batch to their backbone.

    The size of an image is the `img_shape` of its sample, else that of the input; padding of a
    `Pad` in the pipeline counts as image.

    Args:
        preprocessor: Config of the inner one, such as ``dict(type='mmdet.DetDataPreprocessor')``.
    """

    def __init__(self, preprocessor: dict[str, Any]) -> None:
        super().__init__()
        self.preprocessor = MODELS.build(preprocessor)

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return the inner preprocessor's batch with the mask as last channel."""
        # BaseModel.to() only updates the outer one.
        self.preprocessor.to(self.device)
        given = [image.shape[-2:] for image in data['inputs']]
        batch = self.preprocessor(data, training)
        inputs = batch['inputs']
        if not isinstance(inputs, Tensor) or inputs.dim() != 4:
            shape = list(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ValueError(f'preprocessor must give a batch [B, C, H, W], got {shape}')
        samples = batch.get('data_samples') or [{}] * len(given)
        sizes = [sample.get('img_shape', size) for sample, size in zip(samples, given, strict=True)]
        return {**batch, 'inputs': torch.cat([inputs, _inside(sizes, inputs)], dim=1)}


def _inside(sizes: list[Sequence[int]], inputs: Tensor) -> Tensor:
    """Return 1 in the first rows and columns of each image and 0 elsewhere, [B, 1, H, W]."""
    ends = torch.tensor([size[:2] for size in sizes], device=inputs.device)
    height, width = (torch.arange(n, device=inputs.device) for n in inputs.shape[2:])
    rows, columns = height < ends[:, :1], width < ends[:, 1:]
    return (rows[:, None, :, None] & columns[:, None, None, :]).to(inputs.dtype)


@MODELS.register_module()
class SequencePreprocessor(BaseDataPreprocessor):
    """Pad sequences of integer tokens with zeros to one batch, int64 [B, T] or [B, T, C]."""

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Collate a batch and move it to the device of the model.

        Args:
            data: ``dict(inputs=[[T] or [T, C], …], data_samples=[SequenceSample, …])``, samples
                optional.

        Returns:
            ``dict(inputs, data_samples)``; each sample has its ``length`` in tokens.

        Raises:
            ValueError: A sequence is empty, not of integers or does not fit the others or its
                sample.
        """
        inputs = list(data['inputs'])
        _check_tokens(inputs)
        samples = samples_of(inputs, data.get('data_samples'), SequenceSample)
        for tokens, sample in zip(inputs, samples, strict=True):
            context = sample.get('num_context', 0)
            if not 0 <= context < len(tokens):
                raise ValueError(
                    'num_context must be 0 or larger and leave a token to predict, '
                    f'got {context} of {len(tokens)} tokens'
                )
            sample.set_metainfo(dict(length=len(tokens)))
        # Tokens move as they are, often bytes.
        batch = pad_sequence(inputs, batch_first=True)
        return dict(inputs=self.cast_data(batch).long(), data_samples=self.cast_data(samples))


@MODELS.register_module()
class UtterancePreprocessor(BaseDataPreprocessor):
    """Pad features of utterances with zeros to one batch, float [B, T, F]."""

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Collate a batch and move it to the device of the model.

        Args:
            data: ``dict(inputs=[[T, F], …], data_samples=[UtteranceSample, …])``, samples optional.

        Returns:
            ``dict(inputs, data_samples)``; each sample has its ``length`` in frames.

        Raises:
            ValueError: Features have no frame, are not floats or do not fit each other or their
                samples.
        """
        inputs = list(data['inputs'])
        if not inputs:
            raise ValueError('inputs must be one utterance or more, got none')
        first = inputs[0]
        for features in inputs:
            fits = isinstance(features, Tensor) and features.is_floating_point()
            if not fits or features.dim() != 2 or not features.numel():
                refuse('inputs', 'floats [T, F] of one frame or more', features)
            if features.shape[1] != first.shape[1]:
                refuse('inputs', f'floats [T, {first.shape[1]}] as the first', features)
        samples = samples_of(inputs, data.get('data_samples'), UtteranceSample)
        for features, sample in zip(inputs, samples, strict=True):
            sample.set_metainfo(dict(length=len(features)))
        batch = pad_sequence(inputs, batch_first=True)
        return dict(inputs=self.cast_data(batch), data_samples=self.cast_data(samples))


def _check_tokens(inputs: list[Tensor]) -> None:
    if not inputs:
        raise ValueError('inputs must be one sequence or more, got none')
    first = inputs[0]
    for tokens in inputs:
        if not isinstance(tokens, Tensor):
            refuse('inputs', 'tensors of integers', tokens)
        fits = tokens.dim() and tokens.shape[1:] == first.shape[1:] and tokens.dtype == first.dtype
        if not fits or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(
                'inputs must be integers of one type, all [T] or all [T, C] of the same C, got '
                f'{tokens.dtype} {list(tokens.shape)} after {first.dtype} {list(first.shape)}'
            )
