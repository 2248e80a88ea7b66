"""From the samples of a data loader to a batch on the device."""

from mmengine.model import BaseDataPreprocessor
from torch.nn.utils.rnn import pad_sequence

from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample


@MODELS.register_module()
class SequencePreprocessor(BaseDataPreprocessor):
    """Pad sequences of integer tokens with zeros into one batch, int64 [B, T] or [B, T, C].

    Takes ``dict(inputs=[[T] or [T, C], …], data_samples=[SequenceSample, …])``; the samples may be
    left out. Every sample learns its ``length``. Raises ValueError for an empty sequence and for a
    ``num_context`` that leaves nothing to predict.
    """

    def forward(self, data: dict, training: bool = False) -> dict:
        """The batch and its samples on the device of the model."""
        inputs = list(data['inputs'])
        samples = data.get('data_samples') or [SequenceSample() for _ in inputs]
        for tokens, sample in zip(inputs, samples, strict=True):
            context = sample.get('num_context', 0)
            if not 0 <= context < len(tokens):
                raise ValueError(
                    'num_context must be 0 or larger and leave a token to predict, '
                    f'got {context} of {len(tokens)} tokens'
                )
            sample.set_metainfo(dict(length=len(tokens)))
        # Bytes travel to the device; only there they take eight bytes each.
        batch = pad_sequence(inputs, batch_first=True)
        return dict(inputs=self.cast_data(batch).long(), data_samples=self.cast_data(samples))
