from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aft_mm.checks import refuse
from aft_mm.openmmlab import BaseDataPreprocessor
from aft_mm.registry import MODELS
from aft_mm.structures import UtteranceSample


@MODELS.register_module()
class UtterancePreprocessor(BaseDataPreprocessor):
    """Pad features of utterances with zeros to one batch, float [B, T, F]."""

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Collate a batch and move it to the device of the model.

        Args:
            data: ``dict(inputs=[[T, F], …], data_samples=[UtteranceSample, …])``, samples optional.
            training: Not used.

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
        samples = data.get('data_samples')
        if samples is None:
            samples = [UtteranceSample() for _ in inputs]
        if len(samples) != len(inputs):
            raise ValueError(
                f'data_samples must be one per utterance, got {len(samples)} for {len(inputs)}'
            )
        for features, sample in zip(inputs, samples, strict=True):
            sample.set_metainfo(dict(length=len(features)))
        batch = pad_sequence(inputs, batch_first=True)
        return dict(inputs=self.cast_data(batch), data_samples=self.cast_data(samples))
